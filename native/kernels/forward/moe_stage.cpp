#include "kernels/forward/moe_stage.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

namespace foreword::kernels {
namespace {

constexpr int kMostPlaces = 512;  // so that their numbers stay in the caches from the inputs to the sums
constexpr int kRowsAhead = 8;     // rows between the sums in use and those that are prefetched
constexpr int kOwnInputs = 8192;  // numbers that every thread prepares for itself, which is cheaper than a barrier

// The k largest scores, in order; the first of equal ones is larger. `best`: memory for their values.
void find_best(const float *scores, int count, int k, int *found, float *best) {
  int held = 0;
  for (int i = 0; i < count; ++i) {
    if (held == k && !(scores[i] > best[k - 1])) continue;
    int place = held < k ? held++ : k - 1;
    for (; place > 0 && scores[i] > best[place - 1]; --place) {
      best[place] = best[place - 1];
      found[place] = found[place - 1];
    }
    best[place] = scores[i];
    found[place] = i;
  }
}

// Makes the scores of the experts outside the groups_per_token best groups the least, or 0. The first of equal groups
// is better.
void keep_best_groups(const Moe &moe, float *scores, int num_experts) {
  const int size = num_experts / moe.num_groups;
  constexpr float kLeast = -std::numeric_limits<float>::infinity();
  std::array<float, kMostExperts> of_group;
  for (int g = 0; g < moe.num_groups; ++g) {
    float first = kLeast, second = kLeast;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(first, scores[e]));
      first = std::max(first, scores[e]);
    }
    of_group[size_t(g)] = moe.router_bias && size > 1 ? first + second : first;
  }
  for (int taken = 0; taken < moe.groups_per_token; ++taken) {
    *std::max_element(of_group.begin(), of_group.begin() + moe.num_groups) = kLeast;
  }
  for (int g = 0; g < moe.num_groups; ++g) {
    if (of_group[size_t(g)] > kLeast) std::fill_n(scores + g * size, size, moe.zeroes_groups ? 0.f : kLeast);
  }
}

// The experts of a token in rounds, and their weights: MoeSpec::sparse_mix. The first of equal scores is larger.
void mix_sparsely(const Moe &moe, const float *scores, int num_experts, int *expert, float *weight) {
  for (int round = 0; round < moe.experts_per_token; ++round) {
    auto is_free = [&](int e) { return std::find(expert, expert + round, e) == expert + round; };
    int best = -1;
    for (int e = 0; e < num_experts; ++e) {
      if (is_free(e) && (best < 0 || scores[e] > scores[best])) best = e;
    }
    const float top = scores[best];
    float sum = 0.f;
    for (int e = 0; e < num_experts; ++e) {
      const bool is_far = (top - scores[e]) / std::max(std::abs(scores[e]), top) > moe.sparse_mix;
      if (is_free(e) && !is_far) sum += std::exp(scores[e] - top);
    }
    expert[round] = best;
    weight[round] = moe.scale / sum;
  }
}

int widest_sum(const Model &model) {
  int widest = model.config.hidden_size;
  model.for_each_moe([&](const Moe &moe) { widest = std::max(widest, moe.outer()); });
  return widest;
}

// Outputs of the products of the MLP of a router; 0 without one.
int router_size(const Model &model) {
  int size = 0;
  model.for_each_moe([&](const Moe &moe) { size = std::max(size, moe.router_mlp ? moe.router.cols : 0); });
  return size;
}

}  // namespace

MoeStage::MoeStage(PassContext &context, MlpStage &mlp)
    : ctx_(context),
      mlp_(mlp),
      shared_gate_(1),
      normed_(context.model.config.hidden_size),
      sums_(widest_sum(context.model)),
      late_{FloatRows(context.model.config.hidden_size), FloatRows(context.model.config.hidden_size)},
      routed_(router_size(context.model)),
      router_hidden_{FloatRows(routed_.stride()), FloatRows(routed_.stride())},
      router_rows_(routed_.stride()),
      routes_(size_t(context.pool.size())),
      own_down_(size_t(context.pool.size())) {
  for (int thread = 0; thread < context.pool.size(); ++thread) place_loras_.push_back({LoraPlan(context.isa), {}});
  ctx_.model.for_each_moe([&](const Moe &moe) {
    experts_per_token_ = std::max(experts_per_token_, moe.experts_per_token);
    max_experts_ = std::max(max_experts_, int(moe.experts.size()));
    router_stride_ = std::max(router_stride_, moe.router.stride);
    outer_ = std::max(outer_, moe.outer());
    if (moe.router_mlp) {
      moe.router_mlp->first.add_kinds(router_kinds_);
      moe.router_mlp->second.add_kinds(router_kinds_);
      moe.router.add_kinds(router_kinds_);
    }
    keeps_inputs_ = keeps_inputs_ || moe.scales_inputs || moe.identities > 0;
    scales_inputs_ = scales_inputs_ || moe.scales_inputs;
    has_sums_ = has_sums_ || moe.has_own_inputs();
    if (!moe.latent_out.parts.empty()) {
      latent_ = std::max(latent_, moe.outer());
      moe.latent_out.add_kinds(latent_kinds_);
    }
    for (const Mlp &expert : moe.experts) {
      expert.gate.add_kinds(gathered_kinds_);
      expert.up.add_kinds(gathered_kinds_);
      expert.down.add_kinds(hidden_kinds_);
      hidden_stride_ = std::max(hidden_stride_, expert.up.stride);
      hidden_cols_ = std::max(hidden_cols_, expert.down.cols);
    }
  });
  for (const Layer &layer : ctx_.model.layers) has_late_ = has_late_ || layer.late_moe;
  router_rows_.reserve(ctx_.pool.size());
  if (max_experts_ == 0) return;
  own_rows_ = std::min(kOwnInputs / hidden_cols_, kMostPlaces - 1);  // no places follow so few
}

void MoeStage::reserve() {
  if (max_experts_ == 0) return;
  const int num_tokens = ctx_.input.num_tokens, choices = num_tokens * experts_per_token_;
  const int places = std::min(choices, kMostPlaces);
  if (has_sums_ || keeps_inputs_) normed_.reserve(num_tokens);
  for (FloatRows &late : late_) {
    if (has_late_) late.reserve(num_tokens);
  }
  if (has_sums_) {
    sums_.reserve(num_tokens);
    own_inputs_.reserve(num_tokens, outer_, ctx_.with_loras(gathered_kinds_));
  }
  router_logits_.reserve(size_t(num_tokens) * size_t(router_stride_));
  if (routed_.stride()) {
    for (FloatRows *rows : {&routed_, &router_hidden_[0], &router_hidden_[1]}) rows->reserve(num_tokens);
    router_input_.reserve(num_tokens, routed_.stride(), ctx_.with_loras(router_kinds_), ctx_.pool.size());
  }
  shared_gate_.reserve(num_tokens);
  const size_t stride = size_t(padded_row(outer_));
  if (scales_inputs_) scaled_.reserve(size_t(places) * stride);
  if (latent_) {
    latents_.reserve(size_t(num_tokens) * size_t(padded_row(latent_)));
    latent_sums_.reserve(num_tokens, latent_, ctx_.with_loras(latent_kinds_));
  }
  const size_t num_routes = routes_each(num_tokens) ? routes_.size() : 1;
  for (size_t i = 0; i < num_routes; ++i) {
    Routes &routes = routes_[i];
    for (Buffer<int> *ints : {&routes.expert, &routes.token}) ints->reserve(size_t(choices));
    for (Buffer<float> *floats : {&routes.p, &routes.weight}) floats->reserve(size_t(choices));
    routes.kept.reserve(size_t(num_tokens));
    routes.chosen.reserve(size_t(max_experts_));
    routes.begin.reserve(size_t(max_experts_) + 1);
  }
  hidden_.reserve(size_t(places) * size_t(hidden_stride_));
  const KindSet hidden_kinds = ctx_.with_loras(hidden_kinds_);
  gathered_.reserve(places, outer_, ctx_.with_loras(gathered_kinds_));
  down_.reserve(places, hidden_cols_, hidden_kinds);
  for (ActivationBuffer &own : own_down_) own.reserve(std::min(places, own_rows_), hidden_cols_, hidden_kinds);
  if (has_loras()) shrunk_.reserve(size_t(places) * kMatrices);
}

void MoeStage::run(int thread, const Layer &layer) {
  const Moe &moe = *layer.moe;
  const FloatRows &sums = moe.has_own_inputs() ? sums_ : ctx_.has_branch(layer.post_mlp_norm) ? ctx_.branch : ctx_.x;
  sum(thread, layer, moe, sums);
  if (&sums != &ctx_.x) ctx_.add_branch(thread, layer.post_mlp_norm);
  ctx_.clock.finish(thread, Stage::down);
}

void MoeStage::begin_late(int thread, int index) {
  const Layer &layer = ctx_.model.layers[size_t(index)];
  if (!layer.late_moe) return;
  sum(thread, layer, *layer.late_moe, late_[index % 2]);
  ctx_.clock.finish(thread, Stage::down);
}

void MoeStage::add_late(int thread, int index) {
  if (index < 0 || !ctx_.model.layers[size_t(index)].late_moe) return;
  const FloatRows &late = late_[index % 2];
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) ctx_.isa.add_row(late.row(t), size_t(late.stride()), ctx_.x.row(t));
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::down);
}

// sums = moe(norm(x)), or sums += it if they are the residual stream; ctx_.branch where moe has inputs of its own. It
// ends with a barrier if they are; else a thread may read the sums of its share of the tokens.
void MoeStage::sum(int thread, const Layer &layer, const Moe &moe, const FloatRows &sums) {
  const Share tokens{0, ctx_.input.num_tokens}, share = ctx_.token_share(thread);
  for (int t = share.begin; &sums != &ctx_.x && t < share.end; ++t) std::fill_n(sums.row(t), sums.stride(), 0.f);

  auto normed_with = [&](const Norm &norm) {
    return ctx_.products.prepare_shared(thread, ctx_.normed.shared, moe.first_router().cols, tokens.end, [&](int t) {
      const float *row = ctx_.norm_row(ctx_.x.row(t), norm, normed_.row(t));
      if (row != normed_.row(t)) std::copy_n(row, normed_.stride(), normed_.row(t));
      return normed_.row(t);
    });
  };
  ActivationSet in = layer.parallel_mlp  ? ctx_.normed_rows(thread)
                     : moe.reads_again() ? normed_with(layer.mlp_norm)
                                         : ctx_.norm_rows(thread, layer.mlp_norm),
                shared{};
  if (!moe.experts_norm) start(thread, moe, in);
  if (!moe.experts_norm && moe.shared && ctx_.has_loras()) ctx_.pool.barrier();  // these products are done
  if (moe.shared) shared = mlp_.gate_up(thread, *moe.shared, in, tokens.end);
  if (moe.experts_norm) start(thread, moe, in = normed_with(moe.router_norm));
  if (moe.experts_norm || !moe.shared) ctx_.pool.barrier();
  for (int t = share.begin; moe.experts_norm && t < share.end; ++t) {
    ctx_.norm_row(ctx_.x.row(t), moe.experts_norm, normed_.row(t));
  }
  if (moe.router_mlp) run_router(thread, *moe.router_mlp, moe.router);
  const Routes &routes = find_places(thread, moe);
  if (moe.experts_norm) ctx_.pool.barrier();
  if (moe.has_own_inputs() && !moe.scales_inputs) {
    in = ctx_.products.prepare_shared(thread, own_inputs_, moe.outer(), tokens.end,
                                      [&](int t) { return input_row(moe, t); });
  }

  const LoraRows loras = moe.shared ? ctx_.shrink(thread, {&moe.shared->down}, shared) : LoraRows();
  if (moe.shared && moe.has_own_inputs()) {
    ctx_.products.linear(thread, moe.shared->down, shared, tokens, ctx_.branch.data(), Store::assign, nullptr, loras);
  } else if (moe.shared) {
    const Linear &down = moe.shared->down;
    ctx_.products.in_columns(thread, down, shared, tokens, nullptr, [&](float *out, size_t stride, Share r, Share p) {
      loras.expand_part(*down.parts[0].matrix, 0, r, p, out, stride);
      add_rows(out, stride, r, p, sums, moe.shared->down_bias, [&](int t) {
        const float gate = moe.shared_gate.parts.empty() ? 1.f : 1.f / (1.f + std::exp(-shared_gate_.row(t)[0]));
        return std::pair(t, gate);
      });
    });
  }
  const int *begin = routes.begin.data(), *end = begin + routes.num_chosen;
  for (Share places{0, 0}; places.begin < *end; places.begin = places.end) {
    // Whole experts, unless one alone has more places.
    const int most = places.begin + kMostPlaces, whole = *(std::upper_bound(begin, end + 1, most) - 1);
    places.end = whole > places.begin ? whole : most;
    const Share chosen{int(std::upper_bound(begin, end, places.begin) - begin) - 1,
                       int(std::lower_bound(begin, end, places.end) - begin)};
    run_places(thread, moe, routes, in, places, chosen, sums);
  }
  ctx_.pool.barrier();
  if (moe.experts_norm) norm_sums(thread, moe);
  if (!moe.latent_in.parts.empty()) leave_latent(thread, moe);
  for (int t = share.begin; moe.identities && t < share.end; ++t) {
    ctx_.isa.add_scaled(routes.kept.data()[t], normed_.row(t), size_t(normed_.stride()), sums.row(t));
  }
  if (moe.identities && &sums == &ctx_.x) ctx_.pool.barrier();
}

// The products that the router and the experts begin with.
void MoeStage::start(int thread, const Moe &moe, const ActivationSet &in) {
  const Share tokens{0, ctx_.input.num_tokens};
  const Linear &router = moe.first_router();
  const LoraRows loras = ctx_.shrink(thread, {&router, &moe.shared_gate, &moe.latent_in}, in);
  int place = 0;
  for (const auto &[l, out] : {std::pair(&router, moe.router_mlp ? router_hidden_[0].data() : router_logits_.data()),
                               std::pair(&moe.shared_gate, shared_gate_.data()),
                               std::pair(&moe.latent_in, latents_.data())}) {
    if (l->parts.empty()) continue;
    ctx_.products.linear(thread, *l, in, tokens, out, Store::assign, nullptr, loras, place++);
  }
}

void MoeStage::run_router(int thread, const RouterMlp &mlp, const Linear &router) {
  const int num_tokens = ctx_.input.num_tokens, size = router.cols;
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    float *routed = routed_.row(t);
    const float *own = router_hidden_[0].row(t);
    for (int i = 0; i < size; ++i) {
      const float carried = mlp.carry ? mlp.carry[i] * routed[i] : 0.f;
      routed[i] = own[i] + mlp.in_bias[i] + carried;
    }
  }
  ctx_.pool.barrier();
  float *row = router_rows_.row(thread);
  std::fill_n(row, router_rows_.stride(), 0.f);
  auto multiply = [&](const Linear &l, float *out, auto &&make) {
    const ActivationSet in = ctx_.products.prepare(thread, router_input_, size, num_tokens, [&](int t) {
      make(t);
      return static_cast<const float *>(row);
    });
    ctx_.products.linear(thread, l, in, {0, num_tokens}, out, Store::assign, nullptr, ctx_.shrink(thread, {&l}, in));
    ctx_.pool.barrier();
  };
  auto activate = [&](const float *from, Vector bias) {
    for (int i = 0; i < size; ++i) row[i] = from[i] + bias[i];
    ctx_.isa.activate(Gate::gelu, size_t(size), row);
  };
  multiply(mlp.first, router_hidden_[1].data(), [&](int t) {
    ctx_.isa.norm_parts(routed_.row(t), mlp.norm, 0, 1, size, ctx_.model.config.norm_eps, row);
  });
  multiply(mlp.second, router_hidden_[0].data(), [&](int t) { activate(router_hidden_[1].row(t), mlp.first_bias); });
  multiply(router, router_logits_.data(), [&](int t) { activate(router_hidden_[0].row(t), mlp.second_bias); });
}

// The places of all tokens. Of few tokens every thread finds them, which is cheaper than a barrier.
const MoeStage::Routes &MoeStage::find_places(int thread, const Moe &moe) {
  const int num_tokens = ctx_.input.num_tokens;
  const bool alone = routes_each(num_tokens);
  Routes &routes = routes_[alone ? size_t(thread) : 0];
  route(moe, alone ? Share{0, num_tokens} : ctx_.token_share(thread), routes);
  if (!alone) ctx_.pool.barrier();
  if (alone || thread == 0) sort_by_expert(moe, routes);
  if (!alone) ctx_.pool.barrier();
  return routes;
}

// The input of a token's experts, before it is prepared; only where normed_ or latents_ have it.
const float *MoeStage::input_row(const Moe &moe, int token) const {
  if (moe.latent_in.parts.empty()) return normed_.row(token);
  return latents_.data() + size_t(token) * size_t(padded_row(moe.outer()));
}

template <class RowsOf>
void MoeStage::plan(PlaceLoras &loras, int num_experts, const int *token, RowsOf &&rows_of) const {
  const LoraStep &step = ctx_.loras();
  auto &[plan, rows] = loras;
  plan.clear(rows_of(num_experts - 1).end);
  for (int i = 0; i < num_experts; ++i) {
    rows.clear();
    for (int row = rows_of(i).begin; row < rows_of(i).end; ++row) {
      const int adapter = step.of_experts(token[row]);
      if (adapter >= 0) rows.push_back(uint64_t(uint32_t(adapter)) << 32 | uint32_t(row));
    }
    std::sort(rows.begin(), rows.end());
    for (const uint64_t key : rows) {
      const int row = int(uint32_t(key));
      plan.add(*step.of_experts()[size_t(key >> 32)], i, row, row + 1);
    }
  }
  plan.finish();
}

// sums += p_e (out_e + down_bias_e) of these places. `chosen`: the experts that have them.
void MoeStage::run_places(int thread, const Moe &moe, const Routes &routes, const ActivationSet &in, Share places,
                          Share chosen, const FloatRows &sums) {
  // Inputs that the weights do not scale are prepared already; those of one token are read where they are.
  const bool is_one_row = !moe.scales_inputs && ctx_.input.num_tokens == 1 && !has_loras();
  const int count = places.end - places.begin, *token = routes.token.data() + places.begin;
  const float *weight = routes.weight.data() + places.begin;
  ActivationSet inputs = in;
  if (moe.scales_inputs) {
    const size_t stride = size_t(padded_row(moe.outer()));
    inputs = ctx_.products.prepare_shared(thread, gathered_, moe.outer(), count, [&](int i) -> const float * {
      const float *row = input_row(moe, token[i]);
      float *scaled = scaled_.data() + size_t(i) * stride;
      for (size_t k = 0; k < stride; ++k) scaled[k] = weight[i] * row[k];
      return scaled;
    });
  } else if (!is_one_row) {
    inputs = ctx_.products.gather(thread, gathered_, in, moe.outer(), count, token);
  }
  const int num_experts = chosen.end - chosen.begin;
  auto expert = [&](int i) -> const Mlp & { return moe.experts[size_t(routes.chosen.data()[chosen.begin + i])]; };
  auto rows_of = [&](int i) {  // the first of these places has number 0
    const Share own = routes.places_of(chosen.begin + i);
    return Share{std::max(own.begin, places.begin) - places.begin, std::min(own.end, places.end) - places.begin};
  };
  PlaceLoras &loras = place_loras_[size_t(thread)];
  if (has_loras()) plan(loras, num_experts, token, rows_of);
  // The share of this thread of the adapters' changes of these matrices of each expert. Ends with a barrier.
  auto shrink = [&](std::initializer_list<Linear Mlp::*> matrices, const ActivationSet &a) {
    if (!has_loras()) return;
    auto matrix = [&](int i, int place) -> const PackedMatrix & {
      return *(expert(i).*matrices.begin()[place]).parts[0].matrix;
    };
    loras.plan.shrink(thread, ctx_.pool.size(), int(matrices.size()), matrix, a, shrunk_.data(), kMatrices);
    ctx_.pool.barrier();
  };
  auto loras_of = [&](int i) { return has_loras() ? loras.plan.rows_of(i, shrunk_.data(), kMatrices) : LoraRows(); };
  const int hidden_stride = expert(0).up.stride, hidden_cols = expert(0).down.cols;
  if (expert(0).gate.parts.empty()) {
    shrink({&Mlp::up}, inputs);
  } else {
    shrink({&Mlp::gate, &Mlp::up}, inputs);
  }
  ctx_.products.gated_each(thread, num_experts, inputs, expert(0).down, [&](int i) {
    const Share rows = rows_of(i);
    const ptrdiff_t place = is_one_row ? rows.begin : 0;
    return Products::MlpRows{expert(i), is_one_row ? Share{0, 1} : rows, hidden_.data() + place * hidden_stride,
                             loras_of(i)};
  });
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::gate_up);

  auto hidden_row = [&](int i) { return hidden_.data() + ptrdiff_t(i) * hidden_stride; };
  const ActivationSet hidden =
      count <= own_rows_ ? ctx_.products.prepare_own(thread, own_down_[size_t(thread)], hidden_cols, count, hidden_row)
                         : ctx_.products.prepare_shared(thread, down_, hidden_cols, count, hidden_row);
  shrink({&Mlp::down}, hidden);
  for (int i = 0; i < num_experts; ++i) {
    const Mlp &mlp = expert(i);
    const LoraRows of_rows = loras_of(i);
    const Linear *following = i + 1 < num_experts ? &expert(i + 1).down : nullptr;
    ctx_.products.in_columns(thread, mlp.down, hidden, rows_of(i), following,
                              [&](float *out, size_t stride, Share rows, Share panels) {
                                of_rows.expand_part(*mlp.down.parts[0].matrix, 0, rows, panels, out, stride);
                                add_rows(out, stride, rows, panels, sums, mlp.down_bias, [&](int row) {
                                  return std::pair(token[row], moe.scales_inputs ? 1.f : weight[row]);
                                });
                              });
  }
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
    const float *ahead = sums.row(of(std::min(row + kRowsAhead, rows.end - 1)).first) + column;
    for (size_t i = 0; i < stride; i += 16) __builtin_prefetch(ahead + i, 1);
    float *to = sums.row(token) + column;
    ctx_.isa.add_scaled(weight, out, stride, to);
    if (bias) ctx_.isa.add_scaled(weight, bias + column, stride, to);
  }
}

// p = softmax(cap(logits + scores_bias)), or sigmoid of each; the largest experts_per_token of p + router_bias, or with
// ranks_outputs of what p is of, plus router_bias; ties to the lower expert.
void MoeStage::route(const Moe &moe, Share share, Routes &routes) const {
  const int num_experts = moe.num_choices(), k = moe.experts_per_token;
  for (int t = share.begin; t < share.end; ++t) {
    std::array<float, kMostExperts> probabilities{}, scores;
    float *p = probabilities.data(), sum = 0.f;
    std::copy_n(router_logits_.data() + size_t(t) * size_t(moe.router.stride), num_experts, p);
    for (int e = 0; moe.scores_bias && e < num_experts; ++e) p[e] += moe.scores_bias[e];
    for (int e = 0; moe.softcap > 0.f && e < num_experts; ++e) p[e] = moe.softcap * std::tanh(p[e] / moe.softcap);
    int *expert = routes.expert.data() + size_t(t) * size_t(k);
    float *weight = routes.p.data() + size_t(t) * size_t(k);
    if (moe.sparse_mix >= 0.f) {
      mix_sparsely(moe, p, num_experts, expert, weight);
      continue;
    }
    auto rank = [&] {
      for (int e = 0; e < num_experts; ++e) scores[size_t(e)] = moe.router_bias ? p[e] + moe.router_bias[e] : p[e];
    };
    if (moe.ranks_outputs) rank();
    if (moe.sigmoid) {
      for (int e = 0; e < num_experts; ++e) p[e] = 1.f / (1.f + std::exp(-p[e]));
      sum = 1.f;
    } else {
      const float top = *std::max_element(p, p + num_experts);
      for (int e = 0; e < num_experts; ++e) sum += p[e] = std::exp(p[e] - top);
    }
    if (moe.router_bias && !moe.sigmoid && !moe.ranks_outputs) {  // which is added to probabilities
      for (int e = 0; e < num_experts; ++e) p[e] /= sum;
      sum = 1.f;
    }
    if (!moe.ranks_outputs) rank();
    if (moe.num_groups > 1) keep_best_groups(moe, scores.data(), num_experts);
    float chosen = moe.sum_eps;
    find_best(scores.data(), num_experts, k, expert, weight);
    for (int j = 0; j < k; ++j) chosen += weight[j] = p[expert[j]] / sum;
    for (int j = 0; j < k; ++j) {
      weight[j] = (moe.norm_topk ? weight[j] / chosen : weight[j]) * moe.scale;
      if (moe.expert_scales) weight[j] *= moe.expert_scales[expert[j]];
    }
    if (!moe.identities) continue;
    float &kept = routes.kept.data()[t] = 0.f;
    const int first = int(moe.experts.size()), end = first + moe.identities;
    for (int j = 0; j < k; ++j) kept += expert[j] < first || expert[j] >= end ? 0.f : weight[j];
  }
}

// Counting sort of the choices by expert. Those of experts whose output is their input, or 0, have no places.
void MoeStage::sort_by_expert(const Moe &moe, Routes &routes) const {
  const int num_experts = int(moe.experts.size()), choices = ctx_.input.num_tokens * moe.experts_per_token;
  const int *expert = routes.expert.data();
  std::array<int, kMostExperts> next;  // the place of the next choice of each expert
  std::fill_n(next.begin(), num_experts, 0);
  auto has_place = [&](int c) { return expert[c] < num_experts; };
  for (int c = 0; c < choices; ++c) {
    if (has_place(c)) ++next[size_t(expert[c])];
  }
  int *chosen = routes.chosen.data(), *begin = routes.begin.data(), count = 0, place = 0;
  for (int e = 0; e < num_experts; ++e) {
    const int own = std::exchange(next[size_t(e)], place);
    if (own == 0) continue;
    chosen[count] = e;
    begin[count++] = place;
    place += own;
  }
  begin[count] = place;
  routes.num_chosen = count;
  for (int c = 0; c < choices; ++c) {
    if (!has_place(c)) continue;
    place = next[size_t(expert[c])]++;
    routes.token.data()[place] = c / moe.experts_per_token;
    routes.weight.data()[place] = routes.p.data()[c];
  }
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
                       moe.shared ? Store::add : Store::assign, nullptr, ctx_.shrink(thread, {&moe.latent_out}, sums));
  ctx_.pool.barrier();
}

}  // namespace foreword::kernels
