#include "kernels/forward/forward.h"

#include <algorithm>

namespace foreword::kernels {
namespace {

// A thread reads its logits again while they are in its cache: of more than so many, sampling reads them as fast.
constexpr int64_t kMostCachedLogits = int64_t{1} << 18;

}  // namespace

ForwardPass::ForwardPass(Model &model)
    : ctx_(model),
      embedding_(ctx_),
      attention_(ctx_, embedding_),
      recurrent_(ctx_),
      mlp_(ctx_),
      moe_(ctx_, mlp_),
      logits_(model.config.vocab_size),
      hidden_(model.config.hidden_size) {}

const float *ForwardPass::run(const ForwardInput &input) {
  check_input(input, ctx_.model);
  ctx_.input = input;
  ctx_.reserve();
  embedding_.reserve();
  attention_.reserve();
  recurrent_.reserve();
  mlp_.reserve();
  moe_.reserve();
  logits_.reserve(input.num_logits);
  has_maxima_ = int64_t{input.num_logits} * logits_.stride() <= kMostCachedLogits * ctx_.pool.size();
  if (has_maxima_) maxima_.reserve(size_t(input.num_logits) * size_t(num_logit_blocks(ctx_.model.config.vocab_size)));
  ctx_.pool.run([this](int thread) { run_stages(thread); });
  return logits_.data();
}

const float *ForwardPass::hidden(const int64_t *tokens, int count) {
  for (int i = 0; i < count; ++i) require(tokens, i, 0, ctx_.input.num_tokens, "tokens");
  hidden_.reserve(count);
  const ModelConfig &c = ctx_.model.config;
  ctx_.pool.run([&](int thread) {
    const Share share = share_of(count, thread, ctx_.pool.size());
    for (int i = share.begin; i < share.end; ++i) {
      ctx_.isa.rms_norm(ctx_.x.row(tokens[i]), ctx_.model.final_norm, c.hidden_size, c.norm_eps, hidden_.row(i));
    }
  });
  return hidden_.data();
}

void ForwardPass::run_stages(int thread) {
  const std::vector<Layer> &layers = ctx_.model.layers;
  ctx_.clock.start(thread);
  embedding_.run(thread);
  for (size_t i = 0; i < layers.size(); ++i) {
    const Linear &next = i + 1 < layers.size() ? layers[i + 1].qkv : ctx_.model.lm_head;
    if (layers[i].recurrent) {
      recurrent_.run(thread, layers[i]);
    } else {
      attention_.run(thread, int(i));
    }
    if (layers[i].moe) {
      moe_.run(thread, layers[i]);
    } else {
      mlp_.run(thread, layers[i], next);
    }
  }
  run_logits(thread);
}

// logits[l] = softcap(final_norm(x[logits_indices[l]]) Wlm_headᵀ)
void ForwardPass::run_logits(int thread) {
  const Model &model = ctx_.model;
  const Share rows{0, ctx_.input.num_logits};
  const ActivationSet in = ctx_.products.prepare(thread, ctx_.normed, model.lm_head.cols, rows.end, [&](int r) {
    return ctx_.norm_row(thread, ctx_.x.row(ctx_.input.logits_indices[r]), model.final_norm);
  });
  ctx_.products.linear(thread, model.lm_head, in, rows, logits_.data(), Store::assign);
  const float cap = model.config.final_softcap;
  if (cap > 0.f || has_maxima_) {
    ctx_.pool.barrier();
    const int blocks = num_logit_blocks(model.config.vocab_size);
    const Share share = share_of(blocks, thread, ctx_.pool.size());
    const int begin = share.begin * kLogitBlock, end = std::min(share.end * kLogitBlock, logits_.stride());
    for (int r = 0; r < rows.end; ++r) {
      float *row = logits_.row(r);
      if (cap > 0.f) ctx_.isa.softcap(cap, size_t(end - begin), row + begin);
      if (has_maxima_) {
        ctx_.isa.logit_maxima(row, model.config.vocab_size, share.begin, share.end, maxima_.data() + r * blocks);
      }
    }
  }
  ctx_.clock.finish(thread, Stage::logits);
}

}  // namespace foreword::kernels
