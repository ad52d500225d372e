// The logits of a step, or its greedy tokens without all logits (screen.h).
#pragma once

#include "kernels/forward/context.h"

namespace foreword::kernels {

class LogitsStage {
 public:
  explicit LogitsStage(PassContext &context);

  void reserve();
  // logits[l] = softcap(final_norm(x[logits_indices[l]]) Wlm_headᵀ), or through the head of the model before Wlm_head,
  // or the greedy tokens alone.
  void run(int thread);
  // After all threads: the tokens that they found.
  void finish();

  const float *logits() const { return logits_.data(); }
  int stride() const { return logits_.stride(); }
  // The matrix by which `run` multiplies first.
  const Linear &first_product() const;
  // Results of the last run: the maxima of the blocks of logits [L, num_logit_blocks(vocab_size)]; the greedy tokens
  // [L], −1 for a row that has logits instead. Null if there are none.
  const float *maxima() const { return has_maxima_ ? maxima_.data() : nullptr; }
  const int32_t *greedy_tokens() const { return is_screened_ ? tokens_.data() : nullptr; }

 private:
  struct Best {
    float logit;
    int32_t token;

    // The better one; of equal logits the lowest token.
    void take(const Best &other) {
      if (other.logit > logit || (other.logit == logit && other.token < token)) *this = other;
    }
  };
  // The results of a thread in its panels, for each row [L].
  struct Found {
    Buffer<ScreenedRow> rows;
    Buffer<float> least;  // a lower bound of what can be the largest logit
    Buffer<Best> best;
    Buffer<ScreenHit> hits;
    Buffer<float> logits;   // the logits of a panel
    Buffer<float> rotated;  // a row of inputs
  };

  void make_screen();
  void run_head(int thread);
  int num_inner() const;
  void compute(int thread, const ActivationSet &in, Share rows);
  void screen(int thread, const ActivationSet &in);
  void share_bounds(Found &own, Share rows);
  float offer(int thread, const ActivationSet &in, int row, int panel);
  float least(int row) const;
  bool has_logits(int row) const;

  PassContext &ctx_;
  ProductInput input_, head_input_;
  KindSet kinds_{}, screen_kinds_{};  // the kinds of `input_`
  KindSet head_kinds_{};              // those of head_input_
  FloatRows inner_;                   // [L, hidden_size], in steps with adapters [T, …]: act(norm(x) headᵀ)
  FloatRows logits_;                  // [L, vocab_size]
  Buffer<float> maxima_, reach_;
  Buffer<float> bounds_;  // lower bounds of the largest logit of each row, of all threads
  Buffer<int32_t> tokens_;
  std::vector<Found> found_;  // [num_threads]
  bool has_tried_screen_ = false, has_maxima_ = false, is_screened_ = false;
};

}  // namespace foreword::kernels
