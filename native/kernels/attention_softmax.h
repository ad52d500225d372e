// The online softmax over the scores of a chunk.
#pragma once

#include "kernels/attention_state.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr int kChunkVectors = kChunk / kLanes;

FW_INLINE float exp2_one(float x) {
  float lanes[kLanes];
  store(lanes, exp2_f32(set1(x)));
  return lanes[0];
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
  const int64_t lowest = c.sliding_window ? larger(int64_t(0), position - c.sliding_window + 1) : 0;
  return {int(larger(lowest, first) - first), int(smaller(position + 1, end) - first)};
}

// m := max(m, the row's visible scores), with O and l scaled to it. `Masked`: some keys are not visible.
template <bool Masked>
FW_INLINE void raise_maximum(float *scores, Visible seen, float cap, const States &s, float *lane_sum, int row) {
  F32 largest = set1(kNothing);
  FW_UNROLL for (int n = 0; n < kChunkVectors; ++n) {
    F32 x = load(scores + n * kLanes);
    if (cap > 0.f) {
      x = mul(set1(cap), tanh_f32(div(x, set1(cap))));
      store(scores + n * kLanes, x);
    }
    if constexpr (Masked) x = seen.keep(x, n, set1(kNothing));
    largest = max_f32(largest, x);
  }
  const float m = reduce_max(largest), before = s.m(row);
  if (m <= before) return;
  s.m(row) = m;
  if (before <= kNothing) return;
  const F32 shrink = exp2_f32(set1(before - m));
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

// The form of probabilities: floats in the place of the scores; rounded to bf16, for products of pairs; steps, for
// 8-bit values.
enum class Form { floats, pairs, steps };

// 2^(score - m) of a row; l grows by their sum.
template <bool Masked, Form F>
FW_INLINE void probabilities(const AttentionScratch &s, int row, Visible seen, const ValueScales *scales) {
  float *x = s.scores + row * kChunk, *lane_sum = s.lane_sums + row * kLanes;
  const F32 m = set1(s.part.m(row));
  F32 sum = load(lane_sum);
  [[maybe_unused]] uint16_t *pairs = s.p_pairs + row * kChunk;
  FW_UNROLL for (int four = 0; four < kChunkVectors / 4; ++four) {
    F32 p[4];
    FW_UNROLL for (int i = 0; i < 4; ++i) {
      const int n = 4 * four + i;
      p[i] = exp2_f32(sub(load(x + n * kLanes), m));
      if constexpr (Masked) p[i] = seen.keep(p[i], n, set1(0.f));
#if defined(FOREWORD_SIMD_AVX512)
      if constexpr (F == Form::pairs) {
        p[i] = round_to_bf16(p[i]);
        store_bf16(pairs + n * kLanes, p[i]);
      }
#endif
      sum = add(sum, p[i]);
      if constexpr (F == Form::floats) store(x + n * kLanes, p[i]);
    }
    if constexpr (F == Form::steps) {
      I32 steps[4];
      FW_UNROLL for (int i = 0; i < 4; ++i) steps[i] = round_to_i32(mul(p[i], scales->factor[4 * four + i]));
      const int at = row * kChunk + four * 4 * kLanes;
      store_bytes(s.p_high + at, shift_right_7(steps[0]), shift_right_7(steps[1]), shift_right_7(steps[2]),
                  shift_right_7(steps[3]));
      store_bytes(s.p_low + at, low_7_bits(steps[0]), low_7_bits(steps[1]), low_7_bits(steps[2]), low_7_bits(steps[3]));
    }
  }
  store(lane_sum, sum);
  if constexpr (F == Form::steps) s.p_step[row] = scales->step;
}

// Scores of a chunk's keys [begin, end) become probabilities, for all rows of the tile. In each of the two passes the
// dependency chain of a row is short, so that the processor overlaps several rows.
template <Form F>
void softmax(const AttentionConfig &c, const AttentionTile &tile, const ChunkTiles &chunk, int64_t begin, int64_t end,
             const AttentionScratch &s) {
  const int group = group_size(c);
  for (int i = 0, row = 0; i < tile.num_queries; ++i) {
    const Visible seen = visible_keys(c, tile.first_position + i, begin, end);
    for (const int last = row + group; row < last; ++row) {
      float *scores = s.scores + row * kChunk, *lane_sum = s.lane_sums + row * kLanes;
      if (seen.all()) {
        raise_maximum<false>(scores, seen, c.softcap, s.part, lane_sum, row);
      } else if (!seen.none()) {
        raise_maximum<true>(scores, seen, c.softcap, s.part, lane_sum, row);
      }
    }
  }
  constexpr bool kSteps = F == Form::steps;
  ValueScales all, some;
  if (kSteps && end - begin == kChunk) all = value_scales(chunk, c.padded_dim, {0, kChunk});
  for (int i = 0, row = 0; i < tile.num_queries; ++i) {
    const Visible seen = visible_keys(c, tile.first_position + i, begin, end);
    if (kSteps && !seen.all()) some = value_scales(chunk, c.padded_dim, seen);
    for (const int last = row + group; row < last; ++row) {
      seen.all() ? probabilities<false, F>(s, row, seen, &all) : probabilities<true, F>(s, row, seen, &some);
    }
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
