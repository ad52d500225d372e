// One step of input preparation over the arrays of RequestStates and InputBuffers.
//
// The Python side owns every array and keeps it alive and in place; this side holds plain pointers. The definition of
// every quantity is foreword/batch/prepare/backends/loops.py; names here are the names there.
#pragma once

#include <cstdint>
#include <vector>

namespace foreword {

struct ContextParallel {
  int32_t size = 1, rank = 0, interleave = 1;
};

struct Group {
  const int32_t *table;        // [R, width]
  const int32_t *num_blocks;   // [R]
  const int64_t *content_id;   // [R] renewed by every change of a row but an append
  int32_t *gathered;           // [R, width]
  int32_t *gathered_written;   // [R] of each row of `gathered`: entries written,
  int32_t *gathered_nulled;    // [R] leading entries nulled below the window,
  int64_t *gathered_content;   // [R] the content it copies (0: unknown)
  int64_t *slot_mapping;       // [max tokens]
  int32_t width, block_size, sliding_window;
  ContextParallel cp;
  bool recurrent;  // a state a request instead of keys and values: no slots

  int32_t tokens_per_block() const { return block_size * cp.size; }
  int32_t shift = -1;  // log2(tokens_per_block) where that is whole: a division is the dearest thing a decode row does
  int32_t block_of(int32_t position) const {
    return shift >= 0 ? position >> shift : position / tokens_per_block();
  }
};

struct States {
  int32_t max_num_reqs, max_model_len, vocab_size, max_num_draft_tokens;
  int32_t *token_ids, *num_tokens, *num_computed_tokens, *num_placeholders, *prompt_len, *prefill_len, *last_sampled_token;
  const int64_t *row_generation;
  const bool *live;
  int64_t token_stride;  // elements from one row of token_ids to the next

  int32_t *tokens_of(int32_t row) const { return token_ids + row * token_stride; }
};

struct Buffers {
  int64_t max_num_batched_tokens;
  int32_t *idx_mapping, *num_scheduled_tokens, *num_draft_tokens, *num_computed_tokens, *num_placeholders;
  bool *is_prefilling, *samples;
  int64_t *row_generation;
  int32_t *query_start_loc, *seq_lens, *dcp_local_seq_lens, *cu_num_logits, *cu_num_draft_tokens;
  int32_t *req_indices, *input_ids, *expanded_idx_mapping, *expanded_local_pos, *draft_token_ids;
  int64_t *positions, *logits_indices, *target_logits_indices, *bonus_logits_indices;
  int64_t *written;  // tokens, requests, gathered requests of the last step
};

struct Plan {
  const int32_t *rows, *num_scheduled;  // [B]
  const int32_t *num_drafts;            // [B], or null: no drafts
  const int32_t *draft_ids;             // [total drafts]
  int64_t num_reqs, num_draft_ids;
  int64_t pad_tokens, pad_reqs;         // −1: no padding
  bool gather;
  const bool *inert = nullptr;          // [B], or null: none

  bool is_inert(int64_t b) const { return inert && inert[b]; }
};

// In the order of foreword.batch.prepare.backends.Scalars.
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

  // False, with nothing written, for a plan that breaks a rule of foreword.batch.prepare.plan.check.
  bool prepare(const Plan &plan, Scalars &out);

  // Drafts [B, width] padded with −1 → num_drafts, draft_ids. False where a −1 stands before a draft.
  bool flatten_drafts(const int32_t *drafts, int64_t num_reqs, int64_t width);
  std::vector<int32_t> num_drafts, draft_ids;

  // Count the last prepared step as done before its samples are known (foreword.batch.prepare.commit.advance).
  void advance(int64_t num_reqs);

  // Apply samples [B, width], padded with −1. False, with nothing written, if a rule of foreword.batch.prepare.commit is broken.
  bool commit(const int32_t *sampled, int64_t num_reqs, int64_t width, bool advanced);

 private:
  bool acceptable(const Plan &plan);
  void requests(const Plan &plan, Scalars &out);
  void tokens(const Plan &plan, Scalars &out);
  void logits(const Plan &plan, Scalars &out);
  void gather(const Plan &plan, Group &group);
  void prefetch(int32_t row, int32_t position) const;

  std::vector<int32_t> num_samples_;
  std::vector<int64_t> seen_;  // [R] the call that last planned a row: finds a row planned twice
  int64_t call_ = 0;
};

}  // namespace foreword
