// Sampling a step: from the rows of logits of its requests, drafts included, to the tokens to commit.
// foreword/sampling/reference.py defines the steps; sampler.cpp the draw from one row.
#pragma once

#include <memory>
#include <vector>

#include "kernels/isa.h"
#include "kernels/sampling_rules.h"
#include "kernels/thread_pool.h"

namespace foreword::kernels {

// The parameters of all rows, [R] each.
struct ParameterColumns {
#define FOREWORD_POINTER(type, name) const type *name;
  FOREWORD_PARAMETERS(FOREWORD_POINTER)
#undef FOREWORD_POINTER

  Parameters of(int row) const {
#define FOREWORD_ENTRY(type, name) name[row],
    return {FOREWORD_PARAMETERS(FOREWORD_ENTRY)};
#undef FOREWORD_ENTRY
  }
};

// Parameters and tokens by state row. [R] each; token_ids and is_embedding have rows of max_len entries.
struct StateRows {
  int num_rows, vocab_size, max_len;
  ParameterColumns parameters;
  const int32_t *token_ids, *prompt_len, *num_tokens;
  ptrdiff_t token_ids_stride;
};

struct StepInput {
  int num_reqs, num_logits;
  const float *logits;  // [L, vocab_size], rows logits_stride floats apart
  ptrdiff_t logits_stride;
  KnownLogits known;
  const int32_t *rows;           // [B] state rows
  const int32_t *starts;         // [B] the first position that the step computes; what is before has not changed
  const int32_t *cu_num_logits;  // [B + 1]
  const int64_t *positions;      // [L] that the drawn tokens take
  const int32_t *drafts;         // [L - B], request by request
  const bool *is_embedding;      // [R, max_len], or null: prompt positions that are embeddings, not tokens
  ptrdiff_t is_embedding_stride;
  int num_masked;
  const int32_t *masked;  // [num_masked] ascending rows of logits
  const int32_t *words;   // [num_masked, ceil(vocab_size / 32)]
  int num_changed;
  const int32_t *changed_rows;  // [num_changed] ascending rows of logits
  float *changed;               // [num_changed, vocab_size]: these rows after the rules
};

// For row i of logits, entries [offsets[i], offsets[i + 1]): its token, then the most likely ones. Empty: none.
struct LogprobOutput {
  const int64_t *offsets;  // [L + 1]; null: none for any row
  int32_t *ids;
  double *logprobs;
  int32_t *ranks;
};

// The rules of requests by state row, and the counts of their tokens: a cache of token_ids that follows the text.
class SamplingRows {
 public:
  explicit SamplingRows(const StateRows &states) : states_(states), requests_(size_t(states.num_rows)) {}

  const StateRows &states() const { return states_; }

  // The rules of the request in this row; those of the one before are forgotten.
  void set(int row, TokenRules rules);
  void forget(int row) { requests_[size_t(row)].reset(); }

  // Writes the rows input.changed: masked, and changed by the rules of their requests.
  void change(const StepInput &input, const Isa &isa, ThreadPool *pool);

  // out[b * width + j]: the j-th token of request b, −1 after the first that is not its j-th draft. −1 itself for a row
  // without a token to draw. Rows input.changed are drawn from as they are there.
  void sample(const StepInput &input, const Isa &isa, ThreadPool *pool, uint8_t *scratch, int width, int32_t *out,
              const LogprobOutput &logprobs);

  size_t scratch_bytes(const Isa &isa) const;  // the scratch memory of one thread

  // Throws std::invalid_argument for an entry out of range. Every call needs a checked input.
  void check(const StepInput &input) const;

 private:
  struct Request {
    TokenRules rules;
    TokenCounts counts;
    int counted = 0;  // tokens of the text in `counts`
    int prompt_len = 0;
  };
  struct Rows;

  template <class Done, class F>
  void for_each_row(const StepInput &input, ThreadPool *pool, Done &&done, F &&f);
  void prepare(const StepInput &input, int b, RuleScratch &scratch, Rows &rows);
  void apply(const StepInput &input, const Rows &rows, int j, float *x, RuleScratch &scratch) const;

  const StateRows states_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::vector<RuleScratch> scratch_;  // by thread
};

// The log-probabilities of tokens[i] and the most likely tokens in row i of logits [n, vocab_size].
void token_logprobs(const float *logits, ptrdiff_t stride, int count, int vocab_size, const int32_t *tokens,
                    const Isa &isa, ThreadPool *pool, uint8_t *scratch, size_t scratch_bytes,
                    const LogprobOutput &out);

}  // namespace foreword::kernels
