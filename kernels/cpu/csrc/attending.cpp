// The attention phases of a step: nodes, then runs.
#include "decoder.h"

namespace trunkline {

// Copies the heads of one group of row `from` to rows of the queries, from `to` on.
void Decoder::gather(const Queries& queries, int from, int to, int kv_head) const {
  const size_t head_bytes = shape_.head_dim * sizeof(Element);
  for (int i = 0; i < group_; i++) {
    char* row = (char*)(queries.words + size_t(to + i) * queries.stride);
    memcpy(row, queries_.row(from) + (kv_head * group_ + i) * shape_.head_dim, head_bytes);
    memset(row + head_bytes, 0, queries.stride * sizeof(Word) - head_bytes);
  }
}

static Span span_of(const LayerCache& cache, const NodeTask& task, int num_heads = 1) {
  return {cache, task.kv_head, task.table, task.first_token, task.num_tokens, num_heads};
}

void Decoder::attend_nodes(int thread, Tiles& tiles, const LayerCache& cache) const {
  const AttentionScratch& scratch = scratch_[thread];
  Piece piece(scratch.keys, scratch.values, scratch.numbers, shape_.head_dim);
  const std::vector<NodeTask>& tasks = plan_.node_tasks;
  std::vector<const int32_t*> gathered(shape_.num_kv_heads);
  const int end = plan_.node_bounds[thread + 1];
  for (int i = plan_.node_bounds[thread], first = i; i < end; i++) {
    const NodeTask& task = tasks[i];
    Queries queries{scratch.queries + task.kv_head * scratch.head_queries, padded_stride(shape_.head_dim),
                    task.num_rows * group_, group_, 1 << 30};
    if (gathered[task.kv_head] != task.table)
      for (int r = 0; r < task.num_rows; r++) gather(queries, task.rows[r], r * group_, task.kv_head);
    gathered[task.kv_head] = task.table;
    if (i == first) {
      const int beside = Plan::num_beside(tasks, i, end), next = first = i + beside;
      piece.ask(next < end ? span_of(cache, tasks[next], Plan::num_beside(tasks, next, end)) : Span{},
                beside * Piece::num_steps(task.num_tokens, queries.num_rows));
    }
    piece.fill(span_of(cache, task));
    tiles.set_narrow(queries.is_narrow());
    attend<false>(piece, task.first_token, queries, scale(), scratch, parts_[task.parts]);
  }
}

static Span span_of(const LayerCache& cache, const TrunklineStep& step, const RunTask& task, int first, int num_heads = 1) {
  const int num_tokens = step.run_tokens[task.run] - (step.run_rows[task.run] - task.first_row - task.num_rows);
  return {cache, task.kv_head, step.block_ids + step.run_tables[task.run], first,
          std::min(PIECE_TOKENS, num_tokens - first), num_heads};
}

void Decoder::attend_runs(int thread, Tiles& tiles, const LayerCache& cache, const TrunklineStep& step) const {
  const AttentionScratch& scratch = scratch_[thread];
  const Parts& parts = scratch.state;
  Piece piece(scratch.keys, scratch.values, scratch.numbers, shape_.head_dim);
  const std::vector<RunTask>& tasks = plan_.run_tasks;
  const int end = plan_.run_bounds[thread + 1];
  for (int i = plan_.run_bounds[thread], first_task = i; i < end; i++) {
    const RunTask& task = tasks[i];
    const int first_row = plan_.first_rows[task.run] + task.first_row;
    const int first_visible = step.run_tokens[task.run] - step.run_rows[task.run] + task.first_row + 1;
    const int num_tokens = first_visible + task.num_rows - 1;
    Queries queries{scratch.queries, padded_stride(shape_.head_dim), task.num_rows * group_, group_, first_visible};
    for (int r = 0; r < task.num_rows; r++) gather(queries, first_row + r, r * group_, task.kv_head);
    parts.clear(queries.num_rows);
    for (const Share* share = plan_.shares_begin(task.run); share != plan_.shares_end(task.run); share++)
      for (int p = 0; p < share->num_pieces; p++)
        parts.merge(0, parts_[share->first_parts + task.kv_head * share->num_pieces + p],
                    (share->reader + task.first_row) * group_, queries.num_rows);
    const bool is_one_piece = num_tokens - task.first_token <= PIECE_TOKENS;
    for (int first = task.first_token; first < num_tokens; first += PIECE_TOKENS) {
      const Span span = span_of(cache, step, task, first);
      const int steps = Piece::num_steps(span.num_tokens, queries.num_rows);
      if (first + PIECE_TOKENS < num_tokens) {
        piece.ask(span_of(cache, step, task, first + PIECE_TOKENS), steps);
      } else if (i == first_task || !is_one_piece) {
        const int beside = is_one_piece ? Plan::num_beside(tasks, i, end) : 1, next = i + beside;
        const bool asks_for_all = next < end && (is_one_piece || !tasks[next].is_beside(task));
        piece.ask(next < end ? span_of(cache, step, tasks[next], tasks[next].first_token,
                                       asks_for_all ? Plan::num_beside(tasks, next, end) : 1)
                             : Span{},
                  beside * steps);
        first_task = next;
      }
      piece.fill(span);
      tiles.set_narrow(queries.is_narrow());
      attend<true>(piece, first, queries, scale(), scratch, parts);
    }
    for (int r = 0; r < queries.num_rows; r++) {
      Element* out = attended_.row(first_row + r / group_) + (task.kv_head * group_ + r % group_) * shape_.head_dim;
      const float* values = parts.values + size_t(r) * parts.value_stride;
      const float factor = 1.f / parts.sums[r];
      int j = 0;
      for (; j + LANES <= shape_.head_dim; j += LANES) store_elements(out + j, load(values + j) * factor);
      for (; j < shape_.head_dim; j++) store_element(out + j, values[j] * factor);
    }
  }
}

void Decoder::attention(int layer, const TrunklineStep& step, const Element* q, Element* out) {
  prepare(step);
  const int size = shape_.num_heads * shape_.head_dim;
  for (int row = 0; row < step.num_rows; row++)
    memcpy(queries_.row(row), q + size_t(row) * size, size * sizeof(Element));
  run([&](int thread, Tiles& tiles) {
    attend_nodes(thread, tiles, cache(step, layer));
    threads_.barrier();
    attend_runs(thread, tiles, cache(step, layer), step);
  });
  for (int row = 0; row < step.num_rows; row++)
    memcpy(out + size_t(row) * size, attended_.row(row), size * sizeof(Element));
}

}  // namespace trunkline
