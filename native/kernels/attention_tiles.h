// The two register-tile products of attention for each KV format:
//
//   scores   S[r, key] = Σ_d Q[r, d] K[key, d]         rows × kQkTiles tiles of 16 keys in registers, d upwards
//   values   O[r, d]  += Σ_key P[r, key] V[key, d]     rows × a few vectors of d in registers, keys upwards
//
// A row's arithmetic does not depend on the rows beside it.
#pragma once

#include "kernels/kv_layout.h"

namespace foreword::kernels::FOREWORD_LEVEL {

constexpr int kTileVectors = kTile / kLanes;

// The query rows of a tile in the form that the KV format multiplies with.
struct Queries {
  const float *f32;       // [rows][dim]
  const uint16_t *bf16;   // bf16 keys at levels with bf16 dot products
  const int8_t *high, *low;  // i8 keys: q ≈ scale (128 high + low), 15 bits, so that only the keys are rounded
  const float *scale;
  const int32_t *neg128_high, *neg128_low;
};

struct ChunkTiles {
  const uint8_t *k[kChunkTiles], *v[kChunkTiles];
  const uint8_t *next_k[kChunkTiles], *next_v[kChunkTiles];  // the following chunk's, to be fetched meanwhile
};

// ---------------------------------------------------------------------------------------------- scores

// F32, BF16 and I8 below share this: `tile` is the first of kQkTiles tiles, `row` the first of R rows.
struct ScoresF32 {
  static constexpr int kRows = kQkRows;
  template <int R>
  static FW_INLINE void run(const Queries &q, int dim, int row, const ChunkTiles &c, int tile, float *scores) {
    constexpr int N = kQkTiles * kTileVectors;
    F32 acc[R][N];
    unroll<R>([&](auto r) FW_LAMBDA { unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = set1(0.f); }); });
    const float *x = q.f32 + static_cast<size_t>(row) * dim;
    for (int d = 0; d < dim; ++d) {
      F32 k[N];
      unroll<N>([&](auto n) FW_LAMBDA {
        const float *keys = reinterpret_cast<const float *>(c.k[tile + n / kTileVectors]);
        k[n] = load(keys + d * kTile + (n % kTileVectors) * kLanes);
      });
      unroll<R>([&](auto r) FW_LAMBDA {
        const F32 xv = set1(x[r * dim + d]);
        unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = fma(xv, k[n], acc[r][n]); });
      });
    }
    unroll<R>([&](auto r) FW_LAMBDA {
      unroll<N>([&](auto n) FW_LAMBDA { store(scores + r * kChunk + n * kLanes, acc[r][n]); });
    });
  }
};

struct ScoresBf16 {
  static constexpr int kRows = kQkRows;
  template <int R>
  static FW_INLINE void run(const Queries &q, int dim, int row, const ChunkTiles &c, int tile, float *scores) {
    constexpr int N = kQkTiles * kTileVectors;
    F32 acc[R][N];
    unroll<R>([&](auto r) FW_LAMBDA { unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = set1(0.f); }); });
    for (int d = 0; d < dim; d += 2) {
      I32 k[N];
      unroll<N>([&](auto n) FW_LAMBDA {
        const uint16_t *keys = reinterpret_cast<const uint16_t *>(c.k[tile + n / kTileVectors]);
        k[n] = load_pairs(keys + d * kTile + (n % kTileVectors) * 2 * kLanes);
      });
      unroll<kQkTiles>([&](auto t) FW_LAMBDA { prefetch<3>(c.next_k[tile + t] + d * 2 * kTile); });
#if defined(FOREWORD_SIMD_BF16)
      const uint16_t *x = q.bf16 + static_cast<size_t>(row) * dim + d;
      unroll<R>([&](auto r) FW_LAMBDA {
        const I32 xv = pair(x + r * dim);
        unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = dot2(acc[r][n], k[n], xv); });
      });
#else
      const float *x = q.f32 + static_cast<size_t>(row) * dim + d;
      F32 half[N];
      unroll<N>([&](auto n) FW_LAMBDA { half[n] = even_of_pairs(k[n]); });
      unroll<R>([&](auto r) FW_LAMBDA {
        const F32 xv = set1(x[r * dim]);
        unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = fma(xv, half[n], acc[r][n]); });
      });
      unroll<N>([&](auto n) FW_LAMBDA { half[n] = odd_of_pairs(k[n]); });
      unroll<R>([&](auto r) FW_LAMBDA {
        const F32 xv = set1(x[r * dim + 1]);
        unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = fma(xv, half[n], acc[r][n]); });
      });
#endif
    }
    unroll<R>([&](auto r) FW_LAMBDA {
      unroll<N>([&](auto n) FW_LAMBDA { store(scores + r * kChunk + n * kLanes, acc[r][n]); });
    });
  }
};

struct ScoresI8 {
  static constexpr int kRows = kQkRows / 2 > 0 ? kQkRows / 2 : 1;
  template <int R>
  static FW_INLINE void run(const Queries &q, int dim, int row, const ChunkTiles &c, int tile, float *scores) {
    constexpr int N = kQkTiles * kTileVectors;
    I32 high[R][N], low[R][N];
    unroll<R>([&](auto r) FW_LAMBDA {
      unroll<N>([&](auto n) FW_LAMBDA {
        high[r][n] = set1_i32(q.neg128_high[row + r]);
        low[r][n] = set1_i32(q.neg128_low[row + r]);
      });
    });
    const int8_t *xh = q.high + static_cast<size_t>(row) * dim, *xl = q.low + static_cast<size_t>(row) * dim;
    for (int d = 0; d < dim; d += 4) {
      U8 k[N];
      unroll<N>([&](auto n) FW_LAMBDA {
        k[n] = load_u8(c.k[tile + n / kTileVectors] + d * kTile + (n % kTileVectors) * 4 * kLanes);
      });
      unroll<kQkTiles>([&](auto t) FW_LAMBDA { prefetch<3>(c.next_k[tile + t] + d * kTile); });
      unroll<R>([&](auto r) FW_LAMBDA {
        const I32 h = quad(xh + r * dim + d), l = quad(xl + r * dim + d);
        unroll<N>([&](auto n) FW_LAMBDA {
          high[r][n] = dot4_biased(high[r][n], k[n], h);
          low[r][n] = dot4_biased(low[r][n], k[n], l);
        });
      });
    }
    unroll<N>([&](auto n) FW_LAMBDA {
      const F32 scale = load(tile_scales(c.k[tile + n / kTileVectors], dim) + (n % kTileVectors) * kLanes);
      unroll<R>([&](auto r) FW_LAMBDA {
        const F32 dot = fma(to_f32(high[r][n]), set1(128.f), to_f32(low[r][n]));
        store(scores + r * kChunk + n * kLanes, mul(mul(dot, set1(q.scale[row + r])), scale));
      });
    });
  }
};

// ---------------------------------------------------------------------------------------------- values

// `p` is [rows][kChunk] floats; `count` keys of the chunk take part. O is [rows] at `stride` floats.
struct ValuesF32 {
  template <int R, int N>
  static FW_INLINE void run(const float *p, int dim, int d, const ChunkTiles &c, int count, float *o, size_t stride) {
    F32 acc[R][N];
    unroll<R>([&](auto r) FW_LAMBDA { unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = load(o + r * stride + n * kLanes); }); });
    for (int tile = 0; tile * kTile < count; ++tile) {
      const float *v = reinterpret_cast<const float *>(c.v[tile]) + d, *pt = p + tile * kTile;
      const float *const end = pt + smaller(kTile, count - tile * kTile);
      for (; pt < end; ++pt, v += dim) {
        F32 value[N];
        unroll<N>([&](auto n) FW_LAMBDA { value[n] = load(v + n * kLanes); });
        unroll<R>([&](auto r) FW_LAMBDA {
          const F32 pv = set1(pt[r * kChunk]);
          unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = fma(pv, value[n], acc[r][n]); });
        });
      }
    }
    unroll<R>([&](auto r) FW_LAMBDA { unroll<N>([&](auto n) FW_LAMBDA { store(o + r * stride + n * kLanes, acc[r][n]); }); });
  }
};

struct ValuesBf16 {
  template <int R, int N>
  static FW_INLINE void run(const float *p, int dim, int d, const ChunkTiles &c, int count, float *o, size_t stride) {
    F32 acc[R][N];
    unroll<R>([&](auto r) FW_LAMBDA { unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = load(o + r * stride + n * kLanes); }); });
    for (int tile = 0; tile * kTile < count; ++tile) {
      const uint16_t *v = reinterpret_cast<const uint16_t *>(c.v[tile]) + 2 * d;
      const uint16_t *next = reinterpret_cast<const uint16_t *>(c.next_v[tile]) + 2 * d;
      const float *pt = p + tile * kTile, *const end = pt + smaller(kTile, count - tile * kTile);
      for (; pt < end; pt += 2, v += 2 * dim, next += 2 * dim) {
        I32 pairs[N];
        unroll<N>([&](auto n) FW_LAMBDA { pairs[n] = load_pairs(v + n * 2 * kLanes); });
        unroll<(N * kLanes * 4 + 63) / 64>([&](auto line) FW_LAMBDA { prefetch<3>(next + 32 * line); });
        F32 half[N];
        unroll<N>([&](auto n) FW_LAMBDA { half[n] = even_of_pairs(pairs[n]); });
        unroll<R>([&](auto r) FW_LAMBDA {
          const F32 pv = set1(pt[r * kChunk]);
          unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = fma(pv, half[n], acc[r][n]); });
        });
        if (pt + 1 == end) break;  // the partner was never written
        unroll<N>([&](auto n) FW_LAMBDA { half[n] = odd_of_pairs(pairs[n]); });
        unroll<R>([&](auto r) FW_LAMBDA {
          const F32 pv = set1(pt[r * kChunk + 1]);
          unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = fma(pv, half[n], acc[r][n]); });
        });
      }
    }
    unroll<R>([&](auto r) FW_LAMBDA { unroll<N>([&](auto n) FW_LAMBDA { store(o + r * stride + n * kLanes, acc[r][n]); }); });
  }
};

// The scale of a value sits in p already.
struct ValuesI8 {
  template <int R, int N>
  static FW_INLINE void run(const float *p, int dim, int d, const ChunkTiles &c, int count, float *o, size_t stride) {
    F32 acc[R][N];
    unroll<R>([&](auto r) FW_LAMBDA { unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = load(o + r * stride + n * kLanes); }); });
    for (int tile = 0; tile * kTile < count; ++tile) {
      const int8_t *v = reinterpret_cast<const int8_t *>(c.v[tile]) + d;
      const uint8_t *next = c.next_v[tile] + d;
      const float *pt = p + tile * kTile, *const end = pt + smaller(kTile, count - tile * kTile);
      for (; pt < end; ++pt, v += dim, next += dim) {
        prefetch<3>(next);
        F32 value[N];
        unroll<N>([&](auto n) FW_LAMBDA { value[n] = load_s8(v + n * kLanes); });
        unroll<R>([&](auto r) FW_LAMBDA {
          const F32 pv = set1(pt[r * kChunk]);
          unroll<N>([&](auto n) FW_LAMBDA { acc[r][n] = fma(pv, value[n], acc[r][n]); });
        });
      }
    }
    unroll<R>([&](auto r) FW_LAMBDA { unroll<N>([&](auto n) FW_LAMBDA { store(o + r * stride + n * kLanes, acc[r][n]); }); });
  }
};

// ---------------------------------------------------------------------------------------------- any number of rows

template <class Scores, int... R>
FW_INLINE void scores_rows(int rows, std::integer_sequence<int, R...>, const Queries &q, int dim, int row,
                           const ChunkTiles &c, int tile, float *scores) {
  (void)((rows == R + 1 ? (Scores::template run<R + 1>(q, dim, row, c, tile, scores), true) : false) || ...);
}

// Scores of all rows against the chunk's first `tiles` tiles (rounded up to register tiles; the caller repeats pointers).
template <class Scores>
void chunk_scores(const Queries &q, int dim, int rows, const ChunkTiles &c, int tiles, float *scores) {
  for (int tile = 0; tile < tiles; tile += kQkTiles) {
    for (int row = 0; row < rows;) {
      const int count = smaller(Scores::kRows, rows - row);
      scores_rows<Scores>(count, std::make_integer_sequence<int, Scores::kRows>{}, q, dim, row, c, tile,
                          scores + row * kChunk + tile * kTile);
      row += count;
    }
  }
}

template <class Values, int N, int... R>
FW_INLINE void values_rows(int rows, std::integer_sequence<int, R...>, const float *p, int dim, int d, const ChunkTiles &c,
                           int count, float *o, size_t stride) {
  (void)((rows == R + 1 ? (Values::template run<R + 1, N>(p, dim, d, c, count, o, stride), true) : false) || ...);
}

template <class Values>
void chunk_values(const float *p, int dim, int rows, const ChunkTiles &c, int count, float *o, size_t stride) {
  constexpr int kWide = 4;
  const std::make_integer_sequence<int, kPvRows> sequence;
  for (int row = 0; row < rows;) {
    const int r = smaller(kPvRows, rows - row);
    const float *pr = p + row * kChunk;
    float *out = o + static_cast<size_t>(row) * stride;
    int d = 0;
    for (; d + kWide * kLanes <= dim; d += kWide * kLanes) {
      values_rows<Values, kWide>(r, sequence, pr, dim, d, c, count, out + d, stride);
    }
    for (; d < dim; d += kLanes) values_rows<Values, 1>(r, sequence, pr, dim, d, c, count, out + d, stride);
    row += r;
  }
}

}  // namespace foreword::kernels::FOREWORD_LEVEL
