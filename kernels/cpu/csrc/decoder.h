// A decoder of the Llama family: packed weights, and one step over rows of many sequences.
//
// All threads go through the same phases, each doing its share, with a barrier after each. The residual stream is fp32.
#pragma once

#include "linear.h"
#include "outputs.h"
#include "plan.h"
#if HAS_TILES
#include "tile_attention.h"
#else
#include "attention.h"
#endif

namespace trunkline {

struct Layer {
  Linear qkv, o, gate_up, down;
  float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // null: none
  float *input_norm, *post_attention_norm, *q_norm, *k_norm;
};

// A matrix that products read: rows of words, zeros behind each row's last element.
struct Activations {
  Word* words;
  int stride;  // words

  void place(Layout& layout, int num_rows, int num_elements) {
    stride = padded_stride(num_elements);
    words = layout.take<Word>(size_t(num_rows) * stride);
  }

  Element* row(int i) const { return (Element*)(words + size_t(i) * stride); }
};

class Decoder {
 public:
  explicit Decoder(const TrunklineShape& shape);

  void set_outer(const TrunklineOuter& outer);
  void set_layer(int layer, const TrunklineLayer& weights);

  // Writes K and V of the rows through step.num_layers layers; residual: the stream after them, [num_rows][hidden], in
  // rows that are no outputs anything.
  void forward(const TrunklineStep& step, float* residual);

  // logits [num_rows][vocab] of rows of a residual stream, [num_rows][hidden].
  void logits(const float* residual, int num_rows, float* logits);

  // The id of each row's largest logit, the least of equal ones, without writing logits; -1 if a row has none that is a
  // finite number.
  void greedy(const float* residual, int num_rows, int32_t* ids);

  // Attention of one layer alone: q and out [num_rows][num_heads * head_dim], K and V written already.
  void attention(int layer, const TrunklineStep& step, const Element* q, Element* out);

  // One linear of a layer alone: x [num_rows][inputs], out [num_rows][columns], without bias; which: 0 qkv, 1 o, 2 gate
  // and up side by side by 16, 3 down.
  void linear(int layer, int which, const Element* x, int num_rows, float* out);

 private:
  // Each thread with its tiles.
  template <class Task>
  void run(Task&& task) {
    threads_.run([&](int thread) {
      Tiles tiles;
      task(thread, tiles);
    });
  }
  void reserve(int num_rows);
  void prepare(const TrunklineStep& step);
  // The two halves of a layer: queries, and K and V into the cache; then attention and everything behind it.
  void start_layer(int thread, int layer, const TrunklineStep& step, float* residual);
  void finish_layer(int thread, Tiles& tiles, int layer, const TrunklineStep& step, float* residual);
  void norm_rows(int thread, const float* x, int num_rows, const float* weight) const;
  void rotate_row(const Layer& layer, const LayerCache& cache, const TrunklineStep& step, int row) const;
  void attend_nodes(int thread, Tiles& tiles, const LayerCache& cache) const;
  void attend_runs(int thread, Tiles& tiles, const LayerCache& cache, const TrunklineStep& step) const;
  void gather(const Queries& queries, int from, int to, int kv_head) const;
  void add_product(int thread, const Linear& linear, const float* bias, const Activations& a, int num_rows,
                   float* residual) const;
  LayerCache cache(const TrunklineStep& step, int layer) const;
  KVFormat kv_format() const { return KVFormat(shape_.kv_format); }
  int qkv_size() const { return (shape_.num_heads + 2 * shape_.num_kv_heads) * shape_.head_dim; }
  float scale() const { return 1.44269504f / std::sqrt(float(shape_.head_dim)); }

  const TrunklineShape shape_;
  const int group_;
  Threads threads_;
  TrunklineOuter outer_{};
  std::vector<Layer> layers_;
  Linear head_;
  float* norm_ = nullptr;
  Pages weights_;

  // of a step
  int max_rows_ = 0;
  Pages rows_memory_;
  Activations normed_, queries_, attended_, activated_;
  float* qkv_ = nullptr;  // [max_rows][qkv_size]
  Plan plan_;
  Pages attention_memory_;
  size_t attention_bytes_ = 0;
  std::vector<AttentionScratch> scratch_;  // one for each thread
  std::vector<Parts> parts_;
};

}  // namespace trunkline
