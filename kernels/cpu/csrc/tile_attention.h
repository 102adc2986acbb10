// Softmax attention of some query rows over a piece, on tiles.
//
// Scores are computed transposed, K times Q^T: a tile of 16 tokens is read where the cache has it, and 16 query rows are
// the lanes of every vector until the weights are written as tiles of rows again. The merge of parts is that of Rabe and
// Staats, "Self-attention Does Not Need O(n^2) Memory" (2021).
#pragma once

#include "parts.h"

namespace trunkline {

// 16 query rows as columns: [depth][16] words.
INLINE void transpose_queries(const Word* rows, int stride, int depth, Word* panel) {
  for (int k = 0; k < depth; k += TILE_WORDS) {
    __m512i r[TILE_ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < TILE_ROWS; i++) r[i] = _mm512_loadu_si512(rows + i * stride + k);
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < TILE_ROWS; i++) _mm512_store_si512(panel + (k + i) * TILE_WORDS, r[i]);
  }
}

constexpr int SCORES = PIECE_TOKENS * TILE_ROWS;  // of one tile of rows

// scores [tiles][256][16] of the piece's first tokens, up to a multiple of 32. panel: [tiles][depth][16].
template <int TILES>
INLINE void score(Piece& piece, const Word* panel, int num_tokens, float* scores) {
  const long key_bytes = piece.key_stride() * sizeof(Word);
  const Word* more = panel + piece.key_depth() * TILE_WORDS;
  for (int first = 0; first < num_tokens; first += 2 * TILE_ROWS, scores += 2 * TILE_ROWS * TILE_ROWS) {
    const Word *a = piece.key_rows(first), *b = piece.key_rows(first + TILE_ROWS);
    tile_zero<0>(), tile_zero<1>();
    if (TILES == 2) tile_zero<2>(), tile_zero<3>();
    for (int k = 0; k < piece.key_depth(); k += TILE_WORDS) {
      tile_load<6>(panel + k * TILE_WORDS, 64);
      tile_load<4>(a + k, key_bytes);
      tile_dot<0, 4, 6>();
      tile_load<5>(b + k, key_bytes);
      tile_dot<1, 5, 6>();
      if (TILES == 2) {
        tile_load<7>(more + k * TILE_WORDS, 64);
        tile_dot<2, 4, 7>();
        tile_dot<3, 5, 7>();
      }
    }
    piece.ask_ahead();
    tile_store<0>(scores, 64), tile_store<1>(scores + TILE_ROWS * TILE_ROWS, 64);
    if (TILES == 2)
      tile_store<2>(scores + SCORES, 64), tile_store<3>(scores + SCORES + TILE_ROWS * TILE_ROWS, 64);
  }
}

// Of two neighbouring tokens, rounded to bf16; neither is negative.
INLINE __m512i weight_words(Floats even, Floats odd) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(0xffff0000);
  const __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)even, half), 16);
  return _mm512_ternarylogic_epi32(upper, _mm512_add_epi32((__m512i)odd, half), low, 0xea);  // (upper & odd) | low
}

// Scores to weights, 2^(score * scale - largest), [16 rows][WEIGHT_STRIDE]. seen: how many tokens each row sees. Largest
// scores come back, times scale.
static Floats soften(Piece& piece, float* scores, Word* weights, Ints seen, int least_seen, int num_padded, float scale) {
  for (int i = least_seen; i < num_padded; i++) {
    const Floats x = load(scores + i * LANES);
    store(scores + i * LANES, i < seen ? x : all(LEAST));
  }
  Floats best[4] = {all(LEAST), all(LEAST), all(LEAST), all(LEAST)};
  for (int i = 0; i < num_padded; i += 4)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) best[j] = larger(load(scores + (i + j) * LANES), best[j]);
  const Floats largest = larger(larger(best[0], best[1]), larger(best[2], best[3]));
  // a row that sees nothing of the piece has weights of exactly 0
  const Floats minus_most = seen > 0 ? largest * -scale : Floats{};
  const Floats factor = all(scale);
  for (int first = 0; first < num_padded; first += 2 * TILE_WORDS) {
    __m512i r[TILE_ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < TILE_WORDS; i++) {
      const float* from = scores + (first + 2 * i) * LANES;
      const Floats even = exp2(fma(load(from), factor, minus_most));
      const Floats odd = exp2(fma(load(from + LANES), factor, minus_most));
      r[i] = weight_words(even, odd);
    }
    piece.ask_ahead();
    transpose(r);
    piece.ask_ahead();
#pragma GCC unroll 16
    for (int i = 0; i < TILE_ROWS; i++) _mm512_store_si512(weights + i * AttentionScratch::WEIGHT_STRIDE + first / 2, r[i]);
  }
  return seen > 0 ? largest * scale : all(LEAST);
}

// As the products see them, rounded.
INLINE float sum_of_weights(const Word* row, int num_padded) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  __m512 sums = _mm512_setzero_ps();
  for (int i = 0; i < num_padded / WORD_ELEMENTS; i += TILE_WORDS)
    sums = _mm512_dpbf16_ps(sums, (__m512bh)_mm512_load_si512(row + i), ones);
  return sum((Floats)sums);
}

// The same for up to four rows, whose tiles are narrow: scores [256][4], and a vector is 16 tokens of one row. A weight
// has the same bits either way.
INLINE void transpose_few_queries(const Word* rows, int stride, int depth, Word* panel) {
  for (int k = 0; k < depth; k++)
    for (int i = 0; i < NARROW_ROWS; i++) panel[k * NARROW_ROWS + i] = rows[i * stride + k];
}

INLINE void score_few(Piece& piece, const Word* panel, int num_tokens, float* scores) {
  const long key_bytes = piece.key_stride() * sizeof(Word), row_bytes = NARROW_ROWS * sizeof(float);
  for (int first = 0; first < num_tokens; first += 2 * TILE_ROWS, scores += 2 * TILE_ROWS * NARROW_ROWS) {
    const Word *a = piece.key_rows(first), *b = piece.key_rows(first + TILE_ROWS);
    tile_zero<2>(), tile_zero<3>();
    for (int k = 0; k < piece.key_depth(); k += TILE_WORDS) {
      tile_load<5>(panel + k * NARROW_ROWS, row_bytes);
      tile_load<6>(a + k, key_bytes);
      tile_dot<2, 6, 5>();
      tile_load<7>(b + k, key_bytes);
      tile_dot<3, 7, 5>();
    }
    piece.ask_ahead();
    tile_store<2>(scores, row_bytes), tile_store<3>(scores + TILE_ROWS * NARROW_ROWS, row_bytes);
  }
}

static float soften_few(const float* scores, int row, Word* weights, int seen, int num_padded, float scale) {
  const __m512i low = _mm512_add_epi32(_mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28),
                                       _mm512_set1_epi32(row));
  const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Floats own[PIECE_TOKENS / LANES];
  Floats best = all(LEAST);
  for (int i = 0; i < num_padded; i += LANES, scores += LANES * NARROW_ROWS) {
    const __m512 first = _mm512_permutex2var_ps(_mm512_load_ps(scores), low, _mm512_load_ps(scores + 16));
    const __m512 second = _mm512_permutex2var_ps(_mm512_load_ps(scores + 32), low, _mm512_load_ps(scores + 48));
    const Floats x = (Floats)_mm512_shuffle_f32x4(first, second, 0x44);
    own[i / LANES] = lanes + i < seen ? x : all(LEAST);
    best = larger(own[i / LANES], best);
  }
  const float most = seen > 0 ? largest(best) : 0;
  const Floats factor = all(scale), minus_most = all(most * -scale);
  for (int i = 0; i < num_padded; i += LANES) {
    const __m512i x = (__m512i)exp2(fma(own[i / LANES], factor, minus_most));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x8000)), 16);
    _mm256_store_si256((__m256i*)((Element*)weights + i), _mm512_cvtepi32_epi16(rounded));
  }
  return seen > 0 ? most * scale : LEAST;
}

// Weights of rows [first, first + count) over the piece's first num_padded tokens. seen: of each row. most, totals: largest
// scores and sums of weights.
INLINE void weigh(Piece& piece, const Queries& queries, int first, int count, const int* seen, int num_padded, float scale,
                  const AttentionScratch& scratch, float* most, float* totals) {
  alignas(64) Word panel[MAX_ROWS * MAX_HEAD_DIM / WORD_ELEMENTS];
  const Word* rows = queries.words + size_t(first) * queries.stride;
  const int depth = piece.key_depth();
  if (queries.is_narrow()) {
    transpose_few_queries(rows, queries.stride, depth, panel);
    score_few(piece, panel, num_padded, scratch.scores);
    for (int r = 0; r < count; r++) {
      piece.ask_ahead();
      most[r] = soften_few(scratch.scores, r, scratch.weights + r * scratch.WEIGHT_STRIDE, seen[r], num_padded, scale);
    }
  } else {
    const int tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
    for (int t = 0; t < tiles; t++)
      transpose_queries(rows + t * TILE_ROWS * queries.stride, queries.stride, depth, panel + t * depth * TILE_WORDS);
    if (tiles == 2)
      score<2>(piece, panel, num_padded, scratch.scores);
    else
      score<1>(piece, panel, num_padded, scratch.scores);
    for (int t = 0, row = 0; t < tiles; t++, row += TILE_ROWS)
      store(most + row, soften(piece, scratch.scores + t * SCORES, scratch.weights + row * scratch.WEIGHT_STRIDE,
                               *(const Ints*)(seen + row), seen[row], num_padded, scale));
  }
  for (int r = 0; r < count; r++) totals[r] = sum_of_weights(scratch.weights + r * scratch.WEIGHT_STRIDE, num_padded);
}

// Attention over the piece is merged into the parts, or becomes them. first_token: the piece's first, counted as
// num_visible is.
template <bool MERGES>
static void attend(Piece& piece, int first_token, const Queries& queries, float scale, const AttentionScratch& scratch,
                   const Parts& parts) {
  alignas(64) float c[MAX_ROWS * PANEL], most[MAX_ROWS] = {}, totals[MAX_ROWS] = {};
  alignas(64) int seen[MAX_ROWS];
  float mine[MAX_ROWS], theirs[MAX_ROWS];
  const int seen_before = queries.num_visible - first_token;
  for_row_blocks(queries.num_rows, [&](int first, int count) {
    for (int i = 0; i < round_up(count, TILE_ROWS); i++)
      seen[i] = std::clamp(seen_before + int(queries.token(first + i)), 0, piece.num_tokens());
    const int num_padded = round_up(seen[count - 1], 2 * TILE_WORDS);
    if (MERGES && !num_padded) return;
    weigh(piece, queries, first, count, seen, num_padded, scale, scratch, most, totals);
    for (int r = 0; r < count; r += LANES) {
      const int num = std::min(LANES, count - r);
      if (MERGES) {
        parts.weigh(first + r, load(most + r), load(totals + r), num, mine + r, theirs + r);
      } else {
        store_first(parts.largest + first + r, load(most + r), num);
        store_first(parts.sums + first + r, load(totals + r), num);
      }
    }
    for (int p = 0; p < piece.num_value_panels(); p++) {
      float* values = parts.values + size_t(first) * parts.value_stride + p * PANEL;
      piece.ask_ahead();
      if (!MERGES) {
        product(count, scratch.weights, scratch.WEIGHT_STRIDE, piece.value_panel(p), num_padded / WORD_ELEMENTS, values,
                parts.value_stride);
        continue;
      }
      product(count, scratch.weights, scratch.WEIGHT_STRIDE, piece.value_panel(p), num_padded / WORD_ELEMENTS, c, PANEL);
      for (int r = 0; r < count; r++, values += parts.value_stride)
        for (int j = 0; j < PANEL; j += LANES)
          store(values + j, fma(load(c + r * PANEL + j), all(theirs[r]), load(values + j) * mine[r]));
    }
  });
}

}  // namespace trunkline
