// The arrays of SamplingColumns, [R] each, as native code writes them.
#pragma once

#include <cstdint>

namespace foreword {

struct SamplingArrays {
  float *temperature, *top_p, *min_p, *presence_penalty, *frequency_penalty, *repetition_penalty;
  int32_t *top_k, *min_tokens, *num_logprobs, *num_prompt_logprobs, *needs;
  int64_t *seed, *stamp;
  bool *is_set;

  // The defaults: greedy, nothing else.
  void reset(int32_t row, int64_t new_stamp) const {
    if (!is_set[row]) return;
    is_set[row] = false;
    stamp[row] = new_stamp;
    needs[row] = GREEDY;
    temperature[row] = min_p[row] = presence_penalty[row] = frequency_penalty[row] = 0;
    top_p[row] = repetition_penalty[row] = 1;
    top_k[row] = min_tokens[row] = 0;
    num_logprobs[row] = num_prompt_logprobs[row] = -1;
    seed[row] = 0;
  }

  // Note that the columns of a row were written.
  void renew(int32_t row, int64_t new_stamp) const {
    const bool penalties = presence_penalty[row] != 0 || frequency_penalty[row] != 0 || repetition_penalty[row] != 1;
    is_set[row] = true;
    stamp[row] = new_stamp;
    needs[row] = (temperature[row] > 0 ? RANDOM : GREEDY) | (top_p[row] < 1 ? TOP_P : 0) | (top_k[row] > 0 ? TOP_K : 0) |
                 (min_p[row] > 0 ? MIN_P : 0) | (penalties ? PENALTIES : 0) | (num_logprobs[row] >= 0 ? LOGPROBS : 0) |
                 (num_prompt_logprobs[row] >= 0 ? PROMPT_LOGPROBS : 0) | (min_tokens[row] > 0 ? MIN_TOKENS : 0);
  }

 private:
  // As foreword.batch.state.sampling_columns.Need.
  enum {
    GREEDY = 1, RANDOM = 2, TOP_P = 4, TOP_K = 8, MIN_P = 16, PENALTIES = 32, LOGPROBS = 64, PROMPT_LOGPROBS = 128,
    MIN_TOKENS = 256
  };
};

}  // namespace foreword
