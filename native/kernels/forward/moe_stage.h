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
  // Computes the output of the late experts of a layer, which add_late adds to x after the following layer.
  void begin_late(int thread, int index);
  void add_late(int thread, int index);

 private:
  void sum(int thread, const Layer &layer, const Moe &moe, const FloatRows &sums);
  void start(int thread, const Moe &moe, const ActivationSet &in);
  // The experts of the step's tokens, and their places.
  struct Routes {
    Buffer<int> expert;    // [choices]
    Buffer<float> p;       // [choices]: p_e
    Buffer<float> kept;    // [T]: the sum of p_e of experts whose output is their input
    Buffer<int> token;     // [choices], by place
    Buffer<float> weight;  // [choices], by place: p_e
    Buffer<int> chosen;    // [experts]: those that have places, ascending
    Buffer<int> begin;     // [experts + 1]: the first place of each of them, and the end of the last one's
    int num_chosen = 0;

    Share places_of(int i) const { return {begin.data()[i], begin.data()[i + 1]}; }
  };
  // Returns whether every thread routes all of so many tokens.
  static bool routes_each(int num_tokens) { return num_tokens <= ProductInput::kFewRows; }
  // The inputs of the last product of a router that has an MLP, and that product.
  void run_router(int thread, const RouterMlp &mlp, const Linear &router);
  const Routes &find_places(int thread, const Moe &moe);
  void route(const Moe &moe, Share tokens, Routes &routes) const;
  void sort_by_expert(const Moe &moe, Routes &routes) const;
  const float *input_row(const Moe &moe, int token) const;
  // The adapters of places, see run_places: of each thread.
  struct PlaceLoras {
    LoraPlan plan;               // product i is chosen expert i of these
    std::vector<uint64_t> rows;  // adapter << 32 | row, for the rows of an expert
  };
  // Returns whether adapters of the step change experts.
  bool has_loras() const { return !ctx_.loras().of_experts().empty(); }
  // Plans the adapters of rows: rows_of(i) are those of chosen expert i of `num_experts`, row r is of token[r].
  template <class RowsOf>
  void plan(PlaceLoras &loras, int num_experts, const int *token, RowsOf &&rows_of) const;
  // Computes the places of these of the chosen experts. in: the tokens' inputs, unless their weights scale them.
  void run_places(int thread, const Moe &moe, const Routes &routes, const ActivationSet &in, Share places, Share chosen,
                  const FloatRows &sums);
  template <class Of>
  void add_rows(const float *out, size_t stride, Share rows, Share panels, const FloatRows &sums, Vector bias,
                Of &&of) const;
  // branch = norm(branch) + norm(sums), with the norms of the shared and of the other experts.
  void norm_sums(int thread, const Moe &moe);
  // Multiplies the sums by latent_out and adds what is in ctx_.branch.
  void leave_latent(int thread, const Moe &moe);

  static constexpr size_t kMatrices = 2;  // that an adapter changes at once: gate and up

  PassContext &ctx_;
  MlpStage &mlp_;
  // The largest of all layers.
  int max_experts_ = 0, experts_per_token_ = 0, router_stride_ = 0, hidden_stride_ = 0, hidden_cols_ = 0;
  int own_rows_ = 0;    // rows of hidden numbers that every thread prepares for itself, at most
  int outer_ = 0;       // inputs of an expert
  int latent_ = 0;      // those, of layers with latent experts
  bool scales_inputs_ = false, keeps_inputs_ = false;  // keeps_inputs_: they are read again as floats
  bool has_sums_ = false, has_late_ = false;
  FloatRows shared_gate_, normed_;      // [T, 1], [T, hidden_size]
  FloatRows sums_;                      // [T, hidden_size or latent_]: of experts whose sum is not added as it is
  FloatRows late_[2];                   // [T, hidden_size], by turns of layers: see begin_late
  Buffer<float> router_logits_;         // [T, experts]
  FloatRows routed_, router_hidden_[2];  // [T, size] of the MLP of a router: what it carries, and outputs of products
  FloatRows router_rows_;                // [num_threads, size], an input of one
  KindSet router_kinds_{};
  ProductInput router_input_;
  Buffer<float> latents_;               // [T, latent_]: the inputs of latent experts
  Buffer<float> scaled_;                // up to kMostPlaces rows: the input of an expert, times p_e
  std::vector<Routes> routes_;          // [threads]: of few tokens, each thread's own; of more, the first one
  KindSet gathered_kinds_{}, hidden_kinds_{}, latent_kinds_{};
  ActivationBuffer own_inputs_;  // [T, hidden_size or latent_]: the inputs of experts that are not those of the router
  // The following have up to kMostPlaces rows at a time, unless noted:
  ActivationBuffer gathered_, down_;  // the inputs of gate and up, and of down
  ActivationBuffer latent_sums_;      // [T, latent_]: the input of latent_out
  Buffer<float> hidden_;              // act(gate) * up
  std::vector<ActivationBuffer> own_down_;  // [threads]: the inputs of down, if they are few
  std::vector<PlaceLoras> place_loras_;     // [threads]
  Buffer<LoraRow> shrunk_;                  // [rows, kMatrices]
};

}  // namespace foreword::kernels
