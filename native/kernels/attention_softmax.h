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
FW_INLINE F32 whole_exp2(float n) { return times_pow2(set1(1.f), max_f32(set1(n), set1(-125.f))); }

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
  const int64_t lowest = c.sliding_window ? larger(int64_t(0), position - c.sliding_window + 1) : 0;
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

// The scales of a chunk's 8-bit values for the rows that see the keys `seen`: factor[key] turns a probability into
// steps of size `step`, kProbabilitySteps of them for probability 1 and the largest scale. Other keys have factor 0,
// whatever their slots contain.
constexpr float kProbabilitySteps = 127.f * 128.f;
struct ValueScales {
  F32 factor[kChunkVectors];
  float step;
};
FW_INLINE ValueScales value_scales(const ChunkTiles &c, int dim, Visible seen) {
  ValueScales s;
  F32 largest = set1(0.f);
  FW_UNROLL for (int n = 0; n < kChunkVectors; ++n) {
    s.factor[n] = seen.keep(load(tile_scales(c.v[n / kTileVectors], dim) + n % kTileVectors * kLanes), n, set1(0.f));
    largest = max_f32(largest, s.factor[n]);
  }
  const float top = reduce_max(largest);
  const F32 inverse = set1(top > 0.f ? kProbabilitySteps / top : 0.f);
  FW_UNROLL for (int n = 0; n < kChunkVectors; ++n) s.factor[n] = mul(s.factor[n], inverse);
  s.step = top / kProbabilitySteps;
  return s;
}

// Vector n of a row's scores.
template <Form F>
FW_INLINE F32 row_scores(const AttentionScratch &s, [[maybe_unused]] const ChunkTiles &chunk, int row, int n) {
#if defined(FOREWORD_SIMD_AMX)
  if constexpr (F == Form::steps) return plane_scores(s, chunk, row, n);
#endif
  return load(s.scores + size_t(slot_of(row)) * kChunk + n * kLanes);
}

// The scores of a row become 2^(score - m); l grows by their sum. `Masked`: some keys are not visible.
template <bool Masked, Form F>
FW_INLINE void softmax_row(const AttentionScratch &s, const ChunkTiles &chunk, int row, Visible seen, float cap,
                           const ValueScales &scales) {
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
  if (lanes_at_least(largest, set1(s.part.m(row) + max_excess(F)))) raise_maximum(largest, s.part, lane_sum, row);

  const F32 m = set1(s.part.m(row));
  const int at = slot_of(row) * kChunk;
  F32 sum = load(lane_sum);
  FW_UNROLL for (int four = 0; four < kChunkVectors; four += 4) {
    F32 p[4];
    FW_UNROLL for (int i = 0; i < 4; ++i) {
      p[i] = exp2_f32<exp2_degree(F)>(sub(x[four + i], m));
      if constexpr (Masked) p[i] = seen.keep(p[i], four + i, set1(0.f));
      if constexpr (F != Form::pairs) sum = add(sum, p[i]);
      if constexpr (F == Form::floats) store(s.scores + at + (four + i) * kLanes, p[i]);
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
    if constexpr (F == Form::steps) {
      I32 steps[4];
      FW_UNROLL for (int i = 0; i < 4; ++i) steps[i] = round_to_i32(mul(p[i], scales.factor[four + i]));
      int8_t *high = s.p_high + at + four * kLanes, *low = s.p_low + at + four * kLanes;
      store_15_bits(high, low, steps[0], steps[1], steps[2], steps[3]);
    }
  }
  store(lane_sum, sum);
  if constexpr (F == Form::steps) s.p_step[row] = scales.step;
}

// The keys [begin, end) of one chunk. `whole`: every row of the tile sees kChunk of them; then `scales` are all rows'.
struct Keys {
  int64_t begin, end;
  bool whole;
  ValueScales scales;
};
FW_INLINE Keys chunk_keys(KVFormat f, const AttentionConfig &c, const AttentionTile &tile, const ChunkTiles &chunk,
                          int64_t begin, int64_t end) {
  Keys keys{begin, end, false, {}};
  const int64_t position = tile.first_position;
  keys.whole = visible_keys(c, position, begin, end).all() &&
               visible_keys(c, position + tile.num_queries - 1, begin, end).all();
  if (f == KVFormat::i8 && keys.whole) keys.scales = value_scales(chunk, c.padded_dim, {0, kChunk});
  return keys;
}

// Scores of a chunk become probabilities, for the rows [row, rows_end) of the tile.
template <Form F>
FW_INLINE void softmax(const AttentionConfig &c, const AttentionTile &tile, const ChunkTiles &chunk, const Keys &keys,
                       const AttentionScratch &s, int row, int rows_end) {
  if (keys.whole) {
    for (; row < rows_end; ++row) softmax_row<false, F>(s, chunk, row, {0, kChunk}, c.softcap, keys.scales);
    return;
  }
  for (; row < rows_end; ++row) {
    const Visible seen = visible_keys(c, tile.first_position + row / group_size(c), keys.begin, keys.end);
    ValueScales scales;
    if constexpr (F == Form::steps) scales = value_scales(chunk, c.padded_dim, seen);
    softmax_row<true, F>(s, chunk, row, seen, c.softcap, scales);
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
