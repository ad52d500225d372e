// The MLP of a layer.
#pragma once

#include "kernels/forward/low_rank.h"

namespace foreword::kernels {

class MlpStage {
 public:
  explicit MlpStage(PassContext &context);

  void reserve();
  // x += mlp(norm(x)), with mlp(h) = (act(h Wgateᵀ) * (h Wupᵀ)) Wdownᵀ, or without a gate act(h Wupᵀ + up_bias)
  // Wdownᵀ + down_bias. Ends with a barrier. `next`: the product that follows.
  void run(int thread, const Layer &layer, const Linear &next);

  // act(a Wgateᵀ) * (a Wupᵀ), or act(a Wupᵀ + up_bias), of `count` rows, prepared as the input of `down`: with its
  // norm, and rounded, if the model has these.
  ActivationSet gate_up(int thread, const Mlp &mlp, const ActivationSet &a, int count);

 private:
  void finish_gates(int thread, const Mlp &mlp, int count);

  PassContext &ctx_;
  LowRankProducts added_;
  int hidden_stride_ = 0, hidden_cols_ = 0;  // largest of all layers
  bool has_whole_ = false;                    // whether there is an MLP of all tokens at once
  ProductInput down_;                         // the rows of `ctx_.first` as the input of `down`
  KindSet kinds_{};                           // the kinds of `down_`
};

}  // namespace foreword::kernels
