#include "kernels/forward/attention_stage.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace foreword::kernels {
namespace {

std::vector<const LowRank *> added_products(const Model &model) {
  std::vector<const LowRank *> all;
  for (const Layer &layer : model.layers) all.push_back(&layer.added);
  return all;
}

}  // namespace

AttentionStage::AttentionStage(PassContext &context, const EmbeddingStage &embedding)
    : ctx_(context),
      embedding_(embedding),
      latent_(context, embedding),
      index_(context, embedding),
      added_(context, added_products(context.model)),
      windows_(size_t(context.model.config.num_groups)),
      shapes_(windows_.size()),
      plans_(windows_.size()),
      next_tasks_(context.model.layers.size() * size_t(context.pool.num_teams())),
      scratch_(size_t(context.pool.size())) {
  for (const Layer &layer : ctx_.model.layers) {
    if (!layer.has_attention()) continue;
    windows_[size_t(layer.group)] = {layer.sliding_window, layer.chunked, layer.skips_spans};
    shapes_[size_t(layer.group)] = layer.heads;
    has_whole_ = has_whole_ || is_whole(layer);
    layer.o.add_kinds(kinds_);
  }
  for (const HeadShape &shape : ctx_.model.heads) {
    rows_.push_back({FloatRows(shape.num_heads * shape.padded_dim), FloatRows(shape.num_heads * shape.value_dim),
                     shape.value_dim != shape.padded_dim});
    const int tile_rows = ctx_.isa.attention_queries(config(shape, {0})) * shape.per_key();
    partial_stride_ = std::max(partial_stride_, size_t(tile_rows) * size_t(shape.padded_value + kStateExtra));
    const int widest = std::max(shape.padded_dim, shape.padded_value);
    for (Scratch &scratch : scratch_) scratch.key_value.reserve(size_t(3 * widest));
  }
}

void AttentionStage::reserve() {
  const ForwardInput &in = ctx_.input;
  const ModelConfig &c = ctx_.model.config;
  int num_partials = 0, values = 0;
  for (size_t g = 0; g < plans_.size(); ++g) {
    if (windows_[g].size < 0) continue;
    HeadShape shape = ctx_.model.heads[size_t(shapes_[g])];
    const int max_queries = ctx_.isa.attention_queries(config(shape, {0}));
    AttentionPlan &plan = plans_[g];
    plan_attention(in, max_queries, windows_[g], shape.num_kv_heads, ctx_.pool.size(), c.index.topk, plan);
    for (int parts = 2; c.latent.kv_rank && parts <= c.num_heads; ++parts) {
      if (int(plan.tasks.size()) * shape.num_kv_heads >= ctx_.pool.size()) break;
      if (c.num_heads % parts == 0) shape.num_kv_heads = parts;
    }
    plan.num_kv_heads = shape.num_kv_heads;
    for (Scratch &scratch : scratch_) scratch.attend.reserve(ctx_.isa.attention_scratch_bytes(config(shape, {0})));
    num_partials = std::max(num_partials, plan.num_partials * plan.num_kv_heads);
  }
  for (std::atomic<int> &next : next_tasks_) next.store(0, std::memory_order_relaxed);
  ctx_.first.reserve(ctx_.part_tokens(has_whole_));
  for (size_t i = 0; i < rows_.size(); ++i) {
    rows_[i].queries.reserve(in.num_tokens);
    if (rows_[i].is_apart) rows_[i].own_out.reserve(in.num_tokens);
    const HeadShape &shape = ctx_.model.heads[i];
    values = std::max(values, shape.num_heads * std::max(shape.value_dim, c.latent.value_dim));
  }
  o_input_.reserve(in.num_tokens, values, ctx_.with_loras(kinds_), ctx_.pool.size());
  latent_.reserve();
  index_.reserve();
  added_.reserve();
  partials_.reserve(size_t(num_partials) * partial_stride_);
}

void AttentionStage::run(int thread, int layer_index) {
  const Layer &layer = ctx_.model.layers[size_t(layer_index)];
  for (int i = 0, parts = ctx_.num_parts(is_whole(layer)); i < parts; ++i) {
    const Share tokens = ctx_.part(i, parts);
    if (!layer.takes_qkv) project(thread, layer, tokens, i + 1 < parts ? layer.qkv : layer.o);
    if (layer.parallel_mlp && layer.mlp_norm) ctx_.norm_rows(thread, layer.mlp_norm, tokens);
    ctx_.clock.finish(thread, Stage::qkv);

    if (makes_rows()) {
      make_rows(thread, layer, tokens);
      ctx_.pool.barrier();
    }
    if (layer.latent) {
      const bool chooses = layer.latent->indexer && index_.is_active();
      latent_.make_queries(thread, layer, ctx_.model.config.query_scale * kLog2E,
                           rows_[size_t(layer.heads)].queries, chooses ? &index_.queries() : nullptr);
      store_latent(thread, layer);
      if (layer.latent->indexer) index_.store_keys(thread, layer);
      if (chooses) {
        ctx_.pool.barrier();
        index_.choose(thread, layer);
      }
    } else {
      rotate_and_store(thread, layer, tokens);
    }
    ctx_.pool.barrier();
    ctx_.clock.finish(thread, Stage::rope);
  }

  attend(thread, layer, next_tasks_[size_t(layer_index * ctx_.pool.num_teams() + ctx_.pool.team(thread).group)]);
  ctx_.pool.barrier();
  const FloatRows &out = rows_[size_t(layer.heads)].out();
  const FloatRows &values = layer.latent ? latent_.expand(thread, layer, out) : out;
  if (layer.gated) {
    apply_gate(thread, layer, values);
    ctx_.pool.barrier();
  }
  ctx_.clock.finish(thread, Stage::attention);

  const Linear *next = layer.mlp ? &layer.mlp->first() : nullptr;
  ctx_.add_product(thread, layer.o, o_input_, values, layer.o_bias, layer.post_attn_norm, next, layer.inner_norm);
  ctx_.clock.finish(thread, Stage::o);
}

// The first product of these tokens. `next`: the one that follows.
void AttentionStage::project(int thread, const Layer &layer, Share tokens, const Linear &next) {
  const int count = tokens.end - tokens.begin;
  const ActivationSet in = ctx_.input_rows(thread, layer, tokens);
  const LoraRows loras = ctx_.shrink(thread, {&layer.qkv, &layer.added.low}, in);
  ctx_.products.linear(thread, layer.qkv, in, {0, count}, ctx_.first.data(), Store::assign, &next, loras);
  added_.begin(thread, layer.added, in, count, loras, int(layer.qkv.parts.size()));
  ctx_.pool.barrier();
  added_.add(thread, layer.added, count, ctx_.first.data());
  ctx_.add_input_bias(thread, layer, ctx_.first.data());
}

Share AttentionStage::heads_of(int thread, const HeadShape &shape) const {
  return team_share(shape.num_kv_heads, ctx_.pool, ctx_.pool.team(thread).group);
}

// Returns whether make_rows is called before heads are made of the rows.
bool AttentionStage::makes_rows() const {
  return ctx_.model.config.joint_qk_norm || ctx_.model.config.clip_qkv > 0.f;
}

// This thread's share of the rows: with biases, after norms of all heads together, and within the limit.
void AttentionStage::make_rows(int thread, const Layer &layer, Share tokens) {
  const float limit = ctx_.model.config.clip_qkv;
  const HeadShape &shape = ctx_.model.heads_of(layer);
  const Share share = share_of(tokens.end - tokens.begin, thread, ctx_.pool.size());
  auto make = [&](float *row, Vector bias, Vector norm, int size) {
    for (int i = 0; bias && i < size; ++i) row[i] += bias[i];
    if (norm) ctx_.isa.norm_parts(row, norm, 0, 1, size, layer.qk_eps, row);
    for (int i = 0; limit > 0.f && i < size; ++i) row[i] = std::clamp(row[i], -limit, limit);
  };
  for (int r = share.begin; r < share.end; ++r) {
    float *row = ctx_.first_row(layer, r);
    make(row, layer.q_bias, layer.q_norm, shape.num_heads * shape.head_dim);
    const int keys = shape.num_kv_heads * shape.head_dim;
    if (layer.writes) make(row + layer.qkv.parts[1].offset, layer.k_bias, layer.k_norm, keys);
    if (limit > 0.f && layer.writes) {
      make(row + layer.qkv.parts[2].offset, layer.v_bias, nullptr, shape.num_kv_heads * shape.value_dim);
    }
  }
}

// Heads from their projections: queries, and keys and values, which are written to the cache.
void AttentionStage::rotate_and_store(int thread, const Layer &layer, Share tokens) {
  const ModelConfig &c = ctx_.model.config;
  const HeadShape &shape = ctx_.model.heads_of(layer);
  const FloatRows &queries = rows_[size_t(layer.heads)].queries;
  const int dim = shape.head_dim, padded = shape.padded_dim, per_key = shape.per_key();
  const Share heads = heads_of(thread, shape);
  const int num_kv_heads = heads.end - heads.begin, num_heads = num_kv_heads * per_key;
  const int num_units = num_heads + (layer.writes ? num_kv_heads : 0);
  const KVLayer kv = ctx_.model.kv.layer(layer.slot, shape);
  const int64_t *slots = ctx_.input.groups[size_t(layer.group)].slot_mapping;
  const int k_offset = layer.writes ? layer.qkv.parts[1].offset : 0;
  const int v_offset = layer.writes ? layer.qkv.parts[size_t(layer.v_part)].offset : 0;
  float *key = scratch_[size_t(thread)].key_value.data(), *value = key + padded, *scratch = value + shape.padded_value;
  std::memset(key, 0, sizeof(float) * size_t(padded + shape.padded_value));

  auto unless_made = [&](Vector v) { return makes_rows() ? nullptr : v; };
  const Vector q_norm = unless_made(layer.q_norm), k_norm = unless_made(layer.k_norm);
  const Vector q_bias = unless_made(layer.q_bias), k_bias = unless_made(layer.k_bias);
  const Vector v_bias = c.clip_qkv > 0.f ? nullptr : layer.v_part == 1 ? layer.k_bias : layer.v_bias;
  auto of_head = [](Vector v, int offset) { return v ? v + offset : nullptr; };
  auto make = [&](float *out, int size, const float *from, int nth, Vector bias, Vector norm, Vector norm_bias,
                  Vector scales, RotaryRow rotary, float factor, float eps, bool centred) {
    const int offset = nth * size, of_norm = centred ? nth * padded : 0;
    ctx_.isa.make_head({size, from + offset, of_head(bias, offset), of_head(norm, of_norm), of_head(scales, offset),
                        eps, rotary, factor, centred, of_head(norm_bias, of_norm)},
                       out);
  };

  auto store = [&](int unit) {
    const int token = tokens.begin + unit / num_units, nth = unit % num_units;
    const float *row = layer.takes_qkv ? ctx_.mixed->row(token) : ctx_.first_row(layer, token - tokens.begin);
    const RotaryRow rotary = embedding_.rotary(layer.rope, token);
    if (nth < num_heads) {
      const int head = heads.begin * per_key + nth;
      const float growth = layer.query_growth.at(ctx_.input.positions[token]);
      make(queries.row(token) + head * padded, dim, row, head, q_bias, q_norm, layer.q_norm_bias, layer.q_scales,
           rotary, c.query_scale * kLog2E * growth, layer.qk_eps, layer.centred_qk);
      return;
    }
    if (slots[token] < 0) return;
    const int kv_head = heads.begin + nth - num_heads;
    make(key, dim, row + k_offset, kv_head, k_bias, k_norm, layer.k_norm_bias, layer.k_scales, rotary, 1.f,
         layer.qk_eps, layer.centred_qk);
    const float *values = layer.takes_qkv ? ctx_.mixed_values->row(token) : row + v_offset;
    make(value, shape.value_dim, values, kv_head, v_bias, layer.v_norm, nullptr, nullptr, {}, 1.f, c.norm_eps,
         false);
    ctx_.isa.store_kv(kv, slots[token], kv_head, key, value, scratch);
  };
  const int num_tokens = tokens.end - tokens.begin;
  ctx_.pool.divide(thread, ctx_.pool.team(thread), num_tokens * num_units, 1, [&](Share part, int) {
    for (int unit = part.begin; unit < part.end; ++unit) store(unit);
  });
}

// Stores the one key of latent attention, which is its value too.
void AttentionStage::store_latent(int thread, const Layer &layer) {
  const HeadShape &shape = ctx_.model.heads_of(layer);
  const Share heads = heads_of(thread, shape);
  const KVLayer kv = ctx_.model.kv.layer(layer.slot);
  const int64_t *slots = ctx_.input.groups[size_t(layer.group)].slot_mapping;
  float *key = scratch_[size_t(thread)].key_value.data(), *scratch = key + shape.padded_dim;
  std::memset(key, 0, sizeof(float) * size_t(shape.padded_dim));
  const int count = heads.begin == heads.end ? 0 : ctx_.input.num_tokens;
  ctx_.pool.divide(thread, ctx_.pool.team(thread), count, 1, [&](Share part, int) {
    for (int token = part.begin; token < part.end; ++token) {
      if (slots[token] < 0) continue;
      latent_.key(layer, ctx_.first_row(layer, token), embedding_.rotary(layer.rope, token), key);
      ctx_.isa.store_kv(kv, slots[token], 0, key, nullptr, scratch);
    }
  });
}

AttentionConfig AttentionStage::config(const HeadShape &shape, AttentionWindow window, Vector sinks) const {
  const ModelConfig &c = ctx_.model.config;
  const KVConfig &kv = ctx_.model.kv.config();
  const bool is_rotated = kv.keys_are_values && kv.format == KVFormat::i8;
  return {shape.num_heads, shape.num_kv_heads, shape.padded_dim, shape.value_dim, shape.padded_value,
          c.attn_softcap * kLog2E, window.size, window.chunked, is_rotated, is_rotated ? 0 : c.latent.rope_dim, sinks};
}

// The outputs of this thread's tokens times their gate.
void AttentionStage::apply_gate(int thread, const Layer &layer, const FloatRows &out) {
  const ModelConfig &c = ctx_.model.config;
  const HeadShape &shape = ctx_.model.heads_of(layer);
  const Share share = ctx_.token_share(thread);
  const int value_dim = layer.latent ? c.latent.value_dim : shape.value_dim;
  const int values = c.head_gates ? value_dim : 1, num_gates = shape.num_heads * value_dim / values;
  for (int t = share.begin; t < share.end; ++t) {
    const float *gate = c.latent.joins_latents ? latent_.gates(layer, t)
                                               : ctx_.first_row(layer, t) + layer.qkv.parts.back().offset;
    if (!c.head_gates && !c.softplus_gates) {
      ctx_.isa.gate_mul(Gate::sigmoid, gate, out.row(t), size_t(out.stride()), out.row(t));
      continue;
    }
    float *value = out.row(t);
    for (int i = 0; i < num_gates; ++i) {
      const float factor = c.softplus_gates ? softplus(gate[i]) : 1.f / (1.f + std::exp(-gate[i]));
      for (const float *end = value + values; value < end; ++value) *value *= factor;
    }
  }
}

AttentionTile AttentionStage::tile_of(const Layer &layer, const AttentionTask &task, int kv_head) const {
  const Rows &rows = rows_[size_t(layer.heads)];
  AttentionTile tile{};
  tile.num_queries = task.num_queries;
  tile.first_position = task.first_position;
  tile.kv_head = kv_head;
  tile.queries = rows.queries.row(task.first_token);
  tile.query_stride = size_t(rows.queries.stride());
  tile.block_table = blocks_of(layer, task);
  tile.key_begin = task.key_begin;
  tile.key_end = task.key_end;
  tile.chosen = task.chosen < 0 ? nullptr : index_.chosen(task.chosen);
  tile.out = rows.out().row(task.first_token);
  tile.out_stride = size_t(rows.out().stride());
  if (task.partial >= 0) {
    const int num_kv_heads = plans_[size_t(layer.group)].num_kv_heads;
    tile.partial = partials_.data() + size_t(task.partial * num_kv_heads + kv_head) * partial_stride_;
  }
  return tile;
}

// Threads take their team's tasks from a common counter, then merge their share of the tiles that were split.
void AttentionStage::attend(int thread, const Layer &layer, std::atomic<int> &next_task) {
  const AttentionPlan &plan = plans_[size_t(layer.group)];
  HeadShape shape = ctx_.model.heads_of(layer);
  KVLayer kv = ctx_.model.kv.layer(layer.slot, shape);
  if (layer.latent) kv.head_stride = 0;  // every part of the heads reads the one key
  shape.num_kv_heads = plan.num_kv_heads;
  AttentionConfig attention = config(shape, {layer.sliding_window, layer.chunked}, layer.sinks);
  attention.slopes = layer.slopes;
  const ThreadPool::Team &team = ctx_.pool.team(thread);
  const Share own = heads_of(thread, shape);
  const int heads = own.end - own.begin, num_tasks = int(plan.tasks.size()), total = num_tasks * heads;
  // With enough tasks a thread takes all heads of a task: their keys are adjacent in memory.
  const int at_once = num_tasks >= 4 * team.size ? heads : 1;
  for (int i; (i = next_task.fetch_add(at_once, std::memory_order_relaxed)) < total;) {
    for (int unit = i; unit < i + at_once; ++unit) {
      const AttentionTask &now = plan.tasks[size_t(unit / heads)];
      AttentionTile tile = tile_of(layer, now, own.begin + unit % heads);
      attention.sliding_window = now.window;
      const int following = unit + 1 < i + at_once ? unit + 1 : next_task.load(std::memory_order_relaxed);
      if (following < total) {
        const AttentionTask &task = plan.tasks[size_t(following / heads)];
        tile.next = {blocks_of(layer, task), own.begin + following % heads, task.key_begin, task.key_end};
      }
      ctx_.isa.attend(kv, attention, tile, scratch_[size_t(thread)].attend.data());
    }
  }
  if (plan.split_tiles.empty()) return;

  ctx_.pool.barrier();
  const Share share = member_share(int(plan.split_tiles.size()) * heads, team);
  for (int i = share.begin; i < share.end; ++i) {
    const SplitTile &split = plan.split_tiles[size_t(i / heads)];
    const AttentionTile tile = tile_of(layer, plan.tasks[size_t(split.first_task)], own.begin + i % heads);
    const size_t stride = partial_stride_ * size_t(shape.num_kv_heads);
    ctx_.isa.merge_splits(attention, tile, split.num_splits, stride);
  }
}

}  // namespace foreword::kernels
