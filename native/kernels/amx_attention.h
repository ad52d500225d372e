// The two products of attention by AMX tiles, 16 rows at a time. A tile of keys is one of the cache, a tile of values
// 16 dimensions of values that are copied together, once per chunk:
//
//   bf16     scores   S [rows][16 keys] = Q [rows][32 d] K [32 d][16 keys], d upwards
//            values   O [rows][16 d]   += P [rows][32 keys] V [32 keys][16 d], keys upwards
//   8 bit    the same over 64 d and all 64 keys of a chunk, exactly; then the arithmetic of ScoresI8 and ValuesI8 in
//            attention_tiles.h
//
// Tile registers are not renamed: a product uses other sums than the one before it.
//
// All rows of Q, P, S and O are computed in tiles of the same height: scratch memory has rows up to a multiple of it.
#pragma once

#include "kernels/attention_state.h"
#include "kernels/simd/amx.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr int kStepDims = kTileBytes / 2;  // dimensions in a product of scores in bf16
constexpr int kStepKeys = kTileBytes / 2;  // keys in a product of values in bf16
constexpr int kVectorRowsI8 = 15;          // up to this many rows of 8 bit are multiplied by vectors
constexpr bool tiles_fit(KVFormat f, int dim, int rows) {
  if (f == KVFormat::i8) return dim % kTileBytes == 0 && rows > kVectorRowsI8;
  return f == KVFormat::bf16 && dim % kStepDims == 0;
}

// Tile registers: four sums, a left factor and two right ones.
enum : int { S0, S1, S2, S3, Left, B0, B1 };

inline void set_attention_shapes(int rows) {
  TileShapes shapes;
  const auto height = uint8_t(smaller(rows, kTileRows));
  for (int tile : {S0, S1, S2, S3, Left}) shapes.rows[tile] = height, shapes.row_bytes[tile] = kTileBytes;
  for (int tile : {B0, B1}) shapes.rows[tile] = kTileRows, shapes.row_bytes[tile] = kTileBytes;
  set_tile_shapes(shapes);
}

// The operands: pairs of bf16, or bytes, which are signed by unsigned for scores and the reverse for values.
enum class Factors { bf16, s8_u8, u8_s8 };
// Sums A and B += Left times the tiles at a and b.
template <Factors F, int A, int B>
FW_INLINE void add_products(const void *a, const void *b, size_t stride) {
  tile_load<B0>(a, stride), tile_load<B1>(b, stride);
  if constexpr (F == Factors::bf16) dot_bf16<A, Left, B0>(), dot_bf16<B, Left, B1>();
  if constexpr (F == Factors::s8_u8) dot_i8<A, Left, B0>(), dot_i8<B, Left, B1>();
  if constexpr (F == Factors::u8_s8) dot_u8<A, Left, B0>(), dot_u8<B, Left, B1>();
}

FW_INLINE void zero_sums() { tile_zero<S0>(), tile_zero<S1>(), tile_zero<S2>(), tile_zero<S3>(); }
// The four sums, side by side in rows of `width` numbers of four bytes.
FW_INLINE void store_sums(void *out, size_t width) {
  uint8_t *bytes = static_cast<uint8_t *>(out);
  tile_store<S0>(bytes, 4 * width), tile_store<S1>(bytes + kTileBytes, 4 * width);
  tile_store<S2>(bytes + 2 * kTileBytes, 4 * width), tile_store<S3>(bytes + 3 * kTileBytes, 4 * width);
}

// A chunk's tiles; its values are copied together.
struct TileChunk {
  const AttentionScratch s;
  int dim, value_dim, count;  // count: keys that were written
  ChunkTiles tiles;

  TileChunk(const AttentionScratch &scratch, int dims, int value_dims, int keys, const ChunkTiles &chunk)
      : s(scratch), dim(dims), value_dim(value_dims), count(keys), tiles(chunk) {}

 protected:
  // Lines at `offset` of the tiles ahead.
  FW_INLINE void prefetch_ahead(const uint8_t *const (&ahead)[kChunkTiles], size_t offset, size_t bytes) const {
    for (size_t at = offset; at < offset + bytes; at += 64) {
      for (int tile = 0; tile < kChunkTiles; ++tile) prefetch<2>(ahead[tile] + at);
    }
  }
  FW_INLINE void copy_values(size_t tile_bytes) const {
    for (size_t at = 0; at < tile_bytes; at += 64) {
      for (int tile = 0; tile < kChunkTiles; ++tile) {
        std::memcpy(s.staged + tile * tile_bytes + at, tiles.v[tile] + at, 64);
      }
      prefetch_ahead(tiles.ahead_v, at, 64);
    }
  }
  // The sums of 16 rows against the chunk's keys become s.scores. `left`: the rows' queries, kQueryPiece numbers apart.
  template <Factors F, class Number>
  FW_INLINE void sum_scores(const Number *left, int row) const {
    constexpr int kDims = kTileBytes / int(sizeof(Number));
    zero_sums();
    for (int d = 0; d < dim; d += kDims) {
      const size_t at = size_t(d) / kDims * kTileRows * kTileBytes;
      tile_load<Left>(left + s.q.at(row, d), sizeof(Number) * kQueryPiece);
      add_products<F, S0, S1>(tiles.k[0] + at, tiles.k[1] + at, kTileBytes);
      add_products<F, S2, S3>(tiles.k[2] + at, tiles.k[3] + at, kTileBytes);
      if (row == 0) prefetch_ahead(tiles.ahead_k, at, size_t(kTileRows) * kTileBytes);
    }
    store_sums(s.scores, kChunk);
  }
};

// ---------------------------------------------------------------------------------------------- bf16

struct Bf16Tiles : TileChunk {
  static constexpr Form kForm = Form::pairs;
  using TileChunk::TileChunk;

  // In the place of values that were not written there are zeros.
  FW_INLINE void copy() const {
    copy_values(size_t(2 * kTile) * value_dim);
    if (count == kChunk) return;
    uint16_t *numbers = reinterpret_cast<uint16_t *>(s.staged);
    const size_t written = size_t(count + 1) / 2 * 2 * value_dim;
    for (int d = 0; count % 2 && d < value_dim; ++d) numbers[written - 2 * value_dim + 2 * d + 1] = 0;
    std::memset(numbers + written, 0, sizeof(uint16_t) * (size_t(kChunk) * value_dim - written));
  }

  FW_INLINE void scores(int row) const { sum_scores<Factors::bf16>(s.q.bf16, row); }

  FW_INLINE void add_values(int row) const {
    int d = 0;
    for (; d + 4 * kLanes <= value_dim; d += 4 * kLanes) value_columns<true>(row, d);
    if (d < value_dim) value_columns<false>(row, d);
  }

 private:
  // Dimensions [d, d + 64), or 32 of them.
  template <bool Four>
  FW_INLINE void value_columns(int row, int d) const {
    float *o = s.part.o(row) + d;
    const size_t stride = sizeof(float) * s.part.stride(), row_bytes = 4 * size_t(value_dim);
    tile_load<S0>(o, stride), tile_load<S1>(o + kLanes, stride);
    if (Four) tile_load<S2>(o + 2 * kLanes, stride), tile_load<S3>(o + 3 * kLanes, stride);
    for (int key = 0; key < count; key += kStepKeys) {
      const uint8_t *v = s.staged + key / 2 * row_bytes + 4 * d;
      tile_load<Left>(s.p_pairs + key, 2 * kChunk);
      add_products<Factors::bf16, S0, S1>(v, v + kTileBytes, row_bytes);
      if (Four) add_products<Factors::bf16, S2, S3>(v + 2 * kTileBytes, v + 3 * kTileBytes, row_bytes);
    }
    tile_store<S0>(o, stride), tile_store<S1>(o + kLanes, stride);
    if (Four) tile_store<S2>(o + 2 * kLanes, stride), tile_store<S3>(o + 3 * kLanes, stride);
  }
};

// ---------------------------------------------------------------------------------------------- 8 bit

FW_INLINE I32 load_sums(const void *from) {
  I32 v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// The scores of a row against a tile of keys from its sums with keys offset by 128.
FW_INLINE F32 scaled_scores(const AttentionScratch &s, const ChunkTiles &chunk, int row, int tile) {
  const I32 sums = load_sums(s.scores + slot_of(row) * kChunk + tile * kTile);
  const F32 dot = to_f32(add_i32(sums, set1_i32(s.q.neg_bias[row])));
  return mul(mul(dot, set1(s.q.scale[row])), load(tile_scales(chunk.k[tile], s.key_dim)));
}

struct I8Tiles : TileChunk {
  static constexpr Form kForm = Form::steps;
  using TileChunk::TileChunk;

  // Keys that are not visible have p = 0, whatever their slots contain.
  FW_INLINE void copy() const { copy_values(size_t(kTile) * value_dim); }

  FW_INLINE void scores(int row) const { sum_scores<Factors::s8_u8>(s.q.i8, row); }

  // The sums of 64 dimensions are stored before the first is read.
  FW_INLINE void add_values(int row) const {
    constexpr int kWidth = 4 * kLanes;
    float *sums = reinterpret_cast<float *>(s.staged + kChunk * value_dim);  // [rows][kWidth] integers
    tile_load<Left>(s.p_u8, kTileBytes);
    for (int d = 0; d < value_dim; d += kWidth) {
      const uint8_t *v = s.staged + 4 * d;
      zero_sums();
      add_products<Factors::u8_s8, S0, S1>(v, v + kTileBytes, 4 * size_t(value_dim));
      add_products<Factors::u8_s8, S2, S3>(v + 2 * kTileBytes, v + 3 * kTileBytes, 4 * size_t(value_dim));
      store_sums(sums, kWidth);
      for (int r = 0; r < kTileRows; ++r) {
        const F32 step = set1(s.p_step[row + r]);
        FW_UNROLL for (int n = 0; n < kWidth; n += kLanes) {
          float *o = s.part.o(row + r) + d + n;
          store(o, fma(to_f32(load_sums(sums + r * kWidth + n)), step, load(o)));
        }
      }
    }
  }
};

}  // namespace foreword::kernels::FOREWORD_ISA
