// One decoder layer of the Llama kind, in the steps that slices are made of.
//
// Each step is shared among the members of a Team. Many rows: each thread takes blocks of rows and
// walks through all steps alone, in its own cache. Few rows: all threads share the panels of each
// product. A row's bits are the same either way (product.h).
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "product.h"
#include "slices.h"
#include "team.h"

namespace flowprefill {

// Shape of a model; matches flowprefill/native/library.py.
struct ModelShape {
  int32_t hidden, num_heads, num_kv_heads, head_dim, intermediate, block_size;
  float eps, query_scale;
  const float* cos;  // [max_len][head_dim]
  const float* sin;  // the same; the first half is negated
};

// One layer's weights and cache. Products are packed in panels; norms and biases are fp32.
struct LayerPointers {
  const float* input_norm;
  const Word* qkv;
  const float* qkv_bias;  // or null
  const float* q_norm;    // or null
  const float* k_norm;    // or null
  const Word* o_proj;
  const float* post_norm;
  const Word* gate_up;  // panels of gate and up alternate
  const Word* down;
  Word* k_cache;  // [16 tokens][kv head][words of head_dim][16 tokens]
  Word* v_cache;  // [16 tokens][kv head][16 dims][words of 16 tokens][16 dims]
};

// Memory that grows to what is asked for.
template <class X>
class Buffer {
 public:
  X* take(size_t count) {
    if (size_ < count) {
      size_ = count;
      memory_.reset(static_cast<X*>(std::aligned_alloc(64, (count * sizeof(X) + 63) / 64 * 64)));
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(X* memory) const { std::free(memory); }
  };
  std::unique_ptr<X, Free> memory_;
  size_t size_ = 0;
};

// What the steps of one thread, or of a team, hand each other.
struct Scratch {
  Buffer<float> sums;
  Buffer<Word> normed, activations;
  Buffer<LineState> states;
};

template <class T>
class Decoder {
 public:
  using Element = typename T::Element;

  Decoder(const ModelShape& shape, int num_threads)
      : shape_(shape), threads_(num_threads), own_(num_threads) {}

  // Rows of the residual stream -> queries, and K and V into the cache.
  void qkv(const LayerPointers& layer, const Element* hidden, Element* q, const int64_t* positions,
           const int64_t* slots, int num_rows) {
    const Rows rows{hidden, q, positions, slots, num_rows};
    by_rows_or_panels(num_rows, [&](Team& team, Scratch& shared, int start, int count) {
      const float* sums = project(team, shared, layer, rows, start, count);
      team.wait();
      team.split(count, [&](int r) {
        for (int head = 0; head < shape_.num_kv_heads; ++head)
          finish_head(layer, rows, start + r, head, sums + offset(r, qkv_size()), r > 0,
                      r + 1 < count);
      });
    });
  }

  // Queries -> attention output, in place, of num_rows rows of each of num_seqs sequences.
  void attention(const LayerPointers& layer, Element* q, const int64_t* const* tables,
                 const int64_t* first, int num_seqs, int num_rows) {
    threads_.run([&](int member) {
      Team team(threads_, member);
      attend(team, layer, q, tables, first, num_seqs, num_rows, [](int, int) {});
    });
  }

  // The same for one sequence, in slices (slices.h). Returns how many ran.
  int attention_slices(const LayerPointers& layer, Element* q, const int64_t* table, int64_t first,
                       const int32_t* ends, int num_slices, Interrupt* interrupt,
                       bool may_leave) {
    const auto block_rows = [](int rows) { return std::min(rows, ATTENTION_ROWS); };
    Slices slices(ends, num_slices, interrupt, may_leave, shape_.num_kv_heads, block_rows);
    threads_.run([&](int member) {
      for (Piece piece; slices.take(piece);)
        attend_rows(member, layer, q, table, first, piece.part, piece.start, piece.rows);
    });
    return slices.num_run();
  }

  // Attention output and residual stream -> residual stream behind the layer, in place, in slices
  // (slices.h). Returns how many ran.
  int mlp(const LayerPointers& layer, Element* hidden, const Element* attended,
          const int32_t* ends, int num_slices, Interrupt* interrupt, bool may_leave) {
    int num_wide = 0;  // slices that go by rows
    for (int start = 0; num_wide < num_slices && is_by_rows(ends[num_wide] - start); ++num_wide)
      start = ends[num_wide];
    if (num_wide == 0) {
      by_panels(ends[0], [&](Team& team, Scratch& shared, int start, int count) {
        feed_forward(team, shared, layer, hidden, attended, count);
      });
      return 1;
    }
    const auto rows_each = [&](int rows) { return block_rows(rows); };
    Slices slices(ends, num_wide, interrupt, may_leave, 1, rows_each);
    threads_.run([&](int member) {
      Team alone;
      for (Piece piece; slices.take(piece);) {
        prepare(own_[member], piece.rows);
        feed_forward(alone, own_[member], layer, hidden + offset(piece.start, shape_.hidden),
                     attended + offset(piece.start, q_size()), piece.rows);
      }
    });
    return slices.num_run();
  }

  // Some whole layers of a decode step: a row of each sequence.
  void layers(const LayerPointers* const* layers, int num_layers, Element* hidden, Element* q,
              const int64_t* positions, const int64_t* slots, const int64_t* const* tables,
              const int64_t* first, int num_seqs) {
    const Rows rows{hidden, q, positions, slots, num_seqs};
    prepare(shared_, num_seqs);
    threads_.run([&](int member) {
      Team team(threads_, member);
      for (int i = 0; i < num_layers; ++i) {
        const LayerPointers& layer = *layers[i];
        float* sums = project(team, shared_, layer, rows, 0, num_seqs);
        team.wait(first_panels(team, layer.o_proj, q_size(), shape_.hidden / LANES));
        attend(team, layer, q, tables, first, num_seqs, 1, [&](int seq, int head) {
          finish_head(layer, rows, seq, head, sums + offset(seq, qkv_size()), false, false);
        });
        team.wait(first_panels(team, layer.o_proj, q_size(), shape_.hidden / LANES));
        feed_forward(team, shared_, layer, hidden, q, num_seqs);
        if (i + 1 < num_layers)
          team.wait(first_panels(team, layers[i + 1]->qkv, shape_.hidden, qkv_size() / LANES));
      }
    });
  }

  // Residual stream -> logits [num_rows][vocab] fp32.
  void logits(const float* norm, const Word* lm_head, int vocab, const Element* hidden,
              int num_rows, float* out) {
    prepare(shared_, num_rows);
    threads_.run([&](int member) {
      Team team(threads_, member);
      const Word* normed = norm_rows(team, shared_, hidden, norm, num_rows);
      const int num_panels = (vocab + LANES - 1) / LANES;
      multiply_shared(team, normed, num_rows, shape_.hidden, lm_head, num_panels,
                      [&](const SumTile& tile, int row, int count, int panel, int panels) {
        for (int r = 0; r < count; ++r)
          for (int j = 0; j < panels; ++j) {
            const int column = (panel + j) * LANES;
            store_first(out + static_cast<size_t>(row + r) * vocab + column, vocab - column,
                        tile.vec(r, j));
          }
      });
    });
  }

 private:
  static constexpr int P = T::PER_WORD;
  static constexpr int MIN_ROWS_EACH = 24;  // rows of a thread that are worth working alone
  static constexpr int MAX_BLOCK_ROWS = 48;
  static constexpr int BLOCK_BYTES = 512 << 10;  // of what one thread's steps hand each other
  static constexpr int ATTENTION_ROWS = 16;
  static constexpr int REPEATED_ROWS = 16;  // rows whose norms are quicker repeated than waited for

  struct Rows {
    const Element* hidden;
    Element* q;
    const int64_t* positions;
    const int64_t* slots;
    int num_rows;
  };

  int q_size() const { return shape_.num_heads * shape_.head_dim; }
  int kv_size() const { return shape_.num_kv_heads * shape_.head_dim; }
  int qkv_size() const { return q_size() + 2 * kv_size(); }
  static size_t words(int elements) { return elements / P; }
  static size_t offset(int row, int width) { return static_cast<size_t>(row) * width; }

  // Take the memory that several threads will share before they start.
  void prepare(Scratch& scratch, int num_rows) {
    scratch.sums.take(offset(num_rows, std::max(qkv_size(), shape_.hidden)));
    scratch.normed.take(words(shape_.hidden) * num_rows);
    scratch.activations.take(words(shape_.intermediate) * num_rows);
  }

  bool is_by_rows(int num_rows) const { return num_rows >= MIN_ROWS_EACH * threads_.size(); }

  // work(team, shared, start, count): all rows by all threads, or blocks of rows by each alone.
  template <class Work>
  void by_rows_or_panels(int num_rows, const Work& work) {
    if (!is_by_rows(num_rows)) return by_panels(num_rows, work);
    const int rows = block_rows(num_rows);
    threads_.run([&](int member) {
      Team(threads_, member).split((num_rows + rows - 1) / rows, [&](int block) {
        Team alone;
        const int start = block * rows;
        prepare(own_[member], rows);
        work(alone, own_[member], start, std::min(rows, num_rows - start));
      });
    });
  }

  template <class Work>
  void by_panels(int num_rows, const Work& work) {
    prepare(shared_, num_rows);
    threads_.run([&](int member) {
      Team team(threads_, member);
      work(team, shared_, 0, num_rows);
    });
  }

  // Rows of a block: few enough for the cache, and the blocks a multiple of the threads.
  int block_rows(int num_rows) const {
    const int element = sizeof(Element);
    const int row_bytes = shape_.hidden * (4 + element) + shape_.intermediate * element;
    const int most = std::clamp(BLOCK_BYTES / row_bytes, MIN_ROWS_EACH, MAX_BLOCK_ROWS);
    int num_blocks = (num_rows + most - 1) / most;
    num_blocks = (num_blocks + threads_.size() - 1) / threads_.size() * threads_.size();
    return (num_rows + num_blocks - 1) / num_blocks;
  }

  // Pairs of panels that each member takes first, in one run; the others go to whoever is free.
  int first_pairs(const Team& team, int num_pairs) const {
    return team.is_alone() ? num_pairs : num_pairs * 3 / (4 * threads_.size());
  }

  template <class Use>
  void multiply_shared(Team& team, const Word* a, int num_rows, int inner, const Word* b,
                       int num_panels, const Use& use) {
    const int num_pairs = (num_panels + 1) / 2, run = first_pairs(team, num_pairs);
    const int num_runs = team.is_alone() ? 1 : threads_.size();
    team.split(num_runs + num_pairs - num_runs * run, [&](int i) {
      const int first = i < num_runs ? i * run : num_runs * run + i - num_runs;
      const int end = i < num_runs ? first + run : first + 1;
      multiply<T>(a, num_rows, static_cast<int>(words(inner)), b, 2 * first,
                  std::min(2 * end, num_panels), use);
    });
  }

  // Where this member's share of a product to come begins.
  Ahead first_panels(const Team& team, const Word* b, int inner, int num_panels) const {
    const size_t pair = words(inner) * PAIR;
    const int run = first_pairs(team, (num_panels + 1) / 2);
    return {b + team.member() * run * pair, run * pair * sizeof(Word)};
  }

  template <class Source>
  static Vec read(const Source* from) {
    if constexpr (std::is_same_v<Source, float>) return load(from);
    else return T::load(from);
  }

  // x / rms(x) * weight of each row.
  template <class Source>
  const Word* norm_rows(Team& team, Scratch& shared, const Source* x, const float* weight,
                        int count) {
    const size_t width = words(shape_.hidden);
    if (team.is_alone() || count > REPEATED_ROWS) {
      Word* out = shared.normed.take(width * count);
      team.split(count, [&](int r) { norm_row(x + offset(r, shape_.hidden), weight, out + width * r); });
      team.wait();
      return out;
    }
    Word* out = own_[team.member()].normed.take(width * count);
    for (int r = 0; r < count; ++r) norm_row(x + offset(r, shape_.hidden), weight, out + width * r);
    return out;
  }

  template <class Source>
  void norm_row(const Source* x, const float* weight, Word* out) const {
    Vec squares = zero();
    for (int i = 0; i < shape_.hidden; i += LANES) {
      const Vec v = read(x + i);
      squares = mul_add(v, v, squares);
    }
    const float mean = sum_of_lanes(squares) / shape_.hidden;
    const Vec scale = broadcast(1.0f / std::sqrt(mean + shape_.eps));
    auto* to = reinterpret_cast<Element*>(out);
    for (int i = 0; i < shape_.hidden; i += LANES) {
      const Vec v = mul(read(x + i), scale);
      T::store(to + i, mul(v, load(weight + i)));
    }
  }

  // Norm and qkv product: [count][qkv_size].
  float* project(Team& team, Scratch& shared, const LayerPointers& layer, const Rows& rows,
                 int start, int count) {
    float* sums = shared.sums.take(offset(count, qkv_size()));
    const Element* hidden = rows.hidden + offset(start, shape_.hidden);
    const Word* normed = norm_rows(team, shared, hidden, layer.input_norm, count);
    multiply_shared(team, normed, count, shape_.hidden, layer.qkv, qkv_size() / LANES,
                    [&](const SumTile& tile, int row, int num_rows, int panel, int panels) {
      for (int r = 0; r < num_rows; ++r)
        for (int j = 0; j < panels; ++j) {
          const int column = (panel + j) * LANES;
          Vec v = tile.vec(r, j);
          if (layer.qkv_bias) v = add(v, load(layer.qkv_bias + column));
          store(sums + offset(row + r, qkv_size()) + column, v);
        }
    });
    return sums;
  }

  // Of one row: norm and rotation of a KV head and the heads that share it, and where they go.
  // has_previous, has_next: the sums of the rows beside it are there too.
  void finish_head(const LayerPointers& layer, const Rows& rows, int row, int kv_head,
                   const float* sums, bool has_previous, bool has_next) const {
    const int dim = shape_.head_dim, group = shape_.num_heads / shape_.num_kv_heads;
    const int64_t position = rows.positions[row], slot = rows.slots[row];
    alignas(64) float x[MAX_HEAD_DIM];
    const Vec scale = broadcast(shape_.query_scale);
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      rotate_head(sums + head * dim, layer.q_norm, position, x);
      Element* to = rows.q + offset(row, q_size()) + head * dim;
      for (int i = 0; i < dim; i += LANES)
        T::store(to + i, mul(load(x + i), scale));
    }
    const size_t block_words = words(dim) * LANES;
    const size_t block = (slot / LANES * shape_.num_kv_heads + kv_head) * block_words;
    const float* k = sums + q_size() + kv_head * dim;
    rotate_head(k, layer.k_norm, position, x);
    store_k(x, layer.k_cache + block, slot % LANES);
    // V of a token shares words with that of the next one: together, if both are at hand
    const float* v = k + kv_size();
    const bool is_odd = slot % P == 1;
    const bool has_other =
        is_odd ? has_previous && rows.slots[row - 1] == slot - 1
               : P == 2 && has_next && rows.slots[row + 1] == slot + 1;
    if (!has_other) {
      const bool is_next_written = row + 1 < rows.num_rows && rows.slots[row + 1] == slot + 1;
      store_v(v, layer.v_cache + block, slot % LANES, !is_next_written);
    } else if (is_odd) {
      store_v_pair(v - qkv_size(), v, layer.v_cache + block, slot % LANES - 1);
    }
  }

  void rotate_head(const float* from, const float* norm, int64_t position, float* x) const {
    const int dim = shape_.head_dim, half = dim / 2;
    std::copy_n(from, dim, x);
    if (norm) {
      Vec squares = zero();
      for (int i = 0; i < dim; i += LANES) {
        const Vec v = load(x + i);
        squares = mul_add(v, v, squares);
      }
      const float mean = sum_of_lanes(squares) / dim;
      const Vec scale = broadcast(1.0f / std::sqrt(mean + shape_.eps));
      for (int i = 0; i < dim; i += LANES) {
        const Vec v = mul(load(x + i), scale);
        store(x + i, mul(v, load(norm + i)));
      }
    }
    const float* cos = shape_.cos + position * dim;
    const float* sin = shape_.sin + position * dim + half;
    for (int i = 0; i < half; i += LANES) {
      const int lanes = half - i;
      const Vec a = load_first(x + i, lanes);
      const Vec b = load_first(x + half + i, lanes);
      const Vec c = load_first(cos + i, lanes);
      const Vec s = load_first(sin + i, lanes);
      store_first(x + i, lanes, mul_subtract(b, s, mul(a, c)));
      store_first(x + half + i, lanes, mul_add(a, s, mul(b, c)));
    }
  }

  void store_k(const float* x, Word* block, int token) const {
    alignas(64) Element row[MAX_HEAD_DIM];
    for (int i = 0; i < shape_.head_dim; i += LANES)
      T::store(row + i, load(x + i));
    for (size_t w = 0; w < words(shape_.head_dim); ++w)
      std::memcpy(block + w * LANES + token, row + w * P, sizeof(Word));
  }

  void store_v_pair(const float* x, const float* y, Word* block, int token) const {
    for (int d = 0; d < shape_.head_dim; d += LANES) {
      const size_t panel = d / LANES * (LANES / P) + token / P;
      T::store_by_turns(block + panel * LANES, load(x + d), load(y + d));
    }
  }

  // clears_next: nobody has written the next token's V, which shares words with this one's.
  void store_v(const float* x, Word* block, int token, bool clears_next) const {
    alignas(64) Element row[LANES];
    for (int d = 0; d < shape_.head_dim; d += LANES) {
      T::store(row, load(x + d));
      const size_t panel = d / LANES * (LANES / P) + token / P;
      auto* to = reinterpret_cast<Element*>(block + panel * LANES) + token % P;
      for (int i = 0; i < LANES; ++i) to[i * P] = row[i];
      if (token % P + 1 < P && clears_next)
        for (int i = 0; i < LANES; ++i) to[i * P + 1] = 0;
    }
  }

  // before(seq, kv head) is called first by whoever works on them.
  template <class Before>
  void attend(Team& team, const LayerPointers& layer, Element* q, const int64_t* const* tables,
              const int64_t* first, int num_seqs, int num_rows, const Before& before) {
    const int rows_each = std::min(num_rows, ATTENTION_ROWS);
    const int num_parts = (num_rows + rows_each - 1) / rows_each;
    const int per_seq = num_parts * shape_.num_kv_heads;
    team.split(num_seqs * per_seq, [&](int i) {
      const int seq = i / per_seq, head = i % shape_.num_kv_heads;
      const int start = i % per_seq / shape_.num_kv_heads * rows_each;
      before(seq, head);
      attend_rows(team.member(), layer, q + offset(seq * num_rows, q_size()), tables[seq],
                  first[seq], head, start, std::min(rows_each, num_rows - start));
    });
  }

  // Rows start..start + count of one sequence and KV head; ATTENTION_ROWS at most.
  void attend_rows(int member, const LayerPointers& layer, Element* q, const int64_t* table,
                   int64_t first, int kv_head, int start, int count) {
    const int group = shape_.num_heads / shape_.num_kv_heads;
    const int head_words = static_cast<int>(words(shape_.head_dim));
    const LayerCache cache{layer.k_cache, layer.v_cache, shape_.num_kv_heads, head_words,
                           head_words * LANES, shape_.block_size / LANES};
    const Queries queries{reinterpret_cast<Word*>(q), static_cast<long>(words(q_size())), first,
                          table};
    LineState* states = own_[member].states.take(offset(ATTENTION_ROWS, group));
    if (shape_.head_dim == 64)
      HeadAttention<T, 64 / P>(cache, queries, kv_head, group).run(start, count, states);
    else
      HeadAttention<T, 0>(cache, queries, kv_head, group).run(start, count, states);
  }

  void feed_forward(Team& team, Scratch& shared, const LayerPointers& layer, Element* hidden,
                    const Element* attended, int count) {
    const int width = shape_.hidden, inner = shape_.intermediate;
    float* residual = shared.sums.take(offset(count, width));
    multiply_shared(team, reinterpret_cast<const Word*>(attended), count, q_size(), layer.o_proj,
                    width / LANES,
                    [&](const SumTile& tile, int row, int num_rows, int panel, int panels) {
      for (int r = 0; r < num_rows; ++r)
        for (int j = 0; j < panels; ++j) {
          const size_t at = offset(row + r, width) + (panel + j) * LANES;
          store(residual + at, add(read(hidden + at), tile.vec(r, j)));
        }
    });
    team.wait(first_panels(team, layer.gate_up, width, 2 * inner / LANES));
    const Word* normed = norm_rows(team, shared, residual, layer.post_norm, count);
    Word* activations = shared.activations.take(words(inner) * count);
    auto* activated = reinterpret_cast<Element*>(activations);
    multiply_shared(team, normed, count, width, layer.gate_up, 2 * inner / LANES,
                    [&](const SumTile& tile, int row, int num_rows, int panel, int panels) {
      for (int r = 0; r < num_rows; ++r)
        for (int j = 0; j < panels; j += 2) {
          const Vec v = mul(silu(tile.vec(r, j)), tile.vec(r, j + 1));
          T::store(activated + offset(row + r, inner) + (panel + j) / 2 * LANES, v);
        }
    });
    team.wait(first_panels(team, layer.down, inner, width / LANES));
    multiply_shared(team, activations, count, inner, layer.down, width / LANES,
                    [&](const SumTile& tile, int row, int num_rows, int panel, int panels) {
      for (int r = 0; r < num_rows; ++r)
        for (int j = 0; j < panels; ++j) {
          const size_t at = offset(row + r, width) + (panel + j) * LANES;
          const Vec v = add(load(residual + at), tile.vec(r, j));
          T::store(hidden + at, v);
        }
    });
  }

  const ModelShape shape_;
  Threads threads_;
  std::vector<Scratch> own_;  // of each thread
  Scratch shared_;
};

}  // namespace flowprefill
