// The instruction sets of this build, and the one this machine runs.
#pragma once

#include <string>
#include <vector>

#include "kernels/isa.h"

namespace foreword::kernels {

// The instruction sets that this build and this machine have, best first. The last one is scalar.
std::vector<const Isa *> usable_isas();

// The instruction set `name`; if empty, that of the variable FOREWORD_ISA; if unset, the best one. Throws
// std::invalid_argument naming the value if it is not usable.
const Isa &choose_isa(const std::string &name);

}  // namespace foreword::kernels
