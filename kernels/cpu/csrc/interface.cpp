// The plain C interface. Nothing throws across it: null, or a code other than 0, says that memory ran out.
#include "decoder.h"

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
  guarded([&] {
    trunkline::Tiles::ask_permission();
    decoder = new Decoder(*shape);
  });
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
int trunkline_greedy(void* decoder, const float* residual, int num_rows, int32_t* ids) {
  return guarded([&] { ((Decoder*)decoder)->greedy(residual, num_rows, ids); });
}
int trunkline_attention(void* decoder, int layer, const TrunklineStep* step, const void* q, void* out) {
  return guarded([&] { ((Decoder*)decoder)->attention(layer, *step, (const Element*)q, (Element*)out); });
}
// Takes the pages of memory that nobody has written yet; what is written meanwhile stays.
void trunkline_touch(char* data, size_t num_bytes) {
  constexpr size_t PAGE_BYTES = 4096;
  for (size_t i = 0; i < num_bytes; i += PAGE_BYTES) __atomic_fetch_or(data + i, 0, __ATOMIC_RELAXED);
}
int trunkline_linear(void* decoder, int layer, int which, const void* x, int num_rows, float* out) {
  return guarded([&] { ((Decoder*)decoder)->linear(layer, which, (const Element*)x, num_rows, out); });
}
}
