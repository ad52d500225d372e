// Matrix products against packed weights.
#pragma once

#include "kernels/formats.h"
#include "kernels/simd/simd.h"

namespace foreword::kernels::FOREWORD_ISA {

size_t linear_scratch_bytes();
void linear(const PackedMatrix &w, const Activations &a, int row_begin, int row_end, int panel_begin, int panel_end,
            float *out, size_t out_stride, Store store, const uint8_t *next, void *scratch);

}  // namespace foreword::kernels::FOREWORD_ISA
