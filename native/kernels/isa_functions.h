// The functions of the table `Isa`, declared in the namespace of the instruction set. isa.h says what each does.
#pragma once

#include <type_traits>

#include "kernels/isa.h"
#include "kernels/simd/simd.h"

#define FW_ISA_FUNCTIONS(X)                                                                                         \
  X(panel_bytes) X(pack_scratch_bytes) X(pack_panel) X(decode_row) X(linear_scratch_bytes) X(linear) X(prepare_row) \
  X(pack_screen) X(screen_reach) X(screen_rows)                                                                     \
  X(pack_lora) X(lora_shrink) X(lora_expand)                                                                        \
  X(rms_norm) X(layer_norm) X(gate_mul) X(activate) X(add_row) X(softcap) X(convolve) X(scan_state) X(norm_parts)   \
  X(make_head) X(store_kv) X(attention_scratch_bytes) X(attention_queries) X(attend) X(merge_splits)                \
  X(sample_scratch_bytes) X(logit_maxima) X(scan_row) X(sample_row) X(row_logprobs) X(copy_logits) X(peak_f32)      \
  X(peak_bf16) X(peak_i8) X(read_memory)

namespace foreword::kernels::FOREWORD_ISA {

#define FW_DECLARE(name) std::remove_pointer_t<decltype(Isa::name)> name;
FW_ISA_FUNCTIONS(FW_DECLARE)
#undef FW_DECLARE

}  // namespace foreword::kernels::FOREWORD_ISA
