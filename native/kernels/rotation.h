// An orthogonal transform of the inputs of an 8-bit product. It is applied to weights and activations, which leaves Σ w
// a unchanged and distributes a number much larger than its neighbours over many inputs: with one scale per row, less
// is lost.
//
//   x [size] → Hadamard transforms of blocks of B consecutive inputs, B the largest power of two dividing size, at
//              most 512
//            → Hadamard transforms of P inputs each, size / P apart, which mix the blocks, P = 2 or 4
#pragma once

#include <cmath>

#include "kernels/simd/simd.h"

namespace foreword::kernels::FOREWORD_ISA {

template <int Distance>
struct Signs {
  alignas(64) float of_lane[kLanes];
  constexpr Signs() : of_lane() {
    for (int i = 0; i < kLanes; ++i) of_lane[i] = i & Distance ? -1.f : 1.f;
  }
};
template <int Distance>
constexpr Signs<Distance> kSigns;

// The Hadamard transform of a vector's lanes.
template <int Distance = 1>
FW_INLINE F32 lane_butterflies(F32 v) {
  if constexpr (Distance == kLanes) {
    return v;
  } else {
    return lane_butterflies<2 * Distance>(fma(v, load(kSigns<Distance>.of_lane), exchange<Distance>(v)));
  }
}

FW_INLINE void butterfly(F32 &a, F32 &b) {
  const F32 difference = sub(a, b);
  a = add(a, b);
  b = difference;
}

// The stages of distances [begin, end) over all of x, two at a time.
inline void butterflies(float *x, int size, int begin, int end) {
  for (int h = begin; h < end; h *= 4) {
    const bool two = 2 * h < end;
    for (int base = 0; base < size; base += two ? 4 * h : 2 * h) {
      for (int i = base; i < base + h; i += kLanes) {
        F32 a = load(x + i), b = load(x + i + h);
        butterfly(a, b);
        if (two) {
          F32 c = load(x + i + 2 * h), d = load(x + i + 3 * h);
          butterfly(c, d);
          butterfly(a, c);
          butterfly(b, d);
          store(x + i + 2 * h, c);
          store(x + i + 3 * h, d);
        }
        store(x + i, a);
        store(x + i + h, b);
      }
    }
  }
}

// y := c R x for the orthogonal R above; returns c. `size` is a multiple of 32; y may be x.
inline float rotate_inputs(const float *x, int size, float *y) {
  const int power = size & -size, block = smaller(power, 512), apart = smaller(power / 16, 4);
  constexpr int kUnit = 2 * kLanes;  // one stage between vectors is included
  for (int i = 0; i < size; i += kUnit) {
    F32 a = lane_butterflies(load(x + i)), b = lane_butterflies(load(x + i + kLanes));
    butterfly(a, b);
    store(y + i, a);
    store(y + i + kLanes, b);
  }
  butterflies(y, size, kUnit, block);
  butterflies(y, size, size / apart, size);
  return std::sqrt(float(block * apart));
}

// Rotates the numbers of a head; their count is a multiple of kLanes. One transform per block, of any size.
inline float rotate_head(const float *x, int dim, float *y) {
  const int block = dim & -dim;
  for (int d = 0; d < dim; d += kLanes) store(y + d, lane_butterflies(load(x + d)));
  butterflies(y, dim, kLanes, block);
  return std::sqrt(float(block));
}

}  // namespace foreword::kernels::FOREWORD_ISA
