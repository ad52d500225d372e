// The keys and values of a chunk as tiles: found in tiled blocks, copied from others, or widened to floats.
#pragma once

#include "kernels/attention_state.h"

namespace foreword::kernels::FOREWORD_ISA {

FW_INLINE const uint8_t *head_of_block(const KVLayer &kv, const int32_t *table, int64_t key, int head) {
  const int64_t block = table[key / kv.block_size];
  return kv.base + size_t(block) * kv.block_stride + size_t(head) * kv.head_stride;
}

// Tiles of the chunk at `begin`; past `end` the last one is repeated, so that every pointer is readable.
inline void find_tiles(const KVLayer &kv, const int32_t *table, int head, int64_t begin, int64_t end, const uint8_t **k,
                const uint8_t **v) {
  int block = int(uint32_t(begin) / uint32_t(kv.block_size));
  int offset = int(begin) - block * kv.block_size;  // one division per chunk
  for (int i = 0; i < kChunkTiles; ++i) {
    if (i > 0 && begin + i * kTile >= end) {
      k[i] = k[i - 1], v[i] = v[i - 1];
      continue;
    }
    k[i] = kv.base + size_t(table[block]) * kv.block_stride + size_t(head) * kv.head_stride +
           size_t(offset / kTile) * kv.both_tiles_bytes;
    v[i] = k[i] + size_t(kv.parts - 1) * kv.tile_bytes;
    offset += kTile;
    if (offset == kv.block_size) ++block, offset = 0;
  }
}

// The chunk that is prefetched while the one at `begin` is read: two further on, first of this tile, then of the next.
// None: the chunk itself.
inline void find_ahead(const KVLayer &kv, const AttentionTile &t, int64_t begin, ChunkTiles *c) {
  const bool one_chunk = t.key_end - t.key_begin / kChunk * kChunk <= kChunk;
  const int64_t ahead = begin + (one_chunk ? kChunk : 2 * kChunk);
  if (ahead < t.key_end) {
    return find_tiles(kv, t.block_table, t.kv_head, ahead, smaller(ahead + kChunk, t.key_end), c->ahead_k, c->ahead_v);
  }
  if (t.next.block_table) {
    const int64_t past = ahead - round_up(t.key_end, int64_t(kChunk));
    const int64_t first = t.next.key_begin / kChunk * kChunk + past;
    if (first < t.next.key_end) {
      return find_tiles(kv, t.next.block_table, t.next.kv_head, first, smaller(first + kChunk, t.next.key_end),
                        c->ahead_k, c->ahead_v);
    }
  }
  for (int i = 0; i < kChunkTiles; ++i) c->ahead_k[i] = c->k[i], c->ahead_v[i] = c->v[i];
}

// Blocks that are not tiled: copies token after token into tiles in scratch memory.
inline void copy_tiles(const KVLayer &kv, const AttentionTile &t, int64_t begin, int64_t end,
                       const AttentionScratch &s, ChunkTiles *c) {
  for (int i = 0; i < kChunkTiles; ++i) {
    uint8_t *k = s.tiles + size_t(i) * s.tiles_stride, *v = k + kv.tile_bytes;
    c->k[i] = c->ahead_k[i] = k;
    c->v[i] = c->ahead_v[i] = v;
    for (int slot = 0; slot < kTile; ++slot) {
      const int64_t key = begin + i * kTile + slot;
      if (key >= end) break;
      const uint8_t *stored = head_of_block(kv, t.block_table, key, t.kv_head) +
                              size_t(key % kv.block_size) * kv.both_bytes;
      const size_t element = element_bytes(kv.format);
      StoredToken key_token{stored, 1.f}, value_token{stored + kv.token_bytes, 1.f};
      if (kv.format == KVFormat::i8) {
        std::memcpy(&key_token.scale, key_token.elements + size_t(kv.padded_dim) * element, sizeof(float));
        if (kv.parts == 2) {
          std::memcpy(&value_token.scale, value_token.elements + size_t(kv.padded_value) * element, sizeof(float));
        }
      }
      put_key(kv.format, key_token, kv.padded_dim, slot, k);
      if (kv.parts == 1) continue;
      put_value(kv.format, value_token, kv.padded_value, slot, v);
    }
  }
}

// Keys at the positions t.chosen[begin, end), which are the values too, as tiles in scratch memory.
inline void gather_tiles(const KVLayer &kv, const AttentionTile &t, int64_t begin, int64_t end,
                         const AttentionScratch &s, ChunkTiles *c) {
  // What every layout has is in units of four bytes, of one key in a line of a tile, or one after the other.
  const size_t step = kv.tiled ? 4 * kTile : 4, units = size_t(kv.padded_dim) * element_bytes(kv.format) / 4;
  for (int i = 0; i < kChunkTiles; ++i) {
    uint8_t *k = s.tiles + size_t(i) * s.tiles_stride;
    c->k[i] = c->ahead_k[i] = k;
    c->v[i] = c->ahead_v[i] = k + kv.tile_bytes;
    const uint8_t *stored[kTile];
    const int count = int(smaller(end - begin - i * kTile, int64_t(kTile)));
    for (int slot = 0; slot < count; ++slot) {
      const int64_t key = t.chosen[begin + i * kTile + slot], offset = key % kv.block_size;
      const uint8_t *block = head_of_block(kv, t.block_table, key, t.kv_head);
      stored[slot] = kv.tiled ? block + offset / kTile * kv.both_tiles_bytes + 4 * (offset % kTile)
                              : block + offset * kv.both_bytes;
    }
    for (size_t unit = 0; unit < units; ++unit, k += 4 * kTile) {
      for (int slot = 0; slot < count; ++slot) std::memcpy(k + 4 * slot, stored[slot] + unit * step, 4);
    }
    if (kv.format != KVFormat::i8) continue;
    for (int slot = 0; slot < count; ++slot) std::memcpy(k + 4 * slot, stored[slot] + units * step, 4);  // the scale
  }
}

// The elements of a and b with these numbers.
#if defined(__clang__)
#define FW_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FW_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(+(a)){__VA_ARGS__})
#endif

using Bytes = uint8_t __attribute__((vector_size(16)));
using Halves = uint16_t __attribute__((vector_size(16)));

template <class T>
FW_INLINE T load_16(const uint8_t *p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
FW_INLINE void store_16(uint8_t *p, T v) {
  std::memcpy(p, &v, sizeof v);
}

// The tile of values whose keys are those of the tile `k`, which is read once. In i8 both are rotated.
inline void make_value_tile(KVFormat f, const uint8_t *k, int dim, uint8_t *v) {
  constexpr size_t kLine = 4 * kTile;  // a unit of all keys
  const size_t row = 4 * size_t(dim);  // a float, a pair or a quad of keys in all dimensions
  for (int d = 0; d < dim; d += 4, v += 16) {  // four dimensions
    if (f == KVFormat::i8) {
      FW_ROLLED for (int quad = 0; quad < kTile / 4; ++quad) {
        const Bytes a = load_16<Bytes>(k + 16 * quad);
        store_16(v + size_t(quad) * row,
                 FW_SHUFFLE(a, a, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15) ^ uint8_t(kDotBias));
      }
      k += kLine;
    } else if (f == KVFormat::bf16) {
      FW_ROLLED for (int pair = 0; pair < kTile / 2; pair += 2) {
        const Halves a = load_16<Halves>(k + 8 * pair), b = load_16<Halves>(k + kLine + 8 * pair);
        store_16(v + size_t(pair) * row, FW_SHUFFLE(a, b, 0, 2, 1, 3, 8, 10, 9, 11));
        store_16(v + size_t(pair + 1) * row, FW_SHUFFLE(a, b, 4, 6, 5, 7, 12, 14, 13, 15));
      }
      k += 2 * kLine;
    } else {
      FW_ROLLED for (int key = 0; key < kTile; ++key) {
        uint32_t numbers[4];
        for (int i = 0; i < 4; ++i) std::memcpy(numbers + i, k + size_t(i) * kLine + 4 * key, 4);
        std::memcpy(v + size_t(key) * row, numbers, sizeof numbers);
      }
      k += 4 * kLine;
    }
  }
  if (f == KVFormat::i8) std::memcpy(v + 3 * row, k, sizeof(float) * kTile);  // the scales follow both
}

// The values of a chunk of keys that are the values too, in scratch memory that copy_tiles leaves to them.
inline void make_values(const KVLayer &kv, int tiles, const AttentionScratch &s, ChunkTiles *c) {
  for (int i = 0; i < kChunkTiles; ++i) {
    uint8_t *v = s.tiles + size_t(smaller(i, tiles - 1)) * s.tiles_stride + kv.tile_bytes;
    if (i < tiles) make_value_tile(kv.format, c->k[i], kv.padded_dim, v);
    c->v[i] = v;
  }
}

// Widens a bf16 chunk to float tiles: the numbers are the same, and the rows of a prefill tile share the work.
inline void stage_bf16(const ChunkTiles &c, int dim, int value_dim, int tiles, uint8_t *memory, ChunkTiles *out) {
  float *o = reinterpret_cast<float *>(memory);
  for (int i = 0; i < kChunkTiles; ++i) {
    const int from = smaller(i, tiles - 1);
    float *k = o + size_t(kTile) * size_t(from * (dim + value_dim)), *v = k + size_t(kTile) * dim;
    out->k[i] = reinterpret_cast<const uint8_t *>(k);
    out->v[i] = reinterpret_cast<const uint8_t *>(v);
    if (i >= tiles) continue;
    const uint16_t *kp = reinterpret_cast<const uint16_t *>(c.k[i]), *vp = reinterpret_cast<const uint16_t *>(c.v[i]);
    for (int d = 0; d < dim; d += 2) {
      for (int n = 0; n < kTile; n += kLanes) {
        const I32 pairs = load_pairs(kp + 2 * (d / 2 * kTile + n));
        store(k + d * kTile + n, even_of_pairs(pairs));
        store(k + (d + 1) * kTile + n, odd_of_pairs(pairs));
      }
    }
    for (int key = 0; key < kTile; key += 2) {
      for (int d = 0; d < value_dim; d += kLanes) {
        const I32 pairs = load_pairs(vp + 2 * (size_t(key / 2) * value_dim + d));
        store(v + size_t(key) * value_dim + d, even_of_pairs(pairs));
        store(v + size_t(key + 1) * value_dim + d, odd_of_pairs(pairs));
      }
    }
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
