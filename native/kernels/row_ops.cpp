#include "kernels/isa_functions.h"

#include <cmath>

namespace foreword::kernels::FOREWORD_ISA {
namespace {

template <class F>
FW_INLINE void over_vectors(size_t size, F &&f) {
  for (size_t k = 0; k < size; k += kLanes) f(k);
}

// 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
FW_INLINE F32 gelu_tanh(F32 x) {
  const F32 cubic = fma(mul(mul(x, x), x), set1(0.044715f), x);
  return mul(mul(set1(0.5f), x), add(set1(1.f), tanh_f32(mul(set1(0.7978845608028654f), cubic))));
}

// 0.5 x (1 + erf(x / sqrt(2))) = max(x, 0) - |x| q / 2, with q = erfc(|x| / sqrt(2)) to 2e-7: Abramowitz and Stegun
// 7.1.26.
FW_INLINE F32 gelu(F32 x) {
  const F32 magnitude = abs_f32(x), z = mul(magnitude, set1(0.70710678118654752f));
  const F32 t = div(set1(1.f), fma(z, set1(0.3275911f), set1(1.f)));
  F32 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const F32 q = mul(mul(p, t), exp_f32(sub(set1(0.f), mul(z, z))));
  return sub(max_f32(x, set1(0.f)), mul(mul(set1(0.5f), magnitude), q));
}

// f(gate), with the gate as a function of a vector.
template <class F>
FW_INLINE void with_gate(Gate gate, F &&f) {
  switch (gate) {
    case Gate::silu: return f([](F32 x) FW_LAMBDA { return silu(x); });
    case Gate::gelu_tanh: return f([](F32 x) FW_LAMBDA { return gelu_tanh(x); });
    case Gate::gelu: return f([](F32 x) FW_LAMBDA { return gelu(x); });
    case Gate::sigmoid: return f([](F32 x) FW_LAMBDA { return sigmoid(x); });
    case Gate::relu: return f([](F32 x) FW_LAMBDA { return max_f32(x, set1(0.f)); });
    case Gate::relu2: return f([](F32 x) FW_LAMBDA {
      const F32 positive = max_f32(x, set1(0.f));
      return mul(positive, positive);
    });
  }
}

}  // namespace

// `weight` and x are padded with zeros to whole vectors.
void rms_norm(const float *x, const float *weight, int size, float eps, float *out) {
  const size_t padded = round_up(size_t(size), size_t(kLanes));
  F32 squares[2] = {set1(0.f), set1(0.f)};
  in_turns(int(padded), [&](int i, int k) FW_LAMBDA { squares[i] = fma(load(x + k), load(x + k), squares[i]); });
  const float mean = reduce_add(add(squares[0], squares[1])) / float(size);
  const F32 factor = set1(1.f / std::sqrt(mean + eps));
  over_vectors(padded, [&](size_t k) FW_LAMBDA { store(out + k, mul(mul(load(x + k), factor), load(weight + k))); });
}

// `weight`, `bias` and x are padded with zeros to whole vectors.
void layer_norm(const float *x, const float *weight, const float *bias, int size, float eps, float *out) {
  const size_t padded = round_up(size_t(size), size_t(kLanes));
  F32 sum = set1(0.f), squares = set1(0.f);
  over_vectors(padded, [&](size_t k) FW_LAMBDA { sum = add(sum, load(x + k)); });
  const F32 mean = set1(reduce_add(sum) / float(size));
  over_vectors(padded, [&](size_t k) FW_LAMBDA {
    const F32 d = keep_lanes(sub(load(x + k), mean), 0, size - int(k), set1(0.f));
    squares = fma(d, d, squares);
  });
  const F32 factor = set1(1.f / std::sqrt(reduce_add(squares) / float(size) + eps));
  over_vectors(padded, [&](size_t k) FW_LAMBDA {
    const F32 scaled = mul(mul(sub(load(x + k), mean), factor), load(weight + k));
    store(out + k, bias ? add(scaled, load(bias + k)) : scaled);
  });
}

void gate_mul(Gate gate, const float *g, const float *u, size_t size, float *out) {
  with_gate(gate, [&](auto act) FW_LAMBDA {
    over_vectors(size, [&](size_t k) FW_LAMBDA { store(out + k, mul(act(load(g + k)), load(u + k))); });
  });
}

void clamped_gate_mul(float alpha, float limit, const float *g, const float *u, size_t size, float *out) {
  const F32 top = set1(limit), bottom = set1(-limit);
  over_vectors(size, [&](size_t k) FW_LAMBDA {
    const F32 gate = min_f32(top, load(g + k)), up = max_f32(bottom, min_f32(top, load(u + k)));  // NaN remains
    store(out + k, mul(mul(gate, sigmoid(mul(set1(alpha), gate))), add(up, set1(1.f))));
  });
}

void activate(Gate gate, size_t size, float *x) {
  with_gate(gate, [&](auto act) FW_LAMBDA {
    over_vectors(size, [&](size_t k) FW_LAMBDA { store(x + k, act(load(x + k))); });
  });
}

void xielu(const float *numbers, size_t size, float *x) {
  const F32 positive = set1(numbers[0]), negative = set1(numbers[1]), beta = set1(numbers[2]), eps = set1(numbers[3]);
  over_vectors(size, [&](size_t k) FW_LAMBDA {
    const F32 v = load(x + k), curve = sub(sub(exp_f32(min_f32(v, eps)), set1(1.f)), v);
    const F32 below = fma(negative, curve, mul(beta, v));
    store(x + k, where_positive(v, mul(fma(positive, v, beta), v), below));
  });
}

void add_row(const float *x, size_t size, float *out) {
  over_vectors(size, [&](size_t k) FW_LAMBDA { store(out + k, add(load(out + k), load(x + k))); });
}

void add_scaled(float scale, const float *x, size_t size, float *out) {
  over_vectors(size, [&](size_t k) FW_LAMBDA { store(out + k, fma(set1(scale), load(x + k), load(out + k))); });
}

void mix_rows(const float *factors, int count, float *const *rows, size_t size) {
  // Four rows, the number in Gemma 3n, are in registers.
  auto mix = [&](auto rows_of, int num_rows) FW_LAMBDA {
    F32 before[rows_of];
    over_vectors(size, [&](size_t i) FW_LAMBDA {
      for (int j = 0; j < num_rows; ++j) before[j] = load(rows[j] + i);
      for (int k = 0; k < num_rows; ++k) {
        F32 sum = before[k];
        for (int j = 0; j < num_rows; ++j) sum = fma(set1(factors[k * num_rows + j]), before[j], sum);
        store(rows[k] + i, sum);
      }
    });
  };
  if (count == 4) return mix(std::integral_constant<int, 4>{}, 4);
  mix(std::integral_constant<int, kMostStreams>{}, count);
}

float dot(const float *a, const float *b, int size) {
  F32 sums[2] = {set1(0.f), set1(0.f)};
  const int whole = size / kLanes * kLanes;
  in_turns(whole, [&](int i, int k) FW_LAMBDA { sums[i] = fma(load(a + k), b ? load(b + k) : set1(1.f), sums[i]); });
  float sum = reduce_add(add(sums[0], sums[1]));
  for (int i = whole; i < size; ++i) sum += b ? a[i] * b[i] : a[i];
  return sum;
}

void make_head(const Head &h, float *out) {
  const auto [cosines, sines, pairs] = h.rotary;
  const float *x = h.from;
  if (h.bias || h.norm) {
    for (int d = 0; d < h.dim; ++d) out[d] = h.bias ? x[d] + h.bias[d] : x[d];
    if (h.norm && h.centred) {
      layer_norm(out, h.norm, h.norm_bias, h.dim, h.norm_eps, out);
    } else if (h.norm) {
      rms_norm(out, h.norm, h.dim, h.norm_eps, out);
    }
    x = out;
  }
  const F32 factor = set1(h.factor);
  auto finish = [&](int d, F32 v) FW_LAMBDA { store(out + d, mul(h.scales ? mul(v, load(h.scales + d)) : v, factor)); };
  auto finish_one = [&](int d, float v) FW_LAMBDA { out[d] = (h.scales ? v * h.scales[d] : v) * h.factor; };

  // Pairs (x[j], x[j + pairs]), each by its angle; then the numbers that are not rotated.
  int j = 0;
  for (; j + kLanes <= pairs; j += kLanes) {
    const F32 a = load(x + j), b = load(x + j + pairs), c = load(cosines + j), s = load(sines + j);
    finish(j, sub(mul(a, c), mul(b, s)));
    finish(j + pairs, add(mul(b, c), mul(a, s)));
  }
  for (; j < pairs; ++j) {
    const float a = x[j], b = x[j + pairs];
    finish_one(j, a * cosines[j] - b * sines[j]);
    finish_one(j + pairs, b * cosines[j] + a * sines[j]);
  }
  int d = 2 * pairs;
  for (; d + kLanes <= h.dim; d += kLanes) finish(d, load(x + d));
  for (; d < h.dim; ++d) finish_one(d, x[d]);
}

void softcap(float cap, size_t size, float *x) {
  const F32 c = set1(cap);
  over_vectors(size, [&](size_t k) FW_LAMBDA { store(x + k, mul(c, tanh_f32(div(load(x + k), c)))); });
}

}  // namespace foreword::kernels::FOREWORD_ISA
