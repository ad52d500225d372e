// The highest rates of arithmetic and memory reads with one instruction set.
#pragma once

#include "kernels/formats.h"
#include "kernels/simd/simd.h"

namespace foreword::kernels::FOREWORD_ISA {

double peak_f32(int64_t repeats);
double peak_bf16(int64_t repeats);
double peak_i8(int64_t repeats);
size_t read_memory(const uint8_t *data, size_t bytes);

}  // namespace foreword::kernels::FOREWORD_ISA
