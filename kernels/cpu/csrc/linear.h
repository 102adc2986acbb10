// Linear layers on weights packed once: a thread streams through its panels from first to last.
#pragma once

#include <algorithm>

#include "memory.h"
#include "product.h"
#include "threads.h"

namespace trunkline {

constexpr int NEAR_BYTES = 6144;

// Of few rows each thread computes some columns, so that weights are read once. Of many it computes all columns of its
// rows: they stay in its cache from one phase to the next.
constexpr bool is_split_by_rows(int num_rows) { return num_rows >= 256; }

INLINE Threads::Range share_rows(const Threads& threads, int thread, int num_rows) {
  if (!is_split_by_rows(num_rows)) return threads.share(thread, num_rows);
  const auto blocks = threads.share(thread, (num_rows + MAX_ROWS - 1) / MAX_ROWS);
  return {std::min(blocks.begin * MAX_ROWS, num_rows), std::min(blocks.end * MAX_ROWS, num_rows)};
}

struct Linear {
  Word* panels = nullptr;  // [num_panels][depth][32]
  int num_panels = 0;
  int depth = 0;

  void place(Layout& layout, int num_columns, int num_inputs) {
    num_panels = (num_columns + PANEL - 1) / PANEL;
    depth = padded_depth(num_inputs);
    panels = layout.take<Word>(size_t(num_panels) * depth * PANEL);
  }

  Word* panel(int i) const { return panels + size_t(i) * depth * PANEL; }

  // Fills a panel from its columns' weights, each num_inputs elements in a row; null: a column of zeros.
  void pack(int i, const Element* const columns[PANEL], int num_inputs) const {
    Element* out = (Element*)panel(i);
    for (int k = 0; k < depth; k++)
      for (int n = 0; n < PANEL; n++)
        for (int e = 0; e < WORD_ELEMENTS; e++) {
          const int input = k * WORD_ELEMENTS + e;
          *out++ = columns[n] && input < num_inputs ? columns[n][input] : Element(0);
        }
  }

  // Calls body(panel, first_row, num_rows, c) with c [num_rows][32] for what of panels and rows is the thread's.
  // a: [num_rows][a_stride] words.
  template <class Body>
  void run(const Threads& threads, int thread, const Word* a, size_t a_stride, int num_rows, Body&& body) const {
    // what a product wrote is read one product later: until then it is on its way to the first cache
    alignas(64) float c[2][MAX_ROWS * PANEL];
    struct {
      int panel = -1, first, count;
    } last;
    int turn = 0;
    Threads::Range mine = threads.share(thread, num_panels), rows{0, num_rows};
    if (is_split_by_rows(num_rows)) mine = {0, num_panels}, rows = share_rows(threads, thread, num_rows);
    const auto take = [&](int panel, int first, int count) {
      turn ^= 1;
      if (last.panel >= 0) body(last.panel, rows.begin + last.first, last.count, c[turn]);
      last = {panel, first, count};
    };
    num_rows = rows.end - rows.begin;
    a += rows.begin * a_stride;
    const size_t panel_bytes = size_t(depth) * PANEL * sizeof(Word);
    for (int i = mine.begin; i < mine.end; i++) {
      if (num_rows <= MAX_ROWS) {
        // the panel is read at the speed of memory: it is asked for shortly before
        product<2>(num_rows, a, a_stride, panel(i), depth, c[turn], PANEL,
                   {(const char*)panel(i) + NEAR_BYTES, PANEL * 4});
        take(i, 0, num_rows);
        continue;
      }
      // the first two blocks of rows ask for a half of the next panel each, so that memory works while they compute
      const char* next = (const char*)panel(i + 1);
      for_row_blocks(num_rows, [&](int first, int count) {
        const Word* block = a + first * a_stride;
        if (next < (const char*)panel(i + 2)) {
          product<1>(count, block, a_stride, panel(i), depth, c[turn], PANEL, {next, PANEL * sizeof(Word) / 2});
          next += panel_bytes / 2;
        } else {
          product(count, block, a_stride, panel(i), depth, c[turn], PANEL);
        }
        take(i, first, count);
      });
    }
    take(-1, 0, 0);
  }
};

}  // namespace trunkline
