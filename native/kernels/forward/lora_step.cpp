#include "kernels/forward/lora_step.h"

#include <algorithm>

namespace foreword::kernels {

void LoraStep::plan(int num_tokens, int num_reqs, const int32_t *query_start_loc, const int32_t *lora_ids) {
  requests_.clear();
  plan_.clear(num_tokens);
  of_experts_.clear();
  with_vectors_ = false;
  if (!lora_ids) return;
  for (int b = 0; b < num_reqs; ++b) {
    if (lora_ids[b]) requests_.push_back(uint64_t(uint32_t(lora_ids[b])) << 32 | uint32_t(b));
  }
  if (requests_.empty()) return;
  std::sort(requests_.begin(), requests_.end());
  of_token_.reserve(size_t(num_tokens));
  std::fill_n(of_token_.data(), num_tokens, -1);
  shrunk_.reserve(size_t(num_tokens) * kMatrices);
  alone_.reserve(size_t(model_.pool.size()) * kTokensAlone);
  for (const uint64_t request : requests_) {
    const int b = int(uint32_t(request)), begin = query_start_loc[b], end = query_start_loc[b + 1];
    const LoraAdapter &adapter = model_.loras.at(int(request >> 32));
    plan_.add(adapter, 0, begin, end);
    if (!adapter.changes_experts) continue;
    if (of_experts_.empty() || of_experts_.back() != &adapter) of_experts_.push_back(&adapter);
    std::fill(of_token_.data() + begin, of_token_.data() + end, int(of_experts_.size()) - 1);
  }
  plan_.finish();
  plan_.for_each_adapter([&](const LoraAdapter &adapter) { with_vectors_ |= !adapter.vectors.empty(); });
  if (with_vectors_) find_adapters(num_tokens, num_reqs, query_start_loc, lora_ids);
}

void LoraStep::find_adapters(int num_tokens, int num_reqs, const int32_t *query_start_loc, const int32_t *lora_ids) {
  adapters_.reserve(size_t(num_tokens));
  for (int b = 0; b < num_reqs; ++b) {
    const LoraAdapter *adapter = lora_ids[b] ? &model_.loras.at(lora_ids[b]) : nullptr;
    std::fill(adapters_.data() + query_start_loc[b], adapters_.data() + query_start_loc[b + 1], adapter);
  }
}

KindSet LoraStep::with_kinds(KindSet kinds) const {
  plan_.for_each_adapter([&](const LoraAdapter &adapter) {
    if (adapter.takes_bytes) kinds[size_t(lora_input(LoraFormat::i8))] = true;
  });
  return kinds;
}

LoraRows LoraStep::shrink(int thread, std::initializer_list<const Linear *> linears, const ActivationSet &a) {
  if (!is_active()) return {};
  const PackedMatrix *matrices[kMatrices];
  int count = 0;
  for (const Linear *l : linears) {
    for (const Linear::Part &part : l->parts) matrices[count++] = part.matrix;
  }
  auto matrix = [&](int, int place) -> const PackedMatrix & { return *matrices[place]; };
  plan_.shrink(thread, model_.pool.size(), count, matrix, a, shrunk_.data(), kMatrices);
  model_.pool.barrier();
  return plan_.rows_of(0, shrunk_.data(), kMatrices);
}

LoraRows LoraStep::shrink_alone(int thread, const PackedMatrix &matrix, const ActivationSet &a, Share tokens) {
  LoraRow *own = alone_.data() + ptrdiff_t(thread) * kTokensAlone - tokens.begin;
  const LoraRows rows = plan_.rows_of(0, own, 1);
  rows.shrink(matrix, a, tokens);
  return rows;
}

}  // namespace foreword::kernels
