// Softmax attention of some query rows over a piece, on panels.
#pragma once

#include "parts.h"

namespace trunkline {

// Scores of one row to weights: 2^(score * scale - largest). The first `visible` of them count.
INLINE void soften(float* scores, Word* weights, int visible, int num_padded, float scale, float& most, float& total) {
  Element* out = (Element*)weights;
  if (visible <= 0) {
    most = LEAST, total = 0;
    for (int i = 0; i < num_padded; i += LANES) store_elements(out + i, Floats{});
    return;
  }
  const int end = round_up(visible, LANES);
  for (int i = visible; i < end; i++) scores[i] = LEAST;
  Floats best = all(LEAST);
  for (int i = 0; i < end; i += LANES) {
    const Floats x = load(scores + i);
    best = larger(x, best);
  }
  most = largest(best) * scale;
  const Floats minus_most = all(-most), factor = all(scale);
  Floats sums{};
  for (int i = 0; i < end; i += LANES) {
    const Floats x = exp2(fma(load(scores + i), factor, minus_most));
    sums += x;
    store_elements(out + i, x);
  }
  for (int i = end; i < num_padded; i += LANES) store_elements(out + i, Floats{});
  total = sum(sums);
}

// Attention over the piece is merged into the parts, or becomes them. first_token: the piece's first, counted as
// num_visible is.
template <bool MERGES>
static void attend(Piece& piece, int first_token, const Queries& queries, float scale,
                   const AttentionScratch& scratch, const Parts& parts) {
  const int num_padded = piece.value_depth() * WORD_ELEMENTS;
  alignas(64) float c[MAX_ROWS * PANEL];
  alignas(64) float most[round_up(MAX_ROWS, LANES)] = {}, totals[round_up(MAX_ROWS, LANES)] = {};
  float mine[round_up(MAX_ROWS, LANES)], theirs[round_up(MAX_ROWS, LANES)];
  for_row_blocks(queries.num_rows, [&](int first, int count) {
    const Word* q = queries.words + size_t(first) * queries.stride;
    for (int i = 0; i < piece.num_key_panels(); i++)
      product(count, q, queries.stride, piece.key_panel(i), piece.key_depth(), scratch.scores + i * PANEL,
              PIECE_TOKENS);
    for (int r = 0; r < count; r++) {
      const int seen = queries.num_visible + int(queries.token(first + r)) - first_token;
      soften(scratch.scores + r * PIECE_TOKENS, scratch.weights + r * scratch.WEIGHT_STRIDE,
             seen < piece.num_tokens() ? seen : piece.num_tokens(), num_padded, scale, most[r], totals[r]);
    }
    if (!MERGES) {
      memcpy(parts.largest + first, most, count * sizeof(float));
      memcpy(parts.sums + first, totals, count * sizeof(float));
      for (int p = 0; p < piece.num_value_panels(); p++)
        product(count, scratch.weights, scratch.WEIGHT_STRIDE, piece.value_panel(p), piece.value_depth(),
                parts.values + size_t(first) * parts.value_stride + p * PANEL, parts.value_stride);
      return;
    }
    for (int r = 0; r < count; r += LANES)
      parts.weigh(first + r, load(most + r), load(totals + r), count - r < LANES ? count - r : LANES, mine + r,
                  theirs + r);
    for (int p = 0; p < piece.num_value_panels(); p++) {
      product(count, scratch.weights, scratch.WEIGHT_STRIDE, piece.value_panel(p), piece.value_depth(), c, PANEL);
      for (int r = 0; r < count; r++) {
        float* to = parts.values + size_t(first + r) * parts.value_stride + p * PANEL;
        for (int j = 0; j < PANEL; j += LANES)
          store(to + j, fma(load(c + r * PANEL + j), all(theirs[r]), load(to + j) * mine[r]));
      }
    }
  });
}

}  // namespace trunkline
