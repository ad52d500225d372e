// The input of products in the kinds that packed weights take.
#pragma once

#include "kernels/formats.h"
#include "kernels/words.h"

namespace foreword::kernels::FOREWORD_ISA {

constexpr size_t activation_bytes(ActivationKind kind) {
  return kind == ActivationKind::f32 ? 4 : kind == ActivationKind::bf16 || kind == ActivationKind::i15 ? 2 : 1;
}

// Returns the place of input k of row `row`, in the high plane if there are two.
template <class T>
FW_INLINE T *activation_at(const Activations &a, int row, int k, int inputs_per_piece) {
  const size_t piece = size_t(k / inputs_per_piece), within = size_t(k % inputs_per_piece);
  return reinterpret_cast<T *>(a.data + piece * a.piece_stride + size_t(row) * kPieceBytes) + within;
}

}  // namespace foreword::kernels::FOREWORD_ISA
