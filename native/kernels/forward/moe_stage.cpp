#include "kernels/forward/moe_stage.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace foreword::kernels {
namespace {

constexpr int kMostPlaces = 512;  // so that their numbers stay in the caches from the inputs to the sums

// The expert with the largest p + bias; those that are taken have a negative p. `bias` may be null.
int best_expert(const float *p, int num_experts, const float *bias) {
  if (!bias) return int(std::max_element(p, p + num_experts) - p);
  int best = -1;
  for (int e = 0; e < num_experts; ++e) {
    if (p[e] >= 0.f && (best < 0 || p[e] + bias[e] > p[best] + bias[best])) best = e;
  }
  return std::max(best, 0);
}

// Makes p negative, as for experts that are taken, for those outside the groups_per_token best groups. The first of
// equal groups is better.
void keep_best_groups(const Moe &moe, float *p, int num_experts) {
  const int size = num_experts / moe.num_groups;
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  std::array<float, kMostExperts> scores;
  for (int g = 0; g < moe.num_groups; ++g) {
    float first = kLeast, second = kLeast;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      const float x = p[e] + (moe.router_bias ? moe.router_bias[e] : 0.f);
      second = std::max(second, std::min(first, x));
      first = std::max(first, x);
    }
    scores[size_t(g)] = moe.router_bias && size > 1 ? first + second : first;
  }
  for (int taken = 0; taken < moe.groups_per_token; ++taken) {
    *std::max_element(scores.begin(), scores.begin() + moe.num_groups) = kLeast;
  }
  for (int g = 0; g < moe.num_groups; ++g) {
    if (scores[size_t(g)] > kLeast) std::fill_n(p + g * size, size, -1.f);
  }
}

int widest_sum(const Model &model) {
  int widest = model.config.hidden_size;
  for (const Layer &layer : model.layers) {
    if (layer.moe) widest = std::max(widest, layer.moe->outer());
  }
  return widest;
}

}  // namespace

MoeStage::MoeStage(PassContext &context, MlpStage &mlp)
    : ctx_(context),
      mlp_(mlp),
      shared_gate_(1),
      normed_(context.model.config.hidden_size),
      sums_(widest_sum(context.model)) {
  for (const Layer &layer : ctx_.model.layers) {
    if (!layer.moe) continue;
    experts_per_token_ = std::max(experts_per_token_, layer.moe->experts_per_token);
    max_experts_ = std::max(max_experts_, int(layer.moe->experts.size()));
    router_stride_ = std::max(router_stride_, layer.moe->router.stride);
    outer_ = std::max(outer_, layer.moe->outer());
    scales_inputs_ = scales_inputs_ || layer.moe->scales_inputs;
    has_sums_ = has_sums_ || layer.moe->has_own_inputs();
    if (!layer.moe->latent_out.parts.empty()) {
      latent_ = std::max(latent_, layer.moe->outer());
      layer.moe->latent_out.add_kinds(latent_kinds_);
    }
    for (const Mlp &expert : layer.moe->experts) {
      expert.gate.add_kinds(gathered_kinds_);
      expert.up.add_kinds(gathered_kinds_);
      expert.down.add_kinds(hidden_kinds_);
      hidden_stride_ = std::max(hidden_stride_, expert.up.stride);
      hidden_cols_ = std::max(hidden_cols_, expert.down.cols);
    }
  }
}

void MoeStage::reserve() {
  if (max_experts_ == 0) return;
  const int num_tokens = ctx_.input.num_tokens, choices = num_tokens * experts_per_token_;
  const int places = std::min(choices, kMostPlaces);
  if (has_sums_ || scales_inputs_) normed_.reserve(num_tokens);
  if (has_sums_) sums_.reserve(num_tokens);
  router_logits_.reserve(size_t(num_tokens) * size_t(router_stride_));
  shared_gate_.reserve(num_tokens);
  const size_t stride = size_t(padded_row(outer_));
  if (scales_inputs_) scaled_.reserve(size_t(places) * stride);
  if (latent_) {
    latents_.reserve(size_t(num_tokens) * size_t(padded_row(latent_)));
    latent_sums_.reserve(num_tokens, latent_, latent_kinds_);
  }
  for (Buffer<int> *of_choice : {&expert_, &place_, &token_, &choice_}) of_choice->reserve(size_t(choices));
  weight_.reserve(size_t(choices));
  expert_begin_.reserve(size_t(max_experts_) + 1);
  hidden_.reserve(size_t(places) * size_t(hidden_stride_));
  gathered_.reserve(places, outer_, gathered_kinds_);
  down_.reserve(places, hidden_cols_, hidden_kinds_);
}

void MoeStage::run(int thread, const Layer &layer) {
  const Moe &moe = *layer.moe;
  const Share tokens{0, ctx_.input.num_tokens};
  const int num_experts = int(moe.experts.size()), choices = tokens.end * moe.experts_per_token;

  auto normed_with = [&](const Norm &norm) {
    return ctx_.products.prepare_shared(thread, ctx_.normed.shared, moe.router.cols, tokens.end, [&](int t) {
      const float *row = ctx_.norm_row(ctx_.x.row(t), norm, normed_.row(t));
      if (row != normed_.row(t)) std::copy_n(row, normed_.stride(), normed_.row(t));
      return normed_.row(t);
    });
  };
  const bool is_read_again = moe.has_own_inputs() || moe.scales_inputs;
  ActivationSet in = is_read_again ? normed_with(layer.mlp_norm) : ctx_.norm_rows(thread, layer.mlp_norm), shared{};
  if (!moe.experts_norm) start(thread, moe, in);
  if (moe.shared) shared = mlp_.gate_up(thread, *moe.shared, in, tokens.end);
  if (moe.experts_norm) start(thread, moe, in = normed_with(moe.router_norm));
  if (moe.experts_norm || !moe.shared) ctx_.pool.barrier();
  const FloatRows &sums = moe.has_own_inputs() ? sums_ : ctx_.has_branch(layer.post_mlp_norm) ? ctx_.branch : ctx_.x;
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    if (&sums != &ctx_.x) std::fill_n(sums.row(t), sums.stride(), 0.f);
    if (moe.experts_norm) ctx_.norm_row(ctx_.x.row(t), moe.experts_norm, normed_.row(t));
  }
  if (tokens.end > ProductInput::kFewRows) {
    route(moe, share);
    ctx_.pool.barrier();
  } else if (thread == 0) {
    route(moe, tokens);
  }
  if (thread == 0) sort_by_expert(moe);
  ctx_.pool.barrier();

  if (moe.shared && moe.has_own_inputs()) {
    ctx_.products.linear(thread, moe.shared->down, shared, tokens, ctx_.branch.data(), Store::assign);
  } else if (moe.shared) {
    ctx_.products.in_columns(thread, moe.shared->down, shared, tokens, nullptr, [&](const float *out, auto... at) {
      add_rows(out, at..., sums, nullptr, [&](int t) {
        const float gate = moe.shared_gate.parts.empty() ? 1.f : 1.f / (1.f + std::exp(-shared_gate_.row(t)[0]));
        return std::pair(t, gate);
      });
    });
  }
  for (int first = 0, expert = 0; first < choices;) {
    const Share places{first, end_of_places(first, num_experts)};
    while (places_of(expert).end <= first) ++expert;
    run_places(thread, moe, in, places, expert, sums);
    first = places.end;
  }
  ctx_.pool.barrier();
  if (moe.experts_norm) norm_sums(thread, moe);
  if (!moe.latent_in.parts.empty()) leave_latent(thread, moe);
  if (&sums != &ctx_.x) ctx_.add_branch(thread, layer.post_mlp_norm);
  ctx_.clock.finish(thread, Stage::down);
}

// The products that the router and the experts begin with.
void MoeStage::start(int thread, const Moe &moe, const ActivationSet &in) {
  const Share tokens{0, ctx_.input.num_tokens};
  ctx_.products.linear(thread, moe.router, in, tokens, router_logits_.data(), Store::assign);
  if (!moe.shared_gate.parts.empty()) {
    ctx_.products.linear(thread, moe.shared_gate, in, tokens, shared_gate_.data(), Store::assign);
  }
  if (!moe.latent_in.parts.empty()) {
    ctx_.products.linear(thread, moe.latent_in, in, tokens, latents_.data(), Store::assign);
  }
}

// The end of places whose numbers stay in the caches: whole experts, unless one alone has more.
int MoeStage::end_of_places(int first, int num_experts) const {
  const int *begin = expert_begin_.data(), most = first + kMostPlaces;
  const int end = *(std::upper_bound(begin, begin + num_experts + 1, most) - 1);
  return end > first ? end : most;
}

// sums += p_e (out_e + down_bias_e) of these places. `expert`: that of the first one.
void MoeStage::run_places(int thread, const Moe &moe, const ActivationSet &in, Share places, int expert,
                          const FloatRows &sums) {
  const size_t stride = size_t(padded_row(moe.outer()));
  const Mlp &first = moe.experts[size_t(expert)];
  const bool is_latent = !moe.latent_in.parts.empty();
  // Inputs of the router are prepared for the experts too; those of one token are read where they are.
  const bool is_prepared = !moe.has_own_inputs() && !moe.scales_inputs;
  const bool is_one_row = is_prepared && ctx_.input.num_tokens == 1;
  const int count = places.end - places.begin;
  ActivationSet inputs = in;
  if (is_prepared && !is_one_row) {
    inputs = ctx_.products.gather(thread, gathered_, in, moe.outer(), count, token_.data() + places.begin);
  } else if (!is_prepared) {
    inputs = ctx_.products.prepare_shared(thread, gathered_, moe.outer(), count, [&](int i) -> const float * {
      const int place = places.begin + i, token = token_.data()[place];
      const float *row = is_latent ? latents_.data() + size_t(token) * stride : normed_.row(token);
      if (!moe.scales_inputs) return row;
      const float weight = weight_.data()[choice_.data()[place]];
      float *scaled = scaled_.data() + size_t(i) * stride;
      for (size_t k = 0; k < stride; ++k) scaled[k] = weight * row[k];
      return scaled;
    });
  }
  // Calls f(expert, rows, next) with the rows of the experts, of which the first of these places has number 0, and the
  // expert that follows, or null.
  auto for_experts = [&](auto &&f) {
    for (int e = expert, last = int(moe.experts.size()), next; e < last; e = next) {
      for (next = e + 1; next < last && places_of(next).begin == places_of(next).end;) ++next;
      if (next < last && places_of(next).begin >= places.end) next = last;
      const Share own = places_of(e);
      const Share rows{std::max(own.begin, places.begin) - places.begin, std::min(own.end, places.end) - places.begin};
      f(moe.experts[size_t(e)], rows, next < last ? &moe.experts[size_t(next)] : nullptr);
    }
  };
  for_experts([&](const Mlp &mlp, Share rows, const Mlp *next) {
    float *out = hidden_.data() + (is_one_row ? size_t(rows.begin) * size_t(mlp.up.stride) : 0);
    ctx_.products.gated(thread, mlp, inputs, is_one_row ? Share{0, 1} : rows, out,
                        next ? next->first() : first.down);
  });
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::gate_up);

  const ActivationSet hidden = ctx_.products.prepare_shared(thread, down_, first.down.cols, count, [&](int i) {
    return hidden_.data() + size_t(i) * size_t(first.up.stride);
  });
  for_experts([&](const Mlp &mlp, Share rows, const Mlp *next) {
    const Linear *following = next ? &next->down : nullptr;
    ctx_.products.in_columns(thread, mlp.down, hidden, rows, following, [&](const float *out, auto... at) {
      add_rows(out, at..., sums, mlp.down_bias, [&](int row) {
        const int place = places.begin + row;
        return std::pair(token_.data()[place], moe.scales_inputs ? 1.f : weight_.data()[choice_.data()[place]]);
      });
    });
  });
  ctx_.clock.finish(thread, Stage::down);
}

// sums += weight (out + bias) in the columns of these panels, with of(row) = {token, weight}.
template <class Of>
void MoeStage::add_rows(const float *out, size_t stride, Share rows, Share panels, const FloatRows &sums, Vector bias,
                        Of &&of) const {
  const size_t column = size_t(panels.begin) * size_t(ctx_.isa.panel_width);
  for (int row = rows.begin; row < rows.end; ++row, out += stride) {
    const auto [token, weight] = of(row);
    // The rows of an expert's tokens are not adjacent: the processor does not foresee them.
    const float *ahead = sums.row(of(std::min(row + 2, rows.end - 1)).first) + column;
    for (size_t i = 0; i < stride; i += 16) __builtin_prefetch(ahead + i, 1);
    float *to = sums.row(token) + column;
    ctx_.isa.add_scaled(weight, out, stride, to);
    if (bias) ctx_.isa.add_scaled(weight, bias + column, stride, to);
  }
}

// p = softmax(logits + scores_bias), or sigmoid of each; the largest experts_per_token of p + router_bias, ties to the
// lower expert.
void MoeStage::route(const Moe &moe, Share share) {
  const int num_experts = int(moe.experts.size()), k = moe.experts_per_token;
  for (int t = share.begin; t < share.end; ++t) {
    float *p = router_logits_.data() + size_t(t) * size_t(moe.router.stride);
    float sum = 0.f;
    for (int e = 0; moe.scores_bias && e < num_experts; ++e) p[e] += moe.scores_bias[e];
    if (moe.sigmoid) {
      for (int e = 0; e < num_experts; ++e) p[e] = 1.f / (1.f + std::exp(-p[e]));
      sum = 1.f;
    } else {
      const float top = *std::max_element(p, p + num_experts);
      for (int e = 0; e < num_experts; ++e) sum += p[e] = std::exp(p[e] - top);
    }
    if (moe.router_bias && !moe.sigmoid) {  // which is added to probabilities
      for (int e = 0; e < num_experts; ++e) p[e] /= sum;
      sum = 1.f;
    }
    if (moe.num_groups > 1) keep_best_groups(moe, p, num_experts);
    int *expert = expert_.data() + size_t(t) * size_t(k);
    float *weight = weight_.data() + size_t(t) * size_t(k);
    float chosen = moe.sum_eps;
    for (int j = 0; j < k; ++j) {
      expert[j] = best_expert(p, num_experts, moe.router_bias);
      weight[j] = p[expert[j]] / sum;
      chosen += weight[j];
      p[expert[j]] = -1.f;
    }
    for (int j = 0; j < k; ++j) {
      weight[j] = (moe.norm_topk ? weight[j] / chosen : weight[j]) * moe.scale;
      if (moe.expert_scales) weight[j] *= moe.expert_scales[expert[j]];
    }
  }
}

// Counting sort of the choices by expert.
void MoeStage::sort_by_expert(const Moe &moe) {
  const int num_experts = int(moe.experts.size()), choices = ctx_.input.num_tokens * moe.experts_per_token;
  const int *expert = expert_.data();
  int *begin = expert_begin_.data();
  std::fill(begin, begin + num_experts + 1, 0);
  for (int c = 0; c < choices; ++c) ++begin[expert[c] + 1];
  for (int e = 0; e < num_experts; ++e) begin[e + 1] += begin[e];
  for (int c = 0; c < choices; ++c) {
    const int place = begin[expert[c]]++;
    place_.data()[c] = place;
    token_.data()[place] = c / moe.experts_per_token;
    choice_.data()[place] = c;
  }
  std::copy_backward(begin, begin + num_experts, begin + num_experts + 1);
  begin[0] = 0;
}

void MoeStage::norm_sums(int thread, const Moe &moe) {
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    float *branch = ctx_.branch.row(t);
    ctx_.norm_row(branch, moe.post_shared_norm, branch);
    ctx_.isa.add_row(ctx_.norm_row(thread, sums_.row(t), moe.post_experts_norm), size_t(ctx_.branch.stride()), branch);
  }
}

void MoeStage::leave_latent(int thread, const Moe &moe) {
  const int num_tokens = ctx_.input.num_tokens;
  const ActivationSet sums = ctx_.products.prepare_shared(thread, latent_sums_, moe.outer(), num_tokens,
                                                          [&](int t) { return sums_.row(t); });
  ctx_.products.linear(thread, moe.latent_out, sums, {0, num_tokens}, ctx_.branch.data(),
                       moe.shared ? Store::add : Store::assign);
  ctx_.pool.barrier();
}

}  // namespace foreword::kernels
