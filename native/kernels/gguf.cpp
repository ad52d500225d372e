#include "kernels/gguf.h"

#include <cmath>

#include "kernels/half.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

uint16_t read_u16(const uint8_t *p) { return uint16_t(p[0] | (p[1] << 8)); }
float read_half(const uint8_t *p) { return half_to_float(read_u16(p)); }
uint32_t read_u32(const uint8_t *p) { return read_u16(p) | (uint32_t(read_u16(p + 2)) << 16); }

void set_halves(const BlockRow &out, int first, int count, float d, float m) {
  for (int i = 0; i < count; ++i) out.d[first + i] = d, out.m[first + i] = m;
}

// q4_0, q4_1, q5_0, q5_1: 32 values of 4 bits, byte i holds value i low and value i + 16 high, eight bytes at a time;
// of 5 bits, bit i of a word is the fifth of value i.
template <int Bits, bool Min>
void nibbles_32(const uint8_t *p, int block, const BlockRow &out) {
  constexpr int kOffset = Min ? 0 : 1 << (Bits - 1), kWord = Min ? 4 : 2, kNibbles = Bits == 5 ? kWord + 4 : kWord;
  constexpr uint64_t kEach = 0x0101010101010101u;
  set_halves(out, 2 * block, 2, read_half(p), Min ? read_half(p + 2) : 0.f);
  int8_t *q = out.q + 32 * block;
  const auto put = [](uint64_t nibbles, int8_t *to) {
    const uint64_t values = ((nibbles & (15 * kEach)) + kEach * uint64_t(128 - kOffset)) ^ (128 * kEach);
    std::memcpy(to, &values, 8);
  };
  for (int i = 0; i < 16; i += 8) {
    uint64_t bytes;
    std::memcpy(&bytes, p + kNibbles + i, 8);
    put(bytes, q + i);
    put(bytes >> 4, q + i + 16);
  }
  if constexpr (Bits == 5) {
    const uint32_t fifths = read_u32(p + kWord);
    for (int i = 0; i < 32; ++i) q[i] = int8_t(q[i] + ((fifths >> i & 1u) << 4));
  }
}
void q8_0(const uint8_t *p, int block, const BlockRow &out) {
  set_halves(out, 2 * block, 2, read_half(p), 0.f);
  std::memcpy(out.q + 32 * block, p + 2, 32);
}
template <int Values>
void int8(const uint8_t *p, int block, const BlockRow &out) {
  constexpr int kHalves = Values / kHalf;
  float d;
  std::memcpy(&d, p, sizeof d);
  set_halves(out, kHalves * block, kHalves, d, 0.f);
  std::memcpy(out.q + Values * block, p + sizeof d, Values);
}

// 32 values of 4 bits, as q4_0 has them, with one scale.
void from_table(const int8_t *table, const uint8_t *nibbles, float d, int block, const BlockRow &out) {
  set_halves(out, 2 * block, 2, d, 0.f);
  int8_t *q = out.q + 32 * block;
  for (int i = 0; i < 16; ++i) q[i] = table[nibbles[i] & 15], q[i + 16] = table[nibbles[i] >> 4];
}
// After an exponent.
void mxfp4(const uint8_t *p, int block, const BlockRow &out) {
  from_table(table_of(Format::fp4), p + 1, std::ldexp(1.f, int(p[0]) - 128), block, out);
}
void iq4_nl(const uint8_t *p, int block, const BlockRow &out) {
  from_table(table_of(Format::iq4), p + 2, read_half(p), block, out);
}
// 8 sub-blocks of 32. Their scales have 6 bits: the upper ones of all, then 4 of each; then the values.
void iq4_xs(const uint8_t *p, int block, const BlockRow &out) {
  for (int j = 0; j < 8; ++j) {
    const int scale = (p[4 + j / 2] >> 4 * (j % 2) & 15) | (read_u16(p + 2) >> 2 * j & 3) << 4;
    from_table(table_of(Format::iq4), p + 8 + 16 * j, read_half(p) * float(scale - 32), 8 * block + j, out);
  }
}

// K formats: 256 values in 8 sub-blocks of 32, whose 6-bit scales and mins are in 12 bytes.
void scale_and_min(const uint8_t *s, int j, int *scale, int *min) {
  if (j < 4) {
    *scale = s[j] & 63, *min = s[j + 4] & 63;
  } else {
    *scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    *min = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}

// Values 64 c .. 64 c + 63: byte i of 32 holds sub-block 2 c low and 2 c + 1 high; `high` (may be null) adds a fifth
// bit.
void k_sub_blocks(const uint8_t *scales, float d, float dmin, const uint8_t *low, const uint8_t *high, int block,
                  const BlockRow &out) {
  for (int j = 0; j < 8; ++j) {
    int scale, min;
    scale_and_min(scales, j, &scale, &min);
    set_halves(out, 16 * block + 2 * j, 2, d * float(scale), -dmin * float(min));
    const uint8_t *p = low + 32 * (j / 2);
    int8_t *q = out.q + 256 * block + 32 * j;
    for (int i = 0; i < 32; ++i) {
      const int nibble = (j & 1) ? p[i] >> 4 : p[i] & 15;
      q[i] = int8_t(nibble | (high ? ((high[i] >> j) & 1) << 4 : 0));
    }
  }
}
void q4_k(const uint8_t *p, int block, const BlockRow &out) {
  k_sub_blocks(p + 4, read_half(p), read_half(p + 2), p + 16, nullptr, block, out);
}
void q5_k(const uint8_t *p, int block, const BlockRow &out) {
  k_sub_blocks(p + 4, read_half(p), read_half(p + 2), p + 48, p + 16, block, out);
}

// 256 values: low 4 bits in p[0..128), high 2 bits in p[128..192), 16 signed scales, d. Each 128 values are four rows
// of 32.
void q6_k(const uint8_t *p, int block, const BlockRow &out) {
  const float d = read_half(p + 208);
  for (int i = 0; i < 16; ++i) {
    set_halves(out, 16 * block + i, 1, d * float(int8_t(p[192 + i])), 0.f);
  }
  for (int half = 0; half < 2; ++half) {
    const uint8_t *low = p + 64 * half, *high = p + 128 + 32 * half;
    int8_t *q = out.q + 256 * block + 128 * half;
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < 32; ++i) {
        const int byte = low[32 * (r & 1) + i];
        const int nibble = r < 2 ? byte & 15 : byte >> 4;
        q[32 * r + i] = int8_t((nibble | (((high[i] >> (2 * r)) & 3) << 4)) - 32);
      }
    }
  }
}

template <auto Decode, int Values, int Bytes>
void decode_all(const uint8_t *p, int cols, const BlockRow &out) {
  for (int block = 0; block < cols / Values; ++block) Decode(p + size_t(block) * Bytes, block, out);
}

}  // namespace

void decode_blocks(const SourceMatrix &source, int row, const BlockRow &out) {
  const uint8_t *p = source.data + size_t(row) * source.row_bytes;
  switch (source.source) {
    case Source::q4_0: return decode_all<nibbles_32<4, false>, 32, 18>(p, source.cols, out);
    case Source::q4_1: return decode_all<nibbles_32<4, true>, 32, 20>(p, source.cols, out);
    case Source::q5_0: return decode_all<nibbles_32<5, false>, 32, 22>(p, source.cols, out);
    case Source::q5_1: return decode_all<nibbles_32<5, true>, 32, 24>(p, source.cols, out);
    case Source::q8_0: return decode_all<q8_0, 32, 34>(p, source.cols, out);
    case Source::q4_k: return decode_all<q4_k, 256, 144>(p, source.cols, out);
    case Source::q5_k: return decode_all<q5_k, 256, 176>(p, source.cols, out);
    case Source::q6_k: return decode_all<q6_k, 256, 210>(p, source.cols, out);
    case Source::mxfp4: return decode_all<mxfp4, 32, 17>(p, source.cols, out);
    case Source::iq4_nl: return decode_all<iq4_nl, 32, 18>(p, source.cols, out);
    case Source::iq4_xs: return decode_all<iq4_xs, 256, 136>(p, source.cols, out);
    case Source::int8_16: return decode_all<int8<16>, 16, 20>(p, source.cols, out);
    case Source::int8_32: return decode_all<int8<32>, 32, 36>(p, source.cols, out);
    default: return;
  }
}

void decode_floats(const SourceMatrix &source, int row, const BlockRow &blocks, float *out) {
  const uint8_t *p = source.data + size_t(row) * source.row_bytes;
  const int cols = source.cols;
  switch (source.source) {
    case Source::f32:
      std::memcpy(out, p, sizeof(float) * size_t(cols));
      return;
    case Source::f16:
      for (int k = 0; k < cols; ++k) out[k] = read_half(p + 2 * k);
      return;
    case Source::bf16:
      for (int k = 0; k < cols; ++k) out[k] = bf16_to_float(read_u16(p + 2 * k));
      return;
    default:
      decode_blocks(source, row, blocks);
      for (int h = 0; h < cols / kHalf; ++h) {
        for (int k = kHalf * h; k < kHalf * (h + 1); ++k) out[k] = blocks.d[h] * float(blocks.q[k]) + blocks.m[h];
      }
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
