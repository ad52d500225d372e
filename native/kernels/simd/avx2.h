// 256-bit vectors: AVX2, FMA and F16C; 8-bit dot products with FOREWORD_SIMD_VNNI. Without it they are made of 16-bit
// products of |w| and a * sign(w).
#pragma once

#include <immintrin.h>

namespace foreword::kernels::FOREWORD_ISA {

using F32 = __m256;
using I32 = __m256i;
using U8 = __m256i;

constexpr int kLanes = 8;
constexpr int kPanelVectors = 2;
constexpr int kRowsF32 = 6, kRowsBlock = 4, kMostSums = 24;
constexpr int kWideRows = 3, kWideVectors = 4, kTallRows = 6;
constexpr bool kPacedPrefetch = false;
constexpr bool kBf16Dot = false;

FW_INLINE F32 set1(float x) { return _mm256_set1_ps(x); }
FW_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
FW_INLINE F32 accumulate(F32 acc, F32 a, F32 b) { return fma(a, b, acc); }
FW_INLINE F32 max_f32(F32 a, F32 b) { return _mm256_max_ps(a, b); }
FW_INLINE F32 min_f32(F32 a, F32 b) { return _mm256_min_ps(a, b); }
FW_INLINE F32 abs_f32(F32 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), a); }
FW_INLINE F32 sqrt_f32(F32 a) { return _mm256_sqrt_ps(a); }
FW_INLINE F32 round_f32(F32 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
FW_INLINE F32 times_pow2(F32 a, F32 bits) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(bits), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}
FW_INLINE float reduce_add(F32 a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
FW_INLINE float reduce_max(F32 a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// Lanes i and i ^ Distance change places.
template <int Distance>
FW_INLINE F32 exchange(F32 v) {
  if constexpr (Distance < 4) return _mm256_permute_ps(v, Distance == 1 ? 0xb1 : 0x4e);
  return _mm256_permute2f128_ps(v, v, 1);
}
// Lane i keeps v if begin <= i < end, else takes `other`.
FW_INLINE F32 keep_lanes(F32 v, int begin, int end, F32 other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i too_low = _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane);
  const __m256i low_enough = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
  return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(_mm256_andnot_si256(too_low, low_enough)));
}
// Lane i takes a where v[i] > 0, else b.
FW_INLINE F32 where_positive(F32 v, F32 a, F32 b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_GT_OQ));
}
// Bit i is set where v[i] >= threshold[i].
FW_INLINE uint32_t lanes_at_least(F32 v, F32 threshold) {
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(v, threshold, _CMP_GE_OQ)));
}

FW_INLINE I32 set1_i32(int32_t x) { return _mm256_set1_epi32(x); }
FW_INLINE I32 shift_7_add(I32 a, I32 b) { return _mm256_add_epi32(_mm256_slli_epi32(a, 7), b); }
FW_INLINE F32 to_f32(I32 a) { return _mm256_cvtepi32_ps(a); }
// Rounds to nearest even.
FW_INLINE I32 round_to_i32(F32 a) { return _mm256_cvtps_epi32(a); }
FW_INLINE void store_u8(uint8_t *p, I32 a, I32 b, I32 c, I32 d) {
  const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // per half: a b c d
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm256_permutevar8x32_epi32(bytes, order));
}
FW_INLINE U8 lookup(const uint8_t *table, U8 a) {
  const __m128i *half = reinterpret_cast<const __m128i *>(table);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(half)), a);
}
FW_INLINE U8 low_nibbles(U8 a) { return _mm256_and_si256(a, _mm256_set1_epi8(0x0f)); }
FW_INLINE U8 high_nibbles(U8 a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(0x0f)); }

#if defined(FOREWORD_SIMD_VNNI)
constexpr int kRowsI8 = 6;
constexpr int32_t kDotBias = 128;
constexpr float kMostPositive = 255.f;

FW_INLINE I32 dot4(I32 acc, U8 w, I32 a) {
#if defined(FOREWORD_EMULATE)
  const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(0xff)), odd = _mm256_srli_epi16(w, 8);
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(even, _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8)));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(odd, _mm256_srai_epi16(a, 8)));
#else
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "xm"(a));
  return acc;
#endif
}
FW_INLINE I32 dot4_biased(I32 acc, U8 w, I32 a) { return dot4(acc, w, a); }
#else
constexpr int kRowsI8 = 4;
constexpr int32_t kDotBias = 0;
constexpr float kMostPositive = 127.f;
constexpr bool kStageNibbles = false;

// Sums in the order of the source: GCC would keep all products, in memory, and add them at the end.
FW_INLINE I32 in_order(I32 sum) {
  asm("" : "+x"(sum));
  return sum;
}
FW_INLINE I32 add_pairs(I32 acc, I32 products) {
  return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(products, _mm256_set1_epi16(1))));
}
// w at most 127: two products of at most 127 * 127 fit 16 bits.
FW_INLINE I32 dot4(I32 acc, U8 w, I32 a) { return add_pairs(acc, _mm256_maddubs_epi16(w, a)); }
// w at most 15: 16 products of at most 15 * 127 fit 16 bits.
FW_INLINE I32 begin_nibbles(I32) { return _mm256_setzero_si256(); }
FW_INLINE I32 dot_nibbles(I32 acc, U8 w, I32 a) {
  return in_order(_mm256_add_epi16(acc, _mm256_maddubs_epi16(w, a)));
}
FW_INLINE I32 end_nibbles(I32 sum, I32 acc) { return add_pairs(sum, acc); }
// |w| <= 128 and |a| <= 127: 2 * 128 * 127 = 32512 still fits. Multiplying |w| by a * sign(w) never negates -128.
FW_INLINE I32 dot4_biased(I32 acc, U8 w, I32 a) { return dot4(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(a, w)); }
#endif
FW_INLINE I32 dot4_positive(I32 acc, U8 w, I32 a) { return dot4(acc, a, w); }

FW_INLINE F32 load_f16(const uint16_t *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}
// Rounds to nearest even; the caller keeps |v| <= 127.
FW_INLINE void store_s8(int8_t *p, F32 v) {
  const __m256i q = _mm256_cvtps_epi32(v);
  const __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(h, h));
}

// A vector of bf16 pairs: the even and the odd members as floats.
FW_INLINE F32 even_of_pairs(I32 v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
FW_INLINE F32 odd_of_pairs(I32 v) {
  return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int32_t(0xffff0000u))));
}
FW_INLINE void store_bf16(uint16_t *p, F32 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}

}  // namespace foreword::kernels::FOREWORD_ISA
