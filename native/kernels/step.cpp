#include "kernels/step.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

namespace foreword::kernels {
namespace {

// Up to this many rows every thread prepares all of them for itself: cheaper than a barrier.
constexpr int kFewRows = 2;
// A product is also cut by rows when there are fewer panels than this a thread, and rows enough.
constexpr int kPanelsPerThread = 8, kRowsPerCut = 48;
// Gate and up panels computed together before their halves are joined: floats of working space.
constexpr int kGateFloats = 16384;
// Attention's softmax takes powers of 2.
constexpr float kLog2E = 1.44269504088896341f;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void mark_kinds(const Linear &l, bool *kinds) {
  for (const Linear::Part &part : l.parts) kinds[static_cast<int>(part.matrix->activations)] = true;
}

[[noreturn]] void refuse(const std::string &what, int64_t index, int64_t value, int64_t begin, int64_t end) {
  throw std::invalid_argument(what + "[" + std::to_string(index) + "] = " + std::to_string(value) + " is outside [" +
                              std::to_string(begin) + ", " + std::to_string(end) + ")");
}

}  // namespace

const char *const StepRunner::kStageNames[kNumStages] = {"embed", "qkv", "rope", "attention", "o", "gate_up", "down", "logits"};

StepRunner::StepRunner(Model &model)
    : m_(model),
      level_(model.level),
      pool_(model.pool),
      logits_stride_(padded_row(model.config.vocab_size)),
      own_(static_cast<size_t>(model.pool.size())),
      plans_(static_cast<size_t>(model.config.num_groups)),
      counters_(model.layers.size()) {
  for (const Layer &layer : m_.layers) post_norms_ = post_norms_ || layer.post_attn_norm;
}

// ---------------------------------------------------------------------------------------------- before the region

void StepRunner::check(const StepInput &in) const {
  const int64_t slots = int64_t{m_.kv.config().num_blocks} * m_.kv.config().block_size;
  if (static_cast<int>(in.groups.size()) != m_.config.num_groups) {
    throw std::invalid_argument("the batch has " + std::to_string(in.groups.size()) + " KV groups, the model " +
                                std::to_string(m_.config.num_groups));
  }
  for (int t = 0; t < in.num_tokens; ++t) {
    if (in.input_ids[t] < 0 || in.input_ids[t] >= m_.config.vocab_size) {
      refuse("input_ids", t, in.input_ids[t], 0, m_.config.vocab_size);
    }
    for (const StepInput::Group &g : in.groups) {
      if (g.slot_mapping[t] < -1 || g.slot_mapping[t] >= slots) refuse("slot_mapping", t, g.slot_mapping[t], -1, slots);
    }
  }
  for (int l = 0; l < in.num_logits; ++l) {
    if (in.logits_indices[l] < 0 || in.logits_indices[l] >= in.num_tokens) {
      refuse("logits_indices", l, in.logits_indices[l], 0, in.num_tokens);
    }
  }
  if (in.query_start_loc[0] != 0) refuse("query_start_loc", 0, in.query_start_loc[0], 0, 1);
  for (int b = 0; b < in.num_reqs; ++b) {
    const int begin = in.query_start_loc[b], end = in.query_start_loc[b + 1];
    if (end < begin || end > in.num_tokens) refuse("query_start_loc", b + 1, end, begin, int64_t{in.num_tokens} + 1);
    const int64_t first = int64_t{in.seq_lens[b]} - (end - begin);
    for (int t = begin; t < end; ++t) {
      if (in.positions[t] != first + (t - begin) || first < 0) {
        refuse("positions", t, in.positions[t], first + (t - begin), first + (t - begin) + 1);
      }
    }
    for (const StepInput::Group &g : in.groups) {
      const int64_t needed = (int64_t{in.seq_lens[b]} + m_.kv.config().block_size - 1) / m_.kv.config().block_size;
      if (in.idx_mapping[b] < 0 || in.idx_mapping[b] >= g.num_rows) refuse("idx_mapping", b, in.idx_mapping[b], 0, g.num_rows);
      if (needed > g.stride) refuse("seq_lens", b, in.seq_lens[b], 0, int64_t{g.stride} * m_.kv.config().block_size + 1);
      const int32_t *table = g.block_table + int64_t{in.idx_mapping[b]} * g.stride;
      for (int64_t k = 0; k < needed; ++k) {
        if (table[k] < 0 || table[k] >= m_.kv.config().num_blocks) {
          refuse("block_table[" + std::to_string(in.idx_mapping[b]) + "]", k, table[k], 0, m_.kv.config().num_blocks);
        }
      }
    }
  }
}

AttentionConfig StepRunner::attention_config(int64_t window) const {
  const ModelConfig &c = m_.config;
  return {c.num_heads, c.num_kv_heads, c.head_dim, m_.padded_dim, c.attn_softcap * kLog2E, window};
}

void StepRunner::plan_group(const StepInput &in, int64_t window, GroupPlan &plan) const {
  plan.tasks.clear();
  plan.merges.clear();
  const int per_tile = level_.attention_queries(attention_config(window));
  int num_tiles = 0;
  for (int b = 0; b < in.num_reqs; ++b) {
    num_tiles += (in.query_start_loc[b + 1] - in.query_start_loc[b] + per_tile - 1) / per_tile;
  }
  // Long contexts of few requests: the splits of a tile become tasks of their own.
  const bool split = num_tiles * m_.config.num_kv_heads < 4 * pool_.size();
  int partials = 0;
  for (int b = 0; b < in.num_reqs; ++b) {
    const int begin = in.query_start_loc[b], end = in.query_start_loc[b + 1];
    const int tiles = (end - begin + per_tile - 1) / per_tile;
    for (int tile = tiles - 1; tile >= 0; --tile) {  // the last queries see most keys: longest tasks first
      const int first = begin + tile * per_tile, count = std::min(per_tile, end - first);
      const int64_t position = in.positions[first], key_end = position + count;
      const int64_t key_begin = window ? std::max<int64_t>(0, position - window + 1) : 0;
      AttentionTask task{b, first, count, position, key_begin, key_end, -1};
      const int64_t first_split = key_begin / kSplit, last_split = (key_end - 1) / kSplit;
      if (!split || first_split == last_split) {
        plan.tasks.push_back(task);
        continue;
      }
      plan.merges.push_back({static_cast<int>(plan.tasks.size()), static_cast<int>(last_split - first_split + 1)});
      for (int64_t s = first_split; s <= last_split; ++s) {
        task.key_begin = std::max(key_begin, s * kSplit);
        task.key_end = std::min(key_end, (s + 1) * kSplit);
        task.partial = partials++;
        plan.tasks.push_back(task);
      }
    }
  }
}

void StepRunner::plan(const StepInput &in) {
  std::vector<bool> planned(plans_.size(), false);
  for (const Layer &layer : m_.layers) {
    const size_t g = static_cast<size_t>(layer.group);
    if (planned[g]) continue;
    planned[g] = true;
    plan_group(in, layer.sliding_window, plans_[g]);
  }
  for (auto &counter : counters_) counter.store(0, std::memory_order_relaxed);
}

void StepRunner::reserve(const StepInput &in) {
  const ModelConfig &c = m_.config;
  const size_t rows = static_cast<size_t>(in.num_tokens), logit_rows = static_cast<size_t>(in.num_logits);
  int inputs = c.hidden_size, mlp_stride = 0;
  bool in_kinds[kNumActivationKinds] = {}, attn_kinds[kNumActivationKinds] = {}, mlp_kinds[kNumActivationKinds] = {};
  bool expert_kinds[kNumActivationKinds] = {};
  int moe_choices = 0, experts = 0, expert_stride = 0, expert_inputs = 0, mlp_inputs = 0;
  mark_kinds(m_.lm_head, in_kinds);
  for (const Layer &layer : m_.layers) {
    mark_kinds(layer.qkv, in_kinds);
    mark_kinds(layer.o, attn_kinds);
    const Mlp *dense = layer.moe ? layer.moe->shared.get() : layer.mlp.get();
    if (dense) {
      mark_kinds(dense->gate, in_kinds);
      mark_kinds(dense->up, in_kinds);
      mark_kinds(dense->down, mlp_kinds);
      mlp_stride = std::max(mlp_stride, dense->gate.stride);
      mlp_inputs = std::max(mlp_inputs, dense->down.cols);
    }
    if (layer.moe) {
      const Moe &moe = *layer.moe;
      mark_kinds(moe.router, in_kinds);
      if (!moe.shared_gate.parts.empty()) mark_kinds(moe.shared_gate, in_kinds);
      for (const Mlp &expert : moe.experts) {
        mark_kinds(expert.gate, in_kinds);
        mark_kinds(expert.up, in_kinds);
        mark_kinds(expert.down, expert_kinds);
        expert_stride = std::max(expert_stride, expert.gate.stride);
        expert_inputs = std::max(expert_inputs, expert.down.cols);
      }
      moe_choices = std::max(moe_choices, moe.experts_per_token);
      experts = std::max(experts, static_cast<int>(moe.experts.size()));
      router_stride_ = std::max(router_stride_, moe.router.stride);
    }
  }
  hidden_stride_ = padded_row(c.hidden_size);
  attn_stride_ = padded_row(c.num_heads * c.head_dim);
  mlp_stride_ = mlp_stride;
  qkv_stride_ = m_.layers.empty() ? 0 : m_.layers[0].qkv.stride;

  x_.reserve(rows * static_cast<size_t>(hidden_stride_));
  qkv_.reserve(rows * static_cast<size_t>(qkv_stride_));
  q_.reserve(rows * static_cast<size_t>(c.num_heads * m_.padded_dim));
  attn_.reserve(rows * static_cast<size_t>(attn_stride_));
  hidden_.reserve(rows * static_cast<size_t>(mlp_stride));
  if (post_norms_ || moe_choices) branch_.reserve(rows * static_cast<size_t>(hidden_stride_));
  logits_.reserve(logit_rows * static_cast<size_t>(logits_stride_));
  rope_stride_ = 0;
  for (const Rope &rope : m_.ropes) rope_stride_ = std::max(rope_stride_, static_cast<int>(rope.inv_freq.size()));
  cosines_.reserve(rows * m_.ropes.size() * static_cast<size_t>(rope_stride_));
  sines_.reserve(rows * m_.ropes.size() * static_cast<size_t>(rope_stride_));
  const int act_rows = std::max(in.num_tokens, in.num_logits);
  in_acts_.reserve(act_rows, inputs, in_kinds);
  attn_acts_.reserve(in.num_tokens, c.num_heads * c.head_dim, attn_kinds);
  if (mlp_inputs) mlp_acts_.reserve(in.num_tokens, mlp_inputs, mlp_kinds);

  if (moe_choices) {
    const size_t choices = rows * static_cast<size_t>(moe_choices);
    normed_.reserve(rows * static_cast<size_t>(hidden_stride_));
    router_logits_.reserve(rows * static_cast<size_t>(router_stride_));
    shared_gate_.reserve(rows * kRowPadding);
    choice_weight_.reserve(choices);
    choice_expert_.reserve(choices);
    choice_place_.reserve(choices);
    place_token_.reserve(choices);
    expert_begin_.reserve(static_cast<size_t>(experts) + 1);
    expert_hidden_.reserve(choices * static_cast<size_t>(expert_stride));
    expert_out_.reserve(choices * static_cast<size_t>(hidden_stride_));
    gathered_acts_.reserve(static_cast<int>(choices), inputs, in_kinds);
    expert_acts_.reserve(static_cast<int>(choices), expert_inputs, expert_kinds);
  }

  const AttentionConfig attention = attention_config(0);
  const size_t tile_rows = static_cast<size_t>(level_.attention_queries(attention)) *
                           static_cast<size_t>(c.num_heads / c.num_kv_heads);
  partial_stride_ = tile_rows * static_cast<size_t>(m_.padded_dim + 16);
  size_t partials = 0;
  for (const GroupPlan &plan : plans_) {
    for (const Merge &merge : plan.merges) partials += static_cast<size_t>(merge.num_splits);
  }
  partials_.reserve(partials * static_cast<size_t>(c.num_kv_heads) * partial_stride_);

  const int widest = std::max({hidden_stride_, attn_stride_, mlp_stride, expert_stride, qkv_stride_});
  for (ThreadMemory &own : own_) {
    own.linear.reserve(level_.linear_scratch_bytes());
    own.attention.reserve(level_.attention_scratch_bytes(attention));
    own.row.reserve(static_cast<size_t>(widest + 4 * m_.padded_dim));
    own.rotated.reserve(static_cast<size_t>(widest));
    own.gate.reserve(kGateFloats);
    own.up.reserve(kGateFloats);
    own.in_acts.reserve(kFewRows, inputs, in_kinds);
    own.attn_acts.reserve(kFewRows, c.num_heads * c.head_dim, attn_kinds);
    if (mlp_inputs) own.mlp_acts.reserve(kFewRows, mlp_inputs, mlp_kinds);
  }
}

const float *StepRunner::run(const StepInput &input) {
  check(input);
  plan(input);
  reserve(input);
  in_ = input;
  pool_.run([this](int thread) { step(thread); });
  return logits_.data();
}

// ---------------------------------------------------------------------------------------------- the region

void StepRunner::step(int thread) {
  if (thread == 0) last_tick_ = now();
  embed(thread);
  pool_.barrier();
  tick(thread, 0);
  for (size_t i = 0; i < m_.layers.size(); ++i) {
    attention_block(thread, m_.layers[i], static_cast<int>(i));
    mlp_block(thread, m_.layers[i], static_cast<int>(i));
  }
  if (in_.num_logits > 0) project(thread);
  tick(thread, 7);
}

void StepRunner::tick(int thread, int stage) {
  if (thread != 0) return;
  const double t = now();
  stage_seconds[stage] += t - last_tick_;
  last_tick_ = t;
}

// x = embed[id] * scale; and the cosines and sines of every token's position.
void StepRunner::embed(int thread) {
  const Share share = share_of(in_.num_tokens, thread, pool_.size());
  for (int t = share.begin; t < share.end; ++t) {
    float *x = x_.data() + static_cast<size_t>(t) * hidden_stride_;
    level_.decode_row(m_.embedding, in_.input_ids[t], x);
    for (int i = 0; i < m_.config.hidden_size; ++i) x[i] *= m_.config.embedding_scale;
    for (size_t r = 0; r < m_.ropes.size(); ++r) {
      const Rope &rope = m_.ropes[r];
      const size_t at = (r * static_cast<size_t>(in_.num_tokens) + static_cast<size_t>(t)) * static_cast<size_t>(rope_stride_);
      for (size_t j = 0; j < rope.inv_freq.size(); ++j) {
        const double angle = static_cast<double>(in_.positions[t]) * rope.inv_freq[j];
        cosines_.data()[at + j] = static_cast<float>(std::cos(angle) * rope.scale);
        sines_.data()[at + j] = static_cast<float>(std::sin(angle) * rope.scale);
      }
    }
  }
}

const float *StepRunner::norm_row(int thread, const float *x, Vector weight) {
  float *row = own_[static_cast<size_t>(thread)].row.data();
  level_.rms_norm(x, weight, m_.config.hidden_size, m_.config.norm_eps, row);
  return row;
}

// Rows of `cols` inputs from `row(r)`, ready for every thread when it returns.
template <class Row>
ActivationSet StepRunner::prepare(int thread, int cols, int rows, const ActivationBuffer &shared, Row &&row) {
  if (rows > kFewRows) {
    const ActivationSet set = shared.view(rows, cols);
    prepare_rows(thread, set, rows, row);
    pool_.barrier();
    return set;
  }
  ThreadMemory &own = own_[static_cast<size_t>(thread)];
  ActivationBuffer &buffer = &shared == &in_acts_ ? own.in_acts : &shared == &attn_acts_ ? own.attn_acts : own.mlp_acts;
  const ActivationSet set = buffer.view(rows, cols);
  for (int r = 0; r < rows; ++r) prepare_row(thread, set, r, row(r));
  return set;
}

// Of this thread's range of the panels of all matrices side by side.
const uint8_t *StepRunner::first_weights(int thread, const Linear *l) const {
  if (!l) return nullptr;
  int panel = share_of(l->num_panels, thread, pool_.size()).begin;
  for (const Linear::Part &part : l->parts) {
    if (panel < part.matrix->num_panels) return part.matrix->panel(panel);
    panel -= part.matrix->num_panels;
  }
  return nullptr;
}

// This thread's part of out = a Wᵀ: a range of the panels of all matrices side by side, cut by rows too if panels are few.
void StepRunner::linear(int thread, const Linear &l, const ActivationSet &a, Share rows, float *out, Store store,
                        const Linear *next) {
  const int num_rows = rows.end - rows.begin, threads = pool_.size();
  int cuts = 1;
  if (l.num_panels < kPanelsPerThread * threads) cuts = std::clamp(num_rows / kRowsPerCut, 1, threads);
  const Share share = share_of(l.num_panels * cuts, thread, threads);
  void *scratch = own_[static_cast<size_t>(thread)].linear.data();
  for (int cut = share.begin / std::max(1, l.num_panels); cut < cuts && cut * l.num_panels < share.end; ++cut) {
    const Share r = share_of(num_rows, cut, cuts);
    const int begin = std::max(share.begin - cut * l.num_panels, 0), end = std::min(share.end - cut * l.num_panels, l.num_panels);
    int first = 0;
    for (const Linear::Part &part : l.parts) {
      const int last = first + part.matrix->num_panels;
      const int p0 = std::max(begin, first) - first, p1 = std::min(end, last) - first;
      if (p0 < p1) {
        const int kind = static_cast<int>(part.matrix->activations);
        const uint8_t *following = end > last ? (&part + 1)->matrix->panels : first_weights(thread, next);
        level_.linear(*part.matrix, a.kinds[kind], rows.begin + r.begin, rows.begin + r.end, p0, p1, out + part.offset,
                      static_cast<size_t>(l.stride), store, following, scratch);
      }
      first = last;
    }
  }
}

// This thread's panels of out = act(a Wgateᵀ) * (a Wupᵀ): both halves of a few panels go to working space, then are joined.
void StepRunner::gated(int thread, const Mlp &mlp, const ActivationSet &a, Share rows, float *out) {
  const PackedMatrix &gate = *mlp.gate.parts[0].matrix, &up = *mlp.up.parts[0].matrix;
  const Activations &gate_in = a.kinds[static_cast<int>(gate.activations)];
  const Activations &up_in = a.kinds[static_cast<int>(up.activations)];
  const int width = level_.panel_width, rows_max = kGateFloats / width;
  const Share panels = share_of(gate.num_panels, thread, pool_.size());
  ThreadMemory &own = own_[static_cast<size_t>(thread)];
  for (int row = rows.begin; row < rows.end; row += rows_max) {
    const int row_end = std::min(rows.end, row + rows_max), count = row_end - row;
    const int step = std::max(1, std::min(8, kGateFloats / (count * width)));
    for (int p = panels.begin; p < panels.end; p += step) {
      const int p_end = std::min(panels.end, p + step);
      const uint8_t *next_gate = p_end < panels.end ? gate.panel(p_end) : first_weights(thread, &mlp.down);
      const size_t wide = static_cast<size_t>((p_end - p) * width);
      // The kernels address output from row 0 and panel 0.
      const ptrdiff_t origin = -static_cast<ptrdiff_t>(row) * static_cast<ptrdiff_t>(wide) - static_cast<ptrdiff_t>(p) * width;
      level_.linear(gate, gate_in, row, row_end, p, p_end, own.gate.data() + origin, wide, Store::assign, up.panel(p),
                    own.linear.data());
      level_.linear(up, up_in, row, row_end, p, p_end, own.up.data() + origin, wide, Store::assign, next_gate,
                    own.linear.data());
      for (int r = 0; r < count; ++r) {
        const size_t at = static_cast<size_t>(r) * wide;
        level_.gate_mul(m_.config.activation, own.gate.data() + at, own.up.data() + at, wide,
                        out + static_cast<size_t>(row + r) * mlp.gate.stride + static_cast<size_t>(p) * width);
      }
    }
  }
}

// x += norm(branch), this thread's rows.
void StepRunner::add_branch(int thread, Vector norm) {
  const Share share = share_of(in_.num_tokens, thread, pool_.size());
  const size_t stride = static_cast<size_t>(hidden_stride_);
  for (int t = share.begin; t < share.end; ++t) {
    const float *branch = branch_.data() + static_cast<size_t>(t) * stride;
    if (norm) branch = norm_row(thread, branch, norm);
    level_.add(branch, stride, x_.data() + static_cast<size_t>(t) * stride);
  }
  pool_.barrier();
}

// ---------------------------------------------------------------------------------------------- attention

void StepRunner::attention_block(int thread, const Layer &layer, int index) {
  const Share rows{0, in_.num_tokens};
  const ActivationSet in = prepare(thread, layer.qkv.cols, rows.end, in_acts_, [&](int r) {
    return norm_row(thread, x_.data() + static_cast<size_t>(r) * hidden_stride_, layer.attn_norm);
  });
  linear(thread, layer.qkv, in, rows, qkv_.data(), Store::assign, &layer.o);
  pool_.barrier();
  tick(thread, 1);

  rope_and_store(thread, layer);
  pool_.barrier();
  tick(thread, 2);
  attend(thread, layer, index);
  pool_.barrier();
  tick(thread, 3);

  const ActivationSet out = prepare(thread, layer.o.cols, rows.end, attn_acts_, [&](int r) {
    return static_cast<const float *>(attn_.data() + static_cast<size_t>(r) * attn_stride_);
  });
  const Linear *next = layer.mlp ? &layer.mlp->gate : nullptr;
  if (layer.post_attn_norm) {
    linear(thread, layer.o, out, rows, branch_.data(), Store::assign, next);
    pool_.barrier();
    add_branch(thread, layer.post_attn_norm);
  } else {
    linear(thread, layer.o, out, rows, x_.data(), Store::add, next);
    pool_.barrier();
  }
  tick(thread, 4);
}

// Bias, norm and rotation of this thread's heads; queries go to q_, keys and values into the cache.
void StepRunner::rope_and_store(int thread, const Layer &layer) {
  const ModelConfig &c = m_.config;
  const int dim = c.head_dim, padded = m_.padded_dim, units = c.num_heads + c.num_kv_heads;
  const KVLayer kv = m_.kv.layer(layer.slot);
  const int64_t *slots = in_.groups[static_cast<size_t>(layer.group)].slot_mapping;
  const int k_offset = layer.qkv.parts[1].offset, v_offset = layer.qkv.parts[2].offset;
  float *key = own_[static_cast<size_t>(thread)].row.data(), *value = key + padded, *scratch = value + padded;
  std::memset(key, 0, sizeof(float) * 2 * static_cast<size_t>(padded));

  auto finish = [&](float *x, const float *from, Vector bias, Vector norm, int token) {
    for (int d = 0; d < dim; ++d) x[d] = from[d] + (bias ? bias[d] : 0.f);
    if (norm) level_.rms_norm(x, norm, dim, c.norm_eps, x);
    if (layer.rope < 0) return;
    const size_t at = (static_cast<size_t>(layer.rope) * static_cast<size_t>(in_.num_tokens) + static_cast<size_t>(token)) *
                      static_cast<size_t>(rope_stride_);
    const int pairs = static_cast<int>(m_.ropes[static_cast<size_t>(layer.rope)].inv_freq.size());
    level_.rotate(cosines_.data() + at, sines_.data() + at, pairs, x);
  };

  const Share share = share_of(in_.num_tokens * units, thread, pool_.size());
  for (int unit = share.begin; unit < share.end; ++unit) {
    const int token = unit / units, head = unit % units;
    const float *row = qkv_.data() + static_cast<size_t>(token) * qkv_stride_;
    if (head < c.num_heads) {
      float *q = q_.data() + (static_cast<size_t>(token) * c.num_heads + head) * padded;
      const float scale = c.query_scale * kLog2E;
      finish(q, row + head * dim, layer.q_bias ? layer.q_bias + head * dim : nullptr, layer.q_norm, token);
      for (int d = 0; d < dim; ++d) q[d] *= scale;
      continue;
    }
    if (slots[token] < 0) continue;
    const int kv_head = head - c.num_heads;
    finish(key, row + k_offset + kv_head * dim, layer.k_bias ? layer.k_bias + kv_head * dim : nullptr, layer.k_norm, token);
    const float *v = row + v_offset + kv_head * dim;
    for (int d = 0; d < dim; ++d) value[d] = v[d] + (layer.v_bias ? layer.v_bias[kv_head * dim + d] : 0.f);
    level_.store_kv(kv, slots[token], kv_head, key, value, scratch);
  }
}

const int32_t *StepRunner::table_of(const Layer &layer, const AttentionTask &task) const {
  const StepInput::Group &group = in_.groups[static_cast<size_t>(layer.group)];
  return group.block_table + int64_t{in_.idx_mapping[task.req]} * group.stride;
}

kernels::AttentionTile StepRunner::tile_of(const Layer &layer, const AttentionTask &task, int head) const {
  const size_t q_row = static_cast<size_t>(m_.config.num_heads) * m_.padded_dim;
  kernels::AttentionTile tile{};
  tile.num_queries = task.num_queries;
  tile.first_position = task.first_position;
  tile.kv_head = head;
  tile.queries = q_.data() + static_cast<size_t>(task.first_token) * q_row;
  tile.query_stride = q_row;
  tile.block_table = table_of(layer, task);
  tile.key_begin = task.key_begin;
  tile.key_end = task.key_end;
  tile.out = attn_.data() + static_cast<size_t>(task.first_token) * attn_stride_;
  tile.out_stride = static_cast<size_t>(attn_stride_);
  if (task.partial >= 0) {
    tile.partial = partials_.data() + static_cast<size_t>(task.partial * m_.config.num_kv_heads + head) * partial_stride_;
  }
  return tile;
}

void StepRunner::attend(int thread, const Layer &layer, int index) {
  const GroupPlan &plan = plans_[static_cast<size_t>(layer.group)];
  const AttentionConfig config = attention_config(layer.sliding_window);
  const KVLayer kv = m_.kv.layer(layer.slot);
  const int heads = m_.config.num_kv_heads, total = static_cast<int>(plan.tasks.size()) * heads;
  void *scratch = own_[static_cast<size_t>(thread)].attention.data();
  std::atomic<int> &next = counters_[static_cast<size_t>(index)];
  // A thread takes all heads of a task where there are tasks enough: their keys are neighbours in memory.
  const int at_once = static_cast<int>(plan.tasks.size()) >= 4 * pool_.size() ? heads : 1;
  for (int i; (i = next.fetch_add(at_once, std::memory_order_relaxed)) < total;) {
    for (int unit = i; unit < i + at_once; ++unit) {
      kernels::AttentionTile tile = tile_of(layer, plan.tasks[static_cast<size_t>(unit / heads)], unit % heads);
      const int following = unit + 1 < i + at_once ? unit + 1 : next.load(std::memory_order_relaxed);
      if (following < total) {
        const AttentionTask &task = plan.tasks[static_cast<size_t>(following / heads)];
        tile.next = {table_of(layer, task), following % heads, task.key_begin, task.key_end};
      }
      level_.attend(kv, config, tile, scratch);
    }
  }
  if (plan.merges.empty()) return;

  pool_.barrier();
  const Share share = share_of(static_cast<int>(plan.merges.size()) * heads, thread, pool_.size());
  for (int i = share.begin; i < share.end; ++i) {
    const Merge &merge = plan.merges[static_cast<size_t>(i / heads)];
    const kernels::AttentionTile tile = tile_of(layer, plan.tasks[static_cast<size_t>(merge.task)], i % heads);
    level_.merge_splits(config, tile, tile.partial, merge.num_splits, partial_stride_ * static_cast<size_t>(heads));
  }
}

// ---------------------------------------------------------------------------------------------- MLP and logits

void StepRunner::mlp_block(int thread, const Layer &layer, int index) {
  if (layer.moe) {
    moe(thread, layer, *layer.moe);
    return add_branch(thread, layer.post_mlp_norm);
  }
  const bool norm_after = layer.post_mlp_norm != nullptr;
  const size_t following = static_cast<size_t>(index) + 1;
  const Linear *next = following < m_.layers.size() ? &m_.layers[following].qkv : &m_.lm_head;
  dense_mlp(thread, layer, *layer.mlp, norm_after ? branch_.data() : x_.data(), norm_after ? Store::assign : Store::add, next);
  if (norm_after) add_branch(thread, layer.post_mlp_norm);
}

void StepRunner::dense_mlp(int thread, const Layer &layer, const Mlp &mlp, float *out, Store store, const Linear *next) {
  const Share rows{0, in_.num_tokens};
  const ActivationSet in = prepare(thread, mlp.gate.cols, rows.end, in_acts_, [&](int r) {
    return norm_row(thread, x_.data() + static_cast<size_t>(r) * hidden_stride_, layer.mlp_norm);
  });
  gated(thread, mlp, in, rows, hidden_.data());
  pool_.barrier();
  tick(thread, 5);
  const ActivationSet hidden = prepare(thread, mlp.down.cols, rows.end, mlp_acts_, [&](int r) {
    return static_cast<const float *>(hidden_.data() + static_cast<size_t>(r) * mlp.gate.stride);
  });
  linear(thread, mlp.down, hidden, rows, out, store, next);
  pool_.barrier();
  tick(thread, 6);
}

void StepRunner::project(int thread) {
  const Share rows{0, in_.num_logits};
  const ActivationSet in = prepare(thread, m_.lm_head.cols, rows.end, in_acts_, [&](int r) {
    return norm_row(thread, x_.data() + static_cast<size_t>(in_.logits_indices[r]) * hidden_stride_, m_.final_norm);
  });
  linear(thread, m_.lm_head, in, rows, logits_.data(), Store::assign);
  if (m_.config.final_softcap <= 0.f) return;
  pool_.barrier();
  const Share share = share_of(rows.end, thread, pool_.size());
  for (int r = share.begin; r < share.end; ++r) {
    level_.softcap(m_.config.final_softcap, static_cast<size_t>(logits_stride_),
                   logits_.data() + static_cast<size_t>(r) * logits_stride_);
  }
}

}  // namespace foreword::kernels

