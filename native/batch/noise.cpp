#include "batch/noise.h"

#include <algorithm>

#include "batch/vectorized.h"

namespace foreword {
namespace {

inline uint32_t rotated(uint32_t value, int by) { return (value << by) | (value >> (32 - by)); }

inline uint32_t mixed(uint32_t h, uint32_t key) {
  key = rotated(key * 0xCC9E2D51u, 15) * 0x1B873593u;
  return rotated(h ^ key, 13) * 5 + 0xE6546B64u;
}

inline uint32_t finished(uint32_t h) {
  h ^= 16;
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

}  // namespace

uint32_t mixed_seed(int64_t seed, int64_t position, uint32_t domain) {
  uint32_t h = mixed(domain, uint32_t(seed));
  h = mixed(h, uint32_t(uint64_t(seed) >> 32));
  return mixed(h, uint32_t(position));
}

FOREWORD_VECTORIZED void uniform32(uint32_t seed, int64_t count, float *__restrict ones, float *__restrict series) {
  for (int64_t v = 0; v < count; ++v) {
    const uint32_t bits = finished(mixed(seed, uint32_t(v)));
    const float high = float(int32_t(bits >> 16)), low = float(int32_t(bits & 0xFFFF)) + 0.5f;
    const float u = high * 0x1p-16f + low * 0x1p-32f;
    float sum = 1.0f / 8;
    for (int n = 7; n > 0; --n) sum = 1.0f / float(n) + u * sum;
    const float one = 1.0f - u;
    ones[v] = one > 0x1p-24f ? one : 0x1p-24f;
    series[v] = u < 0.25f ? u * sum : -1.0f;
  }
}

FOREWORD_VECTORIZED void select_series(int64_t count, const float *__restrict series, float *__restrict values) {
  for (int64_t v = 0; v < count; ++v) values[v] = series[v] < 0 ? -values[v] : series[v];
}

FOREWORD_VECTORIZED void uniform64(uint32_t low_seed, uint32_t high_seed, int64_t count, double *__restrict uniforms) {
  for (int64_t v = 0; v < count; ++v) {
    const uint64_t low = finished(mixed(low_seed, uint32_t(v))), high = finished(mixed(high_seed, uint32_t(v)));
    const double u = (double(int64_t(((high << 32) | low) >> 11)) + 0.5) * 0x1p-53;
    uniforms[v] = u == 1 ? u - 0x1p-53 : u;
  }
}

float philox_uniform(int64_t seed, int64_t offset) {
  uint32_t c0 = uint32_t(offset), c1 = uint32_t(uint64_t(offset) >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(uint64_t(seed) >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0;
    c1 = uint32_t(b);
    c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c3 = uint32_t(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  constexpr float smallest = 4.6566127342e-10f;
  return std::max(float(int32_t(c0 < 1u << 31 ? c0 : ~c0)) * smallest, smallest);
}

}  // namespace foreword
