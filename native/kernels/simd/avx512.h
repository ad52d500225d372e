// 512-bit vectors: F, BW, DQ, VL and VNNI; bf16 dot products with FOREWORD_SIMD_BF16.
#pragma once

#include <immintrin.h>

namespace foreword::kernels::FOREWORD_ISA {

using F32 = __m512;
using I32 = __m512i;
using U8 = __m512i;

constexpr int kLanes = 16;
constexpr int kPanelVectors = 2;
constexpr int kRowsF32 = 12, kRowsI8 = 12, kMostSums = 24;
constexpr int kWideRows = 6, kWideVectors = 4, kTallRows = 12;
constexpr int32_t kDotBias = 128;
constexpr float kMostPositive = 255.f;

FW_INLINE F32 set1(float x) { return _mm512_set1_ps(x); }
FW_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
FW_INLINE F32 max_f32(F32 a, F32 b) { return _mm512_max_ps(a, b); }
FW_INLINE F32 min_f32(F32 a, F32 b) { return _mm512_min_ps(a, b); }
FW_INLINE F32 abs_f32(F32 a) { return _mm512_abs_ps(a); }
FW_INLINE F32 sqrt_f32(F32 a) { return _mm512_sqrt_ps(a); }
FW_INLINE F32 round_f32(F32 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FW_INLINE F32 times_pow2(F32 a, F32 bits) {
  const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(bits), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), exponent));
}
FW_INLINE float reduce_add(F32 a) { return _mm512_reduce_add_ps(a); }
FW_INLINE float reduce_max(F32 a) { return _mm512_reduce_max_ps(a); }

// Lanes i and i ^ Distance change places.
template <int Distance>
FW_INLINE F32 exchange(F32 v) {
  if constexpr (Distance < 4) return _mm512_permute_ps(v, Distance == 1 ? 0xb1 : 0x4e);
  return _mm512_shuffle_f32x4(v, v, Distance == 4 ? 0xb1 : 0x4e);
}
// Lane i keeps v if begin <= i < end, else takes `other`.
FW_INLINE F32 keep_lanes(F32 v, int begin, int end, F32 other) {
  const uint32_t below_end = end >= 16 ? 0xffffu : (1u << (end > 0 ? end : 0)) - 1u;
  const uint32_t below_begin = begin >= 16 ? 0xffffu : (1u << (begin > 0 ? begin : 0)) - 1u;
  return _mm512_mask_mov_ps(other, static_cast<__mmask16>(below_end & ~below_begin), v);
}
// Lane i takes a where v[i] > 0, else b.
FW_INLINE F32 where_positive(F32 v, F32 a, F32 b) {
  return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_GT_OQ), a);
}
// Bit i is set where v[i] >= threshold[i].
FW_INLINE uint32_t lanes_at_least(F32 v, F32 threshold) { return _mm512_cmp_ps_mask(v, threshold, _CMP_GE_OQ); }

FW_INLINE I32 set1_i32(int32_t x) { return _mm512_set1_epi32(x); }
FW_INLINE I32 add_i32(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
FW_INLINE I32 shift_7_add(I32 a, I32 b) { return _mm512_add_epi32(_mm512_slli_epi32(a, 7), b); }
FW_INLINE F32 to_f32(I32 a) { return _mm512_cvtepi32_ps(a); }
// Rounds to nearest even.
FW_INLINE I32 round_to_i32(F32 a) { return _mm512_cvtps_epi32(a); }
FW_INLINE void store_u8(uint8_t *p, I32 a, I32 b, I32 c, I32 d) {
  const __m512i bytes = _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  // per lane: a b c d
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, bytes));
}
FW_INLINE U8 lookup(const uint8_t *table, U8 a) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table))), a);
}
FW_INLINE U8 low_nibbles(U8 a) { return _mm512_and_si512(a, _mm512_set1_epi8(0x0f)); }
FW_INLINE U8 high_nibbles(U8 a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(0x0f)); }

// The processors with bf16 that run these kernels are AMD's, and Intel's beside AMX. They start as many loads as
// multiply-adds in a cycle, so that fewer loads are better than fewer instructions. And a prefetch takes one of the few
// places for cache lines under way, which loads that the second-level cache answers need as well.
#if defined(FOREWORD_SIMD_BF16)
constexpr int kMemoryUses = 0;
constexpr bool kPacedPrefetch = true;
constexpr int kRowsBlock = 4;  // the sums of two planes fit the registers
#else
constexpr int kMemoryUses = 2;
constexpr bool kPacedPrefetch = false;
constexpr int kRowsBlock = 6;
#endif

// 32 bits in memory that an instruction reads into every lane. For up to kMemoryUses uses this takes fewer instructions
// than a load of its own, which counts where another hyperthread has half of the core's slots.
struct __attribute__((packed, may_alias)) Word {
  int32_t bits;
};
using InLanes = const Word *;
template <int Uses>
FW_INLINE auto in_lanes(const void *p) {
  const InLanes word = static_cast<InLanes>(p);
  if constexpr (Uses <= kMemoryUses) return word;
  else return set1_i32(word->bits);
}
template <int Uses>
FW_INLINE auto in_lanes(const float *p) {
  if constexpr (Uses <= kMemoryUses) return reinterpret_cast<InLanes>(p);
  else return set1(*p);
}

// acc + a b, and dot products: inline assembly, not the intrinsic, since with 24 accumulators GCC 12 copies registers
// around the intrinsic.
FW_INLINE F32 accumulate(F32 acc, F32 a, F32 b) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
FW_INLINE F32 accumulate(F32 acc, InLanes a, F32 b) {
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(b), "m"(*a));
  return acc;
}
FW_INLINE I32 dot4(I32 acc, U8 w, I32 a) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
  return acc;
}
FW_INLINE I32 dot4(I32 acc, U8 w, InLanes a) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*a));
  return acc;
}
FW_INLINE I32 dot4_biased(I32 acc, U8 w, auto a) { return dot4(acc, w, a); }
FW_INLINE I32 dot4_positive(I32 acc, U8 w, I32 a) { return dot4(acc, a, w); }

FW_INLINE F32 load_f16(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}
// Rounds to nearest even; the caller keeps |v| <= 127.
FW_INLINE void store_s8(int8_t *p, F32 v) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}

// A vector of bf16 pairs: the even and the odd members as floats.
FW_INLINE F32 even_of_pairs(I32 v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
FW_INLINE F32 odd_of_pairs(I32 v) {
  return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int32_t(0xffff0000u))));
}
FW_INLINE F32 round_to_bf16(F32 v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return odd_of_pairs(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))));
}
FW_INLINE void store_bf16(uint16_t *p, F32 v) {
#if defined(FOREWORD_SIMD_BF16) && !defined(FOREWORD_EMULATE)
  const auto rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));  // denormals become zeros
#else
  const __m256i rounded = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(round_to_bf16(v)), 16));
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), rounded);
}

#if defined(FOREWORD_SIMD_BF16)
constexpr bool kBf16Dot = true;
FW_INLINE I32 without_odd(I32 pairs) { return _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff)); }
#if defined(FOREWORD_EMULATE)
FW_INLINE F32 dot2(F32 acc, I32 w, I32 a) {  // but for denormals, which the instruction takes for zeros
  return fma(even_of_pairs(w), even_of_pairs(a), fma(odd_of_pairs(w), odd_of_pairs(a), acc));
}
FW_INLINE F32 dot2(F32 acc, I32 w, InLanes a) { return dot2(acc, w, set1_i32(a->bits)); }
FW_INLINE I32 to_bf16(F32 a, F32 b) {
  uint16_t numbers[32];
  store_bf16(numbers, a), store_bf16(numbers + 16, b);
  return _mm512_loadu_si512(numbers);
}
#else
FW_INLINE F32 dot2(F32 acc, I32 w, I32 a) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(a));
  return acc;
}
FW_INLINE F32 dot2(F32 acc, I32 w, InLanes a) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*a));
  return acc;
}
FW_INLINE I32 to_bf16(F32 a, F32 b) { return reinterpret_cast<I32>(_mm512_cvtne2ps_pbh(b, a)); }
#endif
#else
constexpr bool kBf16Dot = false;
#endif

}  // namespace foreword::kernels::FOREWORD_ISA
