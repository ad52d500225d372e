// The adapters of one step. Tokens are sorted by adapter, once per step, so that each product of an adapter's factors
// is one product for all its tokens:
//
//   request 0 → adapter 7, tokens 0 1      groups   adapter 3: tokens 2 3 4
//   request 1 → adapter 3, tokens 2 3 4             adapter 7: tokens 0 1 6
//   request 2 → none,      token 5
//   request 3 → adapter 7, token 6
#pragma once

#include <initializer_list>
#include <vector>

#include "kernels/forward/input.h"

namespace foreword::kernels {

class LoraStep {
 public:
  explicit LoraStep(Model &model) : model_(model) {}

  // Plans the step of an input that was checked.
  void plan(const ForwardInput &input);
  // Returns whether a request of the step has an adapter. Without one, the functions below must not be called.
  bool is_active() const { return !groups_.empty(); }

  // Adds the kinds of input that the adapters take.
  void add_kinds(KindSet &kinds) const;

  // The share of `thread` of a Aᵀ for the matrices of products with the same input. Ends with a barrier.
  void shrink(int thread, std::initializer_list<const Linear *> linears, const ActivationSet &a);
  // out += (a Aᵀ) Bᵀ for the tokens of [rows.begin, rows.end), the outputs of panels [panel_begin, panel_end), and
  // the matrix at `place` of the last `shrink`.
  void expand(const PackedMatrix &matrix, int place, Share rows, int panel_begin, int panel_end, float *out,
              size_t out_stride) const;

 private:
  static constexpr size_t kMatrices = 4;  // per shrink, at most

  struct Group {
    const LoraAdapter *adapter;
    int begin, end;  // places of its tokens
  };
  struct Block {
    int group, begin, end;  // places of some of its tokens
  };

  Model &model_;
  std::vector<uint64_t> requests_;  // adapter << 32 | request
  std::vector<Group> groups_;
  std::vector<Block> blocks_;
  int num_vectors_ = 0;    // vectors of ranks of the adapter that has most
  Buffer<int> tokens_;      // by place: adapter after adapter, ascending within each
  Buffer<LoraRow> shrunk_;  // [T, kMatrices]
};

}  // namespace foreword::kernels
