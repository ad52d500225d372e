// Operations on one row of the residual stream or of the MLP. Rows and weights are padded to whole vectors with zeros;
// the padding stays zero.
#pragma once

#include "kernels/formats.h"
#include "kernels/simd/simd.h"

namespace foreword::kernels::FOREWORD_ISA {

void rms_norm(const float *x, const float *weight, int size, float eps, float *out);
void gate_mul(Gate gate, const float *g, const float *u, size_t size, float *out);
void add_row(const float *x, size_t size, float *out);
// Rotates the pairs (x[j], x[j + pairs]) by the angles whose cosines and sines are given.
void rotate(const float *cosines, const float *sines, int pairs, float *x);
void softcap(float cap, size_t size, float *x);

}  // namespace foreword::kernels::FOREWORD_ISA
