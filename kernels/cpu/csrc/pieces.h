// Up to 256 tokens of one KV head, turned into panels: K with tokens as columns, V with head dimensions as columns.
#pragma once

#include "product.h"

namespace trunkline {

constexpr int PIECE_TOKENS = 256;

// Where K and V of a layer lie: [2 (K, V), num_blocks, num_kv_heads, block_size, head_dim].
struct LayerCache {
  Element* data;
  size_t values_offset;  // elements from K to V
  int num_kv_heads, block_size, head_dim;

  Element* key(int block, int kv_head, int offset) const {
    return data + ((size_t(block) * num_kv_heads + kv_head) * block_size + offset) * head_dim;
  }
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

  Piece(Word* keys, Word* values, int head_dim)
      : keys_(keys),
        values_(values),
        head_words_(head_dim / WORD_ELEMENTS),
        key_depth_(padded_depth(head_dim)),
        num_value_panels_((head_dim + PANEL - 1) / PANEL) {}

  int num_tokens() const { return num_tokens_; }
  int num_key_panels() const { return (num_tokens_ + PANEL - 1) / PANEL; }
  int num_value_panels() const { return num_value_panels_; }
  int key_depth() const { return key_depth_; }
  int value_depth() const { return round_up((num_tokens_ + WORD_ELEMENTS - 1) / WORD_ELEMENTS, VALUE_DEPTH_MULTIPLE); }
  const Word* key_panel(int i) const { return keys_ + size_t(i) * key_depth_ * PANEL; }
  const Word* value_panel(int i) const { return values_ + size_t(i) * (PIECE_TOKENS / WORD_ELEMENTS) * PANEL; }

  // Takes tokens [first, first + num_tokens) of a block table; slots behind them are not read.
  void fill(const LayerCache& cache, int kv_head, const int32_t* table, int first, int num_tokens) {
    num_tokens_ = num_tokens;
    const int size = cache.block_size;
    for (int i = 0; i < num_tokens; i++) {
      const int token = first + i;
      rows_[i] = cache.key(table[token / size], kv_head, token % size);
    }
    for (int i = 0; i < num_tokens; i += 16) {
      // the next tokens' keys are wanted soon, and these tokens' values when all keys are done
      prefetch_rows(i + 16, 0);
      prefetch_rows(i, cache.values_offset);
      fill_keys(i);
    }
    for (int i = num_tokens; i < value_depth() * WORD_ELEMENTS; i++) rows_[i] = nullptr;
    for (int i = 0; i < value_depth(); i++) fill_values(i, cache.values_offset);
  }

 private:
  void prefetch_rows(int first, size_t offset) const {
    const int end = first + 16 < num_tokens_ ? first + 16 : num_tokens_;
    for (int i = first; i < end; i++)
      for (int line = 0; line < head_words_ * 4; line += 64) prefetch((const char*)(rows_[i] + offset) + line);
  }

  // 16 columns of a key panel
  void fill_keys(int first) {
    Word* panel = keys_ + size_t(first / PANEL) * key_depth_ * PANEL + first % PANEL;
#ifdef __AVX512F__
    for (int k = 0; k < key_depth_; k += 16) {
      const __mmask16 mask = head_words_ - k >= 16 ? 0xffff : head_words_ > k ? (1 << (head_words_ - k)) - 1 : 0;
      __m512i r[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++)
        r[i] = first + i < num_tokens_ ? _mm512_maskz_loadu_epi32(mask, (const Word*)rows_[first + i] + k)
                                       : _mm512_setzero_si512();
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) _mm512_storeu_si512(panel + (k + i) * PANEL, r[i]);
    }
#else
    for (int i = 0; i < 16; i++) {
      const Word* row = first + i < num_tokens_ ? (const Word*)rows_[first + i] : nullptr;
      for (int k = 0; k < key_depth_; k++) panel[k * PANEL + i] = row && k < head_words_ ? row[k] : 0;
    }
#endif
  }

  // Word i of every column: a token's values, or those of two tokens interleaved
  void fill_values(int i, size_t values_offset) {
    const Element* rows[WORD_ELEMENTS];
    for (int e = 0; e < WORD_ELEMENTS; e++) {
      const Element* key = rows_[i * WORD_ELEMENTS + e];
      rows[e] = key ? key + values_offset : nullptr;
    }
    const int head_dim = head_words_ * WORD_ELEMENTS;
    for (int p = 0; p < num_value_panels_; p++) {
      Word* out = values_ + (size_t(p) * (PIECE_TOKENS / WORD_ELEMENTS) + i) * PANEL;
#if ELEMENT_IS_BF16 && defined(__AVX512BW__)
      const int left = head_dim - p * PANEL;
      const __mmask32 mask = left >= PANEL ? ~0u : (1u << left) - 1;
      const __m512i a = rows[0] ? _mm512_maskz_loadu_epi16(mask, rows[0] + p * PANEL) : _mm512_setzero_si512();
      const __m512i b = rows[1] ? _mm512_maskz_loadu_epi16(mask, rows[1] + p * PANEL) : _mm512_setzero_si512();
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
          elements[n * WORD_ELEMENTS + e] = rows[e] && dim < head_dim ? rows[e][dim] : Element(0);
        }
#endif
    }
  }

  Word* keys_;    // [8 panels][key_depth][32]
  Word* values_;  // [num_value_panels][256 / WORD_ELEMENTS][32]
  const int head_words_, key_depth_, num_value_panels_;
  int num_tokens_ = 0;
  const Element* rows_[PIECE_TOKENS];  // K of each token; null behind the last
};

}  // namespace trunkline
