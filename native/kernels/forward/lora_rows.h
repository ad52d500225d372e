// The adapters of the rows of products. Rows are sorted by adapter, so that each product of an adapter's factors is one
// product for all its rows. Products whose rows are the tokens of the step have a plan in common (LoraStep). Experts
// have rows of their own (MoeStage): product i of their plan is that of expert i.
#pragma once

#include <vector>

#include "kernels/forward/input.h"

namespace foreword::kernels {

// Some rows of a product and their adapter.
struct LoraGroup {
  const LoraAdapter *adapter;
  int product;     // the number of the product
  int begin, end;  // where its rows are in a list
};

// The adapters of the rows of a product, after LoraPlan::shrink for its matrices. By default there are none.
class LoraRows {
 public:
  LoraRows() = default;
  // shrunk: by row; those of a row are `stride` apart from those of the next one.
  LoraRows(const Isa &isa, const LoraGroup *begin, const LoraGroup *end, const int *rows, LoraRow *shrunk,
           size_t stride)
      : isa_(&isa), begin_(begin), end_(end), rows_(rows), shrunk_(shrunk), stride_(stride) {}

  // out += (a Aᵀ) Bᵀ for these rows and panels, and the matrix that was shrunk at `place`.
  void expand(const PackedMatrix &matrix, int place, Share rows, Share panels, float *out, size_t out_stride) const;
  // As expand, with `out` from the first of these rows and panels on.
  void expand_part(const PackedMatrix &matrix, int place, Share rows, Share panels, float *out, size_t stride) const {
    if (begin_ == end_) return;
    const ptrdiff_t first = ptrdiff_t(rows.begin) * ptrdiff_t(stride) + ptrdiff_t(panels.begin) * isa_->panel_width;
    expand(matrix, place, rows, panels, out - first, stride);
  }
  // a Aᵀ for a matrix alone and these rows, by this thread alone. a: the first of these rows is in row 0.
  void shrink(const PackedMatrix &matrix, const ActivationSet &a, Share rows) const;

 private:
  // Calls f(pair, next, rows, count) for each adapter with its rows of these. pair: its change of the matrix, without
  // ranks if it has none. next: that of the adapter after it, or null.
  template <class F>
  void for_pairs(const PackedMatrix &matrix, Share rows, F &&f) const;

  const Isa *isa_ = nullptr;
  const LoraGroup *begin_ = nullptr, *end_ = nullptr;
  const int *rows_ = nullptr;
  LoraRow *shrunk_ = nullptr;
  size_t stride_ = 0;
};

// The adapters of the rows of all products with the same input.
class LoraPlan {
 public:
  explicit LoraPlan(const Isa &isa) : isa_(isa) {}

  // Begins a plan of at most so many rows.
  void clear(int most_rows);
  // Adds rows, in ascending order, to those of the last adapter and product; products and adapters in ascending order.
  void add(const LoraAdapter &adapter, int product, int begin, int end);
  // Ends the plan.
  void finish();
  bool is_empty() const { return groups_.empty(); }

  // The share of `thread` of a Aᵀ for `num_matrices` matrices of each product: matrix(product, place) is one of them,
  // and its numbers for row r go to shrunk[r * stride + place].
  template <class Matrix>
  void shrink(int thread, int num_threads, int num_matrices, Matrix &&matrix, const ActivationSet &a, LoraRow *shrunk,
              size_t stride) const {
    const int per_block = num_matrices * num_vectors_;
    auto unit_at = [&](int index) -> Unit {
      const Block &block = blocks_[size_t(index / per_block)];
      const LoraGroup &group = groups_[size_t(block.group)];
      const int place = index % per_block / num_vectors_;
      return {block, place, index % num_vectors_, group.adapter->pair_of(matrix(group.product, place))};
    };
    const Share share = share_of(int(blocks_.size()) * per_block, thread, num_threads);
    for (int i = share.begin; i < share.end; ++i) {
      if (i + 1 < share.end) prefetch(unit_at(i + 1));
      run(unit_at(i), a, shrunk, stride);
    }
  }
  // The adapters of a product. shrunk, stride: see LoraRows.
  LoraRows rows_of(int product, LoraRow *shrunk, size_t stride) const;

  template <class F>
  void for_each_adapter(F &&f) const {
    for (const LoraGroup &group : groups_) f(*group.adapter);
  }

 private:
  struct Block {
    int group, begin, end;  // where some of its rows are
  };

  // A block, a matrix and a vector of ranks.
  struct Unit {
    const Block &block;
    int place, vector;
    const LoraPair &pair;
    bool is_empty() const { return vector >= pair.num_vectors; }
  };
  static void prefetch(const Unit &unit);
  void run(const Unit &unit, const ActivationSet &a, LoraRow *shrunk, size_t stride) const;

  const Isa &isa_;
  std::vector<LoraGroup> groups_;
  std::vector<Block> blocks_;
  Buffer<int> rows_;
  int num_rows_ = 0, num_vectors_ = 0;  // num_vectors_: vectors of ranks of the adapter that has most
};

}  // namespace foreword::kernels
