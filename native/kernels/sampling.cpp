#include "kernels/sampling.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace foreword::kernels {
namespace {

constexpr int64_t kLeastWork = 1 << 17;  // logits; fewer cost less than waking a thread

// Calls f(i, thread) for i in [0, count), each once. Throws std::bad_alloc if one did.
template <class F>
void for_each(int count, int64_t work, ThreadPool *pool, F &&f) {
  if (!pool || count <= 1 || work < kLeastWork) {
    for (int i = 0; i < count; ++i) f(i, 0);
    return;
  }
  std::atomic<int> next{0};
  std::atomic<bool> failed{false};
  const auto run = [&](int thread) {
    try {
      for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i, thread);
    } catch (const std::bad_alloc &) {
      failed = true;
    }
  };
  pool->run([&](int thread) { run(thread); });
  if (failed) throw std::bad_alloc();
}

// The index of `value` among ascending ones, or -1.
int index_of(const int32_t *values, int count, int32_t value) {
  const int32_t *at = std::lower_bound(values, values + count, value);
  return at != values + count && *at == value ? int(at - values) : -1;
}

[[noreturn]] void out_of_range(const char *name, int index, int64_t value) {
  throw std::invalid_argument(std::string(name) + "[" + std::to_string(index) + "] = " + std::to_string(value) +
                              " is out of range");
}

void check_ascending(const int32_t *rows, int count, int limit, const char *name) {
  for (int i = 0; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= limit || (i && rows[i] <= rows[i - 1])) out_of_range(name, i, rows[i]);
  }
}

int64_t num_logprobs(const LogprobOutput &out, int i) { return out.offsets ? out.offsets[i + 1] - out.offsets[i] : 0; }

// Writes the log-probabilities of the scanned row i of logits.
void write_logprobs(const LogprobOutput &out, int i, int32_t token, const Isa &isa, void *scratch) {
  const int64_t begin = out.offsets[i];
  isa.row_logprobs(token, int(num_logprobs(out, i)) - 1, out.ids + begin, out.logprobs + begin, out.ranks + begin,
                   scratch);
}

}  // namespace

// One request of a step, while its rows of logits are processed.
struct SamplingRows::Rows {
  Request *request;  // null: no rules
  int row, first, count;
  bool samples;  // false for a prompt chunk that is not the last: nothing changes its logits
  const int32_t *drafts;
  Parameters parameters;
  TokenText text;
  int num_outputs;
};

void SamplingRows::set(int row, TokenRules rules) {
  auto request = std::make_unique<Request>();
  request->rules = std::move(rules);
  requests_[size_t(row)] = std::move(request);
}

size_t SamplingRows::scratch_bytes(const Isa &isa) const {
  const size_t row = (size_t(states_.vocab_size) * sizeof(float) + 63) / 64 * 64;
  return row + (isa.sample_scratch_bytes(states_.vocab_size) + 63) / 64 * 64;
}

void SamplingRows::check(const StepInput &in) const {
  const StateRows &s = states_;
  for (int b = 0; b < in.num_reqs; ++b) {
    const int row = in.rows[b];
    if (row < 0 || row >= s.num_rows) out_of_range("rows", b, row);
    if (s.num_tokens[row] < 0 || s.num_tokens[row] > s.max_len) out_of_range("num_tokens", row, s.num_tokens[row]);
    if (s.prompt_len[row] < 0 || s.prompt_len[row] > s.num_tokens[row]) {
      out_of_range("prompt_len", row, s.prompt_len[row]);
    }
    const int begin = b ? in.cu_num_logits[b] : 0;
    if (in.cu_num_logits[b] != begin || in.cu_num_logits[b + 1] <= begin || in.cu_num_logits[b + 1] > in.num_logits) {
      out_of_range("cu_num_logits", b + 1, in.cu_num_logits[b + 1]);
    }
  }
  if (in.num_reqs ? in.cu_num_logits[in.num_reqs] != in.num_logits : in.num_logits != 0) {
    throw std::invalid_argument("cu_num_logits does not end at " + std::to_string(in.num_logits) +
                                ", the rows of logits");
  }
  check_ascending(in.masked, in.num_masked, in.num_logits, "logit_rows");
  check_ascending(in.changed_rows, in.num_changed, in.num_logits, "changed_rows");
}

// Brings the counts of request b up to its text. Positions that were computed hold the tokens that they held then, so
// only a count beyond the first position of this step may be of other tokens.
void SamplingRows::prepare(const StepInput &in, int b, RuleScratch &scratch, Rows &rows) {
  const StateRows &s = states_;
  const int row = in.rows[b], first = in.cu_num_logits[b], count = in.cu_num_logits[b + 1] - first;
  Request *request = requests_[size_t(row)].get();
  const int prompt_len = s.prompt_len[row], num_tokens = s.num_tokens[row];
  const bool samples = in.positions[first] >= num_tokens;
  rows.request = request;
  rows.row = row;
  rows.first = first;
  rows.count = count;
  rows.samples = samples;
  rows.drafts = in.drafts + (first - b);
  if (!request) return;
  rows.num_outputs = num_tokens - prompt_len;
  if (request->counted > std::max(in.starts[b], 0) || request->prompt_len != prompt_len) {
    request->counts.clear();
    request->counted = 0;
    request->prompt_len = prompt_len;
  }
  if (!samples) return;
  rows.parameters = s.parameters.of(row);
  const int32_t *tokens = s.token_ids + row * s.token_ids_stride;
  const bool *embedded = in.is_embedding ? in.is_embedding + row * in.is_embedding_stride : nullptr;
  if (embedded && !std::memchr(embedded, 1, size_t(prompt_len))) embedded = nullptr;
  if (has_penalties(rows.parameters) && request->counted < num_tokens) {
    request->counts.reserve(size_t(num_tokens - request->counted + count));
    for (int &i = request->counted; i < num_tokens; ++i) {
      if (i >= prompt_len) {
        request->counts.add_output(tokens[i], 1);
      } else if (!embedded || !embedded[i]) {
        request->counts.add_prompt(tokens[i]);
      }
    }
  } else if (has_penalties(rows.parameters)) {
    request->counts.reserve(size_t(count));
  }
  rows.text = {tokens, num_tokens, rows.drafts, 0};
  if (embedded) {  // the text is without positions that are embeddings
    scratch.prompted.clear();
    for (int i = 0; i < num_tokens; ++i) {
      if (i >= prompt_len || !embedded[i]) scratch.prompted.push_back(tokens[i]);
    }
    rows.text.known = scratch.prompted.data();
    rows.text.num_known = int(scratch.prompted.size());
  }
}

// Changes x, a copy of the request's j-th row of logits. The drafts before it are in the counts.
void SamplingRows::apply(const StepInput &in, const Rows &rows, int j, float *x, RuleScratch &scratch) const {
  const int vocab_size = states_.vocab_size;
  const int mask = index_of(in.masked, in.num_masked, rows.first + j);
  if (mask >= 0) apply_mask(in.words + size_t(mask) * size_t((vocab_size + 31) / 32), vocab_size, x);
  if (!rows.request) return;
  TokenText text = rows.text;
  text.num_drafts = j;
  apply_rules(rows.request->rules, rows.parameters, rows.request->counts, text, rows.num_outputs + j, vocab_size, x,
              scratch);
}

// Calls f(b, rows, j, thread) for the rows of logits of each request b in order, with the drafts before each in the
// counts, until it returns false. Not for a request with done(b).
template <class Done, class F>
void SamplingRows::for_each_row(const StepInput &in, ThreadPool *pool, Done &&done, F &&f) {
  scratch_.resize(size_t(pool ? pool->size() : 1));
  for_each(in.num_reqs, int64_t(in.num_logits) * states_.vocab_size, pool, [&](int b, int thread) {
    if (done(b)) return;
    Rows rows;
    prepare(in, b, scratch_[size_t(thread)], rows);
    const bool counts = rows.request && rows.samples && has_penalties(rows.parameters);
    int j = 0;
    while (f(b, rows, j, thread) && j + 1 < rows.count) {
      if (counts) rows.request->counts.add_output(rows.drafts[j], 1);
      ++j;
    }
    while (j-- > 0) {
      if (counts) rows.request->counts.add_output(rows.drafts[j], -1);
    }
  });
}

void SamplingRows::change(const StepInput &in, const Isa &isa, ThreadPool *pool) {
  for_each_row(in, pool, [](int) { return false; }, [&](int, const Rows &rows, int j, int thread) {
    const int at = index_of(in.changed_rows, in.num_changed, rows.first + j);
    if (at < 0) return true;
    float *x = in.changed + ptrdiff_t(at) * states_.vocab_size;
    const bool has_choice = isa.copy_logits(in.logits + (rows.first + j) * in.logits_stride, states_.vocab_size, x);
    if (has_choice && rows.samples) apply(in, rows, j, x, scratch_[size_t(thread)]);
    return true;
  });
}

void SamplingRows::sample(const StepInput &in, const Isa &isa, ThreadPool *pool, uint8_t *scratch, int width,
                          int32_t *out, const LogprobOutput &logprobs) {
  const StateRows &s = states_;
  const size_t bytes = scratch_bytes(isa), row_bytes = (size_t(s.vocab_size) * sizeof(float) + 63) / 64 * 64;
  std::fill(out, out + ptrdiff_t(in.num_reqs) * width, -1);
  const bool nothing_known = !in.known.greedy_tokens && !in.known.maxima;
  const bool may_be_plain = in.num_logits == in.num_reqs && !in.num_masked && !in.num_changed && !logprobs.offsets;
  // Draws the best token of a request without rules, in few instructions: most requests of large steps are like this.
  const auto draws_plainly = [&, is_plain = may_be_plain && nothing_known](int b) {
    const size_t row = size_t(in.rows[b]);
    if (!is_plain || requests_[row] || s.parameters.temperature[row] > 0.f) return false;
    out[ptrdiff_t(b) * width] = isa.greedy_token(in.logits + b * in.logits_stride, s.vocab_size);
    return true;
  };
  for_each_row(in, pool, draws_plainly, [&](int b, const Rows &rows, int j, int thread) {
    uint8_t *memory = scratch + bytes * size_t(thread);
    float *copy = reinterpret_cast<float *>(memory);
    void *search = memory + row_bytes;
    const int i = rows.first + j, row = rows.row;
    if (in.known.greedy_tokens && in.known.greedy_tokens[i] >= 0) {
      const int32_t token = out[ptrdiff_t(b) * width + j] = in.known.greedy_tokens[i];
      return j + 1 < rows.count && rows.drafts[j] == token;
    }
    const float *logits = in.logits + i * in.logits_stride, *x = logits;
    const float *maxima = in.known.maxima ? in.known.maxima + ptrdiff_t(i) * num_logit_blocks(s.vocab_size) : nullptr;
    if (const int at = index_of(in.changed_rows, in.num_changed, i); at >= 0) {
      x = in.changed + ptrdiff_t(at) * s.vocab_size;
    } else if (rows.samples && (rows.request || index_of(in.masked, in.num_masked, i) >= 0)) {
      if (!isa.copy_logits(logits, s.vocab_size, copy)) return false;
      apply(in, rows, j, copy, scratch_[size_t(thread)]);
      x = copy;
    }
    SamplingRow options{};
    if (s.parameters.temperature[row] > 0.f) options = {s.parameters.of(row), in.positions[i]};
    const bool has_logprobs = num_logprobs(logprobs, i) > 0;
    const bool is_changed = x != logits;
    if (!isa.scan_row(x, is_changed ? nullptr : maxima, s.vocab_size, options, has_logprobs && !is_changed, search)) {
      return false;
    }
    const int32_t token = isa.sample_row(options, search);
    out[ptrdiff_t(b) * width + j] = token;
    if (has_logprobs) {
      if (is_changed) isa.scan_row(logits, maxima, s.vocab_size, {}, true, search);
      write_logprobs(logprobs, i, token, isa, search);
    }
    return j + 1 < rows.count && rows.drafts[j] == token;
  });
}

void token_logprobs(const float *logits, ptrdiff_t stride, int count, int vocab_size, const int32_t *tokens,
                    const Isa &isa, ThreadPool *pool, uint8_t *scratch, size_t scratch_bytes,
                    const LogprobOutput &out) {
  for_each(count, int64_t(count) * vocab_size, pool, [&](int i, int thread) {
    if (num_logprobs(out, i) == 0) return;
    uint8_t *memory = scratch + scratch_bytes * size_t(thread);
    isa.scan_row(logits + i * stride, nullptr, vocab_size, {}, true, memory);
    write_logprobs(out, i, tokens[i], isa, memory);
  });
}

}  // namespace foreword::kernels
