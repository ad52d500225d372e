// The adapters of one step. Tokens are sorted by adapter, once per step:
//
//   request 0 → adapter 7, tokens 0 1      groups   adapter 3: tokens 2 3 4
//   request 1 → adapter 3, tokens 2 3 4             adapter 7: tokens 0 1 6
//   request 2 → none,      token 5
//   request 3 → adapter 7, token 6
#pragma once

#include <initializer_list>
#include <vector>

#include "kernels/forward/lora_rows.h"

namespace foreword::kernels {

class LoraStep {
 public:
  explicit LoraStep(Model &model) : model_(model), plan_(model.isa) {}

  // Plans a step that was checked: query_start_loc [num_reqs + 1], and lora_ids [num_reqs], the adapter of each
  // request, 0 for none; null: none has one.
  void plan(int num_tokens, int num_reqs, const int32_t *query_start_loc, const int32_t *lora_ids);
  // Returns whether a request of the step has an adapter.
  bool is_active() const { return !plan_.is_empty(); }

  // The adapters of the step that change experts, and for each token its own among them, −1 for none.
  const std::vector<const LoraAdapter *> &of_experts() const { return of_experts_; }
  int of_experts(int token) const { return of_token_.data()[token]; }

  // The change of a vector by the adapter of a token; null: none.
  Vector change_of(int token, Vector vector) const {
    const LoraAdapter *adapter = with_vectors_ ? adapters_.data()[token] : nullptr;
    return adapter ? adapter->change_of(vector) : nullptr;
  }

  // The kinds of input that the matrices take, and those that the adapters take.
  KindSet with_kinds(KindSet kinds) const;

  // The adapters of all tokens, with the share of `thread` of a Aᵀ for the matrices of products with the same input.
  // Ends with a barrier if the step is active.
  LoraRows shrink(int thread, std::initializer_list<const Linear *> linears, const ActivationSet &a);

  static constexpr int kTokensAlone = 64;
  // As shrink, in an active step, for one matrix and by this thread alone, without a barrier: `a` has the inputs of up
  // to kTokensAlone tokens, the first in row 0.
  LoraRows shrink_alone(int thread, const PackedMatrix &matrix, const ActivationSet &a, Share tokens);

 private:
  // Per shrink, at most: those of all streams but the first, or q, k, v, a gate and the low ranks of a layer aside.
  static constexpr size_t kMatrices = 7;
  static_assert(kMatrices >= kMostStreams - 1);

  void find_adapters(int num_tokens, int num_reqs, const int32_t *query_start_loc, const int32_t *lora_ids);

  Model &model_;
  std::vector<uint64_t> requests_;  // adapter << 32 | request
  LoraPlan plan_;
  std::vector<const LoraAdapter *> of_experts_;
  Buffer<int> of_token_;                  // [T]: its adapter in of_experts_, −1 for none; unless that is empty
  bool with_vectors_ = false;             // an adapter changes vectors
  Buffer<const LoraAdapter *> adapters_;  // [T]: the adapter of each token, null for none; if with_vectors_
  Buffer<LoraRow> shrunk_;                // [T, kMatrices]
  Buffer<LoraRow> alone_;                 // [num_threads, kTokensAlone]
};

}  // namespace foreword::kernels
