// Seeds of requests without one, as foreword/seeds.py derives them.
#pragma once

#include <cstdint>

namespace foreword {

inline int64_t derived_seed(int64_t seed, int64_t index) {
  if (index == 0) return seed;
  uint64_t x = uint64_t(seed) + uint64_t(index) * 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return int64_t(x ^ (x >> 31));
}

}  // namespace foreword
