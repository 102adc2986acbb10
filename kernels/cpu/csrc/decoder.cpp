// The step: its memory, its phases, and their order.
#include "decoder.h"

namespace trunkline {

LayerCache Decoder::cache(const TrunklineStep& step, int layer) const {
  const RecordShape record{kv_format(), shape_.block_size, shape_.head_dim};
  const size_t values_offset = size_t(step.num_blocks) * shape_.num_kv_heads * record.num_bytes();
  return {(char*)step.kv + 2 * values_offset * layer, values_offset, record.num_bytes(), shape_.num_kv_heads, record};
}

void Decoder::reserve(int num_rows) {
  if (num_rows <= max_rows_) return;
  const int max_rows = round_up(num_rows, 32);  // products read whole blocks of rows
  const auto place_all = [&](char* base) {
    Layout layout(base);
    normed_.place(layout, max_rows, shape_.hidden_size);
    qkv_ = layout.take<float>(size_t(max_rows) * qkv_size());
    queries_.place(layout, max_rows, shape_.num_heads * shape_.head_dim);
    attended_.place(layout, max_rows, shape_.num_heads * shape_.head_dim);
    activated_.place(layout, max_rows, round_up(shape_.intermediate_size, PANEL / 2));
    return layout.used();
  };
  max_rows_ = 0;  // should there be no memory
  const size_t num_bytes = place_all(nullptr);
  rows_memory_ = Pages(num_bytes, shape_.uses_huge_pages);
  place_all(rows_memory_.data());
  max_rows_ = max_rows;
}

void Decoder::prepare(const TrunklineStep& step) {
  reserve(step.num_rows);
  plan_.make(step, shape_);
  parts_.resize(plan_.part_rows.size());
  const auto place_all = [&](char* base) {
    Layout layout(base);
    for (auto& scratch : scratch_)
      scratch.place(layout, shape_.num_kv_heads, shape_.head_dim, plan_.max_query_rows,
                    kv_format() != KVFormat::ELEMENTS);
    for (size_t i = 0; i < parts_.size(); i++) parts_[i].place(layout, plan_.part_rows[i], shape_.head_dim);
    return layout.used();
  };
  const size_t num_bytes = place_all(nullptr);
  if (num_bytes > attention_bytes_) {
    const size_t roomy = num_bytes + num_bytes / 4;
    attention_memory_ = Pages(roomy, shape_.uses_huge_pages);
    attention_bytes_ = roomy;
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

void Decoder::norm_rows(int thread, const float* x, int num_rows, const float* weight) const {
  const int size = shape_.hidden_size;
  const auto mine = share_rows(threads_, thread, num_rows);
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
  // what is quantised has been rounded to elements before
  alignas(64) Element rounded[round_up(MAX_HEAD_DIM, LANES)];
  const bool is_quantised = cache.is_quantised();
  if (is_quantised) memset(rounded, 0, sizeof rounded);
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
    Element* to = is_query       ? queries_.row(row) + head * head_dim
                  : is_quantised ? rounded
                                 : cache.key(block, head - num_heads, offset);
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
    if (!is_query && is_quantised) write_record(cache.shape, cache.record(block, head - num_heads), offset, rounded);
  }
  for (int head = 0; head < num_kv_heads; head++) {
    const float* x = qkv + (num_heads + num_kv_heads + head) * head_dim;
    char* record = cache.record(block, head) + cache.values_offset;
    Element* to = is_quantised ? rounded : (Element*)record + offset * head_dim;
    int i = 0;
    for (; i + LANES <= head_dim; i += LANES) store_elements(to + i, load(x + i));
    for (; i < head_dim; i++) store_element(to + i, x[i]);
    if (is_quantised) write_record(cache.shape, record, offset, rounded);
  }
}

void Decoder::add_product(int thread, const Linear& linear, const float* bias, const Activations& a, int num_rows,
                          float* residual) const {
  linear.run(threads_, thread, a.words, a.stride, num_rows, [&](int panel, int first, int count, const float* c) {
    const int left = std::min(PANEL, shape_.hidden_size - panel * PANEL);
    const float* more = bias ? bias + panel * PANEL : nullptr;
    float* to = residual + size_t(first) * shape_.hidden_size + panel * PANEL;
    for (int r = 0; r < count; r++, c += PANEL, to += shape_.hidden_size) {
      int n = 0;
      for (; n + LANES <= left; n += LANES) {
        const Floats x = load(c + n);
        store(to + n, load(to + n) + (more ? x + load(more + n) : x));
      }
      for (; n < left; n++) to[n] += more ? c[n] + more[n] : c[n];
    }
  });
}

// gate * sigmoid(gate) * up, LANES at a time
INLINE Floats swiglu(Floats gate, Floats up) {
  const Floats exponent = gate * -1.44269504f;
  return gate * up * inverse(exp2(exponent < 126.f ? exponent : all(126.f)) + 1.f);
}

void Decoder::start_layer(int thread, int index, const TrunklineStep& step, float* residual) {
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
  const auto mine = share_rows(threads_, thread, num_rows);
  for (int row = mine.begin; row < mine.end; row++) rotate_row(layer, cache, step, row);
  threads_.barrier();
}

void Decoder::finish_layer(int thread, Tiles& tiles, int index, const TrunklineStep& step, float* residual) {
  const Layer& layer = layers_[index];
  const LayerCache cache = this->cache(step, index);
  const int num_rows = step.num_rows;

  if (!plan_.node_tasks.empty()) {
    attend_nodes(thread, tiles, cache);
    threads_.barrier();
  }
  attend_runs(thread, tiles, cache, step);
  tiles.set_narrow(false);
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
  const int size = shape_.hidden_size, last = step.num_layers - 1;
  const Outputs outputs(step);
  const bool is_partial = outputs.num_rows() < step.num_rows && last >= 0;
  run([&](int thread, Tiles& tiles) {
    const auto mine = share_rows(threads_, thread, step.num_rows);
    for (int row = mine.begin; row < mine.end; row++) {
      const Element* from = (const Element*)outer_.embedding + size_t(step.token_ids[row]) * size;
      for (int i = 0; i < size; i++) residual[size_t(row) * size + i] = to_float(from[i]);
    }
    // the same rows are normed by the same thread: no barrier is needed yet
    for (int layer = 0; layer <= last; layer++) {
      start_layer(thread, layer, step, residual);
      if (layer < last || !is_partial) finish_layer(thread, tiles, layer, step, residual);
    }
  });
  if (!is_partial || outputs.rows.empty()) return;
  // the outputs, moved together, go on alone
  const size_t query_bytes = queries_.stride * sizeof(Word), row_bytes = size * sizeof(float);
  for (int i = 0; i < outputs.num_rows(); i++) {
    memmove(queries_.row(i), queries_.row(outputs.rows[i]), query_bytes);
    memmove(residual + size_t(i) * size, residual + size_t(outputs.rows[i]) * size, row_bytes);
  }
  const TrunklineStep few = outputs.step();
  prepare(few);
  run([&](int thread, Tiles& tiles) { finish_layer(thread, tiles, last, few, residual); });
  for (int i = outputs.num_rows() - 1; i >= 0; i--)
    memmove(residual + size_t(outputs.rows[i]) * size, residual + size_t(i) * size, row_bytes);
}

void Decoder::logits(const float* residual, int num_rows, float* logits) {
  reserve(num_rows);
  const int vocab_size = shape_.vocab_size;
  run([&](int thread, Tiles& tiles) {
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

// The largest of a row's columns seen so far by one thread.
struct Largest {
  float value = -INFINITY;
  int id = -1;
  bool has_nan = false;

  void take(const float* columns, int count, int first_id) {
    for (int i = 0; i < count; i += LANES) {
      const Floats x = load(columns + i);
      has_nan |= any_nan(x);
      if (count - i >= LANES && !(largest(x) > value)) continue;
      for (int j = i; j < std::min(count, i + LANES); j++)
        if (columns[j] > value) value = columns[j], id = first_id + j;
    }
  }
};

void Decoder::greedy(const float* residual, int num_rows, int32_t* ids) {
  reserve(num_rows);
  std::vector<Largest> found(size_t(shape_.num_threads) * num_rows);
  run([&](int thread, Tiles& tiles) {
    norm_rows(thread, residual, num_rows, norm_);
    threads_.barrier();
    Largest* mine = &found[size_t(thread) * num_rows];
    head_.run(threads_, thread, normed_.words, normed_.stride, num_rows,
              [&](int panel, int first, int count, const float* c) {
                const int left = std::min(PANEL, shape_.vocab_size - panel * PANEL);
                for (int r = 0; r < count; r++) mine[first + r].take(c + r * PANEL, left, panel * PANEL);
              });
  });
  for (int row = 0; row < num_rows; row++) {
    Largest best;
    for (int thread = 0; thread < shape_.num_threads; thread++) {
      const Largest& other = found[size_t(thread) * num_rows + row];
      best.has_nan |= other.has_nan;
      if (other.value > best.value) best.value = other.value, best.id = other.id;
    }
    ids[row] = best.has_nan || !std::isfinite(best.value) ? -1 : best.id;
  }
}

void Decoder::linear(int index, int which, const Element* x, int num_rows, float* out) {
  const Layer& layer = layers_[index];
  const Linear& linear = which == 0 ? layer.qkv : which == 1 ? layer.o : which == 2 ? layer.gate_up : layer.down;
  const int inputs = which == 1 ? shape_.num_heads * shape_.head_dim : which == 3 ? shape_.intermediate_size : shape_.hidden_size;
  const int columns = linear.num_panels * PANEL;
  reserve(num_rows);
  const Activations& a = which == 1 ? attended_ : which == 3 ? activated_ : normed_;
  for (int row = 0; row < num_rows; row++) memcpy(a.row(row), x + size_t(row) * inputs, inputs * sizeof(Element));
  run([&](int thread, Tiles& tiles) {
    linear.run(threads_, thread, a.words, a.stride, num_rows, [&](int panel, int first, int count, const float* c) {
      for (int r = 0; r < count; r++)
        memcpy(out + size_t(first + r) * columns + panel * PANEL, c + r * PANEL, PANEL * sizeof(float));
    });
  });
}

}  // namespace trunkline
