// The two products of attention by AMX tiles, 16 rows at a time. A tile of keys is one of the cache, a tile of values
// 16 dimensions of values that are copied together, once per chunk:
//
//   bf16     scores   S [rows][16 keys] = Q [rows][32 d] K [32 d][16 keys], d upwards
//            values   O [rows][16 d]   += P [rows][32 keys] V [32 keys][16 d], keys upwards
//   8 bit    the same over 64 d and all 64 keys of a chunk, exactly, for both planes of Q and P; then the arithmetic of
//            ScoresI8 and ValuesI8 in attention_tiles.h
//
// Tile registers are not renamed: a product uses other sums than the one before it.
//
// All rows of Q, P, S and O are computed in tiles of the same height: scratch memory has rows up to a multiple of it.
#pragma once

#include "kernels/attention_state.h"
#include "kernels/simd/amx.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr int kStepDims = kTileBytes / 2;         // of a product of scores in bf16
constexpr int kStepKeys = kTileBytes / 2;         // of a product of values in bf16
constexpr int kVectorRowsI8 = 15;                 // up to this many rows of 8 bit are multiplied by vectors
constexpr bool tiles_fit(KVFormat f, int dim, int rows) {
  if (f == KVFormat::i8) return dim % kTileBytes == 0 && rows > kVectorRowsI8;
  return f == KVFormat::bf16 && dim % kStepDims == 0;
}

// Tile registers: four sums; a left factor and two right ones. In 8 bit: both planes of the left factor.
enum : int { S0, S1, S2, S3, Left, B0, B1, Low };

inline void set_attention_shapes(int rows) {
  TileShapes shapes;
  const auto height = uint8_t(smaller(rows, kTileRows));
  for (int tile : {S0, S1, S2, S3, Left, Low}) shapes.rows[tile] = height, shapes.row_bytes[tile] = kTileBytes;
  for (int tile : {B0, B1}) shapes.rows[tile] = kTileRows, shapes.row_bytes[tile] = kTileBytes;
  set_tile_shapes(shapes);
}

// A chunk's tiles; its values are copied together.
struct TileChunk {
  const AttentionScratch s;
  int dim, count;  // keys that were written
  ChunkTiles tiles;

  TileChunk(const AttentionScratch &scratch, int dims, int keys, const ChunkTiles &chunk)
      : s(scratch), dim(dims), count(keys), tiles(chunk) {}

 protected:
  // Lines at `offset` of the next chunk's tiles.
  FW_INLINE void prefetch_next(const uint8_t *const (&next)[kChunkTiles], size_t offset, size_t bytes) const {
    for (size_t at = offset; at < offset + bytes; at += 64) {
      for (int tile = 0; tile < kChunkTiles; ++tile) prefetch<3>(next[tile] + at);
    }
  }
  FW_INLINE void copy_values(size_t tile_bytes) const {
    for (size_t at = 0; at < tile_bytes; at += 64) {
      for (int tile = 0; tile < kChunkTiles; ++tile) {
        std::memcpy(s.staged + tile * tile_bytes + at, tiles.v[tile] + at, 64);
      }
      prefetch_next(tiles.next_v, at, 64);
    }
  }
};

// ---------------------------------------------------------------------------------------------- bf16

struct Bf16Tiles : TileChunk {
  static constexpr Form kForm = Form::pairs;
  using TileChunk::TileChunk;

  // In the place of values that were not written there are zeros.
  FW_INLINE void copy() const {
    copy_values(size_t(2 * kTile) * dim);
    if (count == kChunk) return;
    uint16_t *numbers = reinterpret_cast<uint16_t *>(s.staged);
    const size_t written = size_t(count + 1) / 2 * 2 * dim;
    for (int d = 0; count % 2 && d < dim; ++d) numbers[written - 2 * dim + 2 * d + 1] = 0;
    std::memset(numbers + written, 0, sizeof(uint16_t) * (size_t(kChunk) * dim - written));
  }

  FW_INLINE void scores(int row) const {
    tile_zero<S0>(), tile_zero<S1>(), tile_zero<S2>(), tile_zero<S3>();
    for (int d = 0; d < dim; d += kStepDims) {
      const size_t at = size_t(d) * 2 * kTile;
      tile_load<Left>(s.q.bf16 + s.q.at(row, d), 2 * kQueryPiece);
      add_products<S0, S1>(tiles.k[0] + at, tiles.k[1] + at, kTileBytes);
      add_products<S2, S3>(tiles.k[2] + at, tiles.k[3] + at, kTileBytes);
      if (row == 0) prefetch_next(tiles.next_k, at, size_t(kTileRows) * kTileBytes);
    }
    float *out = s.scores;
    constexpr size_t kStride = sizeof(float) * kChunk;
    tile_store<S0>(out, kStride), tile_store<S1>(out + kTile, kStride);
    tile_store<S2>(out + 2 * kTile, kStride), tile_store<S3>(out + 3 * kTile, kStride);
  }

  FW_INLINE void add_values(int row) const {
    int d = 0;
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes) value_columns<true>(row, d);
    if (d < dim) value_columns<false>(row, d);
  }

 private:
  template <int A, int B>
  static FW_INLINE void add_products(const void *a, const void *b, size_t stride) {
    tile_load<B0>(a, stride), tile_load<B1>(b, stride);
    dot_bf16<A, Left, B0>(), dot_bf16<B, Left, B1>();
  }

  // Dimensions [d, d + 64), or 32 of them.
  template <bool Four>
  FW_INLINE void value_columns(int row, int d) const {
    float *o = s.part.o(row) + d;
    const size_t stride = sizeof(float) * s.part.stride(), row_bytes = 4 * size_t(dim);
    tile_load<S0>(o, stride), tile_load<S1>(o + kLanes, stride);
    if (Four) tile_load<S2>(o + 2 * kLanes, stride), tile_load<S3>(o + 3 * kLanes, stride);
    for (int key = 0; key < count; key += kStepKeys) {
      const uint8_t *v = s.staged + key / 2 * row_bytes + 4 * d;
      tile_load<Left>(s.p_pairs + key, 2 * kChunk);
      add_products<S0, S1>(v, v + kTileBytes, row_bytes);
      if (Four) add_products<S2, S3>(v + 2 * kTileBytes, v + 3 * kTileBytes, row_bytes);
    }
    tile_store<S0>(o, stride), tile_store<S1>(o + kLanes, stride);
    if (Four) tile_store<S2>(o + 2 * kLanes, stride), tile_store<S3>(o + 3 * kLanes, stride);
  }
};

// ---------------------------------------------------------------------------------------------- 8 bit

FW_INLINE I32 load_sums(const int32_t *from) {
  I32 v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// The scores of a row against a tile of keys from the sums [high plane, low plane][rows][kChunk].
FW_INLINE F32 plane_scores(const AttentionScratch &s, const ChunkTiles &chunk, int row, int tile) {
  const int32_t *high = reinterpret_cast<const int32_t *>(s.scores) + slot_of(row) * kChunk + tile * kTile;
  const F32 dot = to_f32(shift_7_add(load_sums(high), load_sums(high + kTileRows * kChunk)));
  return mul(mul(dot, set1(s.q.scale[row])), load(tile_scales(chunk.k[tile], s.part.dim)));
}

struct I8Tiles : TileChunk {
  static constexpr Form kForm = Form::steps;
  int8_t *keys;   // without their offset
  int32_t *sums;  // of values: [32 dimensions, …][high plane, low plane][rows][32]

  I8Tiles(const AttentionScratch &scratch, int dims, int written, const ChunkTiles &chunk)
      : TileChunk(scratch, dims, written, chunk),
        keys(reinterpret_cast<int8_t *>(s.staged) + kChunk * dims),
        sums(reinterpret_cast<int32_t *>(keys + kChunk * dims)) {
    prefetch_next(tiles.next_k, 0, size_t(kTile) * dim);
    for (int tile = 0; tile < kChunkTiles; ++tile) {
      for (int at = 0; at < kTile * dim; ++at) keys[tile * kTile * dim + at] = int8_t(tiles.k[tile][at] ^ 0x80);
    }
  }

  // Keys that are not visible have p = 0, whatever their slots contain.
  FW_INLINE void copy() const { copy_values(size_t(kTile) * dim); }

  FW_INLINE void scores(int row) const {
    int32_t *out = reinterpret_cast<int32_t *>(s.scores);
    for (int tile = 0; tile < kChunkTiles; tile += 2, out += kWidth) {
      zero_planes();
      for (int d = 0; d < dim; d += kTileBytes) {
        const size_t at = s.q.at(row, d);
        const int8_t *k = keys + (tile * dim + d) * kTile;
        add_planes(s.q.high + at, s.q.low + at, k, k + kTile * dim, kTileBytes);
      }
      store_planes(out, kChunk);
    }
  }

  // The sums of 64 dimensions are stored before the first is read.
  FW_INLINE void add_values(int row) const {
    for (int d = 0; d < dim; d += 2 * kWidth) {
      for (int half = 0; half < 2; ++half) {
        const uint8_t *v = s.staged + 4 * (d + half * kWidth);
        zero_planes();
        add_planes(s.p_high, s.p_low, v, v + kTileBytes, 4 * size_t(dim));
        store_planes(sums + half * 2 * kTileRows * kWidth, kWidth);
      }
      for (int r = 0; r < kTileRows; ++r) {
        const F32 step = set1(s.p_step[row + r]);
        FW_UNROLL for (int n = 0; n < 2 * kWidth; n += kLanes) {
          const int32_t *high = sums + n / kWidth * 2 * kTileRows * kWidth + r * kWidth + n % kWidth;
          float *o = s.part.o(row + r) + d + n;
          store(o, fma(to_f32(shift_7_add(load_sums(high), load_sums(high + kTileRows * kWidth))), step, load(o)));
        }
      }
    }
  }

 private:
  static constexpr int kWidth = 2 * kTile;
  static FW_INLINE void zero_planes() { tile_zero<S0>(), tile_zero<S1>(), tile_zero<S2>(), tile_zero<S3>(); }
  static FW_INLINE void add_planes(const int8_t *high, const int8_t *low, const void *a, const void *b,
                                   size_t stride) {
    tile_load<Left>(high, kTileBytes), tile_load<B0>(a, stride);
    tile_load<Low>(low, kTileBytes), tile_load<B1>(b, stride);
    dot_s8<S0, Left, B0>(), dot_s8<S1, Left, B1>(), dot_s8<S2, Low, B0>(), dot_s8<S3, Low, B1>();
  }
  // Of 16 rows, `width` numbers apart; the low plane after all of the high one.
  static FW_INLINE void store_planes(int32_t *high, size_t width) {
    int32_t *low = high + kTileRows * width;
    const size_t stride = sizeof(int32_t) * width;
    tile_store<S0>(high, stride), tile_store<S1>(high + kTile, stride);
    tile_store<S2>(low, stride), tile_store<S3>(low + kTile, stride);
  }
};

}  // namespace foreword::kernels::FOREWORD_ISA
