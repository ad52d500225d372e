// One row of a weight matrix of a file, decoded.
#pragma once

#include "kernels/formats.h"
#include "kernels/simd/simd.h"

namespace foreword::kernels {

constexpr int kHalf = 16;  // the smallest block of any format

// w[k] = d[k / 16] * q[k] + m[k / 16]
struct BlockRow {
  int8_t *q;
  float *d, *m;
};

constexpr bool is_float(Source s) { return s == Source::f32 || s == Source::f16 || s == Source::bf16; }

namespace FOREWORD_BASE {

// Unpacks row `row` of a block format. cols is a multiple of the format's block.
void decode_blocks(const SourceMatrix &source, int row, const BlockRow &out);

// The row as floats, from any format; `blocks` is scratch memory for the block formats.
void decode_floats(const SourceMatrix &source, int row, const BlockRow &blocks, float *out);

}  // namespace FOREWORD_BASE

namespace FOREWORD_ISA {
using FOREWORD_BASE::decode_blocks, FOREWORD_BASE::decode_floats;
}

}  // namespace foreword::kernels
