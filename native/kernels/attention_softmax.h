// The online softmax over the scores of a chunk.
#pragma once

#include <cmath>

#include "kernels/attention_state.h"
#if defined(FOREWORD_SIMD_AMX)
#include "kernels/amx_attention.h"
#endif

namespace foreword::kernels::FOREWORD_ISA {

constexpr int kChunkVectors = kChunk / kLanes;

// 2^n for an integer n <= 0.
FW_INLINE F32 whole_exp2(float n) {
  return times_pow2(set1(1.f), whole_bits(max_f32(set1(n), set1(-125.f))));
}

// The keys [begin, end) of the chunk at `first` that a query may see.
struct Visible {
  int begin, end;
  FW_INLINE bool all() const { return begin == 0 && end == kChunk; }
  FW_INLINE bool none() const { return begin >= end; }
  // Vector n of the chunk, with `other` in place of the keys that are not visible.
  FW_INLINE F32 keep(F32 v, int n, F32 other) const {
    return keep_lanes(v, begin - n * kLanes, end - n * kLanes, other);
  }
};
FW_INLINE Visible visible_keys(const AttentionConfig &c, int64_t position, int64_t first, int64_t end) {
  int64_t lowest = 0;
  if (c.sliding_window) {
    lowest = c.chunked ? position - position % c.sliding_window : larger(int64_t(0), position - c.sliding_window + 1);
  }
  return {int(larger(lowest, first) - first), int(smaller(position + 1, end) - first)};
}

// m := the next integer above the row's largest score, with O and l scaled to it: by a power of 2, so exactly.
inline void raise_maximum(F32 scores, const States &s, float *lane_sum, int row) {
  const float m = std::ceil(reduce_max(scores)), before = s.m(row);
  if (m <= before) return;
  s.m(row) = m;
  if (before <= kNothing) return;
  const F32 shrink = whole_exp2(before - m);
  store(lane_sum, mul(load(lane_sum), shrink));
  float *o = s.o(row);
  for (int d = 0; d < s.dim; d += kLanes) store(o + d, mul(load(o + d), shrink));
}

// Vector n of a row's scores.
template <Form F>
FW_INLINE F32 row_scores(const AttentionScratch &s, [[maybe_unused]] const ChunkTiles &chunk, int row, int n) {
#if defined(FOREWORD_SIMD_AMX)
  if constexpr (F == Form::steps) return scaled_scores(s, chunk, row, n);
#endif
  return load(s.scores + size_t(slot_of(row)) * kChunk + n * kLanes);
}

// The scores of a row become 2^(score - m); l grows by their sum. `Masked`: some keys are not visible.
template <bool Masked, Form F>
FW_INLINE void softmax_row(const AttentionScratch &s, const ChunkTiles &chunk, int row, Visible seen, float cap) {
  float *lane_sum = s.lane_sums + row * kLanes;
  F32 x[kChunkVectors], largest = set1(kNothing);
  FW_UNROLL for (int n = 0; n < kChunkVectors; ++n) {
    x[n] = row_scores<F>(s, chunk, row, n);
  }
  if (cap > 0.f) {
    for (int n = 0; n < kChunkVectors; ++n) x[n] = mul(set1(cap), tanh_f32(div(x[n], set1(cap))));
  }
  FW_UNROLL for (int n = 0; n < kChunkVectors; ++n) {
    if constexpr (Masked) x[n] = seen.keep(x[n], n, set1(kNothing));
    largest = max_f32(largest, x[n]);
  }
  if (lanes_at_least(largest, set1(s.part.m(row) + kMaxExcess))) raise_maximum(largest, s.part, lane_sum, row);

  const F32 m = set1(s.part.m(row));
  const int at = slot_of(row) * kChunk;
  F32 sum = load(lane_sum), top = set1(0.f);
  FW_UNROLL for (int four = 0; four < kChunkVectors; four += 4) {
    F32 p[4];
    FW_UNROLL for (int i = 0; i < 4; ++i) {
      const int n = four + i;
      p[i] = exp2_f32<exp2_degree(F), F == Form::steps ? -60 : -125>(sub(x[n], m));
      if constexpr (Masked) p[i] = seen.keep(p[i], n, set1(0.f));
      if constexpr (F != Form::pairs) sum = add(sum, p[i]);
      if constexpr (F == Form::floats) store(s.scores + at + n * kLanes, p[i]);
      if constexpr (F == Form::steps) {
        F32 scale = load(tile_scales(chunk.v[n / kTileVectors], s.part.dim) + n % kTileVectors * kLanes);
        if constexpr (Masked) scale = seen.keep(scale, n, set1(0.f));  // whatever the slot contains
        x[n] = mul(p[i], scale);
        top = max_f32(top, x[n]);
      }
    }
#if defined(FOREWORD_SIMD_BF16)
    if constexpr (F == Form::pairs) {
      FW_UNROLL for (int i = 0; i < 4; i += 2) {
        const I32 pairs = to_bf16(p[i], p[i + 1]);
        std::memcpy(s.p_pairs + at + (four + i) * kLanes, &pairs, sizeof pairs);
        sum = dot2(sum, pairs, set1_i32(0x3f803f80));  // times 1
      }
    }
#endif
  }
  store(lane_sum, sum);
  if constexpr (F == Form::steps) {
    const float largest_p = reduce_max(top);
    const F32 inverse = set1(largest_p > 0.f ? kMostPositive / largest_p : 0.f);
    FW_UNROLL for (int n = 0; n < kChunkVectors; n += 4) {
      I32 steps[4];
      FW_UNROLL for (int i = 0; i < 4; ++i) steps[i] = round_to_i32(mul(x[n + i], inverse));
      store_u8(s.p_u8 + at + n * kLanes, steps[0], steps[1], steps[2], steps[3]);
    }
    s.p_step[row] = largest_p * (1.f / kMostPositive);
  }
}

// The keys [begin, end) of one chunk. `whole`: every row of the tile sees kChunk of them.
struct Keys {
  int64_t begin, end;
  bool whole;
};
FW_INLINE Keys chunk_keys(const AttentionConfig &c, const AttentionTile &tile, int64_t begin, int64_t end) {
  const int64_t position = tile.first_position;
  return {begin, end,
          visible_keys(c, position, begin, end).all() &&
              visible_keys(c, position + tile.num_queries - 1, begin, end).all()};
}

// Adds to the scores in floats of the rows [row, rows_end) slope (key − query), with the positions of both.
[[gnu::noinline]] inline void add_slopes(const AttentionConfig &c, const AttentionTile &tile, int64_t first_key,
                                         const AttentionScratch &s, int row, int rows_end) {
  float distances[kChunk];
  const int group = group_size(c);
  for (; row < rows_end; ++row) {
    const F32 slope = set1(c.slopes[tile.kv_head * group + row % group]);
    const float first = float(first_key - tile.first_position - row / group);
    for (int i = 0; i < kChunk; ++i) distances[i] = first + float(i);
    float *scores = s.scores + slot_of(row) * kChunk;
    for (int i = 0; i < kChunk; i += kLanes) store(scores + i, fma(slope, load(distances + i), load(scores + i)));
  }
}

// Adds the biases of the distances of the keys to the scores in floats of the rows [row, rows_end).
[[gnu::noinline]] inline void add_biases(const AttentionConfig &c, const AttentionTile &tile, int64_t first_key,
                                         const AttentionScratch &s, int row, int rows_end) {
  const int group = group_size(c);
  for (; row < rows_end; ++row) {
    const int64_t head = tile.kv_head * group + row % group;
    const float *biases = c.biases + head * int64_t(c.bias_stride) + first_key - tile.query_position - row / group;
    float *scores = s.scores + slot_of(row) * kChunk;
    for (int i = 0; i < kChunk; i += kLanes) store(scores + i, add(load(biases + i), load(scores + i)));
  }
}

// Scores of a chunk become probabilities, for the rows [row, rows_end) of the tile.
template <Form F>
FW_INLINE void softmax(const AttentionConfig &c, const AttentionTile &tile, const ChunkTiles &chunk, const Keys &keys,
                       const AttentionScratch &s, int row, int rows_end) {
  if (c.slopes) add_slopes(c, tile, keys.begin, s, row, rows_end);
  if (c.biases) add_biases(c, tile, keys.begin, s, row, rows_end);
  if (keys.whole) {
    for (; row < rows_end; ++row) softmax_row<false, F>(s, chunk, row, {0, kChunk}, c.softcap);
    return;
  }
  for (; row < rows_end; ++row) {
    const Visible seen = visible_keys(c, tile.first_position + row / group_size(c), keys.begin, keys.end);
    softmax_row<true, F>(s, chunk, row, seen, c.softcap);
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
