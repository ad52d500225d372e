// The register-tile products of `linear`, one for each format of weights and activations. linear.cpp describes the
// tiles.
#pragma once

#include "kernels/activations.h"
#include "kernels/packing.h"
#include "kernels/stream.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr int V = kPanelVectors;

// The weights of each format with a table, by their 4 bits, as dot4_biased takes them.
struct BiasedTables {
  alignas(16) uint8_t weights[kNumTables][16] = {};

  constexpr BiasedTables() {
    for (int f = 0; f < kNumTables; ++f) {
      for (int i = 0; i < 16; ++i) weights[f][i] = uint8_t(uint8_t(kTables[f][i]) ^ uint8_t(kDotFlip));
    }
  }
  // Null for a format without a table.
  static FW_INLINE const uint8_t *of(Format f) {
    static constexpr BiasedTables kBiased;
    return has_table(f) ? kBiased.weights[int(f) - int(Format::fp4)] : nullptr;
  }
};

// Inputs [k, k_end) of one panel, or of two neighbours, against rows from `row` on.
struct Tile {
  const uint8_t *weights;  // those of input k of the first panel, with the block scales before them
  const float *scales;     // i8: those of the first panel's outputs
  const uint8_t *table;    // BiasedTables::of
  size_t panel_bytes;
  const Activations &a;
  int row, k, k_end;
  Stream stream;
};

// f(k, end) for the part of each piece in the tile.
template <int Piece, class F>
FW_INLINE void for_pieces(const Tile &t, F &&f) {
  for (int k = t.k, end; k < t.k_end; k = end) {
    end = smaller((k / Piece + 1) * Piece, t.k_end);
    f(k, end);
  }
}

// A kernel multiplies R rows by P panels. Its `Sum`s can be stored between chunks of inputs:
//   kRows, kSums           rows of its tallest tile; registers of sums per row and vector
//   begin(t, sums)         before the first input
//   add(t, sums)           inputs [t.k, t.k_end)
//   end(t, sums, out)      the outputs

// ---------------------------------------------------------------------------------------------- f32, bf16

// Sums that begin at zero.
struct FloatSums {
  static constexpr int kSums = 1;
  using Sum = F32;

  template <int R, int P>
  static FW_INLINE void begin(const Tile &, F32 (&acc)[R][P * V]) {
    FW_UNROLL for (int r = 0; r < R; ++r) { FW_UNROLL for (int v = 0; v < P * V; ++v) acc[r][v] = set1(0.f); }
  }
};

// `Pairs` multiplies two inputs and defines the types of weights and activations.
template <class Pairs>
struct FloatKernel : FloatSums {
  static constexpr int kRows = kRowsF32;

  template <int R, int P>
  static FW_INLINE void add(Tile &t, F32 (&acc)[R][P * V]) {
    using Activation = typename Pairs::Activation;
    constexpr int kPiece = kPieceBytes / sizeof(Activation);
    const size_t panel = t.panel_bytes / sizeof(typename Pairs::Weight);
    const typename Pairs::Weight *w = reinterpret_cast<const typename Pairs::Weight *>(t.weights);
    for_pieces<kPiece>(t, [&](int k, int end) FW_LAMBDA {
      const Activation *x = activation_at<const Activation>(t.a, t.row, k, kPiece);
      for (; k < end; k += kBlock) {
        t.stream.advance();
        for (int i = 0; i < kBlock; i += 2) {
          Pairs::multiply(w, panel, x, acc);
          w += 2 * kPanelWidth;
          x += 2;
        }
      }
    });
  }

  template <int R, int P>
  static FW_INLINE void end(const Tile &, F32 (&acc)[R][P * V], F32 (&out)[R][P * V]) {
    FW_UNROLL for (int r = 0; r < R; ++r) { FW_UNROLL for (int v = 0; v < P * V; ++v) out[r][v] = acc[r][v]; }
  }
};

constexpr int kFloatRow = kPieceBytes / sizeof(float);  // from a row's float to the next row's

struct F32Pairs {
  using Weight = float;
  using Activation = float;

  template <int R, int N>
  static FW_INLINE void multiply(const float *w, size_t panel, const float *x, F32 (&acc)[R][N]) {
    FW_LOOP_BEGIN("linear", int(Format::f32), R, N);
    FW_UNROLL for (int i = 0; i < 2; ++i) {
      F32 wv[N];
      FW_UNROLL for (int n = 0; n < N; ++n) wv[n] = load(w + (n / V) * panel + i * kPanelWidth + (n % V) * kLanes);
      add_outer<kFloatRow>(acc, x + i, wv);
    }
    FW_LOOP_END("linear", int(Format::f32), R, N);
  }
};

template <int N>
FW_INLINE void load_weight_pairs(const uint16_t *w, size_t panel, I32 (&wv)[N]) {
  FW_UNROLL for (int n = 0; n < N; ++n) wv[n] = load_pairs(w + (n / V) * panel + (n % V) * 2 * kLanes);
}

#if defined(FOREWORD_SIMD_BF16)
struct Bf16Pairs {
  using Weight = uint16_t;
  using Activation = uint16_t;

  template <int R, int N>
  static FW_INLINE void multiply(const uint16_t *w, size_t panel, const uint16_t *x, F32 (&acc)[R][N]) {
    FW_LOOP_BEGIN("linear", int(Format::bf16), R, N);
    I32 wv[N];
    load_weight_pairs(w, panel, wv);
    FW_UNROLL for (int r = 0; r < R; ++r) {
      const auto xv = in_lanes<N>(x + r * kPieceBytes / sizeof(uint16_t));
      FW_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = dot2(acc[r][n], wv[n], xv);
    }
    FW_LOOP_END("linear", int(Format::bf16), R, N);
  }
};
#else
// Widened in registers: a shift makes a float of a pair's even member, a mask of its odd member.
struct Bf16Pairs {
  using Weight = uint16_t;
  using Activation = float;

  template <int R, int N>
  static FW_INLINE void multiply(const uint16_t *w, size_t panel, const float *x, F32 (&acc)[R][N]) {
    FW_LOOP_BEGIN("linear", int(Format::bf16), R, N);
    I32 wv[N];
    load_weight_pairs(w, panel, wv);
    F32 half[N];
    FW_UNROLL for (int n = 0; n < N; ++n) half[n] = even_of_pairs(wv[n]);
    add_outer<kFloatRow>(acc, x, half);
    FW_UNROLL for (int n = 0; n < N; ++n) half[n] = odd_of_pairs(wv[n]);
    add_outer<kFloatRow>(acc, x + 1, half);
    FW_LOOP_END("linear", int(Format::bf16), R, N);
  }
};
#endif

using F32Kernel = FloatKernel<F32Pairs>;
using Bf16Kernel = FloatKernel<Bf16Pairs>;

// ---------------------------------------------------------------------------------------------- 8 bit per channel

// One integer sum over all inputs, which starts at -kDotBias Σ a to cancel the bias of the weights. The scales, one per
// row of activations and one per output of weights, are multiplied at the end.
struct I8Kernel {
  static constexpr int kRows = kRowsI8, kSums = 1;
  using Sum = I32;

  template <int R, int P>
  static FW_INLINE void begin(const Tile &t, I32 (&sum)[R][P * V]) {
    const ActivationBlock *blocks = t.a.blocks + t.row;
    FW_UNROLL for (int r = 0; r < R; ++r) {
      const I32 start = set1_i32(blocks[r].neg_bias_sum);
      FW_UNROLL for (int v = 0; v < P * V; ++v) sum[r][v] = start;
    }
  }

  template <int R, int P>
  static FW_INLINE void add(Tile &t, I32 (&sum)[R][P * V]) {
    const size_t panel = t.panel_bytes;
    const uint8_t *w = t.weights;
    for_pieces<kPieceBytes>(t, [&](int k, int end) FW_LAMBDA {
      const int8_t *x = activation_at<const int8_t>(t.a, t.row, k, kPieceBytes);
      for (; k < end; k += kBlock) {
        t.stream.advance();
        FW_LOOP_BEGIN("linear", int(Format::i8), R, P * V);
        FW_UNROLL_QUADS for (int j = 0; j < kBlock / 4; ++j) {
          U8 wv[P * V];
          FW_UNROLL for (int v = 0; v < P * V; ++v) wv[v] = load_u8(w + (v / V) * panel + (j * V + v % V) * 4 * kLanes);
          FW_UNROLL for (int r = 0; r < R; ++r) {
            const auto xv = in_lanes<P * V>(x + r * kPieceBytes + 4 * j);
            FW_UNROLL for (int v = 0; v < P * V; ++v) sum[r][v] = dot4_biased(sum[r][v], wv[v], xv);
          }
        }
        FW_LOOP_END("linear", int(Format::i8), R, P * V);
        w += kBlock * kPanelWidth;
        x += kBlock;
      }
    });
  }

  template <int R, int P>
  static FW_INLINE void end(const Tile &t, I32 (&sum)[R][P * V], F32 (&out)[R][P * V]) {
    const ActivationBlock *blocks = t.a.blocks + t.row;
    FW_UNROLL for (int v = 0; v < P * V; ++v) {
      const F32 scale = load(t.scales + (v / V) * (t.panel_bytes / sizeof(float)) + (v % V) * kLanes);
      FW_UNROLL for (int r = 0; r < R; ++r) {
        out[r][v] = mul(to_f32(sum[r][v]), mul(scale, set1(blocks[r].scale)));
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------- block formats

// Per block of 32 an exact integer sum, then acc += sum * d_w and, with a min, acc += m_w * Σ a. Activations in two
// planes have one scale per row, multiplied at the end; in one plane one scale per block, a factor of d_w and part of Σ
// a. Where kWords, two planes are words, and there is one sum. fp4 is the kernel of each format with a table.
template <Format Fmt, int Planes>
struct BlockKernel : FloatSums {
  static constexpr bool kAsWords = Planes == 2 && kWords;
  static constexpr int kPlanes = kAsWords ? 1 : Planes;  // planes of sums
  static constexpr int kRows = kRowsBlock, kSums = kPlanes + 1;
  static constexpr bool kHalves = Fmt == Format::q8_half, kNibbles = is_4bit(Fmt) && !has_table(Fmt);
  static constexpr bool kShortSums = kNibbles && !kAsWords;  // sums of 16 bit: begin_nibbles
  using Activation = std::conditional_t<kAsWords, int16_t, int8_t>;

  static FW_INLINE int32_t start(const ActivationBlock &b, int half) {
    if constexpr (Fmt == Format::q4) return b.neg8_sum;
    if constexpr (Fmt == Format::q4_min) return 0;
    if constexpr (kHalves) return b.neg_bias_half[half];
    return b.neg_bias_sum;
  }

  // `Quads` quads of the block, from quad `begin` on, against the activations. A 4-bit load holds quad j in its low and
  // quad j + 4 in its high nibbles.
  template <int Quads, int R, int N>
  static FW_INLINE void dots(const uint8_t *w, size_t panel, const uint8_t *table, const Activation *x, int begin,
                             I32 (&sum)[kPlanes][R][N]) {
    constexpr int kLoads = is_4bit(Fmt) ? 4 : Quads;
    FW_UNROLL_QUADS for (int j = begin; j < begin + kLoads; ++j) {
      U8 wv[N];
      FW_UNROLL for (int n = 0; n < N; ++n) wv[n] = load_u8(w + (n / V) * panel + (j * V + n % V) * 4 * kLanes);
      if constexpr (kAsWords) {
        word_dots<0, false>(wv, table, x + 4 * j, sum[0]);
        word_dots<1, false>(wv, table, x + 4 * j, sum[0]);
        if constexpr (is_4bit(Fmt)) {
          word_dots<0, true>(wv, table, x + 4 * (j + 4), sum[0]);
          word_dots<1, true>(wv, table, x + 4 * (j + 4), sum[0]);
        }
      } else {
        byte_dots(wv, table, x + 4 * j, sum);
      }
    }
  }

  // The first or second pair of words of a quad, those of the low or high nibbles, against that of the quad at x, of
  // every row.
  template <int Pair, bool High, int R, int N>
  static FW_INLINE void word_dots(const U8 (&wv)[N], [[maybe_unused]] const uint8_t *table, const int16_t *x,
                                  I32 (&sum)[R][N]) {
    I32 words[N];
    FW_UNROLL for (int n = 0; n < N; ++n) {
      if constexpr (kNibbles) {
        words[n] = nibble_pairs<Pair, High>(wv[n]);
      } else if constexpr (has_table(Fmt)) {
        words[n] = word_pairs<Pair>(lookup(table, High ? high_nibbles(wv[n]) : low_nibbles(wv[n])));
      } else {
        words[n] = word_pairs<Pair>(wv[n]);
      }
    }
    FW_UNROLL for (int r = 0; r < R; ++r) {
      const I32 xv = word_in_lanes(x + 2 * Pair + r * (kPieceBytes / int(sizeof(int16_t))));
      FW_UNROLL for (int n = 0; n < N; ++n) sum[r][n] = dot2_words(sum[r][n], words[n], xv);
    }
  }

  // The quads of a load against those at x, and its high nibbles against the quads 4 further on, in every plane.
  template <int R, int N>
  static FW_INLINE void byte_dots(const U8 (&wv)[N], [[maybe_unused]] const uint8_t *table, const int8_t *x,
                                  I32 (&sum)[kPlanes][R][N]) {
    FW_UNROLL for (int r = 0; r < R; ++r) {
      FW_UNROLL for (int plane = 0; plane < Planes; ++plane) {
        const int8_t *xr = x + plane * (kPieceBytes / 2) + r * kPieceBytes;
        const auto first = in_lanes<N>(xr), second = in_lanes<N>(xr + (is_4bit(Fmt) ? 16 : 0));
        FW_UNROLL for (int n = 0; n < N; ++n) {
          I32 &s = sum[plane][r][n];
          if constexpr (kNibbles) {
            s = dot_nibbles(dot_nibbles(s, low_nibbles(wv[n]), first), high_nibbles(wv[n]), second);
          } else if constexpr (has_table(Fmt)) {
            s = dot4_biased(s, lookup(table, low_nibbles(wv[n])), first);
            s = dot4_biased(s, lookup(table, high_nibbles(wv[n])), second);
          } else {
            s = dot4_biased(s, wv[n], first);
          }
        }
      }
    }
  }

  template <int R, int P>
  static FW_INLINE void add(Tile &t, F32 (&acc)[R][P * V]) {
    constexpr int kPiece = kPieceBytes / Planes;
    const uint8_t *block = t.weights, *const table = t.table;
    for_pieces<kPiece>(t, [&](int k, int end) FW_LAMBDA {
      const Activation *x = activation_at<const Activation>(t.a, t.row, k, kPiece);
      const ActivationBlock *blocks = t.a.blocks + size_t(k / kBlock) * t.a.block_stride + t.row;
      for (; k < end; k += kBlock) {
        t.stream.advance();
        add_block(block, t.panel_bytes, table, x, blocks, acc);
        block += block_bytes(Fmt);
        x += kBlock;
        blocks += t.a.block_stride;
      }
    });
  }

  template <int R, int N>
  static FW_INLINE void add_block(const uint8_t *block, size_t panel, const uint8_t *table, const Activation *x,
                                  const ActivationBlock *blocks, F32 (&acc)[R][N]) {
    constexpr size_t kScales = block_scale_bytes(Fmt);
    [[maybe_unused]] constexpr int kKind = int(Fmt) + (Planes - 1) * 16;
    FW_LOOP_BEGIN("linear", kKind, R, N);
    auto scales = [&](int n, int which) FW_LAMBDA {
      const uint8_t *p = block + (n / V) * panel + sizeof(uint16_t) * (which * kPanelWidth + (n % V) * kLanes);
      return load_f16(reinterpret_cast<const uint16_t *>(p));
    };
    FW_UNROLL for (int half = 0; half < (kHalves ? 2 : 1); ++half) {
      // With two planes the sum is 128 high + low; the low one includes the offset of the weights.
      I32 sum[kPlanes][R][N];
      auto offset = [&](int plane, int r) FW_LAMBDA {
        return set1_i32(plane == kPlanes - 1 ? start(blocks[r], half) : 0);
      };
      auto whole_sum = [&](int plane, int r, int n) FW_LAMBDA {
        return kShortSums ? end_nibbles(offset(plane, r), sum[plane][r][n]) : sum[plane][r][n];
      };
      FW_UNROLL for (int plane = 0; plane < kPlanes; ++plane) {
        FW_UNROLL for (int r = 0; r < R; ++r) {
          const I32 first = kShortSums ? begin_nibbles(offset(plane, r)) : offset(plane, r);
          FW_UNROLL for (int n = 0; n < N; ++n) sum[plane][r][n] = first;
        }
      }
      dots<kHalves ? 4 : 8>(block + kScales, panel, table, x, 4 * half, sum);
      FW_UNROLL for (int n = 0; n < N; ++n) {
        const F32 d = scales(n, half);
        FW_UNROLL for (int r = 0; r < R; ++r) {
          const I32 last = whole_sum(kPlanes - 1, r, n);
          const I32 total = kPlanes == 1 ? last : shift_7_add(whole_sum(0, r, n), last);
          const F32 scale = Planes == 2 ? d : mul(d, set1(blocks[r].scale));
          acc[r][n] = fma(to_f32(total), scale, acc[r][n]);
        }
      }
    }
    if constexpr (has_min(Fmt)) {
      FW_UNROLL for (int n = 0; n < N; ++n) {
        const F32 m = scales(n, 1);
        FW_UNROLL for (int r = 0; r < R; ++r) acc[r][n] = fma(m, set1(blocks[r].sum), acc[r][n]);
      }
    }
    FW_LOOP_END("linear", kKind, R, N);
  }

  template <int R, int P>
  static FW_INLINE void end(const Tile &t, F32 (&acc)[R][P * V], F32 (&out)[R][P * V]) {
    const ActivationBlock *blocks = t.a.blocks + t.row;
    FW_UNROLL for (int r = 0; r < R; ++r) {
      const F32 scale = set1(blocks[r].scale);
      FW_UNROLL for (int v = 0; v < P * V; ++v) out[r][v] = Planes == 2 ? mul(acc[r][v], scale) : acc[r][v];
    }
  }
};

}  // namespace foreword::kernels::FOREWORD_ISA
