// Vectors of four lanes in the compiler's own vector types, for any machine. Multiply and add are rounded separately (a
// fused instruction may not exist), so results differ in the last bits from other instruction sets.
#pragma once

#include <cmath>

namespace foreword::kernels::FOREWORD_ISA {

typedef float F32 __attribute__((vector_size(16)));
typedef int32_t I32 __attribute__((vector_size(16)));
typedef int16_t I16 __attribute__((vector_size(16)));
typedef uint8_t U8 __attribute__((vector_size(16)));

constexpr int kLanes = 4;
constexpr int kPanelVectors = 2;
constexpr int kRowsF32 = 4, kRowsI8 = 2, kRowsBlock = 2, kMostSums = 24;
constexpr int kWideRows = 2, kWideVectors = 4, kTallRows = 4;
constexpr bool kPacedPrefetch = false;
constexpr int32_t kDotBias = 128;
constexpr float kMostPositive = 127.f;
constexpr bool kBf16Dot = false;

template <class To, class From>
FW_INLINE To bits_as(From v) { return __builtin_bit_cast(To, v); }

FW_INLINE F32 set1(float x) { return F32{x, x, x, x}; }
FW_INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
FW_INLINE F32 accumulate(F32 acc, F32 a, F32 b) { return fma(a, b, acc); }
FW_INLINE F32 max_f32(F32 a, F32 b) { return a > b ? a : b; }
FW_INLINE F32 min_f32(F32 a, F32 b) { return a < b ? a : b; }
FW_INLINE F32 abs_f32(F32 a) { return a < 0 ? -a : a; }
FW_INLINE F32 sqrt_f32(F32 a) { return F32{std::sqrt(a[0]), std::sqrt(a[1]), std::sqrt(a[2]), std::sqrt(a[3])}; }
// To nearest even, for |a| < 2^22.
FW_INLINE F32 round_f32(F32 a) { return (a + set1(kWhole)) - set1(kWhole); }
FW_INLINE I32 to_i32(F32 a) { return __builtin_convertvector(a, I32); }
FW_INLINE F32 times_pow2(F32 a, F32 bits) { return bits_as<F32>(bits_as<I32>(a) + (bits_as<I32>(bits) << 23)); }
FW_INLINE float reduce_add(F32 a) { return (a[0] + a[2]) + (a[1] + a[3]); }
FW_INLINE float reduce_max(F32 a) {
  const float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}

// Lanes i and i ^ Distance change places.
template <int Distance>
FW_INLINE F32 exchange(F32 v) {
  return F32{v[Distance], v[1 ^ Distance], v[2 ^ Distance], v[3 ^ Distance]};
}
// Lane i keeps v if begin <= i < end, else takes `other`.
FW_INLINE F32 keep_lanes(F32 v, int begin, int end, F32 other) {
  const I32 lane = {0, 1, 2, 3};
  return ((lane >= begin) & (lane < end)) ? v : other;
}
// Lane i takes a where v[i] > 0, else b.
FW_INLINE F32 where_positive(F32 v, F32 a, F32 b) { return v > 0 ? a : b; }
// Bit i is set where v[i] >= threshold[i].
FW_INLINE uint32_t lanes_at_least(F32 v, F32 threshold) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(v[i] >= threshold[i]) << i;
  return bits;
}

FW_INLINE I32 set1_i32(int32_t x) { return I32{x, x, x, x}; }
FW_INLINE I32 shift_7_add(I32 a, I32 b) { return (a << 7) + b; }
FW_INLINE F32 to_f32(I32 a) { return __builtin_convertvector(a, F32); }
// Rounds to nearest even.
FW_INLINE I32 round_to_i32(F32 a) { return to_i32(round_f32(a)); }
FW_INLINE void store_u8(uint8_t *p, I32 a, I32 b, I32 c, I32 d) {
  const I32 of[4] = {a, b, c, d};
  for (int i = 0; i < 4 * kLanes; ++i) p[i] = uint8_t(of[i / kLanes][i % kLanes]);
}
FW_INLINE U8 lookup(const uint8_t *table, U8 a) {
  for (int i = 0; i < 4 * kLanes; ++i) a[i] = table[a[i]];
  return a;
}
FW_INLINE U8 low_nibbles(U8 a) { return a & 0x0f; }
FW_INLINE U8 high_nibbles(U8 a) { return a >> 4; }
FW_INLINE I32 sum_of_pairs(I16 v) {
  const I32 pairs = bits_as<I32>(v);
  return ((pairs << 16) >> 16) + (pairs >> 16);
}
FW_INLINE I32 dot4(I32 acc, U8 w, I32 a) {
  const I32 words = bits_as<I32>(w);  // the product of an unsigned and a signed byte fits 16 bits
  const I16 even = bits_as<I16>(words & 0x00ff00ff) * (bits_as<I16>(a << 8) >> 8);
  const I16 odd = bits_as<I16>((words >> 8) & 0x00ff00ff) * (bits_as<I16>(a) >> 8);
  return acc + sum_of_pairs(even) + sum_of_pairs(odd);
}
FW_INLINE I32 dot4_biased(I32 acc, U8 w, I32 a) { return dot4(acc, w, a); }
FW_INLINE I32 dot4_positive(I32 acc, U8 w, I32 a) { return dot4(acc, bits_as<U8>(a), bits_as<I32>(w)); }

// Half precision without instructions for it: move exponent and fraction into a float's place and rescale.
FW_INLINE F32 load_f16(const uint16_t *p) {
  const I32 h = {p[0], p[1], p[2], p[3]};
  const I32 sign = (h & 0x8000) << 16, magnitude = (h & 0x7fff) << 13;
  const F32 scaled = bits_as<F32>(magnitude) * 5.192296858534828e33f;  // 2^112: difference of the exponent biases
  const I32 special = (h & 0x7c00) == 0x7c00;                          // infinities and NaN
  return bits_as<F32>((special ? (magnitude | 0x7f800000) : bits_as<I32>(scaled)) | sign);
}
// Rounds to nearest even; the caller keeps |v| <= 127.
FW_INLINE void store_s8(int8_t *p, F32 v) {
  const I32 q = to_i32(round_f32(v));
  for (int i = 0; i < kLanes; ++i) p[i] = int8_t(q[i]);
}

// A vector of bf16 pairs: the even and the odd members as floats.
FW_INLINE F32 even_of_pairs(I32 v) { return bits_as<F32>(v << 16); }
FW_INLINE F32 odd_of_pairs(I32 v) { return bits_as<F32>(v & int32_t(0xffff0000u)); }
FW_INLINE void store_bf16(uint16_t *p, F32 v) {
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = bits_as<uint32_t>(float(v[i]));
    p[i] = uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
