#include "kernels/forward/mlp_stage.h"

#include <algorithm>
#include <cmath>

namespace foreword::kernels {
namespace {

std::vector<const LowRank *> added_products(const Model &model) {
  std::vector<const LowRank *> all;
  for (const Layer &layer : model.layers) {
    if (layer.mlp) all.push_back(&layer.mlp->added);
  }
  return all;
}

}  // namespace

MlpStage::MlpStage(PassContext &context) : ctx_(context), added_(context, added_products(context.model)) {
  for (const Layer &layer : context.model.layers) {
    const Mlp *mlp = layer.moe ? layer.moe->shared.get() : layer.mlp.get();
    if (!mlp) continue;
    has_whole_ = has_whole_ || layer.moe || layer.parallel_mlp;
    mlp->down.add_kinds(kinds_);
    hidden_stride_ = std::max({hidden_stride_, mlp->up.stride, mlp->both.stride});
    hidden_cols_ = std::max(hidden_cols_, mlp->down.cols);
  }
}

void MlpStage::reserve() {
  const int num_tokens = ctx_.part_tokens(has_whole_);
  ctx_.first.reserve_floats(size_t(num_tokens) * size_t(hidden_stride_));
  down_.reserve(num_tokens, hidden_cols_, ctx_.with_loras(kinds_), ctx_.pool.size());
  added_.reserve();
}

ActivationSet MlpStage::gate_up(int thread, const Mlp &mlp, const ActivationSet &a, int count) {
  const bool has_both = !mlp.both.parts.empty();
  const ptrdiff_t stride = has_both ? mlp.both.stride : mlp.up.stride;
  const Share rows{0, count};
  const LoraRows loras = ctx_.shrink(thread, {&mlp.gate, &mlp.up, &mlp.added.low}, a);
  if (has_both) {
    ctx_.products.linear(thread, mlp.both, a, rows, ctx_.first.data(), Store::assign, &mlp.down, loras);
    added_.begin(thread, mlp.added, a, count, loras, int(mlp.both.parts.size()));
    ctx_.pool.barrier();
    added_.add(thread, mlp.added, count, ctx_.first.data());
    finish_gates(thread, mlp, count);
  } else {
    ctx_.products.gated(thread, mlp, a, rows, ctx_.first.data(), mlp.down, loras);
  }
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::gate_up);
  return ctx_.products.prepare(thread, down_, mlp.down.cols, count, [&](int r) {
    return ctx_.inner_row(thread, ctx_.first.data() + r * stride, mlp.inner_norm, mlp.down.cols);
  });
}

// The hidden numbers of `count` rows, from gate and up side by side, where the gate was.
void MlpStage::finish_gates(int thread, const Mlp &mlp, int count) {
  const int size = mlp.down.cols, up = mlp.both.parts[1].offset;
  const Share share = share_of(count, thread, ctx_.pool.size());
  for (int r = share.begin; r < share.end; ++r) {
    float *gate = ctx_.first.data() + ptrdiff_t(r) * mlp.both.stride;
    if (mlp.added.low.parts.empty()) {
      const float mean = ctx_.isa.dot(gate, nullptr, size) / float(size);
      for (int i = 0; i < size; ++i) gate[i] -= mean;
      const float least = mlp.cutoff * std::sqrt(ctx_.isa.dot(gate, gate, size) / float(size));
      for (int i = 0; i < size; ++i) gate[i] = std::max(gate[i] - least, 0.f);
    }
    std::fill(gate + size, gate + up, 0.f);
    ctx_.isa.gate_mul(ctx_.model.config.activation, gate, gate + up, size_t(up), gate);
  }
}

void MlpStage::run(int thread, const Layer &layer, const Linear &next) {
  const Mlp &mlp = *layer.mlp;
  for (int part = 0, parts = ctx_.num_parts(layer.parallel_mlp); part < parts; ++part) {
    const Share tokens = ctx_.part(part, parts);
    const bool last = part + 1 == parts;
    auto branch = [&](int t) { return ctx_.branch.row(t); };
    const ActivationSet in = layer.parallel_mlp ? ctx_.normed_rows(thread)
                             : layer.is_aside() ? ctx_.norm_rows_of(thread, layer.mlp_norm, tokens, branch)
                                                : ctx_.norm_rows(thread, layer.mlp_norm, tokens);
    const ActivationSet hidden = gate_up(thread, mlp, in, tokens.end - tokens.begin);
    ctx_.multiply(thread, mlp.down, hidden, tokens, layer.post_mlp_norm, last ? &next : &mlp.first());
    if (!last) ctx_.clock.finish(thread, Stage::down);
  }
  ctx_.finish_product(thread, mlp.down_bias, layer.post_mlp_norm);
  ctx_.clock.finish(thread, Stage::down);
}

}  // namespace foreword::kernels
