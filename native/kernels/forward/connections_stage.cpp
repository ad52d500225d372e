#include "kernels/forward/connections_stage.h"

#include <algorithm>
#include <cmath>

namespace foreword::kernels {

ConnectionsStage::ConnectionsStage(PassContext &context)
    : ctx_(context),
      config_(context.model.connections),
      row_dots_(config_.num_streams * (2 * config_.num_streams + 1)),
      streams_(context.model.config.hidden_size) {}

void ConnectionsStage::reserve() {
  if (!config_.num_streams) return;
  const int num_tokens = ctx_.input.num_tokens;
  streams_.reserve(int64_t(config_.num_streams) * num_tokens);
  dots_.reserve(size_t(row_dots_) * size_t(num_tokens));
}

void ConnectionsStage::begin(int thread) {
  if (!config_.num_streams) return;
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    for (int k = 0; k < config_.num_streams; ++k) std::copy_n(ctx_.x.row(t), streams_.stride(), stream(t, k));
  }
  ctx_.pool.barrier();
}

void ConnectionsStage::collapse(int thread, const Mix &mix) {
  if (!mix.matrix) return;
  const int count = config_.num_streams, size = ctx_.model.config.hidden_size;
  // The products of each stream with its part of each row of the matrix, and behind them with itself.
  const int outputs = mix.parts * count, dots = (outputs + 1) * count;
  ctx_.pool.divide(thread, ctx_.pool.all(thread), ctx_.input.num_tokens * dots, 1, [&](Share part, int) {
    for (int i = part.begin; i < part.end; ++i) {
      const int t = i / dots, nth = i % dots;
      const float *x = stream(t, nth % count), *row = mix.matrix + int64_t(nth) * size;
      dots_.data()[int64_t(t) * row_dots_ + nth] = ctx_.isa.dot(x, nth < outputs * count ? row : x, size);
    }
  });
  ctx_.pool.barrier();
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    float *of_token = dots_.data() + int64_t(t) * row_dots_, *x = ctx_.x.row(t);
    auto sum = [&](int output) { return ctx_.isa.dot(of_token + output * count, nullptr, count); };
    const float factor = 1.f / std::sqrt(sum(outputs) / float(count * size) + ctx_.model.config.norm_eps);
    auto gate = [&](int output) {
      const float mixed = mix.scale[output / count] * factor * sum(output) + mix.base[output];
      return 1.f / (1.f + std::exp(-mixed));
    };
    std::fill_n(x, streams_.stride(), 0.f);
    for (int k = 0; k < count; ++k) {
      ctx_.isa.add_scaled(gate(k) + config_.eps, stream(t, k), size_t(streams_.stride()), x);
    }
    for (int k = count; k < outputs; ++k) of_token[k - count] = config_.magnitude * gate(k) + config_.eps;
  }
  ctx_.pool.barrier();
}

void ConnectionsStage::add(int thread, const Mix &mix) {
  if (!mix.matrix) return;
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    const float *factors = dots_.data() + int64_t(t) * row_dots_;
    for (int k = 0; k < config_.num_streams; ++k) {
      ctx_.isa.add_scaled(factors[k], ctx_.branch.row(t), size_t(streams_.stride()), stream(t, k));
    }
  }
  ctx_.pool.barrier();
}

}  // namespace foreword::kernels
