#include "kernels/isa_functions.h"

#include <cmath>

namespace foreword::kernels::FOREWORD_ISA {
namespace {

template <class F>
FW_INLINE void over_vectors(size_t size, F &&f) {
  for (size_t k = 0; k < size; k += kLanes) f(k);
}

FW_INLINE F32 silu(F32 x) { return div(x, add(set1(1.f), exp_f32(sub(set1(0.f), x)))); }

FW_INLINE F32 sigmoid(F32 x) { return div(set1(1.f), add(set1(1.f), exp_f32(sub(set1(0.f), x)))); }

// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
FW_INLINE F32 gelu_tanh(F32 x) {
  const F32 cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
  return mul(mul(set1(0.5f), x), add(set1(1.f), tanh_f32(mul(set1(0.7978845608028654f), cubic))));
}

}  // namespace

// `weight` and x are padded with zeros to whole vectors.
void rms_norm(const float *x, const float *weight, int size, float eps, float *out) {
  const size_t padded = round_up(size_t(size), size_t(kLanes));
  F32 squares = set1(0.f);
  over_vectors(padded, [&](size_t k) FW_LAMBDA { squares = fma(load(x + k), load(x + k), squares); });
  const float mean = reduce_add(squares) / float(size);
  const F32 factor = set1(1.f / std::sqrt(mean + eps));
  over_vectors(padded, [&](size_t k) FW_LAMBDA { store(out + k, mul(mul(load(x + k), factor), load(weight + k))); });
}

void gate_mul(Gate gate, const float *g, const float *u, size_t size, float *out) {
  if (gate == Gate::silu) {
    over_vectors(size, [&](size_t k) FW_LAMBDA { store(out + k, mul(silu(load(g + k)), load(u + k))); });
  } else if (gate == Gate::sigmoid) {
    over_vectors(size, [&](size_t k) FW_LAMBDA { store(out + k, mul(sigmoid(load(g + k)), load(u + k))); });
  } else {
    over_vectors(size, [&](size_t k) FW_LAMBDA { store(out + k, mul(gelu_tanh(load(g + k)), load(u + k))); });
  }
}

void add_row(const float *x, size_t size, float *out) {
  over_vectors(size, [&](size_t k) FW_LAMBDA { store(out + k, add(load(out + k), load(x + k))); });
}

void rotate(const float *cosines, const float *sines, int pairs, float *x) {
  int j = 0;
  for (; j + kLanes <= pairs; j += kLanes) {
    const F32 a = load(x + j), b = load(x + j + pairs), c = load(cosines + j), s = load(sines + j);
    store(x + j, sub(mul(a, c), mul(b, s)));
    store(x + j + pairs, add(mul(b, c), mul(a, s)));
  }
  for (; j < pairs; ++j) {
    const float a = x[j], b = x[j + pairs];
    x[j] = a * cosines[j] - b * sines[j];
    x[j + pairs] = b * cosines[j] + a * sines[j];
  }
}

void softcap(float cap, size_t size, float *x) {
  const F32 c = set1(cap);
  over_vectors(size, [&](size_t k) FW_LAMBDA { store(x + k, mul(c, tanh_f32(div(load(x + k), c)))); });
}

}  // namespace foreword::kernels::FOREWORD_ISA
