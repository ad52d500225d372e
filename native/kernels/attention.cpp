// Attention of a tile of query rows over the keys of one request, in chunks of 64 keys with an online softmax:
//
//   for each split of 512 keys:  m, l, O = -inf, 0, 0
//       for each chunk of 64 keys:   S = Q Kᵀ;  m' = ⌈max S⌉ if max S > m + e, else m;  P = 2^(S - m')
//                                    l = l 2^(m - m') + Σ P;  O = O 2^(m - m') + P V;  m = m'
//       merge (m, l, O) into the row's total
//   out = O / (l + 2^(sink - m)), without a sink O / l
//
// Powers of 2 instead of e: log2 e is part of the scale of the queries. An integer m makes the scaling of l and O
// exact, and the excess e (max_excess) makes it rare: P may be more than 1.
//
// Chunks and splits start at absolute multiples of their sizes, and a row uses only its visible keys of a chunk. So a
// query's result depends on its own keys alone: not on the other queries, on how a prompt was divided into prefill
// chunks, nor on whether its splits ran one after the other or on several threads.

#include "kernels/isa_functions.h"

#include "kernels/attention_keys.h"
#include "kernels/attention_softmax.h"
#if defined(FOREWORD_SIMD_AMX)
namespace foreword::kernels::avx512_bf16 {
std::remove_pointer_t<decltype(Isa::attend)> attend;
std::remove_pointer_t<decltype(Isa::index_scores)> index_scores;
}
#endif

namespace foreword::kernels::FOREWORD_ISA {
namespace {

constexpr int kTargetRows = 96;  // rows of a prefill tile: keys and values are unpacked once for all of them
constexpr int kStageRows = 12;   // from this many rows on, bf16 keys and values are widened to floats first
constexpr int kQueriesAhead = 2048;  // numbers of queries between those that are read and those that are prefetched
int max_rows(const AttentionConfig &c) { return attention_queries(c) * group_size(c); }

// ---------------------------------------------------------------------------------------------- queries

// In 8 bit, rotated like the keys it meets. x: scratch memory for its numbers.
void quantise_query(const float *query, int dim, int row, const Queries &q, float *x) {
  const float factor = rotate_head(query, dim, x);
  const auto [top, neg_bias_sum] = round_to_s8(x, dim, [&](int d) FW_LAMBDA { return q.i8 + q.at(row, d); });
  q.scale[row] = top / (127.f * factor);
  q.neg_bias[row] = neg_bias_sum;
}

// Copies all rows (query, head of the group) of the tile in the form that the KV format takes.
void gather_queries(const KVLayer &kv, const AttentionConfig &c, const AttentionTile &tile, const AttentionScratch &s) {
  const Queries &q = s.q;
  const int group = group_size(c), dim = c.padded_dim;
  for (int i = 0; i < tile.num_queries; ++i) {
    const float *heads = tile.queries + size_t(i) * tile.query_stride +
                         size_t(tile.kv_head) * group * dim;
    for (int g = 0; g < group; ++g) {
      const float *x = heads + size_t(g) * dim;
      const int row = i * group + g;
      if (kv.format == KVFormat::i8) {
        quantise_query(x, dim, row, q, s.part.o(0));
        continue;
      }
      for (int d = 0; d < dim; d += kLanes) {
        prefetch<1>(x + d + kQueriesAhead);
        if (kBf16Dot && kv.format == KVFormat::bf16) {
          store_bf16(q.bf16 + q.at(row, d), load(x + d));
        } else {
          store(q.f32 + q.at(row, d), load(x + d));
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------- splits

void begin_split(const AttentionScratch &s, int row) {
  for (int d = 0; d < s.part.dim; d += kLanes) store(s.part.o(row) + d, set1(0.f));
  s.part.m(row) = kNothing;
  store(s.lane_sums + row * kLanes, set1(0.f));
}

// total := total merged with part, one row. The first part is copied unchanged.
void merge_row(float *total, const float *part, int dim) {
  if (part[dim] <= kNothing) return;
  if (total[dim] <= kNothing) {
    for (int d = 0; d <= dim; d += kLanes) store(total + d, load(part + d));
    return;
  }
  const float m = larger(total[dim], part[dim]);
  const F32 keep = whole_exp2(total[dim] - m), take = whole_exp2(part[dim] - m);
  for (int d = 0; d <= dim; d += kLanes) {  // O, and l in the last vector
    store(total + d, fma(load(part + d), take, mul(load(total + d), keep)));
  }
  total[dim] = m;
}

// Merges the rows into the totals; they begin the next split. The rows of a tile's only split are its totals.
void end_split(const AttentionScratch &s, int rows, bool is_only) {
  for (int row = 0; row < rows; ++row) {
    s.part.l(row) = reduce_add(load(s.lane_sums + row * kLanes));
    if (is_only) continue;
    merge_row(s.total.o(row), s.part.o(row), s.part.dim);
    begin_split(s, row);
  }
}

void write_out(const AttentionConfig &c, const AttentionTile &tile, const States &states) {
  const int group = group_size(c);
  for (int i = 0; i < tile.num_queries; ++i) {
    float *out = tile.out + size_t(i) * tile.out_stride + size_t(tile.kv_head) * group * c.value_dim;
    for (int g = 0; g < group; ++g) {
      float *o = states.o(i * group + g);
      float sum = states.l(i * group + g);
      if (c.sinks) sum += std::exp2(c.sinks[tile.kv_head * group + g] * kLog2E - states.m(i * group + g));
      const F32 inverse = set1(1.f / sum);
      for (int d = 0; d < c.padded_value; d += kLanes) store(o + d, mul(load(o + d), inverse));
      if (c.rotated_values) {  // the rotation is its own inverse, times the square of its factor
        const F32 factor = set1(1.f / rotate_head(o, c.padded_value, o));
        for (int d = 0; d < c.padded_value; d += kLanes) store(o + d, mul(load(o + d), factor));
      }
      std::memcpy(out + size_t(g) * c.value_dim, o, sizeof(float) * size_t(c.value_dim));
    }
  }
}

// ---------------------------------------------------------------------------------------------- one chunk

// The tiles of keys [begin, end): of those in chosen, if there are any. Past `end` the last one is repeated.
ChunkTiles chunk_tiles(const KVLayer &kv, const AttentionTile &tile, int64_t begin, int64_t end,
                       const AttentionScratch &s) {
  ChunkTiles chunk;
  if (kv.tiled && !tile.chosen) {
    find_tiles(kv, tile.block_table, tile.kv_head, begin, end, chunk.k, chunk.v);
    find_ahead(kv, tile, begin, &chunk);
    return chunk;
  }
  if (tile.chosen) {
    gather_tiles(kv, tile, begin, end, s, &chunk);
  } else {
    copy_tiles(kv, tile, begin, end, s, &chunk);
  }
  const int tiles = int(end - begin + kTile - 1) / kTile;
  for (int i = tiles; i < kChunkTiles; ++i) chunk.k[i] = chunk.k[tiles - 1], chunk.v[i] = chunk.v[tiles - 1];
  return chunk;
}

#if defined(FOREWORD_SIMD_AMX)
// One chunk, row tile after row tile: what is stored is read from the first-level cache.
template <class Tiles>
void attend_tiles(const Tiles tiles, const AttentionConfig &c, const AttentionTile &tile, const Keys &keys, int rows) {
  for (int row = 0; row < rows; row += kTileRows) {
    tiles.scores(row);
    softmax<Tiles::kForm>(c, tile, tiles.tiles, keys, tiles.s, row, smaller(row + kTileRows, rows));
    if (row == 0) tiles.copy();
    tiles.add_values(row);
  }
}
#else
bool reads_bf16_as_f32(const KVLayer &kv, int rows) {
  return kv.format == KVFormat::bf16 && rows >= kStageRows && !kBf16Dot;
}

// Writes the scores of all rows to s.scores. Returns the chunk; of floats, if `reads_bf16_as_f32`.
ChunkTiles make_scores(const KVLayer &kv, const AttentionScratch &s, int dim, int value_dim, int rows, int tiles,
                       const ChunkTiles &chunk) {
  ChunkTiles read = chunk;
  const bool bf16_as_f32 = reads_bf16_as_f32(kv, rows);
  if (bf16_as_f32) stage_bf16(chunk, dim, value_dim, tiles, s.staged, &read);
  if (kv.format == KVFormat::f32 || bf16_as_f32) {
    chunk_scores<ScoresF32>(s.q, dim, rows, read, tiles, s.scores);
  } else if (kv.format == KVFormat::bf16) {
    chunk_scores<ScoresBf16>(s.q, dim, rows, read, tiles, s.scores);
  } else {
    chunk_scores<ScoresI8>(s.q, dim, rows, read, tiles, s.scores);
  }
  return read;
}
#endif

// Keys [begin, end) of one chunk for all rows of the tile; `begin` is a multiple of kChunk.
void attend_chunk(const KVLayer &kv, const AttentionConfig &c, const AttentionTile &tile, int64_t begin, int64_t end,
                  const AttentionScratch &s) {
  const int group = group_size(c), rows = tile.num_queries * group, dim = c.padded_dim, value_dim = c.padded_value;
  const int count = int(end - begin), tiles = (count + kTile - 1) / kTile;

  ChunkTiles chunk = chunk_tiles(kv, tile, begin, end, s);
  if (kv.parts == 1) make_values(kv, tiles, s, &chunk);
  const Keys keys = chunk_keys(c, tile, begin, end);
#if defined(FOREWORD_SIMD_AMX)
  if (kv.format == KVFormat::i8) {
    attend_tiles(I8Tiles(s, dim, value_dim, count, chunk), c, tile, keys, rows);
  } else {
    attend_tiles(Bf16Tiles(s, dim, value_dim, count, chunk), c, tile, keys, rows);
  }
#else
  float *o = s.part.o(0);
  const size_t stride = s.part.stride();
  const int first = c.first_value / kLanes * kLanes;
  const bool bf16_as_f32 = reads_bf16_as_f32(kv, rows);
  const ChunkTiles staged = make_scores(kv, s, dim, value_dim, rows, tiles, chunk);

  const Probabilities p{s.scores, s.p_pairs, s.p_u8, s.p_step};
  if (kv.format == KVFormat::i8) {
    softmax<Form::steps>(c, tile, chunk, keys, s, 0, rows);
    chunk_values<ValuesI8>(p, value_dim, first, rows, chunk, count, o, stride);
  } else if (kv.format == KVFormat::f32 || bf16_as_f32) {
    softmax<Form::floats>(c, tile, chunk, keys, s, 0, rows);
    chunk_values<ValuesF32>(p, value_dim, first, rows, staged, count, o, stride);
  } else {
    softmax<kBf16Dot ? Form::pairs : Form::floats>(c, tile, chunk, keys, s, 0, rows);
    chunk_values<ValuesBf16>(p, value_dim, first, rows, chunk, count, o, stride);
  }
#endif
}

}  // namespace

int attention_queries(const AttentionConfig &c) { return larger(1, kTargetRows / group_size(c)); }

size_t attention_scratch_bytes(const AttentionConfig &c) { return carve(c, max_rows(c), nullptr, nullptr); }

void attend(const KVLayer &kv, const AttentionConfig &c, const AttentionTile &tile, void *memory) {
  AttentionScratch s;
  carve(c, max_rows(c), memory, &s);
  const int rows = tile.num_queries * group_size(c);
#if defined(FOREWORD_SIMD_AMX)
  const bool adds_to_sums = c.slopes && kv.format == KVFormat::i8;  // the scores by tiles are integers
  const bool fits = tiles_fit(kv.format, c.padded_dim, rows) && tiles_fit(kv.format, c.padded_value, rows);
  if (adds_to_sums || !fits) return avx512_bf16::attend(kv, c, tile, memory);
  set_attention_shapes(rows);
#endif
  gather_queries(kv, c, tile, s);
  for (int row = 0; row < rows; ++row) {
    s.total.m(row) = kNothing;
    begin_split(s, row);
  }

  const int64_t first_split = tile.key_begin / kSplit * kSplit;
  const bool is_only = first_split + kSplit >= tile.key_end;
  const States &total = is_only ? s.part : s.total;
  for (int64_t split = first_split; split < tile.key_end; split += kSplit) {
    const int64_t split_end = smaller(split + kSplit, tile.key_end);
    const int64_t first = larger(split, tile.key_begin / kChunk * kChunk);
    for (int64_t begin = first; begin < split_end; begin += kChunk) {
      attend_chunk(kv, c, tile, begin, smaller(begin + kChunk, split_end), s);
    }
    end_split(s, rows, is_only);
  }
#if defined(FOREWORD_SIMD_AMX)
  release_tiles();
#endif
  if (tile.partial) {
    std::memcpy(tile.partial, total.data, sizeof(float) * size_t(rows) * total.stride());
  } else {
    write_out(c, tile, total);
  }
}

void index_scores(const KVLayer &kv, const AttentionConfig &c, const AttentionTile &tile, const float *weights,
                  size_t weight_stride, float *scores, size_t score_stride, void *memory) {
#if defined(FOREWORD_SIMD_AMX)  // the scores of all rows of a chunk are in memory together there, not in tiles of rows
  avx512_bf16::index_scores(kv, c, tile, weights, weight_stride, scores, score_stride, memory);
#else
  AttentionScratch s;
  carve(c, max_rows(c), memory, &s);
  gather_queries(kv, c, tile, s);
  const int heads = c.num_heads, rows = tile.num_queries * heads, dim = c.padded_dim;
  for (int64_t begin = tile.key_begin; begin < tile.key_end; begin += kChunk) {
    const int64_t end = smaller(begin + kChunk, tile.key_end);
    const int tiles = int(end - begin + kTile - 1) / kTile;
    make_scores(kv, s, dim, 0, rows, tiles, chunk_tiles(kv, tile, begin, end, s));
    for (int i = 0; i < tile.num_queries; ++i) {
      const float *of_heads = s.scores + i * heads * kChunk, *weight = weights + size_t(i) * weight_stride;
      for (int n = 0; n < tiles * kTile; n += kLanes) {
        F32 sum = set1(0.f);
        for (int h = 0; h < heads; ++h) {
          sum = fma(set1(weight[h]), max_f32(load(of_heads + h * kChunk + n), set1(0.f)), sum);
        }
        store(scores + size_t(i) * score_stride + begin + n, sum);
      }
    }
  }
#endif
}

void merge_splits(const AttentionConfig &c, const AttentionTile &tile, int num_splits, size_t split_stride) {
  const States total{tile.partial, c.padded_value};
  const int rows = tile.num_queries * group_size(c);
  for (int split = 1; split < num_splits; ++split) {
    const States part{tile.partial + size_t(split) * split_stride, c.padded_value};
    for (int row = 0; row < rows; ++row) merge_row(total.o(row), part.o(row), c.padded_value);
  }
  write_out(c, tile, total);
}

}  // namespace foreword::kernels::FOREWORD_ISA
