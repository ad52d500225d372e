// Half precision and bf16 of single numbers, in the namespace of the instruction set so that no copy is shared.
#pragma once

#include "kernels/simd/simd.h"

namespace foreword::kernels::FOREWORD_ISA {

FW_INLINE float float_from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
FW_INLINE uint32_t bits_of_float(float f) { return __builtin_bit_cast(uint32_t, f); }

FW_INLINE float half_to_float(uint16_t h) {
  const uint32_t magnitude = uint32_t(h & 0x7fff) << 13;
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  if ((h & 0x7c00) == 0x7c00) return float_from_bits(sign | magnitude | 0x7f800000u);
  return float_from_bits(sign | bits_of_float(float_from_bits(magnitude) * 5.192296858534828e33f));  // * 2^112
}

// Rounds to nearest even; values out of range become infinity.
FW_INLINE uint16_t float_to_half(float f) {
  const uint32_t bits = bits_of_float(f);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const float magnitude = float_from_bits(bits & 0x7fffffffu);
  if (!(magnitude < 65520.f)) return uint16_t(sign | (magnitude != magnitude ? 0x7e00u : 0x7c00u));
  if (magnitude < 6.103515625e-05f) {  // subnormal: units of 2^-24; adding 1.5 * 2^23 rounds to an integer
    return uint16_t(sign | (bits_of_float(magnitude * 16777216.f + 12582912.f) & 0x7fffu));
  }
  const uint32_t m = bits_of_float(magnitude);
  return uint16_t(sign | ((m + 0xfffu + ((m >> 13) & 1u) - (112u << 23)) >> 13));
}

FW_INLINE float bf16_to_float(uint16_t b) { return float_from_bits(uint32_t(b) << 16); }
FW_INLINE uint16_t float_to_bf16(float f) {
  const uint32_t bits = bits_of_float(f);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace foreword::kernels::FOREWORD_ISA
