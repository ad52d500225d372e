// Products of 15-bit activations with weights in block formats by AMX tiles: the numbers of BlockKernel in
// linear_tiles.h. Per block a tile of each plane of up to 16 rows meets a tile of 16 outputs; the exact sums go through
// memory to vectors, which scale and add them:
//
//   high, low [rows][16 outputs]        acc += (128 high + low) * d;  with a min, acc += m * Σ a
//
// Tiles of the next block are multiplied while vectors add the previous one.
#pragma once

#include "kernels/activations.h"
#include "kernels/packing.h"
#include "kernels/simd/amx.h"
#include "kernels/stream.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr int kStagedBlocks = 32;  // per panel, at most: they stay in the first-level cache for all rows

struct BlockScratch {
  alignas(64) int32_t sums[2][2][kTileNumbers];  // by block, of two: high plane, low plane
  uint8_t weights[kStagedBlocks * kBlock * kPanelWidth];

  // After this: [rows of all tiles][kPanelWidth], the sums between two chunks of a panel.
  float *carry() { return reinterpret_cast<float *>(this + 1); }
};

// F: fp4 for each format with a table.
template <Format F>
class BlockProduct {
 public:
  // `memory`: a BlockScratch and the sums after it.
  static void run(const MatrixProduct &product) {
    const PackedMatrix &w = product.w;
    BlockScratch &scratch = *static_cast<BlockScratch *>(product.scratch);
    const int num_rows = product.num_rows(), row = product.row_begin, cols = w.padded_cols, blocks = cols / kBlock;
    const int chunks = (blocks + kStagedBlocks - 1) / kStagedBlocks, chunk = (blocks + chunks - 1) / chunks * kBlock;
    const int tiles = (num_rows + kTileRows - 1) / kTileRows, height = (num_rows + tiles - 1) / tiles;
    set_shapes(height);
    for (int p = product.panel_begin; p < product.panel_end; ++p) {
      Stream ahead = stream_of(product.panel_ahead(p + 1), w.panel_bytes, tiles * blocks * kHalves);
      for (int k = 0; k < cols; k += chunk) {
        const int k_end = smaller(k + chunk, cols);
        const uint8_t *weights = w.panel(p) + input_offset(F, k);
        stage(weights, (k_end - k) / kBlock, table_of(w.format), scratch.weights);
        for (int r = 0, tile = 0; r < num_rows; r += height, ++tile) {
          for (int n = 0; n < kPanelWidth; n += kLanes) {
            F32 acc[kTileRows];
            float *carried = scratch.carry() + tile * kTileRows * kPanelWidth + n;
            FW_UNROLL for (int i = 0; i < kTileRows; ++i) acc[i] = k ? load(carried + i * kPanelWidth) : set1(0.f);
            add_chunk(product.a, row + r, k, k_end, weights, n, scratch, ahead, acc);
            if (k_end < cols) {
              FW_UNROLL for (int i = 0; i < kTileRows; ++i) store(carried + i * kPanelWidth, acc[i]);
            } else {
              finish(product, r, acc, smaller(height, num_rows - r), product.panel_out(p, kPanelWidth) + n);
            }
          }
        }
      }
    }
    release_tiles();
  }

 private:
  static constexpr int kHalves = kPanelWidth / kLanes;
  enum : int { High, Low, RowsHigh, RowsLow, Weights };

  static void set_shapes(int height) {
    TileShapes shapes;
    for (int tile : {High, Low}) shapes.rows[tile] = uint8_t(height), shapes.row_bytes[tile] = kTileBytes;
    for (int tile : {RowsHigh, RowsLow}) shapes.rows[tile] = uint8_t(height), shapes.row_bytes[tile] = kBlock;
    shapes.rows[Weights] = kBlock / 4, shapes.row_bytes[Weights] = kTileBytes;
    set_tile_shapes(shapes);
  }

  // Weights without their offset, as signed bytes: [kBlock / 4][kPanelWidth][4] per block.
  static void stage(const uint8_t *blocks, int count, [[maybe_unused]] const int8_t *table, uint8_t *out) {
    constexpr int kWords = kBlock * kPanelWidth / 4;
    constexpr uint32_t kFlip = F == Format::q4_min ? 0 : 0x80808080u, kAdd = F == Format::q4 ? 0x78787878u : 0;
    for (int b = 0; b < count; ++b, blocks += block_bytes(F), out += 4 * kWords) {
      const uint8_t *in = blocks + block_scale_bytes(F);
      if constexpr (has_table(F)) {
        widen_by_table(table, in, 0, out);
      } else if constexpr (is_4bit(F)) {
        widen_nibbles(in, kAdd, kFlip, out);
      } else {
        for (int i = 0; i < 4 * kWords; ++i) out[i] = in[i] ^ 0x80;
      }
    }
  }

  template <int Sum, int Rows>
  static FW_INLINE void multiply_plane(const int8_t *x, int32_t *sums) {
    tile_load<Rows>(x, kPieceBytes);
    tile_zero<Sum>();
    dot_s8<Sum, Rows, Weights>();
    tile_store<Sum>(sums, kTileBytes);
  }

  static FW_INLINE void multiply(const Activations &a, int row, int k, const uint8_t *weights,
                                 int32_t (&sums)[2][kTileNumbers]) {
    const int8_t *x = activation_at<const int8_t>(a, row, k, kPieceBytes / 2);
    tile_load<Weights>(weights, kHalves * kTileBytes);
    multiply_plane<High, RowsHigh>(x, sums[0]);
    multiply_plane<Low, RowsLow>(x + kPieceBytes / 2, sums[1]);
  }

  static FW_INLINE I32 sums_at(const int32_t *sums, int row) {
    I32 v;
    std::memcpy(&v, sums + row * kLanes, sizeof v);
    return v;
  }

  // Inputs [k, k_end) of outputs [n, n + kLanes) of a panel; `block`: of input k.
  static FW_INLINE void add_chunk(const Activations &a, int row, int k, int k_end, const uint8_t *block, int n,
                                  BlockScratch &scratch, Stream &ahead, F32 (&acc)[kTileRows]) {
    const ActivationBlock *of_rows = a.blocks + size_t(k / kBlock) * a.block_stride + row;
    const uint8_t *weights = scratch.weights + 4 * n;
    multiply(a, row, k, weights, scratch.sums[0]);
    for (int b = 0; k < k_end; k += kBlock, ++b, block += block_bytes(F), of_rows += a.block_stride) {
      weights += kBlock * kPanelWidth;
      if (k + kBlock < k_end) multiply(a, row, k + kBlock, weights, scratch.sums[(b + 1) % 2]);
      ahead.advance();
      const auto &sums = scratch.sums[b % 2];
      const uint16_t *scales = reinterpret_cast<const uint16_t *>(block) + n;
      const F32 d = load_f16(scales);
      FW_UNROLL for (int r = 0; r < kTileRows; ++r) {
        acc[r] = fma(to_f32(shift_7_add(sums_at(sums[0], r), sums_at(sums[1], r))), d, acc[r]);
      }
      if constexpr (has_min(F)) {
        const F32 m = load_f16(scales + kPanelWidth);
        FW_UNROLL for (int r = 0; r < kTileRows; ++r) acc[r] = fma(m, set1(of_rows[r].sum), acc[r]);
      }
    }
  }

  // `rows` rows from the product's `first` on; `out`: of its first row.
  static FW_INLINE void finish(const MatrixProduct &product, int first, F32 (&acc)[kTileRows], int rows, float *out) {
    const ActivationBlock *of_rows = product.a.blocks + product.row_begin + first;
    FW_UNROLL for (int r = 0; r < kTileRows; ++r) {
      if (r >= rows) break;
      float *o = out + size_t(first + r) * product.out_stride;
      const F32 y = mul(acc[r], set1(of_rows[r].scale));
      store(o, product.store == Store::add ? add(load(o), y) : y);
    }
  }
};

}  // namespace foreword::kernels::FOREWORD_ISA
