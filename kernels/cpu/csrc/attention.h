// Softmax attention of some query rows over the tokens of one KV head, piece by piece.
//
// Each piece of 256 tokens gives a part of its own: the largest score, the sum of exponentials and the weighted values.
// Parts are merged from left to right. What a row gets out of a piece depends on the row and the piece's tokens that it
// may see alone, so a token has the same bits as one row of a decode and as one of many in a chunk of a prompt.
#pragma once

#include "pieces.h"

namespace trunkline {

constexpr float LEAST = -1e30f;  // below any score; not -inf, as its difference with itself has to be a number

// Parts of `capacity` rows: scores are logarithms to base 2.
struct Parts {
  float* largest;  // [capacity]
  float* sums;     // [capacity]
  float* values;   // [capacity, up to ROW_MULTIPLE][value_stride], not divided by the sums
  int value_stride;

  static int padded_rows(int num_rows) { return round_up(num_rows, LANES) + LANES; }

  void place(Layout& layout, int num_rows, int head_dim) {
    value_stride = round_up(head_dim, PANEL);
    largest = layout.take<float>(padded_rows(num_rows));
    sums = layout.take<float>(padded_rows(num_rows));
    values = layout.take<float>(size_t(round_up(num_rows, ROW_MULTIPLE)) * value_stride);
  }

  void clear(int num_rows) const {
    for (int i = 0; i < num_rows; i++) largest[i] = LEAST, sums[i] = 0;
    memset(values, 0, size_t(num_rows) * value_stride * sizeof(float));
  }

  // Merges rows of other parts into the rows from `row` on.
  void merge(int row, const Parts& other, int other_row, int num_rows) const {
    float mine[LANES], theirs[LANES];
    for (int first = 0; first < num_rows; first += LANES) {
      const int count = num_rows - first < LANES ? num_rows - first : LANES;
      weigh(row + first, load(other.largest + other_row + first), load(other.sums + other_row + first), count, mine,
            theirs);
      for (int i = 0; i < count; i++) {
        float* to = values + size_t(row + first + i) * value_stride;
        const float* from = other.values + size_t(other_row + first + i) * value_stride;
        for (int j = 0; j < value_stride; j += LANES)
          store(to + j, fma(load(from + j), all(theirs[i]), load(to + j) * mine[i]));
      }
    }
  }

  // Merges largest scores and sums of up to LANES rows; the factors of both sides' values come back.
  void weigh(int row, Floats other_largest, Floats other_sums, int count, float mine[LANES], float theirs[LANES]) const {
    const Floats old = load(largest + row);
    const Floats now = larger(old, other_largest);
    const Floats a = exp2(old - now), b = exp2(other_largest - now);
    const Floats sum = fma(other_sums, b, load(sums + row) * a);
    store(mine, a);
    store(theirs, b);
    for (int i = 0; i < count; i++) largest[row + i] = now[i], sums[row + i] = sum[i];
  }
};

// Queries of one KV head, a row for each token and head of the group: [num_rows][stride] words.
struct Queries {
  Word* words;
  int stride;
  int num_rows;
  int group;
  // Tokens that the first token's rows see; the next token's see one more, and so on.
  int num_visible;
};

// Memory of one thread.
struct AttentionScratch {
  Word* keys;
  Word* values;
  float* scores;    // [MAX_ROWS][PIECE_TOKENS]
  Word* weights;    // [MAX_ROWS][weight_stride]
  Word* queries;    // [max_query_rows, up to ROW_MULTIPLE][padded_stride(head_dim)]
  Parts state;      // of max_query_rows

  static constexpr int WEIGHT_STRIDE = PIECE_TOKENS / WORD_ELEMENTS + STRIDE_PAD_WORDS;

  void place(Layout& layout, int head_dim, int max_query_rows) {
    keys = layout.take<Word>(Piece::num_key_words(head_dim));
    values = layout.take<Word>(Piece::num_value_words(head_dim));
    scores = layout.take<float>(MAX_ROWS * PIECE_TOKENS);
    weights = layout.take<Word>(MAX_ROWS * WEIGHT_STRIDE);
    queries = layout.take<Word>(size_t(round_up(max_query_rows, ROW_MULTIPLE)) * padded_stride(head_dim));
    state.place(layout, max_query_rows, head_dim);
  }
};

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
static void attend(const Piece& piece, int first_token, const Queries& queries, float scale,
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
      const int seen = queries.num_visible + (first + r) / queries.group - first_token;
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
