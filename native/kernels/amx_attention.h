// The two products of attention over bf16 keys and values by AMX tiles. A tile of keys is one of the cache, a tile of
// values 16 of its dimensions:
//
//   scores   S [rows][16 keys] = Q [rows][32 d] K [32 d][16 keys], d upwards
//   values   O [rows][16 d]   += P [rows][16 keys] V [16 keys][16 d], keys upwards
//
// All rows of Q, P, S and O are computed in tiles of the same height: scratch memory has rows up to a multiple of it.
#pragma once

#include "kernels/attention_state.h"
#include "kernels/simd/amx.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr int kStepDims = kTileBytes / 2;         // of a product of scores
constexpr int kKeyBytes = kTile * 2;              // of a row of P that meets a tile of values
constexpr bool tiles_fit(int dim) { return dim % kStepDims == 0; }

// Tile registers: four sums; queries and keys; probabilities and values.
enum : int { S0, S1, S2, S3, Q0, K0, P0, V0 };

inline int tile_height(int rows) { return smaller(rows, kTileRows); }

inline void set_attention_shapes(int rows) {
  TileShapes shapes;
  const auto height = uint8_t(tile_height(rows));
  for (int sum = S0; sum <= S3; ++sum) shapes.rows[sum] = height, shapes.row_bytes[sum] = kTileBytes;
  shapes.rows[Q0] = height, shapes.row_bytes[Q0] = kTileBytes;
  shapes.rows[K0] = kTileRows, shapes.row_bytes[K0] = kTileBytes;
  shapes.rows[P0] = height, shapes.row_bytes[P0] = kKeyBytes;
  shapes.rows[V0] = kTile / 2, shapes.row_bytes[V0] = kTileBytes;
  set_tile_shapes(shapes);
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
      if (row == 0) {
        for (size_t line = 0; line < size_t(kTileRows) * kTileBytes; line += 64) {
          for (int tile = 0; tile < kChunkTiles; ++tile) prefetch<3>(c.next_k[tile] + at + line);
        }
      }
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
  for (size_t line = 0; line < pair_row * kTile / 2; line += 64) {
    for (int tile = 0; tile < kChunkTiles; ++tile) prefetch<3>(c.next_v[tile] + line);
  }
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

}  // namespace foreword::kernels::FOREWORD_ISA
