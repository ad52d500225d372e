// The Python class SamplingRows.
#pragma once

#include <mutex>
#include <type_traits>

#include "kernels/bind_model.h"
#include "kernels/sampling.h"

namespace foreword::kernels {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
template <class T>
using Rows2 = nb::ndarray<const T, nb::ndim<2>, nb::device::cpu>;
template <class T>
using Out1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class Array>
void check_rows_contiguous(const Array &array, const char *name) {
  if (array.shape(1) > 1 && array.stride(1) != 1) {
    throw std::invalid_argument(std::string("a row of ") + name + " must be contiguous");
  }
}

// The offsets of log-probabilities ascend within the arrays, and a range has at most one entry per token and its own.
inline LogprobOutput checked_logprobs(const Array1<int64_t> &offsets, int rows, const Out1<int32_t> &ids,
                                      const Out1<double> &logprobs, const Out1<int32_t> &ranks, int vocab_size) {
  const int64_t *at = at_least(offsets, rows + 1, "offsets");
  for (int i = 0; i < rows; ++i) {
    if (at[i] < 0 || at[i + 1] < at[i] || at[i + 1] - at[i] > vocab_size + int64_t{1}) {
      throw std::invalid_argument("offsets do not ascend, or a range is larger than the vocabulary");
    }
  }
  const size_t size = size_t(at[rows]);
  check_size(ids.shape(0), size, "ids");
  check_size(logprobs.shape(0), size, "logprobs");
  check_size(ranks.shape(0), size, "ranks");
  return {at, ids.data(), logprobs.data(), ranks.data()};
}

// Calls f(isa, pool, scratch) without the interpreter lock, with scratch memory for each thread: those of the model, or
// the calling one, whose memory is `own`.
template <class Bytes, class F>
void with_threads(CpuModel *model, Buffer<uint8_t> &own, Bytes &&bytes_of, F &&f) {
  const Isa &isa = model ? model->isa() : choose_isa("");
  const size_t bytes = bytes_of(isa);
  if (model) {
    const size_t total = product(bytes, size_t(model->num_threads()));
    return model->alone([&] { f(isa, &model->pool(), model->sampling_scratch(total)); });
  }
  nb::gil_scoped_release release;
  f(isa, static_cast<ThreadPool *>(nullptr), own.reserve(bytes));
}

inline StepInput input_of(const StateRows &states, int64_t num_reqs, const Logits &logits) {
  StepInput in{};
  in.num_reqs = in_range(num_reqs, 0, kMostTokens, "the number of requests");
  in.num_logits = in_range(int64_t(logits.shape(0)), in.num_reqs, kMostTokens, "the number of logits");
  check_rows_contiguous(logits, "logits");
  in_range(int64_t(logits.shape(1)), states.vocab_size, states.vocab_size, "the width of logits");
  in.logits = logits.data();
  in.logits_stride = logits.stride(0);
  return in;
}

class PySamplingRows {
 public:
  // `columns`: the arrays of SamplingColumns by name. All arrays are kept and read in every call.
  PySamplingRows(const Arrays &columns, const Rows2<int32_t> &token_ids, const Array1<int32_t> &prompt_len,
                 const Array1<int32_t> &num_tokens, int vocab_size)
      : columns_(columns),
        token_ids_(token_ids),
        prompt_len_(prompt_len),
        num_tokens_(num_tokens),
        rows_(states(columns, token_ids, prompt_len, num_tokens, vocab_size)) {}

  void set(int row, const std::optional<Array1<int32_t>> &allowed, const Array1<int32_t> &bias_ids,
           const Array1<float> &bias, const Array1<int32_t> &end_ids, const Array1<int32_t> &bad_words,
           const Array1<int32_t> &bad_word_ends, const Array1<int32_t> &dry_breakers) {
    TokenRules rules;
    if (allowed) rules.allowed = ids(*allowed, "allowed");
    rules.bias_ids = ids(bias_ids, "bias_ids");
    check_size(bias.shape(0), rules.bias_ids.size(), "bias");
    rules.bias.assign(bias.data(), bias.data() + rules.bias_ids.size());
    rules.end_ids = ids(end_ids, "end_ids");
    rules.bad_words = ids(bad_words, "bad_words");
    rules.dry_breakers = ids(dry_breakers, "dry_breakers");
    for (size_t i = 0, begin = 0; i < bad_word_ends.shape(0); ++i) {
      const int end = in_range(bad_word_ends.data()[i], int64_t(begin) + 1, int64_t(rules.bad_words.size()),
                               "an end of bad_words");
      rules.bad_word_ends.push_back(end);
      begin = size_t(end);
    }
    const auto lock = exclusive();
    rows_.set(in_range(row, 0, rows_.states().num_rows - 1, "row"), std::move(rules));
  }

  void forget(int row) {
    const auto lock = exclusive();
    rows_.forget(in_range(row, 0, rows_.states().num_rows - 1, "row"));
  }

  void change(const Logits &logits, const Array1<int32_t> &rows, const Array1<int32_t> &starts,
              const Array1<int32_t> &cu_num_logits, const Array1<int64_t> &positions, const Array1<int32_t> &drafts,
              const std::optional<Rows2<bool>> &is_embedding, const std::optional<Array1<int32_t>> &masked,
              const std::optional<Array2<int32_t>> &words, const Array1<int32_t> &changed_rows,
              const Out2<float> &changed, CpuModel *model) {
    const StepInput in = input(logits, rows, starts, cu_num_logits, positions, drafts, is_embedding, masked, words,
                               changed_rows, changed);
    const auto lock = exclusive();
    with_threads(model, scratch_, [](const Isa &) { return size_t{1}; },
                 [&](const Isa &isa, ThreadPool *pool, uint8_t *) { rows_.change(in, isa, pool); });
  }

  void sample(const Logits &logits, const Array1<int32_t> &rows, const Array1<int32_t> &starts,
              const Array1<int32_t> &cu_num_logits, const Array1<int64_t> &positions, const Array1<int32_t> &drafts,
              const std::optional<Rows2<bool>> &is_embedding, const std::optional<Array1<int32_t>> &masked,
              const std::optional<Array2<int32_t>> &words, const std::optional<Array1<int32_t>> &changed_rows,
              const std::optional<Out2<float>> &changed, const Out2<int32_t> &out,
              const std::optional<Array1<int64_t>> &offsets, const std::optional<Out1<int32_t>> &ids,
              const std::optional<Out1<double>> &logprobs, const std::optional<Out1<int32_t>> &ranks,
              CpuModel *model) {
    const StepInput in = input(logits, rows, starts, cu_num_logits, positions, drafts, is_embedding, masked, words,
                               changed_rows, changed);
    LogprobOutput wanted{};
    if (offsets) {
      if (!ids || !logprobs || !ranks) throw std::invalid_argument("offsets need ids, logprobs and ranks");
      wanted = checked_logprobs(*offsets, in.num_logits, *ids, *logprobs, *ranks, rows_.states().vocab_size);
    }
    run(in, out, wanted, model);
  }

  const StateRows &states() const { return rows_.states(); }

  // Samples a checked input.
  void run(StepInput in, const Out2<int32_t> &out, const LogprobOutput &wanted, CpuModel *model) {
    check_size(out.shape(0), size_t(in.num_reqs), "out");
    const int width = in_range(int64_t(out.shape(1)), 0, kMostTokens, "the width of out");
    int most = 0;  // rows of logits of a request; `check` has seen that each has one
    for (int b = 0; b < in.num_reqs; ++b) most = std::max(most, in.cu_num_logits[b + 1] - in.cu_num_logits[b]);
    in_range(most, 0, width, "the rows of logits of a request");
    const auto lock = exclusive();
    with_threads(model, scratch_, [&](const Isa &isa) { return rows_.scratch_bytes(isa); },
                 [&](const Isa &isa, ThreadPool *pool, uint8_t *scratch) {
                   if (model) in.known = model->known(in.logits, in.num_logits);
                   rows_.sample(in, isa, pool, scratch, width, out.data(), wanted);
                 });
  }

  // Throws std::invalid_argument unless the input may be sampled.
  void check(const StepInput &in) const { rows_.check(in); }

 private:
  static StateRows states(const nb::dict &columns, const Rows2<int32_t> &token_ids, const Array1<int32_t> &prompt_len,
                          const Array1<int32_t> &num_tokens, int vocab_size) {
    const int rows = in_range(int64_t(token_ids.shape(0)), 0, INT32_MAX, "the rows of token_ids");
    check_rows_contiguous(token_ids, "token_ids");
#define FOREWORD_BIND(type, name) .name = column<type>(columns, #name, rows),
    return {.num_rows = rows,
            .vocab_size = in_range(vocab_size, 1, kMostSize, "vocab_size"),
            .max_len = in_range(int64_t(token_ids.shape(1)), 0, INT32_MAX, "the columns of token_ids"),
            .parameters = {FOREWORD_PARAMETERS(FOREWORD_BIND)},
            .token_ids = token_ids.data(),
            .prompt_len = at_least(prompt_len, rows, "prompt_len"),
            .num_tokens = at_least(num_tokens, rows, "num_tokens"),
            .token_ids_stride = token_ids.stride(0)};
#undef FOREWORD_BIND
  }

  template <class T>
  static const T *column(const nb::dict &columns, const char *name, int rows) {
    Array1<T> array;
    if (!columns.contains(name) || !nb::try_cast(columns[name], array, false)) {
      throw std::invalid_argument(std::string("the column ") + name + " is missing or of another type");
    }
    return at_least(array, rows, name);
  }

  std::vector<int32_t> ids(const Array1<int32_t> &given, const char *name) const {
    std::vector<int32_t> kept = copied(given);
    for (const int32_t id : kept) in_range(id, 0, rows_.states().vocab_size - 1, name);
    return kept;
  }

  StepInput input(const Logits &logits, const Array1<int32_t> &rows, const Array1<int32_t> &starts,
                  const Array1<int32_t> &cu_num_logits, const Array1<int64_t> &positions,
                  const Array1<int32_t> &drafts, const std::optional<Rows2<bool>> &is_embedding,
                  const std::optional<Array1<int32_t>> &masked, const std::optional<Array2<int32_t>> &words,
                  const std::optional<Array1<int32_t>> &changed_rows,
                  const std::optional<Out2<float>> &changed) const {
    const StateRows &s = rows_.states();
    StepInput in = input_of(s, int64_t(rows.shape(0)), logits);
    in.rows = rows.data();
    in.starts = at_least(starts, in.num_reqs, "starts");
    in.cu_num_logits = at_least(cu_num_logits, in.num_reqs + 1, "cu_num_logits");
    in.positions = at_least(positions, in.num_logits, "positions");
    in.drafts = at_least(drafts, in.num_logits - in.num_reqs, "drafts");
    if (is_embedding) {
      check_rows_contiguous(*is_embedding, "is_embedding");
      check_size(is_embedding->shape(0), size_t(s.num_rows), "is_embedding");
      check_size(is_embedding->shape(1), size_t(s.max_len), "a row of is_embedding");
      in.is_embedding = is_embedding->data();
      in.is_embedding_stride = is_embedding->stride(0);
    }
    if (masked && words) {
      in.num_masked = in_range(int64_t(masked->shape(0)), 0, in.num_logits, "the number of masks");
      in.masked = masked->data();
      in.words = shaped(*words, in.num_masked, (s.vocab_size + 31) / 32, "words");
    }
    if (changed_rows && changed) {
      in.num_changed = in_range(int64_t(changed_rows->shape(0)), 0, in.num_logits, "the number of changed rows");
      check_size(changed->shape(0), size_t(in.num_changed), "changed");
      in_range(int64_t(changed->shape(1)), s.vocab_size, s.vocab_size, "the width of changed");
      in.changed_rows = changed_rows->data();
      in.changed = changed->data();
    }
    rows_.check(in);
    return in;
  }

  // Throws std::runtime_error if another thread is in a call.
  std::unique_lock<std::mutex> exclusive() {
    std::unique_lock<std::mutex> lock(in_use_, std::try_to_lock);
    if (!lock) throw std::runtime_error("another thread is sampling from these rows: they serve one call at a time");
    return lock;
  }

  const nb::object columns_;
  const Rows2<int32_t> token_ids_;
  const Array1<int32_t> prompt_len_, num_tokens_;
  SamplingRows rows_;
  Buffer<uint8_t> scratch_;
  std::mutex in_use_;
};

// The buffers of steps, for steps without masks, custom processors, log-probabilities and embeddings: an array that is
// passed to a function costs as much as the draw of a row.
struct PySamplingBuffers {
  PySamplingRows *rows;
  const Array1<int32_t> idx_mapping, starts, cu_num_logits;
  const Array1<int64_t> positions, logits_indices;
  const Array1<int32_t> drafts;
  std::vector<int64_t> drawn = {};  // the positions that the tokens take

  // As SamplingRows.sample. True if a request has no token.
  bool sample(int num_reqs, const Logits &logits, const Out2<int32_t> &out, CpuModel *model) {
    StepInput in = input_of(rows->states(), num_reqs, logits);
    in.rows = at_least(idx_mapping, in.num_reqs, "idx_mapping");
    in.starts = at_least(starts, in.num_reqs, "starts");
    in.cu_num_logits = at_least(cu_num_logits, in.num_reqs + 1, "cu_num_logits");
    in.drafts = at_least(drafts, in.num_logits - in.num_reqs, "drafts");
    const int64_t *at = at_least(logits_indices, in.num_logits, "logits_indices");
    drawn.resize(size_t(in.num_logits));
    const int64_t last = int64_t(positions.shape(0)) - 1;
    for (int i = 0; i < in.num_logits; ++i) {
      drawn[size_t(i)] = positions.data()[in_range(at[i], 0, last, "an index of logits_indices")] + 1;
    }
    in.positions = drawn.data();
    rows->check(in);
    rows->run(in, out, {}, model);
    bool is_missing = false;
    for (int b = 0; b < in.num_reqs; ++b) is_missing |= out.data()[size_t(b) * out.shape(1)] < 0;
    return is_missing;
  }
};

inline void read_logprobs(const Logits &logits, const Array1<int32_t> &tokens, const Array1<int64_t> &offsets,
                          const Out1<int32_t> &ids, const Out1<double> &logprobs, const Out1<int32_t> &ranks,
                          CpuModel *model) {
  const int count = in_range(int64_t(logits.shape(0)), 0, kMostTokens, "the number of logits");
  const int size = in_range(int64_t(logits.shape(1)), 1, kMostSize, "the width of logits");
  check_rows_contiguous(logits, "logits");
  const int32_t *chosen = at_least(tokens, count, "tokens");
  for (int i = 0; i < count; ++i) in_range(chosen[i], 0, size - 1, "a token");
  const LogprobOutput out = checked_logprobs(offsets, count, ids, logprobs, ranks, size);
  const auto bytes = [&](const Isa &isa) { return (isa.sample_scratch_bytes(size) + 63) / 64 * 64; };
  Buffer<uint8_t> own;
  with_threads(model, own, bytes, [&](const Isa &isa, ThreadPool *pool, uint8_t *scratch) {
    token_logprobs(logits.data(), logits.stride(0), count, size, chosen, isa, pool, scratch, bytes(isa), out);
  });
}

inline std::vector<std::tuple<std::string, std::string>> parameter_names() {
#define FOREWORD_NAME(type, name) \
  {#name, std::is_floating_point_v<type> ? "float32" : sizeof(type) == 4 ? "int32" : "int64"},
  return {FOREWORD_PARAMETERS(FOREWORD_NAME)};
#undef FOREWORD_NAME
}

inline void bind_sampling(nb::module_ &m) {
  using namespace nb::literals;
  nb::class_<PySamplingRows>(m, "SamplingRows",
                             "Rules and token counts by state row, and the sampling of steps.\n\n"
                             "Same methods and results as foreword.sampling.reference.ReferenceRows.")
      .def(nb::init<const Arrays &, const Rows2<int32_t> &, const Array1<int32_t> &, const Array1<int32_t> &, int>(),
           "columns"_a, "token_ids"_a.noconvert(), "prompt_len"_a.noconvert(), "num_tokens"_a.noconvert(),
           "vocab_size"_a)
      .def("set", &PySamplingRows::set, "row"_a, "allowed"_a.noconvert().none(), "bias_ids"_a.noconvert(),
           "bias"_a.noconvert(), "end_ids"_a.noconvert(), "bad_words"_a.noconvert(), "bad_word_ends"_a.noconvert(),
           "dry_breakers"_a.noconvert())
      .def("forget", &PySamplingRows::forget, "row"_a)
      .def("change", &PySamplingRows::change, "logits"_a.noconvert(), "rows"_a.noconvert(), "starts"_a.noconvert(),
           "cu_num_logits"_a.noconvert(), "positions"_a.noconvert(), "drafts"_a.noconvert(),
           "is_embedding"_a.noconvert().none(), "masked"_a.noconvert().none(), "words"_a.noconvert().none(),
           "changed_rows"_a.noconvert(), "changed"_a.noconvert(), "model"_a.none() = nb::none())
      .def("sample", &PySamplingRows::sample, "logits"_a.noconvert(), "rows"_a.noconvert(), "starts"_a.noconvert(),
           "cu_num_logits"_a.noconvert(), "positions"_a.noconvert(), "drafts"_a.noconvert(),
           "is_embedding"_a.noconvert().none(), "masked"_a.noconvert().none(), "words"_a.noconvert().none(),
           "changed_rows"_a.noconvert().none(), "changed"_a.noconvert().none(), "out"_a.noconvert(),
           "offsets"_a.noconvert().none(), "ids"_a.noconvert().none(), "logprobs"_a.noconvert().none(),
           "ranks"_a.noconvert().none(), "model"_a.none() = nb::none());
  nb::class_<PySamplingBuffers>(m, "SamplingBuffers",
                                "The buffers of steps that have neither masks, custom processors, log-probabilities "
                                "nor embeddings.")
      .def(nb::init<PySamplingRows *, const Array1<int32_t> &, const Array1<int32_t> &, const Array1<int32_t> &,
                    const Array1<int64_t> &, const Array1<int64_t> &, const Array1<int32_t> &>(),
           nb::keep_alive<1, 2>(), "rows"_a, "idx_mapping"_a.noconvert(), "starts"_a.noconvert(),
           "cu_num_logits"_a.noconvert(), "positions"_a.noconvert(), "logits_indices"_a.noconvert(),
           "drafts"_a.noconvert())
      .def("sample", &PySamplingBuffers::sample, "num_reqs"_a, "logits"_a.noconvert(), "out"_a.noconvert(),
           "model"_a.none() = nb::none());
  m.def("parameter_names", &parameter_names,
        "(name, dtype) of the columns of sampling parameters that are read.");
  m.def("token_logprobs", &read_logprobs, "logits"_a.noconvert(), "tokens"_a.noconvert(), "offsets"_a.noconvert(),
        "ids"_a.noconvert(), "logprobs"_a.noconvert(), "ranks"_a.noconvert(), "model"_a.none() = nb::none(),
        "For row i of logits [n, V], entries [offsets[i], offsets[i + 1]): tokens[i], then the most likely tokens.");
}

}  // namespace foreword::kernels
