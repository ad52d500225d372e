// The Python class CpuModel.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <mutex>

#include "kernels/bind_values.h"
#include "kernels/dispatch.h"
#include "kernels/forward/forward.h"

namespace foreword::kernels {

// The arrays of steps, taken once: an array that is passed to a function costs microseconds in every step. They stay
// where they are, and are kept.
struct ModelInputs {
  const Array1<int32_t> input_ids;
  const Array1<int64_t> positions;
  const Array1<int32_t> query_start_loc, seq_lens, idx_mapping;
  const Array1<int64_t> logits_indices;
  const std::vector<Array1<int64_t>> slot_mapping;
  const std::vector<Array2<int32_t>> block_tables;
  const Array1<int32_t> num_draft_tokens, num_accepted_tokens;
  nb::object logits = {};  // the array of the last step's logits, with its address and length
  const float *logits_at = nullptr;
  int num_logits = 0;
};

using FloatView = nb::ndarray<nb::numpy, const float, nb::ndim<2>>;
using VectorView = nb::ndarray<nb::numpy, const float, nb::ndim<1>>;
using PanelView = nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>;
using KnownScreen = std::tuple<int, Array1<float>, double>;
using LoraFactors = std::tuple<int, Array2<float>, Array2<float>, double>;
using VectorChange = std::tuple<int, Array1<float>>;

// A model under construction, then in use. Adding a matrix, vector or rope returns the integer that identifies it.
// Every argument is checked: std::invalid_argument names the one that does not fit.
class CpuModel {
 public:
  CpuModel(const ModelConfig &c, const KVConfig &kv, const std::string &isa, int num_threads,
           CpuGroups cpu_groups = {})
      : model_(checked(c, kv), kv, choose_isa(isa), num_threads, std::move(cpu_groups)),
        windows_(size_t(c.num_groups), -1),
        recurrent_groups_(size_t(c.num_groups)) {}

  int pack(const Array2<uint8_t> &data, const std::string &source, int cols, const std::string &format, bool exact) {
    check_unfinished();
    const SourceFormat &from = by_name(kSources, source, "weight source");
    const SourceMatrix matrix = source_matrix(data, from, cols);
    const Format to = by_name(kFormats, format, "weight format");
    const bool is_from_table = from.source == Source::int8_32 && has_table(to);
    if (to >= Format::q4 && to != from.packed && !is_from_table && (from.values > 1 || has_table(to))) {
      throw std::invalid_argument("blocks of " + source + " are not packed as " + format);
    }
    alone([&] { matrices_.push_back(model_.pack(matrix, to, exact)); });
    return int(matrices_.size()) - 1;
  }

  // A matrix that was packed before: `panels` of another model's matrix, which stay where they are.
  int attach(const Array1<uint8_t> &panels, int rows, int cols, const std::string &format, bool exact) {
    check_unfinished();
    in_range(rows, 1, kMostSize, "rows");
    in_range(cols, 1, kMostSize, "cols");
    const Format packed = by_name(kFormats, format, "weight format");
    matrices_.push_back(model_.attach(panels.data(), panels.shape(0), rows, cols, packed, exact));
    kept_.push_back(nb::cast(panels));
    return int(matrices_.size()) - 1;
  }

  // Another number for a matrix, with the same panels: adapters change each number alone.
  int again(int matrix) {
    check_unfinished();
    matrices_.push_back(model_.again(this->matrix(matrix, "matrix")));
    return int(matrices_.size()) - 1;
  }

  // The panels of a matrix, if one team of threads has them all.
  PanelView panels(int matrix) {
    if (model_.pool.num_teams() > 1) throw std::invalid_argument("panels: each team of threads has its own");
    return panels_of(*this->matrix(matrix, "matrix"));
  }

  // The screen of the output projection of a finished model: panels in 8 bit, or none if they are the projection's own;
  // errors; most. None of a model without logits, or with a weight that is not finite.
  std::optional<std::tuple<std::optional<PanelView>, VectorView, double>> screen() {
    if (!forward_ || model_.lm_head.parts.empty()) return std::nullopt;
    if (!model_.has_screen()) alone([&] { model_.make_screen(); });
    if (!model_.has_screen()) return std::nullopt;
    const PackedMatrix &head = *model_.lm_head.parts[0].matrix, &own = *model_.screen.linear.parts[0].matrix;
    const size_t count = size_t(own.num_panels) * size_t(model_.isa.panel_width);
    std::optional<PanelView> panels;
    if (&own != &head) panels = panels_of(own);
    return std::tuple(panels, VectorView(model_.screen.errors, {count}, nb::find(this)), double(model_.screen.most));
  }

  int vector(const Array1<float> &values) {
    const int size = in_range(int64_t(values.shape(0)), 1, kMostSize, "the size of a vector");
    vectors_.push_back({model_.copy_vector(values.data(), size), size});
    return int(vectors_.size()) - 1;
  }

  void set_embedding(const Array2<uint8_t> &data, const std::string &source, int cols) {
    check_unfinished();
    const SourceMatrix matrix = source_matrix(data, by_name(kSources, source, "weight source"), cols);
    check_shape(matrix.rows, matrix.cols, model_.config.vocab_size, model_.config.hidden_size, "embedding");
    kept_.push_back(nb::cast(data));  // every step reads the rows
    model_.embedding = matrix;
  }

  // The rows that are added to the inputs of tokens by their positions.
  void set_positions(const Array2<uint8_t> &data, const std::string &source, int cols) {
    check_unfinished();
    const SourceMatrix matrix = source_matrix(data, by_name(kSources, source, "weight source"), cols);
    in_range(cols, model_.config.hidden_size, model_.config.hidden_size, "cols");
    kept_.push_back(nb::cast(data));  // every step reads the rows
    model_.positions = matrix;
  }

  // matrix, norm: per_layer_in and per_layer_norm.
  void set_per_layer(const Array2<uint8_t> &data, const std::string &source, int cols, int matrix, int norm,
                     double norm_eps, double embedding_scale, double scale) {
    check_unfinished();
    if (!model_.layers.empty()) throw std::invalid_argument("set_per_layer comes before the first layer");
    PerLayerConfig &c = model_.per_layer;
    c.embedding = source_matrix(data, by_name(kSources, source, "weight source"), cols);
    kept_.push_back(nb::cast(data));  // every step reads the rows
    c.in = model_.make_linear({this->matrix(matrix, "matrix", cols, model_.config.hidden_size)});
    const SizedVector &weight = vectors_[size_t(in_range(norm, 0, int64_t(vectors_.size()) - 1, "norm"))];
    if (cols % weight.size) throw std::invalid_argument("cols is not a multiple of the size of the norm");
    c.norm = weight.data;
    c.size = weight.size;
    c.norm_eps = float(norm_eps);
    c.embedding_scale = float(embedding_scale);
    c.scale = float(scale);
  }

  // into, out: stream_in and stream_out of each stream but the first.
  void set_streams(const std::vector<int> &into, const std::vector<int> &out) {
    check_unfinished();
    if (!model_.layers.empty()) throw std::invalid_argument("set_streams comes before the first layer");
    const int hidden = model_.config.hidden_size;
    const int others = in_range(int64_t(into.size()), 1, kMostStreams - 1, "the number of matrices of into");
    in_range(int64_t(out.size()), others, others, "the number of matrices of out");
    std::vector<const PackedMatrix *> parts;
    for (int id : into) parts.push_back(matrix(id, "into", hidden, hidden));
    model_.streams.into = model_.make_linear(parts);
    for (int id : out) model_.streams.out.push_back(model_.make_linear({matrix(id, "out", hidden, hidden)}));
    model_.streams.num_streams = others + 1;
  }

  // The numbers of out_mix, its base and its scale.
  void set_connections(int num_streams, double magnitude, double eps, int matrix, int base, int scale) {
    check_unfinished();
    if (!model_.layers.empty()) throw std::invalid_argument("set_connections comes before the first layer");
    ConnectionsConfig &c = model_.connections;
    c.num_streams = in_range(num_streams, 1, kMostConnected, "num_streams");
    c.magnitude = float(magnitude);
    c.eps = float(eps);
    c.out = mix(1, matrix, base, scale);
  }

  int add_rope(const std::vector<double> &inv_freq, double scale, const std::vector<int> &axes) {
    check_unfinished();
    int widest = 0;
    for (const HeadShape &shape : model_.heads) widest = std::max(widest, shape.head_dim);
    in_range(int64_t(inv_freq.size()), 1, widest / 2, "the length of inv_freq");
    if (!axes.empty()) in_range(int64_t(axes.size()), int64_t(inv_freq.size()), int64_t(inv_freq.size()), "axes");
    for (int axis : axes) model_.num_axes = std::max(model_.num_axes, in_range(axis, 0, kMostSize, "axis") + 1);
    model_.ropes.push_back({inv_freq, scale, axes});
    return int(model_.ropes.size()) - 1;
  }

  void add_layer(const Objects &d) {
    check_unfinished();
    const ModelConfig &c = model_.config;
    Layer layer;
    if (!d.contains("aside")) layer.attn_norm = norm(d, "attn_norm");
    layer.mlp_norm = norm(d, "mlp_norm");
    layer.post_attn_norm = norm(d, "post_attn_norm");
    layer.post_mlp_norm = norm(d, "post_mlp_norm");
    layer.post_attn_norm.scale = number(d, "mixer_scale", 1.);
    layer.post_mlp_norm.scale = number(d, "mlp_scale", 1.);
    keep_input(d, "kept_by_mixer", layer.attn_norm, layer.post_attn_norm);
    keep_input(d, "kept_by_mlp", layer.mlp_norm, layer.post_mlp_norm);
    layer.attn_norm_gate = norm_gate(d, "attn_norm", layer.attn_norm);
    layer.mlp_norm_gate = norm_gate(d, "mlp_norm", layer.mlp_norm);
    scale_sum(d, "attn", layer.post_attn_norm);
    scale_sum(d, "mlp", layer.post_mlp_norm);
    per_layer(d, layer);
    if (model_.streams.num_streams > 1) streams(d, layer);
    if (model_.connections.num_streams) connect(d, layer);
    if (d.contains("stream")) begin_run(d, layer);
    const Layer *before = model_.layers.empty() ? nullptr : &model_.layers.back();
    layer.follows_aside = before && before->is_aside();
    if (layer.follows_aside && (!d.contains("group") || flag(d, "beside") || d.contains("aside"))) {
      throw std::invalid_argument("aside: a layer with a mixer follows, which has an input of its own");
    }
    if (d.contains("aside")) aside(d, layer);
    nb::dict moe_ids;
    if (d.contains("moe") && nb::try_cast(d["moe"], moe_ids)) {
      layer.moe = moe(moe_ids);
    } else if (d.contains("mlp")) {
      layer.mlp = std::make_unique<Mlp>(mlp(d, "mlp"));
      if (d.contains("gate_cutoff")) cut(*layer.mlp, number(d, "gate_cutoff"));
      if (d.contains("mlp_low")) add_low_rank(d, *layer.mlp);
      layer.mlp->inner_norm = optional_vector(d, "inner_mlp_norm", layer.mlp->down.cols);
      layer.mlp->xielu = optional_vector(d, "xielu", 4);
      if (layer.mlp->xielu && !layer.mlp->gate.parts.empty()) {
        throw std::invalid_argument("xielu: such an MLP has no gate");
      }
    }
    if (d.contains("late_moe") && nb::try_cast(d["late_moe"], moe_ids)) {
      layer.late_moe = moe(moe_ids);
      if (!layer.mlp || layer.late_moe->has_own_inputs() || layer.late_moe->shared) {
        throw std::invalid_argument("late_moe: such experts are beside an MLP, read its input, and have no shared one");
      }
    }
    if (layer.mlp_norm_gate && layer.moe && layer.moe->reads_again()) {
      throw std::invalid_argument("mlp_norm_low: such experts read what this norm has not multiplied");
    }
    if (!d.contains("group")) {  // it keeps nothing of a token
      if (!layer.moe && !layer.mlp) throw std::invalid_argument("a layer has a group, mlp or moe");
      model_.layers.push_back(std::move(layer));
      return;
    }
    if (d.contains("recurrent")) {
      recurrent(d, layer);
    } else if (c.latent.kv_rank) {
      latent(d, layer);
    } else {
      attention(d, layer);
    }
    layer.rope = integer(d, "rope", -1, int64_t(model_.ropes.size()) - 1);
    if (layer.rope >= 0 && layer.has_attention()) {
      const size_t pairs = model_.ropes[size_t(layer.rope)].inv_freq.size();
      const int dim = layer.latent ? model_.config.latent.rope_dim : model_.heads_of(layer).head_dim;
      in_range(int64_t(pairs), 1, dim / 2, "the pairs that the layer rotates");
    }
    layer.sliding_window = integer(d, "sliding_window", 0, INT32_MAX);
    layer.chunked = flag(d, "chunked") && layer.sliding_window;
    layer.skips_spans = flag(d, "skips_spans");
    if (c.index.topk && layer.sliding_window) {
      throw std::invalid_argument("sliding_window: an indexer chooses the keys");
    }
    layer.beside = flag(d, "beside");
    if (layer.beside && (model_.layers.empty() || model_.layers.back().qkv.parts.empty() ||
                         model_.layers.back().mlp || model_.layers.back().moe)) {
      throw std::invalid_argument("beside: the layer before has a mixer alone");
    }
    layer.parallel_mlp = flag(d, "parallel_mlp");
    const bool reads_input = layer.moe ? !layer.moe->reads_again() : bool(layer.mlp) && !layer.late_moe;
    if (layer.parallel_mlp && (layer.recurrent || !reads_input)) {
      throw std::invalid_argument("parallel_mlp: the layer has attention, and an MLP or experts that read its input");
    }
    layer.group = integer(d, "group", 0, c.num_groups - 1);
    const KVConfig &kv = model_.kv.config();
    layer.slot = integer(d, "slot", 0, (layer.recurrent ? kv.num_state_slots : kv.num_slots) - 1);
    int64_t &window = windows_[size_t(layer.group)];
    const bool is_recurrent = bool(layer.recurrent);
    const int64_t mask = layer.chunked ? layer.sliding_window | kChunked : layer.sliding_window;
    const int64_t own = int64_t(layer.heads) << 40 | mask;
    if (window >= 0 && (window != own || recurrent_groups_[size_t(layer.group)] != is_recurrent)) {
      throw std::invalid_argument(
          "sliding_window: the layers of a KV group have one, and heads of one shape, or all are recurrent");
    }
    window = own;
    recurrent_groups_[size_t(layer.group)] = is_recurrent;
    model_.layers.push_back(std::move(layer));
  }

  // lm_head: −1 for a model without logits. Other vectors: −1 for none. screen: (matrix, errors, most), of a model with
  // the same weights; errors stay where they are.
  void finish(int final_norm, int final_norm_bias, int lm_head, const std::optional<KnownScreen> &screen,
              int logits_bias, int embed_norm, int embed_norm_bias, int head, int head_norm, int head_norm_bias,
              int embed_scale, int embed_offset) {
    check_unfinished();
    const ModelConfig &c = model_.config;
    if (!model_.embedding.data || model_.layers.empty() || model_.layers.back().is_aside()) {
      throw std::invalid_argument("finish() needs an embedding and a layer, and the last one is not aside");
    }
    if (const PerLayerConfig &own = model_.per_layer; own.size) {
      const int64_t count = own.embedding.cols / own.size;
      in_range(int64_t(model_.layers.size()), count, count, "the layers of per_layer_in");
    }
    auto optional = [&](int id, const char *name, int size) { return id < 0 ? nullptr : vector(id, name, size); };
    model_.final_norm = {vector(final_norm, "final_norm", c.hidden_size),
                         optional(final_norm_bias, "final_norm_bias", c.hidden_size)};
    model_.embed_norm = {optional(embed_norm, "embed_norm", c.hidden_size),
                         optional(embed_norm_bias, "embed_norm_bias", c.hidden_size)};
    model_.embed_scale = optional(embed_scale, "embed_scale", c.hidden_size);
    model_.embed_offset = optional(embed_offset, "embed_offset", c.hidden_size);
    if (bool(model_.embed_scale) != bool(model_.embed_offset)) {
      throw std::invalid_argument("embed_scale and embed_offset are given together");
    }
    model_.logits_bias = optional(logits_bias, "logits_bias", c.vocab_size);
    const Norm own_norm{optional(head_norm, "head_norm", c.hidden_size),
                        optional(head_norm_bias, "head_norm_bias", c.hidden_size)};
    if ((head >= 0) != bool(own_norm)) throw std::invalid_argument("head and head_norm are given together");
    if (head >= 0) model_.head = model_.make_linear({matrix(head, "head", c.hidden_size, c.hidden_size)});
    model_.logits_norm = scaled(own_norm ? own_norm : model_.final_norm, c.logit_scale);
    if (lm_head >= 0) {
      model_.lm_head = model_.make_linear({matrix(lm_head, "lm_head", c.vocab_size, c.hidden_size)});
    }
    if (lm_head >= 0 && screen && !model_.logits_bias) {
      const auto &[number, errors, most] = *screen;
      const PackedMatrix *own = matrix(number, "screen", c.vocab_size, c.hidden_size);
      if (own->format != Format::i8) throw std::invalid_argument("screen: must be a matrix in format i8");
      const int count = own->num_panels * model_.isa.panel_width;
      in_range(int64_t(errors.shape(0)), count, count, "the size of the screen's errors");
      model_.set_screen(own, errors.data(), float(most));
      kept_.push_back(nb::cast(errors));
    }
    forward_ = std::make_unique<ForwardPass>(model_);
    is_finished_ = true;
  }

  // The logits [L, V] at `logits_indices`, by default the inputs' own first num_logits, valid until the next call.
  // `greedy`: only for SamplingRows, which take the tokens with the largest logits. `bidirectional`: see ForwardInput.
  nb::typed<nb::object, FloatView> step(ModelInputs &inputs, int num_tokens, int num_reqs, int num_logits,
                  const std::optional<Array1<int64_t>> &logits_indices,
                  const std::optional<Array1<int64_t>> &embed_rows, const std::optional<Array2<float>> &embeds,
                  const std::optional<Array2<float>> &features,
                  const std::optional<Array2<int64_t>> &mrope_positions,
                  const std::optional<Array1<int64_t>> &last_seen,
                  const std::optional<Array1<int32_t>> &lora_ids, bool greedy, bool bidirectional) {
    check_finished();
    const int t = in_range(num_tokens, 0, kMostTokens, "num_tokens");
    const int b = in_range(num_reqs, 0, kMostTokens, "num_reqs");
    const int64_t wanted = logits_indices ? int64_t(logits_indices->shape(0)) : num_logits;
    const int l = in_range(wanted, 0, kMostTokens, "the number of logits");
    ForwardInput in{.num_tokens = t,
                    .num_reqs = b,
                    .num_logits = l,
                    .input_ids = at_least(inputs.input_ids, t, "input_ids"),
                    .positions = at_least(inputs.positions, t, "positions"),
                    .query_start_loc = at_least(inputs.query_start_loc, b + 1, "query_start_loc"),
                    .seq_lens = at_least(inputs.seq_lens, b, "seq_lens"),
                    .idx_mapping = at_least(inputs.idx_mapping, b, "idx_mapping"),
                    .num_draft_tokens = at_least(inputs.num_draft_tokens, b, "num_draft_tokens"),
                    .num_accepted_tokens = inputs.num_accepted_tokens.data(),
                    .logits_indices = at_least(logits_indices ? *logits_indices : inputs.logits_indices, l,
                                               "logits_indices"),
                    .greedy = greedy,
                    .num_embeds = 0,
                    .embed_rows = nullptr,
                    .embeds = nullptr,
                    .num_features = 0,
                    .features = nullptr,
                    .mrope_positions = nullptr,
                    .last_seen = last_seen ? at_least(*last_seen, t, "last_seen") : nullptr,
                    .bidirectional = bidirectional,
                    .lora_ids = lora_ids ? at_least(*lora_ids, b, "lora_ids") : nullptr,
                    .groups = {}};
    if (in.num_logits && model_.lm_head.parts.empty()) throw std::invalid_argument("the model has no logits");
    if (model_.config.index.topk && (in.last_seen || in.bidirectional)) {
      throw std::invalid_argument("an indexer chooses among the keys before a query");
    }
    if (bool(embed_rows) != bool(embeds)) throw std::invalid_argument("embed_rows and embeds are given together");
    if (embeds) {
      in.num_embeds = in_range(int64_t(embed_rows->shape(0)), 0, t, "the number of embed_rows");
      in.embed_rows = embed_rows->data();
      in.embeds = shaped(*embeds, in.num_embeds, model_.config.hidden_size, "embeds");
      if (features) {
        in.num_features = in_range(int64_t(features->shape(1)) / model_.config.hidden_size, 1,
                                   int64_t(model_.layers.size()), "the number of features");
        in.features = shaped(*features, in.num_embeds, in.num_features * model_.config.hidden_size, "features");
      }
    }
    if (mrope_positions) in.mrope_positions = shaped(*mrope_positions, model_.num_axes, t, "mrope_positions");
    if (inputs.slot_mapping.size() != inputs.block_tables.size()) {
      throw std::invalid_argument("slot_mapping and block_tables differ in groups");
    }
    for (size_t g = 0; g < inputs.slot_mapping.size(); ++g) {
      const Array2<int32_t> &table = inputs.block_tables[g];
      in.groups.push_back({at_least(inputs.slot_mapping[g], t, "slot_mapping"), table.data(),
                           in_range(int64_t(table.shape(0)), 0, INT32_MAX, "the rows of a block table"),
                           in_range(int64_t(table.shape(1)), 0, INT32_MAX, "the columns of a block table"),
                           g < recurrent_groups_.size() && recurrent_groups_[g]});
      const ForwardInput::Group &group = in.groups.back();
      if (group.recurrent) at_least(inputs.num_accepted_tokens, group.num_rows, "num_accepted_tokens");
    }
    const float *logits = alone([&] { return forward_->run(in); });
    if (!inputs.logits.is_valid() || inputs.logits_at != logits || inputs.num_logits != l) {
      inputs.logits = nb::cast(view(logits, l, model_.config.vocab_size, forward_->logits_stride()));
      inputs.logits_at = logits;
      inputs.num_logits = l;
    }
    return inputs.logits;
  }

  // See ForwardPass.
  KnownLogits known(const float *logits, int count) const {
    return forward_ ? forward_->known(logits, count) : KnownLogits{};
  }

  // The hidden states after the final norm [N, hidden_size] at tokens of the last step, valid until the next call.
  FloatView hidden_states(const Array1<int64_t> &tokens) {
    check_finished();
    const int count = in_range(int64_t(tokens.shape(0)), 0, kMostTokens, "the number of tokens");
    const std::vector<int64_t> kept = copied(tokens);
    const float *hidden = alone([&] { return forward_->hidden(kept.data(), count); });
    return view(hidden, count, model_.config.hidden_size, forward_->hidden_stride());
  }

  // An adapter: for each matrix that it changes (matrix, a [rank, cols], b [rows, rank], scale), and for each vector
  // (vector, what is added to it). Returns its bytes.
  size_t add_lora(int id, const std::vector<LoraFactors> &factors, const std::vector<VectorChange> &changes) {
    if (!is_finished_) throw std::invalid_argument("the model is not finished: it takes no adapter yet");
    in_range(id, 1, INT32_MAX, "the number of an adapter");
    std::vector<std::pair<const PackedMatrix *, LoraSource>> sources;
    for (const auto &[matrix, a, b, scale] : factors) {
      const PackedMatrix *m = this->matrix(matrix, "matrix");
      const int rank = in_range(int64_t(a.shape(0)), 1, kMaxLoraRank, "the rank of an adapter");
      sources.push_back({m, {shaped(a, rank, m->cols, "a"), shaped(b, m->rows, rank, "b"), rank, m->rows, m->cols,
                             float(scale)}});
    }
    std::map<Vector, std::vector<float>> vectors;
    for (const auto &[number, change] : changes) {
      const int size = in_range(int64_t(change.shape(0)), 1, kMostSize, "the size of a change");
      vectors[vector(number, "vector", size)].assign(change.data(), change.data() + size);
    }
    return alone([&] { return model_.add_lora(id, sources, std::move(vectors)); });
  }

  void drop_lora(int id) {
    const auto lock = exclusive();
    model_.loras.erase(id);
  }

  void copy_blocks(const Array1<int32_t> &sources, const Array1<int32_t> &destinations) {
    const std::vector<int32_t> from = checked_blocks(sources), to = checked_blocks(destinations);
    if (from.size() != to.size()) throw std::invalid_argument("sources and destinations differ in length");
    for (size_t i = 0; i < from.size(); ++i) {
      if (model_.kv.bytes_of(from[i]) != model_.kv.bytes_of(to[i])) {
        throw std::invalid_argument("a block is copied to a state, or a state to a block");
      }
    }
    alone([&] { model_.kv.copy_blocks(from.data(), to.data(), int(from.size())); });
  }

  size_t block_bytes() const { return model_.kv.bytes_of(0); }
  // Bytes of a state that is not in a block; 0 without such states.
  size_t state_bytes() const {
    const KVConfig &kv = model_.kv.config();
    return kv.num_states ? model_.kv.bytes_of(kv.first_state()) : 0;
  }

  // Whole blocks, or states, as bytes [N, bytes of one], which `data` receives.
  void read_blocks(const Array1<int32_t> &blocks, const Bytes2 &data) {
    const std::vector<int32_t> kept = checked_blocks(blocks);
    check_bytes(data.shape(0), data.shape(1), kept);
    alone([&] { model_.kv.read_blocks(kept.data(), int(kept.size()), data.data()); });
  }

  void write_blocks(const Array1<int32_t> &blocks, const Array2<uint8_t> &data) {
    const std::vector<int32_t> kept = checked_blocks(blocks);
    check_bytes(data.shape(0), data.shape(1), kept);
    alone([&] { model_.kv.write_blocks(kept.data(), int(kept.size()), data.data()); });
  }

  void touch_cache() {
    alone([&] { model_.touch_cache(); });
  }

  void zero_blocks(const Array1<int32_t> &blocks) {
    const std::vector<int32_t> kept = checked_blocks(blocks);
    alone([&] { model_.kv.zero_blocks(kept.data(), int(kept.size())); });
  }

  Numbers stage_seconds() const {
    Numbers out;
    for (int i = 0; i < kNumStages; ++i) out[kStageNames[i]] = forward_ ? forward_->seconds(Stage(i)) : 0.;
    return out;
  }

  size_t packed_bytes() const { return model_.packed_bytes(); }
  const std::vector<int> &packed_on(int matrix) const {
    return model_.packed_on(*this->matrix(matrix, "matrix"));
  }
  const Isa &isa() const { return model_.isa; }
  ThreadPool &pool() { return model_.pool; }
  int num_threads() const { return model_.pool.size(); }
  uint8_t *sampling_scratch(size_t bytes) { return sampling_.reserve(bytes); }

  // Held by a call that uses the threads or the KV pool. Throws std::runtime_error if another one holds it, or in a
  // process forked after the threads started.
  std::unique_lock<std::mutex> exclusive() {
    model_.pool.check_process();
    std::unique_lock<std::mutex> lock(in_use_, std::try_to_lock);
    if (!lock) throw std::runtime_error("another thread is using this model: it runs one call at a time");
    return lock;
  }
  // f() as the exclusive call, without the interpreter lock.
  template <class F>
  std::invoke_result_t<F> alone(F &&f) {
    const auto lock = exclusive();
    nb::gil_scoped_release release;
    return f();
  }

 protected:
  struct SizedVector {
    Vector data;
    int size;
  };

  static const ModelConfig &checked(const ModelConfig &c, const KVConfig &kv) {
    in_range(c.hidden_size, 1, kMostSize, "hidden_size");
    in_range(c.num_heads, 1, kMostHeads, "num_heads");
    in_range(c.head_dim, 1, kMostSize / c.num_heads, "head_dim");
    in_range(kv.heads.value_dim, 1, kMostSize / c.num_heads, "value_dim");
    in_range(c.vocab_size, 1, kMostSize, "vocab_size");
    in_range(c.num_groups, 1, kMostSize, "num_groups");
    if (c.num_kv_heads < 1 || c.num_heads % c.num_kv_heads) {
      throw std::invalid_argument("num_heads is not a multiple of num_kv_heads = " + std::to_string(c.num_kv_heads));
    }
    const LatentConfig &latent = c.latent;
    if (latent.kv_rank && (c.num_kv_heads != 1 || c.head_dim != latent.rope_dim + latent.kv_rank)) {
      throw std::invalid_argument("latent attention has one key head of rope_dim + kv_rank numbers");
    }
    return c;
  }

  void check_finished() const {
    if (!forward_) throw std::invalid_argument("the model is not finished: call finish() first");
  }
  void check_unfinished() const {
    if (is_finished_) throw std::invalid_argument("the model is finished: nothing can be added");
  }

  // Block ids, all in the pool.
  std::vector<int32_t> checked_blocks(const Array1<int32_t> &ids) const {
    in_range(int64_t(ids.shape(0)), 0, INT32_MAX, "the number of blocks");
    std::vector<int32_t> kept = copied(ids);
    for (const int32_t id : kept) in_range(id, 0, model_.kv.config().num_ids() - 1, "block");
    return kept;
  }

  PanelView panels_of(const PackedMatrix &matrix) {
    return PanelView(matrix.panels, {matrix.panel_bytes * size_t(matrix.num_panels)}, nb::find(this));
  }

  void check_bytes(size_t rows, size_t columns, const std::vector<int32_t> &blocks) const {
    bool fits = rows == blocks.size();
    for (const int32_t id : blocks) fits = fits && columns == model_.kv.bytes_of(id);
    if (!fits) throw std::invalid_argument("data is not [blocks, bytes of a block]");
  }

  // Rows of floats, `stride` apart, that the model owns.
  FloatView view(const float *data, int rows, int cols, int stride) {
    return FloatView(data, {size_t(rows), size_t(cols)}, nb::find(this), {stride, 1});
  }

  Vector vector(int64_t id, const char *name, int size) const {
    const SizedVector &v = vectors_[size_t(in_range(id, 0, int64_t(vectors_.size()) - 1, name))];
    in_range(v.size, size, size, name);
    return v.data;
  }
  Vector vector(const nb::dict &d, const char *name, int size) const {
    return vector(integer(d, name, 0, INT32_MAX), name, size);
  }
  Vector optional_vector(const nb::dict &d, const char *name, int size) const {
    return d.contains(name) ? vector(d, name, size) : nullptr;
  }

  // NAME and NAME_bias; no norm without NAME.
  Norm norm(const nb::dict &d, const std::string &name) const {
    const int hidden = model_.config.hidden_size;
    return {optional_vector(d, name.c_str(), hidden), optional_vector(d, (name + "_bias").c_str(), hidden)};
  }
  Norm scaled(const Norm &norm, float scale) {
    auto times = [&](Vector v) -> Vector {
      if (!v || scale == 1.f) return v;
      std::vector<float> product(v, v + model_.config.hidden_size);
      for (float &x : product) x *= scale;
      return model_.copy_vector(product.data(), int(product.size()));
    };
    return {times(norm.weight), times(norm.bias)};
  }

  const PackedMatrix *matrix(int64_t id, const char *name) const {
    return matrices_[size_t(in_range(id, 0, int64_t(matrices_.size()) - 1, name))];
  }
  const PackedMatrix *matrix(int64_t id, const char *name, int rows, int cols) const {
    const PackedMatrix *m = matrix(id, name);
    check_shape(m->rows, m->cols, rows, cols, name);
    return m;
  }
  const PackedMatrix *matrix(const nb::dict &d, const char *name, int rows, int cols) const {
    return matrix(integer(d, name, 0, INT32_MAX), name, rows, cols);
  }
  Linear linear(const nb::dict &d, const char *name, int rows, int cols) {
    return model_.make_linear({matrix(d, name, rows, cols)});
  }

  // NAME_low and NAME_high, the gate of a norm; null without them.
  std::unique_ptr<LowRank> norm_gate(const nb::dict &d, const std::string &name, Norm &norm) {
    const std::string low = name + "_low", high = name + "_high";
    if (!d.contains(low.c_str())) return nullptr;
    const Layer *before = model_.layers.empty() ? nullptr : &model_.layers.back();
    const bool has_other_input = d.contains("aside") || (before && before->is_aside()) || flag(d, "beside");
    if (!norm || has_other_input || d.contains("kept_by_mixer") || d.contains("kept_by_mlp") ||
        model_.streams.num_streams > 1) {
      throw std::invalid_argument(low + ": the gate is that of a norm of the one residual stream");
    }
    const int hidden = model_.config.hidden_size;
    const PackedMatrix *first = matrix(integer(d, low.c_str(), 0, INT32_MAX), low.c_str());
    check_shape(first->rows, first->cols, first->rows, hidden, low.c_str());
    auto gate = std::make_unique<LowRank>();
    gate->low = model_.make_linear({first});
    gate->high.push_back(linear(d, high.c_str(), hidden, first->rows));
    norm.gate = gate.get();
    return gate;
  }

  // The mixer or the MLP adds to a multiple of its own input, in place of the stream.
  void keep_input(const nb::dict &d, const char *name, const Norm &before, Norm &after) {
    if (!d.contains(name)) return;
    if (!before || after || flag(d, "beside") || flag(d, "parallel_mlp")) {
      throw std::invalid_argument(std::string(name) + ": such an input has a norm, and the output has none");
    }
    after.kept = before.weight;
    after.kept_bias = before.bias;
    after.keep = number(d, name);
  }

  // A sum of the stream and an output with scales: PART_scales, PART_offsets and PART_kept_scales.
  void scale_sum(const nb::dict &d, const std::string &part, Norm &after) {
    const int hidden = model_.config.hidden_size;
    after.scales = optional_vector(d, (part + "_scales").c_str(), hidden);
    if (!after.scales) return;
    after.offsets = vector(d, (part + "_offsets").c_str(), hidden);
    after.kept_scales = vector(d, (part + "_kept_scales").c_str(), hidden);
    if (after || after.kept || after.scale != 1.f || d.contains("aside") || model_.streams.num_streams > 1) {
      throw std::invalid_argument(part + "_scales: such an output has no norm and no other factor");
    }
  }

  void per_layer(const nb::dict &d, Layer &layer) {
    layer.scale = number(d, "layer_scale", 1.);
    const int size = model_.per_layer.size, hidden = model_.config.hidden_size;
    if (!size) return;
    layer.per_layer.gate = linear(d, "per_layer_gate", size, hidden);
    layer.per_layer.out = linear(d, "per_layer_out", hidden, size);
    layer.per_layer.norm = norm(d, "post_per_layer_norm");
    if (!layer.per_layer.norm) throw std::invalid_argument("post_per_layer_norm is missing");
  }

  void streams(const nb::dict &d, Layer &layer) {
    const int hidden = model_.config.hidden_size, count = model_.streams.num_streams;
    layer.streams = std::make_unique<StreamUpdate>();
    StreamUpdate &s = *layer.streams;
    s.norm = norm(d, "streams_norm");
    s.laurel_norm = norm(d, "laurel_norm");
    s.router = vector(d, "streams_router", count * hidden);
    s.predict = vector(d, "streams_predict", count * count * count);
    s.correct = vector(d, "streams_correct", count * count);
    s.scale = optional_vector(d, "streams_scale", hidden);
    const PackedMatrix *left = matrix(integer(d, "laurel_left", 0, INT32_MAX), "laurel_left");
    s.laurel_left = linear(d, "laurel_left", left->rows, hidden);
    s.laurel_right = linear(d, "laurel_right", hidden, left->rows);
    if (!s.norm || !s.laurel_norm || layer.per_layer.gate.parts.empty() || !d.contains("group") ||
        d.contains("recurrent") || !d.contains("mlp")) {
      throw std::invalid_argument("a layer of several streams has norms, inputs of its own, attention and an MLP");
    }
  }

  Mix mix(int parts, int matrix, int base, int scale) const {
    const int count = model_.connections.num_streams;
    const int64_t size = int64_t(parts * count * count) * model_.config.hidden_size;
    return {parts, vector(matrix, "mix", in_range(size, 1, kMostSize, "the size of mix")),
            vector(base, "mix_base", parts * count), vector(scale, "mix_scale", parts)};
  }
  Mix mix(const nb::dict &d, const std::string &name) const {
    auto id = [&](const char *end) { return integer(d, (name + end).c_str(), 0, INT32_MAX); };
    return mix(2, id(""), id("_base"), id("_scale"));
  }

  void connect(const nb::dict &d, Layer &layer) {
    layer.attn_mix = mix(d, "attn_mix");
    layer.mlp_mix = mix(d, "mlp_mix");
    for (Norm *after : {&layer.post_attn_norm, &layer.post_mlp_norm}) {
      if (*after || after->kept || after->scales || after->scale != 1.f) {
        throw std::invalid_argument("attn_mix: such outputs have no norm and no other factor");
      }
      after->is_aside = true;
    }
    const bool has_both = d.contains("group") && (d.contains("mlp") || d.contains("moe"));
    if (!has_both || d.contains("aside") || d.contains("late_moe") || d.contains("stream") || flag(d, "beside") ||
        flag(d, "parallel_mlp") || model_.per_layer.size || layer.scale != 1.f || model_.streams.num_streams > 1) {
      throw std::invalid_argument("attn_mix: such a layer has a mixer and an MLP in turn, and no other streams");
    }
  }

  void begin_run(const nb::dict &d, Layer &layer) {
    layer.stream = integer(d, "stream", 0, 1);
    if (model_.layers.empty()) {
      layer.stream_begin = vector(d, "stream_begin", model_.config.hidden_size);
    } else if (model_.layers.front().stream < 0) {
      throw std::invalid_argument("stream: the first layer has one, if any has");
    }
    for (const Layer &other : model_.layers) {
      if (other.stream >= 0) layer.last_stream = other.stream;
    }
  }

  // Without k, the layer reads the keys and values that another one writes to its group and slot; without v alone, its
  // values are its keys before norm and rotation.
  // A layer whose output the next one reads: its products and norms but those of attention and of the MLP.
  void aside(const nb::dict &d, Layer &layer) {
    const int hidden = model_.config.hidden_size;
    layer.attn_norm = {vector(d, "attn_norm", 2 * hidden)};
    layer.post_attn_norm.is_aside = layer.post_mlp_norm.is_aside = true;
    layer.aside = linear(d, "aside", hidden, hidden);
    if (!layer.mlp_norm || layer.post_attn_norm || layer.post_mlp_norm || model_.config.layer_norm ||
        !d.contains("mlp") || d.contains("moe") || !d.contains("group") || d.contains("recurrent") ||
        model_.config.latent.kv_rank || flag(d, "beside") || flag(d, "parallel_mlp")) {
      throw std::invalid_argument("aside: such a layer has attention and an MLP, with an RMSNorm before each");
    }
  }

  // A product of low rank of gate and up, which are side by side.
  void add_low_rank(const nb::dict &d, Mlp &mlp) {
    if (mlp.gate.parts.empty() || mlp.gate_bias || mlp.up_bias || model_.config.gate_limit > 0.f ||
        !mlp.both.parts.empty() || model_.config.gate_scale != 1.f) {
      throw std::invalid_argument("mlp_low: such an MLP has a plain gate, and no biases");
    }
    const int inner = mlp.up.parts[0].matrix->rows;
    mlp.both = model_.make_linear({mlp.gate.parts[0].matrix, mlp.up.parts[0].matrix});
    mlp.added.low = model_.make_linear({matrix(integer(d, "mlp_low", 0, INT32_MAX), "mlp_low")});
    const int rank = mlp.added.low.parts[0].matrix->rows;
    if (mlp.added.low.cols != mlp.up.cols) throw std::invalid_argument("mlp_low: its inputs are not those of up");
    mlp.added.high = {model_.make_linear({matrix(d, "gate_high", inner, rank), matrix(d, "up_high", inner, rank)})};
  }

  // Products of low rank that are added to queries, keys and values, in their places.
  void add_low_rank(const nb::dict &d, Layer &layer) {
    if (!layer.is_aside()) throw std::invalid_argument("q_low: the layer is not aside");
    std::vector<const PackedMatrix *> low;
    for (const char *name : {"q", "k", "v"}) {
      const std::string first = std::string(name) + "_low", second = std::string(name) + "_high";
      const size_t i = low.size();
      low.push_back(matrix(integer(d, first.c_str(), 0, INT32_MAX), first.c_str()));
      if (i >= layer.qkv.parts.size()) throw std::invalid_argument("q_low: the layer has keys and values of its own");
      const Linear::Part &part = layer.qkv.parts[i];
      Linear high = linear(d, second.c_str(), part.matrix->rows, low[i]->rows);
      high.parts[0].offset = part.offset;
      high.stride = layer.qkv.stride;
      layer.added.high.push_back(high);
      if (low[i]->cols != layer.qkv.cols) throw std::invalid_argument(first + ": its inputs are not those of " + name);
    }
    layer.added.low = model_.make_linear(low);
  }

  void attention(const nb::dict &d, Layer &layer) {
    const ModelConfig &c = model_.config;
    layer.heads = d.contains("heads") ? integer(d, "heads", 0, int64_t(model_.heads.size()) - 1) : 0;
    const HeadShape &shape = model_.heads_of(layer);
    const int hidden = c.hidden_size, heads = shape.num_heads * shape.head_dim;
    const int kv_heads = shape.num_kv_heads * shape.head_dim;
    const int values = shape.num_kv_heads * shape.value_dim, outputs = shape.num_heads * shape.value_dim;
    layer.writes = d.contains("k");
    layer.v_part = d.contains("v") ? 2 : 1;
    layer.qk_eps = number(d, "qk_eps", c.norm_eps);
    layer.centred_qk = flag(d, "centred_qk");
    if (layer.centred_qk && c.joint_qk_norm) throw std::invalid_argument("centred_qk: norms are those of single heads");
    auto of_heads = [&](int count) {
      return layer.centred_qk ? count * shape.padded_dim : c.joint_qk_norm ? count * shape.head_dim : shape.head_dim;
    };
    layer.q_norm = optional_vector(d, "q_norm", of_heads(shape.num_heads));
    layer.k_norm = optional_vector(d, "k_norm", of_heads(shape.num_kv_heads));
    layer.q_norm_bias = optional_vector(d, "q_norm_bias", of_heads(shape.num_heads));
    layer.k_norm_bias = optional_vector(d, "k_norm_bias", of_heads(shape.num_kv_heads));
    layer.v_norm = optional_vector(d, "v_norm", shape.value_dim);
    layer.q_bias = optional_vector(d, "q_bias", heads);
    layer.k_bias = optional_vector(d, "k_bias", kv_heads);
    layer.v_bias = optional_vector(d, "v_bias", values);
    layer.o_bias = optional_vector(d, "o_bias", hidden);
    layer.inner_norm = optional_vector(d, "inner_attn_norm", outputs);
    if (layer.writes && layer.v_part == 1 && shape.value_dim != shape.head_dim) {
      throw std::invalid_argument("value_dim: values that are keys have their size");
    }
    const bool has_head_norms = layer.v_norm || (!c.joint_qk_norm && (layer.q_norm || layer.k_norm));
    if (c.clip_qkv > 0.f && (layer.v_part == 1 || has_head_norms)) {
      throw std::invalid_argument("clip_qkv: such layers have values of their own, and no norms of single heads");
    }
    if (c.joint_qk_norm && (!layer.q_norm || (layer.writes && !layer.k_norm))) {
      throw std::invalid_argument("joint_qk_norm needs q_norm and k_norm");
    }
    layer.q_scales = optional_vector(d, "q_scales", heads);
    layer.k_scales = optional_vector(d, "k_scales", kv_heads);
    layer.sinks = optional_vector(d, "sinks", shape.num_heads);
    layer.slopes = optional_vector(d, "slopes", shape.num_heads);
    if (layer.slopes && c.attn_softcap > 0.f) throw std::invalid_argument("slopes: scores with a softcap have none");
    if (d.contains("growth_interval")) {
      layer.query_growth = {integer(d, "growth_interval", 1, INT32_MAX), number(d, "growth_scale"),
                            integer(d, "growth_offset", 0, INT32_MAX)};
    }
    const int inputs = layer.is_aside() ? 2 * hidden : hidden;
    layer.o = linear(d, "o", hidden, outputs);
    layer.takes_qkv = flag(d, "takes_qkv");
    if (layer.takes_qkv) return take_qkv(d, layer);
    std::vector<const PackedMatrix *> parts{matrix(d, "q", heads, inputs)};
    if (layer.writes) parts.push_back(matrix(d, "k", kv_heads, inputs));
    if (layer.writes && layer.v_part == 2) parts.push_back(matrix(d, "v", values, inputs));
    layer.gated = d.contains("attn_gate");
    for (const Layer &other : model_.layers) {
      if (other.has_attention() && other.gated != layer.gated) {
        throw std::invalid_argument("attn_gate: all layers with attention have one, or none has");
      }
    }
    if (layer.gated) parts.push_back(matrix(d, "attn_gate", c.head_gates ? shape.num_heads : outputs, inputs));
    layer.qkv = model_.make_linear(parts);
    if (d.contains("q_low")) add_low_rank(d, layer);
    std::vector<std::string> last(parts.size());
    last.back() = "attn_gate";
    layer.input_bias = biases(d, layer.qkv, last);
  }

  // Queries, keys and values are those that the layer before makes.
  void take_qkv(const nb::dict &d, Layer &layer) {
    const RecurrentConfig &c = model_.recurrent;
    const HeadShape &shape = model_.heads_of(layer);
    const bool has_them = !model_.layers.empty() && model_.layers.back().recurrent && c.mixed_qkv() &&
                          c.num_heads == shape.num_heads && c.num_key_heads == shape.num_kv_heads &&
                          c.value_dim == shape.head_dim && c.value_dim == shape.value_dim;
    if (!has_them || !flag(d, "beside") || model_.config.joint_qk_norm || model_.config.clip_qkv > 0.f ||
        d.contains("q") || d.contains("attn_gate")) {
      throw std::invalid_argument("takes_qkv: the layer before makes them of the same heads, and is beside");
    }
    layer.writes = true;
    layer.qkv = model_.layers.back().qkv;
  }

  // k_b and v_b: lists of matrices, one of each head.
  void latent(const nb::dict &d, Layer &layer) {
    const ModelConfig &c = model_.config;
    const LatentConfig &l = c.latent;
    const int hidden = c.hidden_size, queries = c.num_heads * l.query_dim();
    layer.latent = std::make_unique<Latent>();
    Latent &latent = *layer.latent;
    const PackedMatrix *q = l.q_rank ? matrix(d, "q_a", l.q_rank, hidden) : matrix(d, "q", queries, hidden);
    std::vector<const PackedMatrix *> parts{q, matrix(d, "kv_a", l.rope_dim + l.kv_rank, hidden)};
    if (d.contains("index_q")) {
      const IndexConfig &index = c.index;
      if (!index.topk) throw std::invalid_argument("index_q: the model has no indexer");
      latent.indexer = std::make_unique<Indexer>();
      latent.indexer->q = linear(d, "index_q", index.num_heads * index.head_dim, l.q_rank);
      latent.indexer->norm = vector(d, "index_k_norm", index.head_dim);
      latent.indexer->norm_bias = vector(d, "index_k_norm_bias", index.head_dim);
      parts.push_back(matrix(d, "index_k", index.head_dim, hidden));
      parts.push_back(matrix(d, "index_weights", index.num_heads, hidden));
      has_indexer_ = true;
    } else if (c.index.topk && !has_indexer_) {
      throw std::invalid_argument("index_q: the first layer has an indexer");
    }
    layer.gated = d.contains("attn_gate");
    std::vector<const PackedMatrix *> of_queries;
    if (l.q_rank) {
      latent.q_norm = vector(d, "q_a_norm", l.q_rank);
      of_queries.push_back(matrix(d, "q", queries, l.query_inputs()));
    }
    if (layer.gated) {
      const int gates = c.head_gates ? c.num_heads : c.num_heads * l.value_dim;
      std::vector<const PackedMatrix *> &others = l.joins_latents ? of_queries : parts;
      others.push_back(matrix(d, "attn_gate", gates, l.joins_latents ? l.query_inputs() : hidden));
    }
    layer.qkv = model_.make_linear(parts);
    latent.q_b = model_.make_linear(of_queries);
    layer.input_bias = biases(d, layer.qkv, {"q_a", "kv_a", "", "", ""});
    layer.o_bias = optional_vector(d, "o_bias", hidden);
    latent.kv_norm = vector(d, "kv_a_norm", l.kv_rank);
    layer.sinks = optional_vector(d, "sinks", c.num_heads);
    latent.k_b = of_heads(d, "k_b", c.num_heads, l.kv_rank, l.nope_dim);
    latent.v_b = of_heads(d, "v_b", c.num_heads, l.value_dim, l.kv_rank);
    layer.o = linear(d, "o", hidden, c.num_heads * l.value_dim);
  }

  // The biases of a product's parts, by the names of these, in the places of their outputs; null if none has one.
  Vector biases(const nb::dict &d, const Linear &l, const std::vector<std::string> &names) {
    std::vector<float> row(size_t(l.stride));
    bool is_any = false;
    for (size_t i = 0; i < l.parts.size(); ++i) {
      const int rows = l.parts[i].matrix->rows;
      const Vector bias = optional_vector(d, (names[i] + "_bias").c_str(), rows);
      if (bias) std::copy_n(bias, rows, row.data() + l.parts[i].offset);
      is_any = is_any || bias;
    }
    return is_any ? model_.copy_vector(row.data(), l.stride) : nullptr;
  }

  std::vector<Linear> of_heads(const nb::dict &d, const char *name, int count, int rows, int cols) {
    std::vector<int> ids;
    if (!d.contains(name) || !nb::try_cast(d[name], ids) || int(ids.size()) != count) {
      throw std::invalid_argument(std::string(name) + " is missing or not a list of a matrix for each head");
    }
    std::vector<Linear> heads;
    for (int id : ids) heads.push_back(model_.make_linear({matrix(id, name, rows, cols)}));
    return heads;
  }

  void recurrent(const nb::dict &layer_ids, Layer &layer) {
    const RecurrentConfig &c = model_.recurrent;
    const int hidden = model_.config.hidden_size, keys = c.num_keys(), values = c.num_values();
    nb::dict d;
    if (c.num_heads == 0 || !nb::try_cast(layer_ids["recurrent"], d)) {
      throw std::invalid_argument("recurrent is no dict, or the model was made without recurrent layers");
    }
    if (c.short_conv()) {
      layer.qkv = model_.make_linear({matrix(d, "v", values, hidden), matrix(d, "beta", values, hidden),
                                      matrix(d, "z", values, hidden)});
    } else if (c.mixed_qkv()) {
      const int late = c.num_late(), of_keys = c.num_key_heads * c.value_dim;
      layer.qkv = model_.make_linear({matrix(d, "q", values, hidden), matrix(d, "k", of_keys, hidden),
                                      matrix(d, "late_v", late, hidden), matrix(d, "v", late, hidden)});
      in_range(of_keys % 2, 0, 0, "the values of mixed_qkv that are no half");
    } else if (!c.has_keys()) {
      layer.qkv = model_.make_linear({matrix(d, "v", values, hidden), matrix(d, "z", values, hidden)});
    } else {
      std::vector<const PackedMatrix *> parts;
      for (const char *part : {c.gated_delta() ? "q" : "v", "k", c.gated_delta() ? "v" : "q"}) {
        parts.push_back(matrix(d, part, *part == 'v' ? values : keys, hidden));
      }
      parts.push_back(c.has_lows() ? matrix(d, "z_low", c.rank, hidden) : matrix(d, "z", values, hidden));
      parts.push_back(c.has_lows() ? matrix(d, "dt_low", c.rank, hidden) : matrix(d, "dt", c.num_decays(), hidden));
      if (c.gated_delta()) parts.push_back(matrix(d, "beta", c.num_heads, hidden));
      layer.qkv = model_.make_linear(parts);
    }
    // Rows that are a multiple of 4 KiB apart would share sets of the caches.
    if (layer.qkv.stride % 1024 == 0) layer.qkv.stride += kRowPadding;
    layer.input_bias = c.short_conv()    ? biases(d, layer.qkv, {"v_in", "beta_in", "z_in"})
                       : !c.has_keys()   ? biases(d, layer.qkv, {"v_in", "z_in"})
                       : c.mixed_qkv()   ? biases(d, layer.qkv, {"q_in", "k_in", "", "v_in"})
                       : c.gated_delta() ? nullptr
                                         : biases(d, layer.qkv, {"v_in", "k_in", "q_in", "z_in", "dt_in"});
    layer.o_bias = optional_vector(d, "o_bias", hidden);
    if (!c.mixed_qkv()) layer.o = linear(d, "o", hidden, values);
    layer.recurrent = std::make_unique<Recurrent>();
    Recurrent &r = *layer.recurrent;
    r.conv = vector(d, "conv", c.conv_kernel * c.channel_stride());
    r.conv_bias = optional_vector(d, "conv_bias", c.channel_stride());
    if (c.short_conv()) return;
    if (c.mamba1()) return selective(d, r);
    if (c.rg_lru()) return gated_linear(d, r);
    if (c.mixed_qkv()) {
      r.gates = of_heads(d, "gates", c.num_heads + c.num_key_heads, c.value_dim, c.heads_kernel * c.value_dim);
      r.gates_bias = vector(d, "gates_bias", c.channel_stride());
      r.late_bias = optional_vector(d, "late_bias", c.num_late());
      if (!r.conv_bias || layer_ids.contains("mlp") || layer_ids.contains("moe")) {
        throw std::invalid_argument("conv_bias: such a layer has it, and no MLP");
      }
      return;
    }
    if (c.has_lows()) {
      r.gate = linear(d, "z", values, c.rank);
      r.step = linear(d, "dt", c.num_decays(), c.rank);
    }
    r.dt_bias = vector(d, "dt_bias", c.num_decays());
    r.rate = vector(d, "rate", c.num_decays());
    if (!c.gated_delta()) r.skip = vector(d, "skip", c.num_heads);
    const int norm_size = c.gated_delta() ? c.value_dim : values;
    r.norm = c.gated_delta() ? vector(d, "norm", norm_size) : optional_vector(d, "norm", norm_size);
    r.is_normed_first = flag(d, "is_normed_first");
    r.least_step = number(d, "least_step", 0.);
    r.z_scale = number(d, "z_scale", 1.);
    r.write_scale = number(d, "write_scale", 1.);
    r.least_log = number(d, "least_log", 0.);
    r.sigmoid_gate = flag(d, "sigmoid_gate");
    r.joint_norm = flag(d, "joint_norm");
    r.norm_eps = number(d, "norm_eps", model_.config.norm_eps);
  }

  void selective(const nb::dict &d, Recurrent &r) {
    const RecurrentConfig &c = model_.recurrent;
    const int values = c.num_values();
    r.inner = model_.make_linear({matrix(d, "dt_low", c.rank, values), matrix(d, "k", c.key_dim, values),
                                  matrix(d, "q", c.key_dim, values)});
    r.step = linear(d, "dt", values, c.rank);
    r.dt_bias = vector(d, "dt_bias", values);
    r.rate = vector(d, "rate", c.key_dim * c.padded_value_dim());
    r.skip = vector(d, "skip", values);
    r.inner_norms[0] = optional_vector(d, "dt_norm", c.rank);
    r.inner_norms[1] = optional_vector(d, "k_norm", c.key_dim);
    r.inner_norms[2] = optional_vector(d, "q_norm", c.key_dim);
    if (bool(r.inner_norms[0]) != bool(r.inner_norms[1]) || bool(r.inner_norms[1]) != bool(r.inner_norms[2])) {
      throw std::invalid_argument("dt_norm, k_norm and q_norm: a layer has all of them, or none");
    }
    r.inner_eps = number(d, "inner_eps", 0.);
  }

  void gated_linear(const nb::dict &d, Recurrent &r) {
    const RecurrentConfig &c = model_.recurrent;
    r.gates = of_heads(d, "gates", c.num_values() / c.rank, 2 * c.rank, c.rank);
    r.write_bias = vector(d, "write_bias", c.num_values());
    r.forget_bias = vector(d, "forget_bias", c.num_values());
    r.rate = vector(d, "rate", c.num_values());
  }

  // (gate, up, down, gate_bias, up_bias, down_bias); gate and biases: −1 for none. `inner`: outputs of up; 0: any
  // number. `outer`: its inputs and outputs.
  Mlp mlp(nb::handle ids, int inner, int outer) {
    std::tuple<int, int, int, int, int, int> id;
    if (!nb::try_cast(ids, id)) {
      throw std::invalid_argument("an MLP is six integers: gate, up, down, and the biases of each");
    }
    const auto [gate, up, down, gate_bias, up_bias, down_bias] = id;
    if (!inner) inner = matrix(up, "up")->rows;
    Mlp mlp;
    if (gate != -1) mlp.gate = model_.make_linear({matrix(gate, "gate", inner, outer)});
    mlp.up = model_.make_linear({matrix(up, "up", inner, outer)});
    mlp.down = model_.make_linear({matrix(down, "down", outer, inner)});
    if (gate != -1 && gate_bias != -1) mlp.gate_bias = vector(gate_bias, "gate_bias", inner);
    if (up_bias != -1) mlp.up_bias = vector(up_bias, "up_bias", inner);
    if (down_bias != -1) mlp.down_bias = vector(down_bias, "down_bias", outer);
    return mlp;
  }
  Mlp mlp(const nb::dict &d, const char *name) {
    if (!d.contains(name)) throw std::invalid_argument(std::string(name) + " is missing");
    return mlp(d[name], 0, model_.config.hidden_size);
  }

  void cut(Mlp &mlp, float cutoff) {
    if (mlp.gate.parts.empty() || mlp.gate_bias || mlp.up_bias || model_.config.gate_limit > 0.f) {
      throw std::invalid_argument("gate_cutoff: such an MLP has a plain gate, and no biases");
    }
    mlp.both = model_.make_linear({mlp.gate.parts[0].matrix, mlp.up.parts[0].matrix});
    mlp.cutoff = cutoff;
  }

  static bool flag(const nb::dict &d, const char *name) { return d.contains(name) && integer(d, name, 0, 1); }
  static float number(const nb::dict &d, const char *name, double otherwise) {
    return d.contains(name) ? number(d, name) : float(otherwise);
  }
  static float number(const nb::dict &d, const char *name) {
    double value = 0.;
    if (!d.contains(name) || !nb::try_cast(d[name], value)) {
      throw std::invalid_argument(std::string(name) + " is missing or not a number");
    }
    return float(value);
  }

  std::unique_ptr<RouterMlp> router_mlp(const nb::dict &d, int size) {
    auto mlp = std::make_unique<RouterMlp>();
    mlp->in = linear(d, "router_in", size, model_.config.hidden_size);
    mlp->first = linear(d, "router_first", size, size);
    mlp->second = linear(d, "router_second", size, size);
    mlp->in_bias = vector(d, "router_in_bias", size);
    mlp->first_bias = vector(d, "router_first_bias", size);
    mlp->second_bias = vector(d, "router_second_bias", size);
    mlp->norm = vector(d, "router_norm", size);
    mlp->carry = optional_vector(d, "router_carry", size);
    bool is_carried = !mlp->carry;  // by one before it
    model_.for_each_moe([&](const Moe &moe) { is_carried |= moe.router_mlp && moe.router.cols == size; });
    if (!is_carried) throw std::invalid_argument("router_carry: no router of this size is before it");
    return mlp;
  }

  std::unique_ptr<Moe> moe(const nb::dict &d) {
    const int hidden = model_.config.hidden_size;
    auto moe = std::make_unique<Moe>();
    nb::list experts;
    if (!d.contains("experts") || !nb::try_cast(d["experts"], experts)) {
      throw std::invalid_argument("experts is missing or no list");
    }
    const nb::tuple kept(experts);  // reading an expert may run code that changes the list
    const int num_experts = in_range(int64_t(nb::len(kept)), 1, kMostExperts, "the number of experts");
    int outer = hidden;
    if (d.contains("latent_in")) {
      const PackedMatrix *latent_in = matrix(integer(d, "latent_in", 0, INT32_MAX), "latent_in");
      outer = latent_in->rows;
      moe->latent_in = linear(d, "latent_in", outer, hidden);
      moe->latent_out = linear(d, "latent_out", hidden, outer);
      if (d.contains("shared_gate")) throw std::invalid_argument("latent_in: experts beside a shared gate have none");
    }
    for (nb::handle ids : kept) {
      moe->experts.push_back(mlp(ids, moe->experts.empty() ? 0 : moe->experts[0].down.cols, outer));
    }
    for (Mlp &expert : moe->experts) expert.limit = number(d, "gate_limit", 0.);
    if (moe->expert().limit > 0.f && (moe->expert().gate.parts.empty() || model_.config.gate_limit > 0.f)) {
      throw std::invalid_argument("gate_limit: such experts have a plain gate");
    }
    moe->identities = d.contains("identities") ? integer(d, "identities", 0, kMostExperts - num_experts) : 0;
    if (moe->identities && (outer != hidden || d.contains("shared"))) {
      throw std::invalid_argument("identities: such experts read the hidden numbers, and have no shared expert");
    }
    moe->empties = d.contains("empties") ? integer(d, "empties", 0, kMostExperts - num_experts - moe->identities) : 0;
    const int num_choices = moe->num_choices();
    const bool has_mlp = d.contains("router_in");
    const int size = has_mlp ? matrix(integer(d, "router_in", 0, INT32_MAX), "router_in")->rows : hidden;
    if (has_mlp) moe->router_mlp = router_mlp(d, size);
    moe->router = linear(d, "router", num_choices, size);
    moe->experts_per_token = integer(d, "experts_per_token", 1, num_choices);
    moe->ranks_outputs = flag(d, "ranks_outputs");
    moe->norm_topk = integer(d, "norm_topk", 0, 1);
    moe->sigmoid = integer(d, "sigmoid", 0, 1);
    moe->softcap = number(d, "softcap", 0.);
    moe->sparse_mix = number(d, "sparse_mix", -1.);
    moe->scores_bias = optional_vector(d, "scores_bias", num_choices);
    moe->expert_scales = optional_vector(d, "expert_scales", num_choices);
    if (!has_mlp) moe->router_norm = norm(d, "router_norm");
    moe->experts_norm = norm(d, "experts_norm");
    moe->post_experts_norm = norm(d, "post_experts_norm");
    moe->post_shared_norm = norm(d, "post_shared_norm");
    const bool has_norms = moe->router_norm && moe->post_experts_norm && moe->post_shared_norm;
    if (moe->experts_norm && (!has_norms || outer != hidden || !d.contains("shared"))) {
      throw std::invalid_argument("experts_norm: such experts have all norms, and a shared expert beside them");
    }
    if (has_mlp && (moe->experts_norm || d.contains("shared") || d.contains("latent_in"))) {
      throw std::invalid_argument("router_in: experts with such a router read its inputs, without a shared one");
    }
    moe->router_bias = optional_vector(d, "router_bias", num_choices);
    moe->num_groups = integer(d, "num_groups", 1, num_choices);
    moe->groups_per_token = integer(d, "groups_per_token", 1, moe->num_groups);
    if (num_choices % moe->num_groups ||
        moe->experts_per_token > num_choices / moe->num_groups * moe->groups_per_token) {
      throw std::invalid_argument("num_groups: groups of equal size have the experts of a token");
    }
    moe->zeroes_groups = flag(d, "zeroes_groups");
    moe->scales_inputs = flag(d, "scales_inputs");
    moe->scale = number(d, "scale");
    moe->sum_eps = number(d, "sum_eps");
    if (d.contains("shared")) moe->shared = std::make_unique<Mlp>(mlp(d, "shared"));
    if (d.contains("shared_gate")) moe->shared_gate = linear(d, "shared_gate", 1, hidden);
    return moe;
  }

  Model model_;
  std::vector<const PackedMatrix *> matrices_;
  std::vector<SizedVector> vectors_;
  static constexpr int kMostConnected = 16;
  static constexpr int64_t kChunked = int64_t(1) << 32;  // marks a window in `windows_`
  std::vector<int64_t> windows_;  // sliding window of each KV group; −1 before its first layer
  std::vector<bool> recurrent_groups_;
  bool has_indexer_ = false;  // whether a layer has one
  std::vector<nb::object> kept_;  // arrays that the model reads where they are
  std::unique_ptr<ForwardPass> forward_;
  bool is_finished_ = false;
  Buffer<uint8_t> sampling_;
  std::mutex in_use_;
};

}  // namespace foreword::kernels
