// Rows times a panel: the inner loop of linears and of attention.
//
// A panel holds 32 columns, [depth][32] words: word k of each column side by side. The rows' words are broadcast against
// it. Each result sums its own words from first to last in one accumulator, so a row has the same bits whatever rows
// are computed beside it.
#pragma once

#include <utility>

#include "simd.h"

namespace trunkline {

constexpr int PANEL = 32;
constexpr int PANEL_VECTORS = PANEL / LANES;
#ifdef __AVX512F__
constexpr int MAX_ROWS = 12;  // 24 of 32 registers hold sums
#else
constexpr int MAX_ROWS = 2;  // 8 of 16
#endif
// Rows of words start a little apart from powers of two, which would all fall into the same sets of the cache.
constexpr int STRIDE_PAD_WORDS = 16;
// Depths are filled up with zeros, in words: those of weights and keys, and those of values.
constexpr int DEPTH_MULTIPLE = 16;
constexpr int VALUE_DEPTH_MULTIPLE = 4;

constexpr int padded_depth(int num_elements) {
  return round_up((num_elements + WORD_ELEMENTS - 1) / WORD_ELEMENTS, DEPTH_MULTIPLE);
}
// Words from row to row of a matrix with that many elements in a row.
constexpr int padded_stride(int num_elements) { return padded_depth(num_elements) + STRIDE_PAD_WORDS; }

// What a product asks for while it computes: for each of its words LINES lines at `from`, which moves on by `stride`
// bytes.
struct Ahead {
  const char* from;
  size_t stride;
};

template <int LINES, int ROWS>
static void product_of(const Word* a, size_t a_stride, const Word* panel, int depth, float* c, size_t c_stride,
                       Ahead ahead) {
  Floats sums[ROWS][PANEL_VECTORS] = {};
  for (int k = 0; k < depth; k++) {
    Factor columns[PANEL_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) columns[v] = factor(load_words(panel + v * LANES));
    for (int i = 0; i < LINES; i++) prefetch(ahead.from + i * 64);
    ahead.from += ahead.stride;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Factor x = factor(all_words(a[r * a_stride + k]));
#pragma GCC unroll 4
      for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] = dot(sums[r][v], x, columns[v]);
    }
    panel += PANEL;
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int v = 0; v < PANEL_VECTORS; v++) store(c + r * c_stride + v * LANES, sums[r][v]);
}

using Product = void (*)(const Word*, size_t, const Word*, int, float*, size_t, Ahead);

template <int LINES, int... R>
constexpr Product product_for(int num_rows, std::integer_sequence<int, R...>) {
  constexpr Product products[] = {product_of<LINES, R + 1>...};
  return products[num_rows - 1];
}

// c [num_rows][32] = rows of a [num_rows][depth words] times the panel. num_rows <= MAX_ROWS; strides in words.
template <int LINES = 0>
INLINE void product(int num_rows, const Word* a, size_t a_stride, const Word* panel, int depth, float* c,
                    size_t c_stride, Ahead ahead = {}) {
  product_for<LINES>(num_rows, std::make_integer_sequence<int, MAX_ROWS>())(a, a_stride, panel, depth, c, c_stride,
                                                                            ahead);
}

constexpr int num_row_blocks(int num_rows) { return (num_rows + MAX_ROWS - 1) / MAX_ROWS; }

// Calls body(first, count) for rows [0, num_rows) in blocks of at most MAX_ROWS, as even as can be.
template <class Body>
INLINE void for_row_blocks(int num_rows, Body&& body) {
  const int blocks = num_row_blocks(num_rows);
  for (int i = 0; i < blocks; i++) {
    const int first = num_rows * i / blocks;
    body(first, num_rows * (i + 1) / blocks - first);
  }
}

}  // namespace trunkline
