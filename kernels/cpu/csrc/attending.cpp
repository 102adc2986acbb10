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

static Span node_span(const LayerCache& cache, const NodeTask& task) {
  return {cache, task.kv_head, task.table, task.first_token, task.num_tokens};
}

static Span run_span(const LayerCache& cache, const TrunklineStep& step, const RunTask& task, int first) {
  const int num_tokens = step.run_tokens[task.run] - (step.run_rows[task.run] - task.first_row - task.num_rows);
  return {cache, task.kv_head, step.block_ids + step.run_tables[task.run], first,
          std::min(PIECE_TOKENS, num_tokens - first)};
}

void Decoder::attend_nodes(int thread, Tiles& tiles, const LayerCache& cache) const {
  const AttentionScratch& scratch = scratch_[thread];
  Piece piece(scratch.keys, scratch.values, shape_.head_dim);
  const int first_task = plan_.node_bounds[thread];
  for (int i = first_task; i < plan_.node_bounds[thread + 1]; i++) {
    const NodeTask& task = plan_.node_tasks[i];
    Queries queries{scratch.queries, padded_stride(shape_.head_dim), task.num_rows * group_, group_, 1 << 30};
    const NodeTask* before = i > first_task ? &plan_.node_tasks[i - 1] : nullptr;
    if (!before || before->table != task.table || before->kv_head != task.kv_head)
      for (int r = 0; r < task.num_rows; r++) gather(queries, task.rows[r], r * group_, task.kv_head);
    Span next{};
    if (i + 1 < plan_.node_bounds[thread + 1]) next = node_span(cache, plan_.node_tasks[i + 1]);
    piece.fill(node_span(cache, task), next, queries.num_rows);
    tiles.set_narrow(queries.is_narrow());
    attend<false>(piece, task.first_token, queries, scale(), scratch, parts_[task.parts]);
  }
}

void Decoder::attend_runs(int thread, Tiles& tiles, const LayerCache& cache, const TrunklineStep& step) const {
  const AttentionScratch& scratch = scratch_[thread];
  const Parts& parts = scratch.state;
  Piece piece(scratch.keys, scratch.values, shape_.head_dim);
  for (int i = plan_.run_bounds[thread]; i < plan_.run_bounds[thread + 1]; i++) {
    const RunTask& task = plan_.run_tasks[i];
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
    for (int first = plan_.apart_tokens[task.run]; first < num_tokens; first += PIECE_TOKENS) {
      Span next{};
      if (first + PIECE_TOKENS < num_tokens)
        next = run_span(cache, step, task, first + PIECE_TOKENS);
      else if (i + 1 < plan_.run_bounds[thread + 1])
        next = run_span(cache, step, plan_.run_tasks[i + 1], plan_.apart_tokens[plan_.run_tasks[i + 1].run]);
      piece.fill(run_span(cache, step, task, first), next, queries.num_rows);
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
