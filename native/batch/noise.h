// The hash and the uniform numbers of vLLM's second model runner: foreword/vllm/sampling.py defines them.
#pragma once

#include <cstdint>

namespace foreword {

constexpr uint32_t kHighDomain = 0x9E3779B9;  // the seed of the hash of a number's upper half

// The common beginning of the hashes of all tokens: a seed and a position, mixed.
uint32_t mixed_seed(int64_t seed, int64_t position, uint32_t domain);

// For each token v in [0, count) with the uniform number u: ones[v] = 1 - u, at least 2^-24; series[v] is the sum of
// the first terms of the series of -log(1 - u) if u < 0.25, else -1.
void uniform32(uint32_t mixed, int64_t count, float *ones, float *series);
// values[v] = series[v] if that is not -1, else -values[v].
void select_series(int64_t count, const float *series, float *values);
// uniforms[v]: a uniform number from 53 bits of two hashes.
void uniform64(uint32_t mixed_low, uint32_t mixed_high, int64_t count, double *uniforms);

// The first word of Philox 4x32, after ten rounds of a seed's key and an offset, as a number in (0, 1).
float philox_uniform(int64_t seed, int64_t offset);

}  // namespace foreword
