// Packing of weight matrices into panels. The layouts: PackedMatrix in formats.h.
#pragma once

#include "kernels/gguf.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr bool is_block_format(Format f) { return f >= Format::q4; }
constexpr bool has_min(Format f) { return f == Format::q4_min || f == Format::q8_min; }
constexpr bool is_4bit(Format f) { return f == Format::q4 || f == Format::q4_min; }

// Bytes of one block of 32 inputs of a whole panel in a block format: its scales, then its weights.
constexpr size_t block_scale_bytes(Format f) {
  return sizeof(uint16_t) * kPanelWidth * (has_min(f) || f == Format::q8_half ? 2 : 1);
}
constexpr size_t block_bytes(Format f) { return block_scale_bytes(f) + kBlock * kPanelWidth / (is_4bit(f) ? 2 : 1); }

// Where a panel holds the weights of input k on: a multiple of kBlock, or 2 in the float formats.
constexpr size_t input_offset(Format f, int k) {
  const size_t inputs = size_t(k);
  switch (f) {
    case Format::f32: return sizeof(float) * kPanelWidth * inputs;
    case Format::bf16: return sizeof(uint16_t) * kPanelWidth * inputs;
    case Format::i8: return kPanelWidth * (sizeof(float) + inputs);
    default: return inputs / kBlock * block_bytes(f);
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
