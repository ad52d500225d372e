#include "kernels/screen.h"

#include <cmath>

#include "kernels/half.h"
#include "kernels/isa_functions.h"
#include "kernels/activations.h"
#include "kernels/packing.h"
#include "kernels/rotation.h"

namespace foreword::kernels::FOREWORD_ISA {
namespace {

// Weights [k, k + kBlock) of output n of a panel; not of Format::i8, whose weights are rotated.
void unpack_block(Format f, const uint8_t *panel, int k, int n, float *out) {
  const uint8_t *block = panel + input_offset(f, k);
  const auto half = [&](int row) {
    return half_to_float(reinterpret_cast<const uint16_t *>(block)[row * kPanelWidth + n]);
  };
  if (f == Format::f32) {
    for (int i = 0; i < kBlock; ++i) out[i] = reinterpret_cast<const float *>(block)[i * kPanelWidth + n];
    return;
  }
  if (f == Format::bf16) {
    for (int i = 0; i < kBlock; ++i) {
      out[i] = bf16_to_float(reinterpret_cast<const uint16_t *>(block)[2 * (i / 2 * kPanelWidth + n) + i % 2]);
    }
    return;
  }
  const float d[2] = {half(0), half(f == Format::q8_half)}, m = has_min(f) ? half(1) : 0.f;
  const uint8_t *weights = block + block_scale_bytes(f) + 4 * n;
  for (int i = 0; i < kBlock; ++i) {
    int q;
    if (is_4bit(f)) {
      q = weights[i % 16 / 4 * 4 * kPanelWidth + i % 4] >> i / 16 * 4 & 15;
      q = has_table(f) ? table_of(f)[q] : f == Format::q4 ? q - 8 : q;
    } else {
      q = int8_t(weights[i / 4 * 4 * kPanelWidth + i % 4] ^ kDotBias);
    }
    out[i] = d[i / kHalf] * float(q) + m;
  }
}

// A vector of bytes.
FW_INLINE F32 load_s8(const int8_t *q) {
  float out[kLanes];
  for (int i = 0; i < kLanes; ++i) out[i] = float(q[i]);
  return load(out);
}

// Σ (x - y)², with y(k) the vector of y from k on. `size` is a multiple of kLanes.
template <class F>
FW_INLINE float squares(const float *x, int size, F &&y) {
  F32 sums[2] = {set1(0.f), set1(0.f)};
  in_turns(size, [&](int i, int k) FW_LAMBDA {
    const F32 d = sub(load(x + k), y(k));
    sums[i] = fma(d, d, sums[i]);
  });
  return reduce_add(add(sums[0], sums[1]));
}
FW_INLINE float squares(const float *x, int size) {
  return squares(x, size, [](int) FW_LAMBDA { return set1(0.f); });
}

// |x - what the activations hold of x|, where x is a row's inputs.
float rounding(const Activations &a, int row, const float *x, float *scratch) {
  const int cols = a.padded_cols;
  const auto bytes = [&](int k, int per_piece, int plane = 0) FW_LAMBDA {
    return load_s8(activation_at<const int8_t>(a, row, k, per_piece) + plane * kPieceBytes / 2);
  };
  const auto scale = [&](int block) { return a.blocks[size_t(block) * a.block_stride + size_t(row)].scale; };
  switch (a.kind) {
    case ActivationKind::f32: return 0.f;
    case ActivationKind::bf16:
      return std::sqrt(squares(x, cols, [&](int k) FW_LAMBDA {
        float out[kLanes];
        const uint16_t *h = activation_at<const uint16_t>(a, row, k, kPieceBytes / 2);
        for (int i = 0; i < kLanes; ++i) out[i] = bf16_to_float(h[i]);
        return load(out);
      }));
    case ActivationKind::i8:
      return std::sqrt(squares(x, cols, [&](int k) FW_LAMBDA {
        return mul(bytes(k, kPieceBytes), set1(scale(k / kBlock)));
      }));
    case ActivationKind::i15:
      return std::sqrt(squares(x, cols, [&](int k) FW_LAMBDA {
        if constexpr (kWords) {
          float out[kLanes];
          const int16_t *q = activation_at<const int16_t>(a, row, k, kPieceBytes / 2);
          for (int i = 0; i < kLanes; ++i) out[i] = float(q[word_place(i)]);
          return mul(load(out), set1(scale(0)));
        }
        const F32 low = bytes(k, kPieceBytes / 2, 1);
        return mul(fma(set1(128.f), bytes(k, kPieceBytes / 2), low), set1(scale(0)));
      }));
    case ActivationKind::i8_rotated: break;
  }
  const float factor = rotate_inputs(x, cols, scratch);
  const F32 step = set1(scale(0) * factor);
  return std::sqrt(squares(scratch, cols, [&](int k) FW_LAMBDA { return mul(bytes(k, kPieceBytes), step); })) / factor;
}

}  // namespace

float screen_reach(const Activations &head, const Activations &screen, int row, const float *x, float *scratch) {
  const float norm = std::sqrt(squares(x, head.padded_cols));
  const float d = rounding(head, row, x, scratch) + rounding(screen, row, x, scratch);
  return 1.001f * larger(norm + d, larger(d / kScreenRounding, 1e-30f));
}

float pack_screen(const PackedMatrix &head, const PackedMatrix &screen, int panel, void *scratch, float *errors) {
  const int cols = head.padded_cols, count = smaller(kPanelWidth, head.rows - panel * kPanelWidth);
  const PackedRow row = packed_row(scratch, cols);
  uint8_t *out = screen.panels + size_t(panel) * screen.panel_bytes;
  // An addition of floats rounds by at most 2^-24 of the sum of magnitudes.
  const float additions = float(cols + 64) * 0x1p-23f;
  float largest = 0.f;
  for (int n = 0; n < count; ++n) {
    float bound;
    if (head.format == Format::i8) {  // the screen's products are those of the projection
      errors[n] = 0.f;
      bound = 127.f * float(cols) * reinterpret_cast<const float *>(out)[n];
    } else {
      for (int k = 0; k < cols; k += kBlock) unpack_block(head.format, head.panel(panel), k, n, row.values + k);
      const float norm = std::sqrt(squares(row.values, cols));
      const float factor = put_i8(row.values, row.blocks.q, cols, n, out);
      const F32 scale = set1(reinterpret_cast<const float *>(out)[n] * factor);
      const float change = std::sqrt(squares(row.values, cols, [&](int k) FW_LAMBDA {
        return mul(load_s8(row.blocks.q + k), scale);
      })) / factor;
      errors[n] = 1.001f * (change + additions * norm + kScreenRounding * (norm + change));
      bound = 2.f * norm + change + errors[n];
    }
    largest = larger(largest, bound == bound ? bound : __builtin_inff());
  }
  for (int n = 0; n < kPanelWidth && count < kPanelWidth; ++n) errors[n] = __builtin_inff();
  return largest;
}

void screen_rows(const float *logits, size_t stride, int row_begin, int row_end, int panel_begin, int panel_end,
                 const float *errors, ScreenedRow *state, ScreenHits &hits) {
  for (int r = row_begin; r < row_end; ++r, logits += stride) {
    ScreenedRow &row = state[r];
    const F32 reach = set1(row.reach), back = set1(-row.reach);
    for (int p = panel_begin; p < panel_end; ++p) {
      const float *a = logits + (p - panel_begin) * kPanelWidth, *e = errors + size_t(p) * kPanelWidth;
      const auto largest = [&](F32 times) FW_LAMBDA {  // max of a + times e
        F32 most = fma(times, load(e), load(a));
        FW_UNROLL for (int n = kLanes; n < kPanelWidth; n += kLanes) {
          most = max_f32(most, fma(times, load(e + n), load(a + n)));
        }
        return most;
      };
      const F32 upper = largest(reach);
      if (!lanes_at_least(upper, set1(row.least))) continue;
      if (const float bound = reduce_max(largest(back)) - row.slack; bound > row.least) {
        row.least = bound;
        if (row.panel != kScreenFull) row.panel = p;
      }
      if (hits.count < hits.room) {
        hits.data[hits.count++] = {r, p, reduce_max(upper)};
      } else {
        row.panel = kScreenFull;
      }
    }
  }
}

}  // namespace foreword::kernels::FOREWORD_ISA
