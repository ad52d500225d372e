#include "kernels/forward/index_stage.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "kernels/forward/attention_plan.h"

namespace foreword::kernels {
namespace {

constexpr int kBatchRows = 16;             // rows whose scores are in memory at once, per thread, at most
constexpr size_t kBatchScores = 1 << 22;   // the scores of these rows, at most, but for a row per thread
constexpr int64_t kUnitKeys = 1024;        // keys whose scores are one piece of work

// An integer that is larger for a larger number. Both zeros have one.
int32_t rank_of(float x) {
  int32_t bits;
  x = x == 0.f ? 0.f : x;
  std::memcpy(&bits, &x, sizeof bits);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// Writes the places of the `topk` largest of `count` scores to `out`, upwards. Of equal ones the first come first.
// ranks: memory of `count` numbers.
void choose_largest(const float *scores, int64_t count, int topk, int32_t *ranks, int32_t *out) {
  for (int64_t i = 0; i < count; ++i) ranks[i] = rank_of(scores[i]);
  std::nth_element(ranks, ranks + topk - 1, ranks + count, std::greater<int32_t>());
  const int32_t least = ranks[topk - 1];
  int64_t equal = topk - std::count_if(ranks, ranks + topk, [&](int32_t rank) { return rank > least; });
  int32_t *const end = out + topk;
  for (int64_t i = 0; out < end; ++i) {
    const int32_t rank = rank_of(scores[i]);
    if (rank > least || (rank == least && equal-- > 0)) *out++ = int32_t(i);
  }
}

}  // namespace

IndexStage::IndexStage(PassContext &context, const EmbeddingStage &embedding)
    : ctx_(context),
      embedding_(embedding),
      config_(context.model.config.index),
      shape_(HeadShape::of(1, config_.head_dim, config_.num_heads, config_.head_dim)),
      queries_(config_.num_heads * config_.head_dim),
      rotated_(config_.num_heads * shape_.padded_dim),
      scratch_(size_t(context.pool.size())),
      key_(scratch_.size()),
      order_(scratch_.size()) {
  if (!config_.topk) return;
  for (Buffer<float> &key : key_) key.reserve(size_t(2 * shape_.padded_dim));
  for (Buffer<uint8_t> &scratch : scratch_) scratch.reserve(ctx_.isa.attention_scratch_bytes(attention()));
}

AttentionConfig IndexStage::attention() const {
  return {shape_.num_heads, 1, shape_.padded_dim, shape_.padded_dim, shape_.padded_dim, 0.f, 0};
}

void IndexStage::reserve() {
  if (!config_.topk) return;
  const ForwardInput &in = ctx_.input;
  rows_.clear();
  int64_t longest = 0;
  for (int req = 0; req < in.num_reqs; ++req) {
    for (int token = dense_end(in, req, config_.topk); token < in.query_start_loc[req + 1]; ++token) {
      rows_.push_back({req, token});
      longest = std::max(longest, in.positions[token] + 1);
    }
  }
  if (rows_.empty()) return;
  score_stride_ = size_t(longest + kChunk - 1) / kChunk * kChunk;
  const int num_threads = ctx_.pool.size();
  batch_ = std::max(num_threads, int(std::min(size_t(kBatchRows * num_threads), kBatchScores / score_stride_)));
  add_units();
  queries_.reserve(in.num_tokens);
  rotated_.reserve(int(rows_.size()));
  scores_.reserve(score_stride_ * std::min(rows_.size(), size_t(batch_)));
  chosen_.reserve(rows_.size() * size_t(config_.topk));
  for (Buffer<int32_t> &order : order_) order.reserve(size_t(longest));
}

void IndexStage::add_units() {
  units_.clear(), first_units_.clear();
  const int most = ctx_.isa.attention_queries(attention()), num_rows = int(rows_.size());
  for (int row = 0, count; row < num_rows; row += count) {
    if (row % batch_ == 0) first_units_.push_back(int(units_.size()));
    const int req = rows_[size_t(row)].req, end = std::min({num_rows, row + most, (row / batch_ + 1) * batch_});
    for (count = 1; row + count < end && rows_[size_t(row + count)].req == req;) ++count;
    const int64_t keys = ctx_.input.positions[rows_[size_t(row + count - 1)].token] + 1;
    for (int64_t begin = 0; begin < keys; begin += kUnitKeys) {
      units_.push_back({row, count, begin, std::min(begin + kUnitKeys, keys)});
    }
  }
  first_units_.push_back(int(units_.size()));
}

const float *IndexStage::weights(const Layer &layer, int token) const {
  return ctx_.first_row(layer, token) + layer.qkv.parts[3].offset;
}

void IndexStage::store_keys(int thread, const Layer &layer) {
  const KVLayer kv = ctx_.model.kv.index_layer(layer.slot);
  const int64_t *slots = ctx_.input.groups[size_t(layer.group)].slot_mapping;
  const Indexer &own = *layer.latent->indexer;
  float *key = key_[size_t(thread)].data(), *scratch = key + shape_.padded_dim;
  std::memset(key, 0, sizeof(float) * size_t(shape_.padded_dim));
  ctx_.pool.divide(thread, ctx_.pool.all(thread), ctx_.input.num_tokens, 1, [&](Share part, int) {
    for (int token = part.begin; token < part.end; ++token) {
      if (slots[token] < 0) continue;
      const float *from = ctx_.first_row(layer, token) + layer.qkv.parts[2].offset;
      ctx_.isa.make_head({config_.head_dim, from, nullptr, own.norm, nullptr, config_.norm_eps,
                          embedding_.rotary(layer.rope, token), 1.f, true, own.norm_bias},
                         key);
      ctx_.isa.store_kv(kv, slots[token], 0, key, nullptr, scratch);
    }
  });
}

void IndexStage::choose(int thread, const Layer &layer) {
  const ForwardInput &in = ctx_.input;
  const KVLayer kv = ctx_.model.kv.index_layer(layer.slot);
  const int num_rows = int(rows_.size()), heads = config_.num_heads, dim = config_.head_dim;
  const ThreadPool::Team all = ctx_.pool.all(thread);
  ctx_.pool.divide(thread, all, num_rows, 1, [&](Share part, int) {
    for (int row = part.begin; row < part.end; ++row) {
      const int token = rows_[size_t(row)].token;
      const RotaryRow rotary = embedding_.rotary(layer.rope, token);
      for (int head = 0; head < heads; ++head) {
        ctx_.isa.make_head({dim, queries_.row(token) + head * dim, nullptr, nullptr, nullptr, 0.f, rotary, 1.f},
                           rotated_.row(row) + head * shape_.padded_dim);
      }
    }
  });
  ctx_.pool.barrier();

  for (int first = 0, nth = 0; first < num_rows; first += batch_, ++nth) {
    const int begin = first_units_[size_t(nth)], count = first_units_[size_t(nth) + 1] - begin;
    auto scores = [&](int row) { return scores_.data() + size_t(row - first) * score_stride_; };
    ctx_.pool.divide(thread, all, count, 1, [&](Share part, int) {
      for (int i = part.begin; i < part.end; ++i) {
        const Unit &unit = units_[size_t(begin + i)];
        const Row &row = rows_[size_t(unit.row)];
        AttentionTile tile{};
        tile.num_queries = unit.count;
        tile.queries = rotated_.row(unit.row);
        tile.query_stride = size_t(rotated_.stride());
        tile.block_table = in.groups[size_t(layer.group)].blocks_of(in.idx_mapping[row.req]);
        tile.key_begin = unit.begin;
        tile.key_end = unit.end;
        ctx_.isa.index_scores(kv, attention(), tile, weights(layer, row.token), size_t(layer.qkv.stride),
                              scores(unit.row), score_stride_, scratch_[size_t(thread)].data());
      }
    });
    ctx_.pool.barrier();
    ctx_.pool.divide(thread, all, std::min(batch_, num_rows - first), 1, [&](Share part, int) {
      for (int row = first + part.begin; row < first + part.end; ++row) {
        choose_largest(scores(row), in.positions[rows_[size_t(row)].token] + 1, config_.topk,
                       order_[size_t(thread)].data(), chosen_.data() + size_t(row) * size_t(config_.topk));
      }
    });
    ctx_.pool.barrier();
  }
}

}  // namespace foreword::kernels
