#include "kernels/forward/lora_step.h"

#include <algorithm>

namespace foreword::kernels {
namespace {

constexpr int kBlockTokens = 32;  // tokens in a unit of work: enough to use a loaded factor often, few enough to divide

// Prefetches the first of `bytes` bytes of factors. The kernels prefetch those that follow.
void prefetch_first(const uint8_t *factors, size_t bytes) {
  for (size_t i = 0; i < std::min(bytes, kLoraAhead); i += 64) __builtin_prefetch(factors + i, 0, 2);
}

}  // namespace

void LoraStep::plan(const ForwardInput &in) {
  requests_.clear();
  groups_.clear();
  blocks_.clear();
  num_vectors_ = 0;
  if (!in.lora_ids) return;
  for (int b = 0; b < in.num_reqs; ++b) {
    if (in.lora_ids[b]) requests_.push_back(uint64_t(uint32_t(in.lora_ids[b])) << 32 | uint32_t(b));
  }
  if (requests_.empty()) return;
  std::sort(requests_.begin(), requests_.end());
  tokens_.reserve(size_t(in.num_tokens));
  shrunk_.reserve(size_t(in.num_tokens) * kMatrices);
  alone_.reserve(size_t(model_.pool.size()) * kTokensAlone);
  int place = 0, last = 0;
  for (const uint64_t request : requests_) {
    const int id = int(request >> 32), b = int(uint32_t(request));
    if (id != last) {
      groups_.push_back({&model_.loras.at(id), place, place});
      num_vectors_ = std::max(num_vectors_, groups_.back().adapter->num_vectors);
      last = id;
    }
    for (int t = in.query_start_loc[b]; t < in.query_start_loc[b + 1]; ++t) tokens_.data()[place++] = t;
    groups_.back().end = place;
  }
  for (int g = 0; g < int(groups_.size()); ++g) {
    for (int begin = groups_[size_t(g)].begin; begin < groups_[size_t(g)].end; begin += kBlockTokens) {
      blocks_.push_back({g, begin, std::min(begin + kBlockTokens, groups_[size_t(g)].end)});
    }
  }
}

void LoraStep::add_kinds(KindSet &kinds) const {
  for (const Group &group : groups_) {
    if (group.adapter->takes_bytes) kinds[size_t(lora_input(LoraFormat::i8))] = true;
  }
}

// A unit is a block, a matrix and a vector of ranks.
void LoraStep::shrink(int thread, std::initializer_list<const Linear *> linears, const ActivationSet &a) {
  const PackedMatrix *matrices[kMatrices];
  int num_matrices = 0;
  for (const Linear *l : linears) {
    for (const Linear::Part &part : l->parts) matrices[num_matrices++] = part.matrix;
  }
  const int per_block = num_matrices * num_vectors_;
  const Share share = share_of(int(blocks_.size()) * per_block, thread, model_.pool.size());
  struct Unit {
    const Block &block;
    int place, vector;
    const LoraPair &pair;
    bool is_empty() const { return vector >= pair.num_vectors; }
  };
  auto unit_at = [&](int index) -> Unit {
    const Block &block = blocks_[size_t(index / per_block)];
    const int place = index % per_block / num_vectors_;
    return {block, place, index % num_vectors_, groups_[size_t(block.group)].adapter->pair_of(*matrices[place])};
  };
  for (int i = share.begin; i < share.end; ++i) {
    if (i + 1 < share.end) {
      const Unit next = unit_at(i + 1);
      if (!next.is_empty()) prefetch_first(next.pair.vector(next.vector), next.pair.vector_bytes);
    }
    const Unit unit = unit_at(i);
    if (unit.is_empty()) continue;
    const Block &block = unit.block;
    const Activations &in = a.kinds[size_t(lora_input(unit.pair.format))];
    model_.isa.lora_shrink(unit.pair, in, tokens_.data() + block.begin, block.end - block.begin, unit.vector,
                           shrunk_.data() + unit.place, kMatrices);
  }
  model_.pool.barrier();
}

template <class F>
void LoraStep::for_pairs(const PackedMatrix &matrix, Share rows, F &&f) const {
  for (const Group &group : groups_) {
    const LoraPair &pair = group.adapter->pair_of(matrix);
    const LoraPair *next = &group == &groups_.back() ? nullptr : &(&group + 1)->adapter->pair_of(matrix);
    const int *begin = tokens_.data() + group.begin, *end = tokens_.data() + group.end;
    begin = std::lower_bound(begin, end, rows.begin);
    end = std::lower_bound(begin, end, rows.end);
    f(pair, next, begin, int(end - begin));
  }
}

void LoraStep::expand(Shrunk shrunk, const PackedMatrix &matrix, Share rows, Share panels, float *out,
                      size_t out_stride) const {
  for_pairs(matrix, rows, [&](const LoraPair &pair, const LoraPair *next, const int *tokens, int count) {
    if (next) prefetch_first(next->panel(panels.begin), next->panel_bytes * size_t(panels.end - panels.begin));
    if (!pair.padded_rank || count == 0) return;
    model_.isa.lora_expand(pair, shrunk.rows, shrunk.stride, tokens, count, panels.begin, panels.end, out, out_stride);
  });
}

void LoraStep::shrink_alone(int thread, const PackedMatrix &matrix, const ActivationSet &a, Share tokens) {
  const Shrunk shrunk = alone(thread, tokens);
  for_pairs(matrix, tokens, [&](const LoraPair &pair, const LoraPair *, const int *of_pair, int count) {
    if (!pair.padded_rank || count == 0) return;
    Activations in = a.kinds[size_t(lora_input(pair.format))];
    in.data -= ptrdiff_t(tokens.begin) * kPieceBytes;  // the kernels find rows by token
    in.blocks -= tokens.begin;
    for (int vector = 0; vector < pair.num_vectors; ++vector) {
      model_.isa.lora_shrink(pair, in, of_pair, count, vector, shrunk.rows, shrunk.stride);
    }
  });
}

void LoraStep::expand_alone(int thread, const PackedMatrix &matrix, Share tokens, Share rows, Share panels, float *out,
                            size_t stride) const {
  expand(alone(thread, tokens), matrix, rows, panels, first_row(rows, panels, out, stride), stride);
}

}  // namespace foreword::kernels
