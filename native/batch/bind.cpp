#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <optional>

#include "batch/rows.h"
#include "batch/step.h"

namespace nb = nanobind;

namespace foreword {
namespace {

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class... Options>
using AnyVector = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu, Options...>;

template <class T>
T *pointer(const nb::dict &arrays, const char *name) {
  return nb::cast<Vector<T>>(arrays[name]).data();
}

States make_states(const nb::dict &s, int32_t vocab_size, int32_t max_num_draft_tokens) {
  const auto tokens = nb::cast<nb::ndarray<int32_t, nb::ndim<2>, nb::device::cpu>>(s["token_ids"]);
  return {
      .max_num_reqs = int32_t(tokens.shape(0)),
      .max_model_len = int32_t(tokens.shape(1)),
      .vocab_size = vocab_size,
      .max_num_draft_tokens = max_num_draft_tokens,
      .token_ids = tokens.data(),
      .num_tokens = pointer<int32_t>(s, "num_tokens"),
      .num_computed_tokens = pointer<int32_t>(s, "num_computed_tokens"),
      .num_placeholders = pointer<int32_t>(s, "num_placeholders"),
      .prompt_len = pointer<int32_t>(s, "prompt_len"),
      .prefill_len = pointer<int32_t>(s, "prefill_len"),
      .last_sampled_token = pointer<int32_t>(s, "last_sampled_token"),
      .row_generation = pointer<int64_t>(s, "row_generation"),
      .live = pointer<bool>(s, "live"),
      .token_stride = tokens.stride(0),
  };
}

// `columns`: the arrays of SamplingColumns by name. `req_ids`: the address of the states' object array, which has no
// buffer of its own.
RowsCore make_rows(const nb::dict &s, const nb::dict &c, const nb::dict &row_of, uintptr_t req_ids, const nb::list &free,
                   int32_t vocab_size, int32_t max_num_draft_tokens) {
  RowsCore core;
  core.states = make_states(s, vocab_size, max_num_draft_tokens);
  core.lora_id = pointer<int32_t>(s, "lora_id");
  core.row_generation = pointer<int64_t>(s, "row_generation");
  core.live = pointer<bool>(s, "live");
  core.directory = {row_of.ptr(), reinterpret_cast<PyObject **>(req_ids), free.ptr()};
  core.sampling = {
      .temperature = pointer<float>(c, "temperature"),
      .top_p = pointer<float>(c, "top_p"),
      .min_p = pointer<float>(c, "min_p"),
      .presence_penalty = pointer<float>(c, "presence_penalty"),
      .frequency_penalty = pointer<float>(c, "frequency_penalty"),
      .repetition_penalty = pointer<float>(c, "repetition_penalty"),
      .top_k = pointer<int32_t>(c, "top_k"),
      .min_tokens = pointer<int32_t>(c, "min_tokens"),
      .num_logprobs = pointer<int32_t>(c, "num_logprobs"),
      .num_prompt_logprobs = pointer<int32_t>(c, "num_prompt_logprobs"),
      .needs = pointer<int32_t>(c, "needs"),
      .seed = pointer<int64_t>(c, "seed"),
      .stamp = pointer<int64_t>(c, "stamp"),
      .is_set = pointer<bool>(c, "is_set"),
  };
  for (const auto [name, array] : c) {
    const auto column = nb::cast<AnyVector<>>(array);
    core.parameters[nb::cast<std::string>(name)] = {static_cast<uint8_t *>(column.data()), column.itemsize(), column.dtype().code};
  }
  for (const char *derived : {"needs", "stamp", "is_set"}) core.parameters.erase(derived);
  return core;
}

// Columns of sampling parameters, one value for each of `count` requests, as arrays of the very types they are kept in.
bool read_columns(const RowsCore &core, const nb::dict &sampling, size_t count, std::vector<Given> &out) {
  for (const auto [name, values] : sampling) {
    std::string text;
    AnyVector<nb::ro> from;
    if (!nb::try_cast(name, text) || !nb::try_cast(values, from, false) || from.shape(0) != count) return false;
    const auto to = core.parameters.find(text);
    if (to == core.parameters.end() || from.itemsize() != to->second.size || from.dtype().code != to->second.type_code) return false;
    out.push_back({to->second.data, static_cast<const uint8_t *>(from.data()), to->second.size});
  }
  return true;
}

void add_table(RowsCore &core, Matrix<int32_t> table, Vector<int32_t> num_blocks, Vector<int64_t> content_id) {
  core.tables.push_back({table.data(), num_blocks.data(), content_id.data(), int32_t(table.shape(1))});
}

// Columns of N requests; `rows` gets their rows. False, with nothing changed, for any that are not as they should be, among
// them sampling parameters of another type than their columns'. stamp: of the rows whose parameters are written.
bool admit(RowsCore &core, nb::sequence req_ids, Vector<int32_t> rows, Vector<const int32_t> tokens,
           Vector<const int32_t> num_tokens, std::optional<Vector<const int32_t>> prompt_len,
           std::optional<Vector<const int32_t>> num_computed, const std::vector<Vector<const int32_t>> &blocks,
           const std::vector<Vector<const int32_t>> &num_blocks, int64_t first_content_id, const std::optional<nb::dict> &sampling,
           int64_t stamp) {
  const auto count = rows.shape(0);
  const auto fits = [&](const auto &column) { return column.shape(0) == count; };
  const nb::object ids = nb::steal(PySequence_Fast(req_ids.ptr(), "req_ids is no sequence"));
  if (!ids.is_valid()) throw nb::python_error();
  if (size_t(PySequence_Fast_GET_SIZE(ids.ptr())) != count || !fits(num_tokens) || (prompt_len && !fits(*prompt_len)) ||
      (num_computed && !fits(*num_computed)) || blocks.size() != core.tables.size() || num_blocks.size() != blocks.size())
    return false;
  const std::vector<int32_t> none(num_computed ? 0 : count, 0);
  Arrivals a{
      .count = int64_t(count),
      .rows = rows.data(),
      .tokens = tokens.data(),
      .num_tokens = num_tokens.data(),
      .prompt_len = prompt_len ? prompt_len->data() : num_tokens.data(),
      .num_computed = num_computed ? num_computed->data() : none.data(),
      .total_tokens = int64_t(tokens.shape(0)),
  };
  for (size_t g = 0; g < blocks.size(); ++g) {
    if (!fits(num_blocks[g])) return false;
    a.blocks.push_back(blocks[g].data());
    a.num_blocks.push_back(num_blocks[g].data());
    a.total_blocks.push_back(int64_t(blocks[g].shape(0)));
  }
  std::vector<Given> given;
  if (sampling && !read_columns(core, *sampling, count, given)) return false;
  if (!core.directory.next_rows(a.count, rows.data()) ||
      !core.admit(a, PySequence_Fast_ITEMS(ids.ptr()), first_content_id))
    return false;
  if (sampling) core.set_sampling(a.rows, a.count, given, stamp);
  return true;
}

StepCore make_core(const nb::dict &s, const nb::dict &b, int32_t vocab_size, int32_t max_num_draft_tokens,
                   bool context_parallel) {
  StepCore core;
  core.context_parallel = context_parallel;
  core.states = make_states(s, vocab_size, max_num_draft_tokens);
  core.buffers = {
      .max_num_batched_tokens = int64_t(nb::cast<Vector<int32_t>>(b["input_ids"]).shape(0)),
      .idx_mapping = pointer<int32_t>(b, "idx_mapping"),
      .num_scheduled_tokens = pointer<int32_t>(b, "num_scheduled_tokens"),
      .num_draft_tokens = pointer<int32_t>(b, "num_draft_tokens"),
      .num_computed_tokens = pointer<int32_t>(b, "num_computed_tokens"),
      .num_placeholders = pointer<int32_t>(b, "num_placeholders"),
      .is_prefilling = pointer<bool>(b, "is_prefilling"),
      .samples = pointer<bool>(b, "samples"),
      .row_generation = pointer<int64_t>(b, "row_generation"),
      .query_start_loc = pointer<int32_t>(b, "query_start_loc"),
      .seq_lens = pointer<int32_t>(b, "seq_lens"),
      .dcp_local_seq_lens = pointer<int32_t>(b, "dcp_local_seq_lens"),
      .cu_num_logits = pointer<int32_t>(b, "cu_num_logits"),
      .cu_num_draft_tokens = pointer<int32_t>(b, "cu_num_draft_tokens"),
      .req_indices = pointer<int32_t>(b, "req_indices"),
      .input_ids = pointer<int32_t>(b, "input_ids"),
      .expanded_idx_mapping = pointer<int32_t>(b, "expanded_idx_mapping"),
      .expanded_local_pos = pointer<int32_t>(b, "expanded_local_pos"),
      .draft_token_ids = pointer<int32_t>(b, "draft_token_ids"),
      .positions = pointer<int64_t>(b, "positions"),
      .logits_indices = pointer<int64_t>(b, "logits_indices"),
      .target_logits_indices = pointer<int64_t>(b, "target_logits_indices"),
      .bonus_logits_indices = pointer<int64_t>(b, "bonus_logits_indices"),
      .written = pointer<int64_t>(b, "written"),
  };
  return core;
}

void add_group(StepCore &core, Matrix<int32_t> table, Vector<int32_t> num_blocks, Vector<int64_t> content_id,
               Matrix<int32_t> gathered, Vector<int32_t> gathered_written, Vector<int32_t> gathered_nulled,
               Vector<int64_t> gathered_content, Vector<int64_t> slot_mapping, int32_t block_size,
               int32_t sliding_window, int32_t cp_size, int32_t cp_rank, int32_t cp_interleave, bool recurrent) {
  core.groups.push_back({
      .table = table.data(),
      .num_blocks = num_blocks.data(),
      .content_id = content_id.data(),
      .gathered = gathered.data(),
      .gathered_written = gathered_written.data(),
      .gathered_nulled = gathered_nulled.data(),
      .gathered_content = gathered_content.data(),
      .slot_mapping = slot_mapping.data(),
      .width = int32_t(table.shape(1)),
      .block_size = block_size,
      .sliding_window = sliding_window,
      .cp = {cp_size, cp_rank, cp_interleave},
      .recurrent = recurrent,
  });
  Group &g = core.groups.back();
  if (const auto p = uint32_t(g.tokens_per_block()); std::has_single_bit(p)) g.shift = std::countr_zero(p);
}

nb::object prepare(StepCore &core, const Plan &plan) {
  Scalars s;
  if (!core.prepare(plan, s)) return nb::none();
  return nb::make_tuple(s.num_reqs, s.num_tokens, s.num_reqs_padded, s.num_tokens_padded, s.num_logits,
                        s.num_draft_tokens, s.max_query_len, s.max_seq_len, s.attention_state, s.num_unresolved);
}

nb::object prepare_lists(StepCore &core, Vector<const int32_t> rows, Vector<const int32_t> num_scheduled,
                         Vector<const int32_t> num_drafts, Vector<const int32_t> draft_ids, int64_t pad_tokens,
                         int64_t pad_reqs, bool gather, std::optional<Vector<const bool>> inert) {
  return prepare(core, {
                           .rows = rows.data(),
                           .num_scheduled = num_scheduled.data(),
                           .num_drafts = num_drafts.shape(0) ? num_drafts.data() : nullptr,
                           .draft_ids = draft_ids.data(),
                           .num_reqs = int64_t(rows.shape(0)),
                           .num_draft_ids = int64_t(draft_ids.shape(0)),
                           .pad_tokens = pad_tokens,
                           .pad_reqs = pad_reqs,
                           .gather = gather,
                           .inert = inert ? inert->data() : nullptr,
                       });
}

// Drafts as [B, D] padded with −1. None for shapes and paddings that do not fit too: the caller says what is wrong.
nb::object prepare_arrays(StepCore &core, Vector<const int32_t> rows, Vector<const int32_t> num_scheduled,
                          std::optional<Matrix<const int32_t>> drafts, int64_t pad_tokens, int64_t pad_reqs,
                          bool gather) {
  const auto B = int64_t(rows.shape(0));
  if (int64_t(num_scheduled.shape(0)) != B || (drafts && int64_t(drafts->shape(0)) != B)) return nb::none();
  if (drafts && !core.flatten_drafts(drafts->data(), B, int64_t(drafts->shape(1)))) return nb::none();
  const bool any = drafts && !core.draft_ids.empty();
  return prepare(core, {
                           .rows = rows.data(),
                           .num_scheduled = num_scheduled.data(),
                           .num_drafts = any ? core.num_drafts.data() : nullptr,
                           .draft_ids = core.draft_ids.data(),
                           .num_reqs = B,
                           .num_draft_ids = any ? int64_t(core.draft_ids.size()) : 0,
                           .pad_tokens = pad_tokens,
                           .pad_reqs = pad_reqs,
                           .gather = gather,
                       });
}

}  // namespace

void bind_vllm(nb::module_ &m);

void bind_batch(nb::module_ &m) {
  nb::class_<RowsCore>(m, "RowsCore", "Bulk changes of the rows of one RequestStates.")
      .def("__init__",
           [](RowsCore *self, const nb::dict &states, const nb::dict &columns, const nb::dict &row_of, uintptr_t req_ids,
              const nb::list &free, int32_t vocab_size, int32_t max_num_draft_tokens) {
             new (self) RowsCore(make_rows(states, columns, row_of, req_ids, free, vocab_size, max_num_draft_tokens));
           }, nb::keep_alive<1, 4>(), nb::keep_alive<1, 6>())
      .def("add_table", &add_table)
      .def("admit", &admit, nb::arg(), nb::arg().noconvert(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
      .def("remove", [](RowsCore &c, Vector<const int32_t> rows, int64_t first_content_id, int64_t stamp) {
        return c.remove(rows.data(), int64_t(rows.shape(0)), first_content_id, stamp);
      })
      .def("renew_sampling", [](const RowsCore &c, Vector<const int32_t> rows, int64_t stamp) {
        c.set_sampling(rows.data(), int64_t(rows.shape(0)), {}, stamp);
      })
      .def("append", [](RowsCore &c, Vector<const int32_t> rows, Vector<const int32_t> blocks, int32_t group) {
        return rows.shape(0) == blocks.shape(0) && c.append(rows.data(), blocks.data(), int64_t(rows.shape(0)), group);
      });
  nb::class_<StepCore>(m, "StepCore", "Step preparation over the arrays of one RequestStates and one InputBuffers.")
      .def("__init__",
           [](StepCore *self, const nb::dict &states, const nb::dict &buffers, int32_t vocab_size,
              int32_t max_num_draft_tokens, bool context_parallel) {
             new (self) StepCore(make_core(states, buffers, vocab_size, max_num_draft_tokens, context_parallel));
           })
      .def("add_group", &add_group)
      .def("set_context_parallel", [](StepCore &c, int32_t size, int32_t rank, int32_t i) { c.cp = {size, rank, i}; })
      .def("prepare", &prepare_lists, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg().none())
      .def("prepare_arrays", &prepare_arrays, nb::arg().noconvert(), nb::arg().noconvert(),
           nb::arg().noconvert().none(), nb::arg(), nb::arg(), nb::arg())
      .def("advance", &StepCore::advance)
      .def("commit", [](StepCore &core, Vector<const int32_t> s, bool advanced) {
        return core.commit(s.data(), int64_t(s.shape(0)), 1, advanced);
      }, nb::arg().noconvert(), nb::arg())
      .def("commit", [](StepCore &core, Matrix<const int32_t> s, bool advanced) {
        return core.commit(s.data(), int64_t(s.shape(0)), int64_t(s.shape(1)), advanced);
      }, nb::arg().noconvert(), nb::arg());
  bind_vllm(m);
}

}  // namespace foreword
