#include "kernels/forward/latent_stage.h"

#include <algorithm>

namespace foreword::kernels {

LatentStage::LatentStage(PassContext &context, const EmbeddingStage &embedding)
    : ctx_(context),
      embedding_(embedding),
      config_(context.model.config.latent),
      heads_(context.model.config.num_heads),
      q_normed_(config_.query_inputs()),
      nope_(config_.nope_dim),
      latents_(config_.kv_rank),
      values_(heads_ * config_.value_dim) {
  if (!config_.kv_rank) return;
  std::vector<const std::vector<Linear> *> keys, values;
  for (const Layer &layer : ctx_.model.layers) {
    if (!layer.latent) continue;
    query_stride_ = layer.latent->q_b.stride;
    layer.latent->q_b.add_kinds(q_kinds_);
    if (layer.latent->indexer) layer.latent->indexer->q.add_kinds(config_.joins_latents ? index_kinds_ : q_kinds_);
    keys.push_back(&layer.latent->k_b);
    values.push_back(&layer.latent->v_b);
  }
  nope_.add(keys, ctx_.pool.size());
  latents_.add(values, ctx_.pool.size());
  q_normed_.reserve(ctx_.pool.size());
}

void LatentStage::reserve() {
  if (!config_.kv_rank) return;
  const int num_tokens = ctx_.input.num_tokens;
  if (config_.q_rank) {
    queries_.reserve(size_t(num_tokens) * size_t(query_stride_));
    q_input_.reserve(num_tokens, config_.query_inputs(), ctx_.with_loras(q_kinds_), ctx_.pool.size());
  }
  if (config_.joins_latents) {
    index_input_.reserve(num_tokens, config_.q_rank, ctx_.with_loras(index_kinds_), ctx_.pool.size());
  }
  values_.reserve(num_tokens);
  nope_.reserve(ctx_);
  latents_.reserve(ctx_);
}

void LatentStage::multiply(int thread, const std::vector<Linear> &heads, const HeadProducts &products, HeadRows from,
                           HeadRows to, float factor, const Layer *rotated) {
  auto make = [&](int dim, const float *source, RotaryRow rotary, float *out) {
    ctx_.isa.make_head({dim, source, nullptr, nullptr, nullptr, 0.f, rotary, factor}, out);
  };
  products.run(
      ctx_, thread, heads, [&](int t, int head) { return from.at(t, head); },
      [&](const HeadProducts::Outputs &o) {
        const int first = o.outputs.begin, count = o.outputs.end - first;
        prefetch_row<true>(to.at(o.ahead, o.head) + first, count);
        make(count, o.out, {}, to.at(o.token, o.head) + first);
        if (!rotated || first > 0) return;
        const int dim = config_.rope_dim;
        make(dim, from.at(o.token, o.head) - dim, embedding_.rotary(rotated->rope, o.token),
             to.at(o.token, o.head) - dim);
      });
}

void LatentStage::make_queries(int thread, const Layer &layer, float factor, FloatRows &out, FloatRows *index_queries) {
  const Latent &latent = *layer.latent;
  const int num_tokens = ctx_.input.num_tokens, padded_dim = ctx_.model.padded_dim;
  if (config_.q_rank) {
    const int rank = config_.q_rank;
    const Share all{0, num_tokens};
    float *normed = q_normed_.row(thread);
    auto norm = [&](int t) {
      ctx_.isa.norm_parts(ctx_.first_row(layer, t), latent.q_norm, 0, 1, rank, config_.norm_eps, normed);
      return normed;
    };
    const Linear *index = index_queries ? &latent.indexer->q : nullptr;
    if (index && config_.joins_latents) {
      std::fill_n(normed + rank, rank, 0.f);  // inputs of a product are prepared in whole blocks
      const ActivationSet in = ctx_.products.prepare(thread, index_input_, rank, num_tokens, norm);
      ctx_.products.linear(thread, *index, in, all, index_queries->data(), Store::assign, &latent.q_b,
                           ctx_.shrink(thread, {index}, in));
      if (ctx_.has_loras()) ctx_.pool.barrier();  // the adapters of this product were added
      index = nullptr;
    }
    const ActivationSet in = ctx_.products.prepare(thread, q_input_, config_.query_inputs(), num_tokens, [&](int t) {
      norm(t);
      if (config_.joins_latents) std::copy_n(ctx_.first_row(layer, t), rank, normed + rank);
      return normed;
    });
    const LoraRows loras =
        index ? ctx_.shrink(thread, {&latent.q_b, index}, in) : ctx_.shrink(thread, {&latent.q_b}, in);
    ctx_.products.linear(thread, latent.q_b, in, all, queries_.data(), Store::assign, index, loras);
    if (index) ctx_.products.linear(thread, *index, in, all, index_queries->data(), Store::assign, nullptr, loras, 1);
    ctx_.pool.barrier();
  }
  const int rope_dim = config_.rope_dim, dim = config_.query_dim();
  HeadRows queries{queries_.data(), latent.q_b.stride, dim, rope_dim};
  if (!config_.q_rank) queries = {ctx_.first_row(layer, 0), layer.qkv.stride, dim, rope_dim};
  multiply(thread, latent.k_b, nope_, queries, {out.data(), out.stride(), padded_dim, rope_dim}, factor, &layer);
}

void LatentStage::key(const Layer &layer, const float *qkv, RotaryRow rotary, float *out) const {
  const float *row = qkv + layer.qkv.parts[1].offset;
  ctx_.isa.make_head({config_.rope_dim, row, nullptr, nullptr, nullptr, 0.f, rotary, 1.f}, out);
  ctx_.isa.norm_parts(row + config_.rope_dim, layer.latent->kv_norm, 0, 1, config_.kv_rank, config_.norm_eps,
                      out + config_.rope_dim);
}

const FloatRows &LatentStage::expand(int thread, const Layer &layer, const FloatRows &out) {
  const int head_dim = config_.rope_dim + config_.kv_rank;
  multiply(thread, layer.latent->v_b, latents_, {out.data(), out.stride(), head_dim, config_.rope_dim},
           {values_.data(), values_.stride(), config_.value_dim, 0}, 1.f, nullptr);
  ctx_.pool.barrier();
  return values_;
}

}  // namespace foreword::kernels
