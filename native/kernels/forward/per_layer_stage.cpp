#include "kernels/forward/per_layer_stage.h"

#include <algorithm>

namespace foreword::kernels {

PerLayerStage::PerLayerStage(PassContext &context)
    : ctx_(context),
      inputs_(std::max(1, config().in.stride)),
      gate_(std::max(1, config().size)),
      scratch_(size_t(context.pool.size())) {
  for (const Layer &layer : ctx_.model.layers) layer.per_layer.out.add_kinds(kinds_);
  for (Buffer<float> &row : scratch_) row.reserve(size_t(std::max(inputs_.stride(), gate_.stride())));
}

void PerLayerStage::reserve() {
  if (!config().size) return;
  inputs_.reserve(ctx_.input.num_tokens);
  gate_.reserve(ctx_.input.num_tokens);
  out_input_.reserve(ctx_.input.num_tokens, config().size, ctx_.with_loras(kinds_), ctx_.pool.size());
}

void PerLayerStage::begin(int thread) {
  const PerLayerConfig &c = config();
  if (!c.size) return;
  const Share rows{0, ctx_.input.num_tokens};
  const ActivationSet in = ctx_.norm_rows(thread, {});
  ctx_.products.linear(thread, c.in, in, rows, inputs_.data(), Store::assign, nullptr,
                       ctx_.shrink(thread, {&c.in}, in));
  ctx_.pool.barrier();
  const int count = int(ctx_.model.layers.size()), width = count * c.size;
  float *own = scratch_[size_t(thread)].data();
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    const int32_t id = ctx_.input.input_ids[t];
    ctx_.isa.decode_row(c.embedding, id < c.embedding.rows ? id : 0, own);
    float *row = inputs_.row(t);
    ctx_.isa.norm_parts(row, c.norm, 0, count, c.size, c.norm_eps, row);
    for (int i = 0; i < width; ++i) row[i] = c.scale * (row[i] + c.embedding_scale * own[i]);
  }
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::embed);
}

void PerLayerStage::run(int thread, int layer_index, const Linear &next) {
  const Layer &layer = ctx_.model.layers[size_t(layer_index)];
  const PerLayer &own = layer.per_layer;
  if (!own.gate.parts.empty()) {
    const int size = config().size, num_tokens = ctx_.input.num_tokens;
    const ActivationSet in = ctx_.norm_rows(thread, {});
    ctx_.products.linear(thread, own.gate, in, {0, num_tokens}, gate_.data(), Store::assign, &own.out,
                         ctx_.shrink(thread, {&own.gate}, in));
    ctx_.pool.barrier();
    if (layer.streams) {
      const Share share = ctx_.token_share(thread);
      for (int t = share.begin; t < share.end; ++t) std::fill_n(ctx_.x.row(t), ctx_.x.stride(), 0.f);
    }
    float *product = scratch_[size_t(thread)].data();
    const ActivationSet set = ctx_.products.prepare(thread, out_input_, size, num_tokens, [&](int t) {
      const float *gate = gate_.row(t), *inputs = inputs_.row(t) + layer_index * size;
      std::copy_n(gate, gate_.stride(), product);
      ctx_.isa.activate(ctx_.model.config.activation, size_t(gate_.stride()), product);
      for (int i = 0; i < size; ++i) product[i] *= inputs[i];
      return product;
    });
    ctx_.multiply(thread, own.out, set, {0, num_tokens}, own.norm, &next);
    ctx_.finish_product(thread, nullptr, own.norm);
  }
  if (layer.scale != 1.f) {
    const Share share = ctx_.token_share(thread);
    for (int t = share.begin; t < share.end; ++t) {
      float *x = ctx_.x.row(t);
      for (int i = 0; i < ctx_.x.stride(); ++i) x[i] *= layer.scale;
    }
    ctx_.pool.barrier();
  }
  if (own.norm || layer.scale != 1.f) ctx_.clock.finish(thread, Stage::down);
}

}  // namespace foreword::kernels
