// The table of kernels of FOREWORD_ISA. Compiled once per instruction set, like every kernel source.
#include "kernels/isa.h"

#include "kernels/activations.h"
#include "kernels/attention.h"
#include "kernels/linear.h"
#include "kernels/packing.h"
#include "kernels/peaks.h"
#include "kernels/row_ops.h"
#include "kernels/sampler.h"

#define FW_STRING2(x) #x
#define FW_STRING(x) FW_STRING2(x)

namespace foreword::kernels::FOREWORD_ISA {

extern const Isa kIsa;
const Isa kIsa = {
    .name = FW_STRING(FOREWORD_ISA),
    .panel_width = kPanelWidth,
    .bf16_dot = kBf16Dot,
    .panel_bytes = panel_bytes,
    .pack_scratch_bytes = pack_scratch_bytes,
    .pack_panel = pack_panel,
    .decode_row = decode_row,
    .linear_scratch_bytes = linear_scratch_bytes,
    .linear = linear,
    .prepare_row = prepare_row,
    .rms_norm = rms_norm,
    .gate_mul = gate_mul,
    .add = add_row,
    .rotate = rotate,
    .softcap = softcap,
    .store_kv = store_kv,
    .attention_scratch_bytes = attention_scratch_bytes,
    .attention_queries = attention_queries,
    .attend = attend,
    .merge_splits = merge_splits,
    .sample_scratch_bytes = sample_scratch_bytes,
    .sample_row = sample_row,
    .peak_f32 = peak_f32,
    .peak_bf16 = peak_bf16,
    .peak_i8 = peak_i8,
    .read_memory = read_memory,
};

}  // namespace foreword::kernels::FOREWORD_ISA
