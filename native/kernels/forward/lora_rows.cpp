#include "kernels/forward/lora_rows.h"

#include <algorithm>

namespace foreword::kernels {
namespace {

constexpr int kBlockRows = 32;  // rows in a unit of work: enough to use a loaded factor often, few enough to divide

// Prefetches the first of `bytes` bytes of factors. The kernels prefetch those that follow.
void prefetch_first(const uint8_t *factors, size_t bytes) {
  for (size_t i = 0; i < std::min(bytes, kLoraAhead); i += 64) __builtin_prefetch(factors + i, 0, 2);
}

}  // namespace

template <class F>
void LoraRows::for_pairs(const PackedMatrix &matrix, Share rows, F &&f) const {
  for (const LoraGroup *group = begin_; group != end_; ++group) {
    const LoraPair *next = group + 1 == end_ ? nullptr : &group[1].adapter->pair_of(matrix);
    const int *begin = rows_ + group->begin, *end = rows_ + group->end;
    begin = std::lower_bound(begin, end, rows.begin);
    end = std::lower_bound(begin, end, rows.end);
    f(group->adapter->pair_of(matrix), next, begin, int(end - begin));
  }
}

void LoraRows::expand(const PackedMatrix &matrix, int place, Share rows, Share panels, float *out,
                      size_t out_stride) const {
  for_pairs(matrix, rows, [&](const LoraPair &pair, const LoraPair *next, const int *of_pair, int count) {
    if (next) prefetch_first(next->panel(panels.begin), next->panel_bytes * size_t(panels.end - panels.begin));
    if (!pair.padded_rank || count == 0) return;
    isa_->lora_expand(pair, shrunk_ + place, stride_, of_pair, count, panels.begin, panels.end, out, out_stride);
  });
}

void LoraRows::shrink(const PackedMatrix &matrix, const ActivationSet &a, Share rows) const {
  for_pairs(matrix, rows, [&](const LoraPair &pair, const LoraPair *, const int *of_pair, int count) {
    if (!pair.padded_rank || count == 0) return;
    Activations in = a.kinds[size_t(lora_input(pair.format))];
    in.data -= ptrdiff_t(rows.begin) * kPieceBytes;  // the kernels find rows by number
    in.blocks -= rows.begin;
    for (int vector = 0; vector < pair.num_vectors; ++vector) {
      isa_->lora_shrink(pair, in, of_pair, count, vector, shrunk_, stride_);
    }
  });
}

void LoraPlan::clear(int most_rows) {
  groups_.clear();
  blocks_.clear();
  num_rows_ = num_vectors_ = 0;
  rows_.reserve(size_t(most_rows));
}

void LoraPlan::add(const LoraAdapter &adapter, int product, int begin, int end) {
  if (groups_.empty() || groups_.back().adapter != &adapter || groups_.back().product != product) {
    groups_.push_back({&adapter, product, num_rows_, num_rows_});
    num_vectors_ = std::max(num_vectors_, adapter.num_vectors);
  }
  for (int row = begin; row < end; ++row) rows_.data()[num_rows_++] = row;
  groups_.back().end = num_rows_;
}

void LoraPlan::finish() {
  for (int g = 0; g < int(groups_.size()); ++g) {
    const int end = groups_[size_t(g)].end;
    for (int begin = groups_[size_t(g)].begin; begin < end; begin += kBlockRows) {
      blocks_.push_back({g, begin, std::min(begin + kBlockRows, end)});
    }
  }
}

LoraRows LoraPlan::rows_of(int product, LoraRow *shrunk, size_t stride) const {
  auto has_less = [](const LoraGroup &group, int number) { return group.product < number; };
  const LoraGroup *all = groups_.data(), *last = all + groups_.size();
  const LoraGroup *begin = std::lower_bound(all, last, product, has_less);
  const LoraGroup *end = std::lower_bound(begin, last, product + 1, has_less);
  return {isa_, begin, end, rows_.data(), shrunk, stride};
}

void LoraPlan::prefetch(const Unit &unit) {
  if (!unit.is_empty()) prefetch_first(unit.pair.vector(unit.vector), unit.pair.vector_bytes);
}

void LoraPlan::run(const Unit &unit, const ActivationSet &a, LoraRow *shrunk, size_t stride) const {
  if (unit.is_empty()) return;
  const Block &block = unit.block;
  const Activations &in = a.kinds[size_t(lora_input(unit.pair.format))];
  isa_.lora_shrink(unit.pair, in, rows_.data() + block.begin, block.end - block.begin, unit.vector,
                   shrunk + unit.place, stride);
}

}  // namespace foreword::kernels
