#include "kernels/dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace foreword::kernels {

// FOREWORD_ISAS: X of each instruction set of this build, best first; sources.cmake defines it.
#define X(isa)           \
  namespace isa {        \
  extern const Isa kIsa; \
  }
FOREWORD_ISAS
#undef X

namespace {

#define X(isa) &isa::kIsa,
const Isa *const kIsas[] = {FOREWORD_ISAS};
#undef X

#if defined(__x86_64__)
// The processor has 8-bit dot products for the vectors of AVX2 (leaf 7.1, EAX bit 4).
bool has_avx_vnni() {
#if defined(FOREWORD_EMULATE)
  return true;
#endif
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 4);
}
#endif

#if defined(__x86_64__) && defined(__linux__)
// The processor has tiles for bf16 and int8 (leaf 7, EDX bits 22, 24 and 25), and the system lets this process use
// them: their state is larger than what every process may use.
bool has_tiles() {
#if defined(FOREWORD_EMULATE)
  return true;
#endif
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & kAll) != kAll) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool machine_has(const Isa &isa) {
  const std::string name = isa.name;
  if (name == "scalar") return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (name == "avx2") return avx2;
  if (name == "avx2_vnni") return avx2 && has_avx_vnni();
  if (name == "avx512_vnni") return avx512;
#if defined(FOREWORD_EMULATE)
  const bool bf16 = avx512;
#else
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  if (name == "avx512_bf16") return bf16;
#if defined(__linux__)
  if (name == "avx512_amx") return bf16 && has_tiles();
#endif
#elif defined(__aarch64__) && defined(__linux__)
  if (name == "neon") return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  if (name == "neon") return true;  // every Apple core has the dot product
#endif
  return false;
}

// Returns whether the next instruction set is faster. Intel's processors start a bf16 dot product of vectors in every
// second cycle and two float multiply-adds in each cycle: twice the arithmetic, and more exact.
bool is_slow([[maybe_unused]] const Isa &isa) {
#if defined(__x86_64__) && !defined(FOREWORD_EMULATE)
  if (std::string(isa.name) == "avx512_bf16") return __builtin_cpu_is("intel");
#endif
  return false;
}

std::vector<const Isa *> find_usable_isas() {
  std::vector<const Isa *> usable;
  for (const Isa *isa : kIsas) {
    if (machine_has(*isa)) usable.push_back(isa);
  }
  const auto slow = std::find_if(usable.begin(), usable.end(), [](const Isa *isa) { return is_slow(*isa); });
  if (slow != usable.end()) std::iter_swap(slow, slow + 1);  // scalar is behind every other one
  return usable;
}

// Found once: a virtual machine takes tens of microseconds to say what its processor has.
const std::vector<const Isa *> &found_isas() {
  static const std::vector<const Isa *> found = find_usable_isas();
  return found;
}

}  // namespace

std::vector<const Isa *> usable_isas() { return found_isas(); }

const Isa &choose_isa(const std::string &name) {
  std::string wanted = name;
  if (wanted.empty()) {
    const char *variable = std::getenv("FOREWORD_ISA");
    wanted = variable ? variable : "";
  }
  std::string usable;
  for (const Isa *isa : found_isas()) {
    if (wanted.empty() || wanted == isa->name) return *isa;
    usable += (usable.empty() ? "" : ", ") + std::string(isa->name);
  }
  throw std::invalid_argument("instruction set '" + wanted +
                              "' (FOREWORD_ISA): this machine or build does not have it; it has " + usable);
}

}  // namespace foreword::kernels
