#include "kernels/forward/latent_stage.h"

#include <algorithm>

namespace foreword::kernels {
namespace {

constexpr int kHeadTokens = LoraStep::kTokensAlone;  // their rows stay in the caches until they are multiplied
constexpr int kHeadRowsAhead = 8;  // rows between the one in use and the one that is prefetched

// The rows of a head are far from each other: the processor does not foresee them.
template <bool IsWritten>
void prefetch_row(const float *row, int size) {
  for (int i = 0; i < size; i += 16) __builtin_prefetch(row + i, IsWritten);
}

}  // namespace

LatentStage::LatentStage(PassContext &context, const EmbeddingStage &embedding)
    : ctx_(context),
      embedding_(embedding),
      config_(context.model.config.latent),
      heads_(context.model.config.num_heads),
      q_normed_(config_.q_rank),
      queries_(config_.q_rank ? heads_ * config_.query_dim() : 0),
      nope_{{}, FloatRows(config_.nope_dim), {}},
      latents_{{}, FloatRows(config_.kv_rank), {}},
      values_(heads_ * config_.value_dim) {
  if (!config_.kv_rank) return;
  for (const Layer &layer : ctx_.model.layers) {
    if (!layer.latent) continue;
    layer.latent->q_b.add_kinds(q_kinds_);
    for (const Linear &head : layer.latent->k_b) head.add_kinds(nope_.kinds);
    for (const Linear &head : layer.latent->v_b) head.add_kinds(latents_.kinds);
  }
  for (Inputs *inputs : {&nope_, &latents_}) {
    inputs->prepared.resize(size_t(ctx_.pool.size()));
    inputs->padded.reserve(ctx_.pool.size());
  }
  q_normed_.reserve(ctx_.pool.size());
}

void LatentStage::reserve() {
  if (!config_.kv_rank) return;
  const int num_tokens = ctx_.input.num_tokens;
  if (config_.q_rank) {
    queries_.reserve(num_tokens);
    q_input_.reserve(num_tokens, config_.q_rank, ctx_.with_loras(q_kinds_), ctx_.pool.size());
  }
  values_.reserve(num_tokens);
  auto reserve_inputs = [&](Inputs &inputs, int cols) {
    const KindSet kinds = ctx_.with_loras(inputs.kinds);
    for (ActivationBuffer &own : inputs.prepared) own.reserve(kHeadTokens, cols, kinds);
  };
  reserve_inputs(nope_, config_.nope_dim);
  reserve_inputs(latents_, config_.kv_rank);
}

void LatentStage::multiply(int thread, const std::vector<Linear> &heads, const Inputs &inputs, HeadRows from,
                           HeadRows to, float factor, const Layer *rotated) {
  const int num_tokens = ctx_.input.num_tokens, blocks = (num_tokens + kHeadTokens - 1) / kHeadTokens;
  const int cols = heads[0].cols, outputs = heads[0].parts[0].matrix->rows, width = ctx_.isa.panel_width;
  auto make = [&](int dim, const float *source, RotaryRow rotary, float *out) {
    ctx_.isa.make_head({dim, source, nullptr, nullptr, nullptr, 0.f, rotary, factor}, out);
  };
  auto multiply_block = [&](Share tokens, int head) {
    const ActivationSet set = ctx_.products.prepare_own(
        thread, inputs.prepared[size_t(thread)], cols, tokens.end - tokens.begin, [&](int r) -> const float * {
          const float *source = from.at(tokens.begin + r, head);
          prefetch_row<false>(from.at(std::min(tokens.begin + r + kHeadRowsAhead, tokens.end - 1), head), cols);
          if (cols % kBlock == 0) return source;
          std::copy_n(source, cols, inputs.padded.row(thread));
          return inputs.padded.row(thread);
        });
    const PackedMatrix &matrix = *heads[size_t(head)].parts[0].matrix;
    const LoraStep *lora = ctx_.shrink_alone(thread, matrix, set, tokens);
    const Linear *next = head + 1 < heads_ ? &heads[size_t(head) + 1] : nullptr;
    ctx_.products.alone(thread, heads[size_t(head)], set, {0, tokens.end - tokens.begin}, next,
                        [&](float *out, size_t stride, Share rows, Share panels) {
                          const Share own{tokens.begin + rows.begin, tokens.begin + rows.end};
                          if (lora) lora->expand_alone(thread, matrix, tokens, own, panels, out, stride);
                          const int first = panels.begin * width, end = std::min(panels.end * width, outputs);
                          for (int r = rows.begin; r < rows.end; ++r, out += stride) {
                            const int t = tokens.begin + r, ahead = std::min(t + kHeadRowsAhead, tokens.end - 1);
                            prefetch_row<true>(to.at(ahead, head) + first, end - first);
                            make(end - first, out, {}, to.at(t, head) + first);
                            if (!rotated || first > 0) continue;
                            const int dim = config_.rope_dim;
                            make(dim, from.at(t, head) - dim, embedding_.rotary(rotated->rope, t),
                                 to.at(t, head) - dim);
                          }
                        });
  };
  ctx_.pool.divide(thread, ctx_.pool.team(thread), blocks * heads_, 1, [&](Share part, int) {
    for (int unit = part.begin; unit < part.end; ++unit) {
      multiply_block(share_of(num_tokens, unit / heads_, blocks), unit % heads_);
    }
  });
}

void LatentStage::make_queries(int thread, const Layer &layer, const FloatRows &qkv, float factor, FloatRows &out) {
  const Latent &latent = *layer.latent;
  const int num_tokens = ctx_.input.num_tokens, padded_dim = ctx_.model.padded_dim;
  if (config_.q_rank) {
    const ActivationSet in = ctx_.products.prepare(thread, q_input_, config_.q_rank, num_tokens, [&](int t) {
      float *normed = q_normed_.row(thread);
      ctx_.isa.norm_parts(qkv.row(t), latent.q_norm, 0, 1, config_.q_rank, config_.norm_eps, normed);
      return normed;
    });
    ctx_.products.linear(thread, latent.q_b, in, {0, num_tokens}, queries_.data(), Store::assign, nullptr,
                         ctx_.shrink(thread, {&latent.q_b}, in));
    ctx_.pool.barrier();
  }
  const int rope_dim = config_.rope_dim;
  const FloatRows &queries = config_.q_rank ? queries_ : qkv;
  multiply(thread, latent.k_b, nope_, {queries, config_.query_dim(), rope_dim}, {out, padded_dim, rope_dim}, factor,
           &layer);
}

void LatentStage::key(const Layer &layer, const float *qkv, RotaryRow rotary, float *out) const {
  const float *row = qkv + layer.qkv.parts[1].offset;
  ctx_.isa.make_head({config_.rope_dim, row, nullptr, nullptr, nullptr, 0.f, rotary, 1.f}, out);
  ctx_.isa.norm_parts(row + config_.rope_dim, layer.latent->kv_norm, 0, 1, config_.kv_rank, config_.norm_eps,
                      out + config_.rope_dim);
}

const FloatRows &LatentStage::expand(int thread, const Layer &layer, const FloatRows &out) {
  const int head_dim = config_.rope_dim + config_.kv_rank;
  multiply(thread, layer.latent->v_b, latents_, {out, head_dim, config_.rope_dim}, {values_, config_.value_dim, 0}, 1.f,
           nullptr);
  ctx_.pool.barrier();
  return values_;
}

}  // namespace foreword::kernels
