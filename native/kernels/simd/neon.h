// 128-bit Arm vectors. The 8-bit dot product takes signed bytes; machines without it multiply to 16 bits and add pairs.
#pragma once

#include <arm_neon.h>

namespace foreword::kernels::FOREWORD_ISA {

using F32 = float32x4_t;
using I32 = int32x4_t;
using U8 = uint8x16_t;

constexpr int kLanes = 4;
constexpr int kPanelVectors = 4;
constexpr int kRowsF32 = 4, kRowsI8 = 4, kRowsBlock = 2, kMostSums = 16;
constexpr int kWideRows = 4, kWideVectors = 4, kTallRows = 8;
constexpr bool kPacedPrefetch = false;
constexpr int32_t kDotBias = 0;
constexpr float kMostPositive = 127.f;
constexpr bool kBf16Dot = false;

FW_INLINE F32 set1(float x) { return vdupq_n_f32(x); }
FW_INLINE F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
FW_INLINE F32 accumulate(F32 acc, F32 a, F32 b) { return fma(a, b, acc); }
FW_INLINE F32 max_f32(F32 a, F32 b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
FW_INLINE F32 min_f32(F32 a, F32 b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
FW_INLINE F32 abs_f32(F32 a) { return vabsq_f32(a); }
FW_INLINE F32 sqrt_f32(F32 a) { return vsqrtq_f32(a); }
FW_INLINE F32 round_f32(F32 a) { return vrndnq_f32(a); }
FW_INLINE F32 times_pow2(F32 a, F32 bits) {
  return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), vshlq_n_s32(vreinterpretq_s32_f32(bits), 23)));
}
FW_INLINE float reduce_add(F32 a) { return vaddvq_f32(a); }
FW_INLINE float reduce_max(F32 a) { return vmaxvq_f32(a); }

// Lanes i and i ^ Distance change places.
template <int Distance>
FW_INLINE F32 exchange(F32 v) { return Distance == 1 ? vrev64q_f32(v) : vextq_f32(v, v, 2); }
FW_INLINE I32 lane_numbers() {
  static const int32_t numbers[4] = {0, 1, 2, 3};
  return vld1q_s32(numbers);
}
// Lane i keeps v if begin <= i < end, else takes `other`.
FW_INLINE F32 keep_lanes(F32 v, int begin, int end, F32 other) {
  const uint32x4_t inside =
      vandq_u32(vcgeq_s32(lane_numbers(), vdupq_n_s32(begin)), vcltq_s32(lane_numbers(), vdupq_n_s32(end)));
  return vbslq_f32(inside, v, other);
}
// Lane i takes a where v[i] > 0, else b.
FW_INLINE F32 where_positive(F32 v, F32 a, F32 b) { return vbslq_f32(vcgtq_f32(v, vdupq_n_f32(0.f)), a, b); }
// Bit i is set where v[i] >= threshold[i].
FW_INLINE uint32_t lanes_at_least(F32 v, F32 threshold) {
  return vaddvq_u32(vandq_u32(vcgeq_f32(v, threshold),
                              vshlq_u32(vdupq_n_u32(1), lane_numbers())));
}

FW_INLINE I32 set1_i32(int32_t x) { return vdupq_n_s32(x); }
FW_INLINE I32 shift_7_add(I32 a, I32 b) { return vaddq_s32(vshlq_n_s32(a, 7), b); }
FW_INLINE F32 to_f32(I32 a) { return vcvtq_f32_s32(a); }
// Rounds to nearest even.
FW_INLINE I32 round_to_i32(F32 a) { return vcvtnq_s32_f32(a); }
FW_INLINE void store_u8(uint8_t *p, I32 a, I32 b, I32 c, I32 d) {
  const int16x8_t ab = vcombine_s16(vmovn_s32(a), vmovn_s32(b)), cd = vcombine_s16(vmovn_s32(c), vmovn_s32(d));
  vst1q_u8(p, vreinterpretq_u8_s8(vcombine_s8(vmovn_s16(ab), vmovn_s16(cd))));
}
FW_INLINE U8 lookup(const uint8_t *table, U8 a) { return vqtbl1q_u8(vld1q_u8(table), a); }
FW_INLINE U8 low_nibbles(U8 a) { return vandq_u8(a, vdupq_n_u8(0x0f)); }
FW_INLINE U8 high_nibbles(U8 a) { return vshrq_n_u8(a, 4); }
// The product of signed bytes; a w of at most 127 is one.
FW_INLINE I32 dot4(I32 acc, U8 w, I32 a) {
  const int8x16_t b = vreinterpretq_s8_u8(w), c = vreinterpretq_s8_s32(a);
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(acc, b, c);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(b), vget_low_s8(c)));
  const int32x4_t high = vpaddlq_s16(vmull_high_s8(b, c));
  return vaddq_s32(acc, vpaddq_s32(low, high));
#endif
}
FW_INLINE I32 dot4_biased(I32 acc, U8 w, I32 a) { return dot4(acc, w, a); }
FW_INLINE I32 dot4_positive(I32 acc, U8 w, I32 a) { return dot4(acc, w, a); }

FW_INLINE F32 load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
// Rounds to nearest even; the caller keeps |v| <= 127.
FW_INLINE void store_s8(int8_t *p, F32 v) {
  const int16x4_t h = vqmovn_s32(vcvtnq_s32_f32(v));
  const int8x8_t b = vqmovn_s16(vcombine_s16(h, h));
  const int32_t bits = vget_lane_s32(vreinterpret_s32_s8(b), 0);
  std::memcpy(p, &bits, 4);
}

// A vector of bf16 pairs: the even and the odd members as floats.
FW_INLINE F32 even_of_pairs(I32 v) { return vreinterpretq_f32_s32(vshlq_n_s32(v, 16)); }
FW_INLINE F32 odd_of_pairs(I32 v) {
  return vreinterpretq_f32_s32(vandq_s32(v, vdupq_n_s32(int32_t(0xffff0000u))));
}
FW_INLINE void store_bf16(uint16_t *p, F32 v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  vst1_u16(p, vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16));
}

}  // namespace foreword::kernels::FOREWORD_ISA
