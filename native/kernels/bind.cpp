// Python's view of the kernels: packing a model matrix by matrix, running steps, sampling, the roofline.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>

#include "kernels/bench.h"
#include "kernels/step.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace foreword {
namespace kernels {
namespace {

template <class T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes2 = Array2<uint8_t>;
// Rows may be apart, the numbers of a row are not.
using LogitRows = nb::ndarray<const float, nb::ndim<2>, nb::any_contig, nb::device::cpu>;

template <class T>
struct Named {
  const char *name;
  T value;
};

template <class T, size_t N>
T by_name(const Named<T> (&table)[N], const std::string &name, const char *what) {
  std::string known;
  for (const auto &entry : table) {
    if (name == entry.name) return entry.value;
    known += std::string(known.empty() ? "" : ", ") + entry.name;
  }
  throw std::invalid_argument(std::string(what) + " '" + name + "' is not one of: " + known);
}

constexpr Named<Source> kSources[] = {
    {"F32", Source::f32},   {"F16", Source::f16},   {"BF16", Source::bf16}, {"Q4_0", Source::q4_0},
    {"Q4_1", Source::q4_1}, {"Q5_0", Source::q5_0}, {"Q5_1", Source::q5_1}, {"Q8_0", Source::q8_0},
    {"Q4_K", Source::q4_k}, {"Q5_K", Source::q5_k}, {"Q6_K", Source::q6_k},
};
constexpr Named<Format> kFormats[] = {
    {"f32", Format::f32},       {"bf16", Format::bf16}, {"i8", Format::i8},         {"q4", Format::q4},
    {"q4_min", Format::q4_min}, {"q8", Format::q8},     {"q8_min", Format::q8_min}, {"q8_half", Format::q8_half},
};
constexpr Named<KVFormat> kKVFormats[] = {{"fp32", KVFormat::f32}, {"bf16", KVFormat::bf16}, {"int8", KVFormat::i8}};
constexpr Named<Gate> kGates[] = {{"silu", Gate::silu}, {"gelu_tanh", Gate::gelu_tanh}};

SourceMatrix source_matrix(const Bytes2 &data, const std::string &source, int cols) {
  return {by_name(kSources, source, "weight source"), static_cast<int>(data.shape(0)), cols, data.shape(1), data.data()};
}

template <class T>
const T *at_least(const Array1<T> &array, size_t size, const char *name) {
  if (array.shape(0) < size) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.shape(0)) + " entries, " +
                                std::to_string(size) + " are needed");
  }
  return array.data();
}

KVConfig kv_config(const std::string &format, int num_blocks, int block_size, int num_slots, int num_kv_heads, int head_dim) {
  return {by_name(kKVFormats, format, "KV format"), num_blocks, block_size, num_slots, num_kv_heads, head_dim,
          (head_dim + kTile - 1) / kTile * kTile};
}

// A model under construction, then in use. Matrices and vectors are named by the integers that packing returns.
class CpuModel {
 public:
  CpuModel(const ModelConfig &config, const KVConfig &kv, const std::string &isa, int num_threads)
      : model_(config, kv, choose_level(isa.c_str()), num_threads) {}

  int pack(const Bytes2 &data, const std::string &source, int cols, const std::string &format, bool exact) {
    const SourceMatrix matrix = source_matrix(data, source, cols);
    const Format f = by_name(kFormats, format, "weight format");
    nb::gil_scoped_release release;
    matrices_.push_back(model_.pack(matrix, f, exact));
    return static_cast<int>(matrices_.size()) - 1;
  }

  int vector(const Array1<float> &values) {
    vectors_.push_back(model_.copy_vector(values.data(), static_cast<int>(values.shape(0))));
    return static_cast<int>(vectors_.size()) - 1;
  }

  void set_embedding(const Bytes2 &data, const std::string &source, int cols) {
    embedding_ = nb::cast(data);  // the rows are read later
    model_.set_embedding(source_matrix(data, source, cols));
  }

  int add_rope(const std::vector<double> &inv_freq, double scale) {
    model_.ropes.push_back({inv_freq, scale});
    return static_cast<int>(model_.ropes.size()) - 1;
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
    model_.final_norm = vectors_.at(static_cast<size_t>(final_norm));
    model_.lm_head = linear({lm_head});
    runner_ = std::make_unique<StepRunner>(model_);
  }

  nb::ndarray<nb::numpy, const float, nb::ndim<2>> step(
      int num_tokens, int num_reqs, const Array1<int32_t> &input_ids, const Array1<int64_t> &positions,
      const Array1<int32_t> &query_start_loc, const Array1<int32_t> &seq_lens, const Array1<int32_t> &idx_mapping,
      const Array1<int64_t> &logits_indices, const std::vector<Array1<int64_t>> &slot_mapping,
      const std::vector<Array2<int32_t>> &block_tables) {
    if (!runner_) throw std::invalid_argument("the model is not finished");
    const size_t t = static_cast<size_t>(num_tokens), b = static_cast<size_t>(num_reqs);
    StepInput in{};
    in.num_tokens = num_tokens;
    in.num_reqs = num_reqs;
    in.num_logits = static_cast<int>(logits_indices.shape(0));
    in.input_ids = at_least(input_ids, t, "input_ids");
    in.positions = at_least(positions, t, "positions");
    in.query_start_loc = at_least(query_start_loc, b + 1, "query_start_loc");
    in.seq_lens = at_least(seq_lens, b, "seq_lens");
    in.idx_mapping = at_least(idx_mapping, b, "idx_mapping");
    in.logits_indices = logits_indices.data();
    if (slot_mapping.size() != block_tables.size()) throw std::invalid_argument("slot_mapping and block_tables differ in groups");
    for (size_t g = 0; g < slot_mapping.size(); ++g) {
      in.groups.push_back({at_least(slot_mapping[g], t, "slot_mapping"), block_tables[g].data(),
                           static_cast<int>(block_tables[g].shape(0)), static_cast<int>(block_tables[g].shape(1))});
    }
    const float *logits;
    {
      nb::gil_scoped_release release;
      logits = runner_->run(in);
    }
    return nb::ndarray<nb::numpy, const float, nb::ndim<2>>(
        logits, {static_cast<size_t>(in.num_logits), static_cast<size_t>(model_.config.vocab_size)}, nb::find(this),
        {runner_->logits_stride(), 1});
  }

  void copy_blocks(const Array1<int32_t> &sources, const Array1<int32_t> &destinations) {
    const int count = static_cast<int>(sources.shape(0)), blocks = model_.kv.config().num_blocks;
    at_least(destinations, sources.shape(0), "destinations");
    for (int i = 0; i < count; ++i) {
      for (const int32_t id : {sources.data()[i], destinations.data()[i]}) {
        if (id < 0 || id >= blocks) {
          throw std::invalid_argument("copy_blocks: block " + std::to_string(id) + " is outside [0, " + std::to_string(blocks) + ")");
        }
      }
    }
    nb::gil_scoped_release release;
    model_.kv.copy_blocks(sources.data(), destinations.data(), count);
  }

  nb::dict stage_seconds() const {
    nb::dict out;
    for (int i = 0; i < StepRunner::kNumStages; ++i) out[StepRunner::kStageNames[i]] = runner_ ? runner_->stage_seconds[i] : 0.;
    return out;
  }

  size_t packed_bytes() const { return model_.packed_bytes(); }
  const char *isa() const { return model_.level.name; }
  int num_threads() const { return model_.pool.size(); }
  Model &model() { return model_; }
  uint8_t *sampling_scratch(size_t bytes) { return sampling_.reserve(bytes); }

 private:
  Linear linear(const std::vector<int> &ids) {
    std::vector<const PackedMatrix *> parts;
    for (int id : ids) parts.push_back(matrices_.at(static_cast<size_t>(id)));
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
  std::unique_ptr<StepRunner> runner_;
  Buffer<uint8_t> sampling_;
};

// ---------------------------------------------------------------------------------------------- sampling

void sample(const nb::ndarray<const float, nb::ndim<2>, nb::device::cpu> &logits, const Array1<float> &temperature,
            const Array1<int32_t> &top_k, const Array1<float> &top_p, const Array1<float> &min_p, const Array1<int64_t> &seeds,
            const Array1<int64_t> &positions, const Array1<int32_t> &rows,
            const nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> &out, CpuModel *model) {
  const size_t count = logits.shape(0), size = logits.shape(1);
  if (size == 0 || (size > 1 && logits.stride(1) != 1)) throw std::invalid_argument("the logits of a row must be contiguous");
  at_least(positions, count, "positions");
  at_least(rows, count, "rows");
  if (out.shape(0) < count) throw std::invalid_argument("out is shorter than logits");
  const size_t num_rows = temperature.shape(0);
  for (const size_t other : {top_k.shape(0), top_p.shape(0), min_p.shape(0), seeds.shape(0)}) {
    if (other != num_rows) throw std::invalid_argument("temperature, top_k, top_p, min_p and seeds differ in length");
  }
  size_t searches = 0;  // rows that draw from the whole vocabulary; the others cost less than waking a thread
  for (size_t i = 0; i < count; ++i) {
    if (rows.data()[i] < 0 || static_cast<size_t>(rows.data()[i]) >= num_rows) {
      throw std::invalid_argument("rows[" + std::to_string(i) + "] = " + std::to_string(rows.data()[i]) + " is outside [0, " +
                                  std::to_string(num_rows) + ")");
    }
    const int32_t row = rows.data()[i];
    searches += temperature.data()[row] > 0.f && top_k.data()[row] <= 0;
  }
  const Level &level = model ? model->model().level : choose_level("");
  nb::gil_scoped_release release;
  const size_t scratch_bytes = (level.sample_scratch_bytes(static_cast<int>(size)) + 63) / 64 * 64;
  std::atomic<size_t> next{0};
  auto work = [&](uint8_t *scratch) {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      const size_t row = static_cast<size_t>(rows.data()[i]);
      const SamplingRow options{temperature.data()[row], top_k.data()[row],
                                top_p.data()[row],       min_p.data()[row],
                                static_cast<uint64_t>(seeds.data()[row]), positions.data()[i]};
      out.data()[i] = level.sample_row(logits.data() + static_cast<ptrdiff_t>(i) * logits.stride(0), static_cast<int>(size),
                                       options, scratch);
    }
  };
  if (!model) {
    const std::unique_ptr<uint8_t[]> scratch(new uint8_t[scratch_bytes]);
    return work(scratch.get());
  }
  ThreadPool &pool = model->model().pool;
  uint8_t *scratch = model->sampling_scratch(scratch_bytes * static_cast<size_t>(pool.size()));
  if (searches < 2) return work(scratch);
  pool.run([&](int thread) { work(scratch + scratch_bytes * static_cast<size_t>(thread)); });
}

// ---------------------------------------------------------------------------------------------- roofline

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Best rate of `work(thread) -> amount` run by all threads, over a few rounds.
template <class Work>
double best_rate(ThreadPool &pool, Work &&work) {
  double best = 0.;
  for (int round = 0; round < 5; ++round) {
    std::vector<double> amount(static_cast<size_t>(pool.size()));
    const auto start = std::chrono::steady_clock::now();
    pool.run([&](int thread) { amount[static_cast<size_t>(thread)] = work(thread); });
    double total = 0.;
    const double seconds = seconds_since(start);
    for (double a : amount) total += a;
    best = std::max(best, total / seconds);
  }
  return best;
}

// FOREWORD_NUM_THREADS, or the physical cores.
int default_num_threads() {
  const char *variable = std::getenv("FOREWORD_NUM_THREADS");
  if (!variable || !*variable) return physical_cores();
  char *end = nullptr;
  const long count = std::strtol(variable, &end, 10);
  if (*end || count < 1 || count > 4096) {
    throw std::invalid_argument(std::string("FOREWORD_NUM_THREADS = '") + variable + "' is not a number of threads");
  }
  return static_cast<int>(count);
}

nb::dict roofline(int num_threads, const std::string &isa, int megabytes) {
  const Level &level = choose_level(isa.c_str());
  double f32, bf16, i8, memory;
  {
    nb::gil_scoped_release release;
    ThreadPool pool(num_threads > 0 ? num_threads : default_num_threads());
    constexpr int64_t kRepeats = 2'000'000;
    f32 = best_rate(pool, [&](int) { return level.peak_f32(kRepeats); });
    bf16 = best_rate(pool, [&](int) { return level.peak_bf16(kRepeats); });
    i8 = best_rate(pool, [&](int) { return level.peak_i8(kRepeats); });
    const size_t share = (static_cast<size_t>(megabytes) << 20) / static_cast<size_t>(pool.size()) / 64 * 64;
    Mapping data(share * static_cast<size_t>(pool.size()));
    pool.run([&](int thread) {
      for (size_t i = 0; i < share; i += 64) data.data()[share * static_cast<size_t>(thread) + i] = 1;
    });
    memory = best_rate(pool, [&](int thread) {
      return static_cast<double>(level.read_memory(data.data() + share * static_cast<size_t>(thread), share));
    });
  }
  nb::dict out;
  out["isa"] = level.name;
  out["f32_flops"] = f32;
  out["bf16_flops"] = bf16;
  out["i8_ops"] = i8;
  out["memory_bytes"] = memory;
  return out;
}

double bench_linear(const std::string &format, int outputs, int inputs, int rows, int copies, int num_threads,
                    const std::string &isa, int rounds, bool exact) {
  const LinearShape shape{by_name(kFormats, format, "weight format"), exact, outputs, inputs, rows, copies};
  const Level &level = choose_level(isa.c_str());
  nb::gil_scoped_release release;
  ThreadPool pool(num_threads > 0 ? num_threads : default_num_threads());
  return time_linear(shape, level, pool, rounds);
}

double bench_attention(const std::string &format, int num_reqs, int queries, int context, int num_heads, int num_kv_heads,
                       int head_dim, int copies, int num_threads, const std::string &isa, int rounds) {
  const AttentionShape shape{by_name(kKVFormats, format, "KV format"), num_reqs, queries, context, num_heads, num_kv_heads,
                             head_dim, copies};
  const Level &level = choose_level(isa.c_str());
  nb::gil_scoped_release release;
  ThreadPool pool(num_threads > 0 ? num_threads : default_num_threads());
  return time_attention(shape, level, pool, rounds);
}

std::vector<std::string> usable_levels() {
  std::vector<std::string> names;
  for (int i = 0; i < built_levels().count; ++i) {
    const Level &level = *built_levels().levels[i];
    if (machine_has(level)) names.emplace_back(level.name);
  }
  return names;
}

}  // namespace
}  // namespace kernels

void bind_kernels(nanobind::module_ &m) {
  using namespace kernels;
  nb::class_<CpuModel>(m, "CpuModel", "A decoder's packed weights, its KV pool and threads. See foreword.executors.native.")
      .def(
          "__init__",
          [](CpuModel *self, int hidden_size, int num_heads, int num_kv_heads, int head_dim, int vocab_size, double norm_eps,
             double query_scale, double embedding_scale, const std::string &activation, double attn_softcap,
             double final_softcap, int num_groups, int num_slots, int num_blocks, int block_size, const std::string &kv_format,
             const std::string &isa, int num_threads) {
            const ModelConfig config{hidden_size,
                                     num_heads,
                                     num_kv_heads,
                                     head_dim,
                                     vocab_size,
                                     num_groups,
                                     static_cast<float>(norm_eps),
                                     static_cast<float>(query_scale),
                                     static_cast<float>(embedding_scale),
                                     by_name(kGates, activation, "activation"),
                                     static_cast<float>(attn_softcap),
                                     static_cast<float>(final_softcap)};
            new (self) CpuModel(config, kv_config(kv_format, num_blocks, block_size, num_slots, num_kv_heads, head_dim), isa,
                                num_threads);
          },
          nb::kw_only(), "hidden_size"_a, "num_heads"_a, "num_kv_heads"_a, "head_dim"_a, "vocab_size"_a, "norm_eps"_a,
          "query_scale"_a, "embedding_scale"_a, "activation"_a, "attn_softcap"_a, "final_softcap"_a, "num_groups"_a,
          "num_slots"_a, "num_blocks"_a, "block_size"_a, "kv_format"_a, "isa"_a, "num_threads"_a)
      .def("pack", &CpuModel::pack, "data"_a, "source"_a, "cols"_a, "format"_a, "exact"_a)
      .def("vector", &CpuModel::vector, "values"_a)
      .def("set_embedding", &CpuModel::set_embedding, "data"_a.noconvert(), "source"_a, "cols"_a)
      .def("add_rope", &CpuModel::add_rope, "inv_freq"_a, "scale"_a)
      .def("add_layer", &CpuModel::add_layer, "layer"_a)
      .def("finish", &CpuModel::finish, "final_norm"_a, "lm_head"_a)
      .def("step", &CpuModel::step, "num_tokens"_a, "num_reqs"_a, "input_ids"_a, "positions"_a, "query_start_loc"_a,
           "seq_lens"_a, "idx_mapping"_a, "logits_indices"_a, "slot_mapping"_a, "block_tables"_a)
      .def("copy_blocks", &CpuModel::copy_blocks, "sources"_a, "destinations"_a)
      .def("stage_seconds", &CpuModel::stage_seconds)
      .def_prop_ro("packed_bytes", &CpuModel::packed_bytes)
      .def_prop_ro("isa", &CpuModel::isa)
      .def_prop_ro("num_threads", &CpuModel::num_threads);

  m.def(
      "kv_bytes",
      [](const std::string &format, int num_blocks, int block_size, int num_slots, int num_kv_heads, int head_dim) {
        return KVCache::bytes(kv_config(format, num_blocks, block_size, num_slots, num_kv_heads, head_dim));
      },
      "kv_format"_a, "num_blocks"_a, "block_size"_a, "num_slots"_a, "num_kv_heads"_a, "head_dim"_a,
      "Bytes that a KV pool takes, computed without taking them.");
  m.def("sample", &sample, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seeds"_a, "positions"_a, "rows"_a,
        "out"_a.noconvert(), "model"_a.none() = nb::none(),
        "Samples row i of logits [L, V] with the parameters at rows[i] for the token at positions[i]; writes out [L].\n"
        "native/kernels/sampler.cpp defines the draw. `model` lends its threads and the memory they work in: no two calls at once with one.");
  m.def("roofline", &roofline, "num_threads"_a = 0, "isa"_a = "", "megabytes"_a = 256,
        "The machine's limits with one instruction set: peak operations and memory bytes a second.");
  m.def("bench_linear", &bench_linear, "format"_a, "outputs"_a, "inputs"_a, "rows"_a, "copies"_a = 1, "num_threads"_a = 0,
        "isa"_a = "", "rounds"_a = 5, "exact"_a = false, "Seconds of one product of packed weights [outputs, inputs] with `rows` rows.");
  m.def("bench_attention", &bench_attention, "format"_a, "num_reqs"_a, "queries"_a, "context"_a, "num_heads"_a,
        "num_kv_heads"_a, "head_dim"_a, "copies"_a = 1, "num_threads"_a = 0, "isa"_a = "", "rounds"_a = 5,
        "Seconds of one layer's attention: `queries` new tokens of each request over `context` keys.");
  m.def("isa_levels", &usable_levels, "Instruction-set levels that this build and this machine have, best first.");
  m.def("default_num_threads", &default_num_threads, "FOREWORD_NUM_THREADS, or the physical cores this process may use.");
}

}  // namespace foreword
