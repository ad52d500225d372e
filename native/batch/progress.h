// The progress of each request. Only this code writes a row's token counts. foreword/batch/state/progress.py does the
// same in Python.
#pragma once

#include <algorithm>
#include <cstdint>

#include "batch/arrays.h"

namespace foreword {

struct States {
  int32_t max_num_reqs = 0, max_model_len = 0, vocab_size = 0, max_num_draft_tokens = 0;
  int32_t *token_ids = nullptr;  // [R, M]
  int64_t token_stride = 0;      // elements from one row of token_ids to the next
  int64_t *rewrites = nullptr;   // [R] grows with every change of a row's progress or tokens but those of its steps
  FOREWORD_ROW_ARRAYS(FOREWORD_MEMBER)

  int32_t *tokens_of(int32_t row) const { return token_ids + row * token_stride; }

  // A request enters the row. Its tokens are already in the row.
  void begin(int32_t row, int32_t known, int32_t prompt, int32_t computed) const {
    num_tokens[row] = prefill_len[row] = known;
    prompt_len[row] = prompt;
    num_computed_tokens[row] = computed;
    num_placeholders[row] = 0;
    num_accepted_tokens[row] = 1;
    last_sampled_token[row] = known > prompt ? tokens_of(row)[known - 1] : -1;
  }

  // The row's request leaves.
  void end(int32_t row) const {
    num_tokens[row] = num_computed_tokens[row] = num_placeholders[row] = 0;
    prompt_len[row] = prefill_len[row] = 0;
    num_accepted_tokens[row] = 1;
    last_sampled_token[row] = -1;
  }

  // Sets num_computed_tokens to a scheduler's count, at most all known tokens but the last.
  int32_t clamp_computed(int32_t row, int32_t computed) const {
    return std::min(computed, num_tokens[row] + num_placeholders[row] - 1);
  }
  void set_computed(int32_t row, int32_t computed) const {
    rewrites[row] += num_computed_tokens[row] != computed;
    num_computed_tokens[row] = computed;
  }

  // Counts a step in flight as done, with its k drafts accepted and its samples unknown.
  void advance(int32_t row, int32_t computed, bool samples, int32_t k) const {
    num_computed_tokens[row] = computed;
    if (samples) num_placeholders[row] += 1 + k;
  }

  // Records a committed step that reaches `computed`, before any draft is verified.
  void reach(int32_t row, int32_t computed, bool advanced) const {
    if (!advanced) num_computed_tokens[row] = computed;
    num_accepted_tokens[row] = 1;
  }

  // After `reach`, records the m samples of a row that reached its last known token with k drafts.
  void accept(int32_t row, const int32_t *samples, int32_t m, int32_t k, bool advanced) const {
    num_computed_tokens[row] -= k - std::max(m - 1, 0);
    if (advanced) num_placeholders[row] -= 1 + k;
    if (m == 0) return;
    const int32_t v = num_tokens[row];
    int32_t *to = tokens_of(row) + v;
    for (int32_t j = 0; j < m; ++j) to[j] = samples[j];
    num_tokens[row] = v + m;
    num_accepted_tokens[row] = m;
    last_sampled_token[row] = samples[m - 1];
  }
};

}  // namespace foreword
