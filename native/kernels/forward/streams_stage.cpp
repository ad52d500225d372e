#include "kernels/forward/streams_stage.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace foreword::kernels {
namespace {

constexpr float kLeastMeanSquare = 1e-5f;

// Returns the product of a few numbers with a row of a small matrix and of its change, which may be null.
float dot(const float *matrix, const float *change, int row, const float *numbers, int size) {
  float sum = 0.f;
  for (int i = 0; i < size; ++i) sum += matrix[row * size + i] * numbers[i];
  for (int i = 0; change && i < size; ++i) sum += change[row * size + i] * numbers[i];
  return sum;
}

int most_rank(const Model &model) {
  int most = 0;
  for (const Layer &layer : model.layers) {
    if (layer.streams) most = std::max(most, layer.streams->laurel_left.stride);
  }
  return most;
}

}  // namespace

StreamsStage::StreamsStage(PassContext &context)
    : ctx_(context),
      count_(context.model.streams.num_streams),
      streams_(context.model.config.hidden_size),
      wide_(std::max(streams_.stride(), context.model.streams.into.stride)),
      low_(std::max(1, most_rank(context.model))),
      laurel_(context.model.config.hidden_size) {
  for (const Layer &layer : ctx_.model.layers) {
    if (!layer.streams) continue;
    layer.streams->laurel_right.add_kinds(kinds_);
    rank_ = std::max(rank_, layer.streams->laurel_right.cols);
  }
}

void StreamsStage::reserve() {
  if (!is_used()) return;
  const int num_tokens = ctx_.input.num_tokens;
  streams_.reserve(int64_t(count_) * num_tokens);
  for (FloatRows *rows : {&wide_, &low_, &laurel_}) rows->reserve(num_tokens);
  low_input_.reserve(num_tokens, rank_, ctx_.with_loras(kinds_), ctx_.pool.size());
}

void StreamsStage::begin(int thread) {
  if (!is_used()) return;
  const Linear &into = ctx_.model.streams.into;
  const Share rows{0, ctx_.input.num_tokens}, share = ctx_.token_share(thread);
  const ActivationSet in = ctx_.norm_rows(thread, {});
  ctx_.products.linear(thread, into, in, rows, wide_.data(), Store::assign, nullptr, ctx_.shrink(thread, {&into}, in));
  ctx_.pool.barrier();
  for (int t = share.begin; t < share.end; ++t) {
    const float *x = ctx_.x.row(t), *row = wide_.data() + int64_t(t) * into.stride;
    std::copy_n(x, streams_.stride(), stream(0, t));
    for (int k = 1; k < count_; ++k) put_scaled(row + into.parts[size_t(k - 1)].offset, x, 1.f, false, stream(k, t));
  }
  ctx_.pool.barrier();
}

void StreamsStage::predict(int thread, const Layer &layer) {
  if (!layer.streams) return;
  const int stride = streams_.stride();
  std::array<float, kMostStreams> numbers;
  std::array<float, kMostStreams * kMostStreams> factors;
  std::array<float *, kMostStreams> rows;
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    route(thread, t, *layer.streams, stream(0, t), numbers.data());
    const Vector predict = layer.streams->predict, changed = change(t, predict);
    for (int i = 0; i < count_ * count_; ++i) factors[size_t(i)] = dot(predict, changed, i, numbers.data(), count_);
    for (int k = 0; k < count_; ++k) rows[size_t(k)] = stream(k, t);
    ctx_.isa.mix_rows(factors.data(), count_, rows.data(), size_t(stride));
    std::copy_n(rows[0], stride, ctx_.x.row(t));
  }
  ctx_.pool.barrier();
  make_laurel(thread, layer);
}

void StreamsStage::make_laurel(int thread, const Layer &layer) {
  const StreamUpdate &update = *layer.streams;
  const Share rows{0, ctx_.input.num_tokens}, share = ctx_.token_share(thread);
  const ActivationSet in = ctx_.norm_rows(thread, layer.attn_norm);
  ctx_.products.linear(thread, update.laurel_left, in, rows, low_.data(), Store::assign, &update.laurel_right,
                       ctx_.shrink(thread, {&update.laurel_left}, in));
  ctx_.pool.barrier();
  const ActivationSet low = ctx_.products.prepare(thread, low_input_, update.laurel_right.cols, rows.end, [&](int t) {
    return low_.data() + int64_t(t) * update.laurel_left.stride;
  });
  ctx_.products.linear(thread, update.laurel_right, low, rows, ctx_.branch.data(), Store::assign, &layer.qkv,
                       ctx_.shrink(thread, {&update.laurel_right}, low));
  ctx_.pool.barrier();
  for (int t = share.begin; t < share.end; ++t) {
    ctx_.norm_row(ctx_.branch.row(t), update.laurel_norm, laurel_.row(t));
    ctx_.isa.add_row(ctx_.norm_row(thread, ctx_.x.row(t), layer.attn_norm), size_t(laurel_.stride()), laurel_.row(t));
  }
  ctx_.pool.barrier();
}

void StreamsStage::join(int thread, const Layer &layer) {
  if (!layer.streams) return;
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    float *x = ctx_.x.row(t);
    const float *own = laurel_.row(t);
    for (int i = 0; i < laurel_.stride(); ++i) x[i] = (x[i] + own[i]) * 0.70710678118654752f;
  }
  ctx_.pool.barrier();
}

void StreamsStage::correct(int thread, const Layer &layer) {
  if (!layer.streams) return;
  const StreamUpdate &update = *layer.streams;
  std::array<float, kMostStreams> numbers;
  const int stride = streams_.stride();
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    float *x = ctx_.x.row(t);
    const float *first = stream(0, t);
    route(thread, t, update, x, numbers.data());
    const Vector changed = change(t, update.correct);
    ctx_.isa.add_scaled(-1.f, first, size_t(stride), x);
    for (int k = 0; k < count_; ++k) {
      const float factor = 1.f + dot(update.correct, changed, k, numbers.data(), count_);
      ctx_.isa.add_scaled(factor, x, size_t(stride), stream(k, t));
    }
    for (int i = 0; i < stride; ++i) x[i] = update.scale ? first[i] * update.scale[i] : first[i];
  }
  ctx_.pool.barrier();
}

void StreamsStage::add(int thread, const Layer &layer) {
  if (!layer.streams) return;
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    for (int k = 1; k < count_; ++k) ctx_.isa.add_row(ctx_.x.row(t), size_t(streams_.stride()), stream(k, t));
  }
  ctx_.pool.barrier();
}

void StreamsStage::merge(int thread) {
  if (!is_used()) return;
  const Share rows{0, ctx_.input.num_tokens}, share = ctx_.token_share(thread);
  const float scale = 1.f / float(count_);
  for (int t = share.begin; t < share.end; ++t) {
    for (int i = 0; i < streams_.stride(); ++i) ctx_.x.row(t)[i] = scale * stream(0, t)[i];
  }
  for (int k = 1; k < count_; ++k) {
    const Linear &out = ctx_.model.streams.out[size_t(k - 1)];
    const ActivationSet in = ctx_.products.prepare(thread, ctx_.normed, out.cols, rows.end,
                                                   [&](int t) { return stream(k, t); });
    ctx_.products.linear(thread, out, in, rows, ctx_.branch.data(), Store::assign, nullptr,
                         ctx_.shrink(thread, {&out}, in));
    ctx_.pool.barrier();
    for (int t = share.begin; t < share.end; ++t) {
      put_scaled(ctx_.branch.row(t), stream(0, t), scale, true, ctx_.x.row(t));
    }
    ctx_.pool.barrier();
  }
}

void StreamsStage::route(int thread, int token, const StreamUpdate &update, const float *row, float *numbers) const {
  const int size = ctx_.model.config.hidden_size;
  const float *normed = ctx_.norm_row(thread, row, update.norm);
  const Vector changed = change(token, update.router);
  for (int k = 0; k < count_; ++k) {
    const int64_t row_k = int64_t(k) * size;
    const float own = ctx_.isa.dot(normed, update.router + row_k, size);
    numbers[k] = std::tanh((changed ? own + ctx_.isa.dot(normed, changed + row_k, size) : own) / float(size));
  }
}

void StreamsStage::put_scaled(const float *row, const float *like, float scale, bool adds, float *out) const {
  const int size = ctx_.model.config.hidden_size;
  auto mean_square = [&](const float *x) { return ctx_.isa.dot(x, x, size) / float(size); };
  const float of_row = std::sqrt(std::max(mean_square(row), kLeastMeanSquare));
  const float factor = scale * std::sqrt(mean_square(like)) / of_row;
  for (int i = 0; i < size; ++i) out[i] = (adds ? out[i] : 0.f) + factor * row[i];
}

}  // namespace foreword::kernels
