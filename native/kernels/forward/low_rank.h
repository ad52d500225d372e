// Products of low rank, which are added to the outputs of other products.
#pragma once

#include <vector>

#include "kernels/forward/context.h"

namespace foreword::kernels {

class LowRankProducts {
 public:
  // all: those that are computed, each without parts or not.
  LowRankProducts(PassContext &context, const std::vector<const LowRank *> &all);

  void reserve();
  // Computes the first products of `count` rows of `a`; before a barrier. loras, place: see Products::linear.
  void begin(int thread, const LowRank &of, const ActivationSet &a, int count, const LoraRows &loras, int place);
  // out += the second ones; after a barrier, and with one at the end. Without parts both do nothing.
  void add(int thread, const LowRank &of, int count, float *out);

 private:
  PassContext &ctx_;
  KindSet kinds_{};
  int stride_ = 0, rank_ = 0;         // the largest of all
  Buffer<float> low_;                 // [rows, parts], as far apart as those of the product
  std::vector<ProductInput> inputs_;  // the inputs of each part of `high`
};

}  // namespace foreword::kernels
