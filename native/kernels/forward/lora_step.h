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

  // Adds the kinds of input that the adapters take and the matrices may not.
  void add_kinds(KindSet &kinds) const;

  // The share of `thread` of a Aᵀ for the matrices of products with the same input. Ends with a barrier.
  void shrink(int thread, std::initializer_list<const Linear *> linears, const ActivationSet &a);
  // out += (a Aᵀ) Bᵀ for the tokens of [rows.begin, rows.end), the outputs of panels [panel_begin, panel_end), and
  // the matrix at `place` of the last `shrink`.
  void expand(const PackedMatrix &matrix, int place, Share rows, int panel_begin, int panel_end, float *out,
              size_t out_stride) const {
    expand({shrunk_.data() + place, kMatrices}, matrix, rows, {panel_begin, panel_end}, out, out_stride);
  }
  // As expand, with `out` from the first of these rows and panels on.
  void expand_part(const PackedMatrix &matrix, int place, Share rows, Share panels, float *out, size_t stride) const {
    expand(matrix, place, rows, panels.begin, panels.end, first_row(rows, panels, out, stride), stride);
  }

  static constexpr int kTokensAlone = 64;
  // As shrink, for one matrix and by this thread alone, without a barrier: `a` has the inputs of up to kTokensAlone
  // tokens, the first in row 0.
  void shrink_alone(int thread, const PackedMatrix &matrix, const ActivationSet &a, Share tokens);
  // As expand_part, for some of the tokens of the last `shrink_alone`, which are `tokens`.
  void expand_alone(int thread, const PackedMatrix &matrix, Share tokens, Share rows, Share panels, float *out,
                    size_t stride) const;

 private:
  static constexpr size_t kMatrices = 6;  // per shrink, at most: those of a delta-net

  // The rows that a shrink wrote for a matrix, by token.
  struct Shrunk {
    LoraRow *rows;
    size_t stride;
  };

  struct Group {
    const LoraAdapter *adapter;
    int begin, end;  // places of its tokens
  };
  struct Block {
    int group, begin, end;  // places of some of its tokens
  };

  // What the kernels take for rows of which the first are at `out`: the place of row 0 and panel 0.
  float *first_row(Share rows, Share panels, float *out, size_t stride) const {
    return out - ptrdiff_t(rows.begin) * ptrdiff_t(stride) - ptrdiff_t(panels.begin) * model_.isa.panel_width;
  }
  void expand(Shrunk shrunk, const PackedMatrix &matrix, Share rows, Share panels, float *out, size_t out_stride) const;
  Shrunk alone(int thread, Share tokens) const {
    return {alone_.data() + ptrdiff_t(thread) * kTokensAlone - tokens.begin, 1};
  }
  // Calls f(pair, next, tokens, count) for each adapter of the step, with its tokens of these rows. pair: its change of
  // the matrix, without ranks if it has none. next: that of the adapter after it, or null.
  template <class F>
  void for_pairs(const PackedMatrix &matrix, Share rows, F &&f) const;

  Model &model_;
  std::vector<uint64_t> requests_;  // adapter << 32 | request
  std::vector<Group> groups_;
  std::vector<Block> blocks_;
  int num_vectors_ = 0;    // vectors of ranks of the adapter that has most
  Buffer<int> tokens_;      // by place: adapter after adapter, ascending within each
  Buffer<LoraRow> shrunk_;  // [T, kMatrices]
  Buffer<LoraRow> alone_;   // [num_threads, kTokensAlone]
};

}  // namespace foreword::kernels
