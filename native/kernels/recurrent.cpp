// The kernels of recurrent layers: see recurrent.h. Every output depends on the tokens of its request alone, in their
// order: a sequence gives the same results in chunks of any size.
#include "kernels/recurrent.h"

#include <cmath>

#include "kernels/isa_functions.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

constexpr int kScanVectors = 4;

// `size` floats at `from`, and zeros, in `N` vectors.
template <int N>
FW_INLINE void load_part(const float *from, int size, F32 (&out)[N]) {
  float part[N * kLanes] = {};
  if (size < N * kLanes) {
    std::memcpy(part, from, sizeof(float) * size_t(size));
    from = part;
  }
  FW_UNROLL for (int n = 0; n < N; ++n) out[n] = load(from + n * kLanes);
}

template <int N>
FW_INLINE void store_part(const F32 (&v)[N], int size, float *to) {
  float part[N * kLanes];
  float *out = size < N * kLanes ? part : to;
  FW_UNROLL for (int n = 0; n < N; ++n) store(out + n * kLanes, v[n]);
  if (out == part) std::memcpy(to, part, sizeof(float) * size_t(size));
}

// The values [column, column + N kLanes) of all tokens. They do not depend on the other values of the head.
template <int N>
FW_INLINE void scan_columns(const StateScan &s, int column) {
  const int width = smaller(s.value_dim - column, N * kLanes);
  const size_t row = size_t(s.padded_value_dim);
  float *state = s.state + column;
  for (int t = 0; t < s.num_tokens; ++t) {
    const float *before = t == 0 ? s.before + column : state;
    const float *q = s.q + size_t(t) * s.stride, *k = s.k + size_t(t) * s.stride;
    const F32 decay = set1(s.decay[size_t(t) * s.scalar_stride]), write = set1(s.write[size_t(t) * s.scalar_stride]);
    F32 v[N], added[N], out[N];
    load_part(s.v + size_t(t) * s.stride + column, width, v);
    FW_UNROLL for (int n = 0; n < N; ++n) out[n] = set1(0.f);
    if (s.gated_delta) {
      for (int i = 0; i < s.key_dim; ++i) {
        const F32 key = set1(k[i]);
        FW_UNROLL for (int n = 0; n < N; ++n) out[n] = fma(key, load(before + size_t(i) * row + n * kLanes), out[n]);
      }
      FW_UNROLL for (int n = 0; n < N; ++n) {
        added[n] = mul(write, sub(v[n], mul(decay, out[n])));
        out[n] = set1(0.f);
      }
    } else {
      FW_UNROLL for (int n = 0; n < N; ++n) {
        added[n] = mul(write, v[n]);
        out[n] = mul(set1(s.skip), v[n]);
      }
    }
    for (int i = 0; i < s.key_dim; ++i) {
      const F32 key = set1(k[i]), query = set1(q[i]);
      FW_UNROLL for (int n = 0; n < N; ++n) {
        const size_t at = size_t(i) * row + size_t(n * kLanes);
        const F32 value = fma(key, added[n], mul(decay, load(before + at)));
        store(state + at, value);
        out[n] = fma(query, value, out[n]);
      }
    }
    store_part(out, width, s.out + size_t(t) * s.out_stride + column);
  }
}

}  // namespace

void convolve(const Convolution &c) {
  const int before = c.kernel - 1;
  // The inputs of token t; of t < 0 they are in the past.
  auto input = [&](int t) FW_LAMBDA {
    return t < 0 ? c.past + size_t(before + t) * c.channel_stride : c.in + size_t(t) * c.in_stride;
  };
  for (int t = 0; t < c.num_tokens; ++t) {
    float *out = c.out + size_t(t) * c.channel_stride;
    for (int channel = c.begin; channel < c.end; channel += kLanes) {
      F32 sum = c.bias ? load(c.bias + channel) : set1(0.f);
      for (int i = 0; i < c.kernel; ++i) {
        sum = fma(load(c.weights + size_t(i) * c.channel_stride + channel), load(input(t - before + i) + channel), sum);
      }
      store(out + channel, c.silu ? div(sum, add(set1(1.f), exp_f32(sub(set1(0.f), sum)))) : sum);
    }
  }
  for (int i = 0; i < before; ++i) {
    float *last = c.last + size_t(i) * c.channel_stride;
    const float *from = input(c.num_tokens - before + i);
    for (int channel = c.begin; channel < c.end; channel += kLanes) store(last + channel, load(from + channel));
  }
}

void scan_state(const StateScan &s) {
  constexpr int kWidth = kScanVectors * kLanes;
  int column = 0;
  for (; column < s.value_dim && column + kWidth <= s.padded_value_dim; column += kWidth) {
    scan_columns<kScanVectors>(s, column);
  }
  for (; column < s.value_dim; column += kLanes) scan_columns<1>(s, column);
}

void norm_parts(const float *x, const float *weight, size_t weight_stride, int parts, int size, float eps, float *out) {
  const int whole = size / kLanes * kLanes;
  for (int part = 0; part < parts; ++part, x += size, out += size, weight += weight_stride) {
    F32 squares = set1(0.f);
    for (int i = 0; i < whole; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    float sum = reduce_add(squares);
    for (int i = whole; i < size; ++i) sum += x[i] * x[i];
    const float factor = 1.f / std::sqrt(sum / float(size) + eps);
    for (int i = 0; i < whole; i += kLanes) store(out + i, mul(mul(load(x + i), set1(factor)), load(weight + i)));
    for (int i = whole; i < size; ++i) out[i] = x[i] * factor * weight[i];
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
