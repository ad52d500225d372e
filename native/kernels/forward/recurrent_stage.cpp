#include "kernels/forward/recurrent_stage.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace foreword::kernels {
namespace {

// The parts of a row of projections after the channels.
constexpr int kGatePart = 3, kTimePart = 4, kWritePart = 5;
constexpr int kShortWritePart = 1, kShortGatePart = 2;  // the parts of short_conv
constexpr int kSelectiveGatePart = 1;                   // the gate of mamba1 and of rg_lru
constexpr int kLatePart = 2, kValuePart = 3;            // the values of mixed_qkv
constexpr int kSlice = 16;                              // channels that a thread mixes at once
constexpr float kUnitEps = 1e-6f;

float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

}  // namespace

RecurrentStage::RecurrentStage(PassContext &context)
    : ctx_(context),
      config_(context.model.recurrent),
      channels_(config_.channel_stride()),
      q_(config_.gated_delta() ? 0 : padded_row(config_.num_values()) + padded_row(config_.num_keys())),
      k_(padded_row(config_.gated_delta() ? config_.num_keys() : config_.num_values())),
      v_(config_.gated_delta() ? 2 * padded_row(config_.num_keys()) : 0),
      projected_(context.model.qkv_stride(true)),
      decay_(config_.num_decays()),
      write_(config_.num_heads),
      out_(config_.num_values()),
      unit_(config_.key_dim),
      inner_(config_.mamba1() ? padded_row(config_.rank) + 2 * padded_row(config_.key_dim) : config_.num_values()),
      steps_(config_.mamba1() ? config_.num_values() : config_.num_decays()),
      low_(config_.rank),
      gates_(config_.rg_lru()      ? 2 * channels_
             : config_.mixed_qkv() ? (config_.num_heads + config_.num_key_heads) * config_.heads_kernel *
                                         config_.value_dim
                                   : 0),
      past_(config_.mixed_qkv() ? config_.num_inputs() * channels_ : 0),
      gate_products_(config_.rg_lru()      ? config_.rank
                     : config_.mixed_qkv() ? config_.heads_kernel * config_.value_dim
                                           : 0) {
  if (config_.num_heads == 0) return;
  if (config_.mixed_qkv()) {
    ctx_.mixed = &projected_;
    ctx_.mixed_values = &out_;
  }
  std::vector<const std::vector<Linear> *> gates;
  for (const Layer &layer : ctx_.model.layers) {
    if (!layer.recurrent) continue;
    gates.push_back(&layer.recurrent->gates);
    layer.o.add_kinds(kinds_);
    layer.recurrent->inner.add_kinds(inner_kinds_);
    layer.recurrent->gate.add_kinds(inner_kinds_);
    layer.recurrent->step.add_kinds(step_kinds_);
  }
  if (config_.rg_lru() || config_.mixed_qkv()) gate_products_.add(gates, ctx_.pool.size());
  past_.reserve(ctx_.pool.size());
  low_.reserve(ctx_.pool.size());
  unit_.reserve(2);
  const float length = std::sqrt(float(config_.key_dim));
  std::fill_n(unit_.row(0), config_.key_dim, 1.f / float(config_.key_dim));
  std::fill_n(unit_.row(1), config_.key_dim, 1.f / length);
}

void RecurrentStage::reserve() {
  if (config_.num_heads == 0) return;
  const int num_tokens = ctx_.input.num_tokens;
  for (FloatRows *rows : {&projected_, &decay_, &write_, &out_}) rows->reserve(num_tokens);
  o_input_.reserve(num_tokens, config_.num_values(), ctx_.with_loras(kinds_), ctx_.pool.size());
  if (config_.rg_lru() || config_.mixed_qkv()) {
    gates_.reserve(num_tokens);
    gate_products_.reserve(ctx_);
  }
  if (!config_.mamba1() && !config_.has_lows()) return;
  inner_.reserve(num_tokens);
  steps_.reserve(num_tokens);
  const int inner_cols = config_.mamba1() ? config_.num_values() : config_.rank;
  inner_input_.reserve(num_tokens, inner_cols, ctx_.with_loras(inner_kinds_), ctx_.pool.size());
  step_input_.reserve(num_tokens, config_.rank, ctx_.with_loras(step_kinds_), ctx_.pool.size());
}

void RecurrentStage::run(int thread, const Layer &layer) {
  const Share rows{0, ctx_.input.num_tokens};
  const ActivationSet in = ctx_.input_rows(thread, layer, rows);
  const Linear *next = config_.mixed_qkv() ? nullptr : &layer.o;
  ctx_.products.linear(thread, layer.qkv, in, rows, projected_.data(), Store::assign, next,
                       ctx_.shrink(thread, {&layer.qkv}, in));
  ctx_.pool.barrier();
  ctx_.add_input_bias(thread, layer, projected_.data());
  ctx_.clock.finish(thread, Stage::qkv);

  if (config_.short_conv()) {
    mix_channels(thread, layer);
  } else if (config_.mamba1()) {
    mix_selectively(thread, layer);
  } else if (config_.rg_lru()) {
    mix_gated(thread, layer);
  } else if (config_.mixed_qkv()) {
    mix_heads(thread, layer);
  } else {
    mix_tokens(thread, layer);
  }
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::attention);

  if (config_.mixed_qkv()) return;
  next = layer.mlp ? &layer.mlp->first() : nullptr;
  ctx_.add_product(thread, layer.o, o_input_, out_, layer.o_bias, layer.post_attn_norm, next);
  ctx_.clock.finish(thread, Stage::o);
}

// out_ of mamba2 and gated_delta.
void RecurrentStage::mix_tokens(int thread, const Layer &layer) {
  convolve(thread, layer);
  if (config_.has_lows()) multiply_lows(thread, layer);
  ctx_.pool.barrier();
  prepare_tokens(thread, layer);
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::rope);

  scan(thread, layer);
  ctx_.pool.barrier();
  apply_gate(thread, layer);
}

// The second products of z and dt.
void RecurrentStage::multiply_lows(int thread, const Layer &layer) {
  const Recurrent &r = *layer.recurrent;
  const int num_tokens = ctx_.input.num_tokens;
  auto multiply = [&](const Linear &second, const ProductInput &input, int part, FloatRows &out, const Linear &next) {
    const ActivationSet low = ctx_.products.prepare(thread, input, config_.rank, num_tokens, [&](int t) {
      return projection(layer, part, t);
    });
    ctx_.products.linear(thread, second, low, {0, num_tokens}, out.data(), Store::assign, &next,
                         ctx_.shrink(thread, {&second}, low));
  };
  multiply(r.gate, inner_input_, kGatePart, inner_, r.step);
  multiply(r.step, step_input_, kTimePart, steps_, layer.o);
}

// out_ of short_conv: the convolution of beta v, times z.
void RecurrentStage::mix_channels(int thread, const Layer &layer) {
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    float *v = projected_.row(t);
    const float *write = projection(layer, kShortWritePart, t);
    for (int i = 0; i < channels_; ++i) v[i] *= write[i];
  }
  ctx_.pool.barrier();
  convolve(thread, layer);
  ctx_.pool.barrier();
  for (int t = share.begin; t < share.end; ++t) {
    const float *mixed = projected_.row(t), *gate = projection(layer, kShortGatePart, t);
    float *out = out_.row(t);
    for (int i = 0; i < out_.stride(); ++i) out[i] = mixed[i] * gate[i];
  }
}

// out_ of mamba1.
void RecurrentStage::mix_selectively(int thread, const Layer &layer) {
  convolve(thread, layer);
  ctx_.pool.barrier();
  const Recurrent &r = *layer.recurrent;
  const int num_tokens = ctx_.input.num_tokens;
  const Share rows{0, num_tokens};
  const ActivationSet mixed = ctx_.products.prepare(thread, inner_input_, config_.num_values(), num_tokens,
                                                    [&](int t) { return projected_.row(t); });
  ctx_.products.linear(thread, r.inner, mixed, rows, inner_.data(), Store::assign, &r.step,
                       ctx_.shrink(thread, {&r.inner}, mixed));
  ctx_.pool.barrier();
  auto norm = [&](const float *x, int part, int size, float *out) {
    ctx_.isa.norm_parts(x, r.inner_norms[part], 0, 1, size, r.inner_eps, out);
  };
  const bool has_norms = r.inner_norms[0] != nullptr;
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; has_norms && t < share.end; ++t) {
    for (int part = 1; part < 3; ++part) {
      float *keys = inner_.row(t) + r.inner.parts[size_t(part)].offset;
      norm(keys, part, config_.key_dim, keys);
    }
  }
  const ActivationSet low = ctx_.products.prepare(thread, step_input_, config_.rank, num_tokens, [&](int t) {
    const float *own = inner_.row(t);
    if (!has_norms) return own;
    norm(own, 0, config_.rank, low_.row(thread));
    return static_cast<const float *>(low_.row(thread));
  });
  ctx_.products.linear(thread, r.step, low, rows, steps_.data(), Store::assign, &layer.o,
                       ctx_.shrink(thread, {&r.step}, low));
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::rope);
  scan_selective(thread, layer);
}

// out_ of rg_lru.
void RecurrentStage::mix_gated(int thread, const Layer &layer) {
  convolve(thread, layer);
  ctx_.pool.barrier();
  const int rank = config_.rank;
  gate_products_.run(
      ctx_, thread, layer.recurrent->gates, [&](int t, int block) { return projected_.row(t) + block * rank; },
      [&](const HeadProducts::Outputs &o) {
        float *write = gates_.row(o.token) + o.head * rank, *forget = write + channels_;
        const int end = std::min(o.outputs.end, rank), begin = std::max(o.outputs.begin, rank);
        std::copy(o.out, o.out + std::max(0, end - o.outputs.begin), write + o.outputs.begin);
        if (begin < o.outputs.end) {
          std::copy_n(o.out + begin - o.outputs.begin, o.outputs.end - begin, forget + begin - rank);
        }
      });
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::rope);
  scan_gated(thread, layer);
  ctx_.pool.barrier();
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    const float *gate = projection(layer, kSelectiveGatePart, t);
    ctx_.isa.gate_mul(Gate::gelu_tanh, gate, out_.row(t), size_t(out_.stride()), out_.row(t));
  }
}

// Queries and keys, in the places of their projections, and values, in out_, of mixed_qkv.
void RecurrentStage::mix_heads(int thread, const Layer &layer) {
  const int dim = config_.value_dim, num_heads = config_.num_heads, slices = (dim + kSlice - 1) / kSlice;
  const int units = config_.num_key_heads * slices, lates = (config_.num_late() + kSlice - 1) / kSlice;
  const Share share = share_of(units + lates, thread, ctx_.pool.size());
  auto slice = [](int index, int size) { return Share{index * kSlice, std::min((index + 1) * kSlice, size)}; };
  for (int unit = share.begin; unit < share.end; ++unit) {
    if (unit < units) {
      convolve_heads(thread, layer, unit / slices, slice(unit % slices, dim));
    } else {
      delay(thread, layer, slice(unit - units, config_.num_late()));
    }
  }
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::rope);
  const int cols = config_.heads_kernel * dim;
  gate_products_.run(
      ctx_, thread, layer.recurrent->gates, [&](int t, int head) { return gates_.row(t) + head * cols; },
      [&](const HeadProducts::Outputs &o) {
        const int own = o.head < num_heads ? o.head : o.head - num_heads, part = o.head < num_heads ? 0 : 1;
        float *to = projection(layer, part, o.token) + own * dim;
        const float *bias = layer.recurrent->gates_bias + layer.qkv.parts[size_t(part)].offset + own * dim;
        for (int i = o.outputs.begin; i < o.outputs.end; ++i) to[i] += o.out[i - o.outputs.begin] + bias[i];
      });
}

template <class Channels, class F>
void RecurrentStage::with_inputs(int thread, const Layer &layer, int count, Channels &&channels, F &&f) {
  const ForwardInput &in = ctx_.input;
  const int kept = config_.num_inputs();
  const size_t matrix = config_.matrix_floats();
  float *past = past_.row(thread);
  for (int b = 0; b < in.num_reqs; ++b) {
    const int first = in.query_start_loc[b], num_runs = this->num_runs(b);
    if (num_runs == 0) continue;
    for (int j = 0; j < count; ++j) {
      const Share own = channels(j);
      for (int i = 0; i < kept; ++i) {
        float *to = past + size_t(i) * size_t(channels_);
        const float *from = run_of(layer, b, 0).before + matrix + size_t(i) * size_t(channels_);
        for (int c = own.begin; c < own.end; ++c) to[c] = in.num_computed(b) == 0 ? 0.f : from[c];
      }
    }
    auto input = [&](int t) -> const float * {
      return t < 0 ? past + ptrdiff_t(kept + t) * channels_ : projected_.row(first + t);
    };
    auto keep = [&] {
      for (int index = 0; index < num_runs; ++index) {
        const Run run = run_of(layer, b, index);
        const int end = run.first + run.num_tokens - first;
        for (int j = 0; j < count; ++j) {
          const Share own = channels(j);
          for (int i = 0; i < kept; ++i) {
            float *to = run.after + matrix + size_t(i) * size_t(channels_);
            std::copy(input(end - kept + i) + own.begin, input(end - kept + i) + own.end, to + own.begin);
          }
        }
      }
    };
    f(first, in.query_len(b), input, keep);
  }
}

// These dimensions of a head of keys and of its heads of queries: the first convolution, in gates_, and the residual.
void RecurrentStage::convolve_heads(int thread, const Layer &layer, int key_head, Share dims) {
  const Recurrent &r = *layer.recurrent;
  const int dim = config_.value_dim, kernel = config_.conv_kernel, taps = config_.heads_kernel;
  const int of_key = config_.num_heads / config_.num_key_heads, k_offset = layer.qkv.parts[1].offset;
  auto channels = [&](int j) {  // the last ones are those of keys
    const int begin = j < of_key ? (key_head * of_key + j) * dim : k_offset + key_head * dim;
    return Share{begin + dims.begin, begin + dims.end};
  };
  with_inputs(thread, layer, of_key + 1, channels, [&](int first, int num_tokens, auto &&input, auto &&keep) {
    for (int j = 0; j <= of_key; ++j) {
      const Share own = channels(j);
      const int head = j < of_key ? key_head * of_key + j : config_.num_heads + key_head;
      for (int t = 1 - taps; t < num_tokens; ++t) {
        float sums[kSlice];
        std::copy(r.conv_bias + own.begin, r.conv_bias + own.end, sums);
        for (int i = 0; i < kernel; ++i) {
          const float *factors = r.conv + i * channels_ + own.begin, *from = input(t - kernel + 1 + i) + own.begin;
          for (int c = 0; c < own.end - own.begin; ++c) sums[c] += factors[c] * from[c];
        }
        for (int i = 0; i < taps; ++i) {  // tap i of a token reads token − taps + 1 + i
          const int token = t + taps - 1 - i;
          if (token < 0 || token >= num_tokens) continue;
          std::copy_n(sums, own.end - own.begin, gates_.row(first + token) + (head * taps + i) * dim + dims.begin);
        }
      }
    }
    keep();
    for (int t = first; t < first + num_tokens; ++t) {
      float *row = projected_.row(t), *key = row + channels(of_key).begin;
      for (int i = 0; i < dims.end - dims.begin; ++i) {
        float sum = 0.f;
        for (int j = 0; j < of_key; ++j) {
          float &query = row[channels(j).begin + i];
          sum += query = (query + key[i]) * 0.5f;
        }
        key[i] = sum / float(of_key);
      }
    }
  });
}

// Values, of which these channels of the second half are those of the token before.
void RecurrentStage::delay(int thread, const Layer &layer, Share channels) {
  const int offset = layer.qkv.parts[kLatePart].offset, half = config_.num_late();
  const Vector bias = layer.recurrent->late_bias;
  const Share own{offset + channels.begin, offset + channels.end};
  with_inputs(thread, layer, 1, [&](int) { return own; }, [&](int first, int num_tokens, auto &&input, auto &&keep) {
    for (int t = 0; t < num_tokens; ++t) {
      const float *now = projection(layer, kValuePart, first + t);
      float *out = out_.row(first + t);
      for (int c = channels.begin; c < channels.end; ++c) {
        out[c] = now[c];
        out[half + c] = input(t - 1)[offset + c] + (bias ? bias[c] : 0.f);
      }
    }
    keep();
  });
}

RecurrentStage::Run RecurrentStage::run_of(const Layer &layer, int req, int index) const {
  const ForwardInput &in = ctx_.input;
  const int32_t *blocks = in.groups[size_t(layer.group)].blocks_of(in.idx_mapping[req]);
  const int num_known = in.query_len(req) - in.num_draft_tokens[req], first = in.query_start_loc[req];
  auto state = [&](int entry) { return ctx_.model.kv.state(layer.slot, blocks[entry]); };
  if (index > 0) return {first + num_known + index - 1, 1, state(index - 1), state(index)};
  return {first, num_known, state(in.num_computed(req) == 0 ? 0 : in.first_state(req)), state(0)};
}

// This thread's share of the channels of all requests. A request without computed tokens starts from zeros.
void RecurrentStage::convolve(int thread, const Layer &layer) {
  const ForwardInput &in = ctx_.input;
  const int before = config_.conv_kernel - 1;
  const Share share = share_of(channels_ / kRowPadding, thread, ctx_.pool.size());
  const int begin = share.begin * kRowPadding, end = share.end * kRowPadding;
  for (int b = 0; b < in.num_reqs; ++b) {
    for (int index = 0; index < num_runs(b); ++index) {
      const Run run = run_of(layer, b, index);
      float *past = run.before + config_.matrix_floats();
      for (int i = 0; index == 0 && in.num_computed(b) == 0 && i < before; ++i) {
        std::memset(past + size_t(i) * size_t(channels_) + begin, 0, sizeof(float) * size_t(end - begin));
      }
      ctx_.isa.convolve({.rows = projected_.row(run.first),
                         .past = past,
                         .last = run.after + config_.matrix_floats(),
                         .weights = layer.recurrent->conv,
                         .bias = layer.recurrent->conv_bias,
                         .stride = size_t(projected_.stride()),
                         .channel_stride = size_t(channels_),
                         .num_tokens = run.num_tokens,
                         .kernel = config_.conv_kernel,
                         .begin = begin,
                         .end = end,
                         .silu = !config_.short_conv() && !config_.rg_lru()});
    }
  }
}

// For this thread's tokens: the decay of the state and the factor of what is written, by head; unit q and k.
void RecurrentStage::prepare_tokens(int thread, const Layer &layer) {
  const Recurrent &r = *layer.recurrent;
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    const float *time = config_.has_lows() ? steps_.row(t) : projection(layer, kTimePart, t);
    const float *write = config_.gated_delta() ? projection(layer, kWritePart, t) : nullptr;
    if (config_.channel_decays) {
      ctx_.isa.channel_decays(time, r.dt_bias, r.rate, r.least_log, size_t(decay_.stride()), decay_.row(t));
    }
    for (int h = 0; h < config_.num_heads; ++h) {
      if (config_.channel_decays) {
        write_.row(t)[h] = r.write_scale * sigmoid(write[h]);
        continue;
      }
      const float dt = std::max(softplus(time[h] + r.dt_bias[h]), r.least_step);
      decay_.row(t)[h] = std::exp(-r.rate[h] * dt);
      write_.row(t)[h] = write ? r.write_scale * sigmoid(write[h]) : dt;
    }
    if (!config_.gated_delta()) continue;
    const float eps = kUnitEps / float(config_.key_dim);
    for (int i = 0; i < 2; ++i) {
      float *keys = projected_.row(t) + (i == 0 ? q_ : k_);
      ctx_.isa.norm_parts(keys, unit_.row(i), 0, config_.num_key_heads, config_.key_dim, eps, keys);
    }
  }
}

// This thread's share of the heads of all requests: a head of every request before the next head, so that the tokens
// of a long request are divided between the threads.
void RecurrentStage::scan(int thread, const Layer &layer) {
  const ForwardInput &in = ctx_.input;
  const Share share = share_of(config_.num_heads * in.num_reqs, thread, ctx_.pool.size());
  for (int unit = share.begin; unit < share.end; ++unit) {
    const int head = unit / in.num_reqs, b = unit % in.num_reqs;
    const size_t at = config_.head_floats() * size_t(head);
    const int key = config_.key_head(head) * config_.key_dim;
    const int first_decay = config_.channel_decays ? head * config_.key_dim : head;
    for (int index = 0; index < num_runs(b); ++index) {
      const Run run = run_of(layer, b, index);
      if (index == 0 && in.num_computed(b) == 0) std::memset(run.before + at, 0, sizeof(float) * config_.head_floats());
      const float *mixed = projected_.row(run.first);
      ctx_.isa.scan_state({.gated_delta = config_.gated_delta(),
                           .channel_decays = config_.channel_decays,
                           .num_tokens = run.num_tokens,
                           .key_dim = config_.key_dim,
                           .value_dim = config_.value_dim,
                           .padded_value_dim = config_.padded_value_dim(),
                           .before = run.before + at,
                           .state = run.after + at,
                           .q = mixed + q_ + key,
                           .k = mixed + k_ + key,
                           .v = mixed + v_ + head * config_.value_dim,
                           .decay = decay_.row(run.first) + first_decay,
                           .write = write_.row(run.first) + head,
                           .skip = layer.recurrent->skip ? layer.recurrent->skip[head] : 0.f,
                           .out = out_.row(run.first) + head * config_.value_dim,
                           .stride = size_t(projected_.stride()),
                           .decay_stride = size_t(decay_.stride()),
                           .write_stride = size_t(write_.stride()),
                           .out_stride = size_t(out_.stride())});
    }
  }
}

// This thread's share of the channels of all requests.
void RecurrentStage::scan_selective(int thread, const Layer &layer) {
  const ForwardInput &in = ctx_.input;
  const Recurrent &r = *layer.recurrent;
  const Share share = share_of(config_.padded_value_dim() / kChannelGroup, thread, ctx_.pool.size());
  const int begin = share.begin * kChannelGroup, end = share.end * kChannelGroup;
  const size_t first = kScaleFloats + size_t(begin) * size_t(config_.key_dim);
  for (int b = 0; b < in.num_reqs; ++b) {
    for (int index = 0; index < num_runs(b); ++index) {
      const Run run = run_of(layer, b, index);
      if (index == 0 && in.num_computed(b) == 0) {
        std::memset(run.before + first, 0, sizeof(float) * size_t(end - begin) * size_t(config_.key_dim));
      }
      const float *inner = inner_.row(run.first);
      ctx_.isa.scan_selective({.num_tokens = run.num_tokens,
                               .key_dim = config_.key_dim,
                               .begin = begin,
                               .end = end,
                               .rate = r.rate,
                               .before = run.before + kScaleFloats,
                               .state = run.after + kScaleFloats,
                               .step_bias = r.dt_bias,
                               .skip = r.skip,
                               .x = projected_.row(run.first),
                               .gate = projection(layer, kSelectiveGatePart, run.first),
                               .step = steps_.row(run.first),
                               .k = inner + r.inner.parts[1].offset,
                               .q = inner + r.inner.parts[2].offset,
                               .out = out_.row(run.first),
                               .stride = size_t(projected_.stride()),
                               .step_stride = size_t(steps_.stride()),
                               .key_stride = size_t(inner_.stride()),
                               .out_stride = size_t(out_.stride())});
    }
  }
}

// This thread's share of the channels of all requests.
void RecurrentStage::scan_gated(int thread, const Layer &layer) {
  const ForwardInput &in = ctx_.input;
  const Recurrent &r = *layer.recurrent;
  const Share share = share_of(config_.padded_value_dim() / kChannelGroup, thread, ctx_.pool.size());
  const int begin = share.begin * kChannelGroup, end = share.end * kChannelGroup;
  for (int b = 0; b < in.num_reqs; ++b) {
    const bool is_new = in.num_computed(b) == 0;
    for (int index = 0; index < num_runs(b); ++index) {
      const Run run = run_of(layer, b, index);
      if (index == 0 && is_new) std::fill(run.before + kScaleFloats + begin, run.before + kScaleFloats + end, 0.f);
      ctx_.isa.scan_gated({.num_tokens = run.num_tokens,
                           .begin = begin,
                           .end = end,
                           .is_first = index == 0 && is_new,
                           .rate = r.rate,
                           .write_bias = r.write_bias,
                           .forget_bias = r.forget_bias,
                           .before = run.before + kScaleFloats,
                           .state = run.after + kScaleFloats,
                           .x = projected_.row(run.first),
                           .write = gates_.row(run.first),
                           .forget = gates_.row(run.first) + channels_,
                           .out = out_.row(run.first),
                           .stride = size_t(projected_.stride()),
                           .gate_stride = size_t(gates_.stride()),
                           .out_stride = size_t(out_.stride())});
    }
  }
}

// This thread's tokens: norm(out silu(z)) of mamba2, or norm(out) silu(z), or without a norm; norm(out) silu(z) of
// gated_delta; or each with sigmoid(z).
void RecurrentStage::apply_gate(int thread, const Layer &layer) {
  const Recurrent &r = *layer.recurrent;
  const float eps = r.norm_eps;
  const int parts = r.joint_norm ? 1 : config_.num_key_heads, size = config_.num_values() / parts;
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    float *row = out_.row(t), *gate = config_.has_lows() ? inner_.row(t) : projection(layer, kGatePart, t);
    auto norm = [&] {
      if (config_.gated_delta()) {
        ctx_.isa.norm_parts(row, r.norm, 0, config_.num_heads, config_.value_dim, eps, row);
      } else if (r.norm) {
        ctx_.isa.norm_parts(row, r.norm, size_t(size), parts, size, eps, row);
      }
    };
    const bool is_first = config_.gated_delta() || r.is_normed_first;
    if (is_first) norm();
    for (int i = 0; r.z_scale != 1.f && i < out_.stride(); ++i) gate[i] *= r.z_scale;
    ctx_.isa.gate_mul(r.sigmoid_gate ? Gate::sigmoid : Gate::silu, gate, row, size_t(out_.stride()), row);
    if (!is_first) norm();
  }
}

}  // namespace foreword::kernels
