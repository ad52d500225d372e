// One forward pass of a model over a flat batch of tokens, in one parallel region:
//
//   embedding  x = embed[ids]
//   per layer  x += attention(norm(x)), or a recurrent layer
//              x += mlp(norm(x)), or a mixture of experts
//              what it makes of its own inputs, and the scale of its output
//   logits     norm(x[logits_indices]) Wlm_headᵀ
//
// Each stage owns its buffers, which grow to the largest pass so far. A token's result depends on its own request
// alone: not on the batch, on how the prompt was divided into chunks, nor on the number of threads.
#pragma once

#include "kernels/forward/attention_stage.h"
#include "kernels/forward/connections_stage.h"
#include "kernels/forward/embedding_stage.h"
#include "kernels/forward/logits_stage.h"
#include "kernels/forward/mlp_stage.h"
#include "kernels/forward/moe_stage.h"
#include "kernels/forward/per_layer_stage.h"
#include "kernels/forward/recurrent_stage.h"
#include "kernels/forward/runs_stage.h"
#include "kernels/forward/streams_stage.h"

namespace foreword::kernels {

class ForwardPass {
 public:
  // The model is complete; it outlives the pass.
  explicit ForwardPass(Model &model);
  ForwardPass(const ForwardPass &) = delete;
  ForwardPass &operator=(const ForwardPass &) = delete;

  // logits [L, logits_stride()], valid until the next call; not those of a row that has a greedy token. Throws
  // std::invalid_argument on input outside its range, before anything is written.
  const float *run(const ForwardInput &input);

  // The rows of final_norm(x) [count, hidden_stride()] at `tokens` of the last run, valid until the next call. Throws
  // std::invalid_argument for a token that was not in it.
  const float *hidden(const int64_t *tokens, int count);

  // Returns the known properties of the first `count` rows of logits; none of logits of another run than the last.
  KnownLogits known(const float *logits, int count) const {
    if (logits != logits_.logits() || count > ctx_.input.num_logits) return {};
    return {logits_.maxima(), logits_.greedy_tokens()};
  }

  int hidden_stride() const { return hidden_.stride(); }
  int logits_stride() const { return logits_.stride(); }
  // Seconds spent in `stage` by all calls so far, measured on thread 0.
  double seconds(Stage stage) const { return ctx_.clock.seconds(stage); }

 private:
  void run_stages(int thread);

  PassContext ctx_;
  EmbeddingStage embedding_;
  AttentionStage attention_;
  RecurrentStage recurrent_;
  MlpStage mlp_;
  MoeStage moe_;
  PerLayerStage per_layer_;
  StreamsStage streams_;
  RunsStage runs_;
  ConnectionsStage connections_;
  LogitsStage logits_;
  FloatRows hidden_;  // [tokens asked for, hidden_size]
};

}  // namespace foreword::kernels
