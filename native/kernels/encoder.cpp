#include "kernels/encoder.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/forward/input.h"

namespace foreword::kernels {
namespace {

constexpr int kTextBlock = kTile;

void scale_row(float factor, size_t size, float *row) {
  if (factor == 1.f) return;
  for (size_t i = 0; i < size; ++i) row[i] *= factor;
}

// The numbers between the bounds at `limits`, which may be written over x.
void clip(const float *limits, size_t size, const float *x, float *out) {
  const float least = limits[0], most = limits[1];
  for (size_t i = 0; i < size; ++i) out[i] = std::min(std::max(x[i], least), most);
}

void clip_outputs(Bounds bounds, size_t size, float *row) {
  if (bounds) clip(bounds + 2, size, row, row);
}

}  // namespace

EncoderPass::EncoderPass(Model &model, const Encoder &encoder)
    : model_(model),
      encoder_(encoder),
      isa_(model.isa),
      pool_(model.pool),
      products_(model),
      loras_(model),
      scratch_(size_t(model.pool.size())),
      x_(model.config.hidden_size),
      branch_(model.config.hidden_size),
      queries_(model.config.num_heads * model.padded_dim),
      heads_(model.config.num_heads * model.config.head_dim),
      cosines_(model.most_rotary_pairs()),
      sines_(model.most_rotary_pairs()),
      next_tasks_(encoder.layers.size()) {
  for (const EncoderLayer &layer : encoder.layers) {
    layer.qkv.add_kinds(in_kinds_);
    layer.mlp.gate.add_kinds(in_kinds_);
    layer.mlp.up.add_kinds(in_kinds_);
    layer.o.add_kinds(o_kinds_);
    layer.mlp.down.add_kinds(down_kinds_);
    qkv_stride_ = std::max(qkv_stride_, layer.qkv.stride);
    hidden_stride_ = std::max(hidden_stride_, layer.mlp.up.stride);
    hidden_cols_ = std::max(hidden_cols_, layer.mlp.down.cols);
    has_branch_ = has_branch_ || layer.o_bounds || layer.post_attn_norm;
  }
  for (Scratch &scratch : scratch_) {
    scratch.attend.reserve(isa_.attention_scratch_bytes(config(encoder.layers[0])));
    scratch.norm.reserve(size_t(x_.stride()));
    scratch.key_value.reserve(size_t(3 * model.padded_dim));
  }
}

const float *EncoderPass::run(const EncoderInput &input) {
  check(input);
  input_ = input;
  reserve();
  pool_.run([this](int thread) { run_stages(thread); });
  return x_.data();
}

void EncoderPass::check(const EncoderInput &in) const {
  require(in.query_start_loc, 0, 0, 1, "query_start_loc");
  for (int b = 0; b < in.num_reqs; ++b) {
    if (in.lora_ids) check_adapter(in.lora_ids, b, model_);
    const int begin = in.query_start_loc[b];
    const int64_t last = encoder_.longest ? std::min(in.num_tokens, begin + encoder_.longest) : in.num_tokens;
    require(in.query_start_loc, b + 1, begin, last + 1, "query_start_loc");
    for (int t = begin; t < in.query_start_loc[b + 1]; ++t) {
      require(in.positions, t, t - begin, t - begin + 1, "positions");
    }
  }
  require(in.query_start_loc, in.num_reqs, in.num_tokens, int64_t(in.num_tokens) + 1, "query_start_loc");
  const bool is_grouped = std::any_of(encoder_.layers.begin(), encoder_.layers.end(),
                                      [](const EncoderLayer &layer) { return layer.grouped; });
  if (is_grouped != (in.num_groups > 0)) throw std::invalid_argument("group_start_loc belongs to grouped layers");
  for (int g = 0; g < in.num_groups; ++g) {
    require(in.group_start_loc, 0, 0, 1, "group_start_loc");
    require(in.group_start_loc, g + 1, in.group_start_loc[g], int64_t(in.num_tokens) + 1, "group_start_loc");
  }
  const int64_t end = in.num_tokens;
  if (is_grouped) require(in.group_start_loc, in.num_groups, end, end + 1, "group_start_loc");
  if (model_.num_axes && !in.places) throw std::invalid_argument("places belong to rotations by several axes");
  for (int t = 0; t < in.num_tokens; ++t) {
    if (in.input_ids) require(in.input_ids, t, 0, model_.config.vocab_size, "input_ids");
    if (encoder_.num_positions) require(in.positions, t, 0, encoder_.num_positions, "positions");
    if (in.token_types) require(in.token_types, t, 0, std::max(1, encoder_.num_token_types), "token_types");
  }
}

void EncoderPass::reserve() {
  const ModelConfig &c = model_.config;
  loras_.plan(input_.num_tokens, input_.num_reqs, input_.query_start_loc, input_.lora_ids);
  const int T = input_.num_tokens, width = c.num_heads * c.head_dim;
  const int queries = isa_.attention_queries(config(encoder_.layers[0]));
  divide(input_.query_start_loc, input_.num_reqs, queries, texts_);
  divide(input_.group_start_loc, input_.num_groups, queries, groups_);
  const int num_blocks = std::max(texts_.num_blocks, groups_.num_blocks);
  if (!kv_ || kv_->config().num_blocks < num_blocks) {
    kv_.emplace(
        KVConfig{KVFormat::f32, num_blocks, kTextBlock, 1, model_.heads.front(), false, {}});
    blocks_.resize(size_t(num_blocks));
    std::iota(blocks_.begin(), blocks_.end(), 0);
  }
  for (std::atomic<int> &next : next_tasks_) next.store(0, std::memory_order_relaxed);
  x_.reserve(T);
  if (has_branch_) branch_.reserve(T);
  queries_.reserve(T);
  heads_.reserve(T);
  cosines_.reserve(int64_t(model_.ropes.size()) * T);
  sines_.reserve(int64_t(model_.ropes.size()) * T);
  qkv_.reserve(size_t(T) * size_t(qkv_stride_));
  hidden_.reserve(size_t(T) * size_t(hidden_stride_));
  if (encoder_.layers[0].gates_apart()) gate_.reserve(size_t(T) * size_t(hidden_stride_));
  in_.reserve(T, c.hidden_size, loras_.with_kinds(in_kinds_));
  o_in_.reserve(T, width, loras_.with_kinds(o_kinds_));
  down_in_.reserve(T, hidden_cols_, loras_.with_kinds(down_kinds_));
}

void EncoderPass::divide(const int32_t *start_loc, int count, int max_queries, Division &division) const {
  division.slots.resize(size_t(count ? input_.num_tokens : 0));
  division.tasks.clear();
  division.num_blocks = 0;
  for (int i = 0; i < count; ++i) {
    const int begin = start_loc[i], end = start_loc[i + 1], block = division.num_blocks;
    for (int t = begin; t < end; ++t) division.slots[size_t(t)] = int64_t(block) * kTextBlock + (t - begin);
    for (int t = begin; t < end; t += max_queries) {
      division.tasks.push_back({begin, end, block, t, std::min(max_queries, end - t)});
    }
    division.num_blocks += (end - begin + kTextBlock - 1) / kTextBlock;
  }
}

void EncoderPass::run_stages(int thread) {
  embed(thread);
  for (size_t i = 0; i < encoder_.layers.size(); ++i) {
    attention(thread, i);
    mlp(thread, i);
  }
  const Share share = share_of(input_.num_tokens, thread, pool_.size());
  for (int t = share.begin; t < share.end; ++t) {
    const EncoderLayer &last = encoder_.layers.back();
    with_branch(t, last.down_bias, last.down_bounds, last.post_mlp_norm);
    const Norm &norm = encoder_.norms_before ? encoder_.final_norm : last.mlp_norm;
    if (norm) this->norm(x_.row(t), norm, x_.row(t));
  }
}

void EncoderPass::norm(const float *x, const Norm &norm, float *out) const {
  const ModelConfig &c = model_.config;
  if (encoder_.rms_norm) {
    isa_.rms_norm(x, norm.weight, c.hidden_size, c.norm_eps, out);
  } else {
    isa_.layer_norm(x, norm.weight, norm.bias, c.hidden_size, c.norm_eps, out);
  }
}

float *EncoderPass::with_branch(int t, Vector bias, Bounds bounds, const Norm &post) const {
  float *x = x_.row(t);
  add_bias(bias, x_.stride(), x);
  if (has_branch_) {
    float *out = branch_.row(t);
    clip_outputs(bounds, size_t(model_.config.hidden_size), out);
    if (post) norm(out, post, out);
    isa_.add_row(out, size_t(x_.stride()), x);
  }
  return x;
}

const float *EncoderPass::bounded(int thread, const float *x, Bounds bounds) const {
  if (!bounds) return x;
  float *out = scratch_[size_t(thread)].norm.data();
  clip(bounds, size_t(model_.config.hidden_size), x, out);
  return out;
}

// norm(x) in memory of this thread, valid until the next call; x itself without a norm.
const float *EncoderPass::normed(int thread, const float *x, const Norm &norm) const {
  if (!norm.weight) return x;
  float *out = scratch_[size_t(thread)].norm.data();
  this->norm(x, norm, out);
  return out;
}

void EncoderPass::embed(int thread) {
  const Share share = share_of(input_.num_tokens, thread, pool_.size());
  for (int t = share.begin; t < share.end; ++t) {
    float *x = x_.row(t);
    if (input_.x) {
      std::copy_n(input_.x + size_t(t) * size_t(model_.config.hidden_size), model_.config.hidden_size, x);
    } else {
      isa_.decode_row(model_.embedding, input_.input_ids[t], x);
    }
    if (encoder_.num_positions) isa_.add_row(encoder_.positions.row(input_.positions[t]), size_t(x_.stride()), x);
    if (encoder_.num_token_types) {
      const int type = input_.token_types ? input_.token_types[t] : 0;
      isa_.add_row(encoder_.token_types.row(type), size_t(x_.stride()), x);
    }
    const Norm &norm = encoder_.embed_norm;
    if (norm.weight) {
      isa_.layer_norm(x, norm.weight, norm.bias, model_.config.hidden_size, model_.config.norm_eps, x);
    }
    for (size_t r = 0; r < model_.ropes.size(); ++r) {
      const int64_t at = int64_t(r) * input_.num_tokens + t;
      const Rope &rope = model_.ropes[r];
      auto position = [&](size_t j) {
        return rope.axes.empty() ? input_.positions[t] : input_.places[int64_t(rope.axes[j]) * input_.num_tokens + t];
      };
      rope.angles(position, cosines_.row(at), sines_.row(at));
    }
  }
  pool_.barrier();
}

// Every row of x is completed by the thread that prepares it: the bias and the norm of the branch before come first.
void EncoderPass::attention(int thread, size_t index) {
  const EncoderLayer &layer = encoder_.layers[index];
  const EncoderLayer *before = index ? &encoder_.layers[index - 1] : nullptr;
  const ModelConfig &c = model_.config;
  const Share rows{0, input_.num_tokens};
  const Bounds bounds[] = {layer.q_bounds, layer.k_bounds, layer.v_bounds};
  const size_t count = std::max<size_t>(1, layer.apart.size());
  for (size_t part = 0; part < count; ++part) {
    const ActivationSet in = products_.prepare_shared(thread, in_, c.hidden_size, rows.end, [&](int t) {
      const bool adds = before && !part;
      float *x = adds ? with_branch(t, before->down_bias, before->down_bounds, before->post_mlp_norm) : x_.row(t);
      if (encoder_.norms_before) return bounded(thread, normed(thread, x, layer.attn_norm), bounds[part]);
      if (adds) isa_.layer_norm(x, before->mlp_norm.weight, before->mlp_norm.bias, c.hidden_size, c.norm_eps, x);
      return static_cast<const float *>(x);
    });
    const Linear &linear = layer.apart.empty() ? layer.qkv : layer.apart[part];
    const Linear &next = part + 1 < count ? layer.apart[part + 1] : layer.o;
    products_.linear(thread, linear, in, rows, qkv_.data(), Store::assign, &next, loras_.shrink(thread, {&linear}, in));
    pool_.barrier();
  }
  make_heads(thread, layer);
  pool_.barrier();
  attend(thread, layer, next_tasks_[index]);
  pool_.barrier();
  const ActivationSet heads = products_.prepare_shared(thread, o_in_, layer.o.cols, rows.end, [&](int t) {
    float *row = heads_.row(t);
    if (layer.o_bounds) clip(layer.o_bounds, size_t(layer.o.cols), row, row);
    return static_cast<const float *>(row);
  });
  add_branch(thread, layer.o, heads, &layer.mlp.up);
  pool_.barrier();
}

// The product of a branch is added to x, unless more is done to it before.
void EncoderPass::add_branch(int thread, const Linear &linear, const ActivationSet &in, const Linear *next) {
  float *out = has_branch_ ? branch_.data() : x_.data();
  const Store store = has_branch_ ? Store::assign : Store::add;
  const LoraRows loras = loras_.shrink(thread, {&linear}, in);
  products_.linear(thread, linear, in, {0, input_.num_tokens}, out, store, next, loras);
}

// Bias, norm and rotation of this thread's share of the heads. Queries are scaled; keys and values are stored.
void EncoderPass::make_heads(int thread, const EncoderLayer &layer) {
  const ModelConfig &c = model_.config;
  const int dim = c.head_dim, padded = model_.padded_dim;
  const KVLayer kv = kv_->layer(0);
  const std::vector<int64_t> &slots = division(layer).slots;
  const int k_offset = layer.qkv.parts[1].offset, v_offset = layer.qkv.parts[2].offset;
  float *key = scratch_[size_t(thread)].key_value.data(), *value = key + padded, *scratch = value + padded;
  std::memset(key, 0, sizeof(float) * 2 * size_t(padded));
  auto make = [&](float *out, const float *from, int offset, Vector bias, Vector unit, RotaryRow rotary, float factor) {
    bias = bias ? bias + offset : nullptr;
    isa_.make_head({dim, from + offset, bias, unit, nullptr, c.norm_eps, rotary, factor}, out);
  };
  const Share share = share_of(input_.num_tokens, thread, pool_.size());
  for (int t = share.begin; t < share.end; ++t) {
    float *row = qkv_.data() + size_t(t) * size_t(layer.qkv.stride), *keys = row + k_offset, *values = row + v_offset;
    clip_outputs(layer.q_bounds, size_t(c.num_heads * dim), row);
    clip_outputs(layer.k_bounds, size_t(c.num_kv_heads * dim), keys);
    clip_outputs(layer.v_bounds, size_t(c.num_kv_heads * dim), values);
    RotaryRow rotary;
    if (layer.rope >= 0) {
      const int64_t at = int64_t(layer.rope) * input_.num_tokens + t;
      rotary = {cosines_.row(at), sines_.row(at), int(model_.ropes[size_t(layer.rope)].inv_freq.size())};
    }
    for (int head = 0; head < c.num_heads; ++head) {
      float *query = queries_.row(t) + head * padded;
      make(query, row, head * dim, layer.q_bias, layer.q_norm, rotary, c.query_scale * kLog2E);
    }
    for (int head = 0; head < c.num_kv_heads; ++head) {
      make(key, keys, head * dim, layer.k_bias, layer.k_norm, rotary, 1.f);
      make(value, values, head * dim, layer.v_bias, layer.v_norm, {}, 1.f);
      isa_.store_kv(kv, slots[size_t(t)], head, key, value, scratch);
    }
  }
}

AttentionConfig EncoderPass::config(const EncoderLayer &layer) const {
  const ModelConfig &c = model_.config;
  AttentionConfig found{c.num_heads, c.num_kv_heads, model_.padded_dim, c.head_dim, model_.padded_dim, 0.f,
                        layer.window < 0 ? 0 : 2 * layer.window + 1};
  if (encoder_.longest) {
    found.biases = encoder_.biases.data() + encoder_.longest - 1;
    found.bias_stride = size_t(encoder_.biases.stride());
  }
  return found;
}

// The kernel is causal: query i of a tile sees the keys up to first_position + i, of which a sliding window leaves the
// last. A first position beyond the text makes all keys visible, and one moved by the window a window to both sides.
void EncoderPass::attend(int thread, const EncoderLayer &layer, std::atomic<int> &next_task) {
  const AttentionConfig attention = config(layer);
  const KVLayer kv = kv_->layer(0);
  const std::vector<Task> &tasks = division(layer).tasks;
  const int heads = model_.config.num_kv_heads, total = int(tasks.size()) * heads;
  const int at_once = int(tasks.size()) >= 4 * pool_.size() ? heads : 1;
  for (int i; (i = next_task.fetch_add(at_once, std::memory_order_relaxed)) < total;) {
    for (int unit = i; unit < i + at_once; ++unit) {
      const Task &task = tasks[size_t(unit / heads)];
      const int64_t length = task.end - task.begin, first = task.first - task.begin;
      AttentionTile tile{};
      tile.num_queries = task.count;
      tile.kv_head = unit % heads;
      tile.queries = queries_.row(task.first);
      tile.query_stride = size_t(queries_.stride());
      tile.block_table = blocks_.data() + task.first_block;
      tile.query_position = first;
      tile.first_position = layer.window < 0 ? length : first + layer.window;
      tile.key_begin = layer.window < 0 ? 0 : std::max<int64_t>(0, first - layer.window);
      tile.key_end = layer.window < 0 ? length : std::min(length, first + task.count + layer.window);
      tile.out = heads_.row(task.first);
      tile.out_stride = size_t(heads_.stride());
      isa_.attend(kv, attention, tile, scratch_[size_t(thread)].attend.data());
    }
  }
}

void EncoderPass::mlp(int thread, size_t index) {
  const EncoderLayer &layer = encoder_.layers[index];
  const ModelConfig &c = model_.config;
  const Share rows{0, input_.num_tokens};
  const bool gated = !layer.mlp.gate.parts.empty(), apart = layer.gates_apart();
  auto input = [&](Bounds bounds, bool adds) {
    return products_.prepare_shared(thread, in_, c.hidden_size, rows.end, [&](int t) {
      float *x = adds ? with_branch(t, layer.o_bias, layer.o_bounds, layer.post_attn_norm) : x_.row(t);
      if (encoder_.norms_before) return bounded(thread, normed(thread, x, layer.mlp_norm), bounds);
      isa_.layer_norm(x, layer.attn_norm.weight, layer.attn_norm.bias, c.hidden_size, c.norm_eps, x);
      return static_cast<const float *>(x);
    });
  };
  ActivationSet in = input(layer.gate_bounds, true);
  LoraRows loras = loras_.shrink(thread, {&layer.mlp.gate, &layer.mlp.up}, in);
  int place = gated ? 1 : 0;
  if (apart) {
    products_.linear(thread, layer.mlp.gate, in, rows, gate_.data(), Store::assign, &layer.mlp.up, loras);
    if (!have_equal_inputs(layer.gate_bounds, layer.up_bounds)) {
      pool_.barrier();
      in = input(layer.up_bounds, false);
      loras = loras_.shrink(thread, {&layer.mlp.up}, in);
      place = 0;
    }
  }
  if (gated && !apart) {
    products_.gated(thread, layer.mlp, in, rows, hidden_.data(), layer.mlp.down, loras);
  } else {
    products_.linear(thread, layer.mlp.up, in, rows, hidden_.data(), Store::assign, &layer.mlp.down, loras, place);
  }
  pool_.barrier();
  const size_t stride = size_t(layer.mlp.up.stride);
  const ActivationSet hidden = products_.prepare_shared(thread, down_in_, layer.mlp.down.cols, rows.end, [&](int t) {
    float *row = hidden_.data() + size_t(t) * stride;
    if (apart) {
      float *gate = gate_.data() + size_t(t) * stride;
      clip_outputs(layer.gate_bounds, stride, gate);
      clip_outputs(layer.up_bounds, stride, row);
      add_bias(layer.gate_bias, int(stride), gate);
      add_bias(layer.up_bias, int(stride), row);
      isa_.gate_mul(c.activation, gate, row, stride, row);
      if (layer.down_bounds) clip(layer.down_bounds, size_t(layer.mlp.down.cols), row, row);
    } else if (!gated) {
      add_bias(layer.up_bias, int(stride), row);
      scale_row(encoder_.act_scale, stride, row);
      isa_.activate(c.activation, stride, row);
      scale_row(1.f / encoder_.act_scale, stride, row);
    }
    return static_cast<const float *>(row);
  });
  const EncoderLayer *next = index + 1 < encoder_.layers.size() ? &encoder_.layers[index + 1] : nullptr;
  add_branch(thread, layer.mlp.down, hidden, next ? &next->qkv : nullptr);
  pool_.barrier();
}

}  // namespace foreword::kernels
