// The products of latent attention, around attention over one head: queries times Wk_b before it, outputs times Wv_b
// after it.
#pragma once

#include "kernels/forward/context.h"

namespace foreword::kernels {

class LatentStage {
 public:
  explicit LatentStage(PassContext &context);

  void reserve();
  // Queries times Wk_b, from the first product of the layer. Ends with a barrier.
  void absorb(int thread, const Layer &layer, FloatRows &qkv);
  // A head's query times `factor`, rotated [head_dim]; the row of its token in `qkv`.
  void query(const float *qkv, int token, int head, RotaryRow rotary, float factor, float *out) const;
  // The key of a token, normed and rotated [head_dim].
  void key(const Layer &layer, const float *qkv, RotaryRow rotary, float *out) const;
  // The outputs of attention [T, heads, head_dim] times Wv_b: rows [T, heads, value_dim]. Ends with a barrier.
  const FloatRows &expand(int thread, const Layer &layer, const FloatRows &out);

 private:
  // out = the rows source(token, head), those of a head one after the other, times a matrix of each head. Ends with a
  // barrier. `in`: memory for rows that have to be padded.
  template <class Source>
  void multiply(int thread, const std::vector<Linear> &heads, const ActivationBuffer &buffer, FloatRows &in,
                FloatRows &out, Source &&source);

  PassContext &ctx_;
  const LatentConfig &config_;
  const int heads_;
  KindSet q_kinds_{}, k_kinds_{}, v_kinds_{};
  FloatRows queries_;                    // [T, heads, query_dim], of the second product of q
  FloatRows nope_, absorbed_, latents_;  // [heads, T, nope_dim], [heads, T, kv_rank] of queries and of outputs
  FloatRows head_values_, values_;       // [heads, T, value_dim] and [T, heads, value_dim]
  ActivationBuffer k_input_, v_input_;
  ActivationBuffer q_input_;
};

}  // namespace foreword::kernels
