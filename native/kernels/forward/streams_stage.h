// The residual streams of a model that has several: StreamsSpec. The first is `x` of the context within a layer.
#pragma once

#include "kernels/forward/context.h"

namespace foreword::kernels {

// Every function ends with a barrier, and does nothing for a model with one stream.
class StreamsStage {
 public:
  explicit StreamsStage(PassContext &context);

  void reserve();
  // X_0 = x; X_k = scaled(x Wstream_in.k, x)
  void begin(int thread);
  // P_k, and x = P_0; then l, the branch beside attention.
  void predict(int thread, const Layer &layer);
  // x = (x + l) / sqrt(2)
  void join(int thread, const Layer &layer);
  // X_k of P_k and x; then x = X_0, times its scale.
  void correct(int thread, const Layer &layer);
  // X_k += x for k > 0
  void add(int thread, const Layer &layer);
  // x = (X_0 + Σ_k scaled(X_k Wstream_out.k, X_0)) / K
  void merge(int thread);

 private:
  bool is_used() const { return count_ > 1; }
  float *stream(int k, int token) const { return streams_.row(int64_t(k) * ctx_.input.num_tokens + token); }
  // numbers [K] = tanh(norm(row) Wrouter / hidden), for a row of a token
  void route(int thread, int token, const StreamUpdate &update, const float *row, float *numbers) const;
  // The change of a small matrix by the adapter of a token; null: none.
  Vector change(int token, Vector matrix) const {
    return ctx_.has_loras() ? ctx_.loras().change_of(token, matrix) : nullptr;
  }
  // out = scale · scaled(row, like), or added to it.
  void put_scaled(const float *row, const float *like, float scale, bool adds, float *out) const;
  void make_laurel(int thread, const Layer &layer);

  PassContext &ctx_;
  const int count_;
  FloatRows streams_, wide_, low_, laurel_;  // [K · T, hidden], [T, streams but one], [T, laurel_rank], [T, hidden]
  KindSet kinds_{};                          // the kinds of `low_input_`
  int rank_ = 0;
  ProductInput low_input_;
};

}  // namespace foreword::kernels
