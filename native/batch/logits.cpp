#include "batch/logits.h"

#include <algorithm>
#include <limits>

#include "batch/vectorized.h"

#define FOREWORD_IN_CLONES [[gnu::always_inline]] inline  // compiled again for each vector unit

namespace foreword {
namespace {

constexpr int kLanes = 64;  // results that a loop keeps apart, so that it has vectors

template <class T>
FOREWORD_IN_CLONES T largest_of(int64_t count, const T *values) {
  T lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<T>::infinity());
  int64_t v = 0;
  for (; v + kLanes <= count; v += kLanes)
    for (int k = 0; k < kLanes; ++k) lanes[k] = values[v + k] > lanes[k] ? values[v + k] : lanes[k];
  for (; v < count; ++v) lanes[0] = values[v] > lanes[0] ? values[v] : lanes[0];
  return *std::max_element(lanes, lanes + kLanes);
}

template <class T>
FOREWORD_IN_CLONES int64_t first_largest_of(int64_t count, const T *values, T &most) {
  most = largest_of(count, values);
  if (most == -std::numeric_limits<T>::infinity()) return 0;
  int64_t v = 0;
  for (; v + kLanes <= count; v += kLanes) {
    int found = 0;
    for (int k = 0; k < kLanes; ++k) found |= values[v + k] == most;
    if (found) break;
  }
  while (values[v] != most) ++v;
  most = values[v];  // the first of the two zeros
  return v;
}

// f(v, bit v) for the tokens [0, count).
template <class F>
FOREWORD_IN_CLONES void with_bits(int64_t count, const int32_t *bits, F &&f) {
  int64_t v = 0;
  for (; v + 32 <= count; v += 32) {
    const uint32_t word = uint32_t(bits[v / 32]);
    for (int k = 0; k < 32; ++k) f(v + k, (word >> k) & 1);
  }
  for (; v < count; ++v) f(v, (uint32_t(bits[v / 32]) >> (v % 32)) & 1);
}

template <class T>
FOREWORD_IN_CLONES void mask(int64_t count, const int32_t *allowed, T minus_infinity, T *logits) {
  with_bits(count, allowed, [=](int64_t v, uint32_t bit) { logits[v] = bit ? logits[v] : minus_infinity; });
}

template <class T>
FOREWORD_IN_CLONES void add(int64_t count, const float *__restrict logits, float temperature, T *__restrict noise) {
  for (int64_t v = 0; v < count; ++v) noise[v] = T(logits[v] / temperature) + noise[v];
}

FOREWORD_IN_CLONES float penalised(float logit, bool seen, int32_t count, float up, float down, float frequency,
                                   float presence) {
  const float scale = seen ? up : 1.0f, divided = seen ? down : 1.0f;
  logit *= logit > 0 ? divided : scale;
  logit -= frequency * float(count);
  return logit - presence * (count > 0 ? 1.0f : 0.0f);
}

}  // namespace

FOREWORD_VECTORIZED void divide(int64_t count, float by, float *logits) {
  for (int64_t v = 0; v < count; ++v) logits[v] /= by;
}

FOREWORD_VECTORIZED float largest(int64_t count, const float *values) { return largest_of(count, values); }

FOREWORD_VECTORIZED void mask_below(int64_t count, float threshold, float *logits) {
  const float minus_infinity = -std::numeric_limits<float>::infinity();
  for (int64_t v = 0; v < count; ++v) logits[v] = logits[v] < threshold ? minus_infinity : logits[v];
}

FOREWORD_VECTORIZED void mask_refused(int64_t count, const int32_t *allowed, uint16_t minus_infinity,
                                      uint16_t *logits) {
  mask(count, allowed, minus_infinity, logits);
}
FOREWORD_VECTORIZED void mask_refused(int64_t count, const int32_t *allowed, uint32_t minus_infinity,
                                      uint32_t *logits) {
  mask(count, allowed, minus_infinity, logits);
}

float Penalties::apply(float logit, bool in_prompt, int32_t count) const {
  return penalised(logit, in_prompt || count > 0, count, repetition, 1.0f / repetition, frequency, presence);
}

FOREWORD_VECTORIZED void penalise(int64_t count, const Penalties &penalties, const int32_t *prompt,
                                  const int32_t *__restrict counts, float *__restrict logits) {
  const float up = penalties.repetition, down = 1.0f / up;
  const float frequency = penalties.frequency, presence = penalties.presence;
  with_bits(count, prompt, [=](int64_t v, uint32_t bit) {
    const int32_t of_output = counts[v];
    logits[v] = penalised(logits[v], bit | uint32_t(of_output > 0), of_output, up, down, frequency, presence);
  });
}

FOREWORD_VECTORIZED void add_logits(int64_t count, const float *logits, float temperature, float *noise) {
  add(count, logits, temperature, noise);
}
FOREWORD_VECTORIZED void add_logits(int64_t count, const float *logits, float temperature, double *noise) {
  add(count, logits, temperature, noise);
}

FOREWORD_VECTORIZED int64_t first_largest(int64_t count, const float *values, float &most) {
  return first_largest_of(count, values, most);
}
FOREWORD_VECTORIZED int64_t first_largest(int64_t count, const double *values, double &most) {
  return first_largest_of(count, values, most);
}

FOREWORD_VECTORIZED void subtract(int64_t count, const float *__restrict values, float by,
                                  float *__restrict shifted) {
  for (int64_t v = 0; v < count; ++v) shifted[v] = values[v] - by;
}

}  // namespace foreword
