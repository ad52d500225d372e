#include "kernels/forward/embedding_stage.h"

#include <algorithm>
#include <cstring>

namespace foreword::kernels {

EmbeddingStage::EmbeddingStage(PassContext &context)
    : ctx_(context),
      cosines_(context.model.most_rotary_pairs()),
      sines_(context.model.most_rotary_pairs()),
      position_(context.model.config.hidden_size) {
  position_.reserve(context.pool.size());
}

void EmbeddingStage::reserve() {
  const int64_t rows = int64_t(ctx_.model.ropes.size()) * ctx_.input.num_tokens;
  cosines_.reserve(rows);
  sines_.reserve(rows);
}

void EmbeddingStage::run(int thread) {
  const Model &model = ctx_.model;
  const ForwardInput &in = ctx_.input;
  const int hidden = model.config.hidden_size;
  const Share share = ctx_.token_share(thread);
  const int64_t *embeds_end = in.embed_rows + in.num_embeds;
  const int64_t *next = std::lower_bound(in.embed_rows, embeds_end, int64_t(share.begin));
  for (int t = share.begin; t < share.end; ++t) {
    float *x = ctx_.x.row(t);
    if (next != embeds_end && *next == t) {
      std::memcpy(x, in.embeds + (next++ - in.embed_rows) * hidden, sizeof(float) * size_t(hidden));
    } else {
      ctx_.isa.decode_row(model.embedding, in.input_ids[t], x);
      for (int i = 0; i < hidden; ++i) x[i] *= model.config.embedding_scale;
    }
    if (model.positions.data) {
      ctx_.isa.decode_row(model.positions, int(in.positions[t]), position_.row(thread));
      for (int i = 0; i < hidden; ++i) x[i] += position_.row(thread)[i];
    }
    if (model.embed_norm) std::copy_n(ctx_.norm_row(thread, x, model.embed_norm), hidden, x);
    for (int i = 0; model.embed_scale && i < hidden; ++i) x[i] = model.embed_scale[i] * x[i] + model.embed_offset[i];
    for (size_t r = 0; r < model.ropes.size(); ++r) {
      const Rope &rope = model.ropes[r];
      auto position = [&](size_t j) {
        return rope.axes.empty() ? in.positions[t] : in.rotary_position(rope.axes[j], t);
      };
      rope.angles(position, cosines_.row(index(int(r), t)), sines_.row(index(int(r), t)));
    }
  }
  ctx_.pool.barrier();
  ctx_.clock.finish(thread, Stage::embed);
}

void EmbeddingStage::add_features(int thread, int layer) {
  const ForwardInput &in = ctx_.input;
  const size_t hidden = size_t(ctx_.model.config.hidden_size);
  const Share share = ctx_.token_share(thread);
  ctx_.pool.barrier();
  const int64_t *end = in.embed_rows + in.num_embeds;
  const int64_t *at = std::lower_bound(in.embed_rows, end, int64_t(share.begin));
  for (; at < end && *at < share.end; ++at) {
    const size_t row = size_t(at - in.embed_rows) * size_t(in.num_features) + size_t(layer);
    const float *from = in.features + row * hidden;
    float *x = ctx_.x.row(int(*at));
    for (size_t i = 0; i < hidden; ++i) x[i] += from[i];
  }
  ctx_.pool.barrier();
}

}  // namespace foreword::kernels
