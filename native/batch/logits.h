// Rows of logits of vLLM's second model runner: foreword/vllm/sampling.py defines what the functions do.
#pragma once

#include <cstdint>

namespace foreword {

void divide(int64_t count, float by, float *logits);

// The largest number, NaNs aside; -inf where there is none.
float largest(int64_t count, const float *values);
// -inf where a logit is below the threshold.
void mask_below(int64_t count, float threshold, float *logits);
// -inf, as the bits of an element, where bit v of `allowed` is 0.
void mask_refused(int64_t count, const int32_t *allowed, uint16_t minus_infinity, uint16_t *logits);
void mask_refused(int64_t count, const int32_t *allowed, uint32_t minus_infinity, uint32_t *logits);

struct Penalties {
  float repetition, frequency, presence;

  // A logit of a token that occurs `count` times in the output, or is in the prompt.
  float apply(float logit, bool in_prompt, int32_t count) const;
};

// prompt: a bit per token. counts: of the output, per token.
void penalise(int64_t count, const Penalties &penalties, const int32_t *prompt, const int32_t *counts, float *logits);

// noise[v] += logits[v] / temperature
void add_logits(int64_t count, const float *logits, float temperature, float *noise);
void add_logits(int64_t count, const float *logits, float temperature, double *noise);

// The first largest number, NaNs aside, and its index; -inf and 0 where there is none.
int64_t first_largest(int64_t count, const float *values, float &most);
int64_t first_largest(int64_t count, const double *values, double &most);

// shifted[v] = values[v] - by
void subtract(int64_t count, const float *values, float by, float *shifted);

}  // namespace foreword
