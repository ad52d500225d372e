// The vector operations of one instruction set, under common names: each kernel is written once.
//
//   kLanes          floats of a vector           kPanelVectors   vectors across a weight panel
//   kRowsF32, kRowsI8, kRowsBlock   rows of a register tile of a product: float, 8 bit per channel, block formats
//   kMostSums       registers of sums in a tile of two panels, at most
//   kWideRows × kWideVectors, kTallRows × 2   register tiles of attention: for few rows, for many
//   kPacedPrefetch  prefetches of attention over few rows are some cycles apart
//   kBf16Dot        dot2(acc, pairs, pair): acc + Σ of two bf16 products per lane
//   kDotBias        dot4_biased(acc, w + kDotBias, a) adds Σ (w + kDotBias) a over the four bytes of each lane:
//                   unsigned ones with a bias of 128, signed ones with 0
//   times_pow2      times_pow2(a, whole_bits(n)): a 2^n, where neither is a denormal
//   store_u8        four vectors of numbers from 0 to kMostPositive as bytes, in order
//   lookup          entries of a table of 16 bytes, by bytes below 16
//   begin_nibbles, dot_nibbles, end_nibbles   sum + up to eight dot4 of weights of 4 bits; kStageNibbles: with many
//                   rows it is faster to widen them to 8 bits first
//   dot4_positive   dot4_positive(acc, w, a) adds Σ w a for signed w and a of 0 … kMostPositive
//
// Everything is in the namespace of the instruction set and always inlined: none of it is shared between two of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#if !defined(FOREWORD_ISA) || !defined(FOREWORD_BASE) || !defined(FOREWORD_QUADS)
#error "compile kernel sources with -DFOREWORD_ISA=<instruction set>, FOREWORD_BASE and FOREWORD_QUADS: isa_functions.h"
#endif

#define FW_INLINE inline __attribute__((always_inline))
#define FW_LAMBDA __attribute__((always_inline))

namespace foreword::kernels::FOREWORD_ISA {
// 1.5 2^23: x + kWhole, for |x| < 2^22, has no bits below the point, and its lowest bits are the integer nearest to x.
constexpr float kWhole = 12582912.f;
}

#if defined(FOREWORD_SIMD_AVX512)
#include "kernels/simd/avx512.h"
#elif defined(FOREWORD_SIMD_AVX2)
#include "kernels/simd/avx2.h"
#elif defined(FOREWORD_SIMD_NEON)
#include "kernels/simd/neon.h"
#else
#include "kernels/simd/portable.h"
#endif

// Before a loop with a constant number of iterations, so that the arrays it indexes stay in registers.
#if defined(__clang__)
#define FW_UNROLL _Pragma("clang loop unroll(full)")
#define FW_ROLLED _Pragma("clang loop unroll(disable)")
#else
#define FW_UNROLL _Pragma("GCC unroll 64")
#define FW_ROLLED _Pragma("GCC unroll 1")
#endif

// Around the body of an inner loop over `rows` × `vectors` registers: tools/throughput.py gives it to llvm-mca. `kind`:
// a number that distinguishes loops of one name.
#if defined(FOREWORD_THROUGHPUT)
#if defined(__aarch64__)
#define FW_ASM_COMMENT "// "
#else
#define FW_ASM_COMMENT "# "
#endif
#define FW_MARK_LOOP(mark, name, kind, rows, vectors) \
  asm volatile(FW_ASM_COMMENT "LLVM-MCA-" mark " " name ":%c0:%c1:%c2" \
               : : "i"(kind), "i"(rows), "i"(vectors) : "memory")
#define FW_LOOP_BEGIN(...) FW_MARK_LOOP("BEGIN", __VA_ARGS__)
#define FW_LOOP_END(...) FW_MARK_LOOP("END", __VA_ARGS__)
#else
#define FW_LOOP_BEGIN(...) (void)0
#define FW_LOOP_END(...) (void)0
#endif

// Before a loop over the quads of a block. One dot product of portable.h is a dozen instructions: unrolled, they are no
// faster and take twice as long to compile.
#if defined(FOREWORD_SIMD_AVX512) || defined(FOREWORD_SIMD_AVX2) || defined(FOREWORD_SIMD_NEON)
#define FW_UNROLL_QUADS FW_UNROLL
#else
#define FW_UNROLL_QUADS FW_ROLLED
#endif

namespace foreword::kernels::FOREWORD_ISA {

constexpr int kPanelWidth = kLanes * kPanelVectors;
constexpr uint32_t kDotFlip = kDotBias * 0x01010101u;  // four signed bytes ^ kDotFlip are offset by kDotBias

// A vector at any address, of memory of any type: GCC 12 copies some vectors of a memcpy through the stack.
union __attribute__((packed, may_alias)) Unaligned {
  F32 floats;
  I32 words;
  U8 bytes;
};
FW_INLINE F32 load(const float *p) { return reinterpret_cast<const Unaligned *>(p)->floats; }
FW_INLINE void store(float *p, F32 v) { reinterpret_cast<Unaligned *>(p)->floats = v; }
FW_INLINE U8 load_u8(const uint8_t *p) { return reinterpret_cast<const Unaligned *>(p)->bytes; }
// A vector of bf16 pairs.
FW_INLINE I32 load_pairs(const uint16_t *p) { return reinterpret_cast<const Unaligned *>(p)->words; }
// The 32 bits at p in every lane.
FW_INLINE I32 word_in_lanes(const void *p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return set1_i32(word);
}
// A broadcast number as an operand of `Uses` calls of `accumulate` or of a dot product: a float, a pair of bf16, or
// four signed bytes.
#if !defined(FOREWORD_SIMD_AVX512)
template <int Uses>
FW_INLINE F32 in_lanes(const float *p) { return set1(*p); }
template <int Uses>
FW_INLINE I32 in_lanes(const void *p) { return word_in_lanes(p); }
#endif

template <int Locality>
FW_INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, Locality); }

// x; on x86-64 what depends on it is computed 18 cycles later.
FW_INLINE size_t delayed(size_t x) {
#if defined(__x86_64__)
  FW_UNROLL for (int i = 0; i < 6; ++i) asm("imul $1, %0, %0" : "+r"(x));
#endif
  return x;
}

#if !defined(FOREWORD_SIMD_AVX2) || defined(FOREWORD_SIMD_VNNI)
constexpr bool kStageNibbles = !kBf16Dot;  // AMD's processors with bf16 unpack beside dot products
FW_INLINE I32 begin_nibbles(I32 sum) { return sum; }
FW_INLINE I32 dot_nibbles(I32 acc, U8 w, auto a) { return dot4(acc, w, a); }
FW_INLINE I32 end_nibbles(I32, I32 acc) { return acc; }
#endif

FW_INLINE F32 add(F32 a, F32 b) { return a + b; }
FW_INLINE F32 sub(F32 a, F32 b) { return a - b; }
FW_INLINE F32 mul(F32 a, F32 b) { return a * b; }
FW_INLINE F32 div(F32 a, F32 b) { return a / b; }

template <class T>
FW_INLINE T smaller(T a, T b) { return b < a ? b : a; }
template <class T>
FW_INLINE T larger(T a, T b) { return a < b ? b : a; }
template <class T>
FW_INLINE T round_up(T a, T b) { return (a + b - 1) / b * b; }

// Calls f(i, k) for the vectors of [0, size), with i 0 and 1 in turn: with an accumulator for each i, a step does not
// wait for the one before it. `size` is a multiple of kLanes.
template <class F>
FW_INLINE void in_turns(int size, F &&f) {
  int k = 0;
  for (; k + 2 * kLanes <= size; k += 2 * kLanes) f(0, k), f(1, k + kLanes);
  if (k < size) f(0, k);
}

// max |x|, or NaN if an x is not finite. `size` is a multiple of kLanes.
FW_INLINE float largest_magnitude(const float *x, int size) {
  F32 largest[2] = {set1(0.f), set1(0.f)}, zero[2] = {set1(0.f), set1(0.f)};
  in_turns(size, [&](int i, int k) FW_LAMBDA {
    largest[i] = max_f32(largest[i], abs_f32(load(x + k)));
    zero[i] = fma(load(x + k), set1(0.f), zero[i]);
  });
  return reduce_max(max_f32(largest[0], largest[1])) + reduce_add(add(zero[0], zero[1]));
}

// A float that is an integer; NaN gives 0.
FW_INLINE int32_t whole(float x) { return x == x ? int32_t(x) : 0; }

// x in 8 bit: q = x 127 / top, rounded to nearest even; −kDotBias Σ q.
struct Rounded {
  float top;
  int32_t neg_bias_sum;
};
// Writes the vector at k to to(k). `size` is a multiple of kLanes.
template <class To>
FW_INLINE Rounded round_to_s8(const float *x, int size, To &&to) {
  const float top = largest_magnitude(x, size);
  const F32 inverse = set1(top > 0.f ? 127.f / top : 0.f);
  F32 sums[2] = {set1(0.f), set1(0.f)};  // sums of integers are exact
  in_turns(size, [&](int i, int k) FW_LAMBDA {
    const F32 steps = round_f32(mul(load(x + k), inverse));
    store_s8(to(k), steps);
    sums[i] = add(sums[i], steps);
  });
  return {top, -kDotBias * whole(reduce_add(add(sums[0], sums[1])))};
}

// acc[r] += x[r] v, rows of x `Stride` numbers apart.
template <int Stride, int R, int N>
FW_INLINE void add_outer(F32 (&acc)[R][N], const float *x, const F32 (&v)[N]) {
  FW_UNROLL for (int r = 0; r < R; ++r) {
    const auto xv = in_lanes<N>(x + r * Stride);
    FW_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = accumulate(acc[r][n], xv, v[n]);
  }
}

// 2^f for f in [-0.5, 0.5], the minimax polynomial: of degree 5 to 2e-7 relative, 3 to 8e-5.
template <int Degree>
FW_INLINE F32 exp2_fraction(F32 f) {
  if constexpr (Degree == 3) {
    F32 p = set1(5.517166852951050e-2f);
    p = fma(p, f, set1(2.426111251115799e-1f));
    p = fma(p, f, set1(6.932609677314758e-1f));
    return fma(p, f, set1(9.999280571937561e-1f));
  }
  F32 p = set1(1.326472731307149e-3f);
  p = fma(p, f, set1(9.671512991189957e-3f));
  p = fma(p, f, set1(5.550733581185341e-2f));
  p = fma(p, f, set1(2.402224242687225e-1f));
  p = fma(p, f, set1(6.931470036506653e-1f));
  return fma(p, f, set1(1.f));
}

// A float with the integer nearest to x in its lowest bits; that integer.
FW_INLINE F32 whole_bits(F32 x) { return add(x, set1(kWhole)); }
FW_INLINE F32 from_bits(F32 bits) { return sub(bits, set1(kWhole)); }

// 2^x for x <= 127. Below Lowest it gives 2^Lowest: never a denormal, which takes the processor a hundred times as
// long.
template <int Degree = 5, int Lowest = -125>
FW_INLINE F32 exp2_f32(F32 x) {
  x = max_f32(x, set1(float(Lowest)));
  const F32 n = whole_bits(x);
  return times_pow2(exp2_fraction<Degree>(sub(x, from_bits(n))), n);
}

// 2^x for finite x <= 0. With AVX-512 the result may be a denormal or 0, which takes fewer instructions.
FW_INLINE F32 decay_f32(F32 x) {
#if defined(FOREWORD_SIMD_AVX512)
  const F32 n = round_f32(x);
  return _mm512_scalef_ps(exp2_fraction<5>(sub(x, n)), n);
#else
  return exp2_f32(x);
#endif
}

// e^x. Below -87 it gives e^-87, above 88 e^88.
FW_INLINE F32 exp_f32(F32 x) {
  x = min_f32(max_f32(x, set1(-87.f)), set1(88.f));
  const F32 log2e = set1(1.44269504088896341f), n = whole_bits(mul(x, log2e));
  return times_pow2(exp2_fraction<5>(fma(x, log2e, sub(set1(0.f), from_bits(n)))), n);
}

FW_INLINE F32 sigmoid(F32 x) { return div(set1(1.f), add(set1(1.f), exp_f32(sub(set1(0.f), x)))); }
FW_INLINE F32 silu(F32 x) { return div(x, add(set1(1.f), exp_f32(sub(set1(0.f), x)))); }

// tanh(x) = 1 - 2 / (e^2x + 1)
FW_INLINE F32 tanh_f32(F32 x) {
  const F32 e = exp_f32(mul(set1(2.f), min_f32(max_f32(x, set1(-15.f)), set1(15.f))));
  return sub(set1(1.f), div(set1(2.f), add(e, set1(1.f))));
}

}  // namespace foreword::kernels::FOREWORD_ISA
