// Which level of kernels this machine runs.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/level.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace foreword::kernels {

#define FW_DECLARE(level) \
  namespace level {       \
  extern const Level kLevel; \
  }
FW_DECLARE(scalar)
FW_DECLARE(avx2)
FW_DECLARE(avx512_vnni)
FW_DECLARE(avx512_bf16)
FW_DECLARE(neon)
#undef FW_DECLARE

namespace {

const Level *const kLevels[] = {
#if defined(FOREWORD_HAS_avx512_bf16)
    &avx512_bf16::kLevel,
#endif
#if defined(FOREWORD_HAS_avx512_vnni)
    &avx512_vnni::kLevel,
#endif
#if defined(FOREWORD_HAS_avx2)
    &avx2::kLevel,
#endif
#if defined(FOREWORD_HAS_neon)
    &neon::kLevel,
#endif
    &scalar::kLevel,
};
constexpr int kNumLevels = sizeof kLevels / sizeof kLevels[0];

}  // namespace

LevelList built_levels() { return {kLevels, kNumLevels}; }

bool machine_has(const Level &level) {
  const std::string name = level.name;
  if (name == "scalar") return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (name == "avx2") return avx2;
  if (name == "avx512_vnni") return avx512;
  if (name == "avx512_bf16") return avx512 && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__) && defined(__linux__)
  if (name == "neon") return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  if (name == "neon") return true;  // every Apple core has the dot product
#endif
  return false;
}

const Level &choose_level(const char *name) {
  std::string asked = name ? name : "";
  if (asked.empty()) {
    const char *variable = std::getenv("FOREWORD_ISA");
    asked = variable ? variable : "";
  }
  std::string usable;
  for (const Level *level : kLevels) {
    if (!machine_has(*level)) continue;
    if (asked.empty() || asked == level->name) return *level;
    usable += (usable.empty() ? "" : ", ") + std::string(level->name);
  }
  throw std::invalid_argument("instruction set '" + asked + "' (FOREWORD_ISA): this machine or build does not have it; it has " +
                              usable);
}

}  // namespace foreword::kernels
