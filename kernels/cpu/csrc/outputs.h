// The rows whose stream behind the last layer is asked for. In that layer the others need no more than K and V.
#pragma once

#include <vector>

#include "interface.h"

namespace trunkline {

struct Outputs {
  std::vector<int> rows;  // of the step, from first to last

  explicit Outputs(const TrunklineStep& step) : step_(step) {
    int end = 0;
    for (int run = 0; run < step.num_runs; run++) {
      const int count = step.run_outputs[run];
      end += step.run_rows[run];
      if (!count) continue;
      for (int row = end - count; row < end; row++) rows.push_back(row);
      run_rows_.push_back(count);
      run_tokens_.push_back(step.run_tokens[run]);
      run_tables_.push_back(step.run_tables[run]);
    }
  }

  int num_rows() const { return int(rows.size()); }

  // These rows as a step of their own, for attention. Decodes come first and are all in it: nodes' readers are the same.
  TrunklineStep step() const {
    TrunklineStep step = step_;
    step.num_rows = num_rows();
    step.num_runs = int(run_rows_.size());
    step.run_rows = run_rows_.data();
    step.run_tokens = run_tokens_.data();
    step.run_tables = run_tables_.data();
    return step;
  }

 private:
  const TrunklineStep step_;
  std::vector<int32_t> run_rows_, run_tokens_, run_tables_;
};

}  // namespace trunkline
