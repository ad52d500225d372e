// Matrix products of a forward pass: preparing their input rows and dividing their output panels between the threads.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/forward/lora_step.h"

namespace foreword::kernels {

// Buffers for the prepared input of a product. Up to kFewRows rows are prepared by every thread into its own buffer,
// which is cheaper than a barrier; more rows are prepared by all threads together into the shared buffer.
struct ProductInput {
  static constexpr int kFewRows = 2;

  void reserve(int rows, int cols, const KindSet &kinds, int num_threads);

  ActivationBuffer shared;
  std::vector<ActivationBuffer> own;  // [num_threads]
};

// Every function below is called by all threads of the region and does the share of `thread` (ThreadPool::divide).
class Products {
 public:
  explicit Products(Model &model);

  // Prepares rows [0, rows) of `cols` inputs, row r read from row(r), in every kind of `input`. On return all rows can
  // be read by this thread.
  template <class Row>
  ActivationSet prepare(int thread, const ProductInput &input, int cols, int rows, Row &&row) {
    if (rows > ProductInput::kFewRows) return prepare_shared(thread, input.shared, cols, rows, row);
    const ActivationSet set = input.own[size_t(thread)].view(rows, cols);
    for (int r = 0; r < rows; ++r) prepare_row(thread, set, r, row(r));
    return set;
  }
  template <class Row>
  ActivationSet prepare_shared(int thread, const ActivationBuffer &buffer, int cols, int rows, Row &&row) {
    const ActivationSet set = buffer.view(rows, cols);
    pool_.divide(thread, pool_.all(thread), rows, 1, [&](Share part, int) {
      for (int r = part.begin; r < part.end; ++r) prepare_row(thread, set, r, row(r));
    });
    pool_.barrier();
    return set;
  }

  // out (=, +=) a Wᵀ for `rows`. `next`: the product that this thread computes after this one, whose first weights are
  // prefetched; null if unknown. `lora`: the adapters of the rows, shrunk for these matrices; null if there are none.
  void linear(int thread, const Linear &l, const ActivationSet &a, Share rows, float *out, Store store,
              const Linear *next = nullptr, const LoraStep *lora = nullptr) const;

  // out = act(a Wgateᵀ) * (a Wupᵀ) for `rows`.
  void gated(int thread, const Mlp &mlp, const ActivationSet &a, Share rows, float *out,
             const LoraStep *lora = nullptr) const;

 private:
  struct Scratch {
    Buffer<uint8_t> linear;
    Buffer<float> rotated, gate, up;
  };

  void prepare_row(int thread, const ActivationSet &set, int r, const float *x) const {
    for (int kind = 0; kind < kNumActivationKinds; ++kind) {
      if (set.used[kind]) isa_.prepare_row(set.kinds[kind], r, x, scratch_[size_t(thread)].rotated.data());
    }
  }
  int num_panels(const Linear &l, int team) const;
  int num_cuts(int num_rows, int count, const ThreadPool::Team &team) const;
  template <class F>
  void for_share(int thread, Share rows, int count, F &&f) const;
  const uint8_t *first_weights(int thread, const Linear *l, int num_rows) const;

  const Isa &isa_;
  ThreadPool &pool_;
  const Gate activation_;
  std::vector<Scratch> scratch_;  // [num_threads]
};

}  // namespace foreword::kernels
