#include "kernels/forward/logits_stage.h"

namespace foreword::kernels {

void LogitsStage::run(int thread) {
  const Model &model = ctx_.model;
  const Share rows{0, ctx_.input.num_logits};
  if (rows.end == 0) return;
  const ActivationSet in = ctx_.products.prepare(thread, ctx_.normed, model.lm_head.cols, rows.end, [&](int r) {
    return ctx_.norm_row(thread, ctx_.x.row(ctx_.input.logits_indices[r]), model.final_norm);
  });
  ctx_.products.linear(thread, model.lm_head, in, rows, logits_.data(), Store::assign);
  if (model.config.final_softcap > 0.f) {
    ctx_.pool.barrier();
    const Share share = share_of(rows.end, thread, ctx_.pool.size());
    for (int r = share.begin; r < share.end; ++r) {
      ctx_.isa.softcap(model.config.final_softcap, size_t(logits_.stride()), logits_.row(r));
    }
  }
  ctx_.clock.finish(thread, Stage::logits);
}

}  // namespace foreword::kernels
