// The functions that Python calls (flowprefill/native/library.py). Pointers are trusted.

#include <cstdlib>
#include <cstring>

#include "decoder.h"

namespace flowprefill {

class AnyDecoder {
 public:
  virtual ~AnyDecoder() = default;
  virtual void qkv(const LayerPointers&, const void* hidden, void* q, const int64_t* positions,
                   const int64_t* slots, int num_rows) = 0;
  virtual void attention(const LayerPointers&, void* q, const int64_t* const* tables,
                         const int64_t* first, int num_seqs, int num_rows) = 0;
  virtual int attention_slices(const LayerPointers&, void* q, const int64_t* table, int64_t first,
                               const int32_t* ends, int num_slices, Interrupt*, bool may_leave) = 0;
  virtual int mlp(const LayerPointers&, void* hidden, const void* attended, const int32_t* ends,
                  int num_slices, Interrupt*, bool may_leave) = 0;
  virtual void layers(const LayerPointers* const*, int num_layers, void* hidden, void* q,
                      const int64_t* positions, const int64_t* slots,
                      const int64_t* const* tables, const int64_t* first, int num_seqs) = 0;
  virtual void logits(const float* norm, const Word* lm_head, int vocab, const void* hidden,
                      int num_rows, float* out) = 0;
};

template <class T>
class DecoderOf final : public AnyDecoder {
 public:
  DecoderOf(const ModelShape& shape, int num_threads) : decoder_(shape, num_threads) {}
  void qkv(const LayerPointers& layer, const void* hidden, void* q, const int64_t* positions,
           const int64_t* slots, int num_rows) override {
    decoder_.qkv(layer, in(hidden), out(q), positions, slots, num_rows);
  }
  void attention(const LayerPointers& layer, void* q, const int64_t* const* tables,
                 const int64_t* first, int num_seqs, int num_rows) override {
    decoder_.attention(layer, out(q), tables, first, num_seqs, num_rows);
  }
  int attention_slices(const LayerPointers& layer, void* q, const int64_t* table, int64_t first,
                       const int32_t* ends, int num_slices, Interrupt* interrupt,
                       bool may_leave) override {
    return decoder_.attention_slices(layer, out(q), table, first, ends, num_slices, interrupt,
                                     may_leave);
  }
  int mlp(const LayerPointers& layer, void* hidden, const void* attended, const int32_t* ends,
          int num_slices, Interrupt* interrupt, bool may_leave) override {
    return decoder_.mlp(layer, out(hidden), in(attended), ends, num_slices, interrupt, may_leave);
  }
  void layers(const LayerPointers* const* layers, int num_layers, void* hidden, void* q,
              const int64_t* positions, const int64_t* slots, const int64_t* const* tables,
              const int64_t* first, int num_seqs) override {
    decoder_.layers(layers, num_layers, out(hidden), out(q), positions, slots, tables, first,
                    num_seqs);
  }
  void logits(const float* norm, const Word* lm_head, int vocab, const void* hidden, int num_rows,
              float* result) override {
    decoder_.logits(norm, lm_head, vocab, in(hidden), num_rows, result);
  }

 private:
  using Element = typename T::Element;
  static const Element* in(const void* p) { return static_cast<const Element*>(p); }
  static Element* out(void* p) { return static_cast<Element*>(p); }
  Decoder<T> decoder_;
};

}  // namespace flowprefill

using flowprefill::AnyDecoder;
using flowprefill::Interrupt;
using flowprefill::LayerPointers;
using flowprefill::ModelShape;
using flowprefill::Word;

extern "C" {

AnyDecoder* flowprefill_open(const ModelShape* shape, int is_bf16, int num_threads) {
#ifdef __AVX512BF16__
  if (is_bf16) return new flowprefill::DecoderOf<flowprefill::Bf16>(*shape, num_threads);
#endif
  return new flowprefill::DecoderOf<flowprefill::Fp32>(*shape, num_threads);
}

void flowprefill_close(AnyDecoder* decoder) { delete decoder; }

void flowprefill_qkv(AnyDecoder* decoder, const LayerPointers* layer, const void* hidden, void* q,
                     const int64_t* positions, const int64_t* slots, int num_rows) {
  decoder->qkv(*layer, hidden, q, positions, slots, num_rows);
}

void flowprefill_attention(AnyDecoder* decoder, const LayerPointers* layer, void* q,
                           const int64_t* const* tables, const int64_t* first, int num_seqs,
                           int num_rows) {
  decoder->attention(*layer, q, tables, first, num_seqs, num_rows);
}

int flowprefill_attention_slices(AnyDecoder* decoder, const LayerPointers* layer, void* q,
                                 const int64_t* table, int64_t first, const int32_t* ends,
                                 int num_slices, Interrupt* interrupt, int may_leave) {
  return decoder->attention_slices(*layer, q, table, first, ends, num_slices, interrupt,
                                   may_leave);
}

int flowprefill_mlp(AnyDecoder* decoder, const LayerPointers* layer, void* hidden,
                    const void* attended, const int32_t* ends, int num_slices,
                    Interrupt* interrupt, int may_leave) {
  return decoder->mlp(*layer, hidden, attended, ends, num_slices, interrupt, may_leave);
}

void flowprefill_layers(AnyDecoder* decoder, const LayerPointers* const* layers, int num_layers,
                        void* hidden, void* q, const int64_t* positions, const int64_t* slots,
                        const int64_t* const* tables, const int64_t* first, int num_seqs) {
  decoder->layers(layers, num_layers, hidden, q, positions, slots, tables, first, num_seqs);
}

void flowprefill_logits(AnyDecoder* decoder, const float* norm, const Word* lm_head, int vocab,
                        const void* hidden, int num_rows, float* out) {
  decoder->logits(norm, lm_head, vocab, hidden, num_rows, out);
}

}  // extern "C"
