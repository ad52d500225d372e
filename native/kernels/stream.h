// Memory that a thread reads later, prefetched in equal parts while it computes.
#pragma once

#include "kernels/simd/simd.h"

namespace foreword::kernels::FOREWORD_ISA {

struct Stream {
  const uint8_t *next;
  int lines_per_group;  // cache lines of a part

  FW_INLINE void advance() {
    for (int i = 0; i < lines_per_group; ++i) prefetch<2>(next + 64 * i);
    next += 64 * lines_per_group;
  }
};

// `bytes` from `next` on in `groups` parts; nothing if `next` is null.
FW_INLINE Stream stream_of(const uint8_t *next, size_t bytes, int groups) {
  const size_t lines = bytes / 64;
  return {next, next ? int((lines + size_t(groups) - 1) / size_t(groups)) : 0};
}

}  // namespace foreword::kernels::FOREWORD_ISA
