#include "kernels/forward/low_rank.h"

#include <algorithm>

namespace foreword::kernels {

LowRankProducts::LowRankProducts(PassContext &context, const std::vector<const LowRank *> &all) : ctx_(context) {
  size_t num_parts = 0;
  for (const LowRank *one : all) {
    for (const Linear &high : one->high) {
      high.add_kinds(kinds_);
      rank_ = std::max(rank_, high.cols);
    }
    stride_ = std::max(stride_, one->low.stride);
    num_parts = std::max(num_parts, one->high.size());
  }
  inputs_.resize(num_parts);
}

void LowRankProducts::reserve() {
  const int num_tokens = ctx_.input.num_tokens;
  low_.reserve(size_t(num_tokens) * size_t(stride_));
  for (ProductInput &input : inputs_) {
    input.reserve(num_tokens, rank_, ctx_.with_loras(kinds_), ctx_.pool.size());
  }
}

void LowRankProducts::begin(int thread, const LowRank &of, const ActivationSet &a, int count, const LoraRows &loras,
                            int place) {
  if (of.low.parts.empty()) return;
  ctx_.products.linear(thread, of.low, a, {0, count}, low_.data(), Store::assign, &of.high[0], loras, place);
}

void LowRankProducts::add(int thread, const LowRank &of, int count, float *out) {
  if (of.low.parts.empty()) return;
  for (size_t i = 0; i < of.high.size(); ++i) {
    const float *part = low_.data() + of.low.parts[i].offset;
    const ActivationSet set = ctx_.products.prepare(thread, inputs_[i], of.high[i].cols, count, [&](int r) {
      return part + int64_t(r) * of.low.stride;
    });
    if (i > 0 && ctx_.has_loras()) ctx_.pool.barrier();  // the adapters of the product before were added
    const LoraRows loras = ctx_.shrink(thread, {&of.high[i]}, set);
    ctx_.products.linear(thread, of.high[i], set, {0, count}, out, Store::add, nullptr, loras);
  }
  ctx_.pool.barrier();
}

}  // namespace foreword::kernels
