// Who does what in the attention of a step: made once, used by every layer.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "interface.h"
#include "parts.h"

namespace trunkline {

// One piece of a node for one KV head and all of the node's rows. It keeps a part of its own: a row merges the parts of
// its nodes from left to right, as it does with the pieces of its own tokens, so that shared and unshared pieces that are
// cut at the same tokens give the same bits, and the number of threads does not count.
struct NodeTask {
  const int32_t* table;
  const int32_t* rows;
  int num_rows, kv_head;
  int first_token, num_tokens;
  int parts;  // index

  bool is_beside(const NodeTask& other) const { return table == other.table && first_token == other.first_token; }
};

// Some rows of a run for one KV head.
struct RunTask {
  int run, kv_head;
  int first_row, num_rows;  // within the run
  int first_token;          // where its own part of the run's table begins

  bool is_beside(const RunTask& other) const { return run == other.run && first_row == other.first_row; }
};

// Parts of a node that a run has to merge.
struct Share {
  int first_parts, num_pieces;  // parts of head h, piece p: first_parts + h * num_pieces + p
  int reader;                  // the place of the run's first row among the node's rows
};

class Plan {
 public:
  std::vector<NodeTask> node_tasks;
  std::vector<RunTask> run_tasks;
  std::vector<int> node_bounds, run_bounds;  // [threads + 1]: which tasks are a thread's
  std::vector<int> first_rows;               // [num_runs]: of all the rows of the step
  std::vector<int> part_rows;                // rows of each parts
  // [num_runs]: its first tokens, pieces that all its rows see: they are read like a node's, which deals them out to threads
  // evenly and reads all heads of a piece together
  std::vector<int> apart_tokens;
  int max_query_rows = 1;

  // How many tasks from one on, before `end`, differ from it in the head alone.
  template <class Task>
  static int num_beside(const std::vector<Task>& tasks, int first, int end) {
    int i = first;
    while (i < end && tasks[i].is_beside(tasks[first])) i++;
    return i - first;
  }

  const Share* shares_begin(int run) const { return shares_.data() + share_offsets_[run]; }
  const Share* shares_end(int run) const { return shares_.data() + share_offsets_[run + 1]; }

  void make(const TrunklineStep& step, const TrunklineShape& shape) {
    group_ = shape.num_heads / shape.num_kv_heads;
    first_rows.clear();
    apart_tokens.clear();
    int num_rows = 0;
    for (int run = 0; run < step.num_runs; run++) {
      const int rows = step.run_rows[run];
      first_rows.push_back(num_rows);
      num_rows += rows;
      const bool is_one_task = num_parts(rows) == 1;
      apart_tokens.push_back(is_one_task ? (step.run_tokens[run] - rows) / PIECE_TOKENS * PIECE_TOKENS : 0);
    }
    rows_.resize(num_rows);
    std::iota(rows_.begin(), rows_.end(), 0);
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
      for (int i = 0; i < num_readers; i++)
        of_run[step.readers[step.node_readers[node] + i]].push_back({int(part_rows.size()), num_pieces(num_tokens), i});
      add_node(step.block_ids + step.node_tables[node], num_tokens, step.readers + step.node_readers[node], num_readers,
               shape.num_kv_heads, costs);
    }
    for (int run = 0; run < step.num_runs; run++)
      if (apart_tokens[run]) {
        of_run[run].push_back({int(part_rows.size()), num_pieces(apart_tokens[run]), 0});
        add_node(step.block_ids + step.run_tables[run], apart_tokens[run], &rows_[first_rows[run]], step.run_rows[run],
                 shape.num_kv_heads, costs);
      }
    share_offsets_.assign(1, 0);
    for (const auto& shares : of_run) {
      shares_.insert(shares_.end(), shares.begin(), shares.end());
      share_offsets_.push_back(int(shares_.size()));
    }
    node_bounds = split(costs, shape.num_threads);
  }

  static int num_pieces(int num_tokens) { return (num_tokens + PIECE_TOKENS - 1) / PIECE_TOKENS; }

  void add_node(const int32_t* table, int num_tokens, const int32_t* rows, int num_rows, int num_kv_heads,
                std::vector<long>& costs) {
    // one head after the other, as they lie in memory
    const int first_parts = int(part_rows.size()), pieces = num_pieces(num_tokens);
    for (int piece = 0; piece < pieces; piece++)
      for (int kv_head = 0; kv_head < num_kv_heads; kv_head++) {
        const int first = piece * PIECE_TOKENS, count = std::min(PIECE_TOKENS, num_tokens - first);
        node_tasks.push_back({table, rows, num_rows, kv_head, first, count, first_parts + kv_head * pieces + piece});
        part_rows.push_back(num_rows * group_);
        costs.push_back(long(count) * (FILL_COST + num_rows * group_));
      }
  }

  // Enough rows at once to make filling a piece pay.
  int num_parts(int num_rows) const {
    const int rows_at_once = std::max(16, 96 / group_);
    return (num_rows + rows_at_once - 1) / rows_at_once;
  }

  void make_run_tasks(const TrunklineStep& step, const TrunklineShape& shape) {
    run_tasks.clear();
    std::vector<long> costs;
    max_query_rows = group_;
    for (int run = 0; run < step.num_runs; run++) {
      const int rows = step.run_rows[run], parts = num_parts(rows);
      for (int i = 0; i < parts; i++)
        for (int kv_head = 0; kv_head < shape.num_kv_heads; kv_head++) {
          const int first = int(long(rows) * i / parts), count = int(long(rows) * (i + 1) / parts) - first;
          const int num_seen = step.run_tokens[run] - (rows - first - count) - apart_tokens[run];
          run_tasks.push_back({run, kv_head, first, count, apart_tokens[run]});
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
  std::vector<int32_t> rows_;  // 0, 1, ...
};

}  // namespace trunkline
