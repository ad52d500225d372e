// The two residual streams of a model whose layers run several times for a token: see LayerSpec.stream. The layers of a
// run compute `x` of the context.
#pragma once

#include "kernels/forward/context.h"

namespace foreword::kernels {

class RunsStage {
 public:
  explicit RunsStage(PassContext &context);

  void reserve();
  // Before the first layer of a run: the stream of the run before it is norm(x), then x = X_0 + X_1. Ends with a
  // barrier; does nothing for other layers.
  void begin(int thread, const Layer &layer);

 private:
  PassContext &ctx_;
  std::vector<FloatRows> streams_;  // [2] of [T, hidden]; none for a model without runs
};

}  // namespace foreword::kernels
