// The inputs that layers have of their own, of the token and of the embedding, and the scale of a layer's output.
#pragma once

#include <vector>

#include "kernels/forward/context.h"

namespace foreword::kernels {

class PerLayerStage {
 public:
  explicit PerLayerStage(PassContext &context);

  void reserve();
  // Computes the inputs of all layers: PerLayerSpec. Ends with a barrier.
  void begin(int thread);
  // x = scale (x + norm((act(x gateᵀ) * inputs) outᵀ)), or what the layer has of it; with several streams, the norm
  // alone. Ends with a barrier. `next`: the product after it.
  void run(int thread, int layer_index, const Linear &next);

 private:
  const PerLayerConfig &config() const { return ctx_.model.per_layer; }

  PassContext &ctx_;
  FloatRows inputs_, gate_;             // [T, layers * size], [T, size]
  std::vector<Buffer<float>> scratch_;  // [num_threads] a row of the embedding, then one of the product with `gate`
  KindSet kinds_{};                     // the kinds of `out_input_`
  ProductInput out_input_;
};

}  // namespace foreword::kernels
