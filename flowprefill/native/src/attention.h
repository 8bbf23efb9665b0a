// Causal attention of some query rows of one sequence over its packed KV cache, for one KV head.
//
// FlashAttention-2 (https://arxiv.org/abs/2307.08691, Algorithm 1) over key tiles of 64 at fixed
// absolute edges. Scores, maximum, sum and accumulator are fp32; probabilities are rounded to the
// cache's type. Each row's arithmetic depends on its own position alone: a tile that lies wholly
// beyond it is skipped or masked, and a masked key adds exactly 0.
//
// K and V of 16 tokens are panels (product.h): K [words of head_dim][16 tokens], V for each 16
// dimensions [words of 16 tokens][16 dimensions].
#pragma once

#include <algorithm>

#include "product.h"

namespace flowprefill {

constexpr int KEY_TILE = 64;
constexpr int KEY_CHUNK = 512;  // of K and V, that stays in the cache for all rows of a call
constexpr int TILE_BLOCKS = KEY_TILE / LANES;

// Where K and V of one layer lie.
struct LayerCache {
  const Word* k;
  const Word* v;
  int num_kv_heads;
  int head_words;   // words of one head of one token
  int block_words;  // of one head of 16 tokens
  int sub_blocks;   // groups of 16 tokens in a block
};

// One sequence's rows, and how its query rows lie in memory.
struct Queries {
  Word* q;         // rows of all heads; overwritten by the output
  long row_words;  // from row to row
  long first;      // position of the first row
  const int64_t* table;  // block ids
};

constexpr int MAX_HEAD_DIM = 256;

// Running results of one line (one row of one head) between two chunks of keys.
struct LineState {
  alignas(64) float out[MAX_HEAD_DIM];
  alignas(64) float total[LANES];
  float maximum;
};

constexpr float LOWEST = -1e30f;  // finite, so that differences are

// HEAD_WORDS: of the cache, or 0 = read there; 2% quicker where the compiler knows the number.
template <class T, int HEAD_WORDS>
class HeadAttention {
 public:
  HeadAttention(const LayerCache& cache, const Queries& queries, int kv_head, int group)
      : cache_(cache), queries_(queries), kv_head_(kv_head), group_(group) {}

  // Rows first..first + num_rows of the queries, for all heads of the group.
  // states: num_rows * group of them.
  void run(int first, int num_rows, LineState* states) {
    const int first_line = first * group_, num_lines = num_rows * group_;
    for (int i = 0; i < num_lines; ++i) reset(states[i]);
    const long num_keys = queries_.first + first + num_rows;
    for (long start = 0; start < num_keys; start += KEY_CHUNK) {
      find_blocks(start, std::min(num_keys, start + KEY_CHUNK));
      for (int i = 0; i < num_lines; i += MAX_ROWS)
        run_lines(first_line + i, std::min(MAX_ROWS, num_lines - i), start, states + i);
    }
    for (int i = 0; i < num_lines; ++i) write(states[i], first_line + i);
  }

 private:
  static constexpr int P = T::PER_WORD;
  static constexpr int BLOCK_KEY_WORDS = LANES / P;           // words of 16 tokens
  static constexpr int V_PANEL = BLOCK_KEY_WORDS * LANES;     // of 16 dimensions of 16 tokens
  static constexpr int Q_STRIDE = MAX_HEAD_DIM + LANES;       // no power of 2: cache sets
  static constexpr int CHUNK_BLOCKS = KEY_CHUNK / LANES;

  template <int LINES>
  struct Lines {
    alignas(64) Word q[LINES][Q_STRIDE];
    long num_keys[LINES];  // that each sees
    LineState* states;
  };

  template <int LINES>
  struct Probabilities {  // of one tile
    alignas(64) Word words[LINES][KEY_TILE / P];
    float decay[LINES];  // factor of what was summed before
  };

  int head_dim() const { return cache_.head_words * P; }
  Word* query(int line) const {
    const int head = kv_head_ * group_ + line % group_;
    return queries_.q + line / group_ * queries_.row_words + head * cache_.head_words;
  }

  void reset(LineState& state) const {
    state.maximum = LOWEST;
    store(state.total, zero());
    std::fill(state.out, state.out + head_dim(), 0.0f);
  }

  void write(const LineState& state, int line) const {
    const Vec scale = broadcast(1.0f / sum_of_lanes(load(state.total)));
    auto* to = reinterpret_cast<typename T::Element*>(query(line));
    for (int d = 0; d < head_dim(); d += LANES)
      T::store(to + d, mul(load(state.out + d), scale));
  }

  // Where K and V of a chunk lie. Behind the last token there may be no block: the chunk's first
  // one stands in, whose keys are then masked.
  void find_blocks(long start, long end) {
    for (int i = 0; i < CHUNK_BLOCKS + TILE_BLOCKS; ++i) {
      const long token = start + i * LANES;
      const long group = (token < end ? token : start) / LANES;
      const long slot = queries_.table[group / cache_.sub_blocks] * cache_.sub_blocks +
                        group % cache_.sub_blocks;
      blocks_[i] = (slot * cache_.num_kv_heads + kv_head_) * cache_.block_words;
    }
  }

  void run_lines(int line, int num_lines, long start, LineState* states) const {
    switch (num_lines) {
      case 1: return run_chunk<1>(line, start, states);
      case 2: return run_chunk<2>(line, start, states);
      case 3: return run_chunk<3>(line, start, states);
      case 4: return run_chunk<4>(line, start, states);
      case 5: return run_chunk<5>(line, start, states);
      default: return run_chunk<6>(line, start, states);
    }
  }

  template <int LINES>
  void run_chunk(int line, long start, LineState* states) const {
    Lines<LINES> lines;
    for (int r = 0; r < LINES; ++r) {
      std::copy_n(query(line + r), cache_.head_words, lines.q[r]);
      lines.num_keys[r] = queries_.first + (line + r) / group_ + 1 - start;
    }
    lines.states = states;
    const int num_keys = static_cast<int>(std::min<long>(KEY_CHUNK, lines.num_keys[LINES - 1]));
    for (int key = 0; key < num_keys; key += KEY_TILE) {
      Probabilities<LINES> probs;
      find_probabilities(lines, key, probs);
      add_all_values(lines, key, std::min(KEY_TILE, num_keys - key), probs);
    }
  }

  // Of the keys of one tile. On its own: inlined into the loop, its sums do not stay in registers.
  template <int LINES>
  __attribute__((noinline)) void find_probabilities(const Lines<LINES>& lines, int key, Probabilities<LINES>& probs) const {
    const Word* k[TILE_BLOCKS];
    for (int i = 0; i < TILE_BLOCKS; ++i) k[i] = cache_.k + blocks_[key / LANES + i];
    Vec scores[LINES][TILE_BLOCKS];
    for (auto& row : scores)
      for (auto& score : row) score = zero();
    add_products<T, LANES, true>(scores, lines.q[0], Q_STRIDE, k, HEAD_WORDS ? HEAD_WORDS : cache_.head_words,
                          cache_.v - cache_.k);
    for (int r = 0; r < LINES; ++r) {
      const long visible = lines.num_keys[r] - key;
      if (visible < KEY_TILE) mask(scores[r], static_cast<int>(std::max(0L, visible)));
      probs.decay[r] = softmax(scores[r], lines.states[r], probs.words[r]);
    }
  }

  // num_keys: nobody may have written those behind.
  template <int LINES>
  void add_all_values(const Lines<LINES>& lines, int key, int num_keys,
                      const Probabilities<LINES>& probs) const {
    const int key_words = (num_keys + P - 1) / P;
    const long* blocks = blocks_ + key / LANES;
    for (int d = 0; d < head_dim(); d += MAX_PANELS * LANES) {
      switch (std::min(MAX_PANELS, (head_dim() - d) / LANES)) {
        case 1: add_values<1>(probs, blocks, d, key_words, lines.states); break;
        case 2: add_values<2>(probs, blocks, d, key_words, lines.states); break;
        case 3: add_values<3>(probs, blocks, d, key_words, lines.states); break;
        default: add_values<4>(probs, blocks, d, key_words, lines.states);
      }
    }
  }

  static void mask(Vec (&scores)[TILE_BLOCKS], int visible) {
    for (int j = 0; j < TILE_BLOCKS; ++j) {
      const int seen = std::clamp(visible - j * LANES, 0, LANES);
      scores[j] = keep_first(seen, scores[j], broadcast(LOWEST));
    }
  }

  // Scores -> probabilities; returns the factor of what was summed before.
  static float softmax(const Vec (&scores)[TILE_BLOCKS], LineState& state, Word* probs) {
    const Vec largest = greater_of(greater_of(scores[0], scores[1]),
                                      greater_of(scores[2], scores[3]));
    float decay = 1.0f;
    if (any_greater(largest, broadcast(state.maximum))) {
      const float maximum = greatest_lane(largest);
      const Vec below = broadcast(state.maximum - maximum);
      decay = first_lane(exp2_of_negative(below));
      state.maximum = maximum;
    }
    Vec total = mul(load(state.total), broadcast(decay));
    const Vec maximum = broadcast(state.maximum);
    auto* to = reinterpret_cast<typename T::Element*>(probs);
    for (int j = 0; j < TILE_BLOCKS; j += 2) {
      const Vec p0 = exp2_of_negative(sub(scores[j], maximum));
      const Vec p1 = exp2_of_negative(sub(scores[j + 1], maximum));
      total = add(total, add(p0, p1));
      T::store_two(to + j * LANES, p0, p1);
    }
    store(state.total, total);
    return decay;
  }

  template <int PANELS, int LINES>
  void add_values(const Probabilities<LINES>& probs, const long* blocks, int dim, int key_words,
                  LineState* states) const {
    Vec sums[LINES][PANELS];
    for (int r = 0; r < LINES; ++r)
      for (int j = 0; j < PANELS; ++j)
        sums[r][j] = mul(load(states[r].out + dim + j * LANES),
                                   broadcast(probs.decay[r]));
    for (int i = 0; i * BLOCK_KEY_WORDS < key_words; ++i) {
      const Word* panels[PANELS];
      for (int j = 0; j < PANELS; ++j)
        panels[j] = cache_.v + blocks[i] + (dim / LANES + j) * V_PANEL;
      const long next_k = cache_.k - cache_.v + blocks[i + TILE_BLOCKS] - blocks[i];
      // Keys that nobody wrote yet may hold anything, even NaN: they are not read.
      const int words_left = std::min(BLOCK_KEY_WORDS, key_words - i * BLOCK_KEY_WORDS);
      add_products<T, LANES, true>(sums, probs.words[0] + i * BLOCK_KEY_WORDS, KEY_TILE / P, panels, words_left,
                            next_k);
    }
    for (int r = 0; r < LINES; ++r)
      for (int j = 0; j < PANELS; ++j)
        store(states[r].out + dim + j * LANES, sums[r][j]);
  }

  const LayerCache& cache_;
  const Queries& queries_;
  const int kv_head_;
  const int group_;
  long blocks_[CHUNK_BLOCKS + TILE_BLOCKS];  // words from the start of K, and of V
};

}  // namespace flowprefill
