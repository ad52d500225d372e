#include "kernels/packing.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "kernels/half.h"
#include "kernels/isa_functions.h"
#include "kernels/rotation.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

int8_t rounded(float x) { return int8_t(std::lrintf(x)); }

void put_f32(const float *x, int cols, int n, uint8_t *panel) {
  float *out = reinterpret_cast<float *>(panel);
  for (int k = 0; k < cols; ++k) out[size_t(k) * kPanelWidth + n] = x[k];
}

void put_bf16(const float *x, int cols, int n, uint8_t *panel) {
  uint32_t *out = reinterpret_cast<uint32_t *>(panel);
  for (int k = 0; k < cols; k += 2) {
    out[size_t(k / 2) * kPanelWidth + n] = float_to_bf16(x[k]) | (uint32_t(float_to_bf16(x[k + 1])) << 16);
  }
}

// A quad of 8-bit weights, offset by kDotBias, as one 32-bit word.
uint32_t biased_quad(const int8_t *q) {
  uint32_t word;
  std::memcpy(&word, q, 4);
  return word ^ kDotFlip;
}

// The weights of one block, as the format's words: 8 quads of bytes, or 4 words of two quads' nibbles.
void put_block_weights(Format f, const int8_t *q, int n, uint8_t *weights) {
  uint32_t *out = reinterpret_cast<uint32_t *>(weights);
  if (!is_4bit(f)) {
    for (int j = 0; j < 8; ++j) out[j * kPanelWidth + n] = biased_quad(q + 4 * j);
    return;
  }
  const auto code = [f](int8_t value) {
    if (!has_table(f)) return value + (f == Format::q4 ? 8 : 0);
    const int8_t *table = table_of(f);
    return int(std::find(table, table + 16, value) - table);
  };
  uint8_t nibbles[16];
  for (int i = 0; i < 16; ++i) nibbles[i] = uint8_t((code(q[i]) & 15) | (code(q[i + 16]) << 4));
  for (int j = 0; j < 4; ++j) std::memcpy(out + j * kPanelWidth + n, nibbles + 4 * j, 4);
}

void put_blocks(Format f, const BlockRow &row, int cols, int n, uint8_t *panel) {
  for (int b = 0; b < cols / kBlock; ++b) {
    uint8_t *block = panel + size_t(b) * block_bytes(f);
    uint16_t *scales = reinterpret_cast<uint16_t *>(block);
    scales[n] = float_to_half(row.d[2 * b]);
    if (has_min(f)) scales[kPanelWidth + n] = float_to_half(row.m[2 * b]);
    if (f == Format::q8_half) scales[kPanelWidth + n] = float_to_half(row.d[2 * b + 1]);
    put_block_weights(f, row.q + kBlock * b, n, block + block_scale_bytes(f));
  }
}

// Floats to blocks of 32: for q8 the largest magnitude becomes ±127; for q4_min the range is 0 .. 15. The integers are
// computed with the scale as it is stored, rounded to half precision.
void quantise_blocks(Format f, const float *x, int cols, const BlockRow &row) {
  for (int b = 0; b < cols / kBlock; ++b) {
    const float *v = x + kBlock * b;
    float d, m = 0.f;
    if (is_4bit(f)) {
      float low = v[0], high = v[0];
      for (int i = 1; i < kBlock; ++i) low = v[i] < low ? v[i] : low, high = v[i] > high ? v[i] : high;
      d = half_to_float(float_to_half((high - low) / 15.f));
      m = half_to_float(float_to_half(low));
    } else {
      d = half_to_float(float_to_half(largest_magnitude(v, kBlock) / 127.f));
    }
    const float inverse = d > 0.f ? 1.f / d : 0.f;
    const float bottom = is_4bit(f) ? 0.f : -127.f, top = is_4bit(f) ? 15.f : 127.f;
    for (int i = 0; i < kBlock; ++i) {
      row.q[kBlock * b + i] = rounded(larger(bottom, smaller(top, (v[i] - m) * inverse)));
    }
    row.d[2 * b] = row.d[2 * b + 1] = d;
    row.m[2 * b] = row.m[2 * b + 1] = m;
  }
}

void clear(const PackedRow &s, int cols) {
  std::memset(s.values, 0, sizeof(float) * size_t(cols));
  std::memset(s.blocks.q, 0, size_t(cols));
  for (int h = 0; h < cols / kHalf; ++h) s.blocks.d[h] = s.blocks.m[h] = 0.f;
}

}  // namespace

PackedRow packed_row(void *memory, int padded_cols) {
  const size_t cols = size_t(padded_cols);
  float *values = static_cast<float *>(memory);
  float *d = values + cols, *m = d + cols / kHalf;
  return {values, {reinterpret_cast<int8_t *>(m + cols / kHalf), d, m}};
}

float put_i8(float *x, int8_t *q, int cols, int n, uint8_t *panel) {
  const float factor = rotate_inputs(x, cols, x), largest = largest_magnitude(x, cols);
  const F32 inverse = set1(largest > 0.f ? 127.f / largest : 0.f);
  reinterpret_cast<float *>(panel)[n] = largest / (127.f * factor);
  uint32_t *out = reinterpret_cast<uint32_t *>(panel + sizeof(float) * kPanelWidth);
  for (int k = 0; k < cols; k += kLanes) store_s8(q + k, mul(load(x + k), inverse));
  for (int k = 0; k < cols; k += 4) out[size_t(k / 4) * kPanelWidth + n] = biased_quad(q + k);
  return factor;
}

size_t panel_bytes(Format format, int padded_cols) { return input_offset(format, padded_cols); }

size_t pack_scratch_bytes(int padded_cols) {
  const size_t cols = size_t(padded_cols);
  return cols * sizeof(float) + 2 * (cols / kHalf) * sizeof(float) + cols;
}

void pack_panel(const SourceMatrix &source, const PackedMatrix &matrix, int panel, void *scratch) {
  const PackedRow s = packed_row(scratch, matrix.padded_cols);
  uint8_t *out = matrix.panels + size_t(panel) * matrix.panel_bytes;
  const int cols = matrix.padded_cols;
  clear(s, cols);
  for (int n = 0; n < kPanelWidth; ++n) {
    const int row = panel * kPanelWidth + n;
    // Inputs from source.cols on are zero; put_i8 leaves those of the previous row changed.
    std::memset(s.values + source.cols, 0, sizeof(float) * size_t(cols - source.cols));
    if (row >= source.rows) {
      clear(s, cols);
    } else if (!is_block_format(matrix.format)) {
      decode_floats(source, row, s.blocks, s.values);
    } else if (is_float(source.source)) {
      decode_floats(source, row, s.blocks, s.values);
      quantise_blocks(matrix.format, s.values, cols, s.blocks);
    } else {
      decode_blocks(source, row, s.blocks);
    }
    switch (matrix.format) {
      case Format::f32: put_f32(s.values, cols, n, out); break;
      case Format::bf16: put_bf16(s.values, cols, n, out); break;
      case Format::i8: put_i8(s.values, s.blocks.q, cols, n, out); break;
      default: put_blocks(matrix.format, s.blocks, cols, n, out);
    }
  }
}

void decode_row(const SourceMatrix &source, int row, float *out) {
  alignas(64) int8_t q[256];
  float d[256 / kHalf], m[256 / kHalf];
  if (is_float(source.source)) return decode_floats(source, row, {}, out);
  // Pieces of 256 values: a multiple of every format's block.
  const uint8_t *p = source.data + size_t(row) * source.row_bytes;
  for (int k = 0; k < source.cols; k += 256) {
    const int count = smaller(256, source.cols - k);
    const size_t offset = source.row_bytes * size_t(k) / size_t(source.cols);
    const SourceMatrix piece{source.source, 1, count, 0, p + offset};
    decode_floats(piece, 0, {q, d, m}, out + k);
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
