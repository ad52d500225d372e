// Reads a scheduler output of vLLM with calls of CPython's API, without a Python statement per request.
// foreword/batch/adapters/vllm.py has the meaning of every field, and handles every other case. This code handles the
// common step completely, or changes nothing.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>
#include <vector>

#include "batch/attributes.h"
#include "batch/rows.h"

namespace foreword {

class VllmFastPath {
 public:
  // The sampling parameters that are read. The first ones are real numbers; vLLM uses the names of the columns.
  enum Parameter {
    NUM_REALS = 6, TOP_K = NUM_REALS, MIN_TOKENS, SEED, LOGPROBS,
    FIRST_RARE, NUM_PARAMETERS = FIRST_RARE + 5,
  };
  static constexpr std::array<const char *, NUM_PARAMETERS> PARAMETERS{
      "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
      "top_k", "min_tokens", "seed", "logprobs",
      "logit_bias", "allowed_token_ids", "bad_words_token_ids", "structured_outputs", "prompt_logprobs"};

  // observers, adapter_of, with_extras: objects of the RequestStates. If one has entries, Python code has more to do.
  // They are not owned, because observers may hold the states, which hold this object.
  VllmFastPath(RowsCore &core, PyObject *observers, PyObject *adapter_of, PyObject *with_extras)
      : rows(&core), observers_(observers), adapter_of_(adapter_of), with_extras_(with_extras),
        top_k_(core.sampling.values<int32_t>("top_k")),
        num_logprobs_(core.sampling.values<int32_t>("num_logprobs")), seed_(core.sampling.values<int64_t>("seed")) {
    for (size_t i = 0; i < NUM_REALS; ++i) reals_[i] = core.sampling.values<float>(PARAMETERS[i]);
  }

  RowsCore *rows;
  int32_t *out_rows, *out_counts, *out_num_drafts, *out_draft_ids;  // a step's plan, [R] and [R · D]
  int64_t max_draft_ids;

  // Applies a SchedulerOutput with `finish`, `admit` and `step`. Returns the number of draft ids, or −1 − the number of
  // these three that were done, if the caller has to do the others. This is so if one of them reports it, if requests
  // are preempted, or if `special` is not empty.
  int64_t apply(PyObject *output);

  // Applies scheduled_cached_reqs, and reads num_scheduled_tokens and scheduled_spec_decode_tokens into the out arrays.
  // Returns the number of draft ids, or −1, with nothing changed, for cases that only the Python code handles.
  int64_t step(PyObject *cached, PyObject *num_scheduled, PyObject *drafts);

  // Admits a list of requests. Returns false, with nothing changed, if one of them is not plain, or if there are
  // observers.
  bool admit(PyObject *requests);
  std::vector<int32_t> special;  // indices of those admitted last whose sampling parameters the caller has to write

  // Frees the rows of the live ids, in ascending order of the ids. Returns false, with nothing changed, if the ids are
  // not different strings, or if there are observers, adapters or extras.
  bool finish(PyObject *ids);

 private:
  // Reading a property may run code that calls this object again. Such a nested call leaves everything to the Python
  // code.
  struct Turn {
    explicit Turn(bool &is_busy) : is_first(!is_busy), is_busy(is_busy) { is_busy = true; }
    ~Turn() { is_busy = !is_first; }
    const bool is_first;
    bool &is_busy;
  };
  struct Growth {
    int32_t row, computed;
    size_t first;  // the numbers of its new blocks per group are at grown_[first], the blocks behind them
    bool has_blocks;
  };
  // Returns the row of a request, −1 if it has none. Successive outputs have mostly the same requests in the same
  // order, so the request after the last one is tried first.
  int32_t find(PyObject *req_id, size_t &cursor) {
    if (cursor < order_.size() && rows->directory.req_ids[order_[cursor]] == req_id) return order_[cursor++];
    return search(req_id, cursor);
  }
  int32_t search(PyObject *req_id, size_t &cursor);
  void keep_order(int64_t num_reqs);
  bool check_cached(PyObject *cached);
  bool read_plan(PyObject *num_scheduled, PyObject *drafts, int64_t &num_draft_ids);
  bool read_request(PyObject *request, int32_t row);
  bool plain_sampling(PyObject *params, int32_t row, int64_t admission);

  bool is_busy_ = false;
  PyObject *observers_, *adapter_of_, *with_extras_;
  Attributes<NUM_PARAMETERS> parameters_{PARAMETERS};
  float *reals_[NUM_REALS];  // [R] each, as all of these
  int32_t *top_k_, *num_logprobs_;
  int64_t *seed_;

  std::vector<int64_t> seen_;  // [R] the call that last met a row among the cached: finds one named twice
  int64_t call_ = 0;
  std::vector<int32_t> order_;  // rows of the last plan
  std::vector<int32_t> place_;  // [R] where in it a row was
  std::vector<Growth> growth_;
  std::vector<int32_t> grown_;
  int64_t total_tokens_ = 0;
  std::vector<int32_t> to_, num_tokens_, prompt_len_, num_computed_, written_;
  std::vector<std::vector<int32_t>> blocks_, num_blocks_;
};

}  // namespace foreword
