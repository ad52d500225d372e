// The two products of attention by AMX tiles. A tile of keys is one of the cache, a tile of values 16 dimensions:
//
//   bf16     scores   S [rows][16 keys] = Q [rows][32 d] K [32 d][16 keys], d upwards
//            values   O [rows][16 d]   += P [rows][16 keys] V [16 keys][16 d], keys upwards
//   8 bit    the same over 64 d and all 64 keys of a chunk, exactly, for both planes of Q and P; then the arithmetic of
//            ScoresI8 and ValuesI8 in attention_tiles.h
//
// All rows of Q, P, S and O are computed in tiles of the same height: scratch memory has rows up to a multiple of it.
#pragma once

#include "kernels/attention_state.h"
#include "kernels/simd/amx.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr int kStepDims = kTileBytes / 2;         // of a product of scores
constexpr int kKeyBytes = kTile * 2;              // of a row of P that meets a tile of values
constexpr int kVectorRowsI8 = 15;                 // up to this many rows of 8 bit are multiplied by vectors
constexpr bool tiles_fit(KVFormat f, int dim, int rows) {
  if (f == KVFormat::i8) return dim % kTileBytes == 0 && rows > kVectorRowsI8;
  return f == KVFormat::bf16 && dim % kStepDims == 0;
}

// Tile registers: four sums; queries and keys; probabilities and values. In 8 bit: both planes, and two tiles.
enum : int { S0, S1, S2, S3, Q0, K0, P0, V0, High = Q0, B0 = K0, Low = P0, B1 = V0 };

inline int tile_height(int rows) { return smaller(rows, kTileRows); }

inline void set_attention_shapes(KVFormat f, int rows) {
  TileShapes shapes;
  const auto height = uint8_t(tile_height(rows));
  for (int tile : {S0, S1, S2, S3, Q0, P0}) shapes.rows[tile] = height, shapes.row_bytes[tile] = kTileBytes;
  for (int tile : {K0, V0}) shapes.rows[tile] = kTileRows, shapes.row_bytes[tile] = kTileBytes;
  if (f == KVFormat::bf16) shapes.row_bytes[P0] = kKeyBytes, shapes.rows[V0] = kTile / 2;
  set_tile_shapes(shapes);
}

// `bytes` from `offset` on of each tile of the next chunk.
FW_INLINE void prefetch_tiles(const uint8_t *const (&tiles)[kChunkTiles], size_t offset, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64) {
    for (int tile = 0; tile < kChunkTiles; ++tile) prefetch<3>(tiles[tile] + offset + line);
  }
}

template <int Sum>
FW_INLINE void add_scores(const uint8_t *keys) {
  tile_load<K0>(keys, kTileBytes);
  dot_bf16<Sum, Q0, K0>();
}

inline void tile_scores(const Queries &q, int dim, int rows, const ChunkTiles &c, float *scores) {
  constexpr size_t kStride = sizeof(float) * kChunk;
  for (int row = 0; row < rows; row += kTileRows) {
    tile_zero<S0>(), tile_zero<S1>(), tile_zero<S2>(), tile_zero<S3>();
    for (int d = 0; d < dim; d += kStepDims) {
      const size_t at = size_t(d) * 2 * kTile;
      tile_load<Q0>(q.bf16 + q.at(row, d), 2 * kQueryPiece);
      add_scores<S0>(c.k[0] + at), add_scores<S1>(c.k[1] + at);
      add_scores<S2>(c.k[2] + at), add_scores<S3>(c.k[3] + at);
      if (row == 0) prefetch_tiles(c.next_k, at, size_t(kTileRows) * kTileBytes);
    }
    float *s = scores + row * kChunk;
    tile_store<S0>(s, kStride), tile_store<S1>(s + kTile, kStride);
    tile_store<S2>(s + 2 * kTile, kStride), tile_store<S3>(s + 3 * kTile, kStride);
  }
}

template <int Sum>
FW_INLINE void add_values(const uint8_t *values, size_t stride) {
  tile_load<V0>(values, stride);
  dot_bf16<Sum, P0, V0>();
}

// Dimensions [d, d + 16 N) of a tile of rows.
template <int N>
FW_INLINE void value_columns(const uint16_t *p, int d, int dim, const ChunkTiles &c, int tiles, float *o,
                             size_t stride) {
  const size_t o_stride = sizeof(float) * stride, v_stride = 4 * size_t(dim);
  tile_load<S0>(o + d, o_stride);
  if constexpr (N == 4) {
    tile_load<S1>(o + d + kLanes, o_stride), tile_load<S2>(o + d + 2 * kLanes, o_stride);
    tile_load<S3>(o + d + 3 * kLanes, o_stride);
  }
  for (int tile = 0; tile < tiles; ++tile) {
    const uint8_t *v = c.v[tile] + 4 * size_t(d);
    tile_load<P0>(p + tile * kTile, 2 * kChunk);
    add_values<S0>(v, v_stride);
    if constexpr (N == 4) {
      add_values<S1>(v + kTileBytes, v_stride), add_values<S2>(v + 2 * kTileBytes, v_stride);
      add_values<S3>(v + 3 * kTileBytes, v_stride);
    }
  }
  tile_store<S0>(o + d, o_stride);
  if constexpr (N == 4) {
    tile_store<S1>(o + d + kLanes, o_stride), tile_store<S2>(o + d + 2 * kLanes, o_stride);
    tile_store<S3>(o + d + 3 * kLanes, o_stride);
  }
}

// `last`: memory for a tile of values. Of a chunk's last tile only the keys that were written are used.
inline void tile_values(const uint16_t *pairs, int dim, int rows, ChunkTiles c, int count, uint8_t *last, float *o,
                        size_t stride) {
  const int tiles = (count + kTile - 1) / kTile, written = count % kTile;
  const size_t pair_row = 4 * size_t(dim);
  prefetch_tiles(c.next_v, 0, pair_row * kTile / 2);
  if (written) {
    std::memcpy(last, c.v[tiles - 1], pair_row * size_t((written + 1) / 2));
    std::memset(last + pair_row * size_t((written + 1) / 2), 0, pair_row * size_t(kTile / 2 - (written + 1) / 2));
    uint16_t *odd = reinterpret_cast<uint16_t *>(last + pair_row * size_t(written / 2));
    if (written % 2) { for (int d = 0; d < dim; ++d) odd[2 * d + 1] = 0; }
    c.v[tiles - 1] = last;
  }
  for (int row = 0; row < rows; row += kTileRows) {
    const uint16_t *p = pairs + row * kChunk;
    float *of_rows = o + size_t(row) * stride;
    int d = 0;
    for (; d + 4 * kLanes <= dim; d += 4 * kLanes) value_columns<4>(p, d, dim, c, tiles, of_rows, stride);
    for (; d < dim; d += kLanes) value_columns<1>(p, d, dim, c, tiles, of_rows, stride);
  }
}

// ---------------------------------------------------------------------------------------------- 8 bit

// Sums of the planes: [S0 … S3][row][16], S0 and S1 the high plane times two tiles, S2 and S3 the low one.
struct PlaneSums {
  int32_t *data;
  FW_INLINE I32 at(int sum, int row) const {
    I32 v;
    std::memcpy(&v, data + sum * kTileNumbers + row * kLanes, sizeof v);
    return v;
  }
};

FW_INLINE void zero_planes() { tile_zero<S0>(), tile_zero<S1>(), tile_zero<S2>(), tile_zero<S3>(); }

FW_INLINE void load_planes(const int8_t *high, const int8_t *low, const uint8_t *first, const uint8_t *second,
                           size_t stride) {
  tile_load<High>(high, kTileBytes), tile_load<B0>(first, stride);
  tile_load<Low>(low, kTileBytes), tile_load<B1>(second, stride);
}

FW_INLINE void store_planes(const PlaneSums &sums) {
  tile_store<S0>(sums.data, kTileBytes), tile_store<S1>(sums.data + kTileNumbers, kTileBytes);
  tile_store<S2>(sums.data + 2 * kTileNumbers, kTileBytes), tile_store<S3>(sums.data + 3 * kTileNumbers, kTileBytes);
}

inline void tile_scores_i8(const Queries &q, int dim, int rows, const ChunkTiles &c, const PlaneSums &sums,
                           float *scores) {
  static_assert(kQueryPiece == kTileBytes);
  prefetch_tiles(c.next_k, 0, size_t(kTile) * dim);
  for (int row = 0; row < rows; row += kTileRows) {
    for (int tile = 0; tile < kChunkTiles; tile += 2) {
      zero_planes();
      for (int d = 0; d < dim; d += kTileBytes) {
        const size_t at = size_t(d) * kTile;
        load_planes(q.high + q.at(row, d), q.low + q.at(row, d), c.k[tile] + at, c.k[tile + 1] + at, kTileBytes);
        dot_i8<S0, High, B0>(), dot_i8<S1, High, B1>(), dot_i8<S2, Low, B0>(), dot_i8<S3, Low, B1>();
      }
      store_planes(sums);
      const F32 scales[2] = {load(tile_scales(c.k[tile], dim)), load(tile_scales(c.k[tile + 1], dim))};
      for (int r = 0; r < smaller(kTileRows, rows - row); ++r) {
        const I32 high = set1_i32(q.neg128_high[row + r]), low = set1_i32(q.neg128_low[row + r]);
        const F32 of_row = set1(q.scale[row + r]);
        FW_UNROLL for (int n = 0; n < 2; ++n) {
          const F32 dot = fma(to_f32(add_i32(sums.at(n, r), high)), set1(128.f),
                              to_f32(add_i32(sums.at(n + 2, r), low)));
          store(scores + (row + r) * kChunk + (tile + n) * kTile, mul(mul(dot, of_row), scales[n]));
        }
      }
    }
  }
}

// `values`: memory for a chunk's values. Keys that are not visible have p = 0, whatever their slots contain.
inline void tile_values_i8(const Probabilities &p, int dim, int rows, const ChunkTiles &c, uint8_t *values,
                           const PlaneSums &sums, float *o, size_t stride) {
  const size_t tile_bytes = size_t(kTile) * dim;
  prefetch_tiles(c.next_v, 0, tile_bytes);
  for (int tile = 0; tile < kChunkTiles; ++tile) std::memcpy(values + tile * tile_bytes, c.v[tile], tile_bytes);
  for (int row = 0; row < rows; row += kTileRows) {
    for (int d = 0; d < dim; d += 2 * kLanes) {
      const uint8_t *v = values + 4 * d;
      zero_planes();
      load_planes(p.high + row * kChunk, p.low + row * kChunk, v, v + kTileBytes, 4 * size_t(dim));
      dot_s8<S0, High, B0>(), dot_s8<S1, High, B1>(), dot_s8<S2, Low, B0>(), dot_s8<S3, Low, B1>();
      store_planes(sums);
      for (int r = 0; r < smaller(kTileRows, rows - row); ++r) {
        float *of_row = o + size_t(row + r) * stride + d;
        const F32 step = set1(p.step[row + r]);
        FW_UNROLL for (int n = 0; n < 2; ++n) {
          const F32 sum = to_f32(shift_7_add(sums.at(n, r), sums.at(n + 2, r)));
          store(of_row + n * kLanes, fma(sum, step, load(of_row + n * kLanes)));
        }
      }
    }
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
