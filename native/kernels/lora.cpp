// Products with the factors of an adapter, in tiles of rows × vectors of outputs: a loaded factor is used for all rows
// of the tile. An output is the same sum whatever the tile, so a token's result does not depend on its batch.
#include <cmath>

#include "kernels/half.h"
#include "kernels/isa_functions.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

constexpr int V = kPanelVectors;
constexpr int kLoraRows = kRowsF32 < 8 ? kRowsF32 : 8;  // of the tallest tile

// ---------------------------------------------------------------------------------------------- factors

struct Floats {
  static constexpr size_t kBytes = 4;
  static FW_INLINE F32 vector(const uint8_t *p) { return load(reinterpret_cast<const float *>(p)); }
  static FW_INLINE void write(float x, uint8_t *p) { std::memcpy(p, &x, sizeof x); }
};
struct Halves {
  static constexpr size_t kBytes = 2;
  static FW_INLINE F32 vector(const uint8_t *p) { return load_f16(reinterpret_cast<const uint16_t *>(p)); }
  static FW_INLINE void write(float x, uint8_t *p) {
    const uint16_t half = float_to_half(x);
    std::memcpy(p, &half, sizeof half);
  }
};

// f(Floats{}) or f(Halves{}).
template <class F>
FW_INLINE auto with_factors(bool half, F &&f) {
  return half ? f(Halves{}) : f(Floats{});
}

// The power of two that brings the largest of `count` numbers to [2^13, 2^14): in half precision, numbers down to 2^-28
// of it keep 11 bits.
float half_scale(const float *x, size_t count) {
  float largest = 0.f;
  for (size_t i = 0; i < count; ++i) largest = larger(largest, std::fabs(x[i]));
  return largest > 0.f ? std::ldexp(1.f, smaller(13 - std::ilogb(largest), 100)) : 1.f;
}

// Writes `factor` times element(input, output) for `inputs` × `width`. Returns the end of what was written.
template <class Factors, class Element>
uint8_t *pack_inputs(int inputs, int width, float factor, uint8_t *out, Element &&element) {
  for (int k = 0; k < inputs; ++k) {
    for (int n = 0; n < width; ++n, out += Factors::kBytes) Factors::write(factor * element(k, n), out);
  }
  return out;
}

// ---------------------------------------------------------------------------------------------- tiles

// acc[k mod C, r, n] += Σ_k x[r, k] w[k, n] for `count` inputs, an even number. Moves `w` past them. C: 1 or 2; with 2
// there are enough independent sums where N is 1.
template <class Factors, int C, int R, int N>
FW_INLINE void add_inputs(const float *const (&x)[R], int count, const uint8_t *&w, F32 (&acc)[C][R][N]) {
  constexpr size_t kVector = Factors::kBytes * kLanes;
  for (int k = 0; k < count; k += 2) {
    for (size_t line = 0; line < 2 * N * kVector; line += 64) prefetch<2>(w + kLoraAhead + line);
    FW_UNROLL for (int i = 0; i < 2; ++i) {
      F32 wv[N];
      FW_UNROLL for (int n = 0; n < N; ++n) wv[n] = Factors::vector(w + size_t(n) * kVector);
      FW_UNROLL for (int r = 0; r < R; ++r) {
        FW_UNROLL for (int n = 0; n < N; ++n) {
          F32 &sum = acc[i % C][r][n];
          sum = fma(set1(x[r][k + i]), wv[n], sum);
        }
      }
      w += N * kVector;
    }
  }
}

struct Rows {
  const int *tokens;
  float *out;
  size_t out_stride;
};

template <class Factors, int R>
void shrink_tile(const LoraPair &pair, const LoraInput &x, const uint8_t *w, const Rows &rows) {
  F32 acc[2][R][1];
  FW_UNROLL for (int r = 0; r < R; ++r) acc[0][r][0] = acc[1][r][0] = set1(0.f);
  const float *piece[R];
  FW_UNROLL for (int r = 0; r < R; ++r) piece[r] = x.data + size_t(rows.tokens[r]) * x.row_stride;
  for (int k = 0; k < pair.padded_cols; k += x.piece) {
    add_inputs<Factors>(piece, smaller(x.piece, pair.padded_cols - k), w, acc);
    FW_UNROLL for (int r = 0; r < R; ++r) piece[r] += x.piece_stride;
  }
  FW_UNROLL for (int r = 0; r < R; ++r) {
    store(rows.out + size_t(rows.tokens[r]) * rows.out_stride, mul(add(acc[0][r][0], acc[1][r][0]), set1(pair.scale)));
  }
}

template <class Factors, int R>
void expand_tile(const LoraPair &pair, const float *shrunk, size_t stride, const uint8_t *w, int num_panels,
                 const Rows &rows) {
  const float *in[R];
  float *out[R];
  FW_UNROLL for (int r = 0; r < R; ++r) {
    in[r] = shrunk + size_t(rows.tokens[r]) * stride;
    out[r] = rows.out + size_t(rows.tokens[r]) * rows.out_stride;
  }
  for (int p = 0; p < num_panels; ++p) {
    F32 acc[1][R][V];
    FW_UNROLL for (int r = 0; r < R; ++r) { FW_UNROLL for (int v = 0; v < V; ++v) acc[0][r][v] = set1(0.f); }
    add_inputs<Factors>(in, pair.padded_rank, w, acc);
    FW_UNROLL for (int r = 0; r < R; ++r) {
      FW_UNROLL for (int v = 0; v < V; ++v) {
        float *o = out[r] + size_t(p) * kPanelWidth + v * kLanes;
        store(o, add(load(o), acc[0][r][v]));
      }
    }
  }
}

// f(tile, tokens) for tiles of up to kLoraRows tokens; tile: their number as a type.
template <class F>
FW_INLINE void over_tiles(const int *tokens, int count, F &&f) {
  for (int t = 0; t < count; t += kLoraRows) {
    const int rows = smaller(kLoraRows, count - t);
    [&]<int... R>(std::integer_sequence<int, R...>) FW_LAMBDA {
      ((rows == R + 1 ? f(std::integral_constant<int, R + 1>{}, tokens + t) : void()), ...);
    }(std::make_integer_sequence<int, kLoraRows>{});
  }
}

}  // namespace

size_t pack_lora(const LoraSource &s, LoraPair *pair, uint8_t *memory) {
  pair->padded_rank = round_up(s.rank, 2);
  pair->padded_cols = round_up(s.cols, kBlock);
  pair->num_vectors = (s.rank + kLanes - 1) / kLanes;
  pair->half = s.half;
  return with_factors(s.half, [&](auto factors) {
    using Factors = decltype(factors);
    pair->vector_bytes = Factors::kBytes * size_t(pair->padded_cols) * kLanes;
    pair->panel_bytes = Factors::kBytes * size_t(pair->padded_rank) * kPanelWidth;
    const int num_panels = (s.rows + kPanelWidth - 1) / kPanelWidth;
    const size_t bytes = size_t(pair->num_vectors) * pair->vector_bytes + size_t(num_panels) * pair->panel_bytes;
    if (!memory) return bytes;
    const size_t rank = size_t(s.rank), cols = size_t(s.cols);
    const float of_a = s.half ? half_scale(s.a, rank * cols) : 1.f;
    const float of_b = s.half ? half_scale(s.b, rank * size_t(s.rows)) : 1.f;
    pair->scale = s.scale / of_a / of_b;
    pair->a = memory;
    for (int first = 0; first < pair->padded_rank; first += kLanes) {
      memory = pack_inputs<Factors>(pair->padded_cols, kLanes, of_a, memory, [&](int k, int r) {
        return k < s.cols && first + r < s.rank ? s.a[size_t(first + r) * cols + size_t(k)] : 0.f;
      });
    }
    pair->b = memory;
    for (int first = 0; first < s.rows; first += kPanelWidth) {
      memory = pack_inputs<Factors>(pair->padded_rank, kPanelWidth, of_b, memory, [&](int r, int n) {
        return r < s.rank && first + n < s.rows ? s.b[size_t(first + n) * rank + size_t(r)] : 0.f;
      });
    }
    return bytes;
  });
}

void lora_shrink(const LoraPair &pair, const LoraInput &x, const int *tokens, int num_tokens, int vector,
                 float *shrunk, size_t shrunk_stride) {
  with_factors(pair.half, [&](auto factors) {
    using Factors = decltype(factors);
    const uint8_t *w = pair.vector(vector);
    over_tiles(tokens, num_tokens, [&](auto rows, const int *of_tile) {
      shrink_tile<Factors, decltype(rows)::value>(pair, x, w, {of_tile, shrunk + vector * kLanes, shrunk_stride});
    });
  });
}

void lora_expand(const LoraPair &pair, const float *shrunk, size_t shrunk_stride, const int *tokens, int num_tokens,
                 int panel_begin, int panel_end, float *out, size_t out_stride) {
  with_factors(pair.half, [&](auto factors) {
    using Factors = decltype(factors);
    const uint8_t *w = pair.panel(panel_begin);
    over_tiles(tokens, num_tokens, [&](auto rows, const int *of_tile) {
      expand_tile<Factors, decltype(rows)::value>(pair, shrunk, shrunk_stride, w, panel_end - panel_begin,
                                                  {of_tile, out + size_t(panel_begin) * kPanelWidth, out_stride});
    });
  });
}

}  // namespace foreword::kernels::FOREWORD_ISA
