// The Python class CpuEncoder.
#pragma once

#include <algorithm>

#include "kernels/bind_model.h"
#include "kernels/encoder.h"

namespace foreword::kernels {

// An encoder under construction, then in use. It packs weights as a `CpuModel`, and has no KV pool.
class CpuEncoder : public CpuModel {
 public:
  CpuEncoder(const ModelConfig &c, bool norms_before, bool rms_norm, double act_scale, const std::string &isa,
             int num_threads)
      : CpuModel(c, kv_config("fp32", 1, 1, 1, c.num_kv_heads, c.head_dim, c.head_dim, nb::dict()), isa, num_threads) {
    if (rms_norm && !norms_before) throw std::invalid_argument("rms_norm: norms come before");
    encoder_.norms_before = norms_before;
    encoder_.rms_norm = rms_norm;
    encoder_.act_scale = float(act_scale);
  }

  // Tables [count, hidden_size] added to the token embeddings; one without rows is absent.
  void set_tables(const Array2<float> &positions, const Array2<float> &token_types) {
    check_unfinished();
    encoder_.num_positions = copy_rows(positions, encoder_.positions, "positions");
    encoder_.num_token_types = copy_rows(token_types, encoder_.token_types, "token_types");
  }

  // What is added to the scores of each head, [num_heads, 2 longest − 1], by the distance of the key from the query.
  void set_distances(const Array2<float> &biases) {
    check_unfinished();
    const int heads = model_.config.num_heads, count = in_range(int64_t(biases.shape(1)), 1, kMostSize, "distances");
    const float *rows = shaped(biases, heads, count, "distances");
    encoder_.biases = FloatRows(count + kChunk);
    encoder_.biases.reserve(heads);
    for (int h = 0; h < heads; ++h) {
      float *row = encoder_.biases.row(h);
      std::fill_n(row, encoder_.biases.stride(), 0.f);
      for (int i = 0; i < count; ++i) row[i] = rows[size_t(h) * size_t(count) + size_t(i)] * kLog2E;
    }
    encoder_.longest = (count + 1) / 2;
  }

  void add_encoder_layer(const Objects &d) {
    check_unfinished();
    const ModelConfig &c = model_.config;
    const int hidden = c.hidden_size, heads = c.num_heads * c.head_dim, keys = c.num_kv_heads * c.head_dim;
    EncoderLayer layer;
    layer.attn_norm = norm(d, "attn_norm");
    layer.mlp_norm = norm(d, "mlp_norm");
    layer.post_attn_norm = norm(d, "post_attn_norm");
    layer.post_mlp_norm = norm(d, "post_mlp_norm");
    const std::pair<const char *, Vector *> of_heads[] = {
        {"q_norm", &layer.q_norm}, {"k_norm", &layer.k_norm}, {"v_norm", &layer.v_norm}};
    for (auto [name, to] : of_heads) *to = optional_vector(d, name, c.head_dim);
    const std::pair<const char *, Bounds *> bounds[] = {
        {"q_bounds", &layer.q_bounds}, {"k_bounds", &layer.k_bounds}, {"v_bounds", &layer.v_bounds},
        {"o_bounds", &layer.o_bounds}, {"gate_bounds", &layer.gate_bounds}, {"up_bounds", &layer.up_bounds},
        {"down_bounds", &layer.down_bounds}};
    for (auto [name, to] : bounds) {
      *to = optional_vector(d, name, 4);
      if (bool(*to) != bool(layer.q_bounds) || (*to && (!encoder_.norms_before || !d.contains("gate")))) {
        throw std::invalid_argument(std::string(name) + ": all products have bounds or none, and a layer with bounds "
                                                        "has norms before and a gate");
      }
    }
    layer.q_bias = optional_vector(d, "q_bias", heads);
    layer.k_bias = optional_vector(d, "k_bias", keys);
    layer.v_bias = optional_vector(d, "v_bias", keys);
    layer.o_bias = optional_vector(d, "o_bias", hidden);
    layer.down_bias = optional_vector(d, "down_bias", hidden);
    layer.qkv = model_.make_linear(
        {matrix(d, "q", heads, hidden), matrix(d, "k", keys, hidden), matrix(d, "v", keys, hidden)});
    if (!have_equal_inputs(layer.q_bounds, layer.k_bounds) || !have_equal_inputs(layer.q_bounds, layer.v_bounds)) {
      layer.apart.assign(3, layer.qkv);
      for (size_t i = 0; i < 3; ++i) layer.apart[i].parts = {layer.qkv.parts[i]};
    }
    layer.o = linear(d, "o", hidden, heads);
    const int inner = matrix(integer(d, "up", 0, INT32_MAX), "up")->rows;
    layer.mlp.up = linear(d, "up", inner, hidden);
    if (d.contains("gate")) layer.mlp.gate = linear(d, "gate", inner, hidden);
    layer.mlp.down = linear(d, "down", hidden, inner);
    layer.up_bias = optional_vector(d, "up_bias", inner);
    if (d.contains("gate")) layer.gate_bias = optional_vector(d, "gate_bias", inner);
    layer.grouped = flag(d, "grouped");
    layer.rope = integer(d, "rope", -1, int64_t(model_.ropes.size()) - 1);
    layer.window = integer(d, "window", -1, INT32_MAX / 2);
    encoder_.layers.push_back(std::move(layer));
  }

  void finish_encoder(const Integers &d) {
    if (encoder_.layers.empty() || pass_) throw std::invalid_argument("finish_encoder() needs a layer, once");
    encoder_.embed_norm = norm(d, "embed_norm");
    encoder_.final_norm = norm(d, "final_norm");
    if (bool(encoder_.embed_norm.weight) != bool(model_.embedding.data) ||
        (encoder_.final_norm.weight && !encoder_.norms_before)) {
      throw std::invalid_argument(
          "finish_encoder() needs embed_norm if there is an embedding, and takes final_norm if norms come before");
    }
    pass_ = std::make_unique<EncoderPass>(model_, encoder_);
    is_finished_ = true;
  }

  // The hidden states [T, hidden_size] of whole texts, valid until the next call. Inputs are token ids, or without an
  // embedding x [T, hidden_size].
  FloatView encode(int num_tokens, int num_reqs, const std::optional<Array1<int32_t>> &input_ids,
                   const Array1<int64_t> &positions, const Array1<int32_t> &query_start_loc,
                   const std::optional<Array1<int32_t>> &token_types, const std::optional<Array2<float>> &x,
                   const std::optional<Array2<int64_t>> &places,
                   const std::optional<Array1<int32_t>> &group_start_loc,
                   const std::optional<Array1<int32_t>> &lora_ids) {
    if (!pass_) throw std::invalid_argument("the encoder is not finished: call finish_encoder() first");
    const int t = in_range(num_tokens, 1, kMostTokens, "num_tokens");
    const int b = in_range(num_reqs, 1, kMostTokens, "num_reqs");
    if (bool(input_ids) != bool(model_.embedding.data) || bool(x) == bool(input_ids)) {
      throw std::invalid_argument("encode() takes input_ids if there is an embedding, else x");
    }
    const EncoderInput in{.num_tokens = t,
                          .num_reqs = b,
                          .input_ids = input_ids ? at_least(*input_ids, t, "input_ids") : nullptr,
                          .x = x ? shaped(*x, t, model_.config.hidden_size, "x") : nullptr,
                          .positions = at_least(positions, t, "positions"),
                          .query_start_loc = at_least(query_start_loc, b + 1, "query_start_loc"),
                          .token_types = token_types ? at_least(*token_types, t, "token_types") : nullptr,
                          .places = places ? shaped(*places, model_.num_axes, t, "places") : nullptr,
                          .num_groups = group_start_loc ? int(group_start_loc->shape(0)) - 1 : 0,
                          .group_start_loc = group_start_loc ? group_start_loc->data() : nullptr,
                          .lora_ids = lora_ids ? at_least(*lora_ids, b, "lora_ids") : nullptr};
    return view(alone([&] { return pass_->run(in); }), t, model_.config.hidden_size, pass_->stride());
  }

 private:
  int copy_rows(const Array2<float> &from, FloatRows &to, const char *name) {
    const int count = in_range(int64_t(from.shape(0)), 0, kMostSize, name), hidden = model_.config.hidden_size;
    const float *rows = shaped(from, count, hidden, name);
    to = FloatRows(hidden);
    to.reserve(count);
    for (int i = 0; i < count; ++i) std::copy_n(rows + size_t(i) * size_t(hidden), hidden, to.row(i));
    return count;
  }

  Encoder encoder_;
  std::unique_ptr<EncoderPass> pass_;
};

inline void bind_encoder(nb::module_ &m) {
  nb::class_<CpuEncoder, CpuModel>(m, "CpuEncoder", "An encoder's packed weights and threads.")
      .def(
          "__init__",
          [](CpuEncoder *self, int hidden_size, int num_heads, int num_kv_heads, int head_dim, int vocab_size,
             double norm_eps, double query_scale, const std::string &activation, bool norms_before, bool rms_norm,
             double act_scale, const std::string &isa, int num_threads) {
            const ModelConfig config{hidden_size, num_heads, num_kv_heads, head_dim, vocab_size, 1, float(norm_eps),
                                     float(query_scale), 1.f, by_name(kGates, activation, "activation"), 0.f, 0.f};
            new (self) CpuEncoder(config, norms_before, rms_norm, act_scale, isa, num_threads);
          },
          nb::kw_only(), nb::arg("hidden_size"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
          nb::arg("vocab_size"), nb::arg("norm_eps"), nb::arg("query_scale"), nb::arg("activation"),
          nb::arg("norms_before"), nb::arg("rms_norm") = false, nb::arg("act_scale") = 1.,
          nb::arg("isa"), nb::arg("num_threads"))
      .def("set_tables", &CpuEncoder::set_tables, nb::arg("positions").noconvert(), nb::arg("token_types").noconvert())
      .def("set_distances", &CpuEncoder::set_distances, nb::arg("biases").noconvert())
      .def("add_encoder_layer", &CpuEncoder::add_encoder_layer, nb::arg("layer"))
      .def("finish_encoder", &CpuEncoder::finish_encoder, nb::arg("norms"))
      .def("encode", &CpuEncoder::encode, nb::arg("num_tokens"), nb::arg("num_reqs"),
           nb::arg("input_ids").noconvert().none(), nb::arg("positions").noconvert(),
           nb::arg("query_start_loc").noconvert(),
           nb::arg("token_types").none(), nb::arg("x").noconvert().none() = nb::none(),
           nb::arg("places").noconvert().none() = nb::none(),
           nb::arg("group_start_loc").noconvert().none() = nb::none(),
           nb::arg("lora_ids").noconvert().none() = nb::none());
}

}  // namespace foreword::kernels
