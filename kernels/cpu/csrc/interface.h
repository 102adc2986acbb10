// What a caller says about a model and a step; plain C, the layout is repeated in kernels/cpu/native.py.
#pragma once

#include <cstdint>

extern "C" {

struct TrunklineShape {
  int32_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocab_size;
  int32_t block_size;
  int32_t num_threads;
  int32_t uses_huge_pages;
  int32_t kv_format;  // 0 elements, 1 int8, 2 fp8: kernels/kv_format.py
  float rms_norm_eps;
};

// Weights are [out, in], contiguous, in the element type; norms and biases are float. Null: the model has none.
struct TrunklineLayer {
  const void *q, *k, *v, *o, *gate, *up, *down;
  const float *q_bias, *k_bias, *v_bias, *o_bias, *gate_bias, *up_bias, *down_bias;
  const float *input_norm, *post_attention_norm, *q_norm, *k_norm;
};

struct TrunklineOuter {
  const void* embedding;  // kept by the caller
  const void* head;
  const float* norm;
  const float* cosines;  // [positions, head_dim], kept by the caller
  const float* sines;    // likewise, the first half negated
};

// Rows: one for each decode, then the runs of the extends. A run's table begins where its nodes end; its last row sees
// num_tokens tokens of it, the row before one fewer, and so on.
struct TrunklineStep {
  void* kv;  // [layers, 2, num_blocks, num_kv_heads, block_size, head_dim], or records in place of the last two
  int64_t num_blocks;
  int32_t num_layers, num_rows, num_runs, num_nodes;
  const int32_t *token_ids, *positions, *slots;  // [num_rows]
  const int32_t *run_rows, *run_tokens;          // [num_runs]
  const int32_t* run_outputs;                    // [num_runs]: the stream behind the last layer is asked for of so many
                                                 // of a run's last rows; of runs of decodes, of their one
  const int32_t *run_tables;                     // [num_runs + 1], offsets into block_ids
  const int32_t *node_tables;                    // [num_nodes + 1], offsets into block_ids
  const int32_t *node_readers;                   // [num_nodes + 1], offsets into readers
  const int32_t *readers;                        // runs of one row
  const int32_t *block_ids;
};
}
