#include "kernels/isa_functions.h"
#include "kernels/kv_layout.h"

namespace foreword::kernels::FOREWORD_ISA {

// `scratch` holds at least 4 bytes for each number of a padded key or value.
void store_kv(const KVLayer &kv, int64_t slot, int head, const float *k, const float *v, void *scratch) {
  uint8_t *buffer = static_cast<uint8_t *>(scratch);
  const size_t offset = size_t(slot % kv.block_size);
  uint8_t *block = kv.base + size_t(slot / kv.block_size) * kv.block_stride + size_t(head) * kv.head_stride;
  if (kv.tiled) {
    uint8_t *tile = block + offset / kTile * kv.both_tiles_bytes;
    const int in_tile = int(offset % kTile);
    put_key(kv.format, encode(kv.format, k, kv.padded_dim, true, buffer), kv.padded_dim, in_tile, tile);
    if (kv.parts == 1) return;
    put_value(kv.format, encode(kv.format, v, kv.padded_value, false, buffer), kv.padded_value, in_tile,
              tile + kv.tile_bytes);
    return;
  }
  const float *both[2] = {k, v};
  for (int i = 0; i < kv.parts; ++i) {
    const int dim = i ? kv.padded_value : kv.padded_dim;
    const size_t elements = size_t(dim) * element_bytes(kv.format);
    uint8_t *out = block + offset * kv.both_bytes + size_t(i) * kv.token_bytes;
    const StoredToken token = encode(kv.format, both[i], dim, i == 0, buffer);
    std::memcpy(out, token.elements, elements);
    if (kv.format == KVFormat::i8) std::memcpy(out + elements, &token.scale, sizeof(float));
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
