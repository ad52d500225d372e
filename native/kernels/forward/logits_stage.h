// The output of a forward pass: logits of the requested rows.
#pragma once

#include "kernels/forward/context.h"

namespace foreword::kernels {

class LogitsStage {
 public:
  explicit LogitsStage(PassContext &context) : ctx_(context), logits_(context.model.config.vocab_size) {}

  void reserve() { logits_.reserve(ctx_.input.num_logits); }
  // logits[l] = softcap(final_norm(x[logits_indices[l]]) Wlm_headᵀ)
  void run(int thread);

  const FloatRows &logits() const { return logits_; }

 private:
  PassContext &ctx_;
  FloatRows logits_;  // [L, vocab_size]
};

}  // namespace foreword::kernels
