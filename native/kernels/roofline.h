// The machine's own limits at one level: what the kernels' speed is a fraction of.
#pragma once

#include "kernels/formats.h"
#include "kernels/simd/simd.h"

namespace foreword::kernels::FOREWORD_LEVEL {

double peak_f32(int64_t repeats);
double peak_bf16(int64_t repeats);
double peak_i8(int64_t repeats);
uint64_t read_memory(const uint8_t *data, size_t bytes);

}  // namespace foreword::kernels::FOREWORD_LEVEL
