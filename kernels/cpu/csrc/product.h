// Rows times a panel: the inner loop of linears and of attention.
//
// A panel holds 32 columns, [depth][32] words: word k of each column side by side. The rows' words are broadcast against
// it. Each result sums its own words from first to last in one accumulator, so a row has the same bits whatever rows
// are computed beside it.
#pragma once

#include <utility>

#include "simd.h"
#include "tiles.h"

namespace trunkline {

constexpr int PANEL = 32;
constexpr int PANEL_VECTORS = PANEL / LANES;
// Rows that one call multiplies, and the multiple of rows that is computed and stored whatever is asked for.
#if HAS_TILES
constexpr int MAX_ROWS = 2 * TILE_ROWS;
constexpr int ROW_MULTIPLE = TILE_ROWS;
#elif defined(__AVX512F__)
constexpr int MAX_ROWS = 12;  // 24 of 32 registers hold sums
constexpr int ROW_MULTIPLE = 1;
#else
constexpr int MAX_ROWS = 2;  // 8 of 16
constexpr int ROW_MULTIPLE = 1;
#endif
// Rows of words start a little apart from powers of two, which would all fall into the same sets of the cache.
constexpr int STRIDE_PAD_WORDS = 16;
// Depths are filled up with zeros, in words: those of weights and keys, and those of values.
constexpr int DEPTH_MULTIPLE = 16;
#if HAS_TILES
constexpr int VALUE_DEPTH_MULTIPLE = TILE_WORDS;
#else
constexpr int VALUE_DEPTH_MULTIPLE = 4;
#endif

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

#if HAS_TILES

// Up to 32 rows at once: two tiles of rows, two of columns.
template <int LINES>
INLINE void ask_for(Ahead ahead, int part) {
#pragma GCC unroll 16
  for (int i = 0; i < TILE_WORDS / 4; i++)
#pragma GCC unroll 4
    for (int line = 0; line < LINES; line++) prefetch(ahead.from + (part * TILE_WORDS / 4 + i) * ahead.stride + line * 64);
}

template <int LINES = 0>
static void product(int num_rows, const Word* a, size_t a_stride, const Word* panel, int depth, float* c,
                    size_t c_stride, Ahead ahead = {}) {
  const long row_bytes = a_stride * sizeof(Word), panel_bytes = PANEL * sizeof(Word), out_bytes = c_stride * sizeof(float);
  const Word* more = a + TILE_ROWS * a_stride;
  tile_zero<0>(), tile_zero<1>();
  if (num_rows <= TILE_ROWS) {
    for (int k = 0; k < depth; k += TILE_WORDS, panel += TILE_WORDS * PANEL) {
      tile_load<4>(a + k, row_bytes);
      tile_load<6>(panel, panel_bytes);
      ask_for<LINES>(ahead, 0), ask_for<LINES>(ahead, 1);
      tile_dot<0, 4, 6>();
      tile_load<7>(panel + TILE_WORDS, panel_bytes);
      ask_for<LINES>(ahead, 2), ask_for<LINES>(ahead, 3);
      tile_dot<1, 4, 7>();
      ahead.from += TILE_WORDS * ahead.stride;
    }
  } else {
    tile_zero<2>(), tile_zero<3>();
    for (int k = 0; k < depth; k += TILE_WORDS, panel += TILE_WORDS * PANEL) {
      tile_load<6>(panel, panel_bytes);
      ask_for<LINES>(ahead, 0);
      tile_load<4>(a + k, row_bytes);
      tile_dot<0, 4, 6>();
      ask_for<LINES>(ahead, 1);
      tile_load<5>(more + k, row_bytes);
      tile_dot<2, 5, 6>();
      tile_load<7>(panel + TILE_WORDS, panel_bytes);
      ask_for<LINES>(ahead, 2);
      tile_dot<1, 4, 7>();
      ask_for<LINES>(ahead, 3);
      tile_dot<3, 5, 7>();
      ahead.from += TILE_WORDS * ahead.stride;
    }
    tile_store<2>(c + TILE_ROWS * c_stride, out_bytes);
    tile_store<3>(c + TILE_ROWS * c_stride + TILE_WORDS, out_bytes);
  }
  tile_store<0>(c, out_bytes);
  tile_store<1>(c + TILE_WORDS, out_bytes);
}

#else

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

#endif

constexpr int num_row_blocks(int num_rows) { return (num_rows + MAX_ROWS - 1) / MAX_ROWS; }

// Calls body(first, count) for rows [0, num_rows) in blocks of at most MAX_ROWS, as even as can be.
template <class Body>
INLINE void for_row_blocks(int num_rows, Body&& body) {
  const int blocks = num_row_blocks(num_rows), parts = (num_rows + ROW_MULTIPLE - 1) / ROW_MULTIPLE;
  for (int i = 0; i < blocks; i++) {
    const int first = parts * i / blocks * ROW_MULTIPLE, end = parts * (i + 1) / blocks * ROW_MULTIPLE;
    body(first, (end < num_rows ? end : num_rows) - first);
  }
}

}  // namespace trunkline
