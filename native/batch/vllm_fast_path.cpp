#include "batch/vllm_fast_path.h"

#include <algorithm>

#include "batch/python_values.h"
#include "batch/seeds.h"

namespace foreword {
namespace {

// The names read every step, interned once for the process like any constant of a module.
#define FOREWORD_NAMES(X)                                                                                        \
  X(finished_req_ids) X(preempted_req_ids) X(scheduled_new_reqs) X(scheduled_cached_reqs)                        \
  X(num_scheduled_tokens) X(scheduled_spec_decode_tokens)                                                        \
  X(req_ids) X(resumed_req_ids) X(new_token_ids) X(new_block_ids) X(num_computed_tokens) X(num_output_tokens)    \
  X(req_id) X(prompt_token_ids) X(prefill_token_ids) X(block_ids) X(prompt_embeds) X(mm_features)                \
  X(pooling_params) X(lora_request) X(sampling_params)
#define FOREWORD_INTERN(text) PyObject *text = PyUnicode_InternFromString(#text);
struct Names {
  FOREWORD_NAMES(FOREWORD_INTERN)
};
#undef FOREWORD_INTERN
#undef FOREWORD_NAMES
const Names &names() {
  static const Names n;
  return n;
}

// Append a list or tuple of ints to `out`.
bool append_ints(PyObject *o, std::vector<int32_t> &out) {
  if (!is_sequence(o)) return false;
  const size_t start = out.size();
  out.resize(start + length(o));
  return read_int32s(o, out.data() + start);
}

// Returns whether a value is missing, None, or a container without entries.
bool is_empty(PyObject *o) {
  if (!o || o == Py_None) return true;
  const Py_ssize_t size = PyObject_Size(o);
  if (size < 0) PyErr_Clear();
  return size == 0;
}
inline bool is_none(const Owned &o) { return !o || o.get() == Py_None; }

}  // namespace

// `find` of another string object, or out of order. Only of exact strings, as those of the directory are: comparing
// them runs no Python code, which could change what is being read.
int32_t VllmFastPath::search(PyObject *req_id, size_t &cursor) {
  if (!PyUnicode_CheckExact(req_id)) return -1;
  if (cursor < order_.size() && same_text(rows->directory.req_ids[order_[cursor]], req_id)) return order_[cursor++];
  PyObject *found = PyDict_GetItemWithError(rows->directory.row_of, req_id);
  int32_t row;
  if (!found || !as_int32(found, row)) {
    PyErr_Clear();
    return -1;
  }
  const size_t place = size_t(place_[row]);
  if (place < order_.size() && order_[place] == row) cursor = place + 1;
  return row;
}

// Records the rows of a plan that was read, for `find`.
void VllmFastPath::keep_order(int64_t num_reqs) {
  if (std::equal(order_.begin(), order_.end(), out_rows, out_rows + num_reqs)) return;
  order_.assign(out_rows, out_rows + num_reqs);
  for (size_t b = 0; b < order_.size(); ++b) place_[order_[b]] = int32_t(b);
}

// Rows and growth of every cached request, checked and copied; nothing is written. No Python code runs after the lists
// were counted, so borrowed references stay valid.
bool VllmFastPath::check_cached(PyObject *cached) {
  const Names &n = names();
  const States &s = rows->states;
  growth_.clear(), grown_.clear();
  const Owned ids = attribute(cached, n.req_ids);
  if (!ids || !PyList_CheckExact(ids.get())) return false;
  if (length(ids.get()) == 0) return true;
  const Owned resumed = attribute(cached, n.resumed_req_ids), pipeline = attribute(cached, n.new_token_ids),
              blocks = attribute(cached, n.new_block_ids), computed = attribute(cached, n.num_computed_tokens),
              outputs = attribute(cached, n.num_output_tokens);
  if (!is_empty(resumed.get()) || !is_empty(pipeline.get())) return false;
  const bool has_outputs = !is_empty(outputs.get());
  const Py_ssize_t count = length(ids.get());
  for (PyObject *list : {blocks.get(), computed.get(), has_outputs ? outputs.get() : ids.get()})
    if (!is_sequence(list) || length(list) != count) return false;
  ++call_;
  size_t cursor = 0;
  const Items id_items = items(ids.get()), block_items = items(blocks.get()), computed_items = items(computed.get());
  const Items output_items = has_outputs ? items(outputs.get()) : nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const int32_t row = find(at(id_items, i), cursor);
    int32_t c, made;
    if (row < 0 || seen_[row] == call_ || !as_int32(at(computed_items, i), c) || c < 0 || c > s.max_model_len)
      return false;
    seen_[row] = call_;
    if (has_outputs) {
      if (!as_int32(at(output_items, i), made)) return false;
      if (!rows->states.num_placeholders[row] && s.prompt_len[row] + made < s.num_tokens[row]) return false;
    }
    c = s.clamp_computed(row, c);
    PyObject *grown = at(block_items, i);
    if (grown == Py_None) {
      if (c != s.num_computed_tokens[row]) growth_.push_back({row, c, 0, false});
      continue;
    }
    if (!is_sequence(grown) || size_t(length(grown)) != rows->tables.size()) return false;
    const size_t first = grown_.size();
    grown_.resize(first + rows->tables.size());
    for (size_t g = 0; g < rows->tables.size(); ++g) {
      PyObject *list = item(grown, Py_ssize_t(g));
      const RowTable &t = rows->tables[g];
      const size_t start = grown_.size();
      if (!is_sequence(list) || !t.has_room(row, length(list)) || !append_ints(list, grown_)) return false;
      const int32_t added = int32_t(grown_.size() - start);
      if (!t.accepts(grown_.data() + start, added)) return false;
      grown_[first + g] = added;
    }
    growth_.push_back({row, c, first, true});
  }
  return true;
}

// No Python code runs meanwhile.
bool VllmFastPath::read_plan(PyObject *num_scheduled, PyObject *drafts, int64_t &num_draft_ids) {
  if (PyDict_Size(num_scheduled) > rows->states.max_num_reqs) return false;
  Py_ssize_t at = 0, draft_at = 0;
  PyObject *key, *value, *draft_key = nullptr, *draft_list = nullptr;
  int64_t b = 0, d = 0, used = 0;
  size_t cursor = 0;
  while (drafts && PyDict_Next(drafts, &draft_at, &draft_key, &draft_list))
    if (!PyUnicode_CheckExact(draft_key)) return false;  // comparing the keys runs no Python code then
  draft_at = 0, draft_key = nullptr;
  if (drafts) PyDict_Next(drafts, &draft_at, &draft_key, &draft_list);
  while (PyDict_Next(num_scheduled, &at, &key, &value)) {
    const int32_t row = find(key, cursor);
    if (row < 0 || !as_int32(value, out_counts[b])) return false;
    out_rows[b] = row;
    if (drafts) {
      PyObject *list = nullptr;
      if (draft_key == key) {  // drafts usually come in the order of the plan
        list = draft_list;
        if (!PyDict_Next(drafts, &draft_at, &draft_key, &draft_list)) draft_key = nullptr;
      } else {
        list = PyDict_GetItemWithError(drafts, key);
        if (!list && PyErr_Occurred()) {
          PyErr_Clear();
          return false;
        }
      }
      out_num_drafts[b] = 0;
      if (list) {
        if (!is_sequence(list) || d + length(list) > max_draft_ids) return false;
        for (Py_ssize_t k = 0; k < length(list); ++k)
          if (!as_int32(item(list, k), out_draft_ids[d + k])) return false;
        out_num_drafts[b] = int32_t(length(list));
        d += length(list);
        ++used;
      }
    }
    ++b;
  }
  num_draft_ids = d;
  keep_order(b);
  return !drafts || used == PyDict_Size(drafts);
}

int64_t VllmFastPath::apply(PyObject *output) {
  const Names &n = names();
  const Owned finished = attribute(output, n.finished_req_ids), preempted = attribute(output, n.preempted_req_ids),
              requests = attribute(output, n.scheduled_new_reqs), cached = attribute(output, n.scheduled_cached_reqs),
              num_scheduled = attribute(output, n.num_scheduled_tokens),
              drafts = attribute(output, n.scheduled_spec_decode_tokens);
  if (!is_busy_) special.clear();
  if (!finished || !requests || !cached || !num_scheduled || !drafts) return -1;
  if (!is_empty(finished.get()) && !finish(finished.get())) return -1;
  if (!is_empty(preempted.get()) || (!is_empty(requests.get()) && !admit(requests.get()))) return -2;
  const int64_t num_drafts = special.empty() ? step(cached.get(), num_scheduled.get(), drafts.get()) : -1;
  return num_drafts < 0 ? -3 : num_drafts;
}

int64_t VllmFastPath::step(PyObject *cached, PyObject *num_scheduled, PyObject *drafts) {
  const Turn turn(is_busy_);
  if (!turn.is_first || !PyDict_CheckExact(num_scheduled)) return -1;
  if (drafts == Py_None || (PyDict_CheckExact(drafts) && PyDict_Size(drafts) == 0)) drafts = nullptr;
  if (drafts && !PyDict_CheckExact(drafts)) return -1;
  seen_.resize(rows->states.max_num_reqs);
  place_.resize(rows->states.max_num_reqs);
  int64_t num_draft_ids = 0;
  if (!check_cached(cached) || !read_plan(num_scheduled, drafts, num_draft_ids)) {
    PyErr_Clear();
    return -1;
  }
  for (const Growth &grown : growth_) {
    rows->states.set_computed(grown.row, grown.computed);
    if (!grown.has_blocks) continue;
    const int32_t *added = grown_.data() + grown.first, *blocks = added + rows->tables.size();
    for (size_t g = 0; g < rows->tables.size(); ++g) {
      const RowTable &t = rows->tables[g];
      std::copy_n(blocks, added[g], t.table + int64_t(grown.row) * t.width + t.num_blocks[grown.row]);
      t.num_blocks[grown.row] += added[g];
      blocks += added[g];
    }
  }
  return num_draft_ids;
}

// One request's tokens into the row, which is free and so may be written, the rest into the columns.
bool VllmFastPath::read_request(PyObject *request, int32_t row) {
  const Names &n = names();
  if (!is_none(attribute(request, n.prompt_embeds)) || !is_none(attribute(request, n.pooling_params)) ||
      !is_none(attribute(request, n.lora_request)) || !is_empty(attribute(request, n.mm_features).get()))
    return false;
  const Owned prompt = attribute(request, n.prompt_token_ids), known = attribute(request, n.prefill_token_ids),
              blocks = attribute(request, n.block_ids), computed = attribute(request, n.num_computed_tokens);
  if (!is_sequence(prompt.get()) || !is_sequence(blocks.get())) return false;
  if (size_t(length(blocks.get())) != rows->tables.size()) return false;
  const bool longer = !is_none(known) && is_sequence(known.get()) && length(known.get()) > length(prompt.get());
  PyObject *tokens = longer ? known.get() : prompt.get();
  int32_t c;
  if (length(tokens) > rows->states.max_model_len || !computed || !as_int32(computed.get(), c)) return false;
  if (!read_int32s(tokens, rows->states.tokens_of(row))) return false;
  num_tokens_.push_back(int32_t(length(tokens)));
  total_tokens_ += length(tokens);
  prompt_len_.push_back(int32_t(length(prompt.get())));
  num_computed_.push_back(c);
  for (size_t g = 0; g < rows->tables.size(); ++g) {
    PyObject *list = item(blocks.get(), g);
    if (!append_ints(list, blocks_[g])) return false;
    num_blocks_[g].push_back(int32_t(length(list)));
  }
  return true;
}

// Write the parameters of a request that has none of the rare ones, with a seed from the number of its admission if it
// brings none. False, with nothing written, for another. `renew` has to follow.
bool VllmFastPath::plain_sampling(PyObject *params, int32_t row, int64_t admission) {
  parameters_.of(params);
  for (size_t rare = FIRST_RARE; rare < NUM_PARAMETERS; ++rare) {
    const Owned value = parameters_.get(rare);
    if (!value || (value.get() != Py_None && !(is_sequence(value.get()) && length(value.get()) == 0))) return false;
  }
  const auto number = [&](size_t parameter, double &out) {
    const Owned value = parameters_.get(parameter);
    if (!value) return false;
    out = PyFloat_AsDouble(value.get());
    if (out == -1.0 && PyErr_Occurred()) PyErr_Clear(), out = 2e9;  // not a number: not plain
    return out < 1e9;
  };
  double reals[NUM_REALS], top_k, min_tokens;
  for (size_t i = 0; i < NUM_REALS; ++i)
    if (!number(i, reals[i])) return false;
  if (!number(TOP_K, top_k) || !number(MIN_TOKENS, min_tokens) || min_tokens != 0) return false;
  const Owned seed = parameters_.get(SEED), logprobs = parameters_.get(LOGPROBS);
  if (!seed || !logprobs) return false;
  int64_t seed_value = derived_seed(rows->sampling.counters[BASE_SEED], admission);
  if (seed.get() != Py_None) {
    int overflow = 0;
    if (!PyLong_CheckExact(seed.get())) return false;
    seed_value = PyLong_AsLongLongAndOverflow(seed.get(), &overflow);
    if (overflow) return false;
  }
  const int32_t vocab = rows->states.vocab_size;
  int32_t alternatives = -1;
  if (logprobs.get() != Py_None) {
    if (!as_int32(logprobs.get(), alternatives)) return false;
    if (alternatives == -1) alternatives = vocab;
  }
  for (size_t i = 0; i < NUM_REALS; ++i) reals_[i][row] = float(reals[i]);
  top_k_[row] = top_k > 0 && top_k < vocab ? int32_t(top_k) : 0;
  seed_[row] = seed_value;
  num_logprobs_[row] = alternatives;
  return true;
}

bool VllmFastPath::admit(PyObject *requests) {
  const Turn turn(is_busy_);
  if (!turn.is_first || !PyList_CheckExact(requests) || !is_empty(observers_)) return false;
  special.clear();
  const Owned kept(PyList_AsTuple(requests));  // their attributes may be properties, whose code may change the list
  if (!kept) {
    PyErr_Clear();
    return false;
  }
  requests = kept.get();
  const int64_t count = length(requests);
  to_.resize(count);
  if (!rows->directory.next_rows(count, to_.data())) return false;
  total_tokens_ = 0;
  num_tokens_.clear(), prompt_len_.clear(), num_computed_.clear();
  blocks_.resize(rows->tables.size()), num_blocks_.resize(rows->tables.size());
  for (size_t g = 0; g < rows->tables.size(); ++g) blocks_[g].clear(), num_blocks_[g].clear();
  std::vector<Owned> owned;
  std::vector<PyObject *> ids;
  owned.reserve(size_t(count)), ids.reserve(size_t(count));
  for (int64_t i = 0; i < count; ++i) {
    PyObject *request = item(requests, i);
    owned.push_back(attribute(request, names().req_id));
    ids.push_back(owned.back().get());
    if (!ids.back() || !read_request(request, to_[i])) {
      PyErr_Clear();
      return false;
    }
  }
  std::vector<int32_t> still(to_.size());
  if (!rows->directory.next_rows(count, still.data()) || still != to_) return false;
  NewRows a{
      .count = count,
      .rows = to_.data(),
      .tokens = nullptr,
      .num_tokens = num_tokens_.data(),
      .prompt_len = prompt_len_.data(),
      .num_computed = num_computed_.data(),
      .total_tokens = total_tokens_,
  };
  for (size_t g = 0; g < rows->tables.size(); ++g) {
    a.blocks.push_back(blocks_[g].data());
    a.num_blocks.push_back(num_blocks_[g].data());
    a.total_blocks.push_back(int64_t(blocks_[g].size()));
  }
  const int64_t first = rows->sampling.counters[NUM_ADMISSIONS];
  if (!rows->admit(a, ids.data())) return false;
  written_.clear();
  for (int64_t i = 0; i < count; ++i) {
    const Owned params = attribute(item(requests, i), names().sampling_params);
    if (is_none(params)) continue;
    if (plain_sampling(params.get(), to_[i], first + i))
      written_.push_back(to_[i]);
    else
      special.push_back(int32_t(i));
  }
  if (!written_.empty()) rows->sampling.renew(written_.data(), int64_t(written_.size()));
  return true;
}

bool VllmFastPath::finish(PyObject *ids) {
  if (!is_empty(observers_) || !is_empty(adapter_of_) || !is_empty(with_extras_)) return false;
  const Owned list(PySequence_List(ids));
  if (!list || PyList_Sort(list.get())) {
    PyErr_Clear();
    return false;
  }
  std::vector<int32_t> freed;
  for (Py_ssize_t i = 0; i < length(list.get()); ++i) {
    PyObject *found = PyDict_GetItemWithError(rows->directory.row_of, item(list.get(), i));
    int32_t row;
    if (found && as_int32(found, row)) freed.push_back(row);
    else PyErr_Clear();
  }
  return rows->remove(freed.data(), int64_t(freed.size()));
}

}  // namespace foreword
