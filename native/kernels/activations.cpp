#include "kernels/activations.h"

#include "kernels/isa_functions.h"
#include "kernels/rotation.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

// One block: `top` becomes ±127, or ±127 · 128 in two planes. Returns Σ q of the two halves, exact in floats because
// the terms are integers.
struct HalfSums {
  int32_t low, high;
};
template <int Planes>
FW_INLINE HalfSums quantise_block(const float *x, float top, int8_t *q, int8_t *low_plane) {
  constexpr float kSteps = Planes == 1 ? 127.f : 127.f * 128.f;
  constexpr int N = kBlock / kLanes;
  const F32 inverse = set1(top > 0.f ? kSteps / top : 0.f);
  F32 sum[2] = {set1(0.f), set1(0.f)};
  FW_UNROLL for (int n = 0; n < N; ++n) {
    const F32 rounded = round_f32(mul(load(x + n * kLanes), inverse));
    if constexpr (Planes == 1) {
      store_s8(q + n * kLanes, rounded);
    } else {
      const F32 high = round_f32(mul(rounded, set1(1.f / 128.f)));
      store_s8(q + n * kLanes, high);
      store_s8(low_plane + n * kLanes, fma(high, set1(-128.f), rounded));
    }
    sum[2 * n / N] = add(sum[2 * n / N], rounded);
  }
  return {whole(reduce_add(sum[0])), whole(reduce_add(sum[1]))};
}

void set_sums(const HalfSums &half, ActivationBlock *block) {
  const int32_t sum = half.low + half.high;
  block->sum = float(sum);
  block->neg8_sum = -8 * sum;
  block->neg128_sum = -kDotBias * sum;
  block->neg128_half[0] = -kDotBias * half.low;
  block->neg128_half[1] = -kDotBias * half.high;
}

// 8 bit with a scale per block.
void prepare_i8(const Activations &a, int row, const float *x) {
  for (int k = 0; k < a.padded_cols; k += kBlock) {
    ActivationBlock *block = a.blocks + size_t(k / kBlock) * a.block_stride + row;
    const float top = largest_magnitude(x + k, kBlock);
    set_sums(quantise_block<1>(x + k, top, activation_at<int8_t>(a, row, k, kPieceBytes), nullptr), block);
    block->scale = top / 127.f;
    block->sum *= block->scale;
  }
}

// 15 bit with a scale per row.
void prepare_i15(const Activations &a, int row, const float *x) {
  const float top = largest_magnitude(x, a.padded_cols);
  for (int k = 0; k < a.padded_cols; k += kBlock) {
    ActivationBlock *block = a.blocks + size_t(k / kBlock) * a.block_stride + row;
    int8_t *high = activation_at<int8_t>(a, row, k, kPieceBytes / 2);
    set_sums(quantise_block<2>(x + k, top, high, high + kPieceBytes / 2), block);
    block->scale = top / (127.f * 128.f);
  }
}

// 8 bit with a scale per row, of the rotated inputs.
void prepare_rotated(const Activations &a, int row, const float *x, float *rotated) {
  const float factor = rotate_inputs(x, a.padded_cols, rotated), top = largest_magnitude(rotated, a.padded_cols);
  const F32 inverse = set1(top > 0.f ? 127.f / top : 0.f);
  F32 sum = set1(0.f);  // of integers: exact
  for (int k = 0; k < a.padded_cols; k += kLanes) {
    const F32 steps = round_f32(mul(load(rotated + k), inverse));
    store_s8(activation_at<int8_t>(a, row, k, kPieceBytes), steps);
    sum = add(sum, steps);
  }
  a.blocks[row].scale = top / (127.f * factor);
  a.blocks[row].neg128_sum = -kDotBias * whole(reduce_add(sum));
}

}  // namespace

void prepare_row(const Activations &a, int row, const float *x, float *scratch) {
  switch (a.kind) {
    case ActivationKind::f32:
      for (int k = 0; k < a.padded_cols; k += kLanes) {
        store(activation_at<float>(a, row, k, kPieceBytes / 4), load(x + k));
      }
      return;
    case ActivationKind::bf16:
      for (int k = 0; k < a.padded_cols; k += kLanes) {
        store_bf16(activation_at<uint16_t>(a, row, k, kPieceBytes / 2), load(x + k));
      }
      return;
    case ActivationKind::i8: return prepare_i8(a, row, x);
    case ActivationKind::i15: return prepare_i15(a, row, x);
    case ActivationKind::i8_rotated: return prepare_rotated(a, row, x, scratch);
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
