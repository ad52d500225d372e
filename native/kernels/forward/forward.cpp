#include "kernels/forward/forward.h"

namespace foreword::kernels {

ForwardPass::ForwardPass(Model &model)
    : ctx_(model),
      embedding_(ctx_),
      attention_(ctx_, embedding_),
      recurrent_(ctx_),
      mlp_(ctx_),
      moe_(ctx_, mlp_),
      logits_(ctx_),
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
  logits_.reserve();
  ctx_.pool.run([this](int thread) { run_stages(thread); });
  logits_.finish();
  return logits_.logits();
}

const float *ForwardPass::hidden(const int64_t *tokens, int count) {
  for (int i = 0; i < count; ++i) require(tokens, i, 0, ctx_.input.num_tokens, "tokens");
  hidden_.reserve(count);
  ctx_.pool.run([&](int thread) {
    const Share share = share_of(count, thread, ctx_.pool.size());
    for (int i = share.begin; i < share.end; ++i) {
      ctx_.norm_row(ctx_.x.row(tokens[i]), ctx_.model.final_norm, hidden_.row(i));
    }
  });
  return hidden_.data();
}

void ForwardPass::run_stages(int thread) {
  const std::vector<Layer> &layers = ctx_.model.layers;
  ctx_.clock.start(thread);
  embedding_.run(thread);
  for (size_t i = 0; i < layers.size(); ++i) {
    const Linear &next = i + 1 < layers.size() ? layers[i + 1].qkv : logits_.first_product();
    if (layers[i].recurrent) {
      recurrent_.run(thread, layers[i]);
    } else if (layers[i].has_attention()) {
      attention_.run(thread, int(i));
    }
    if (layers[i].moe) {
      moe_.run(thread, layers[i]);
    } else if (layers[i].mlp) {
      mlp_.run(thread, layers[i], next);
    }
    if (int(i) < ctx_.input.num_features) embedding_.add_features(thread, int(i));
  }
  logits_.run(thread);
}

}  // namespace foreword::kernels
