// The kernels of recurrent layers: see recurrent.h. Every output depends on the tokens of its request alone, in their
// order: a sequence gives the same results in chunks of any size.
#include "kernels/recurrent.h"

#include <cmath>

#include "kernels/isa_functions.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

constexpr int kScanVectors = 4, kScanTokens = kLanes == 16 ? 4 : 2;

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
struct Columns {
  static constexpr int kWidth = N * kLanes;
  const StateScan &s;
  const int column;
  const float *const before = s.before + size_t(s.key_dim) * size_t(column);  // [key_dim][kWidth], as `state`
  float *const state = s.state + size_t(s.key_dim) * size_t(column);
  const int width = smaller(s.value_dim - column, kWidth);

  FW_INLINE F32 decay(int t) const { return set1(s.decay[size_t(t) * s.scalar_stride]); }
  FW_INLINE F32 write(int t) const { return set1(s.write[size_t(t) * s.scalar_stride]); }
  FW_INLINE const float *key(int t) const { return s.k + size_t(t) * s.stride; }
  FW_INLINE const float *query(int t) const { return s.q + size_t(t) * s.stride; }

  // S = S decay + k (write v)ᵀ, out = Sᵀ q + skip v for the vectors [first, first + M) of the tokens [t, t + T): a
  // number of the state is in a register meanwhile.
  template <int M, int T>
  FW_INLINE void mamba2(int t, int first) const {
    const float *from = (t == 0 ? before : state) + first * kLanes;
    float *to = state + first * kLanes;
    const int at = column + first * kLanes, count = smaller(s.value_dim - at, M * kLanes);
    F32 added[T][M], out[T][M], decays[T];
    FW_UNROLL for (int j = 0; j < T; ++j) {
      load_part(s.v + size_t(t + j) * s.stride + at, count, out[j]);
      decays[j] = decay(t + j);
      FW_UNROLL for (int n = 0; n < M; ++n) {
        added[j][n] = mul(write(t + j), out[j][n]);
        out[j][n] = mul(set1(s.skip), out[j][n]);
      }
    }
    for (int i = 0; i < s.key_dim; ++i) {
      F32 value[M];
      FW_UNROLL for (int n = 0; n < M; ++n) value[n] = load(from + i * kWidth + n * kLanes);
      FW_UNROLL for (int j = 0; j < T; ++j) {
        const F32 k = set1(key(t + j)[i]), q = set1(query(t + j)[i]);
        FW_UNROLL for (int n = 0; n < M; ++n) {
          value[n] = fma(decays[j], value[n], mul(k, added[j][n]));
          out[j][n] = fma(q, value[n], out[j][n]);
        }
      }
      FW_UNROLL for (int n = 0; n < M; ++n) store(to + i * kWidth + n * kLanes, value[n]);
    }
    FW_UNROLL for (int j = 0; j < T; ++j) store_part(out[j], count, s.out + size_t(t + j) * s.out_stride + at);
  }

  // One pass over the state per token computes it and Sᵀ k of the token that follows.
  FW_INLINE void gated_delta() const {
    F32 known[N];  // Sᵀ k, with the state before the token
    FW_UNROLL for (int n = 0; n < N; ++n) known[n] = set1(0.f);
    for (int i = 0; i < s.key_dim; ++i) {
      const F32 k = set1(key(0)[i]);
      FW_UNROLL for (int n = 0; n < N; ++n) known[n] = fma(k, load(before + i * kWidth + n * kLanes), known[n]);
    }
    for (int t = 0; t < s.num_tokens; ++t) {
      const float *from = t == 0 ? before : state;
      const float *k = key(t), *q = query(t), *following = key(smaller(t + 1, s.num_tokens - 1));
      const F32 decay = this->decay(t);
      F32 added[N], out[N];
      load_part(s.v + size_t(t) * s.stride + column, width, added);
      FW_UNROLL for (int n = 0; n < N; ++n) {
        added[n] = mul(write(t), sub(added[n], mul(decay, known[n])));
        known[n] = out[n] = set1(0.f);
      }
      for (int i = 0; i < s.key_dim; ++i) {
        const F32 ki = set1(k[i]), qi = set1(q[i]), next = set1(following[i]);
        FW_UNROLL for (int n = 0; n < N; ++n) {
          const F32 value = fma(ki, added[n], mul(decay, load(from + i * kWidth + n * kLanes)));
          store(state + i * kWidth + n * kLanes, value);
          out[n] = fma(qi, value, out[n]);
          known[n] = fma(next, value, known[n]);
        }
      }
      store_part(out, width, s.out + size_t(t) * s.out_stride + column);
    }
  }

  FW_INLINE void run() const {
    if (s.gated_delta) return gated_delta();
    int t = 0;
    constexpr int kPart = N > 1 ? 2 : 1;
    for (; t + kScanTokens <= s.num_tokens; t += kScanTokens) {
      for (int n = 0; n < N && column + n * kLanes < s.value_dim; n += kPart) mamba2<kPart, kScanTokens>(t, n);
    }
    for (; t < s.num_tokens; ++t) mamba2<N, 1>(t, 0);
  }
};

}  // namespace

void convolve(const Convolution &c) {
  const int before = c.kernel - 1;
  // The inputs of token t; of t < 0 they are in the past.
  auto input = [&](int t) FW_LAMBDA {
    return t < 0 ? c.past + size_t(before + t) * c.channel_stride : c.in + size_t(t) * c.in_stride;
  };
  // The tokens [t, t + T): a weight is in a register meanwhile.
  auto run = [&](int t, auto tokens) FW_LAMBDA {
    constexpr int T = tokens;
    for (int channel = c.begin; channel < c.end; channel += kLanes) {
      F32 sums[T];
      FW_UNROLL for (int j = 0; j < T; ++j) sums[j] = c.bias ? load(c.bias + channel) : set1(0.f);
      for (int i = 0; i < c.kernel; ++i) {
        const F32 weight = load(c.weights + size_t(i) * c.channel_stride + channel);
        FW_UNROLL for (int j = 0; j < T; ++j) sums[j] = fma(weight, load(input(t + j - before + i) + channel), sums[j]);
      }
      FW_ROLLED for (int j = 0; j < T; ++j) {
        const F32 sum = sums[j];
        store(c.out + size_t(t + j) * c.channel_stride + channel,
              c.silu ? div(sum, add(set1(1.f), exp_f32(sub(set1(0.f), sum)))) : sum);
      }
    }
  };
  int first = 0;
  for (; first + kScanTokens <= c.num_tokens; first += kScanTokens) {
    run(first, std::integral_constant<int, kScanTokens>{});
  }
  for (; first < c.num_tokens; ++first) run(first, std::integral_constant<int, 1>{});
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
    Columns<kScanVectors>{s, column}.run();
  }
  for (; column < s.value_dim; column += kLanes) Columns<1>{s, column}.run();
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
