// The table of kernels of FOREWORD_ISA. Compiled once per instruction set, like every kernel source.
#include "kernels/isa_functions.h"

#define FW_STRING2(x) #x
#define FW_STRING(x) FW_STRING2(x)
#define FW_ENTRY(name) .name = name,

namespace foreword::kernels::FOREWORD_ISA {

extern const Isa kIsa;
// Constant: no instruction of the set runs before the processor is known to have it.
constinit const Isa kIsa = {.name = FW_STRING(FOREWORD_ISA),
                            .panel_width = kPanelWidth,
                            .bf16_dot = kBf16Dot,
                            FW_ISA_FUNCTIONS(FW_ENTRY, FW_ENTRY, FW_ENTRY)};

}  // namespace foreword::kernels::FOREWORD_ISA
