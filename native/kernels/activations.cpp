#include "kernels/activations.h"

#include "kernels/isa_functions.h"
#include "kernels/rotation.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

// In one plane 8 bit with a scale per block, in two 15 bit with a scale per row: the largest magnitude becomes ±127, or
// ±127 · 128. The sums are exact in floats because the terms are integers.
template <int Planes>
void prepare_blocks(const Activations &a, int row, const float *x) {
  constexpr float kSteps = Planes == 1 ? 127.f : 127.f * 128.f;
  constexpr int N = kBlock / kLanes;
  float top = Planes == 2 ? largest_magnitude(x, a.padded_cols) : 0.f;
  for (int k = 0; k < a.padded_cols; k += kBlock) {
    if (Planes == 1) top = largest_magnitude(x + k, kBlock);
    const F32 inverse = set1(top > 0.f ? kSteps / top : 0.f);
    using Number = std::conditional_t<Planes == 2 && kWords, int16_t, int8_t>;
    Number *q = activation_at<Number>(a, row, k, kPieceBytes / Planes);
    F32 sums[2] = {set1(0.f), set1(0.f)};
    FW_UNROLL for (int n = 0; n < N; ++n) {
      const F32 rounded = round_f32(mul(load(x + k + n * kLanes), inverse));
      if constexpr (Planes == 1) {
        store_s8(q + n * kLanes, rounded);
      } else if constexpr (kWords) {
        store_words(q + n * kLanes, rounded);
      } else {
        const F32 high = round_f32(mul(rounded, set1(1.f / 128.f)));
        store_s8(q + n * kLanes, high);
        store_s8(q + kPieceBytes / 2 + n * kLanes, fma(high, set1(-128.f), rounded));
      }
      sums[2 * n / N] = add(sums[2 * n / N], rounded);
    }
    const int32_t low = whole(reduce_add(sums[0])), high = whole(reduce_add(sums[1])), sum = low + high;
    const float scale = top / kSteps;
    a.blocks[size_t(k / kBlock) * a.block_stride + row] = {
        .scale = scale,
        .sum = Planes == 1 ? scale * float(sum) : float(sum),
        .neg8_sum = -8 * sum,
        .neg_bias_sum = -kDotBias * sum,
        .neg_bias_half = {-kDotBias * low, -kDotBias * high},
        .unused = {}};
  }
}

// 8 bit with a scale per row, of the rotated inputs.
void prepare_rotated(const Activations &a, int row, const float *x, float *rotated) {
  const float factor = rotate_inputs(x, a.padded_cols, rotated);
  const auto [top, neg_bias_sum] = round_to_s8(
      rotated, a.padded_cols, [&](int k) FW_LAMBDA { return activation_at<int8_t>(a, row, k, kPieceBytes); });
  a.blocks[row].scale = top / (127.f * factor);
  a.blocks[row].neg_bias_sum = neg_bias_sum;
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
    case ActivationKind::i8: return prepare_blocks<1>(a, row, x);
    case ActivationKind::i15: return prepare_blocks<2>(a, row, x);
    case ActivationKind::i8_rotated: return prepare_rotated(a, row, x, scratch);
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
