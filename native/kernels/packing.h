// Packing of weight matrices into panels. The layouts: PackedMatrix in formats.h.
#pragma once

#include "kernels/gguf.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr bool is_block_format(Format f) { return f >= Format::q4; }
constexpr bool has_min(Format f) { return f == Format::q4_min || f == Format::q8_min; }
constexpr bool is_4bit(Format f) { return f == Format::q4 || f == Format::q4_min || has_table(f); }

// Bytes of one block of 32 inputs of a whole panel in a block format: its scales, then its weights.
constexpr size_t block_scale_bytes(Format f) {
  return sizeof(uint16_t) * kPanelWidth * (has_min(f) || f == Format::q8_half ? 2 : 1);
}
constexpr size_t block_bytes(Format f) { return block_scale_bytes(f) + kBlock * kPanelWidth / (is_4bit(f) ? 2 : 1); }

// The place from which a panel holds the weights of input k: a multiple of kBlock, or 2 in the float formats.
constexpr size_t input_offset(Format f, int k) {
  const size_t inputs = size_t(k);
  switch (f) {
    case Format::f32: return sizeof(float) * kPanelWidth * inputs;
    case Format::bf16: return sizeof(uint16_t) * kPanelWidth * inputs;
    case Format::i8: return kPanelWidth * (sizeof(float) + inputs);
    default: return inputs / kBlock * block_bytes(f);
  }
}

// Memory for a row while it is packed, in pack_scratch_bytes.
struct PackedRow {
  float *values;
  BlockRow blocks;
};
PackedRow packed_row(void *memory, int padded_cols);

// Writes output n of a panel in Format::i8. x becomes c R x (rotation.h), q its numbers in 8 bit; returns c.
float put_i8(float *x, int8_t *q, int cols, int n, uint8_t *panel);

// The weights of a block of a panel, nibbles to bytes: (nibble + add) ^ flip of each byte.
FW_INLINE void widen_nibbles(const uint8_t *nibbles, uint32_t add, uint32_t flip, uint8_t *bytes) {
  for (int i = 0; i < 4 * kPanelWidth; ++i) {
    uint32_t word;
    std::memcpy(&word, nibbles + 4 * i, 4);
    const uint32_t low = ((word & 0x0f0f0f0fu) + add) ^ flip, high = ((word >> 4 & 0x0f0f0f0fu) + add) ^ flip;
    std::memcpy(bytes + 4 * i, &low, 4);
    std::memcpy(bytes + 4 * (i + 4 * kPanelWidth), &high, 4);
  }
}

// As widen_nibbles for a format with this table: the signed weight ^ flip.
FW_INLINE void widen_by_table(const int8_t *table, const uint8_t *nibbles, uint8_t flip, uint8_t *bytes) {
  constexpr int kBytes = 16 * kPanelWidth;
  for (int i = 0; i < kBytes; ++i) {
    bytes[i] = uint8_t(table[nibbles[i] & 15]) ^ flip;
    bytes[i + kBytes] = uint8_t(table[nibbles[i] >> 4]) ^ flip;
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
