// The functions of the table `Isa`, declared in the namespace of the instruction set. isa.h says what each does.
#pragma once

#include <type_traits>

#include "kernels/isa.h"
#include "kernels/simd/simd.h"

// In the order of the table. P: functions with products of pairs or quads of inputs, or that depend on how these are
// packed. B: the others. Instruction sets that differ in such products alone share them, compiled for FOREWORD_BASE.
#define FW_ISA_FUNCTIONS(P, B)                                                                                      \
  P(panel_bytes) P(pack_scratch_bytes) P(pack_panel) P(decode_row) P(linear_scratch_bytes) P(linear) P(prepare_row) \
  P(pack_screen) P(screen_reach) P(screen_rows)                                                                     \
  P(pack_lora) P(lora_shrink) P(lora_expand)                                                                        \
  B(rms_norm) B(layer_norm) B(gate_mul) B(clamped_gate_mul) B(activate) B(add_row) B(softcap) B(convolve)           \
  B(scan_state) B(norm_parts) B(make_head) P(store_kv) P(attention_scratch_bytes) P(attention_queries) P(attend)    \
  P(merge_splits)                                                                                                   \
  B(sample_scratch_bytes) B(logit_maxima) B(greedy_token) B(scan_row) B(sample_row) B(row_logprobs) B(copy_logits)  \
  P(peak_f32) P(peak_bf16) P(peak_i8) P(read_memory)

#define FW_DECLARE(name) std::remove_pointer_t<decltype(Isa::name)> name;
#define FW_USE(name) using FOREWORD_BASE::name;
#define FW_NONE(name)

namespace foreword::kernels::FOREWORD_BASE {
FW_ISA_FUNCTIONS(FW_NONE, FW_DECLARE)
}  // namespace foreword::kernels::FOREWORD_BASE

namespace foreword::kernels::FOREWORD_ISA {
FW_ISA_FUNCTIONS(FW_DECLARE, FW_USE)
}  // namespace foreword::kernels::FOREWORD_ISA
