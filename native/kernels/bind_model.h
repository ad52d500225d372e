// The Python class CpuModel.
#pragma once

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "kernels/bind_values.h"
#include "kernels/dispatch.h"
#include "kernels/forward/forward.h"

namespace foreword::kernels {

// A model under construction, then in use. Adding a matrix, vector or rope returns the integer that identifies it.
class CpuModel {
 public:
  CpuModel(const ModelConfig &config, const KVConfig &kv, const std::string &isa, int num_threads)
      : model_(config, kv, choose_isa(isa), num_threads) {}

  int pack(const Array2<uint8_t> &data, const std::string &source, int cols, const std::string &format,
           bool exact) {
    const SourceMatrix matrix = source_matrix(data, source, cols);
    const Format packed = by_name(kFormats, format, "weight format");
    nb::gil_scoped_release release;
    matrices_.push_back(model_.pack(matrix, packed, exact));
    return int(matrices_.size()) - 1;
  }

  int vector(const Array1<float> &values) {
    vectors_.push_back(model_.copy_vector(values.data(), int(values.shape(0))));
    return int(vectors_.size()) - 1;
  }

  void set_embedding(const Array2<uint8_t> &data, const std::string &source, int cols) {
    embedding_ = nb::cast(data);  // keeps the rows alive: every step reads them
    model_.set_embedding(source_matrix(data, source, cols));
  }

  int add_rope(const std::vector<double> &inv_freq, double scale) {
    model_.ropes.push_back({inv_freq, scale});
    return int(model_.ropes.size()) - 1;
  }

  void add_layer(const nb::dict &d) {
    Layer layer;
    auto vec = [&](const char *name) { return d.contains(name) ? vectors_.at(nb::cast<size_t>(d[name])) : nullptr; };
    layer.attn_norm = vec("attn_norm");
    layer.mlp_norm = vec("mlp_norm");
    layer.post_attn_norm = vec("post_attn_norm");
    layer.post_mlp_norm = vec("post_mlp_norm");
    layer.q_norm = vec("q_norm");
    layer.k_norm = vec("k_norm");
    layer.q_bias = vec("q_bias");
    layer.k_bias = vec("k_bias");
    layer.v_bias = vec("v_bias");
    layer.qkv = linear({nb::cast<int>(d["q"]), nb::cast<int>(d["k"]), nb::cast<int>(d["v"])});
    layer.o = linear({nb::cast<int>(d["o"])});
    layer.rope = nb::cast<int>(d["rope"]);
    layer.sliding_window = nb::cast<int64_t>(d["sliding_window"]);
    layer.group = nb::cast<int>(d["group"]);
    layer.slot = nb::cast<int>(d["slot"]);
    if (d.contains("mlp")) layer.mlp = std::make_unique<Mlp>(mlp(d["mlp"]));
    if (d.contains("moe")) layer.moe = moe(nb::cast<nb::dict>(d["moe"]));
    model_.layers.push_back(std::move(layer));
  }

  void finish(int final_norm, int lm_head) {
    model_.final_norm = vectors_.at(size_t(final_norm));
    model_.lm_head = linear({lm_head});
    forward_ = std::make_unique<ForwardPass>(model_);
  }

  nb::ndarray<nb::numpy, const float, nb::ndim<2>> step(
      int num_tokens, int num_reqs, const Array1<int32_t> &input_ids, const Array1<int64_t> &positions,
      const Array1<int32_t> &query_start_loc, const Array1<int32_t> &seq_lens, const Array1<int32_t> &idx_mapping,
      const Array1<int64_t> &logits_indices, const std::vector<Array1<int64_t>> &slot_mapping,
      const std::vector<Array2<int32_t>> &block_tables) {
    if (!forward_) throw std::invalid_argument("the model is not finished: call finish() before step()");
    const size_t t = size_t(num_tokens), b = size_t(num_reqs);
    ForwardInput in{};
    in.num_tokens = num_tokens;
    in.num_reqs = num_reqs;
    in.num_logits = int(logits_indices.shape(0));
    in.input_ids = at_least(input_ids, t, "input_ids");
    in.positions = at_least(positions, t, "positions");
    in.query_start_loc = at_least(query_start_loc, b + 1, "query_start_loc");
    in.seq_lens = at_least(seq_lens, b, "seq_lens");
    in.idx_mapping = at_least(idx_mapping, b, "idx_mapping");
    in.logits_indices = logits_indices.data();
    if (slot_mapping.size() != block_tables.size()) {
      throw std::invalid_argument("slot_mapping and block_tables differ in groups");
    }
    for (size_t g = 0; g < slot_mapping.size(); ++g) {
      in.groups.push_back({at_least(slot_mapping[g], t, "slot_mapping"), block_tables[g].data(),
                           int(block_tables[g].shape(0)), int(block_tables[g].shape(1))});
    }
    const float *logits;
    {
      nb::gil_scoped_release release;
      logits = forward_->run(in);
    }
    return nb::ndarray<nb::numpy, const float, nb::ndim<2>>(logits,
                                                            {size_t(in.num_logits), size_t(model_.config.vocab_size)},
                                                            nb::find(this), {forward_->logits_stride(), 1});
  }

  void copy_blocks(const Array1<int32_t> &sources, const Array1<int32_t> &destinations) {
    const int count = int(sources.shape(0)), num_blocks = model_.kv.config().num_blocks;
    at_least(destinations, sources.shape(0), "destinations");
    for (int i = 0; i < count; ++i) {
      for (const int32_t id : {sources.data()[i], destinations.data()[i]}) {
        if (id < 0 || id >= num_blocks) {
          throw std::invalid_argument("copy_blocks: block " + std::to_string(id) + " is outside [0, " +
                                      std::to_string(num_blocks) + ")");
        }
      }
    }
    nb::gil_scoped_release release;
    model_.kv.copy_blocks(sources.data(), destinations.data(), count);
  }

  nb::dict stage_seconds() const {
    nb::dict out;
    for (int i = 0; i < kNumStages; ++i) out[kStageNames[i]] = forward_ ? forward_->seconds(Stage(i)) : 0.;
    return out;
  }

  size_t packed_bytes() const { return model_.packed_bytes(); }
  const Isa &isa() const { return model_.isa; }
  ThreadPool &pool() { return model_.pool; }
  int num_threads() const { return model_.pool.size(); }
  uint8_t *sampling_scratch(size_t bytes) { return sampling_.reserve(bytes); }

 private:
  Linear linear(const std::vector<int> &ids) {
    std::vector<const PackedMatrix *> parts;
    for (int id : ids) parts.push_back(matrices_.at(size_t(id)));
    return model_.make_linear(parts);
  }

  Mlp mlp(nb::handle ids) {
    const auto [gate, up, down] = nb::cast<std::tuple<int, int, int>>(ids);
    return {linear({gate}), linear({up}), linear({down})};
  }

  std::unique_ptr<Moe> moe(const nb::dict &d) {
    auto moe = std::make_unique<Moe>();
    moe->router = linear({nb::cast<int>(d["router"])});
    for (nb::handle ids : nb::cast<nb::list>(d["experts"])) moe->experts.push_back(mlp(ids));
    moe->experts_per_token = nb::cast<int>(d["experts_per_token"]);
    moe->norm_topk = nb::cast<bool>(d["norm_topk"]);
    if (d.contains("shared")) {
      moe->shared = std::make_unique<Mlp>(mlp(d["shared"]));
      moe->shared_gate = linear({nb::cast<int>(d["shared_gate"])});
    }
    return moe;
  }

  Model model_;
  std::vector<const PackedMatrix *> matrices_;
  std::vector<Vector> vectors_;
  nb::object embedding_;
  std::unique_ptr<ForwardPass> forward_;
  Buffer<uint8_t> sampling_;
};

}  // namespace foreword::kernels
