// The two register-tile products of attention for each KV format:
//
//   scores   S[r, key] = Σ_d Q[r, d] K[key, d]         rows × a few vectors of keys in registers, d upwards
//   values   O[r, d]  += Σ_key P[r, key] V[key, d]     rows × a few vectors of d in registers, keys upwards
//
// Few rows use wide tiles, for enough independent sums. Many rows use tall and narrow ones, one strip of the keys, or
// values, after the other: it stays in the first-level cache for all rows.
//
// A row's arithmetic does not depend on the other rows.
#pragma once

#include "kernels/kv_layout.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr int kTileVectors = kTile / kLanes;

// The query rows of a tile in the form that the KV format multiplies with, divided into pieces of 64 numbers of a row,
// all rows' first pieces before all second ones: rows are a constant distance apart.
constexpr int kQueryPiece = 64;
struct Queries {
  size_t piece_stride;  // numbers from a row's piece to its next
  float *f32;
  uint16_t *bf16;      // bf16 keys, with bf16 dot products
  int8_t *i8;          // i8 keys: q ≈ scale i8
  float *scale;
  int32_t *neg_bias;     // -kDotBias Σ i8

  FW_INLINE size_t at(int row, int d) const {
    return size_t(d / kQueryPiece) * piece_stride + size_t(row) * kQueryPiece +
           size_t(d % kQueryPiece);
  }
};

struct ChunkTiles {
  const uint8_t *k[kChunkTiles], *v[kChunkTiles];
  const uint8_t *ahead_k[kChunkTiles], *ahead_v[kChunkTiles];  // tiles of a chunk that follows, to be prefetched
};

// ---------------------------------------------------------------------------------------------- scores

// F32, BF16 and I8 below share this: R rows from `row` on against N vectors of the chunk's keys from `vector` on. The
// address of each vector at d = 0.
template <int N>
FW_INLINE void key_vectors(const ChunkTiles &c, int vector, const uint8_t *(&keys)[N]) {
  FW_UNROLL for (int n = 0; n < N; ++n) {
    const int v = vector + n;
    keys[n] = c.k[v / kTileVectors] + (v % kTileVectors) * kLanes * 4;  // every layout: units of four bytes
  }
}

// The chunk ahead is prefetched to the second-level cache, which has more requests to memory under way than the first
// level, and which a chunk of floats does not fill. Many rows prefetch it at the place that they read in their own
// chunk. Few rows wait for memory; where kPacedPrefetch, their first tile prefetches a line of each of its tiles per
// step, no faster than memory answers.
template <int N>
constexpr bool kPaced = kPacedPrefetch && N == kWideVectors;
static_assert(!kPacedPrefetch || kWideVectors * kLanes == 64);  // a line of each tile per step is what a step reads

// `line`: where the next line is in every tile.
FW_INLINE void prefetch_paced(const uint8_t *const (&ahead)[kChunkTiles], int row, size_t &line) {
  if (row > 0) return;
  line = delayed(line);
  FW_UNROLL for (int t = 0; t < kChunkTiles; ++t) prefetch<2>(ahead[t] + line);
  line += 64;
}

template <int N>
FW_INLINE void prefetch_keys(const ChunkTiles &c, int row, int vector, size_t offset, size_t &line) {
  if constexpr (kPaced<N>) return prefetch_paced(c.ahead_k, row, line);
  constexpr int kTiles = (N + kTileVectors - 1) / kTileVectors;
  FW_UNROLL for (int t = 0; t < kTiles; ++t) prefetch<2>(c.ahead_k[vector / kTileVectors + t] + offset);
}

// Scores in floats. add_to(acc, keys, piece, end, line) adds the dimensions [piece, end), all of them in one piece of
// the queries.
template <int R, int N, class Add>
FW_INLINE void float_scores(int dim, const ChunkTiles &c, int vector, float *scores, Add &&add_to) {
  F32 acc[R][N];
  FW_UNROLL for (int r = 0; r < R; ++r) { FW_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = set1(0.f); }
  const uint8_t *keys[N];
  key_vectors(c, vector, keys);
  size_t line = 0;
  for (int piece = 0; piece < dim; piece += kQueryPiece) {
    add_to(acc, keys, piece, smaller(piece + kQueryPiece, dim), line);
  }
  FW_UNROLL for (int r = 0; r < R; ++r) {
    FW_UNROLL for (int n = 0; n < N; ++n) store(scores + r * kChunk + n * kLanes, acc[r][n]);
  }
}

struct ScoresF32 {
  static constexpr int kWide = kWideRows, kTall = kTallRows;
  template <int R, int N>
  static FW_INLINE void run(const Queries &q, int dim, int row, const ChunkTiles &c, int vector, float *scores) {
    float_scores<R, N>(dim, c, vector, scores, [&](F32 (&acc)[R][N], auto &keys, int d, int end,
                                                   size_t &line) FW_LAMBDA {
      for (const float *x = q.f32 + q.at(row, d); d < end; ++d, ++x) {
        FW_LOOP_BEGIN("scores_f32", 0, R, N);
        F32 k[N];
        FW_UNROLL for (int n = 0; n < N; ++n) k[n] = load(reinterpret_cast<const float *>(keys[n]) + d * kTile);
        prefetch_keys<N>(c, row, vector, size_t(d) * 4 * kTile, line);
        add_outer<kQueryPiece>(acc, x, k);
        FW_LOOP_END("scores_f32", 0, R, N);
      }
    });
  }
};

struct ScoresBf16 {
  static constexpr int kWide = kWideRows, kTall = kTallRows;
  template <int R, int N>
  static FW_INLINE void run(const Queries &q, int dim, int row, const ChunkTiles &c, int vector, float *scores) {
    float_scores<R, N>(dim, c, vector, scores, [&](F32 (&acc)[R][N], auto &keys, int d, int end,
                                                   size_t &line) FW_LAMBDA {
      for (size_t at = q.at(row, d); d < end; d += 2, at += 2) {
        FW_LOOP_BEGIN("scores_bf16", 0, R, N);
        I32 k[N];
        FW_UNROLL for (int n = 0; n < N; ++n) {
          k[n] = load_pairs(reinterpret_cast<const uint16_t *>(keys[n]) + d * kTile);
        }
        prefetch_keys<N>(c, row, vector, size_t(d) * 2 * kTile, line);
#if defined(FOREWORD_SIMD_BF16)
        FW_UNROLL for (int r = 0; r < R; ++r) {
          const auto xv = in_lanes<N>(q.bf16 + at + r * kQueryPiece);
          FW_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = dot2(acc[r][n], k[n], xv);
        }
#else
        F32 half[N];
        FW_UNROLL for (int n = 0; n < N; ++n) half[n] = even_of_pairs(k[n]);
        add_outer<kQueryPiece>(acc, q.f32 + at, half);
        FW_UNROLL for (int n = 0; n < N; ++n) half[n] = odd_of_pairs(k[n]);
        add_outer<kQueryPiece>(acc, q.f32 + at + 1, half);
#endif
        FW_LOOP_END("scores_bf16", 0, R, N);
      }
    });
  }
};

struct ScoresI8 {
  static constexpr int kWide = kWideRows, kTall = kTallRows;
  template <int R, int N>
  static FW_INLINE void run(const Queries &q, int dim, int row, const ChunkTiles &c, int vector, float *scores) {
    I32 acc[R][N];
    FW_UNROLL for (int r = 0; r < R; ++r) {
      FW_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = set1_i32(q.neg_bias[row + r]);
    }
    const uint8_t *keys[N];
    key_vectors(c, vector, keys);
    size_t line = 0;
    for (int piece = 0; piece < dim; piece += kQueryPiece) {
      const int8_t *x = q.i8 + q.at(row, piece);
      for (int d = piece; d < smaller(piece + kQueryPiece, dim); d += 4, x += 4) {
        FW_LOOP_BEGIN("scores_i8", 0, R, N);
        U8 k[N];
        FW_UNROLL for (int n = 0; n < N; ++n) k[n] = load_u8(keys[n] + d * kTile);
        prefetch_keys<N>(c, row, vector, size_t(d) * kTile, line);
        FW_UNROLL for (int r = 0; r < R; ++r) {
          const auto xv = in_lanes<N>(x + r * kQueryPiece);
          FW_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = dot4_biased(acc[r][n], k[n], xv);
        }
        FW_LOOP_END("scores_i8", 0, R, N);
      }
    }
    prefetch_keys<N>(c, row, vector, size_t(dim) * kTile, line);  // their scales
    FW_UNROLL for (int n = 0; n < N; ++n) {
      const int v = vector + n;
      const F32 scale = load(tile_scales(c.k[v / kTileVectors], dim) + (v % kTileVectors) * kLanes);
      FW_UNROLL for (int r = 0; r < R; ++r) {
        store(scores + r * kChunk + n * kLanes, mul(mul(to_f32(acc[r][n]), set1(q.scale[row + r])), scale));
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------- values

// The factors of a chunk's values, [rows][kChunk]: floats; pairs of bf16; or for 8-bit values, including their scales,
// p ≈ step u8.
struct Probabilities {
  const float *f32;
  const uint16_t *pairs;
  const uint8_t *u8;
  const float *step;  // [rows]
};

// Values of the chunk ahead, N vectors.
template <int N>
FW_INLINE void prefetch_values(const ChunkTiles &c, int row, const uint8_t *ahead, size_t &line) {
  if constexpr (kPaced<N>) return prefetch_paced(c.ahead_v, row, line);
  FW_UNROLL for (int at = 0; at < (N * kLanes * 4 + 63) / 64; ++at) prefetch<2>(ahead + 64 * at);
}

// The rest of a chunk that has fewer keys than the one ahead.
template <int N>
FW_INLINE void prefetch_rest(const ChunkTiles &c, int row, size_t line, size_t end) {
  if constexpr (kPaced<N>) {
    while (row == 0 && line < end) prefetch_paced(c.ahead_v, row, line);
  }
}

// O [R rows][N vectors], `stride` floats from row to row, through registers.
template <int R, int N, class Add>
FW_INLINE void update_rows(float *o, size_t stride, Add &&add_to) {
  F32 acc[R][N];
  FW_UNROLL for (int r = 0; r < R; ++r) {
    FW_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = load(o + r * stride + n * kLanes);
  }
  add_to(acc);
  FW_UNROLL for (int r = 0; r < R; ++r) {
    FW_UNROLL for (int n = 0; n < N; ++n) store(o + r * stride + n * kLanes, acc[r][n]);
  }
}

// The kernels below add to R rows of O from `row` on, N vectors from dimension `d` on, over `count` keys of the chunk.
struct ValuesF32 {
  static constexpr int kWide = kWideRows, kTall = kTallRows;
  template <int R, int N>
  static FW_INLINE void run(const Probabilities &p, int dim, int row, int d, const ChunkTiles &c, int count, float *o,
                            size_t stride) {
    size_t line = size_t(d) * kChunk;
    update_rows<R, N>(o, stride, [&](F32 (&acc)[R][N]) FW_LAMBDA {
      for (int tile = 0; tile * kTile < count; ++tile) {
        const float *v = reinterpret_cast<const float *>(c.v[tile]) + d, *pt = p.f32 + row * kChunk + tile * kTile;
        const float *const end = pt + smaller(kTile, count - tile * kTile);
        const uint8_t *ahead = c.ahead_v[tile] + 4 * size_t(d);
        for (; pt < end; ++pt, v += dim, ahead += 4 * dim) {
          FW_LOOP_BEGIN("values_f32", 0, R, N);
          F32 value[N];
          FW_UNROLL for (int n = 0; n < N; ++n) value[n] = load(v + n * kLanes);
          prefetch_values<N>(c, row, ahead, line);
          add_outer<kChunk>(acc, pt, value);
          FW_LOOP_END("values_f32", 0, R, N);
        }
      }
    });
    prefetch_rest<N>(c, row, line, size_t(d + N * kLanes) * kChunk);
  }
};

struct ValuesBf16 {
  static constexpr int kWide = kWideRows, kTall = kTallRows;
  template <int R, int N>
  static FW_INLINE void run(const Probabilities &p, int dim, int row, int d, const ChunkTiles &c, int count, float *o,
                            size_t stride) {
    size_t line = size_t(d) * kChunk / 2;
    update_rows<R, N>(o, stride, [&](F32 (&acc)[R][N]) FW_LAMBDA {
      for (int tile = 0; tile * kTile < count; ++tile) {
        const uint16_t *v = reinterpret_cast<const uint16_t *>(c.v[tile]) + 2 * d;
        const uint8_t *ahead = c.ahead_v[tile] + 4 * size_t(d);
        int at = row * kChunk + tile * kTile;
        const int end = at + smaller(kTile, count - tile * kTile);
        for (; at < end; at += 2, v += 2 * dim, ahead += 4 * dim) {
          I32 pairs[N];
          FW_UNROLL for (int n = 0; n < N; ++n) pairs[n] = load_pairs(v + n * 2 * kLanes);
          prefetch_values<N>(c, row, ahead, line);
          const bool whole = at + 1 < end;  // else the other key of the pair was never written
#if defined(FOREWORD_SIMD_BF16)
          if (!whole) { FW_UNROLL for (int n = 0; n < N; ++n) pairs[n] = without_odd(pairs[n]); }
          FW_LOOP_BEGIN("values_bf16", 0, R, N);
          FW_UNROLL for (int r = 0; r < R; ++r) {
            const auto pr = in_lanes<N>(p.pairs + at + r * kChunk);
            FW_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = dot2(acc[r][n], pairs[n], pr);
          }
          FW_LOOP_END("values_bf16", 0, R, N);
#else
          F32 half[N];
          FW_UNROLL for (int n = 0; n < N; ++n) half[n] = even_of_pairs(pairs[n]);
          add_outer<kChunk>(acc, p.f32 + at, half);
          if (!whole) break;
          FW_UNROLL for (int n = 0; n < N; ++n) half[n] = odd_of_pairs(pairs[n]);
          add_outer<kChunk>(acc, p.f32 + at + 1, half);
#endif
        }
      }
    });
    prefetch_rest<N>(c, row, line, size_t(d + N * kLanes) * kChunk / 2);
  }
};

struct ValuesI8 {
  static constexpr int kWide = kWideRows, kTall = kTallRows;
  template <int R, int N>
  static FW_INLINE void run(const Probabilities &p, int dim, int row, int d, const ChunkTiles &c, int count, float *o,
                            size_t stride) {
    I32 sum[R][N];
    FW_UNROLL for (int r = 0; r < R; ++r) {
      FW_UNROLL for (int n = 0; n < N; ++n) sum[r][n] = set1_i32(0);
    }
    const uint8_t *pt = p.u8 + row * kChunk;
    size_t line = size_t(d) * kChunk / 4;
    for (int tile = 0; tile * kTile < count; ++tile) {
      const uint8_t *v = c.v[tile] + 4 * d, *ahead = c.ahead_v[tile] + 4 * d;
      const int quads = smaller(kTile, count - tile * kTile + 3) / 4;  // a quad's keys past the end have p = 0
      prefetch<2>(tile_scales(c.ahead_v[tile], dim));
      for (int q = 0; q < quads; ++q, v += 4 * dim, ahead += 4 * dim, pt += 4) {
        FW_LOOP_BEGIN("values_i8", 0, R, N);
        U8 value[N];
        FW_UNROLL for (int n = 0; n < N; ++n) value[n] = load_u8(v + n * 4 * kLanes);
        prefetch_values<N>(c, row, ahead, line);
        FW_UNROLL for (int r = 0; r < R; ++r) {
          const I32 pr = word_in_lanes(pt + r * kChunk);
          FW_UNROLL for (int n = 0; n < N; ++n) sum[r][n] = dot4_positive(sum[r][n], value[n], pr);
        }
        FW_LOOP_END("values_i8", 0, R, N);
      }
    }
    prefetch_rest<N>(c, row, line, size_t(d + N * kLanes) * kChunk / 4);
    update_rows<R, N>(o, stride, [&](F32 (&acc)[R][N]) FW_LAMBDA {
      FW_UNROLL for (int r = 0; r < R; ++r) {
        const F32 step = set1(p.step[row + r]);
        FW_UNROLL for (int n = 0; n < N; ++n) acc[r][n] = fma(to_f32(sum[r][n]), step, acc[r][n]);
      }
    });
  }
};

// ---------------------------------------------------------------------------------------------- any number of rows

// f(row, count) for tiles of at most `Most` rows, `count` a constant.
template <int Most, class F, int... R>
FW_INLINE void for_row_tiles(int rows, F &&f, std::integer_sequence<int, R...>) {
  for (int row = 0; row < rows;) {
    const int count = smaller(Most, rows - row);
    (void)((count == R + 1 ? (f(row, std::integral_constant<int, R + 1>{}), true) : false) || ...);
    row += count;
  }
}

template <class Scores, int Rows, int N>
FW_INLINE void score_strips(const Queries &q, int dim, int rows, const ChunkTiles &c, int vectors, float *scores) {
  for (int vector = 0; vector < vectors; vector += N) {
    for_row_tiles<Rows>(rows, [&](int row, auto count) FW_LAMBDA {
      Scores::template run<count, N>(q, dim, row, c, vector, scores + row * kChunk + vector * kLanes);
    }, std::make_integer_sequence<int, Rows>{});
  }
}

// Scores of all rows against the chunk's first `tiles` tiles (rounded up to register tiles; the caller repeats
// pointers).
template <class Scores>
void chunk_scores(const Queries &q, int dim, int rows, const ChunkTiles &c, int tiles, float *scores) {
  const int vectors = tiles * kTileVectors;
  if (rows >= kTallRows) return score_strips<Scores, Scores::kTall, 2>(q, dim, rows, c, vectors, scores);
  score_strips<Scores, Scores::kWide, kWideVectors>(q, dim, rows, c, vectors, scores);
}

// Dimensions [d, …) in whole strips of N vectors; returns the end of the last one.
template <class Values, int Rows, int N>
FW_INLINE int value_strips(const Probabilities &p, int dim, int d, int rows, const ChunkTiles &c, int count, float *o,
                           size_t stride) {
  for (; d + N * kLanes <= dim; d += N * kLanes) {
    for_row_tiles<Rows>(rows, [&](int row, auto r) FW_LAMBDA {
      Values::template run<r, N>(p, dim, row, d, c, count, o + size_t(row) * stride + d, stride);
    }, std::make_integer_sequence<int, Rows>{});
  }
  return d;
}

// Adds the values of the dimensions from d on; a vector begins at d.
template <class Values>
void chunk_values(const Probabilities &p, int dim, int d, int rows, const ChunkTiles &c, int count, float *o,
                  size_t stride) {
  if (rows >= kTallRows) {
    d = value_strips<Values, Values::kTall, 2>(p, dim, d, rows, c, count, o, stride);
  } else {
    d = value_strips<Values, Values::kWide, kWideVectors>(p, dim, d, rows, c, count, o, stride);
  }
  value_strips<Values, Values::kWide, 1>(p, dim, d, rows, c, count, o, stride);
}

}  // namespace foreword::kernels::FOREWORD_ISA
