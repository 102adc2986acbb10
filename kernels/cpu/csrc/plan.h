// Who does what in the attention of a step: made once, used by every layer.
#pragma once

#include <algorithm>
#include <vector>

#include "interface.h"
#include "parts.h"

namespace trunkline {

// One piece of a node for one KV head and all of the node's readers. It keeps a part of its own: a row merges the parts of
// its nodes from left to right, as it does with the pieces of its own tokens, so that shared and unshared pieces that are
// cut at the same tokens give the same bits, and the number of threads does not count.
struct NodeTask {
  int node, kv_head;
  int first_token, num_tokens;
  int parts;  // index
};

// Some rows of a run for one KV head.
struct RunTask {
  int run, kv_head;
  int first_row, num_rows;  // within the run
};

// Parts of a node that a run has to merge.
struct Share {
  int first_parts, num_pieces;  // parts of head h, piece p: first_parts + h * num_pieces + p
  int reader;                  // the run's place among the node's readers
};

class Plan {
 public:
  std::vector<NodeTask> node_tasks;
  std::vector<RunTask> run_tasks;
  std::vector<int> node_bounds, run_bounds;  // [threads + 1]: which tasks are a thread's
  std::vector<int> first_rows;               // [num_runs]: of all the rows of the step
  std::vector<int> part_rows;                // rows of each parts
  int max_query_rows = 1;

  const Share* shares_begin(int run) const { return shares_.data() + share_offsets_[run]; }
  const Share* shares_end(int run) const { return shares_.data() + share_offsets_[run + 1]; }

  void make(const TrunklineStep& step, const TrunklineShape& shape) {
    group_ = shape.num_heads / shape.num_kv_heads;
    make_node_tasks(step, shape);
    make_run_tasks(step, shape);
  }

 private:
  void make_node_tasks(const TrunklineStep& step, const TrunklineShape& shape) {
    node_tasks.clear();
    part_rows.clear();
    shares_.clear();
    std::vector<std::vector<Share>> of_run(step.num_runs);
    std::vector<long> costs;
    for (int node = 0; node < step.num_nodes; node++) {
      const int num_tokens = (step.node_tables[node + 1] - step.node_tables[node]) * shape.block_size;
      const int num_readers = step.node_readers[node + 1] - step.node_readers[node];
      const int pieces = (num_tokens + PIECE_TOKENS - 1) / PIECE_TOKENS;
      for (int i = 0; i < num_readers; i++)
        of_run[step.readers[step.node_readers[node] + i]].push_back({int(part_rows.size()), pieces, i});
      for (int kv_head = 0; kv_head < shape.num_kv_heads; kv_head++)
        for (int piece = 0; piece < pieces; piece++) {
          const int first = piece * PIECE_TOKENS;
          const int count = std::min(PIECE_TOKENS, num_tokens - first);
          node_tasks.push_back({node, kv_head, first, count, int(part_rows.size())});
          part_rows.push_back(num_readers * group_);
          costs.push_back(long(count) * (FILL_COST + num_readers * group_));
        }
    }
    share_offsets_.assign(1, 0);
    for (const auto& shares : of_run) {
      shares_.insert(shares_.end(), shares.begin(), shares.end());
      share_offsets_.push_back(int(shares_.size()));
    }
    node_bounds = split(costs, shape.num_threads);
  }

  void make_run_tasks(const TrunklineStep& step, const TrunklineShape& shape) {
    run_tasks.clear();
    first_rows.clear();
    std::vector<long> costs;
    // enough rows to make filling a piece pay
    const int rows_at_once = std::max(16, 96 / group_);
    max_query_rows = group_;
    int row = 0;
    for (int run = 0; run < step.num_runs; run++) {
      const int rows = step.run_rows[run];
      first_rows.push_back(row);
      row += rows;
      const int parts = (rows + rows_at_once - 1) / rows_at_once;
      for (int i = 0; i < parts; i++)
        for (int kv_head = 0; kv_head < shape.num_kv_heads; kv_head++) {
          const int first = int(long(rows) * i / parts), count = int(long(rows) * (i + 1) / parts) - first;
          const int num_seen = step.run_tokens[run] - (rows - first - count);
          run_tasks.push_back({run, kv_head, first, count});
          costs.push_back(long(num_seen) * (FILL_COST + count * group_) + TASK_COST);
          max_query_rows = std::max(max_query_rows, count * group_);
        }
    }
    for (int rows : part_rows) max_query_rows = std::max(max_query_rows, rows);
    run_bounds = split(costs, shape.num_threads);
  }

  // Cuts tasks into one contiguous part for each thread, of about the same cost.
  static std::vector<int> split(const std::vector<long>& costs, int num_threads) {
    long total = 0;
    for (long cost : costs) total += cost;
    std::vector<int> bounds{0};
    long done = 0;
    int task = 0;
    for (int thread = 1; thread < num_threads; thread++) {
      // a task goes where the larger part of it lies
      while (task < int(costs.size()) && (done + costs[task] / 2) * num_threads < total * thread) done += costs[task++];
      bounds.push_back(task);
    }
    bounds.push_back(int(costs.size()));
    return bounds;
  }

  // In units of one token seen by one query row.
  static constexpr int FILL_COST = 6;
  static constexpr int TASK_COST = 200;

  int group_ = 1;
  std::vector<Share> shares_;
  std::vector<int> share_offsets_;
};

}  // namespace trunkline
