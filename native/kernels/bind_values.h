// Python values as the structs of the kernels.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "kernels/kv_cache.h"

namespace foreword::kernels {

namespace nb = nanobind;

template <class T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
struct Named {
  const char *name;
  T value;
};

constexpr Named<Source> kSources[] = {
    {"F32", Source::f32},   {"F16", Source::f16},   {"BF16", Source::bf16}, {"Q4_0", Source::q4_0},
    {"Q4_1", Source::q4_1}, {"Q5_0", Source::q5_0}, {"Q5_1", Source::q5_1}, {"Q8_0", Source::q8_0},
    {"Q4_K", Source::q4_k}, {"Q5_K", Source::q5_k}, {"Q6_K", Source::q6_k},
};
constexpr Named<Format> kFormats[] = {
    {"f32", Format::f32},       {"bf16", Format::bf16}, {"i8", Format::i8},         {"q4", Format::q4},
    {"q4_min", Format::q4_min}, {"q8", Format::q8},     {"q8_min", Format::q8_min}, {"q8_half", Format::q8_half},
};
constexpr Named<KVFormat> kKVFormats[] = {{"fp32", KVFormat::f32}, {"bf16", KVFormat::bf16}, {"int8", KVFormat::i8}};
constexpr Named<Gate> kGates[] = {{"silu", Gate::silu}, {"gelu_tanh", Gate::gelu_tanh}};

// The entry of `table` with this name. Throws std::invalid_argument that lists the names.
template <class T, size_t N>
T by_name(const Named<T> (&table)[N], const std::string &name, const char *what) {
  std::string known;
  for (const auto &entry : table) {
    if (name == entry.name) return entry.value;
    known += std::string(known.empty() ? "" : ", ") + entry.name;
  }
  throw std::invalid_argument(std::string(what) + " '" + name + "' is not one of: " + known);
}

// The array's data. Throws std::invalid_argument if it has fewer than `size` entries.
template <class T>
const T *at_least(const Array1<T> &array, size_t size, const char *name) {
  if (array.shape(0) < size) {
    throw std::invalid_argument(std::string(name) + " has " + std::to_string(array.shape(0)) + " entries, " +
                                std::to_string(size) + " are needed");
  }
  return array.data();
}

inline SourceMatrix source_matrix(const Array2<uint8_t> &data, const std::string &source, int cols) {
  return {by_name(kSources, source, "weight source"), int(data.shape(0)), cols, data.shape(1), data.data()};
}

inline KVConfig kv_config(const std::string &format, int num_blocks, int block_size, int num_slots, int num_kv_heads,
                          int head_dim) {
  return {by_name(kKVFormats, format, "KV format"), num_blocks, block_size, num_slots, num_kv_heads, head_dim,
          (head_dim + kTile - 1) / kTile * kTile};
}

}  // namespace foreword::kernels
