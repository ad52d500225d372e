#include "kernels/forward/forward.h"

namespace foreword::kernels {

ForwardPass::ForwardPass(Model &model)
    : ctx_(model),
      embedding_(ctx_),
      attention_(ctx_, embedding_),
      recurrent_(ctx_),
      mlp_(ctx_),
      moe_(ctx_, mlp_),
      per_layer_(ctx_),
      streams_(ctx_),
      runs_(ctx_),
      connections_(ctx_),
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
  per_layer_.reserve();
  streams_.reserve();
  runs_.reserve();
  connections_.reserve();
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
  ctx_.keep_first_input(thread);
  per_layer_.begin(thread);
  streams_.begin(thread);
  connections_.begin(thread);
  for (size_t i = 0; i < layers.size(); ++i) {
    const Linear &next_layer = i + 1 < layers.size() ? layers[i + 1].qkv : logits_.first_product();
    const Linear &gate = layers[i].per_layer.gate, &next = gate.parts.empty() ? next_layer : gate;
    runs_.begin(thread, layers[i]);
    streams_.predict(thread, layers[i]);
    connections_.collapse(thread, layers[i].attn_mix);
    if (layers[i].recurrent) {
      recurrent_.run(thread, layers[i]);
    } else if (layers[i].has_attention()) {
      attention_.run(thread, int(i));
    }
    streams_.join(thread, layers[i]);
    connections_.add(thread, layers[i].attn_mix);
    connections_.collapse(thread, layers[i].mlp_mix);
    moe_.begin_late(thread, int(i));
    if (layers[i].moe) {
      moe_.run(thread, layers[i]);
    } else if (layers[i].mlp) {
      mlp_.run(thread, layers[i], next);
    }
    moe_.add_late(thread, int(i) - 1);
    if (layers[i].is_aside()) ctx_.finish_aside(thread, layers[i], next);
    connections_.add(thread, layers[i].mlp_mix);
    streams_.correct(thread, layers[i]);
    per_layer_.run(thread, int(i), next_layer);
    streams_.add(thread, layers[i]);
    if (int(i) < ctx_.input.num_features) embedding_.add_features(thread, int(i));
  }
  streams_.merge(thread);
  connections_.collapse(thread, ctx_.model.connections.out);
  logits_.run(thread);
}

}  // namespace foreword::kernels
