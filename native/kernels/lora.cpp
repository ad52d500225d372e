// Products with the factors of an adapter, in tiles of rows × vectors of outputs: a loaded factor is used for all rows
// of the tile. An output is the same sum whatever the tile, so a token's result does not depend on its batch.
#include <cmath>

#include "kernels/activations.h"
#include "kernels/isa_functions.h"
#include "kernels/rotation.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

constexpr int V = kPanelVectors;
constexpr int kLoraRows = kRowsF32 < 8 ? kRowsF32 : 8;  // rows of the tallest tile

// ---------------------------------------------------------------------------------------------- formats

// The steps of an input of integers: x ≈ scale * q, and where a sum of their products starts (ActivationBlock).
struct Steps {
  float scale;
  int32_t start;
};

// A format of factors, and of their input:
//   kGroup, kBytes           inputs of an output that are adjacent and multiplied at once; bytes of a factor
//   kRanks, kChains          ranks of one sum; sums of a shrunk output, enough to hide the latency of an instruction
//   unit(largest)            what the factors of a rank are multiplied by
//   write, weights, input    stores a factor; loads those of a group, and its inputs for every lane
//   begin, multiply, end     a sum
//   put                      stores a vector of ranks as an input of the second product
struct Floats {
  using Input = float;
  using Sum = F32;
  static constexpr int kGroup = 1, kRanks = kMaxLoraRank, kChains = 2;
  static constexpr size_t kBytes = 4;
  static constexpr bool kIntegers = false;

  static FW_INLINE float unit(float) { return 1.f; }
  static FW_INLINE void write(float x, uint8_t *p) { std::memcpy(p, &x, sizeof x); }
  static FW_INLINE F32 weights(const uint8_t *p) { return load(reinterpret_cast<const float *>(p)); }
  static FW_INLINE F32 input(const float *x) { return set1(*x); }
  static FW_INLINE F32 begin(Steps) { return set1(0.f); }
  static FW_INLINE F32 multiply(F32 sum, F32 w, F32 x) { return fma(x, w, sum); }
  static FW_INLINE F32 end(F32 sum, Steps) { return sum; }
  static FW_INLINE void put(F32 z, int vector, LoraRow &row) {
    store(reinterpret_cast<float *>(row.numbers) + vector * kLanes, z);
  }
};

// 8 bit. Each vector of ranks has a sum of its own, since it has a scale of its own.
struct Quads {
  using Input = int8_t;
  using Sum = I32;
  static constexpr int kGroup = 4, kRanks = kLanes, kChains = 1;
  static constexpr size_t kBytes = 1;
  static constexpr bool kIntegers = true;

  static FW_INLINE float unit(float largest) { return largest > 0.f ? 127.f / largest : 1.f; }
  static FW_INLINE void write(float x, uint8_t *p) { *p = uint8_t(int(std::lrintf(x)) + kDotBias); }
  static FW_INLINE U8 weights(const uint8_t *p) { return load_u8(p); }
  static FW_INLINE I32 input(const int8_t *x) { return word_in_lanes(x); }
  static FW_INLINE I32 begin(Steps steps) { return set1_i32(steps.start); }
  static FW_INLINE I32 multiply(I32 sum, U8 w, I32 x) { return dot4_biased(sum, w, x); }
  static FW_INLINE F32 end(I32 sum, Steps steps) { return mul(to_f32(sum), set1(steps.scale)); }
  static FW_INLINE void put(F32 z, int vector, LoraRow &row) {
    alignas(64) float numbers[kLanes];
    store(numbers, z);
    int8_t *out = reinterpret_cast<int8_t *>(row.numbers) + vector * kLanes;
    const auto [top, neg_bias_sum] = round_to_s8(numbers, kLanes, [&](int) FW_LAMBDA { return out; });
    row.scale[vector] = top / 127.f;
    row.start[vector] = neg_bias_sum;
  }
};

// f(Floats{}) or f(Quads{}).
template <class F>
FW_INLINE auto with_format(LoraFormat format, F &&f) {
  return format == LoraFormat::f32 ? f(Floats{}) : f(Quads{});
}

// ---------------------------------------------------------------------------------------------- packing

// Where factor (input, output) is among `width` outputs.
template <class Format>
FW_INLINE size_t place_of(int input, int output, int width) {
  const int group = input / Format::kGroup * width + output;
  return Format::kBytes * (size_t(group) * Format::kGroup + size_t(input % Format::kGroup));
}

// The factors of rank r of both matrices, each times a unit. Returns the product of the units.
template <class Format>
double pack_rank(const LoraSource &s, const LoraPair &pair, int r, uint8_t *a, uint8_t *b, float *row) {
  for (int k = 0; k < pair.padded_cols; ++k) row[k] = k < s.cols ? s.a[size_t(r) * size_t(s.cols) + size_t(k)] : 0.f;
  const float factor = Format::kIntegers ? rotate_inputs(row, pair.padded_cols, row) : 1.f;
  const float of_a = Format::unit(largest_magnitude(row, pair.padded_cols));
  uint8_t *vector = a + size_t(r / kLanes) * pair.vector_bytes + sizeof(float) * kLanes;
  for (int k = 0; k < pair.padded_cols; ++k) {
    Format::write(of_a * row[k], vector + place_of<Format>(k, r % kLanes, kLanes));
  }
  auto factor_b = [&](int n) FW_LAMBDA { return s.b[size_t(n) * size_t(s.rank) + size_t(r)]; };
  float largest = 0.f;
  for (int n = 0; n < s.rows; ++n) largest = larger(largest, std::fabs(factor_b(n)));
  const float of_b = Format::unit(largest);
  for (int n = 0; n < s.rows; ++n) {
    uint8_t *panel = b + size_t(n / kPanelWidth) * pair.panel_bytes;
    Format::write(of_b * factor_b(n), panel + place_of<Format>(r, n % kPanelWidth, kPanelWidth));
  }
  return double(of_a) * double(of_b) * double(factor);
}

// ---------------------------------------------------------------------------------------------- tiles

// acc[i mod C, r, n] += Σ_k x[r, k] w[n, k] over the groups i of `count` inputs, a multiple of C groups. Moves `w` past
// them.
template <class Format, int C, int R, int N>
FW_INLINE void add_inputs(const typename Format::Input *const (&x)[R], int count, const uint8_t *&w,
                          typename Format::Sum (&acc)[C][R][N]) {
  constexpr size_t kVector = Format::kBytes * Format::kGroup * kLanes;
  for (int k = 0; k < count; k += C * Format::kGroup) {
    for (size_t line = 0; line < C * N * kVector; line += 64) prefetch<2>(w + kLoraAhead + line);
    FW_UNROLL for (int i = 0; i < C; ++i) {
      decltype(Format::weights(w)) wv[N];
      FW_UNROLL for (int n = 0; n < N; ++n) wv[n] = Format::weights(w + size_t(n) * kVector);
      FW_UNROLL for (int r = 0; r < R; ++r) {
        const auto xv = Format::input(x[r] + k + i * Format::kGroup);
        FW_UNROLL for (int n = 0; n < N; ++n) acc[i][r][n] = Format::multiply(acc[i][r][n], wv[n], xv);
      }
      w += N * kVector;
    }
  }
}

template <class Format, int R>
void shrink_tile(const LoraPair &pair, const Activations &a, const int *tokens, int vector, LoraRow *out,
                 size_t stride) {
  using Input = typename Format::Input;
  constexpr int kPiece = kPieceBytes / int(sizeof(Input));
  const uint8_t *w = pair.vector(vector);
  const F32 scales = load(reinterpret_cast<const float *>(w));
  w += sizeof(float) * kLanes;
  auto steps = [&](int r) FW_LAMBDA -> Steps {
    if constexpr (!Format::kIntegers) return {};
    const ActivationBlock &block = a.blocks[tokens[r]];
    return {block.scale, block.neg_bias_sum};
  };
  typename Format::Sum acc[Format::kChains][R][1];
  const Input *piece[R];
  FW_UNROLL for (int r = 0; r < R; ++r) {
    FW_UNROLL for (int i = 0; i < Format::kChains; ++i) acc[i][r][0] = Format::begin(steps(r));
    piece[r] = activation_at<const Input>(a, tokens[r], 0, kPiece);
  }
  for (int k = 0; k < pair.padded_cols; k += kPiece) {
    add_inputs<Format>(piece, smaller(kPiece, pair.padded_cols - k), w, acc);
    FW_UNROLL for (int r = 0; r < R; ++r) piece[r] += a.piece_stride / sizeof(Input);
  }
  FW_UNROLL for (int r = 0; r < R; ++r) {
    F32 sum = Format::end(acc[0][r][0], steps(r));
    if constexpr (Format::kChains == 2) sum = add(sum, acc[1][r][0]);
    Format::put(mul(sum, scales), vector, out[size_t(tokens[r]) * stride]);
  }
}

template <class Format, int R>
void expand_tile(const LoraPair &pair, const LoraRow *shrunk, size_t stride, const int *tokens, int panel_begin,
                 int panel_end, float *out, size_t out_stride) {
  const LoraRow *in[R];
  float *o[R];
  FW_UNROLL for (int r = 0; r < R; ++r) {
    in[r] = shrunk + size_t(tokens[r]) * stride;
    o[r] = out + size_t(tokens[r]) * out_stride;
  }
  const uint8_t *w = pair.panel(panel_begin);
  for (int p = panel_begin; p < panel_end; ++p) {
    for (int first = 0; first < pair.padded_rank; first += Format::kRanks) {
      auto steps = [&](int r) FW_LAMBDA -> Steps {
        if constexpr (!Format::kIntegers) return {};
        return {in[r]->scale[first / kLanes], in[r]->start[first / kLanes]};
      };
      const typename Format::Input *x[R];
      typename Format::Sum acc[1][R][V];
      FW_UNROLL for (int r = 0; r < R; ++r) {
        x[r] = reinterpret_cast<const typename Format::Input *>(in[r]->numbers) + first;
        FW_UNROLL for (int v = 0; v < V; ++v) acc[0][r][v] = Format::begin(steps(r));
      }
      add_inputs<Format>(x, smaller(Format::kRanks, pair.padded_rank - first), w, acc);
      FW_UNROLL for (int r = 0; r < R; ++r) {
        FW_UNROLL for (int v = 0; v < V; ++v) {
          float *at = o[r] + size_t(p) * kPanelWidth + v * kLanes;
          store(at, add(load(at), Format::end(acc[0][r][v], steps(r))));
        }
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

size_t pack_lora(const LoraSource &s, LoraPair *pair, uint8_t *memory, float *scratch) {
  return with_format(pair->format, [&](auto format) {
    using Format = decltype(format);
    const int num_panels = (s.rows + kPanelWidth - 1) / kPanelWidth;
    pair->padded_rank = round_up(s.rank, Format::kGroup);
    pair->padded_cols = round_up(s.cols, kBlock);
    pair->num_vectors = (s.rank + kLanes - 1) / kLanes;
    pair->vector_bytes = kLanes * (sizeof(float) + Format::kBytes * size_t(pair->padded_cols));
    pair->panel_bytes = kPanelWidth * Format::kBytes * size_t(pair->padded_rank);
    const size_t a_bytes = size_t(pair->num_vectors) * pair->vector_bytes;
    const size_t bytes = a_bytes + size_t(num_panels) * pair->panel_bytes;
    if (!memory) return bytes;
    for (size_t i = 0; i < bytes; i += Format::kBytes) Format::write(0.f, memory + i);
    pair->a = memory;
    pair->b = memory + a_bytes;
    for (int r = 0; r < pair->num_vectors * kLanes; ++r) {
      const double units = r < s.rank ? pack_rank<Format>(s, *pair, r, memory, memory + a_bytes, scratch) : 1.;
      const float scale = r < s.rank ? float(double(s.scale) / units) : 0.f;
      std::memcpy(memory + size_t(r / kLanes) * pair->vector_bytes + sizeof(float) * size_t(r % kLanes), &scale,
                  sizeof scale);
    }
    return bytes;
  });
}

void lora_shrink(const LoraPair &pair, const Activations &a, const int *tokens, int num_tokens, int vector,
                 LoraRow *shrunk, size_t stride) {
  with_format(pair.format, [&](auto format) {
    over_tiles(tokens, num_tokens, [&](auto rows, const int *of_tile) {
      shrink_tile<decltype(format), decltype(rows)::value>(pair, a, of_tile, vector, shrunk, stride);
    });
  });
}

void lora_expand(const LoraPair &pair, const LoraRow *shrunk, size_t stride, const int *tokens, int num_tokens,
                 int panel_begin, int panel_end, float *out, size_t out_stride) {
  with_format(pair.format, [&](auto format) {
    over_tiles(tokens, num_tokens, [&](auto rows, const int *of_tile) {
      expand_tile<decltype(format), decltype(rows)::value>(pair, shrunk, stride, of_tile, panel_begin, panel_end, out,
                                                           out_stride);
    });
  });
}

}  // namespace foreword::kernels::FOREWORD_ISA
