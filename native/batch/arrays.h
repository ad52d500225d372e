// The arrays that the Python side owns, by name: ROWS of foreword/batch/state/layout.py and STEP of
// foreword/batch/step/layout.py. A test compares names and types with those tables.
#pragma once

// [R] each.
#define FOREWORD_ROW_ARRAYS(X)   \
  X(int32_t, num_tokens)          \
  X(int32_t, num_computed_tokens) \
  X(int32_t, num_placeholders)    \
  X(int32_t, num_accepted_tokens) \
  X(int32_t, prompt_len)          \
  X(int32_t, prefill_len)         \
  X(int32_t, last_sampled_token)  \
  X(int32_t, lora_id)             \
  X(int64_t, row_generation)      \
  X(bool, live)

#define FOREWORD_STEP_ARRAYS(X)    \
  X(int64_t, scalars)               \
  X(int32_t, idx_mapping)           \
  X(int32_t, num_scheduled_tokens)  \
  X(int32_t, num_draft_tokens)      \
  X(int32_t, num_computed_tokens)   \
  X(int32_t, num_placeholders)      \
  X(bool, is_prefilling)            \
  X(int64_t, row_generation)        \
  X(int32_t, query_start_loc)       \
  X(int32_t, seq_lens)              \
  X(int32_t, dcp_local_seq_lens)    \
  X(int32_t, cu_num_logits)         \
  X(int32_t, cu_num_draft_tokens)   \
  X(int32_t, req_indices)           \
  X(int64_t, positions)             \
  X(int32_t, input_ids)             \
  X(int64_t, logits_indices)        \
  X(int32_t, expanded_idx_mapping)  \
  X(int32_t, expanded_local_pos)    \
  X(int64_t, target_logits_indices) \
  X(int64_t, bonus_logits_indices)  \
  X(int32_t, draft_token_ids)       \
  X(bool, samples)                  \
  X(int64_t, written)

// One of each per KV group.
#define FOREWORD_GROUP_STEP_ARRAYS(X) \
  X(int64_t, slot_mapping)            \
  X(int32_t, block_table)             \
  X(int32_t, num_blocks)              \
  X(int32_t, num_nulled)              \
  X(int64_t, content_id)

#define FOREWORD_MEMBER(type, name) type *name = nullptr;
