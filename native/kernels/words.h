// Activations of 15 bit as words of 16 bits, where kWords: instead of two planes of bytes. The product of two pairs of
// words is one instruction. So a sum needs half the registers of two planes, and none is joined with another.
//
//   word_place      the place of an input in its block: quads are in the order 0 2 1 3
//   store_words     a vector of whole numbers as words, in this order
//   word_pairs      of quads of signed bytes: the bytes 0 and 2 of each quad (Pair 0), or 1 and 3
//   nibble_pairs    as word_pairs, of the low or the high nibbles
//   dot2_words      dot2_words(acc, w, a) adds Σ w a over the two words of each lane
#pragma once

#include "kernels/simd/simd.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr int word_place(int i) { return i % 4 == 1 || i % 4 == 2 ? i ^ 3 : i; }

#if defined(FOREWORD_SIMD_AVX2) && !defined(FOREWORD_SIMD_VNNI)
constexpr bool kWords = true;

FW_INLINE void store_words(int16_t *p, F32 v) {
  const __m256i q = _mm256_cvtps_epi32(v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
  constexpr int kOrder = _MM_SHUFFLE(3, 1, 2, 0);
  _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm_shufflehi_epi16(_mm_shufflelo_epi16(words, kOrder), kOrder));
}
template <int Pair>
FW_INLINE I32 word_pairs(U8 bytes) {
  return _mm256_srai_epi16(Pair == 0 ? _mm256_slli_epi16(bytes, 8) : bytes, 8);
}
template <int Pair, bool High>
FW_INLINE I32 nibble_pairs(U8 bytes) {
  constexpr int kShift = 8 * Pair + 4 * High;
  const __m256i shifted = kShift == 0 ? bytes : _mm256_srli_epi16(bytes, kShift);
  return kShift == 12 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi16(0x0f));
}
FW_INLINE I32 dot2_words(I32 acc, I32 w, I32 a) {
  return in_order(_mm256_add_epi32(acc, _mm256_madd_epi16(w, a)));
}
#else
constexpr bool kWords = false;
#endif

}  // namespace foreword::kernels::FOREWORD_ISA
