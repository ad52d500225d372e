#include "kernels/forward/runs_stage.h"

#include <algorithm>

namespace foreword::kernels {

RunsStage::RunsStage(PassContext &context) : ctx_(context) {
  if (ctx_.model.layers.front().stream < 0) return;
  for (int i = 0; i < 2; ++i) streams_.emplace_back(ctx_.model.config.hidden_size);
}

void RunsStage::reserve() {
  for (FloatRows &rows : streams_) rows.reserve(ctx_.input.num_tokens);
}

void RunsStage::begin(int thread, const Layer &layer) {
  if (layer.stream < 0) return;
  const int stride = ctx_.x.stride();
  const Share share = ctx_.token_share(thread);
  for (int t = share.begin; t < share.end; ++t) {
    float *x = ctx_.x.row(t), *first = streams_[0].row(t), *second = streams_[1].row(t);
    if (layer.stream_begin) {
      std::copy_n(layer.stream_begin, stride, first);
      std::copy_n(x, stride, second);
    } else {
      ctx_.norm_row(x, ctx_.model.final_norm, layer.last_stream ? second : first);
    }
    std::copy_n(first, stride, x);
    ctx_.isa.add_row(second, size_t(stride), x);
  }
  ctx_.pool.barrier();
}

}  // namespace foreword::kernels
