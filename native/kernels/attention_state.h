// The scratch memory of a tile of attention: query rows, scores, and the running state of the online softmax.
#pragma once

#include "kernels/attention_tiles.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr int kRowMultiple = 16;      // scratch memory has a multiple of it: the most that a kernel computes at once
constexpr float kNothing = -3.0e38f;  // m of a row before its first key

// The running state of rows, also the layout of partial results: [O[dim], m, l, unused up to dim + kStateExtra].
struct States {
  float *data;
  int dim;

  FW_INLINE size_t stride() const { return size_t(dim) + kStateExtra; }
  FW_INLINE float *o(int row) const { return data + size_t(row) * stride(); }
  FW_INLINE float &m(int row) const { return o(row)[dim]; }
  FW_INLINE float &l(int row) const { return o(row)[dim + 1]; }
};

struct AttentionScratch {
  int key_dim;
  Queries q;
  float *scores;     // [slot_of(row)][kChunk]; of 8 bit by tiles: sums
  float *lane_sums;  // [rows][kLanes]: l, one partial sum per lane
  States part, total;
  uint8_t *p_u8;      // [slot_of(row)][kChunk]: probabilities for 8-bit values
  float *p_step;      // [rows]
  uint16_t *p_pairs;  // [slot_of(row)][kChunk]: probabilities for bf16 values, with bf16 dot products
  uint8_t *tiles;   // a chunk's keys and values copied out of blocks that are not tiled
  size_t tiles_stride;  // bytes from a tile of keys there to the next
  uint8_t *staged;  // a chunk's keys and values as float tiles
};

// The place of the scores and probabilities of a row: with tiles, one row tile after the other uses the same memory.
FW_INLINE int slot_of(int row) {
#if defined(FOREWORD_SIMD_AMX)
  return row % kRowMultiple;
#else
  return row;
#endif
}

// The form of probabilities: floats in the place of the scores; rounded to bf16, for products of pairs; steps, for
// 8-bit values: the largest product of probability and scale of a row's keys in a chunk is kMostPositive steps. The
// polynomial of each is more exact than the form.
enum class Form { floats, pairs, steps };
constexpr int exp2_degree(Form f) { return f == Form::floats ? 5 : 3; }
constexpr float kMaxExcess = 8.f;  // by how much a score may exceed m before m is raised

// Query heads per KV head.
inline int group_size(const AttentionConfig &c) { return c.num_heads / c.num_kv_heads; }

struct Carver {
  uint8_t *base;
  size_t used = 0;
  template <class T>
  T *take(size_t count) {
    const size_t at = used;
    used = round_up(used + sizeof(T) * count, size_t(64));
    return reinterpret_cast<T *>(base + at);
  }
};

// Lays out scratch memory for tiles of `max_rows` rows at `memory`; returns its size. `out` may be null.
inline size_t carve(const AttentionConfig &c, int max_rows, void *memory, AttentionScratch *out) {
  Carver carver{static_cast<uint8_t *>(memory)};
  const size_t rows = round_up(size_t(max_rows), size_t(kRowMultiple)), dim = size_t(c.padded_dim),
               value = size_t(c.padded_value);
  AttentionScratch s;
  s.key_dim = c.padded_dim;
  s.q.piece_stride = rows * kQueryPiece;
  const size_t query_numbers = round_up(dim, size_t(kQueryPiece)) * rows;
  s.q.f32 = carver.take<float>(query_numbers);
  s.q.bf16 = carver.take<uint16_t>(query_numbers);
  s.q.i8 = carver.take<int8_t>(query_numbers);
  s.q.scale = carver.take<float>(rows);
  s.q.neg_bias = carver.take<int32_t>(rows);
  s.scores = carver.take<float>(rows * kChunk);
  s.lane_sums = carver.take<float>(rows * kLanes);
  // A query is rotated in the place of outputs.
  s.part = {carver.take<float>(larger(rows * (value + kStateExtra), dim)), c.padded_value};
  s.total = {carver.take<float>(rows * (value + kStateExtra)), c.padded_value};
  s.tiles_stride = kTile * sizeof(float) * (dim + value + 2);
  s.tiles = carver.take<uint8_t>(kChunkTiles * s.tiles_stride);
  s.p_u8 = carver.take<uint8_t>(rows * kChunk);
  s.p_step = carver.take<float>(rows);
  s.p_pairs = carver.take<uint16_t>(rows * kChunk);
  s.staged = carver.take<uint8_t>(kChunk * (dim + value) * sizeof(float));
  if (out) *out = s;
  return carver.used;
}

}  // namespace foreword::kernels::FOREWORD_ISA
