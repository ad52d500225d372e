#include "kernels/isa_functions.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

constexpr int kChains = 12;  // independent accumulators: more than latency × issue width

// Hides a value from the compiler, which then neither removes nor simplifies the computation.
template <class T>
FW_INLINE void opaque(T &value) {
#if defined(__x86_64__)
  asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(value));
#else
  asm volatile("" : "+m"(value));
#endif
}

// `repeats` rounds of step(sum) for independent sums; returns the operations, `per_lane` of a step.
template <class Sum, class F>
FW_INLINE double run_chains(int64_t repeats, double per_lane, Sum start, F &&step) {
  Sum sums[kChains];
  FW_UNROLL for (int i = 0; i < kChains; ++i) sums[i] = start;
  for (int64_t n = 0; n < repeats; ++n) {
    FW_UNROLL for (int i = 0; i < kChains; ++i) {
      opaque(sums[i]);
      sums[i] = step(sums[i]);
    }
  }
  FW_UNROLL for (int i = 0; i < kChains; ++i) opaque(sums[i]);
  return per_lane * kLanes * kChains * double(repeats);
}

}  // namespace

double peak_f32(int64_t repeats) {
  const F32 a = set1(0.5f);
  return run_chains(repeats, 2., set1(0.f), [&](F32 sum) FW_LAMBDA { return fma(a, a, sum); });
}

double peak_bf16(int64_t repeats) {
#if defined(FOREWORD_SIMD_BF16)
  const I32 a = set1_i32(0x3f003f00);
  return run_chains(repeats, 4., set1(0.f), [&](F32 sum) FW_LAMBDA { return dot2(sum, a, a); });
#else
  return peak_f32(repeats);  // bf16 is widened and multiplied in f32
#endif
}

double peak_i8(int64_t repeats) {
  const uint8_t ones[64] = {1};
  const U8 w = load_u8(ones);
  I32 a = set1_i32(0x01010101);
  return run_chains(repeats, 8., set1_i32(0), [&](I32 sum) FW_LAMBDA {
    opaque(a);  // or a product of several instructions is computed once
    return dot4(sum, w, a);
  });
}

size_t read_memory(const uint8_t *data, size_t bytes) {
  constexpr size_t kStep = 4 * sizeof(F32), kAhead = 2048;
  F32 x[4];
  FW_UNROLL for (int i = 0; i < 4; ++i) x[i] = set1(0.f);
  for (size_t at = 0; at + kStep <= bytes; at += kStep) {
    if (at % 64 == 0) {
      for (size_t line = 0; line < (kStep + 63) / 64; ++line) prefetch<3>(data + at + kAhead + 64 * line);
    }
    FW_UNROLL for (int i = 0; i < 4; ++i) {
      x[i] = max_f32(x[i], load(reinterpret_cast<const float *>(data + at) + i * kLanes));
    }
  }
  FW_UNROLL for (int i = 0; i < 4; ++i) opaque(x[i]);
  return bytes / kStep * kStep;
}

}  // namespace foreword::kernels::FOREWORD_ISA
