// The input of a forward pass: embeddings of tokens or given ones, and the rotary angles of the tokens' positions.
#pragma once

#include "kernels/forward/context.h"

namespace foreword::kernels {

class EmbeddingStage {
 public:
  explicit EmbeddingStage(PassContext &context);

  void reserve();
  // x[t] = the embedding given for t, or embedding[input_ids[t]] * embedding_scale, plus the row of its position, after
  // embed_norm; and the angles of every rope. Ends with a barrier.
  void run(int thread);
  // The residual stream of tokens that are vectors grows by their features of a layer, which is complete.
  void add_features(int thread, int layer);

  // None for rope −1.
  RotaryRow rotary(int rope, int token) const {
    if (rope < 0) return {};
    const int64_t at = index(rope, token);
    return {cosines_.row(at), sines_.row(at), int(ctx_.model.ropes[size_t(rope)].inv_freq.size())};
  }

 private:
  int64_t index(int rope, int token) const { return int64_t(rope) * ctx_.input.num_tokens + token; }

  PassContext &ctx_;
  FloatRows cosines_, sines_;  // [ropes * T, pairs]
  FloatRows position_;         // [num_threads]
};

}  // namespace foreword::kernels
