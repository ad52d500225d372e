// The sampling parameters that native code computes with: columns of foreword/batch/values/sampling_params.py by type
// and name. A test compares them with that table.
#pragma once

#include <cstdint>

namespace foreword::kernels {

#define FOREWORD_PARAMETERS(X)   \
  X(float, temperature)          \
  X(float, top_p)                \
  X(int32_t, top_k)              \
  X(float, min_p)                \
  X(float, presence_penalty)     \
  X(float, frequency_penalty)    \
  X(float, repetition_penalty)   \
  X(float, typical_p)            \
  X(float, top_n_sigma)          \
  X(float, xtc_probability)      \
  X(float, xtc_threshold)        \
  X(float, dry_multiplier)       \
  X(float, dry_base)             \
  X(int32_t, dry_allowed_length) \
  X(int32_t, dry_range)          \
  X(int64_t, seed)               \
  X(int32_t, min_tokens)

// The parameters of one row.
struct Parameters {
#define FOREWORD_VALUE(type, name) type name;
  FOREWORD_PARAMETERS(FOREWORD_VALUE)
#undef FOREWORD_VALUE
};

}  // namespace foreword::kernels
