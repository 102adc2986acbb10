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

LayerCache Decoder::cache(const TrunklineStep& step, int layer) const {
  const size_t values_offset = size_t(step.num_blocks) * shape_.num_kv_heads * shape_.block_size * shape_.head_dim;
  return {(Element*)step.kv + 2 * values_offset * layer, values_offset, shape_.num_kv_heads, shape_.block_size,
          shape_.head_dim};
}

void Decoder::reserve(int num_rows) {
  if (num_rows <= max_rows_) return;
  max_rows_ = round_up(num_rows, 32);
  const auto place_all = [&](char* base) {
    Layout layout(base);
    normed_.place(layout, max_rows_, shape_.hidden_size);
    qkv_ = layout.take<float>(size_t(max_rows_) * qkv_size());
    queries_.place(layout, max_rows_, shape_.num_heads * shape_.head_dim);
    attended_.place(layout, max_rows_, shape_.num_heads * shape_.head_dim);
    activated_.place(layout, max_rows_, round_up(shape_.intermediate_size, PANEL / 2));
    return layout.used();
  };
  const size_t num_bytes = place_all(nullptr);
  rows_memory_ = Pages(num_bytes, shape_.uses_huge_pages);
  place_all(rows_memory_.data());
}

void Decoder::prepare(const TrunklineStep& step) {
  reserve(step.num_rows);
  plan_.make(step, shape_);
  parts_.resize(plan_.part_rows.size());
  const auto place_all = [&](char* base) {
    Layout layout(base);
    for (auto& scratch : scratch_) scratch.place(layout, shape_.head_dim, plan_.max_query_rows);
    for (size_t i = 0; i < parts_.size(); i++) parts_[i].place(layout, plan_.part_rows[i], shape_.head_dim);
    return layout.used();
  };
  const size_t num_bytes = place_all(nullptr);
  if (num_bytes > attention_bytes_) {
    attention_bytes_ = num_bytes + num_bytes / 4;
    attention_memory_ = Pages(attention_bytes_, shape_.uses_huge_pages);
  }
  place_all(attention_memory_.data());
}

INLINE float rms_factor(const float* x, int size, float eps) {
  Floats squares{};
  int i = 0;
  for (; i + LANES <= size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < size; i++) total += x[i] * x[i];
  return 1.f / std::sqrt(total / size + eps);
}

INLINE void store_element(Element* to, float x) {
  Element parts[LANES];
  store_elements(parts, all(x));
  *to = parts[0];
}

void Decoder::norm_rows(int thread, const float* x, int num_rows, const float* weight) const {
  const int size = shape_.hidden_size;
  const auto mine = threads_.share(thread, num_rows);
  for (int row = mine.begin; row < mine.end; row++) {
    const float* from = x + size_t(row) * size;
    Element* to = normed_.row(row);
    const float factor = rms_factor(from, size, shape_.rms_norm_eps);
    int i = 0;
    for (; i + LANES <= size; i += LANES) store_elements(to + i, load(from + i) * factor * load(weight + i));
    for (; i < size; i++) store_element(to + i, from[i] * factor * weight[i]);
  }
}

// Norm, if the model has one for heads, and rotation of q and k; k and v go to the row's slot.
void Decoder::rotate_row(const Layer& layer, const LayerCache& cache, const TrunklineStep& step, int row) const {
  const int head_dim = shape_.head_dim, half = head_dim / 2;
  const int num_heads = shape_.num_heads, num_kv_heads = shape_.num_kv_heads;
  float* qkv = qkv_ + size_t(row) * qkv_size();
  const float* cosines = outer_.cosines + size_t(step.positions[row]) * head_dim;
  const float* sines = outer_.sines + size_t(step.positions[row]) * head_dim + half;
  const int block = step.slots[row] / shape_.block_size, offset = step.slots[row] % shape_.block_size;
  if (layer.qkv_bias)
    for (int i = 0; i < qkv_size(); i++) qkv[i] += layer.qkv_bias[i];
  for (int head = 0; head < num_heads + num_kv_heads; head++) {
    float* x = qkv + head * head_dim;
    const bool is_query = head < num_heads;
    const float* norm = is_query ? layer.q_norm : layer.k_norm;
    if (norm) {
      const float factor = rms_factor(x, head_dim, shape_.rms_norm_eps);
      for (int i = 0; i < head_dim; i++) x[i] = x[i] * factor * norm[i];
    }
    Element* to = is_query ? queries_.row(row) + head * head_dim : cache.key(block, head - num_heads, offset);
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
      const Floats low = load(x + i), high = load(x + half + i), c = load(cosines + i), s = load(sines + i);
      store_elements(to + i, fma(low, c, -(high * s)));
      store_elements(to + half + i, fma(high, c, low * s));
    }
    for (; i < half; i++) {
      store_element(to + i, std::fma(x[i], cosines[i], -(x[half + i] * sines[i])));
      store_element(to + half + i, std::fma(x[half + i], cosines[i], x[i] * sines[i]));
    }
  }
  for (int head = 0; head < num_kv_heads; head++) {
    const float* x = qkv + (num_heads + num_kv_heads + head) * head_dim;
    Element* to = cache.key(block, head, offset) + cache.values_offset;
    int i = 0;
    for (; i + LANES <= head_dim; i += LANES) store_elements(to + i, load(x + i));
    for (; i < head_dim; i++) store_element(to + i, x[i]);
  }
}

// Copies the heads of one group of row `from` to rows of the queries, from `to` on.
void Decoder::gather(const Queries& queries, int from, int to, int kv_head) const {
  const size_t head_bytes = shape_.head_dim * sizeof(Element);
  for (int i = 0; i < group_; i++) {
    char* row = (char*)(queries.words + size_t(to + i) * queries.stride);
    memcpy(row, queries_.row(from) + (kv_head * group_ + i) * shape_.head_dim, head_bytes);
    memset(row + head_bytes, 0, queries.stride * sizeof(Word) - head_bytes);
  }
}

static Span node_span(const LayerCache& cache, const TrunklineStep& step, const NodeTask& task, int first) {
  return {cache, task.kv_head, step.block_ids + step.node_tables[task.node], task.first_token + first,
          std::min(PIECE_TOKENS, task.num_tokens - first)};
}

static Span run_span(const LayerCache& cache, const TrunklineStep& step, const RunTask& task, int first) {
  const int num_tokens = step.run_tokens[task.run] - (step.run_rows[task.run] - task.first_row - task.num_rows);
  return {cache, task.kv_head, step.block_ids + step.run_tables[task.run], first,
          std::min(PIECE_TOKENS, num_tokens - first)};
}

void Decoder::attend_nodes(int thread, const LayerCache& cache, const TrunklineStep& step) const {
  const AttentionScratch& scratch = scratch_[thread];
  Piece piece(scratch.keys, scratch.values, shape_.head_dim);
  for (int i = plan_.node_bounds[thread]; i < plan_.node_bounds[thread + 1]; i++) {
    const NodeTask& task = plan_.node_tasks[i];
    const int32_t* readers = step.readers + step.node_readers[task.node];
    const int num_readers = step.node_readers[task.node + 1] - step.node_readers[task.node];
    const Parts& parts = parts_[task.parts];
    Queries queries{scratch.queries, padded_stride(shape_.head_dim), num_readers * group_, group_, 1 << 30};
    for (int r = 0; r < num_readers; r++) gather(queries, plan_.first_rows[readers[r]], r * group_, task.kv_head);
    parts.clear(queries.num_rows);
    for (int first = 0; first < task.num_tokens; first += PIECE_TOKENS) {
      Span next{};
      if (first + PIECE_TOKENS < task.num_tokens)
        next = node_span(cache, step, task, first + PIECE_TOKENS);
      else if (i + 1 < plan_.node_bounds[thread + 1])
        next = node_span(cache, step, plan_.node_tasks[i + 1], 0);
      piece.fill(node_span(cache, step, task, first), next);
      attend(piece, first, queries, scale(), scratch, parts);
    }
  }
}

void Decoder::attend_runs(int thread, const LayerCache& cache, const TrunklineStep& step) const {
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
      for (int span = 0; span < share->num_spans; span++)
        parts.merge(0, parts_[share->first_parts + task.kv_head * share->num_spans + span], share->reader * group_,
                    group_);
    for (int first = 0; first < num_tokens; first += PIECE_TOKENS) {
      Span next{};
      if (first + PIECE_TOKENS < num_tokens)
        next = run_span(cache, step, task, first + PIECE_TOKENS);
      else if (i + 1 < plan_.run_bounds[thread + 1])
        next = run_span(cache, step, plan_.run_tasks[i + 1], 0);
      piece.fill(run_span(cache, step, task, first), next);
      attend(piece, first, queries, scale(), scratch, parts);
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

void Decoder::add_product(int thread, const Linear& linear, const float* bias, const Activations& a, int num_rows,
                          float* residual) const {
  linear.run(threads_, thread, a.words, a.stride, num_rows, [&](int panel, int first, int count, const float* c) {
    const int left = std::min(PANEL, shape_.hidden_size - panel * PANEL);
    for (int r = 0; r < count; r++, c += PANEL) {
      float* to = residual + size_t(first + r) * shape_.hidden_size + panel * PANEL;
      for (int n = 0; n < left; n++) to[n] += bias ? c[n] + bias[panel * PANEL + n] : c[n];
    }
  });
}

// gate * sigmoid(gate) * up, LANES at a time
INLINE Floats swiglu(Floats gate, Floats up) {
  const Floats exponent = gate * -1.44269504f;
  return gate * up / (exp2(exponent < 126.f ? exponent : all(126.f)) + 1.f);
}

void Decoder::run_layer(int thread, int index, const TrunklineStep& step, float* residual) {
  const Layer& layer = layers_[index];
  const LayerCache cache = this->cache(step, index);
  const int num_rows = step.num_rows;

  norm_rows(thread, residual, num_rows, layer.input_norm);
  threads_.barrier();
  layer.qkv.run(threads_, thread, normed_.words, normed_.stride, num_rows,
                [&](int panel, int first, int count, const float* c) {
                  const int left = std::min(PANEL, qkv_size() - panel * PANEL);
                  for (int r = 0; r < count; r++)
                    memcpy(qkv_ + size_t(first + r) * qkv_size() + panel * PANEL, c + r * PANEL, left * sizeof(float));
                });
  threads_.barrier();
  const auto mine = threads_.share(thread, num_rows);
  for (int row = mine.begin; row < mine.end; row++) rotate_row(layer, cache, step, row);
  threads_.barrier();
  if (step.num_nodes) {
    attend_nodes(thread, cache, step);
    threads_.barrier();
  }
  attend_runs(thread, cache, step);
  threads_.barrier();
  add_product(thread, layer.o, layer.o_bias, attended_, num_rows, residual);
  threads_.barrier();
  norm_rows(thread, residual, num_rows, layer.post_attention_norm);
  threads_.barrier();
  const int half = PANEL / 2;
  layer.gate_up.run(threads_, thread, normed_.words, normed_.stride, num_rows,
                    [&](int panel, int first, int count, const float* c) {
                      const float* bias = layer.gate_up_bias ? layer.gate_up_bias + panel * PANEL : nullptr;
                      for (int r = 0; r < count; r++, c += PANEL)
                        for (int n = 0; n < half; n += LANES) {
                          Floats gate = load(c + n), up = load(c + half + n);
                          if (bias) gate += load(bias + n), up += load(bias + half + n);
                          store_elements(activated_.row(first + r) + panel * half + n, swiglu(gate, up));
                        }
                    });
  threads_.barrier();
  add_product(thread, layer.down, layer.down_bias, activated_, num_rows, residual);
  threads_.barrier();
}

void Decoder::forward(const TrunklineStep& step, float* residual) {
  prepare(step);
  const int size = shape_.hidden_size;
  threads_.run([&](int thread) {
    const auto mine = threads_.share(thread, step.num_rows);
    for (int row = mine.begin; row < mine.end; row++) {
      const Element* from = (const Element*)outer_.embedding + size_t(step.token_ids[row]) * size;
      for (int i = 0; i < size; i++) residual[size_t(row) * size + i] = to_float(from[i]);
    }
    // the same rows are normed by the same thread: no barrier is needed yet
    for (int layer = 0; layer < step.num_layers; layer++) run_layer(thread, layer, step, residual);
  });
}

void Decoder::logits(const float* residual, int num_rows, float* logits) {
  reserve(num_rows);
  const int vocab_size = shape_.vocab_size;
  threads_.run([&](int thread) {
    norm_rows(thread, residual, num_rows, norm_);
    threads_.barrier();
    head_.run(threads_, thread, normed_.words, normed_.stride, num_rows,
              [&](int panel, int first, int count, const float* c) {
                const int left = std::min(PANEL, vocab_size - panel * PANEL);
                for (int r = 0; r < count; r++)
                  memcpy(logits + size_t(first + r) * vocab_size + panel * PANEL, c + r * PANEL, left * sizeof(float));
              });
  });
}

void Decoder::attention(int layer, const TrunklineStep& step, const Element* q, Element* out) {
  prepare(step);
  const int size = shape_.num_heads * shape_.head_dim;
  for (int row = 0; row < step.num_rows; row++)
    memcpy(queries_.row(row), q + size_t(row) * size, size * sizeof(Element));
  threads_.run([&](int thread) {
    attend_nodes(thread, cache(step, layer), step);
    threads_.barrier();
    attend_runs(thread, cache(step, layer), step);
  });
  for (int row = 0; row < step.num_rows; row++)
    memcpy(out + size_t(row) * size, attended_.row(row), size * sizeof(Element));
}

void Decoder::linear(int index, int which, const Element* x, int num_rows, float* out) {
  const Layer& layer = layers_[index];
  const Linear& linear = which == 0 ? layer.qkv : which == 1 ? layer.o : which == 2 ? layer.gate_up : layer.down;
  const int inputs = which == 1 ? shape_.num_heads * shape_.head_dim : which == 3 ? shape_.intermediate_size : shape_.hidden_size;
  const int columns = linear.num_panels * PANEL;
  reserve(num_rows);
  const Activations& a = which == 1 ? attended_ : which == 3 ? activated_ : normed_;
  for (int row = 0; row < num_rows; row++) memcpy(a.row(row), x + size_t(row) * inputs, inputs * sizeof(Element));
  threads_.run([&](int thread) {
    linear.run(threads_, thread, a.words, a.stride, num_rows, [&](int panel, int first, int count, const float* c) {
      for (int r = 0; r < count; r++)
        memcpy(out + size_t(first + r) * columns + panel * PANEL, c + r * PANEL, PANEL * sizeof(float));
    });
  });
}

}  // namespace trunkline

// The plain C interface. Nothing throws across it: null, or a code other than 0, says that memory ran out.
template <class Body>
static int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (...) {
    return 1;
  }
}

using trunkline::Decoder;
using trunkline::Element;

extern "C" {

void* trunkline_create(const TrunklineShape* shape) {
  void* decoder = nullptr;
  guarded([&] { decoder = new Decoder(*shape); });
  return decoder;
}
void trunkline_destroy(void* decoder) { delete (Decoder*)decoder; }
int trunkline_set_outer(void* decoder, const TrunklineOuter* outer) {
  return guarded([&] { ((Decoder*)decoder)->set_outer(*outer); });
}
int trunkline_set_layer(void* decoder, int layer, const TrunklineLayer* weights) {
  return guarded([&] { ((Decoder*)decoder)->set_layer(layer, *weights); });
}
int trunkline_forward(void* decoder, const TrunklineStep* step, float* residual) {
  return guarded([&] { ((Decoder*)decoder)->forward(*step, residual); });
}
int trunkline_logits(void* decoder, const float* residual, int num_rows, float* logits) {
  return guarded([&] { ((Decoder*)decoder)->logits(residual, num_rows, logits); });
}
int trunkline_attention(void* decoder, int layer, const TrunklineStep* step, const void* q, void* out) {
  return guarded([&] { ((Decoder*)decoder)->attention(layer, *step, (const Element*)q, (Element*)out); });
}
int trunkline_linear(void* decoder, int layer, int which, const void* x, int num_rows, float* out) {
  return guarded([&] { ((Decoder*)decoder)->linear(layer, which, (const Element*)x, num_rows, out); });
}
}
