// Attention of a tile of query rows over the keys of one request, in chunks of 64 keys with an online softmax:
//
//   for each split of 512 keys:  m, l, O = -inf, 0, 0
//       for each chunk of 64 keys:   S = Q Kᵀ;  m' = max(m, max S);  P = 2^(S - m')
//                                    l = l 2^(m - m') + Σ P;  O = O 2^(m - m') + P V;  m = m'
//       merge (m, l, O) into the row's total
//   out = O / l
//
// Powers of 2 and not of e: log2 e is part of the scale of the queries.
//
// Chunks and splits start at absolute multiples of their sizes, and a row takes part in a chunk only with the keys it may
// see. So a query's result depends on its own keys alone: not on the queries beside it, on how a prompt was cut into
// prefill chunks, nor on whether its splits ran one after the other or on several threads.

#include "kernels/attention.h"

#include "kernels/attention_tiles.h"

namespace foreword::kernels::FOREWORD_LEVEL {
namespace {

constexpr int kTargetRows = 96;   // rows of a prefill tile: keys and values are unpacked once for all of them
constexpr int kStageRows = 12;    // from this many rows on, bf16 keys and values are widened to floats first
constexpr float kNothing = -3.0e38f;  // m of a row that has seen no key

// Rows' running state, the layout of partial results: [O[dim], m, l, unused up to dim + kStateExtra].
constexpr int kStateExtra = 16;
struct States {
  float *data;
  int dim;

  FW_INLINE size_t stride() const { return static_cast<size_t>(dim) + kStateExtra; }
  FW_INLINE float *o(int row) const { return data + static_cast<size_t>(row) * stride(); }
  FW_INLINE float &m(int row) const { return o(row)[dim]; }
  FW_INLINE float &l(int row) const { return o(row)[dim + 1]; }
};

struct Scratch {
  Queries q;
  float *scores;  // [rows][kChunk]
  float *lane_sums;  // [rows][kLanes]: l, one partial sum a lane
  States part, total;
  int8_t *p_high, *p_low;  // [rows][kChunk]: probabilities for 8-bit values
  float *p_step;           // [rows]
  uint8_t *tiles;   // a chunk's keys and values copied out of blocks that are not tiled
  uint8_t *staged;  // a chunk's keys and values as float tiles
};

int group_size(const AttentionConfig &c) { return c.num_heads / c.num_kv_heads; }
int max_rows(const AttentionConfig &c) { return attention_queries(c) * group_size(c); }

struct Carver {
  uint8_t *base;
  size_t used = 0;
  template <class T>
  T *take(size_t count) {
    const size_t at = used;
    used = round_up(used + sizeof(T) * count, size_t{64});
    return reinterpret_cast<T *>(base + at);
  }
};

size_t carve(const AttentionConfig &c, void *memory, Scratch *out) {
  Carver carver{static_cast<uint8_t *>(memory)};
  const size_t rows = static_cast<size_t>(max_rows(c)), dim = static_cast<size_t>(c.padded_dim);
  Scratch s;
  s.q.piece_stride = rows * kQueryPiece;
  const size_t query_numbers = round_up(dim, static_cast<size_t>(kQueryPiece)) * rows;
  s.q.f32 = carver.take<float>(query_numbers);
  s.q.bf16 = carver.take<uint16_t>(query_numbers);
  s.q.high = carver.take<int8_t>(query_numbers);
  s.q.low = carver.take<int8_t>(query_numbers);
  s.q.scale = carver.take<float>(rows);
  s.q.neg128_high = carver.take<int32_t>(rows);
  s.q.neg128_low = carver.take<int32_t>(rows);
  s.scores = carver.take<float>(rows * kChunk);
  s.lane_sums = carver.take<float>(rows * kLanes);
  s.part = {carver.take<float>(rows * (dim + kStateExtra)), c.padded_dim};
  s.total = {carver.take<float>(rows * (dim + kStateExtra)), c.padded_dim};
  s.tiles = carver.take<uint8_t>(2 * kChunk * (dim * sizeof(float) + sizeof(float)));
  s.p_high = carver.take<int8_t>(rows * kChunk);
  s.p_low = carver.take<int8_t>(rows * kChunk);
  s.p_step = carver.take<float>(rows);
  s.staged = carver.take<uint8_t>(2 * kChunk * dim * sizeof(float));
  if (out) *out = s;
  return carver.used;
}

// ---------------------------------------------------------------------------------------------- queries

void split_query(const float *x, int dim, int row, const Queries &q) {
  F32 largest = set1(0.f);
  for (int d = 0; d < dim; d += kLanes) largest = max_f32(largest, abs_f32(load(x + d)));
  const float top = reduce_max(largest);
  constexpr float kSteps = 127.f * 128.f;
  const F32 inverse = set1(top > 0.f ? kSteps / top : 0.f);
  F32 high = set1(0.f), low = set1(0.f);
  for (int d = 0; d < dim; d += kLanes) {
    const F32 steps = round_f32(mul(load(x + d), inverse));
    const F32 coarse = round_f32(mul(steps, set1(1.f / 128.f))), fine = fma(coarse, set1(-128.f), steps);
    store_s8(const_cast<int8_t *>(q.high) + q.at(row, d), coarse);
    store_s8(const_cast<int8_t *>(q.low) + q.at(row, d), fine);
    high = add(high, coarse);
    low = add(low, fine);
  }
  // Exact in floats: the terms are small integers.
  const int32_t sum_high = static_cast<int32_t>(reduce_add(high)), sum_low = static_cast<int32_t>(reduce_add(low));
  const_cast<float *>(q.scale)[row] = top / kSteps;
  const_cast<int32_t *>(q.neg128_high)[row] = -kDotBias * sum_high;
  const_cast<int32_t *>(q.neg128_low)[row] = -kDotBias * sum_low;
}

// Row (query, head of the group) of the tile, for all of them.
void gather_queries(const KVLayer &kv, const AttentionConfig &c, const AttentionTile &tile, const Queries &q) {
  const int group = group_size(c), dim = c.padded_dim;
  for (int i = 0; i < tile.num_queries; ++i) {
    const float *heads = tile.queries + static_cast<size_t>(i) * tile.query_stride +
                         static_cast<size_t>(tile.kv_head) * group * dim;
    for (int g = 0; g < group; ++g) {
      const float *x = heads + static_cast<size_t>(g) * dim;
      const int row = i * group + g;
      for (int d = 0; d < dim; d += kLanes) store(const_cast<float *>(q.f32) + q.at(row, d), load(x + d));
      if (kv.format == KVFormat::i8) split_query(x, dim, row, q);
      if (kBf16Dot && kv.format == KVFormat::bf16) {
        for (int d = 0; d < dim; d += kLanes) {
          store_bf16(const_cast<uint16_t *>(q.bf16) + q.at(row, d), load(x + d));
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- keys and values

FW_INLINE const uint8_t *head_of_block(const KVLayer &kv, const int32_t *table, int64_t key, int head) {
  const int64_t block = table[key / kv.block_size];
  return kv.base + static_cast<size_t>(block) * kv.block_stride + static_cast<size_t>(head) * kv.head_stride;
}

// Tiles of the chunk at `begin`; past `end` the last one is repeated, so that every pointer may be read.
void find_tiles(const KVLayer &kv, const int32_t *table, int head, int64_t begin, int64_t end, const uint8_t **k,
                const uint8_t **v) {
  int block = static_cast<int>(static_cast<uint32_t>(begin) / static_cast<uint32_t>(kv.block_size));
  int offset = static_cast<int>(begin) - block * kv.block_size;  // one division a chunk, then steps
  for (int i = 0; i < kChunkTiles; ++i) {
    if (i > 0 && begin + i * kTile >= end) {
      k[i] = k[i - 1], v[i] = v[i - 1];
      continue;
    }
    k[i] = kv.base + static_cast<size_t>(table[block]) * kv.block_stride + static_cast<size_t>(head) * kv.head_stride +
           static_cast<size_t>(offset / kTile) * 2 * kv.tile_bytes;
    v[i] = k[i] + kv.tile_bytes;
    offset += kTile;
    if (offset == kv.block_size) ++block, offset = 0;
  }
}

// Blocks that are not tiled: token after token into tiles in scratch memory.
void copy_tiles(const KVLayer &kv, const AttentionTile &t, int64_t begin, int64_t end, const Scratch &s, ChunkTiles *c) {
  for (int i = 0; i < kChunkTiles; ++i) {
    uint8_t *k = s.tiles + static_cast<size_t>(2 * i) * kv.tile_bytes, *v = k + kv.tile_bytes;
    c->k[i] = c->next_k[i] = k;
    c->v[i] = c->next_v[i] = v;
    for (int slot = 0; slot < kTile; ++slot) {
      const int64_t key = begin + i * kTile + slot;
      if (key >= end) break;
      const uint8_t *stored = head_of_block(kv, t.block_table, key, t.kv_head) +
                              static_cast<size_t>(key % kv.block_size) * 2 * kv.token_bytes;
      const size_t elements = static_cast<size_t>(kv.padded_dim) * element_bytes(kv.format);
      StoredToken key_token{stored, 1.f}, value_token{stored + kv.token_bytes, 1.f};
      if (kv.format == KVFormat::i8) {
        std::memcpy(&key_token.scale, key_token.elements + elements, sizeof(float));
        std::memcpy(&value_token.scale, value_token.elements + elements, sizeof(float));
      }
      put_key(kv.format, key_token, kv.padded_dim, slot, k);
      put_value(kv.format, value_token, kv.padded_dim, slot, v);
    }
  }
}

// Widens a bf16 chunk to float tiles: the numbers are the same, the many rows of a prefill tile then share the work.
void stage_bf16(const ChunkTiles &c, int dim, int tiles, uint8_t *memory, ChunkTiles *out) {
  const size_t tile_floats = static_cast<size_t>(kTile) * dim;
  float *o = reinterpret_cast<float *>(memory);
  for (int i = 0; i < kChunkTiles; ++i) {
    const int from = smaller(i, tiles - 1);
    float *k = o + static_cast<size_t>(2 * from) * tile_floats, *v = k + tile_floats;
    out->k[i] = reinterpret_cast<const uint8_t *>(k);
    out->v[i] = reinterpret_cast<const uint8_t *>(v);
    if (i >= tiles) continue;
    const uint16_t *kp = reinterpret_cast<const uint16_t *>(c.k[i]), *vp = reinterpret_cast<const uint16_t *>(c.v[i]);
    for (int d = 0; d < dim; d += 2) {
      for (int n = 0; n < kTile; n += kLanes) {
        const I32 pairs = load_pairs(kp + 2 * (d / 2 * kTile + n));
        store(k + d * kTile + n, even_of_pairs(pairs));
        store(k + (d + 1) * kTile + n, odd_of_pairs(pairs));
      }
    }
    for (int key = 0; key < kTile; key += 2) {
      for (int d = 0; d < dim; d += kLanes) {
        const I32 pairs = load_pairs(vp + 2 * (static_cast<size_t>(key / 2) * dim + d));
        store(v + static_cast<size_t>(key) * dim + d, even_of_pairs(pairs));
        store(v + static_cast<size_t>(key + 1) * dim + d, odd_of_pairs(pairs));
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- softmax

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
  // Vector n of the chunk, with `other` in place of the keys that are not seen.
  FW_INLINE F32 keep(F32 v, int n, F32 other) const { return keep_lanes(v, begin - n * kLanes, end - n * kLanes, other); }
};
FW_INLINE Visible visible_keys(const AttentionConfig &c, int64_t position, int64_t first, int64_t end) {
  const int64_t lowest = c.sliding_window ? larger(int64_t{0}, position - c.sliding_window + 1) : 0;
  return {static_cast<int>(larger(lowest, first) - first), static_cast<int>(smaller(position + 1, end) - first)};
}

// m := max(m, the row's visible scores), with O and l scaled to it. `Masked`: some keys are not seen.
template <bool Masked>
FW_INLINE void raise_maximum(float *scores, Visible seen, float cap, const States &s, float *lane_sum, int row) {
  F32 largest = set1(kNothing);
  unroll<kChunkVectors>([&](auto n) FW_LAMBDA {
    F32 x = load(scores + n * kLanes);
    if (cap > 0.f) {
      x = mul(set1(cap), tanh_f32(div(x, set1(cap))));
      store(scores + n * kLanes, x);
    }
    if constexpr (Masked) x = seen.keep(x, n, set1(kNothing));
    largest = max_f32(largest, x);
  });
  const float m = reduce_max(largest), before = s.m(row);
  if (m <= before) return;
  s.m(row) = m;
  if (before <= kNothing) return;
  const F32 shrink = exp2_f32(set1(before - m));
  store(lane_sum, mul(load(lane_sum), shrink));
  float *o = s.o(row);
  for (int d = 0; d < s.dim; d += kLanes) store(o + d, mul(load(o + d), shrink));
}

// The scales of a chunk's 8-bit values for the rows that see the keys `seen`: factor[key] turns a probability into steps of
// size `step`, kProbabilitySteps of them for probability 1 and the largest scale. Other keys have factor 0, whatever is in a
// slot that nobody wrote.
constexpr float kProbabilitySteps = 127.f * 128.f;
struct ValueScales {
  F32 factor[kChunkVectors];
  float step;
};
FW_INLINE ValueScales value_scales(const ChunkTiles &c, int dim, Visible seen) {
  ValueScales s;
  F32 largest = set1(0.f);
  unroll<kChunkVectors>([&](auto n) FW_LAMBDA {
    s.factor[n] = seen.keep(load(tile_scales(c.v[n / kTileVectors], dim) + n % kTileVectors * kLanes), n, set1(0.f));
    largest = max_f32(largest, s.factor[n]);
  });
  const float top = reduce_max(largest);
  const F32 inverse = set1(top > 0.f ? kProbabilitySteps / top : 0.f);
  unroll<kChunkVectors>([&](auto n) FW_LAMBDA { s.factor[n] = mul(s.factor[n], inverse); });
  s.step = top / kProbabilitySteps;
  return s;
}

// 2^(score - m) of a row, in place, or for 8-bit values in steps; l grows by their sum.
template <bool Masked, bool Steps>
FW_INLINE void probabilities(const Scratch &s, int row, Visible seen, const ValueScales *scales) {
  float *x = s.scores + row * kChunk, *lane_sum = s.lane_sums + row * kLanes;
  const F32 m = set1(s.part.m(row));
  F32 sum = load(lane_sum);
  unroll<kChunkVectors / 4>([&](auto four) FW_LAMBDA {
    F32 p[4];
    unroll<4>([&](auto i) FW_LAMBDA {
      constexpr int n = 4 * four + i;
      p[i] = exp2_f32(sub(load(x + n * kLanes), m));
      if constexpr (Masked) p[i] = seen.keep(p[i], n, set1(0.f));
      sum = add(sum, p[i]);
      if constexpr (!Steps) store(x + n * kLanes, p[i]);
    });
    if constexpr (Steps) {
      I32 steps[4];
      unroll<4>([&](auto i) FW_LAMBDA { steps[i] = round_to_i32(mul(p[i], scales->factor[4 * four + i])); });
      const int at = row * kChunk + four * 4 * kLanes;
      store_bytes(s.p_high + at, shift_right_7(steps[0]), shift_right_7(steps[1]), shift_right_7(steps[2]), shift_right_7(steps[3]));
      store_bytes(s.p_low + at, low_7_bits(steps[0]), low_7_bits(steps[1]), low_7_bits(steps[2]), low_7_bits(steps[3]));
    }
  });
  store(lane_sum, sum);
  if constexpr (Steps) s.p_step[row] = scales->step;
}

// Scores of a chunk's keys [begin, end) become probabilities, for all rows of the tile. Each of the two passes has no long
// chain through one row, so that several rows are on their way at once.
template <bool Steps>
void softmax(const AttentionConfig &c, const AttentionTile &tile, const ChunkTiles &chunk, int64_t begin, int64_t end,
             const Scratch &s) {
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
  ValueScales all, some;
  if (Steps && end - begin == kChunk) all = value_scales(chunk, c.padded_dim, {0, kChunk});
  for (int i = 0, row = 0; i < tile.num_queries; ++i) {
    const Visible seen = visible_keys(c, tile.first_position + i, begin, end);
    if (Steps && !seen.all()) some = value_scales(chunk, c.padded_dim, seen);
    for (const int last = row + group; row < last; ++row) {
      seen.all() ? probabilities<false, Steps>(s, row, seen, &all) : probabilities<true, Steps>(s, row, seen, &some);
    }
  }
}

// ---------------------------------------------------------------------------------------------- splits

void begin_split(const Scratch &s, int rows) {
  for (int row = 0; row < rows; ++row) {
    std::memset(s.part.o(row), 0, sizeof(float) * static_cast<size_t>(s.part.dim));
    s.part.m(row) = kNothing;
    s.part.l(row) = 0.f;
    store(s.lane_sums + row * kLanes, set1(0.f));
  }
}

void end_split(const Scratch &s, int rows) {
  for (int row = 0; row < rows; ++row) s.part.l(row) = reduce_add(load(s.lane_sums + row * kLanes));
}

// total := total merged with part, one row. The first part is taken over unchanged.
void merge_row(float *total, const float *part, int dim) {
  if (part[dim] <= kNothing) return;
  if (total[dim] <= kNothing) {
    std::memcpy(total, part, sizeof(float) * (static_cast<size_t>(dim) + 2));
    return;
  }
  const float m = larger(total[dim], part[dim]);
  const float keep = exp2_one(total[dim] - m), take = exp2_one(part[dim] - m);
  for (int d = 0; d < dim; d += kLanes) {
    store(total + d, fma(load(part + d), set1(take), mul(load(total + d), set1(keep))));
  }
  total[dim] = m;
  total[dim + 1] = total[dim + 1] * keep + part[dim + 1] * take;
}

void write_out(const AttentionConfig &c, const AttentionTile &tile, const States &states) {
  const int group = group_size(c);
  for (int i = 0; i < tile.num_queries; ++i) {
    float *out = tile.out + static_cast<size_t>(i) * tile.out_stride + static_cast<size_t>(tile.kv_head) * group * c.head_dim;
    for (int g = 0; g < group; ++g) {
      float *o = states.o(i * group + g);
      const F32 inverse = set1(1.f / states.l(i * group + g));
      for (int d = 0; d < c.padded_dim; d += kLanes) store(o + d, mul(load(o + d), inverse));
      std::memcpy(out + static_cast<size_t>(g) * c.head_dim, o, sizeof(float) * static_cast<size_t>(c.head_dim));
    }
  }
}

// ---------------------------------------------------------------------------------------------- one chunk

// Keys [begin, end) of one chunk for all rows of the tile; `begin` is a multiple of kChunk.
void attend_chunk(const KVLayer &kv, const AttentionConfig &c, const AttentionTile &tile, int64_t begin, int64_t end,
                  const Scratch &s) {
  const int group = group_size(c), rows = tile.num_queries * group, dim = c.padded_dim;
  const int count = static_cast<int>(end - begin), tiles = (count + kTile - 1) / kTile;
  const bool stage = rows >= kStageRows;

  ChunkTiles chunk;
  if (kv.tiled) {
    find_tiles(kv, tile.block_table, tile.kv_head, begin, end, chunk.k, chunk.v);
    if (begin + kChunk < tile.key_end) {
      find_tiles(kv, tile.block_table, tile.kv_head, begin + kChunk, smaller(begin + 2 * kChunk, tile.key_end), chunk.next_k,
                 chunk.next_v);
    } else if (tile.next.block_table) {
      const int64_t first = tile.next.key_begin / kChunk * kChunk;
      find_tiles(kv, tile.next.block_table, tile.next.kv_head, first, smaller(first + kChunk, tile.next.key_end),
                 chunk.next_k, chunk.next_v);
    } else {
      for (int i = 0; i < kChunkTiles; ++i) chunk.next_k[i] = chunk.k[i], chunk.next_v[i] = chunk.v[i];
    }
  } else {
    copy_tiles(kv, tile, begin, end, s, &chunk);
    for (int i = tiles; i < kChunkTiles; ++i) chunk.k[i] = chunk.k[tiles - 1], chunk.v[i] = chunk.v[tiles - 1];
  }

  ChunkTiles staged = chunk;
  const bool bf16_as_f32 = kv.format == KVFormat::bf16 && stage && !kBf16Dot;
  if (bf16_as_f32) stage_bf16(chunk, dim, tiles, s.staged, &staged);

  if (kv.format == KVFormat::f32 || bf16_as_f32) {
    chunk_scores<ScoresF32>(s.q, dim, rows, staged, tiles, s.scores);
  } else if (kv.format == KVFormat::bf16) {
    chunk_scores<ScoresBf16>(s.q, dim, rows, chunk, tiles, s.scores);
  } else {
    chunk_scores<ScoresI8>(s.q, dim, rows, chunk, tiles, s.scores);
  }

  const bool i8 = kv.format == KVFormat::i8;
  i8 ? softmax<true>(c, tile, chunk, begin, end, s) : softmax<false>(c, tile, chunk, begin, end, s);

  float *o = s.part.o(0);
  const size_t stride = s.part.stride();
  const Probabilities p{s.scores, s.p_high, s.p_low, s.p_step};
  if (i8) return chunk_values<ValuesI8>(p, dim, rows, chunk, count, o, stride);
  if (kv.format == KVFormat::f32 || bf16_as_f32) return chunk_values<ValuesF32>(p, dim, rows, staged, count, o, stride);
  chunk_values<ValuesBf16>(p, dim, rows, chunk, count, o, stride);
}

}  // namespace

int attention_queries(const AttentionConfig &c) { return larger(1, kTargetRows / group_size(c)); }

size_t attention_scratch_bytes(const AttentionConfig &c) { return carve(c, nullptr, nullptr); }

void attend(const KVLayer &kv, const AttentionConfig &c, const AttentionTile &tile, void *memory) {
  Scratch s;
  carve(c, memory, &s);
  const int rows = tile.num_queries * group_size(c);
  gather_queries(kv, c, tile, s.q);
  for (int row = 0; row < rows; ++row) s.total.m(row) = kNothing;

  for (int64_t split = tile.key_begin / kSplit * kSplit; split < tile.key_end; split += kSplit) {
    const int64_t split_end = smaller(split + kSplit, tile.key_end);
    begin_split(s, rows);
    const int64_t first = larger(split, tile.key_begin / kChunk * kChunk);
    for (int64_t begin = first; begin < split_end; begin += kChunk) {
      attend_chunk(kv, c, tile, begin, smaller(begin + kChunk, split_end), s);
    }
    end_split(s, rows);
    for (int row = 0; row < rows; ++row) merge_row(s.total.o(row), s.part.o(row), c.padded_dim);
  }
  if (tile.partial) {
    std::memcpy(tile.partial, s.total.data, sizeof(float) * static_cast<size_t>(rows) * s.total.stride());
  } else {
    write_out(c, tile, s.total);
  }
}

void merge_splits(const AttentionConfig &c, const AttentionTile &tile, const float *partials, int num_splits,
                  size_t split_stride) {
  const States states{const_cast<float *>(partials), c.padded_dim};
  const int rows = tile.num_queries * group_size(c);
  for (int split = 1; split < num_splits; ++split) {
    const States part{const_cast<float *>(partials) + static_cast<size_t>(split) * split_stride, c.padded_dim};
    for (int row = 0; row < rows; ++row) merge_row(states.o(row), part.o(row), c.padded_dim);
  }
  write_out(c, tile, states);
}

// `scratch` holds at least padded_dim * 4 bytes.
void store_kv(const KVLayer &kv, int64_t slot, int head, const float *k, const float *v, void *scratch) {
  uint8_t *buffer = static_cast<uint8_t *>(scratch);
  const size_t offset = static_cast<size_t>(slot % kv.block_size);
  uint8_t *block = kv.base + static_cast<size_t>(slot / kv.block_size) * kv.block_stride +
                   static_cast<size_t>(head) * kv.head_stride;
  if (kv.tiled) {
    uint8_t *tile = block + offset / kTile * 2 * kv.tile_bytes;
    const int in_tile = static_cast<int>(offset % kTile);
    put_key(kv.format, encode(kv.format, k, kv.padded_dim, true, buffer), kv.padded_dim, in_tile, tile);
    put_value(kv.format, encode(kv.format, v, kv.padded_dim, false, buffer), kv.padded_dim, in_tile, tile + kv.tile_bytes);
    return;
  }
  const size_t elements = static_cast<size_t>(kv.padded_dim) * element_bytes(kv.format);
  const float *both[2] = {k, v};
  for (int i = 0; i < 2; ++i) {
    uint8_t *out = block + (2 * offset + static_cast<size_t>(i)) * kv.token_bytes;
    const StoredToken token = encode(kv.format, both[i], kv.padded_dim, i == 0, buffer);
    std::memcpy(out, token.elements, elements);
    if (kv.format == KVFormat::i8) std::memcpy(out + elements, &token.scale, sizeof(float));
  }
}

}  // namespace foreword::kernels::FOREWORD_LEVEL
