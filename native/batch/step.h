// One step of input preparation over the arrays of RequestStates and InputBuffers.
// Python owns every array and never moves or frees it meanwhile; this code holds plain pointers.
// foreword/batch/prepare/backends/loops.py defines every quantity, with the same names.
#pragma once

#include <cstdint>
#include <vector>

#include "batch/arrays.h"
#include "batch/progress.h"

namespace foreword {

struct ContextParallel {
  int32_t size = 1, rank = 0, interleave = 1;
};

// The step's arrays of one KV group. `block_table` [R, width] has the gathered rows. For each of them, `num_blocks` is
// the number of entries that are written, `num_nulled` the number of leading entries that are null because they are
// below the window, and `content_id` the copied content (0: unknown).
struct GroupBuffers {
  FOREWORD_GROUP_STEP_ARRAYS(FOREWORD_MEMBER)
};

struct Group {
  const int32_t *table;       // [R, width]
  const int32_t *num_blocks;  // [R]
  const int64_t *content_id;  // [R] renewed by every change of a row but an append
  const bool *holds_null;     // whether any row was given a null block
  GroupBuffers step;
  int32_t width, block_size, tokens_per_block, sliding_window, null_block;
  ContextParallel cp;
  bool recurrent;  // a state per request instead of keys and values: no slots
  int32_t shift;   // log2(tokens_per_block), or −1: a division is the most expensive operation per decode request

  bool may_hold_null() const { return *holds_null || sliding_window; }
  int32_t block_of(int32_t position) const { return shift >= 0 ? position >> shift : position / tokens_per_block; }
  const int32_t *row(int32_t row) const { return table + int64_t(row) * width; }
};

struct Buffers {
  int64_t max_num_batched_tokens = 0;
  FOREWORD_STEP_ARRAYS(FOREWORD_MEMBER)
};

// The entries of Buffers::written: the sizes that the step before wrote.
enum Written { TOKENS, REQUESTS, LOGITS, GATHERED };

struct Plan {
  const int32_t *rows, *num_scheduled;  // [B]
  const int32_t *num_drafts;            // [B], or null: no drafts
  const int32_t *draft_ids;             // [total drafts]
  int64_t num_reqs, num_draft_ids;
  int64_t pad_tokens, pad_reqs;         // −1: no padding
  bool gather;
  const bool *cancelled = nullptr;      // [B], or null: none

  bool is_cancelled(int64_t b) const { return cancelled && cancelled[b]; }
};

// Buffers::scalars, in the order of foreword.batch.step.layout.Scalars.
struct Scalars {
  int64_t num_reqs, num_tokens, num_reqs_padded, num_tokens_padded, num_logits, num_draft_tokens, max_query_len,
      max_seq_len, attention_state, num_unresolved;
};

class StepCore {
 public:
  States states;
  Buffers buffers;
  std::vector<Group> groups;
  bool context_parallel = false;
  ContextParallel cp;

  // Returns false, with nothing written, for a plan that breaks a rule of foreword.batch.prepare.plan.check.
  bool prepare(const Plan &plan);

  // Converts drafts [B, width] padded with −1 to num_drafts and draft_ids. Returns false if a −1 comes before a draft.
  bool flatten_drafts(const int32_t *drafts, int64_t num_reqs, int64_t width);
  std::vector<int32_t> num_drafts, draft_ids;

  // Counts the last prepared step as done before its samples are known (foreword.batch.prepare.commit).
  void advance(int64_t num_reqs);

  // Applies samples [B, width], padded with −1. Returns false, with nothing written, if they break a rule of that
  // module.
  bool commit(const int32_t *sampled, int64_t num_reqs, int64_t width, bool advanced);

 private:
  bool acceptable(const Plan &plan);
  bool writes_null(const Plan &plan, const Group &g) const;
  void requests(const Plan &plan, Scalars &out);
  void tokens(const Plan &plan, Scalars &out, int64_t singles);
  int64_t logits(const Plan &plan);  // returns how many there are
  void gather(const Plan &plan, Group &group);

  std::vector<int32_t> num_samples_;
  std::vector<int64_t> seen_;  // [R] the call that last planned a row: finds a row planned twice
  int64_t call_ = 0;
};

}  // namespace foreword
