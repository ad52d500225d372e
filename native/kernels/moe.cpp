// The mixture of experts of a step. Tokens are sorted by expert, so that every expert is one product over its own rows:
//
//   token 0 → experts 2, 0      choices 0 1        places (sorted by expert)   0: choice 1 (token 0)   expert 0
//   token 1 → experts 0, 3      choices 2 3                                    1: choice 2 (token 1)   expert 0
//                                                                              2: choice 0 (token 0)   expert 2
//                                                                              3: choice 3 (token 1)   expert 3
// A token's experts are summed in the order of its choices, whoever shares the batch.
#include <algorithm>
#include <cmath>

#include "kernels/step.h"

namespace foreword::kernels {

// p = softmax(logits); the largest experts_per_token of them, ties to the lower expert.
void StepRunner::route(int thread, const Moe &moe) {
  const int experts = static_cast<int>(moe.experts.size()), k = moe.experts_per_token;
  const Share share = share_of(in_.num_tokens, thread, pool_.size());
  for (int t = share.begin; t < share.end; ++t) {
    float *p = router_logits_.data() + static_cast<size_t>(t) * moe.router.stride;
    const float top = *std::max_element(p, p + experts);
    float sum = 0.f;
    for (int e = 0; e < experts; ++e) sum += p[e] = std::exp(p[e] - top);
    float chosen = 0.f;
    for (int j = 0; j < k; ++j) {
      const int e = static_cast<int>(std::max_element(p, p + experts) - p);
      const size_t choice = static_cast<size_t>(t) * k + j;
      choice_expert_.data()[choice] = e;
      choice_weight_.data()[choice] = p[e] / sum;
      chosen += p[e] / sum;
      p[e] = -1.f;
    }
    if (!moe.norm_topk) continue;
    for (int j = 0; j < k; ++j) choice_weight_.data()[static_cast<size_t>(t) * k + j] /= chosen;
  }
}

void StepRunner::sort_by_expert(const Moe &moe) {
  const int experts = static_cast<int>(moe.experts.size()), choices = in_.num_tokens * moe.experts_per_token;
  int *begin = expert_begin_.data();
  std::fill(begin, begin + experts + 1, 0);
  for (int c = 0; c < choices; ++c) ++begin[choice_expert_.data()[c] + 1];
  for (int e = 0; e < experts; ++e) begin[e + 1] += begin[e];
  for (int c = 0; c < choices; ++c) {
    const int place = begin[choice_expert_.data()[c]]++;
    choice_place_.data()[c] = place;
    place_token_.data()[place] = c / moe.experts_per_token;
  }
  for (int e = experts; e > 0; --e) begin[e] = begin[e - 1];
  begin[0] = 0;
}

// branch = Σ p_e mlp_e(h), plus sigmoid(h Wshared_gate) mlp_shared(h).
void StepRunner::moe(int thread, const Layer &layer, const Moe &moe) {
  const size_t stride = static_cast<size_t>(hidden_stride_);
  const Share tokens{0, in_.num_tokens}, mine = share_of(in_.num_tokens, thread, pool_.size());
  const int experts = static_cast<int>(moe.experts.size()), k = moe.experts_per_token, choices = in_.num_tokens * k;
  const bool has_shared = moe.shared != nullptr;
  const ActivationSet in = in_acts_.view(tokens.end, moe.router.cols);
  const ActivationSet gathered = gathered_acts_.view(choices, moe.router.cols);
  const ActivationSet hidden = expert_acts_.view(choices, moe.experts[0].down.cols);

  for (int t = mine.begin; t < mine.end; ++t) {
    level_.rms_norm(x_.data() + static_cast<size_t>(t) * stride, layer.mlp_norm, m_.config.hidden_size, m_.config.norm_eps,
                    normed_.data() + static_cast<size_t>(t) * stride);
  }
  prepare_rows(thread, in, tokens.end, [&](int t) { return normed_.data() + static_cast<size_t>(t) * stride; });
  pool_.barrier();
  linear(thread, moe.router, in, tokens, router_logits_.data(), Store::assign);
  if (has_shared) linear(thread, moe.shared_gate, in, tokens, shared_gate_.data(), Store::assign);
  pool_.barrier();
  route(thread, moe);
  pool_.barrier();
  if (thread == 0) sort_by_expert(moe);
  pool_.barrier();

  prepare_rows(thread, gathered, choices,
               [&](int place) { return normed_.data() + static_cast<size_t>(place_token_.data()[place]) * stride; });
  pool_.barrier();
  const int *begin = expert_begin_.data();
  for (int e = 0; e < experts; ++e) {
    const Share rows{begin[e], begin[e + 1]};
    gated(thread, moe.experts[static_cast<size_t>(e)], gathered, rows, expert_hidden_.data());
  }
  pool_.barrier();
  tick(thread, 5);
  const size_t hidden_stride = static_cast<size_t>(moe.experts[0].gate.stride);
  prepare_rows(thread, hidden, choices,
               [&](int place) { return expert_hidden_.data() + static_cast<size_t>(place) * hidden_stride; });
  pool_.barrier();
  for (int e = 0; e < experts; ++e) {
    const Share rows{begin[e], begin[e + 1]};
    linear(thread, moe.experts[static_cast<size_t>(e)].down, hidden, rows, expert_out_.data(), Store::assign);
  }
  if (has_shared) {
    gated(thread, *moe.shared, in, tokens, hidden_.data());
    pool_.barrier();
    const ActivationSet shared_hidden = mlp_acts_.view(tokens.end, moe.shared->down.cols);
    prepare_rows(thread, shared_hidden, tokens.end,
                 [&](int t) { return hidden_.data() + static_cast<size_t>(t) * moe.shared->gate.stride; });
    pool_.barrier();
    linear(thread, moe.shared->down, shared_hidden, tokens, branch_.data(), Store::assign);
  }
  pool_.barrier();

  for (int t = mine.begin; t < mine.end; ++t) {
    float *out = branch_.data() + static_cast<size_t>(t) * stride;
    const float gate = has_shared ? 1.f / (1.f + std::exp(-shared_gate_.data()[static_cast<size_t>(t) * moe.shared_gate.stride])) : 0.f;
    for (size_t i = 0; i < stride; ++i) out[i] = has_shared ? out[i] * gate : 0.f;
    for (int j = 0; j < k; ++j) {
      const size_t choice = static_cast<size_t>(t) * k + j;
      const float *expert = expert_out_.data() + static_cast<size_t>(choice_place_.data()[choice]) * stride;
      const float weight = choice_weight_.data()[choice];
      for (size_t i = 0; i < stride; ++i) out[i] += weight * expert[i];
    }
  }
  tick(thread, 6);
}

}  // namespace foreword::kernels
