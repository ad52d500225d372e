// The kernels of recurrent layers: see recurrent.h. Every output depends on the tokens of its request alone, in their
// order: a sequence gives the same results in chunks of any size.
#include "kernels/recurrent.h"

#include <cmath>

#include "kernels/isa_functions.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

constexpr int kScanVectors = 4, kScanTokens = kLanes == 16 ? 4 : 2;

// The scales of states for which their matrices are not multiplied: values divided by them are far from infinity.
constexpr float kLeastScale = 0x1p-80f;
FW_INLINE bool is_kept(float scale) { return scale >= kLeastScale && scale <= 1.f; }

[[gnu::noinline]] void scale_matrix(const float *from, float scale, int size, float *to) {
  for (int i = 0; i < size; i += kLanes) store(to + i, mul(set1(scale), load(from + i)));
}

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

// The values [column, column + N kLanes) of all tokens. They do not depend on the other values of the head. The state
// is S = c X: the decay of a token is that of the scale c, until c is too small and multiplied into the matrix X.
template <int N>
struct Columns {
  static constexpr int kWidth = N * kLanes;
  const StateScan &s;
  const int column;
  const size_t offset = kScaleFloats + size_t(s.key_dim) * size_t(column);
  const float *const before = s.before + offset;  // [key_dim][kWidth], as `state`
  float *const state = s.state + offset;
  const int width = smaller(s.value_dim - column, kWidth);

  FW_INLINE float write(int t) const { return s.write[size_t(t) * s.write_stride]; }
  FW_INLINE const float *decays(int t) const { return s.decay + size_t(t) * s.decay_stride; }
  FW_INLINE float decayed(float scale, int t) const { return scale * decays(t)[0]; }
  FW_INLINE const float *key(int t) const { return s.k + size_t(t) * s.stride; }
  FW_INLINE const float *query(int t) const { return s.q + size_t(t) * s.stride; }

  // A state: scale · matrix.
  struct Scaled {
    const float *matrix;
    float scale;
  };
  FW_INLINE Scaled before_token(int t, float scale) const { return {t == 0 ? before : state, scale}; }

  // The same state with a scale of (0.5, 1]. The matrix is multiplied by a power of two, which is exact: results do not
  // depend on the tokens at which it is done.
  FW_INLINE Scaled normalized(Scaled x) const {
    int exponent;
    float scale = std::frexp(x.scale, &exponent);  // is in [0.5, 1)
    if (scale == 0.5f) scale = 1.f, --exponent;
    scale_matrix(x.matrix, std::ldexp(1.f, exponent), s.key_dim * kWidth, state);
    return {state, scale};
  }

  // The state after the decay of the token t.
  FW_INLINE Scaled decay(Scaled x, int t) const {
    if (is_kept(decayed(x.scale, t))) return {x.matrix, decayed(x.scale, t)};
    x = normalized(x);
    const float scale = decayed(x.scale, t);
    if (is_kept(scale)) return {state, scale};
    scale_matrix(state, scale, s.key_dim * kWidth, state);
    return {state, 1.f};
  }

  // Sets the scales after the tokens [t, t + kScanTokens). Returns whether all are kept.
  FW_INLINE bool scales_of(int t, float scale, float (&scales)[kScanTokens]) const {
    for (int j = 0; j < kScanTokens; ++j) {
      scales[j] = scale = decayed(scale, t + j);
      if (!is_kept(scale)) return false;
    }
    return true;
  }

  // Reads what the tokens [t, end) need besides keys and queries, which all heads of a group read, into the cache.
  FW_INLINE void fetch(int t, int end) const {
    for (; t < smaller(end, s.num_tokens); ++t) {
      const float *values = s.v + size_t(t) * s.stride + column;
      for (int i = 0; i < width; i += kLanes) prefetch<3>(values + i);
      prefetch<3>(decays(t));
      prefetch<3>(s.write + size_t(t) * s.write_stride);
    }
  }

  // X += k (write v / c)ᵀ, out = c Xᵀ q + skip v for the vectors [first, first + M) of the tokens [t, t + T) with their
  // scales c: a number of the matrix is in a register meanwhile.
  template <int M, int T>
  FW_INLINE void mamba2(const float *matrix, const float *scales, int t, int first) const {
    const float *from = matrix + first * kLanes;
    float *to = state + first * kLanes;
    const int at = column + first * kLanes, count = smaller(s.value_dim - at, M * kLanes);
    F32 added[T][M], out[T][M];
    FW_UNROLL for (int j = 0; j < T; ++j) {
      load_part(s.v + size_t(t + j) * s.stride + at, count, added[j]);
      const F32 factor = set1(write(t + j) / scales[j]);
      FW_UNROLL for (int n = 0; n < M; ++n) {
        added[j][n] = mul(factor, added[j][n]);
        out[j][n] = set1(0.f);
      }
    }
    const float *keys[T], *queries[T];
    FW_UNROLL for (int j = 0; j < T; ++j) keys[j] = key(t + j), queries[j] = query(t + j);
    for (int i = 0, key_dim = s.key_dim; i < key_dim; ++i) {
      F32 value[M];
      FW_UNROLL for (int n = 0; n < M; ++n) value[n] = load(from + i * kWidth + n * kLanes);
      FW_UNROLL for (int j = 0; j < T; ++j) {
        const F32 k = set1(keys[j][i]), q = set1(queries[j][i]);
        FW_UNROLL for (int n = 0; n < M; ++n) {
          value[n] = fma(k, added[j][n], value[n]);
          out[j][n] = fma(q, value[n], out[j][n]);
        }
      }
      FW_UNROLL for (int n = 0; n < M; ++n) store(to + i * kWidth + n * kLanes, value[n]);
    }
    FW_UNROLL for (int j = 0; j < T; ++j) {
      F32 v[M];
      load_part(s.v + size_t(t + j) * s.stride + at, count, v);
      FW_UNROLL for (int n = 0; n < M; ++n) v[n] = fma(set1(scales[j]), out[j][n], mul(set1(s.skip), v[n]));
      store_part(v, count, s.out + size_t(t + j) * s.out_stride + at);
    }
  }

  // Returns the scale of the state after the last token.
  FW_INLINE float mamba2() const {
    constexpr int kPart = N > 1 ? 2 : 1;
    float scale = s.before[0], scales[kScanTokens];
    for (int t = 0; t < s.num_tokens;) {
      Scaled x = before_token(t, scale);
      bool are_kept = false;
      if (t + kScanTokens <= s.num_tokens) {
        are_kept = scales_of(t, scale, scales);
        if (!are_kept) {
          x = normalized(x);
          are_kept = scales_of(t, x.scale, scales);
        }
      }
      if (are_kept) {
        fetch(t + kScanTokens, t + 2 * kScanTokens);
        for (int n = 0; n < N && column + n * kLanes < s.value_dim; n += kPart) {
          mamba2<kPart, kScanTokens>(x.matrix, scales, t, n);
        }
        scale = scales[kScanTokens - 1];
        t += kScanTokens;
      } else {
        x = decay(x, t);
        mamba2<N, 1>(x.matrix, &x.scale, t++, 0);
        scale = x.scale;
      }
    }
    return scale;
  }

  // As mamba2. One pass over the matrix per token computes it and Xᵀ k of the token that follows. Has each number of a
  // key a decay, its row of X is multiplied by that, the scale is 1, and k of the token that follows has its decays.
  template <bool IsByChannel>
  FW_INLINE float gated_delta() const {
    float scale = IsByChannel ? 1.f : s.before[0];
    F32 known[N];  // Xᵀ k, with the matrix before the token
    FW_UNROLL for (int n = 0; n < N; ++n) known[n] = set1(0.f);
    for (int i = 0; i < s.key_dim; ++i) {
      const F32 k = set1(IsByChannel ? key(0)[i] * decays(0)[i] : key(0)[i]);
      FW_UNROLL for (int n = 0; n < N; ++n) known[n] = fma(k, load(before + i * kWidth + n * kLanes), known[n]);
    }
    for (int t = 0; t < s.num_tokens; ++t) {
      const int following = smaller(t + 1, s.num_tokens - 1);
      const float *k = key(t), *q = query(t), *own = decays(t), *next_k = key(following), *next_own = decays(following);
      const F32 known_scale = set1(IsByChannel ? 1.f : decayed(scale, t));
      const Scaled x = IsByChannel ? Scaled{t == 0 ? before : state, 1.f} : decay(before_token(t, scale), t);
      scale = x.scale;
      const F32 factor = set1(write(t) / scale);
      F32 added[N], out[N];
      load_part(s.v + size_t(t) * s.stride + column, width, added);
      FW_UNROLL for (int n = 0; n < N; ++n) {
        added[n] = mul(factor, sub(added[n], mul(known_scale, known[n])));
        known[n] = out[n] = set1(0.f);
      }
      for (int i = 0; i < s.key_dim; ++i) {
        const F32 ki = set1(k[i]), qi = set1(q[i]), next = set1(IsByChannel ? next_k[i] * next_own[i] : next_k[i]);
        FW_UNROLL for (int n = 0; n < N; ++n) {
          const F32 from = load(x.matrix + i * kWidth + n * kLanes), change = mul(ki, added[n]);
          // Not fused: processors of AMD have other units for additions, whose registers stores do not read.
          const F32 value = IsByChannel ? fma(set1(own[i]), from, change) : add(from, change);
          store(state + i * kWidth + n * kLanes, value);
          out[n] = fma(qi, value, out[n]);
          known[n] = fma(next, value, known[n]);
        }
      }
      FW_UNROLL for (int n = 0; n < N; ++n) out[n] = mul(set1(scale), out[n]);
      store_part(out, width, s.out + size_t(t) * s.out_stride + column);
    }
    return scale;
  }
};

// ln(1 + e^x) = max(x, 0) + ln(1 + u), with u = e^−|x| and the minimax polynomial of ln(1 + u) / u, to 3e-8. NaN
// remains.
FW_INLINE F32 softplus_f32(F32 x) {
  constexpr float kTerms[] = {5.232642870e-3f, -2.950497530e-2f, 7.822541147e-2f,  -1.366318911e-1f, 1.910597384e-1f,
                              -2.484297156e-1f, 3.331909478e-1f, -4.999949336e-1f, 9.999999404e-1f};
  const F32 u = exp_f32(sub(set1(0.f), abs_f32(x)));
  F32 p = set1(kTerms[0]);
  FW_UNROLL for (int i = 1; i < 9; ++i) p = fma(p, u, set1(kTerms[i]));
  return fma(p, u, max_f32(set1(0.f), x));
}

// A vector of channels of mamba1, for the tokens [t, t + T): a number of the state is in a register meanwhile.
template <int T>
FW_INLINE void scan_channels(const SelectiveScan &s, int t, int channel, const float *before, float *state,
                             const float *rate) {
  constexpr float kLog2E = 1.44269504088896341f;
  F32 exponent[T], added[T], out[T];
  FW_UNROLL for (int j = 0; j < T; ++j) {
    const F32 step = load(s.step + size_t(t + j) * s.step_stride + channel);
    const F32 dt = softplus_f32(add(step, load(s.step_bias + channel)));
    exponent[j] = mul(dt, set1(-kLog2E));
    added[j] = mul(dt, load(s.x + size_t(t + j) * s.stride + channel));
    out[j] = set1(0.f);
  }
  const float *k = s.k + size_t(t) * s.key_stride, *q = s.q + size_t(t) * s.key_stride;
  for (int i = 0; i < s.key_dim; ++i) {
    const F32 rates = load(rate + i * kChannelGroup);
    F32 value = load(before + i * kChannelGroup);
    FW_UNROLL for (int j = 0; j < T; ++j) {
      const F32 decayed = mul(decay_f32(mul(rates, exponent[j])), value);
      value = fma(set1(k[size_t(j) * s.key_stride + size_t(i)]), added[j], decayed);
      out[j] = fma(set1(q[size_t(j) * s.key_stride + size_t(i)]), value, out[j]);
    }
    store(state + i * kChannelGroup, value);
  }
  FW_UNROLL for (int j = 0; j < T; ++j) {
    const F32 z = load(s.gate + size_t(t + j) * s.stride + channel);
    const F32 y = fma(load(s.skip + channel), load(s.x + size_t(t + j) * s.stride + channel), out[j]);
    store(s.out + size_t(t + j) * s.out_stride + channel, mul(y, silu(z)));
  }
}

// 1 − e^−x for x >= 0: near 0 a series, since the difference would lose its bits.
FW_INLINE F32 one_minus_exp(F32 x) {
  constexpr float kTerms[] = {1.f / 5040.f, -1.f / 720.f, 1.f / 120.f, -1.f / 24.f, 1.f / 6.f, -1.f / 2.f, 1.f};
  F32 p = set1(kTerms[0]);
  FW_UNROLL for (int i = 1; i < 7; ++i) p = fma(p, x, set1(kTerms[i]));
  return where_positive(sub(x, set1(0.5f)), sub(set1(1.f), exp_f32(sub(set1(0.f), x))), mul(p, x));
}

}  // namespace

void convolve(const Convolution &c) {
  const int before = c.kernel - 1;
  // The tokens [t, t + T), with the inputs of those before them in `past`: a weight is in a register meanwhile. Their
  // last inputs are kept before the outputs take their place.
  auto run = [&](int t, const float *past, auto tokens) FW_LAMBDA {
    constexpr int T = tokens;
    float *const rows = c.rows + size_t(t) * c.stride;
    for (int channel = c.begin; channel < c.end; channel += kLanes) {
      auto input = [&](int i) FW_LAMBDA {
        const float *row = i < before ? past + size_t(i) * c.channel_stride : rows + size_t(i - before) * c.stride;
        return load(row + channel);
      };
      F32 sums[T];
      FW_UNROLL for (int j = 0; j < T; ++j) sums[j] = c.bias ? load(c.bias + channel) : set1(0.f);
      for (int i = 0; i < c.kernel; ++i) {
        const F32 weight = load(c.weights + size_t(i) * c.channel_stride + channel);
        FW_UNROLL for (int j = 0; j < T; ++j) sums[j] = fma(weight, input(i + j), sums[j]);
      }
      for (int i = 0; i < before; ++i) store(c.last + size_t(i) * c.channel_stride + channel, input(T + i));
      FW_ROLLED for (int j = 0; j < T; ++j) {
        const F32 sum = sums[j];
        store(rows + size_t(j) * c.stride + channel, c.silu ? silu(sum) : sum);
      }
    }
  };
  const float *past = c.past;
  for (int t = 0; t < c.num_tokens; past = c.last) {
    if (t + kScanTokens <= c.num_tokens) {
      run(t, past, std::integral_constant<int, kScanTokens>{});
      t += kScanTokens;
    } else {
      run(t++, past, std::integral_constant<int, 1>{});
    }
  }
}

void scan_state(const StateScan &s) {
  constexpr int kWidth = kScanVectors * kLanes;
  float scale = 0.f;  // is the same for all columns
  auto run = [&](auto columns) FW_LAMBDA {
    scale = s.channel_decays ? columns.template gated_delta<true>()
            : s.gated_delta  ? columns.template gated_delta<false>()
                             : columns.mamba2();
  };
  int column = 0;
  for (; column < s.value_dim && column + kWidth <= s.padded_value_dim; column += kWidth) {
    run(Columns<kScanVectors>{s, column});
  }
  for (; column < s.value_dim; column += kLanes) run(Columns<1>{s, column});
  s.state[0] = scale;
}

void channel_decays(const float *steps, const float *bias, const float *rates, float least_log, size_t size,
                    float *out) {
  for (size_t i = 0; i < size; i += kLanes) {
    const F32 x = add(load(steps + i), load(bias + i)), rate = load(rates + i);
    if (least_log == 0.f) {
      store(out + i, exp_f32(mul(sub(set1(0.f), rate), softplus_f32(x))));
    } else {
      store(out + i, exp_f32(div(set1(least_log), add(set1(1.f), exp_f32(mul(sub(set1(0.f), rate), x))))));
    }
  }
}

// A few groups at a time, whose states stay in the cache over all tokens, while rows are read in longer pieces.
void scan_selective(const SelectiveScan &s) {
  constexpr int kChannels = 8 * kChannelGroup;
  auto run = [&](int t, int first, const float *before, auto tokens) FW_LAMBDA {
    for (int channel = first; channel < smaller(first + kChannels, s.end); channel += kLanes) {
      const int lane = channel % kChannelGroup;
      const size_t at = size_t(channel - lane) * size_t(s.key_dim) + size_t(lane);
      scan_channels<tokens>(s, t, channel, before + at, s.state + at, s.rate + at);
    }
  };
  for (int first = s.begin; first < s.end; first += kChannels) {
    const float *before = s.before;
    for (int t = 0; t < s.num_tokens; before = s.state) {
      if (t + kScanTokens <= s.num_tokens) {
        run(t, first, before, std::integral_constant<int, kScanTokens>{});
        t += kScanTokens;
      } else {
        run(t++, first, before, std::integral_constant<int, 1>{});
      }
    }
  }
}

// A few groups at a time, whose states stay in the cache over all tokens.
void scan_gated(const GatedScan &s) {
  constexpr int kChannels = 8 * kChannelGroup;
  constexpr float kLog2E = 1.44269504088896341f;
  for (int first = s.begin; first < s.end; first += kChannels) {
    const float *before = s.before;
    for (int t = 0; t < s.num_tokens; ++t, before = s.state) {
      const size_t row = size_t(t) * s.gate_stride;
      for (int i = first; i < smaller(first + kChannels, s.end); i += kLanes) {
        const F32 write = sigmoid(add(load(s.write + row + i), load(s.write_bias + i)));
        const F32 forget = sigmoid(add(load(s.forget + row + i), load(s.forget_bias + i)));
        const F32 rate = mul(load(s.rate + i), forget);
        F32 added = mul(write, load(s.x + size_t(t) * s.stride + i));
        if (!s.is_first || t > 0) added = mul(sqrt_f32(one_minus_exp(add(rate, rate))), added);
        const F32 value = fma(decay_f32(mul(rate, set1(-kLog2E))), load(before + i), added);
        store(s.state + i, value);
        store(s.out + size_t(t) * s.out_stride + i, value);
      }
    }
  }
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
