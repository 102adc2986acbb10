// Up to 256 tokens of one KV head, turned into panels: K with tokens as columns, V with head dimensions as columns.
#pragma once

#include <algorithm>
#include <vector>

#include "product.h"
#include "records.h"

namespace trunkline {

constexpr int PIECE_TOKENS = 256;

// Where K and V of a layer lie: [2 (K, V), num_blocks, num_kv_heads] records.
struct LayerCache {
  char* data;
  size_t values_offset, record_bytes;  // bytes: from K to V, of a record
  int num_kv_heads;
  RecordShape shape;

  bool is_quantised() const { return shape.format != KVFormat::ELEMENTS; }
  char* record(int block, int kv_head) const {
    return data + (size_t(block) * num_kv_heads + kv_head) * record_bytes;
  }
  // Where it is not quantised.
  Element* key(int block, int kv_head, int offset) const {
    return (Element*)record(block, kv_head) + size_t(offset) * shape.head_dim;
  }
};

alignas(64) static const Element ZEROS[MAX_HEAD_DIM] = {};

// Tokens [first, first + num_tokens) of a block table, for one KV head, or for some that follow one another.
struct Span {
  LayerCache cache;
  int kv_head;
  const int32_t* table;
  int first, num_tokens;
  int num_heads = 1;

  // Calls body(token, record, offset, count) for the span's tokens, by runs that lie side by side, from `offset` on in
  // K's record; V's is values_offset behind.
  template <class Body>
  INLINE_METHOD void for_runs(Body&& body) const {
    int block = first / cache.shape.block_size, offset = first % cache.shape.block_size;
    for (int token = 0; token < num_tokens; block++, offset = 0) {
      const int count = std::min(cache.shape.block_size - offset, num_tokens - token);
      body(token, cache.record(table[block], kv_head), offset, count);
      token += count;
    }
  }
};

// Asks memory for a span's K, then V, a few lines at a time between other work: it takes no more at once than that, and
// runs of lines that are long come fastest.
class Asking {
 public:
  // All of it in about so many steps, at least one; a span may be empty.
  void begin(const Span& span, int num_steps) {
    parts_.clear();
    part_ = 0;
    if (span.num_tokens == 0) return;
    const LayerCache& cache = span.cache;
    const size_t head_bytes = cache.record_bytes, token_bytes = cache.shape.token_bytes();
    int num_lines = 0;
    for (size_t plane : {size_t(0), cache.values_offset})
      span.for_runs([&](int, const char* record, int offset, int count) {
        const char* from = record + plane + offset * token_bytes;
        // heads of a whole block lie side by side
        const bool is_whole = count == cache.shape.block_size;
        const size_t num_bytes = is_whole ? head_bytes : count * token_bytes;
        for (int i = 0; i < (is_whole ? 1 : span.num_heads); i++)
          parts_.push_back({from + i * head_bytes, from + i * head_bytes + (is_whole ? span.num_heads * head_bytes : num_bytes)});
        num_lines += int(span.num_heads * ((num_bytes + 63) / 64));
      });
    lines_per_step_ = (num_lines + num_steps - 1) / num_steps;
  }

  INLINE_METHOD void step() {
    for (int i = 0; i < lines_per_step_ && part_ < parts_.size(); i++) {
      Part& part = parts_[part_];
      prefetch(part.from);
      part.from += 64;
      part_ += part.from >= part.end;
    }
  }

 private:
  struct Part {
    const char *from, *end;
  };
  size_t part_ = 0;
  int lines_per_step_ = 0;
  std::vector<Part> parts_;
};

#ifdef __AVX512F__
// Rows become columns: 16 x 16 words.
INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
  }
}
#endif

class Piece {
 public:
  static size_t num_key_words(int head_dim) { return size_t(PIECE_TOKENS) * padded_depth(head_dim); }
  static size_t num_value_words(int head_dim) {
    return size_t(round_up(head_dim, PANEL)) * PIECE_TOKENS / WORD_ELEMENTS;
  }

  // numbers: [2 (K, V)][PIECE_TOKENS][head_dim] for those of a quantised cache, else null.
  Piece(Word* keys, Word* values, Element* numbers, int head_dim)
      : keys_(keys),
        values_(values),
        numbers_(numbers),
        head_dim_(head_dim),
        head_words_(head_dim / WORD_ELEMENTS),
        key_depth_(padded_depth(head_dim)),
        num_value_panels_((head_dim + PANEL - 1) / PANEL) {}

  void ask_ahead() { asking_.step(); }

  int num_tokens() const { return num_tokens_; }
  int num_key_panels() const { return (num_tokens_ + PANEL - 1) / PANEL; }
  int num_value_panels() const { return num_value_panels_; }
  int key_depth() const { return key_depth_; }
#if HAS_TILES
  // Keys of 16 tokens, `key_stride` words apart: where they lie or, if heads or blocks do not fit into tiles, copied and
  // filled up with zeros. Behind the last token they may be anything.
  const Word* key_rows(int first) const {
    return reads_in_place_ ? (const Word*)keys_of_[first < num_tokens_ ? first : 0] : keys_ + size_t(first) * key_depth_;
  }
  int key_stride() const { return reads_in_place_ ? head_words_ : key_depth_; }
#endif
  int value_depth() const { return round_up((num_tokens_ + WORD_ELEMENTS - 1) / WORD_ELEMENTS, VALUE_DEPTH_MULTIPLE); }
  const Word* key_panel(int i) const { return keys_ + size_t(i) * key_depth_ * PANEL; }
  const Word* value_panel(int i) const { return values_ + size_t(i) * (PIECE_TOKENS / WORD_ELEMENTS) * PANEL; }

  // Steps of asking while so many tokens are filled in and so many rows attend to them.
  static int num_steps(int num_tokens, int num_rows) {
#if HAS_TILES
    // for each 32 tokens two while values are filled in, two of weights for each 16 rows, one of scores for each 32
    return (num_tokens + 31) / 32 * (2 + 5 * ((num_rows + TILE_ROWS - 1) / TILE_ROWS) / 2);
#else
    return 2 * ((num_tokens + 15) / 16);
#endif
  }

  // From now on memory is asked for `next` in so many steps.
  void ask(const Span& next, int num_steps) { asking_.begin(next, num_steps); }

  // Takes the span's tokens; slots behind them are not read.
  void fill(const Span& span) {
    num_tokens_ = span.num_tokens;
    if (span.cache.is_quantised()) {
      if (span.cache.shape.format == KVFormat::INT8)
        read_numbers<KVFormat::INT8>(span);
      else
        read_numbers<KVFormat::FP8>(span);
    } else {
      span.for_runs([&](int token, const char* record, int offset, int count) {
        const Element* key = (const Element*)record + offset * head_dim_;
        const Element* value = (const Element*)(record + span.cache.values_offset) + offset * head_dim_;
        for (int i = 0; i < count; i++) {
          keys_of_[token + i] = key + i * head_dim_;
          values_of_[token + i] = value + i * head_dim_;
        }
      });
    }
    for (int i = num_tokens_; i < round_up(num_tokens_, PANEL); i++) keys_of_[i] = values_of_[i] = ZEROS;
#if HAS_TILES
    // numbers of a quantised cache lie side by side whatever the blocks are
    reads_in_place_ = head_words_ % TILE_WORDS == 0 &&
                      (span.cache.is_quantised() || span.cache.shape.block_size % TILE_ROWS == 0);
    if (!reads_in_place_)
      for (int i = 0; i < round_up(num_tokens_, PANEL); i++) copy_key(i);
#else
    for (int i = 0; i < num_tokens_; i += 16) {
      ask_ahead();
      fill_keys(i);
    }
#endif
    for (int i = 0; i < value_depth(); i++) {
      if (i % (16 / WORD_ELEMENTS) == 0) ask_ahead();
      fill_values(i);
    }
  }

 private:
  template <KVFormat F>
  void read_numbers(const Span& span) {
    Element* const values = numbers_ + PIECE_TOKENS * head_dim_;
    span.for_runs([&](int token, const char* record, int offset, int count) {
      read_record<F>(span.cache.shape, record, offset, count, numbers_ + token * head_dim_);
      read_record<F>(span.cache.shape, record + span.cache.values_offset, offset, count, values + token * head_dim_);
    });
    for (int i = 0; i < num_tokens_; i++) {
      keys_of_[i] = numbers_ + i * head_dim_;
      values_of_[i] = values + i * head_dim_;
    }
  }

#if HAS_TILES
  void copy_key(int token) {
    Word* to = keys_ + size_t(token) * key_depth_;
    memcpy(to, keys_of_[token], head_words_ * sizeof(Word));
    memset(to + head_words_, 0, (key_depth_ - head_words_) * sizeof(Word));
  }
#else
  // 16 columns of a key panel
  void fill_keys(int first) {
    Word* panel = keys_ + size_t(first / PANEL) * key_depth_ * PANEL + first % PANEL;
#ifdef __AVX512F__
    for (int k = 0; k < key_depth_; k += 16) {
      const int left = head_words_ - k;
      __m512i r[16];
      if (left >= 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512((const Word*)keys_of_[first + i] + k);
      } else {
        const __mmask16 mask = left > 0 ? (1 << left) - 1 : 0;
        for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, (const Word*)keys_of_[first + i] + k);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + (k + i) * PANEL, r[i]);
    }
#else
    for (int i = 0; i < 16; i++) {
      const Word* row = (const Word*)keys_of_[first + i];
      for (int k = 0; k < key_depth_; k++) panel[k * PANEL + i] = k < head_words_ ? row[k] : 0;
    }
#endif
  }
#endif

  // Word i of every column: a token's values, or those of two tokens interleaved
  void fill_values(int i) {
    const Element* const* rows = values_of_ + i * WORD_ELEMENTS;
    for (int p = 0; p < num_value_panels_; p++) {
      Word* out = values_ + (size_t(p) * (PIECE_TOKENS / WORD_ELEMENTS) + i) * PANEL;
#if ELEMENT_IS_BF16 && defined(__AVX512BW__)
      const int left = head_dim_ - p * PANEL;
      const __mmask32 mask = left >= PANEL ? ~0u : (1u << left) - 1;
      const __m512i a = _mm512_maskz_loadu_epi16(mask, rows[0] + p * PANEL);
      const __m512i b = _mm512_maskz_loadu_epi16(mask, rows[1] + p * PANEL);
      const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
      const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
      _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, low, b));
      _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi16(a, high, b));
#else
      Element* elements = (Element*)out;
      for (int n = 0; n < PANEL; n++)
        for (int e = 0; e < WORD_ELEMENTS; e++) {
          const int dim = p * PANEL + n;
          elements[n * WORD_ELEMENTS + e] = dim < head_dim_ ? rows[e][dim] : Element(0);
        }
#endif
    }
  }

  Word* keys_;    // [8 panels][key_depth][32], or [256][key_depth]
  Word* values_;  // [num_value_panels][256 / WORD_ELEMENTS][32]
  Element* numbers_;
  const int head_dim_, head_words_, key_depth_, num_value_panels_;
  int num_tokens_ = 0;
  Asking asking_;
#if HAS_TILES
  bool reads_in_place_ = false;
#endif
  const Element* keys_of_[PIECE_TOKENS];  // of each token; zeros behind the last
  const Element* values_of_[PIECE_TOKENS];
};

}  // namespace trunkline
