// Choosing the next token from a row of logits.
#pragma once

#include "kernels/formats.h"
#include "kernels/simd/simd.h"

namespace foreword::kernels::FOREWORD_ISA {

size_t sample_scratch_bytes(int vocab_size);
int32_t sample_row(const float *logits, int vocab_size, const SamplingRow &row, void *scratch);

}  // namespace foreword::kernels::FOREWORD_ISA
