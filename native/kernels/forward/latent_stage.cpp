#include "kernels/forward/latent_stage.h"

#include <algorithm>

namespace foreword::kernels {

LatentStage::LatentStage(PassContext &context)
    : ctx_(context),
      config_(context.model.config.latent),
      heads_(context.model.config.num_heads),
      queries_(std::max(1, config_.q_rank ? heads_ * config_.query_dim() : 0)),
      nope_(std::max(1, config_.nope_dim)),
      absorbed_(std::max(1, config_.kv_rank)),
      latents_(std::max(1, config_.kv_rank)),
      head_values_(std::max(1, config_.value_dim)),
      values_(std::max(1, heads_ * config_.value_dim)) {
  for (const Layer &layer : ctx_.model.layers) {
    if (!layer.latent) continue;
    layer.latent->q_b.add_kinds(q_kinds_);
    for (const Linear &head : layer.latent->k_b) head.add_kinds(k_kinds_);
    for (const Linear &head : layer.latent->v_b) head.add_kinds(v_kinds_);
  }
}

void LatentStage::reserve() {
  if (!config_.kv_rank) return;
  const int num_tokens = ctx_.input.num_tokens, rows = num_tokens * heads_;
  if (config_.q_rank) {
    queries_.reserve(num_tokens);
    q_input_.reserve(num_tokens, config_.q_rank, ctx_.with_loras(q_kinds_));
  }
  for (FloatRows *of_heads : {&nope_, &absorbed_, &latents_, &head_values_}) of_heads->reserve(rows);
  values_.reserve(num_tokens);
  k_input_.reserve(rows, config_.nope_dim, k_kinds_);
  v_input_.reserve(rows, config_.kv_rank, v_kinds_);
}

template <class Source>
void LatentStage::multiply(int thread, const std::vector<Linear> &heads, const ActivationBuffer &buffer, FloatRows &in,
                           FloatRows &out, Source &&source) {
  const int num_tokens = ctx_.input.num_tokens;
  const ActivationSet set =
      ctx_.products.prepare_groups(thread, buffer, heads[0].cols, num_tokens, heads_, [&](int t, int h) {
        const float *from = source(t, h);
        if (heads[0].cols == in.stride()) return from;
        float *padded = in.row(h * num_tokens + t);
        std::copy_n(from, heads[0].cols, padded);  // padded with zeros
        return static_cast<const float *>(padded);
      });
  for (int h = 0; h < heads_; ++h) {
    const Share rows{h * num_tokens, (h + 1) * num_tokens};
    ctx_.products.linear(thread, heads[size_t(h)], set, rows, out.data(), Store::assign);
  }
  ctx_.pool.barrier();
}

void LatentStage::absorb(int thread, const Layer &layer, FloatRows &qkv) {
  const Latent &latent = *layer.latent;
  const int num_tokens = ctx_.input.num_tokens;
  if (config_.q_rank) {
    const ActivationSet in = ctx_.products.prepare_shared(thread, q_input_, config_.q_rank, num_tokens, [&](int t) {
      ctx_.isa.norm_parts(qkv.row(t), latent.q_norm, 0, 1, config_.q_rank, config_.norm_eps, qkv.row(t));
      return qkv.row(t);
    });
    ctx_.products.linear(thread, latent.q_b, in, {0, num_tokens}, queries_.data(), Store::assign, nullptr,
                         ctx_.shrink(thread, {&latent.q_b}, in));
    ctx_.pool.barrier();
  }
  const FloatRows &queries = config_.q_rank ? queries_ : qkv;
  multiply(thread, latent.k_b, k_input_, nope_, absorbed_, [&](int t, int h) -> const float * {
    return queries.row(t) + h * config_.query_dim() + config_.rope_dim;
  });
}

void LatentStage::query(const float *qkv, int token, int head, RotaryRow rotary, float factor, float *out) const {
  const float *row = config_.q_rank ? queries_.row(token) : qkv;
  auto make = [&](int dim, const float *from, RotaryRow of_part, float *to) {
    ctx_.isa.make_head({dim, from, nullptr, nullptr, nullptr, 0.f, of_part, factor}, to);
  };
  make(config_.rope_dim, row + head * config_.query_dim(), rotary, out);
  make(config_.kv_rank, absorbed_.row(head * ctx_.input.num_tokens + token), {}, out + config_.rope_dim);
}

void LatentStage::key(const Layer &layer, const float *qkv, RotaryRow rotary, float *out) const {
  const float *row = qkv + layer.qkv.parts[1].offset;
  ctx_.isa.make_head({config_.rope_dim, row, nullptr, nullptr, nullptr, 0.f, rotary, 1.f}, out);
  ctx_.isa.norm_parts(row + config_.rope_dim, layer.latent->kv_norm, 0, 1, config_.kv_rank, config_.norm_eps,
                      out + config_.rope_dim);
}

const FloatRows &LatentStage::expand(int thread, const Layer &layer, const FloatRows &out) {
  const int num_tokens = ctx_.input.num_tokens, head_dim = config_.rope_dim + config_.kv_rank;
  multiply(thread, layer.latent->v_b, v_input_, latents_, head_values_, [&](int t, int h) -> const float * {
    return out.row(t) + h * head_dim + config_.rope_dim;
  });
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    for (int h = 0; h < heads_; ++h) {
      std::copy_n(head_values_.row(h * num_tokens + t), config_.value_dim, values_.row(t) + h * config_.value_dim);
    }
  }
  ctx_.pool.barrier();
  return values_;
}

}  // namespace foreword::kernels
