#include "batch/bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "batch/packet.h"
#include "batch/python_values.h"
#include "batch/rows.h"
#include "batch/step.h"
#include "batch/vectorized.h"

namespace foreword {
namespace {

using AnyVector = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using AnyConstVector = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

States make_states(const nb::dict &arrays, int32_t vocab_size, int32_t max_num_draft_tokens) {
  const auto tokens = nb::cast<nb::ndarray<int32_t, nb::ndim<2>, nb::device::cpu>>(arrays["token_ids"], false);
  States s;
  s.max_num_reqs = int32_t(tokens.shape(0));
  s.max_model_len = int32_t(tokens.shape(1));
  s.vocab_size = vocab_size;
  s.max_num_draft_tokens = max_num_draft_tokens;
  s.token_ids = tokens.data();
  s.token_stride = tokens.stride(0);
  s.rewrites = pointer<int64_t>(arrays, "rewrites");
#define FOREWORD_BIND(type, name) s.name = pointer<type>(arrays, #name);
  FOREWORD_ROW_ARRAYS(FOREWORD_BIND)
#undef FOREWORD_BIND
  return s;
}

// Converts a default value to the bits of a column's type, and a flag rule to a function over a column.
struct ColumnType {
  nb::dlpack::dtype type;
  uint64_t (*bits)(double value);
  decltype(FlagRule::apply) (*rule)(std::string_view comparison);

  template <class T>
  static ColumnType of() {
    const auto bits = [](double value) {
      const T typed = T(value);
      uint64_t out = 0;
      std::memcpy(&out, &typed, sizeof(T));
      return out;
    };
    return {nb::dtype<T>(), bits, &FlagRule::function<T>};
  }
};

const ColumnType &column_type(nb::dlpack::dtype type) {
  static const ColumnType types[] = {ColumnType::of<float>(), ColumnType::of<int32_t>(), ColumnType::of<int64_t>()};
  for (const ColumnType &known : types)
    if (known.type == type) return known;
  throw std::invalid_argument("a sampling column must be float32, int32 or int64");
}

// `layout`: SamplingColumns.native_layout().
SamplingColumns make_sampling(const nb::dict &layout) {
  SamplingColumns sampling;
  sampling.stamp = pointer<int64_t>(layout, "stamp");
  sampling.counters = pointer<int64_t>(layout, "counters");
  sampling.is_set = pointer<bool>(layout, "is_set");
  sampling.params = nb::object(layout["params"]).ptr();
  const auto columns = nb::cast<nb::dict>(layout["columns"]);
  for (const auto [name, entry] : columns) {
    const auto [values, value] = nb::cast<std::pair<nb::object, double>>(entry);
    const auto array = nb::cast<AnyVector>(values, false);
    sampling.all.push_back({static_cast<uint8_t *>(array.data()), array.itemsize(), array.dtype().code,
                            column_type(array.dtype()).bits(value)});
    sampling.by_name[nb::cast<std::string>(name)] = sampling.all.back();
  }
  for (const nb::handle rule : nb::cast<nb::list>(layout["flag_rules"])) {
    const auto [flag, name, comparison, operand] =
        nb::cast<std::tuple<int32_t, std::string, std::string, double>>(rule);
    const auto array = nb::cast<AnyVector>(columns[name.c_str()][nb::int_(0)], false);
    const auto apply = column_type(array.dtype()).rule(comparison);
    if (!apply) throw std::invalid_argument("unknown comparison in a flag rule: " + comparison);
    sampling.flag_rules.push_back({flag, array.data(), operand, apply});
  }
  sampling.needs = sampling.values<int32_t>("needs");
  sampling.by_name.erase("needs");
  return sampling;
}

// `req_ids`: the address of the states' object array, which has no buffer of its own.
void init_rows(RowsCore *self, const Arrays &arrays, const Objects &sampling, const Integers &row_of,
               uintptr_t req_ids, const nb::typed<nb::list, int> &free, int32_t vocab_size,
               int32_t max_num_draft_tokens) {
  RowsCore &core = *new (self) RowsCore;
  core.states = make_states(arrays, vocab_size, max_num_draft_tokens);
  core.directory = {row_of.ptr(), reinterpret_cast<PyObject **>(req_ids), free.ptr()};
  core.sampling = make_sampling(sampling);
  core.next_content_id = pointer<int64_t>(arrays, "next_content_id");
}

// Columns of sampling parameters: one value for each of `count` requests, as arrays of the types in which they are
// stored. The values are copied, because they may be the columns themselves.
bool read_columns(const RowsCore &core, const nb::dict &sampling, size_t count, std::vector<ColumnWrite> &out) {
  for (const auto [name, values] : sampling) {
    std::string text;
    AnyConstVector from;
    if (!nb::try_cast(name, text) || !nb::try_cast(values, from, false) || from.shape(0) != count) return false;
    const auto to = core.sampling.by_name.find(text);
    if (to == core.sampling.by_name.end() || from.itemsize() != to->second.size ||
        from.dtype().code != to->second.type_code)
      return false;
    const auto *bytes = static_cast<const uint8_t *>(from.data());
    out.push_back({to->second.data, {bytes, bytes + count * to->second.size}, to->second.size});
  }
  return true;
}

void add_table(RowsCore &core, Matrix<int32_t> table, Vector<int32_t> num_blocks, Vector<int64_t> content_id,
               Vector<bool> holds_null, int32_t tokens_per_block, int32_t null_block) {
  core.tables.push_back({table.data(), num_blocks.data(), content_id.data(), holds_null.data(),
                         int32_t(table.shape(1)), tokens_per_block, null_block});
}

// Returns false, with nothing changed, for arrays of other types or shapes, and for blocks that break a rule.
bool append(RowsCore &core, nb::handle to_rows, nb::handle block_ids, int32_t group) {
  Ints rows, blocks;
  return rows.read(to_rows) && blocks.read(block_ids) && rows.ndim == 1 && blocks.ndim == 1 &&
         rows.size == blocks.size && core.append(rows.data, blocks.data, rows.size, group);
}

// A copy of an array that is read several times, because other threads may write to NumPy's arrays meanwhile. It reuses
// the memory of earlier copies.
const int32_t *copied(std::vector<int32_t> &to, const int32_t *from, int64_t count) {
  to.assign(from, from + count);
  return to.data();
}

// Admits N requests, given as columns, and writes their rows to `rows`. Returns false, with nothing changed, for values
// of other types or shapes, and for requests that break a rule.
bool admit(RowsCore &core, nb::handle req_ids, Vector<int32_t> rows, nb::handle tokens, nb::handle num_tokens,
           nb::handle prompt_len, nb::handle num_computed, nb::handle blocks, nb::handle num_blocks,
           nb::handle sampling) {
  using Column = Vector<const int32_t>;
  const auto count = rows.shape(0);
  const auto fits = [&](const auto &column) { return column.shape(0) == count; };
  Column all_tokens, known;
  std::optional<Column> prompts, computed;
  std::vector<Column> block_ids, held;
  std::optional<nb::dict> parameters;
  if (!nb::try_cast(tokens, all_tokens) || !nb::try_cast(num_tokens, known) || !nb::try_cast(prompt_len, prompts) ||
      !nb::try_cast(num_computed, computed) || !nb::try_cast(blocks, block_ids) || !nb::try_cast(num_blocks, held) ||
      !nb::try_cast(sampling, parameters) || !PySequence_Check(req_ids.ptr()))
    return false;
  // A new tuple, because reading the columns may run code that changes a list.
  const nb::object ids = nb::steal(PySequence_Tuple(req_ids.ptr()));
  if (!ids.is_valid()) throw nb::python_error();
  if (size_t(length(ids.ptr())) != count || !fits(known) || (prompts && !fits(*prompts)) ||
      (computed && !fits(*computed)) || block_ids.size() != core.tables.size() || held.size() != block_ids.size())
    return false;
  const std::vector<int32_t> none(computed ? 0 : count, 0);
  std::vector<int32_t> to(count);
  std::vector<std::vector<int32_t>> copies;
  const auto keep = [&](const Column &column) {
    copies.emplace_back();
    return copied(copies.back(), column.data(), int64_t(column.shape(0)));
  };
  const int32_t *lengths = keep(known);
  NewRows a{
      .count = int64_t(count),
      .rows = to.data(),
      .tokens = all_tokens.data(),
      .num_tokens = lengths,
      .prompt_len = prompts ? keep(*prompts) : lengths,
      .num_computed = computed ? keep(*computed) : none.data(),
      .total_tokens = int64_t(all_tokens.shape(0)),
  };
  for (size_t g = 0; g < block_ids.size(); ++g) {
    if (!fits(held[g])) return false;
    a.blocks.push_back(keep(block_ids[g]));
    a.num_blocks.push_back(keep(held[g]));
    a.total_blocks.push_back(int64_t(block_ids[g].shape(0)));
  }
  std::vector<ColumnWrite> writes;
  if (parameters && !read_columns(core, *parameters, count, writes)) return false;
  std::vector<PyObject *> names(count);
  for (size_t i = 0; i < count; ++i) names[i] = item(ids.ptr(), Py_ssize_t(i));
  if (!core.directory.next_rows(a.count, to.data()) || !core.admit(a, names.data())) return false;
  std::copy(to.begin(), to.end(), rows.data());
  if (parameters) {
    core.set_sampling(a.rows, a.count, writes);
    if (parameters->contains("temperature") && !parameters->contains("seed")) core.derive_seeds(a.rows, a.count);
  }
  return true;
}

Buffers make_buffers(const nb::dict &arrays) {
  Buffers buffers;
  buffers.max_num_batched_tokens = int64_t(nb::cast<Vector<int32_t>>(arrays["input_ids"], false).shape(0));
#define FOREWORD_BIND(type, name) buffers.name = pointer<type>(arrays, #name);
  FOREWORD_STEP_ARRAYS(FOREWORD_BIND)
#undef FOREWORD_BIND
  return buffers;
}

// Steps' scalars as instances of a NamedTuple. One that only this object holds is used again: making another takes
// longer than the step of one request spends on all of its tensors. Python 3.14 keeps the hash of a tuple: none is
// made.
class StepScalars {
 public:
  explicit StepScalars(nb::object type) : type_(std::move(type)) {}

  nb::object of(const int64_t *values) {
    for (Kept &kept : kept_)
      if (kept.scalars.is_valid() && Py_REFCNT(kept.scalars.ptr()) == 1 && Py_Version < 0x030E0000)
        return write(kept, values);
    Kept &kept = kept_[next_++ % 2];
    auto *type = reinterpret_cast<PyTypeObject *>(type_.ptr());
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
    kept.scalars = nb::steal(allocate(type, COUNT));  // as tuple.__new__(Scalars, values) does, without that tuple
    if (!kept.scalars.is_valid()) nb::raise_python_error();
    for (Py_ssize_t i = 0; i < COUNT; ++i) set(kept, i, values[i]);
    return kept.scalars;
  }

 private:
  static constexpr Py_ssize_t COUNT = sizeof(Scalars) / sizeof(int64_t);
  struct Kept {
    nb::object scalars;
    int64_t values[COUNT];
  };

  static void set(Kept &kept, Py_ssize_t i, int64_t value) {
    PyTuple_SetItem(kept.scalars.ptr(), i, PyLong_FromLongLong(value));
    kept.values[i] = value;
  }

  static nb::object write(Kept &kept, const int64_t *values) {
    for (Py_ssize_t i = 0; i < COUNT; ++i)
      if (kept.values[i] != values[i]) set(kept, i, values[i]);
    return kept.scalars;
  }

  nb::object type_;
  Kept kept_[2];  // for the step that a caller still holds, and for the one before it
  size_t next_ = 0;
};

// A core, and the scalars that it returns for a step.
struct PyStepCore : StepCore {
  StepScalars scalars;
  std::vector<int32_t> given_rows, given_counts, given_samples;
};

void init_step(PyStepCore *self, const Arrays &rows, const Arrays &arrays, int32_t vocab_size,
               int32_t max_num_draft_tokens, nb::object scalars_type) {
  PyStepCore &core = *new (self) PyStepCore{{}, StepScalars(std::move(scalars_type)), {}, {}, {}};
  core.states = make_states(rows, vocab_size, max_num_draft_tokens);
  core.buffers = make_buffers(arrays);
}

GroupBuffers make_group_buffers(const nb::dict &arrays) {
  GroupBuffers buffers;
#define FOREWORD_BIND(type, name) \
  buffers.name = nb::cast<nb::ndarray<type, nb::c_contig, nb::device::cpu>>(arrays[#name], false).data();
  FOREWORD_GROUP_STEP_ARRAYS(FOREWORD_BIND)
#undef FOREWORD_BIND
  return buffers;
}

// `table`: the arrays of the group's BlockTable; `step`: the step's arrays of the group; both by name.
void add_group(PyStepCore &core, const Arrays &table, const Arrays &step, int32_t block_size,
               int32_t tokens_per_block, int32_t sliding_window, std::tuple<int32_t, int32_t, int32_t> context_parallel,
               bool recurrent, int32_t null_block) {
  const auto blocks = nb::cast<Matrix<int32_t>>(table["table"], false);
  const auto [size, rank, interleave] = context_parallel;
  const auto power = uint32_t(tokens_per_block);
  core.groups.push_back({
      .table = blocks.data(),
      .num_blocks = pointer<int32_t>(table, "num_blocks"),
      .content_id = pointer<int64_t>(table, "content_id"),
      .holds_null = pointer<bool>(table, "holds_null"),
      .step = make_group_buffers(step),
      .width = int32_t(blocks.shape(1)),
      .block_size = block_size,
      .tokens_per_block = tokens_per_block,
      .sliding_window = sliding_window,
      .null_block = null_block,
      .cp = {size, rank, interleave},
      .recurrent = recurrent,
      .shift = std::has_single_bit(power) ? std::countr_zero(power) : -1,
  });
}

// `sampling`, `inputs`: the columns of a row's record, in order.
using ArrayList = nb::typed<nb::list, nb::ndarray<nb::numpy>>;

void init_packets(PacketCore *self, const Arrays &rows, Vector<const int64_t> stamp, const ArrayList &sampling,
                  const ArrayList &inputs, int64_t max_num_batched_tokens, int32_t records_at, int32_t record_size) {
  PacketCore &core = *new (self) PacketCore;
  core.states = make_states(rows, 0, 0);
  core.stamp = stamp.data();
  core.max_num_batched_tokens = max_num_batched_tokens;
  core.records_at = records_at;
  core.record_size = record_size;
  for (const ArrayList *list : {&sampling, &inputs}) {
    for (const nb::handle column : *list) {
      const auto array = nb::cast<AnyVector>(column, false);
      core.columns.push_back({static_cast<const int32_t *>(array.data()), int32_t(array.itemsize() / sizeof(int32_t))});
      if (list == &sampling) core.sampling_words += core.columns.back().words;
    }
    if (list == &sampling) core.num_sampling = core.columns.size();
  }
}

void add_device_table(PacketCore &core, Matrix<int32_t> table, Vector<int32_t> num_blocks, Vector<int64_t> content_id,
                      int32_t table_at, int32_t num_at) {
  core.tables.push_back({table.data(), num_blocks.data(), content_id.data(), int32_t(table.shape(1)), table_at, num_at,
                         {}, {}});
}

// Returns the step's scalars, or None for a plan that breaks a rule, which foreword.batch.prepare.plan.check names.
nb::object prepared(PyStepCore &core, const int32_t *rows, const int32_t *num_scheduled, size_t num_reqs,
                    const int32_t *num_drafts, const int32_t *draft_ids, size_t num_draft_ids, int64_t pad_tokens,
                    int64_t pad_reqs, bool gather, const bool *cancelled) {
  rows = copied(core.given_rows, rows, int64_t(num_reqs));
  num_scheduled = copied(core.given_counts, num_scheduled, int64_t(num_reqs));
  const Plan plan{rows, num_scheduled, num_draft_ids ? num_drafts : nullptr, draft_ids, int64_t(num_reqs),
                  int64_t(num_draft_ids), pad_tokens, pad_reqs, gather, cancelled};
  if (!core.prepare(plan)) return nb::none();
  return core.scalars.of(core.buffers.scalars);
}

// Also returns None for arrays of other lengths.
nb::object prepare_ragged(PyStepCore &core, Vector<const int32_t> rows, Vector<const int32_t> num_scheduled,
                          Vector<const int32_t> num_drafts, Vector<const int32_t> draft_ids, int64_t pad_tokens,
                          int64_t pad_reqs, bool gather, std::optional<Vector<const bool>> cancelled) {
  const size_t B = rows.shape(0);
  if (num_scheduled.shape(0) != B || num_drafts.shape(0) != B || (cancelled && cancelled->shape(0) != B))
    return nb::none();
  const int32_t *drafts = copied(core.num_drafts, num_drafts.data(), int64_t(B));
  const int32_t *ids = copied(core.draft_ids, draft_ids.data(), int64_t(draft_ids.shape(0)));
  return prepared(core, rows.data(), num_scheduled.data(), B, drafts, ids, draft_ids.shape(0), pad_tokens, pad_reqs,
                  gather, cancelled ? cancelled->data() : nullptr);
}

// Drafts are [B, D] padded with −1, or None. Also returns None for arrays of other types or shapes.
nb::object prepare(PyStepCore &core, nb::handle plan_rows, nb::handle plan_counts, nb::handle plan_drafts,
                   int64_t pad_tokens, int64_t pad_reqs, bool gather) {
  Ints rows, num_scheduled, drafts;
  const bool has_drafts = !plan_drafts.is_none();
  if (!rows.read(plan_rows) || !num_scheduled.read(plan_counts) || rows.ndim != 1 || num_scheduled.ndim != 1 ||
      num_scheduled.size != rows.size)
    return nb::none();
  if (has_drafts && (!drafts.read(plan_drafts) || drafts.ndim != 2 || drafts.size != rows.size ||
                     !core.flatten_drafts(drafts.data, drafts.size, drafts.width)))
    return nb::none();
  return prepared(core, rows.data, num_scheduled.data, size_t(rows.size), core.num_drafts.data(),
                  core.draft_ids.data(), has_drafts ? core.draft_ids.size() : 0, pad_tokens, pad_reqs, gather, nullptr);
}

// Commits samples [B] or [B, width] of the last prepared step. Returns false, with nothing changed, for arrays of other
// types or shapes, and for samples that break a rule.
bool commit(PyStepCore &core, nb::handle samples, bool advanced) {
  Ints sampled;
  if (!sampled.read(samples)) return false;
  const auto *step = reinterpret_cast<const Scalars *>(core.buffers.scalars);
  if (sampled.size != step->num_reqs) return false;
  const int32_t *kept = copied(core.given_samples, sampled.data, sampled.size * sampled.width);
  return core.commit(kept, sampled.size, sampled.width, advanced);
}

// Converts integers [n]; TypeError for any other object.
Ints int32s(nb::handle source, bool writable = false) {
  Ints values;
  if (!values.read(source, writable) || values.ndim != 1) throw nb::type_error("expected int32 [n] in C order");
  return values;
}

FOREWORD_VECTORIZED int32_t least(const int32_t *values, int64_t count) {
  int32_t found = std::numeric_limits<int32_t>::max();
  for (int64_t i = 0; i < count; ++i) found = std::min(found, values[i]);
  return found;
}

// Copies the first entries of `from` to all of `to`, and returns the smallest of them.
int32_t copy_samples(nb::handle from, nb::handle to) {
  const Ints source = int32s(from), target = int32s(to, true);
  if (source.size < target.size) throw std::invalid_argument("fewer entries than are to be copied");
  std::copy_n(source.data, target.size, target.writable_data());
  return least(source.data, target.size);
}

using Names = nb::typed<nb::list, nb::typed<nb::tuple, nb::str, nb::str>>;

// Returns (name, dtype) of every array that the cores take, for a test that compares them with the Python tables.
nb::typed<nb::dict, nb::str, Names> array_names() {
  nb::list rows, step, *list = &rows;
#define FOREWORD_NAME(type, name) \
  list->append(nb::make_tuple(#name, sizeof(type) == 1 ? "bool" : sizeof(type) == 4 ? "int32" : "int64"));
  FOREWORD_ROW_ARRAYS(FOREWORD_NAME)
  list = &step;
  FOREWORD_STEP_ARRAYS(FOREWORD_NAME)
  FOREWORD_GROUP_STEP_ARRAYS(FOREWORD_NAME)
#undef FOREWORD_NAME
  nb::dict out;
  out["rows"] = rows;
  out["step"] = step;
  return out;
}

}  // namespace

void bind_drafts(nb::module_ &m);
void bind_lookup(nb::module_ &m);
void bind_logits(nb::module_ &m);
void bind_noise(nb::module_ &m);
void bind_sampling(nb::module_ &m);
void bind_vllm(nb::module_ &m);

void bind_batch(nb::module_ &m) {
  using namespace nb::literals;
  m.def("array_names", &array_names, "The arrays that the batch cores take: {'rows' | 'step': [(name, dtype)]}.");
  m.def("copy_samples", &copy_samples, nb::sig("def copy_samples(source: " PY_I32 ", to: " PY_I32 ", /) -> int"),
        "Copy the first entries of one array to all of another. Returns the smallest.");
  nb::class_<RowsCore>(m, "RowsCore", "Bulk changes of the rows of one RequestStates.")
      .def("__init__", &init_rows, "states"_a, "sampling"_a, "row_of"_a, "req_ids"_a, "free"_a, "vocab_size"_a,
           "max_num_draft_tokens"_a, nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 6>())
      .def("add_table", &add_table, "table"_a.noconvert(), "num_blocks"_a.noconvert(),
           "content_id"_a.noconvert(), "holds_null"_a.noconvert(),
           "tokens_per_block"_a, "null_block"_a)
      .def("admit", &admit, kRead, kWritten, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(),
           nb::arg(), nb::arg(), nb::arg().none(),
           nb::sig("def admit(self, req_ids: collections.abc.Sequence[str], rows: " PY_I32 ", tokens: " PY_I32
                   ", num_tokens: " PY_I32 ", prompt_len: " PY_I32 " | None, num_computed: " PY_I32
                   " | None, blocks: collections.abc.Sequence[" PY_I32 "], num_blocks: collections.abc.Sequence[" PY_I32
                   "], sampling: collections.abc.Mapping[str, " PY_ARRAY "] | None, /) -> bool"))
      .def("remove",
           [](RowsCore &c, Vector<const int32_t> rows) {
             const std::vector<int32_t> kept(rows.data(), rows.data() + rows.shape(0));
             return c.remove(kept.data(), int64_t(kept.size()));
           },
           nb::sig("def remove(self, rows: " PY_I32 ", /) -> bool"))
      .def("renew_sampling",
           [](const RowsCore &c, Vector<const int32_t> rows) {
             const std::vector<int32_t> kept(rows.data(), rows.data() + rows.shape(0));
             for (const int32_t row : kept)
               if (row < 0 || row >= c.states.max_num_reqs) throw std::invalid_argument("not a row");
             c.set_sampling(kept.data(), int64_t(kept.size()), {});
           },
           nb::sig("def renew_sampling(self, rows: " PY_I32 ", /) -> None"))
      .def("append", &append, nb::arg().none(), nb::arg().none(), nb::arg(),
           nb::sig("def append(self, rows: object, blocks: object, group: int, /) -> bool"));
  nb::class_<PyStepCore>(m, "StepCore", "Step preparation over the arrays of one RequestStates and one InputBuffers.")
      .def("__init__", &init_step, "rows"_a, "arrays"_a, "vocab_size"_a, "max_num_draft_tokens"_a, "scalars_type"_a)
      .def("add_group", &add_group, "table"_a, "step"_a, nb::kw_only(), "block_size"_a, "tokens_per_block"_a,
           "sliding_window"_a, "context_parallel"_a, "recurrent"_a, "null_block"_a)
      .def("set_context_parallel",
           [](PyStepCore &c, int32_t size, int32_t rank, int32_t interleave) {
             if (rank < 0 || rank >= size || interleave < 1) throw std::invalid_argument("no rank of context parallel");
             c.context_parallel = true;
             c.cp = {size, rank, interleave};
           },
           "size"_a, "rank"_a, "interleave"_a)
      .def("prepare", &prepare, nb::arg().none(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
           nb::sig("def prepare(self, rows: " PY_I32 ", num_scheduled: " PY_I32 ", drafts: object"
                   ", pad_tokens: int, pad_reqs: int, gather: bool, /) -> foreword.batch.step.layout.Scalars | None"))
      .def("prepare_ragged", &prepare_ragged, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg().none(),
           nb::sig("def prepare_ragged(self, rows: " PY_I32 ", num_scheduled: " PY_I32 ", num_drafts: " PY_I32
                   ", draft_ids: " PY_I32 ", pad_tokens: int, pad_reqs: int, gather: bool, cancelled: " PY_BOOLS
                   " | None, /) -> foreword.batch.step.layout.Scalars | None"))
      .def("advance",
           [](PyStepCore &c, int64_t num_reqs) {
             const int64_t most = reinterpret_cast<const Scalars *>(c.buffers.scalars)->num_reqs;
             if (num_reqs < 0 || num_reqs > most) throw std::invalid_argument("more requests than the step has");
             c.advance(num_reqs);
           },
           nb::sig("def advance(self, num_reqs: int, /) -> None"))
      .def("commit", &commit, nb::arg().none(), nb::arg(),
           nb::sig("def commit(self, sampled: object, advanced: bool, /) -> bool"));
  nb::class_<Buffers>(m, "StepBuffers", "The arrays of one InputBuffers.")
      .def("__init__", [](Buffers *self, const Arrays &arrays) { new (self) Buffers(make_buffers(arrays)); },
           "arrays"_a);
  nb::class_<PacketCore>(m, "PacketCore", "Steps as packets for a device that mirrors the rows of one RequestStates.")
      .def("__init__", &init_packets, "rows"_a, "stamp"_a.noconvert(), "sampling"_a, "inputs"_a,
           "max_num_batched_tokens"_a, "records_at"_a, "record_size"_a)
      .def("add_table", &add_device_table, "table"_a.noconvert(), "num_blocks"_a.noconvert(),
           "content_id"_a.noconvert(), "table_at"_a, "num_at"_a)
      .def("set_embeddings",
           [](PacketCore &core, Matrix<bool> is_embedding) { core.is_embedding = is_embedding.data(); },
           "is_embedding"_a.noconvert())
      .def("forget", &PacketCore::forget)
      .def_rw("follows_host", &PacketCore::follows_host)
      .def("generations", &PacketCore::generations)
      .def("pack",
           [](PacketCore &core, const Buffers &step, nb::handle packet) {
             const Ints out = int32s(packet, true);
             return core.pack(step, out.writable_data(), out.size);
           },
           nb::sig("def pack(self, step: StepBuffers, out: " PY_I32 ", /) -> int"));
  bind_drafts(m);
  bind_lookup(m);
  bind_logits(m);
  bind_noise(m);
  bind_sampling(m);
  bind_vllm(m);
}

}  // namespace foreword
