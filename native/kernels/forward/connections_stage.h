// The residual streams of a model with hyper-connections: ConnectionsSpec. Attention and MLP read their sum in `x` of
// the context, and leave their output in `branch`.
#pragma once

#include "kernels/forward/context.h"

namespace foreword::kernels {

// Every function ends with a barrier, and does nothing for a model without connections, or for a Mix without a matrix.
class ConnectionsStage {
 public:
  explicit ConnectionsStage(PassContext &context);

  void reserve();
  // X_k = x
  void begin(int thread);
  // x = Σ_k pre_k X_k
  void collapse(int thread, const Mix &mix);
  // X_k += post_k branch, with the factors of the last sum
  void add(int thread, const Mix &mix);

 private:
  float *stream(int token, int k) const { return streams_.row(int64_t(token) * config_.num_streams + k); }

  PassContext &ctx_;
  const ConnectionsConfig &config_;
  const int row_dots_;  // the products of a token, at most
  FloatRows streams_;   // [T · K, hidden]
  Buffer<float> dots_;  // [T, row_dots_]: products of single streams, then the factors of what is added
};

}  // namespace foreword::kernels
