// The products of latent attention, around attention over one head: queries times Wk_b before it, outputs times Wv_b
// after it.
#pragma once

#include "kernels/forward/embedding_stage.h"
#include "kernels/forward/head_products.h"

namespace foreword::kernels {

class LatentStage {
 public:
  LatentStage(PassContext &context, const EmbeddingStage &embedding);

  void reserve();
  // Writes the queries of attention [T, heads, padded_dim], from the first product of the layer: of a head the rotated
  // part, and the other one times Wk_b, both times `factor`. index_queries: if not null, the product of the layer's
  // indexer is written there.
  void make_queries(int thread, const Layer &layer, float factor, FloatRows &out, FloatRows *index_queries);
  // The key of a token, normed and rotated [head_dim].
  void key(const Layer &layer, const float *qkv, RotaryRow rotary, float *out) const;
  // The outputs of attention [T, heads, head_dim] times Wv_b: rows [T, heads, value_dim]. Ends with a barrier.
  const FloatRows &expand(int thread, const Layer &layer, const FloatRows &out);
  // The gates of a token; only with joins_latents.
  const float *gates(const Layer &layer, int token) const {
    return queries_.data() + int64_t(token) * layer.latent->q_b.stride + layer.latent->q_b.parts[1].offset;
  }

 private:
  // Parts of rows, [T, heads, …]: from `offset` of a head on.
  struct HeadRows {
    float *rows;
    int stride, head_stride, offset;

    float *at(int token, int head) const { return rows + int64_t(token) * stride + head * head_stride + offset; }
  };
  // to = `factor` times the product of `from` and the matrix of the head. `rotated`: the layer, if the parts before
  // `from` are rotated to those before `to`, times `factor`; else null.
  void multiply(int thread, const std::vector<Linear> &heads, const HeadProducts &products, HeadRows from, HeadRows to,
                float factor, const Layer *rotated);

  PassContext &ctx_;
  const EmbeddingStage &embedding_;
  const LatentConfig &config_;
  const int heads_;
  KindSet q_kinds_{}, index_kinds_{};
  ProductInput q_input_, index_input_;  // the latter where an indexer has an input of its own
  FloatRows q_normed_;           // [threads, q_rank], with joins_latents also the row before its norm
  int query_stride_ = 0;
  Buffer<float> queries_;        // [T, heads, query_dim], and gates: of the second product of q
  HeadProducts nope_, latents_;  // with Wk_b and Wv_b
  FloatRows values_;             // [T, heads, value_dim]
};

}  // namespace foreword::kernels
