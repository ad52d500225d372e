// The mixture of experts of a layer. Tokens are sorted by expert, so that every expert is one product:
//
//   token 0 → experts 2, 0      choices 0 1        places (sorted by expert)   0: choice 1 (token 0)   expert 0
//   token 1 → experts 0, 3      choices 2 3                                    1: choice 2 (token 1)   expert 0
//                                                                              2: choice 0 (token 0)   expert 2
//                                                                              3: choice 3 (token 1)   expert 3
//
// A choice is token * experts_per_token + rank. A token's experts are summed in the order of their numbers, whatever
// the batch. Each thread sums its own columns.
#pragma once

#include "kernels/forward/mlp_stage.h"

namespace foreword::kernels {

class MoeStage {
 public:
  // `mlp` computes the shared expert.
  MoeStage(PassContext &context, MlpStage &mlp);

  void reserve();
  // x += moe(norm(x)), with moe(h) = Σ p_e mlp_e(h) + sigmoid(h Wshared_gate) mlp_shared(h), or as MoeSpec has it. Ends
  // with a barrier.
  void run(int thread, const Layer &layer);

 private:
  void start(int thread, const Moe &moe, const ActivationSet &in);
  void route(const Moe &moe, Share tokens);
  void sort_by_expert(const Moe &moe);
  int end_of_places(int first, int num_experts) const;
  void run_places(int thread, const Moe &moe, const ActivationSet &in, Share places, int expert,
                  const FloatRows &sums);
  template <class Of>
  void add_rows(const float *out, size_t stride, Share rows, Share panels, const FloatRows &sums, Vector bias,
                Of &&of) const;
  // branch = norm(branch) + norm(sums), with the norms of the shared and of the other experts.
  void norm_sums(int thread, const Moe &moe);
  // Multiplies the sums by latent_out and adds what is in ctx_.branch.
  void leave_latent(int thread, const Moe &moe);
  Share places_of(int expert) const { return {expert_begin_.data()[expert], expert_begin_.data()[expert + 1]}; }

  PassContext &ctx_;
  MlpStage &mlp_;
  // The largest of all layers.
  int max_experts_ = 0, experts_per_token_ = 0, router_stride_ = 0, hidden_stride_ = 0, hidden_cols_ = 0;
  int outer_ = 0;       // inputs of an expert
  int latent_ = 0;      // those, of layers with latent experts
  bool scales_inputs_ = false;
  bool has_sums_ = false;
  FloatRows shared_gate_, normed_;      // [T, 1], [T, hidden_size]
  FloatRows sums_;                      // [T, hidden_size or latent_]: of experts whose sum is not added as it is
  Buffer<float> router_logits_;         // [T, experts]
  Buffer<float> weight_;                // [choices]: p_e of a choice
  Buffer<float> latents_;               // [T, latent_]: the inputs of latent experts
  Buffer<float> scaled_;                // up to kMostPlaces rows: the input of an expert, times p_e
  Buffer<int> expert_, place_, token_;  // [choices]: expert of a choice, place of a choice, token of a place
  Buffer<int> choice_;                  // [choices]: choice of a place
  Buffer<int> expert_begin_;            // [experts + 1]: first place of each expert
  KindSet gathered_kinds_{}, hidden_kinds_{}, latent_kinds_{};
  // The following have up to kMostPlaces rows at a time, unless noted:
  ActivationBuffer gathered_, down_;  // the inputs of gate and up, and of down
  ActivationBuffer latent_sums_;      // [T, latent_]: the input of latent_out
  Buffer<float> hidden_;              // act(gate) * up
};

}  // namespace foreword::kernels
