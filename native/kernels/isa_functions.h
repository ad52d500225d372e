// The functions of the table `Isa`, declared in the namespace of the instruction set. isa.h says what each does.
#pragma once

#include <type_traits>

#include "kernels/isa.h"
#include "kernels/simd/simd.h"

// In the order of the table. P: functions with products of pairs of inputs (bf16), or that depend on how these are
// packed. Q: with products of quads (8 bit), but not of pairs. B: the others. Instruction sets that differ in products
// alone share the functions B, compiled for FOREWORD_BASE; those that differ in pairs alone also share the functions Q,
// compiled for FOREWORD_QUADS.
#define FW_ISA_FUNCTIONS(P, Q, B)                                                                                   \
  P(panel_bytes) P(pack_scratch_bytes) P(pack_panel) P(decode_row) P(linear_scratch_bytes) P(linear) P(prepare_row) \
  Q(pack_screen) Q(screen_reach) Q(screen_rows)                                                                     \
  Q(pack_lora) Q(lora_shrink) Q(lora_expand)                                                                        \
  B(rms_norm) B(layer_norm) B(gate_mul) B(clamped_gate_mul) B(activate) B(xielu) B(add_row) B(add_scaled)           \
  B(mix_rows) B(dot) B(softcap) B(convolve) B(scan_state) B(scan_selective) B(scan_gated) B(channel_decays)         \
  B(norm_parts) B(make_head)                                                                                        \
  P(store_kv) P(attention_scratch_bytes) P(attention_queries) P(attend) P(merge_splits) P(index_scores)             \
  B(sample_scratch_bytes) B(logit_maxima) B(greedy_token) B(scan_row) B(sample_row) B(row_logprobs) B(copy_logits)  \
  P(peak_f32) P(peak_bf16) P(peak_i8) P(read_memory)

#define FW_DECLARE(name) std::remove_pointer_t<decltype(Isa::name)> name;
#define FW_USE_QUADS(name) using FOREWORD_QUADS::name;
#define FW_USE_BASE(name) using FOREWORD_BASE::name;
#define FW_NONE(name)

namespace foreword::kernels::FOREWORD_BASE {
FW_ISA_FUNCTIONS(FW_NONE, FW_NONE, FW_DECLARE)
}  // namespace foreword::kernels::FOREWORD_BASE

namespace foreword::kernels::FOREWORD_QUADS {
FW_ISA_FUNCTIONS(FW_NONE, FW_DECLARE, FW_NONE)
FW_DECLARE(linear)  // products of formats without pairs
}  // namespace foreword::kernels::FOREWORD_QUADS

namespace foreword::kernels::FOREWORD_ISA {
FW_ISA_FUNCTIONS(FW_DECLARE, FW_USE_QUADS, FW_USE_BASE)
}  // namespace foreword::kernels::FOREWORD_ISA
