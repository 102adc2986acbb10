// Parts of attention, what they are made from, and how two of them become one.
//
// A piece of up to 256 tokens gives a query row a part: the largest score, the sum of exponentials and the weighted
// values. Parts are merged from left to right. What a row gets out of a piece depends on the row and the piece's tokens
// that it may see alone, so a token has the same bits as one row of a decode and as one of many in a chunk of a prompt.
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
    store_first(largest + row, now, count);
    store_first(sums + row, sum, count);
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

  // Whether tiles for few rows do.
  bool is_narrow() const { return num_rows <= NARROW_ROWS; }

  // Which token a row belongs to.
  unsigned token(int row) const { return unsigned(row) * inverse_group >> 16; }
  unsigned inverse_group = 65535 / group + 1;  // exact for the few hundred rows there can be
};

// Memory of one thread.
struct AttentionScratch {
  Word* keys;
  Word* values;
  Element* numbers;  // of a quantised cache
  float* scores;    // [MAX_ROWS][PIECE_TOKENS]
  Word* weights;    // [MAX_ROWS][weight_stride]
  Word* queries;    // [num_kv_heads][max_query_rows, up to ROW_MULTIPLE][padded_stride(head_dim)]
  size_t head_queries;
  Parts state;      // of max_query_rows

  static constexpr int WEIGHT_STRIDE = PIECE_TOKENS / WORD_ELEMENTS + STRIDE_PAD_WORDS;

  void place(Layout& layout, int num_kv_heads, int head_dim, int max_query_rows, bool is_quantised) {
    keys = layout.take<Word>(Piece::num_key_words(head_dim));
    values = layout.take<Word>(Piece::num_value_words(head_dim));
    numbers = is_quantised ? layout.take<Element>(2 * PIECE_TOKENS * size_t(head_dim)) : nullptr;
    scores = layout.take<float>(MAX_ROWS * PIECE_TOKENS);
    weights = layout.take<Word>(MAX_ROWS * WEIGHT_STRIDE);
    head_queries = size_t(round_up(max_query_rows, ROW_MULTIPLE)) * padded_stride(head_dim);
    queries = layout.take<Word>(num_kv_heads * head_queries);
    state.place(layout, max_query_rows, head_dim);
  }
};

}  // namespace trunkline
