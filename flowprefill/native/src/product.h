// Matrix products: rows of A, in words, with a weight that is packed in panels.
//
// A panel is 16 columns of B, for each word of the inner dimension; weights are stored as pairs of
// panels, [words of the inner dimension][2][16], so that few rows read long runs of memory. A sum runs
// over the words in their order in one fp32 lane, whatever rows and panels are computed beside it, so
// its bits depend on nothing else. Six rows by four panels keep 24 sums in registers, which hides
// latencies; with AVX2, which has fewer, six rows by one.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace flowprefill {

constexpr int MAX_ROWS = 6;
constexpr int MAX_PANELS = 4;
constexpr int PAIR = 2 * LANES;
constexpr int AHEAD = 32 * PAIR;  // words that are brought into the cache before they are read

// sums[r][j] += A row r x panel j. b: the panels' first words; STEP: from word to word of a panel.
// What will be read next lies `ahead` words behind and is brought into the cache meanwhile, line for
// line, if PREFETCH. Unrolled, so that the sums stay in registers.
template <class T, int STEP, bool PREFETCH, int ROWS, int PANELS>
__attribute__((always_inline)) inline void add_in_registers(Vec (&sums)[ROWS][PANELS],
                                                            const Word* a, long a_stride,
                                                            const Word* const* b, int num_words,
                                                            long ahead) {
#pragma GCC unroll 2
  for (int k = 0; k < num_words; ++k) {
    Words columns[PANELS];
#pragma GCC unroll 4
    for (int j = 0; j < PANELS; ++j) columns[j] = load_words(b[j] + k * STEP);
    if constexpr (PREFETCH) {
#pragma GCC unroll 4
      for (int j = 0; j < PANELS; ++j)
        _mm_prefetch(reinterpret_cast<const char*>(b[j] + (k * STEP + ahead)), _MM_HINT_T0);
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < PANELS; ++j)
        sums[r][j] = T::dot(sums[r][j], a[r * a_stride + k], columns[j]);
    }
  }
}

// The same for panels FIRST and on, as many at once as have registers.
template <class T, int STEP, bool PREFETCH, int FIRST = 0, int ROWS, int PANELS>
__attribute__((always_inline)) inline void add_products(Vec (&sums)[ROWS][PANELS], const Word* a,
                                                        long a_stride,
                                                        const Word* const (&b)[PANELS],
                                                        int num_words, long ahead = 0) {
  constexpr int COUNT = std::min(PANELS - FIRST, register_panels(ROWS));
  if constexpr (COUNT == PANELS) {
    add_in_registers<T, STEP, PREFETCH>(sums, a, a_stride, b, num_words, ahead);
  } else {
    Vec some[ROWS][COUNT];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < COUNT; ++j) some[r][j] = sums[r][FIRST + j];
    add_in_registers<T, STEP, PREFETCH>(some, a, a_stride, b + FIRST, num_words, ahead);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int j = 0; j < COUNT; ++j) sums[r][FIRST + j] = some[r][j];
    if constexpr (FIRST + COUNT < PANELS)
      add_products<T, STEP, PREFETCH, FIRST + COUNT>(sums, a, a_stride, b, num_words, ahead);
  }
}

// Sums of up to 6 rows x 4 panels, for those who go on with them.
struct SumTile {
  alignas(64) float rows[MAX_ROWS][MAX_PANELS * LANES];
  Vec vec(int row, int panel) const { return load(rows[row] + panel * LANES); }
};

template <class T, int ROWS, int PANELS>
void multiply_tile(SumTile& tile, const Word* a, const Word* b, int num_words) {
  const Word* panels[PANELS];
  for (int j = 0; j < PANELS; ++j)
    panels[j] = b + j / 2 * static_cast<long>(num_words) * PAIR + j % 2 * LANES;
  Vec sums[ROWS][PANELS];
  for (auto& row : sums)
    for (auto& sum : row) sum = zero();
  add_products<T, PAIR, (ROWS < MAX_ROWS)>(sums, a, num_words, panels, num_words, AHEAD);
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < PANELS; ++j) store(tile.rows[r] + j * LANES, sums[r][j]);
}

template <class T, int PANELS>
void multiply_rows(SumTile& tile, int num_rows, const Word* a, const Word* b, int num_words) {
  switch (num_rows) {
    case 1: return multiply_tile<T, 1, PANELS>(tile, a, b, num_words);
    case 2: return multiply_tile<T, 2, PANELS>(tile, a, b, num_words);
    case 3: return multiply_tile<T, 3, PANELS>(tile, a, b, num_words);
    case 4: return multiply_tile<T, 4, PANELS>(tile, a, b, num_words);
    case 5: return multiply_tile<T, 5, PANELS>(tile, a, b, num_words);
    default: return multiply_tile<T, 6, PANELS>(tile, a, b, num_words);
  }
}

// A [num_rows][num_words] x panels first..end of B; `first` is even. use(tile, row, num_rows, panel,
// num_panels) takes each tile of sums. Panels are the outer loop: four of them stay in the cache for
// all rows.
template <class T, class Use>
void multiply(const Word* a, int num_rows, int num_words, const Word* b, int first, int end,
              const Use& use) {
  SumTile tile;
  for (int panel = first; panel < end; panel += MAX_PANELS) {
    const int panels = std::min(MAX_PANELS, end - panel);
    const Word* group = b + static_cast<long>(panel) * num_words * LANES;
    int tiles_left = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int row = 0; row < num_rows; --tiles_left) {
      const int rows = (num_rows - row + tiles_left - 1) / tiles_left;  // evenly: 4 + 4, not 6 + 2
      const Word* from = a + static_cast<long>(row) * num_words;
      switch (panels) {
        case 1: multiply_rows<T, 1>(tile, rows, from, group, num_words); break;
        case 2: multiply_rows<T, 2>(tile, rows, from, group, num_words); break;
        case 3: multiply_rows<T, 3>(tile, rows, from, group, num_words); break;
        default: multiply_rows<T, 4>(tile, rows, from, group, num_words);
      }
      use(tile, row, rows, panel, panels);
      row += rows;
    }
  }
}

}  // namespace flowprefill
