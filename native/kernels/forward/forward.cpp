#include "kernels/forward/forward.h"

namespace foreword::kernels {

ForwardPass::ForwardPass(Model &model)
    : ctx_(model), embedding_(ctx_), attention_(ctx_, embedding_), mlp_(ctx_), moe_(ctx_, mlp_), logits_(ctx_) {}

const float *ForwardPass::run(const ForwardInput &input) {
  check_input(input, ctx_.model);
  ctx_.input = input;
  ctx_.reserve();
  embedding_.reserve();
  attention_.reserve();
  mlp_.reserve();
  moe_.reserve();
  logits_.reserve();
  ctx_.pool.run([this](int thread) { run_stages(thread); });
  return logits_.logits().data();
}

void ForwardPass::run_stages(int thread) {
  const std::vector<Layer> &layers = ctx_.model.layers;
  ctx_.clock.start(thread);
  embedding_.run(thread);
  for (size_t i = 0; i < layers.size(); ++i) {
    const Linear &next = i + 1 < layers.size() ? layers[i + 1].qkv : ctx_.model.lm_head;
    attention_.run(thread, int(i));
    if (layers[i].moe) {
      moe_.run(thread, layers[i]);
    } else {
      mlp_.run(thread, layers[i], next);
    }
  }
  logits_.run(thread);
}

}  // namespace foreword::kernels
