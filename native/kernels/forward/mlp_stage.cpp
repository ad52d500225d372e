#include "kernels/forward/mlp_stage.h"

#include <algorithm>

namespace foreword::kernels {

MlpStage::MlpStage(PassContext &context) : ctx_(context) {
  for (const Layer &layer : context.model.layers) {
    const Mlp *mlp = layer.moe ? layer.moe->shared.get() : layer.mlp.get();
    if (!mlp) continue;
    mlp->down.add_kinds(kinds_);
    hidden_stride_ = std::max(hidden_stride_, mlp->gate.stride);
    hidden_cols_ = std::max(hidden_cols_, mlp->down.cols);
  }
}

void MlpStage::reserve() {
  const int num_tokens = ctx_.input.num_tokens;
  hidden_.reserve(size_t(num_tokens) * size_t(hidden_stride_));
  down_.reserve(num_tokens, hidden_cols_, ctx_.with_loras(kinds_), ctx_.pool.size());
}

ActivationSet MlpStage::gate_up(int thread, const Mlp &mlp, const ActivationSet &a) {
  const Share rows{0, ctx_.input.num_tokens};
  ctx_.products.gated(thread, mlp, a, rows, hidden_.data(), ctx_.shrink(thread, {&mlp.gate, &mlp.up}, a));
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::gate_up);
  return ctx_.products.prepare(thread, down_, mlp.down.cols, rows.end,
                               [&](int t) { return hidden_.data() + size_t(t) * size_t(mlp.gate.stride); });
}

void MlpStage::run(int thread, const Layer &layer, const Linear &next) {
  const ActivationSet in = ctx_.norm_rows(thread, layer.mlp_norm);
  const ActivationSet hidden = gate_up(thread, *layer.mlp, in);
  ctx_.add_product(thread, layer.mlp->down, hidden, layer.post_mlp_norm, &next);
  ctx_.clock.finish(thread, Stage::down);
}

}  // namespace foreword::kernels
