// The kernels in Python.
#include "kernels/bind_encoder.h"
#include "kernels/bind_sampling.h"
#include "kernels/roofline.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace foreword {
namespace kernels {
namespace {

nb::typed<nb::tuple, nb::str, Numbers> roofline(int num_threads, const std::string &isa_name,
                                                int megabytes) {
  in_range(megabytes, 1, INT32_MAX, "megabytes");
  const Isa &isa = choose_isa(isa_name);
  Roofline limits;
  {
    nb::gil_scoped_release release;
    ThreadPool pool(num_threads);
    limits = measure_roofline(isa, pool, megabytes);
  }
  Numbers out;
  out["f32_flops"] = limits.f32_flops;
  out["bf16_flops"] = limits.bf16_flops;
  out["i8_ops"] = limits.i8_ops;
  out["memory_bytes"] = limits.memory_bytes;
  return nb::make_tuple(isa.name, out);
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Isa *isa : usable_isas()) names.emplace_back(isa->name);
  return names;
}

size_t kv_bytes(const std::string &format, int num_blocks, int block_size, int num_slots, int num_kv_heads,
                int head_dim, int value_dim, const Integers &recurrent, const MoreHeads &more_heads,
                bool keys_are_values, int num_states, int num_state_slots, int index_dim) {
  return KVCache::bytes(kv_config(format, num_blocks, block_size, num_slots, num_kv_heads, head_dim, value_dim,
                                  recurrent, more_heads, keys_are_values, num_states, num_state_slots, index_dim));
}

void bind_model(nb::module_ &m) {
  nb::class_<ModelInputs>(m, "ModelInputs", "The arrays of steps that CpuModel.step reads, taken once.")
      .def(nb::init<const Array1<int32_t> &, const Array1<int64_t> &, const Array1<int32_t> &, const Array1<int32_t> &,
                    const Array1<int32_t> &, const Array1<int64_t> &, const std::vector<Array1<int64_t>> &,
                    const std::vector<Array2<int32_t>> &, const Array1<int32_t> &, const Array1<int32_t> &>(),
           "input_ids"_a.noconvert(), "positions"_a.noconvert(), "query_start_loc"_a.noconvert(),
           "seq_lens"_a.noconvert(), "idx_mapping"_a.noconvert(), "logits_indices"_a.noconvert(),
           "slot_mapping"_a.noconvert(), "block_tables"_a.noconvert(), "num_draft_tokens"_a.noconvert(),
           "num_accepted_tokens"_a.noconvert());
  nb::class_<CpuModel>(m, "CpuModel",
                       "A decoder's packed weights, its KV pool and threads. See foreword.executors.native.")
      .def(
          "__init__",
          [](CpuModel *self, int hidden_size, int num_heads, int num_kv_heads, int head_dim, int value_dim,
             int vocab_size, double norm_eps, double query_scale, double embedding_scale, const std::string &activation,
             double attn_softcap, double final_softcap, double gate_scale, double logit_scale,
             bool joint_qk_norm, bool layer_norm, bool head_gates, bool softplus_gates, bool rounds_inputs,
             double gate_alpha, double gate_limit, const Integers &latent, double latent_eps, const Integers &indexer,
             double indexer_eps, double clip_qkv,
             int num_groups, int num_slots, int num_blocks, int block_size, const std::string &kv_format,
             const std::string &isa, int num_threads,
             const Integers &recurrent, const CpuGroups &cpu_groups, const MoreHeads &more_heads, int num_states,
             int num_state_slots) {
            const LatentConfig of_latent = latent_config(latent, latent_eps);
            const IndexConfig index = index_config(indexer, of_latent, indexer_eps);
            const ModelConfig config{hidden_size, num_heads, num_kv_heads, head_dim, vocab_size, num_groups,
                                     float(norm_eps), float(query_scale), float(embedding_scale),
                                     by_name(kGates, activation, "activation"), float(attn_softcap),
                                     float(final_softcap), float(gate_scale), float(logit_scale), joint_qk_norm,
                                     layer_norm, head_gates, softplus_gates, rounds_inputs, float(gate_alpha),
                                     float(gate_limit), of_latent, index, float(clip_qkv)};
            new (self) CpuModel(
                config,
                kv_config(kv_format, num_blocks, block_size, num_slots, num_kv_heads, head_dim, value_dim, recurrent,
                          more_heads, config.latent.kv_rank > 0, num_states, num_state_slots, index.head_dim),
                isa, num_threads, cpu_groups);
          },
          nb::kw_only(), "hidden_size"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "value_dim"_a,
          "vocab_size"_a, "norm_eps"_a, "query_scale"_a, "embedding_scale"_a, "activation"_a, "attn_softcap"_a,
          "final_softcap"_a, "gate_scale"_a = 1., "logit_scale"_a = 1., "joint_qk_norm"_a = false,
          "layer_norm"_a = false, "head_gates"_a = false, "softplus_gates"_a = false, "rounds_inputs"_a = false,
          "gate_alpha"_a = 0., "gate_limit"_a = 0., "latent"_a = Integers(), "latent_eps"_a = 0.,
          "indexer"_a = Integers(), "indexer_eps"_a = 0., "clip_qkv"_a = 0.,
          "num_groups"_a, "num_slots"_a, "num_blocks"_a, "block_size"_a, "kv_format"_a, "isa"_a, "num_threads"_a,
          "recurrent"_a = Integers(), "cpu_groups"_a = CpuGroups{}, "more_heads"_a = MoreHeads{},
          "num_states"_a = 0, "num_state_slots"_a = 0)
      .def("pack", &CpuModel::pack, "data"_a.noconvert(), "source"_a, "cols"_a, "format"_a, "exact"_a)
      .def("attach", &CpuModel::attach, "panels"_a.noconvert(), "rows"_a, "cols"_a, "format"_a, "exact"_a)
      .def("again", &CpuModel::again, "matrix"_a, "Another number for a matrix, which adapters change apart.")
      .def("panels", &CpuModel::panels, "matrix"_a, "The packed form of a matrix, which attach() takes.")
      .def("screen", &CpuModel::screen, "(panels, errors, most) of greedy steps: see decision 21.")
      .def("vector", nb::overload_cast<const Array1<float> &>(&CpuModel::vector), "values"_a.noconvert())
      .def("set_embedding", &CpuModel::set_embedding, "data"_a.noconvert(), "source"_a, "cols"_a)
      .def("set_positions", &CpuModel::set_positions, "data"_a.noconvert(), "source"_a, "cols"_a,
           "The rows that are added to the inputs of tokens by their positions.")
      .def("set_per_layer", &CpuModel::set_per_layer, "data"_a.noconvert(), "source"_a, "cols"_a, "matrix"_a, "norm"_a,
           "norm_eps"_a, "embedding_scale"_a, "scale"_a,
           "The inputs that layers have of their own: see PerLayerSpec. To be called before add_layer.")
      .def("set_streams", &CpuModel::set_streams, "into"_a, "out"_a,
           "The matrices of several streams: see StreamsSpec. To be called before add_layer.")
      .def("set_connections", &CpuModel::set_connections, "num_streams"_a, "magnitude"_a, "eps"_a, "matrix"_a, "base"_a,
           "scale"_a, "Hyper-connections: see ConnectionsSpec. To be called before add_layer.")
      .def("add_rope", &CpuModel::add_rope, "inv_freq"_a, "scale"_a, "axes"_a = std::vector<int>{})
      .def("add_layer", &CpuModel::add_layer, "layer"_a)
      .def("finish", &CpuModel::finish, "final_norm"_a, "final_norm_bias"_a, "lm_head"_a, "screen"_a = nb::none(),
           "logits_bias"_a = -1, "embed_norm"_a = -1, "embed_norm_bias"_a = -1, "head"_a = -1,
           "head_norm"_a = -1, "head_norm_bias"_a = -1, "embed_scale"_a = -1, "embed_offset"_a = -1)
      .def("step", &CpuModel::step, "inputs"_a, "num_tokens"_a, "num_reqs"_a, "num_logits"_a,
           "logits_indices"_a.noconvert().none() = nb::none(), "embed_rows"_a.noconvert().none() = nb::none(),
           "embeds"_a.noconvert().none() = nb::none(), "features"_a.noconvert().none() = nb::none(),
           "mrope_positions"_a.noconvert().none() = nb::none(),
           "last_seen"_a.noconvert().none() = nb::none(), "lora_ids"_a.noconvert().none() = nb::none(),
           "greedy"_a = false, "bidirectional"_a = false)
      .def("hidden_states", &CpuModel::hidden_states, "tokens"_a.noconvert())
      .def("add_lora", &CpuModel::add_lora, "id"_a, "factors"_a, "changes"_a)
      .def("drop_lora", &CpuModel::drop_lora, "id"_a)
      .def("copy_blocks", &CpuModel::copy_blocks, "sources"_a.noconvert(), "destinations"_a.noconvert())
      .def_prop_ro("block_bytes", &CpuModel::block_bytes)
      .def_prop_ro("state_bytes", &CpuModel::state_bytes)
      .def("read_blocks", &CpuModel::read_blocks, "blocks"_a.noconvert(), "data"_a.noconvert())
      .def("write_blocks", &CpuModel::write_blocks, "blocks"_a.noconvert(), "data"_a.noconvert())
      .def("touch_cache", &CpuModel::touch_cache)
      .def("zero_blocks", &CpuModel::zero_blocks, "blocks"_a.noconvert())
      .def("stage_seconds", &CpuModel::stage_seconds,
           "Seconds of all steps so far in each stage, measured on one thread.")
      .def_prop_ro("packed_bytes", &CpuModel::packed_bytes)
      .def_prop_ro("isa", [](const CpuModel &model) { return model.isa().name; })
      .def("packed_on", &CpuModel::packed_on, "matrix"_a, "The processor that packed each panel of a matrix.")
      .def_prop_ro("num_threads", &CpuModel::num_threads);
}

}  // namespace
}  // namespace kernels

void bind_kernels(nb::module_ &m) {
  using namespace kernels;
  bind_model(m);
  bind_encoder(m);
  bind_sampling(m);
  m.def("kv_bytes", &kv_bytes, "kv_format"_a, "num_blocks"_a, "block_size"_a, "num_slots"_a, "num_kv_heads"_a,
        "head_dim"_a, "value_dim"_a, "recurrent"_a = Integers(), "more_heads"_a = MoreHeads{},
        "keys_are_values"_a = false, "num_states"_a = 0, "num_state_slots"_a = 0, "index_dim"_a = 0,
        "Bytes of a KV pool, computed without allocating it.");
  m.def("roofline", &roofline, "num_threads"_a, "isa"_a = "", "megabytes"_a = 256,
        "The instruction set, and with it the limits of this machine: peak operations and memory bytes per second.");
  m.def("isa_levels", &isa_names, "Instruction sets that this build and this machine have, best first.");
}

}  // namespace foreword
