// Weights into panels, once.
#include "decoder.h"

namespace trunkline {

// Weights of all layers lie one after the other in the order in which a step reads them.
static void place(Layout& layout, Layer& layer, const TrunklineShape& s) {
  const int qkv_size = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim;
  layer.input_norm = layout.take<float>(s.hidden_size);
  layer.qkv.place(layout, qkv_size, s.hidden_size);
  layer.qkv_bias = layout.take<float>(qkv_size);
  layer.q_norm = layout.take<float>(s.head_dim);
  layer.k_norm = layout.take<float>(s.head_dim);
  layer.o.place(layout, s.hidden_size, s.num_heads * s.head_dim);
  layer.o_bias = layout.take<float>(round_up(s.hidden_size, PANEL));
  layer.post_attention_norm = layout.take<float>(s.hidden_size);
  layer.gate_up.place(layout, 2 * round_up(s.intermediate_size, PANEL / 2), s.hidden_size);
  layer.gate_up_bias = layout.take<float>(2 * round_up(s.intermediate_size, PANEL / 2));
  layer.down.place(layout, s.hidden_size, s.intermediate_size);
  layer.down_bias = layout.take<float>(round_up(s.hidden_size, PANEL));
}

Decoder::Decoder(const TrunklineShape& shape)
    : shape_(shape), group_(shape.num_heads / shape.num_kv_heads), threads_(shape.num_threads), layers_(shape.num_layers) {
  const auto place_all = [&](char* base) {
    Layout layout(base);
    for (auto& layer : layers_) place(layout, layer, shape_);
    norm_ = layout.take<float>(shape_.hidden_size);
    head_.place(layout, shape_.vocab_size, shape_.hidden_size);
    // a product reads ahead of its panel
    layout.take<char>(size_t(head_.depth) * PANEL * sizeof(Word) + NEAR_BYTES);
    return layout.used();
  };
  weights_ = Pages(place_all(nullptr), shape_.uses_huge_pages);
  place_all(weights_.data());
  scratch_.resize(shape_.num_threads);
}

// rows: the weights of one column of each panel after the other, null where there is none
static void pack(Threads& threads, const Linear& linear, const std::vector<const Element*>& columns, int num_inputs) {
  threads.run([&](int thread) {
    const auto mine = threads.share(thread, linear.num_panels);
    for (int i = mine.begin; i < mine.end; i++) {
      const Element* panel[PANEL];
      for (int n = 0; n < PANEL; n++) {
        const size_t column = size_t(i) * PANEL + n;
        panel[n] = column < columns.size() ? columns[column] : nullptr;
      }
      linear.pack(i, panel, num_inputs);
    }
  });
}

static void append(std::vector<const Element*>& columns, const void* weight, int num_columns, int num_inputs) {
  for (int n = 0; n < num_columns; n++) columns.push_back((const Element*)weight + size_t(n) * num_inputs);
}

static void copy(float*& to, const float* from, int count) {
  if (from)
    memcpy(to, from, count * sizeof(float));
  else
    to = nullptr;
}

void Decoder::set_outer(const TrunklineOuter& outer) {
  outer_ = outer;
  copy(norm_, outer.norm, shape_.hidden_size);
  std::vector<const Element*> columns;
  append(columns, outer.head, shape_.vocab_size, shape_.hidden_size);
  pack(threads_, head_, columns, shape_.hidden_size);
}

void Decoder::set_layer(int index, const TrunklineLayer& weights) {
  const TrunklineShape& s = shape_;
  Layer& layer = layers_[index];
  const int q_size = s.num_heads * s.head_dim, kv_size = s.num_kv_heads * s.head_dim;
  std::vector<const Element*> columns;
  append(columns, weights.q, q_size, s.hidden_size);
  append(columns, weights.k, kv_size, s.hidden_size);
  append(columns, weights.v, kv_size, s.hidden_size);
  pack(threads_, layer.qkv, columns, s.hidden_size);

  columns.clear();
  append(columns, weights.o, s.hidden_size, q_size);
  pack(threads_, layer.o, columns, q_size);

  // 16 columns of gate, the 16 of up that belong to them, and so on
  const int half = PANEL / 2, padded = round_up(s.intermediate_size, half);
  columns.assign(2 * padded, nullptr);
  for (int n = 0; n < s.intermediate_size; n++) {
    const size_t at = size_t(n) / half * PANEL + n % half;
    columns[at] = (const Element*)weights.gate + size_t(n) * s.hidden_size;
    columns[at + half] = (const Element*)weights.up + size_t(n) * s.hidden_size;
    if (weights.gate_bias) {
      layer.gate_up_bias[at] = weights.gate_bias[n];
      layer.gate_up_bias[at + half] = weights.up_bias[n];
    }
  }
  if (!weights.gate_bias) layer.gate_up_bias = nullptr;
  pack(threads_, layer.gate_up, columns, s.hidden_size);

  columns.clear();
  append(columns, weights.down, s.hidden_size, s.intermediate_size);
  pack(threads_, layer.down, columns, s.intermediate_size);

  if (weights.q_bias) {
    memcpy(layer.qkv_bias, weights.q_bias, q_size * sizeof(float));
    memcpy(layer.qkv_bias + q_size, weights.k_bias, kv_size * sizeof(float));
    memcpy(layer.qkv_bias + q_size + kv_size, weights.v_bias, kv_size * sizeof(float));
  } else {
    layer.qkv_bias = nullptr;
  }
  copy(layer.o_bias, weights.o_bias, s.hidden_size);
  copy(layer.down_bias, weights.down_bias, s.hidden_size);
  copy(layer.input_norm, weights.input_norm, s.hidden_size);
  copy(layer.post_attention_norm, weights.post_attention_norm, s.hidden_size);
  copy(layer.q_norm, weights.q_norm, s.head_dim);
  copy(layer.k_norm, weights.k_norm, s.head_dim);
}

}  // namespace trunkline
