// Writing one token's key or value into a tile, for each number format. The layouts: KVLayer in formats.h.
#pragma once

#include "kernels/half.h"
#include "kernels/rotation.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr size_t element_bytes(KVFormat f) { return f == KVFormat::f32 ? 4 : f == KVFormat::bf16 ? 2 : 1; }

// A token's stored key or value: `elements` in the format, and the scale of i8 (keys are stored plus kDotBias).
struct StoredToken {
  const uint8_t *elements;
  float scale;
};

FW_INLINE float quantise_i8(const float *x, int dim, uint8_t offset, uint8_t *out) {
  const float top = round_to_s8(x, dim, [&](int d) FW_LAMBDA { return reinterpret_cast<int8_t *>(out) + d; }).top;
  if (offset) { for (int d = 0; d < dim; ++d) out[d] = uint8_t(out[d] ^ offset); }
  return top / 127.f;
}

FW_INLINE StoredToken encode(KVFormat f, const float *x, int dim, bool key, uint8_t *buffer) {
  if (f == KVFormat::f32) return {reinterpret_cast<const uint8_t *>(x), 1.f};
  if (f == KVFormat::i8) {
    if (!key) return {buffer, quantise_i8(x, dim, 0, buffer)};
    float *rotated = reinterpret_cast<float *>(buffer);  // a number is overwritten after it has been read
    const float factor = rotate_head(x, dim, rotated);
    return {buffer, quantise_i8(rotated, dim, uint8_t(kDotBias), buffer) / factor};
  }
  for (int d = 0; d < dim; d += kLanes) store_bf16(reinterpret_cast<uint16_t *>(buffer) + d, load(x + d));
  return {buffer, 1.f};
}

template <class T>
FW_INLINE void copy_strided(const uint8_t *from, int count, uint8_t *to, int stride) {
  for (int i = 0; i < count; ++i) std::memcpy(to + sizeof(T) * size_t(i) * stride, from + sizeof(T) * i, sizeof(T));
}

FW_INLINE float *tile_scales(uint8_t *tile, int dim) { return reinterpret_cast<float *>(tile + kTile * size_t(dim)); }
FW_INLINE const float *tile_scales(const uint8_t *tile, int dim) {
  return reinterpret_cast<const float *>(tile + kTile * size_t(dim));
}

FW_INLINE void put_key(KVFormat f, const StoredToken &t, int dim, int slot, uint8_t *tile) {
  uint8_t *first =
      tile + 4 * slot;  // the unit of every layout is four bytes: a float, a pair of bf16 or a quad of bytes
  copy_strided<uint32_t>(t.elements, dim * int(element_bytes(f)) / 4, first, kTile);
  if (f == KVFormat::i8) tile_scales(tile, dim)[slot] = t.scale;
}

FW_INLINE void put_value(KVFormat f, const StoredToken &t, int dim, int slot, uint8_t *tile) {
  const size_t row = size_t(dim) * element_bytes(f);
  if (f == KVFormat::bf16) {
    copy_strided<uint16_t>(t.elements, dim, tile + 2 * row * size_t(slot / 2) + 2 * (slot % 2), 2);
    return;
  }
  if (f == KVFormat::i8) {
    copy_strided<uint8_t>(t.elements, dim, tile + 4 * row * size_t(slot / 4) + slot % 4, 4);
    tile_scales(tile, dim)[slot] = t.scale;
    return;
  }
  std::memcpy(tile + row * size_t(slot), t.elements, row);
}

}  // namespace foreword::kernels::FOREWORD_ISA
