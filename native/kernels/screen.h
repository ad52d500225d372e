// Greedy tokens without all logits. A screen is the output projection in 8 bit, with a bound of what that changes:
//
//   |x Wᵀ[n] - a[n]| <= reach errors[n],   a = the product with the screen
//
// where x Wᵀ is computed in the projection's own arithmetic, and `reach` depends on x alone. So the largest logit is
// at least l = max_n (a[n] - reach errors[n]), and only panels with an a[n] + reach errors[n] >= l can have it: a few
// of thousands. Their logits are computed, and the token is the one that all logits give.
//
//   errors[n] = |W[n] - S[n]| + (|W[n]| + |W[n] - S[n]|) / 128   with S the weights of the screen
//   reach     = max(|x| + d, 128 d)                              with d = |x - x'| + |x - x"|
//
// where x' and x" are x as the projection and the screen take it, because then
//
//   |W x' - S x"| = |W (x' - x) + (W - S) x + S (x - x")| <= |W - S| |x| + (|W| + |W - S|) d <= reach errors
//
// Numbers of 8 bit change vectors by about 1/128. Rounding in sums of floats is covered by what is added to errors.
#pragma once

#include "kernels/formats.h"

namespace foreword::kernels {

constexpr float kScreenRounding = 1.f / 128.f;

// A row in a part of a screen's panels.
struct ScreenedRow {
  float reach;
  float slack;    // how much smaller than the largest one a logit may be that counts as equal
  float least;    // a lower bound of the row's largest logit, less the slack; -infinity before the first panel
  int32_t panel;  // where that logit is; -1: not known
};

// A panel that may have the largest logit of a row: it has none above `upper`.
struct ScreenHit {
  int32_t row, panel;
  float upper;
};

// The hits found so far. Where there is no room for a row's, its `panel` becomes kScreenFull.
struct ScreenHits {
  ScreenHit *data;
  int count, room;
};
constexpr int32_t kScreenFull = -2;

}  // namespace foreword::kernels
