// Python values as the structs of the kernels.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/kv_cache.h"
#include "kernels/model.h"
#include "python_types.h"

namespace foreword::kernels {

template <class T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// Bytes that a function writes.
using Bytes2 = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <class T>
struct Named {
  const char *name;
  T value;
};

// A weight format of files: `values` weights in `bytes` bytes, and the format that packs its blocks.
struct SourceFormat {
  Source source;
  int values, bytes;
  Format packed;
};
constexpr Named<SourceFormat> kSources[] = {
    {"F32", {Source::f32, 1, 4, Format::f32}},         {"F16", {Source::f16, 1, 2, Format::bf16}},
    {"BF16", {Source::bf16, 1, 2, Format::bf16}},      {"Q4_0", {Source::q4_0, 32, 18, Format::q4}},
    {"Q4_1", {Source::q4_1, 32, 20, Format::q4_min}},  {"Q5_0", {Source::q5_0, 32, 22, Format::q8}},
    {"Q5_1", {Source::q5_1, 32, 24, Format::q8_min}},  {"Q8_0", {Source::q8_0, 32, 34, Format::q8}},
    {"Q4_K", {Source::q4_k, 256, 144, Format::q4_min}}, {"Q5_K", {Source::q5_k, 256, 176, Format::q8_min}},
    {"Q6_K", {Source::q6_k, 256, 210, Format::q8_half}}, {"MXFP4", {Source::mxfp4, 32, 17, Format::fp4}},
    {"IQ4_NL", {Source::iq4_nl, 32, 18, Format::iq4}}, {"IQ4_XS", {Source::iq4_xs, 256, 136, Format::iq4}},
    {"INT8_16", {Source::int8_16, 16, 20, Format::q8_half}}, {"INT8_32", {Source::int8_32, 32, 36, Format::q8}},
};
constexpr Named<Format> kFormats[] = {
    {"f32", Format::f32},       {"bf16", Format::bf16}, {"i8", Format::i8},         {"q4", Format::q4},
    {"q4_min", Format::q4_min}, {"q8", Format::q8},     {"q8_min", Format::q8_min}, {"q8_half", Format::q8_half},
    {"fp4", Format::fp4},       {"iq4", Format::iq4},   {"iq3_s", Format::iq3_s},   {"iq3_xxs", Format::iq3_xxs},
    {"iq2_xxs", Format::iq2_xxs}, {"iq1_s", Format::iq1_s},
};
constexpr Named<KVFormat> kKVFormats[] = {{"fp32", KVFormat::f32}, {"bf16", KVFormat::bf16}, {"int8", KVFormat::i8}};
constexpr Named<Gate> kGates[] = {
    {"silu", Gate::silu}, {"gelu_tanh", Gate::gelu_tanh}, {"gelu", Gate::gelu}, {"relu", Gate::relu},
    {"relu2", Gate::relu2}};

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

// `value`. Throws std::invalid_argument if it is outside [least, most].
// Raises the error apart from its callers and cold, so that the code of callers stays small.
[[noreturn, gnu::noinline, gnu::cold]] inline void outside(int64_t value, int64_t least, int64_t most,
                                                           const char *name) {
  throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) + " is outside [" +
                              std::to_string(least) + ", " + std::to_string(most) + "]");
}

inline int in_range(int64_t value, int64_t least, int64_t most, const char *name) {
  if (value < least || value > most) outside(value, least, most, name);
  return int(value);
}

// The most rows or columns of a matrix, heads, and tokens, requests or logits of a step. A step's tokens times
// heads or experts fit int.
constexpr int kMostSize = 1 << 24, kMostHeads = 1 << 9, kMostTokens = 1 << 20;

// Throws std::invalid_argument if `size` entries are fewer than `least`.
inline void check_size(size_t size, size_t least, const char *name) {
  if (size >= least) return;
  throw std::invalid_argument(std::string(name) + " has " + std::to_string(size) + " entries, " +
                              std::to_string(least) + " are needed");
}

// A copy that is checked before it is used, because other threads may write to the array meanwhile.
template <class T>
std::vector<T> copied(const Array1<T> &array) {
  return {array.data(), array.data() + array.shape(0)};
}

// The array's data. Throws std::invalid_argument if it has fewer than `size` entries.
template <class T>
const T *at_least(const Array1<T> &array, int size, const char *name) {
  check_size(array.shape(0), size_t(size), name);
  return array.data();
}

// Throws std::invalid_argument unless num_rows = rows and num_cols = cols.
inline void check_shape(int64_t num_rows, int64_t num_cols, int64_t rows, int64_t cols, const char *name) {
  if (num_rows == rows && num_cols == cols) return;
  throw std::invalid_argument(std::string(name) + " has shape (" + std::to_string(num_rows) + ", " +
                              std::to_string(num_cols) + "), expected (" + std::to_string(rows) + ", " +
                              std::to_string(cols) + ")");
}
// The data of an array [rows, cols].
template <class T>
const T *shaped(const Array2<T> &array, int64_t rows, int64_t cols, const char *name) {
  check_shape(int64_t(array.shape(0)), int64_t(array.shape(1)), rows, cols, name);
  return array.data();
}

// An entry of a dict. Throws std::invalid_argument if it is missing or no integer of [least, most].
inline int integer(const nb::dict &d, const char *name, int64_t least, int64_t most) {
  int64_t value = 0;
  if (!d.contains(name) || !nb::try_cast(d[name], value)) {
    throw std::invalid_argument(std::string(name) + " is missing or not an integer");
  }
  return in_range(value, least, most, name);
}

inline SourceMatrix source_matrix(const Array2<uint8_t> &data, const SourceFormat &format, int cols) {
  const int rows = in_range(int64_t(data.shape(0)), 1, kMostSize, "rows");
  const size_t row_bytes = size_t(in_range(cols, 1, kMostSize, "cols") / format.values) * size_t(format.bytes);
  if (cols % format.values || data.shape(1) != row_bytes) {
    throw std::invalid_argument("a row of " + std::to_string(data.shape(1)) + " bytes is not " + std::to_string(cols) +
                                " weights in blocks of " + std::to_string(format.values));
  }
  return {format.source, rows, cols, row_bytes, data.data()};
}

// The sizes of latent attention; an empty dict if the model has none.
inline LatentConfig latent_config(const nb::dict &d, double norm_eps) {
  if (nb::len(d) == 0) return {};
  constexpr int kMost = kMostSize / kMostHeads;
  const LatentConfig c{integer(d, "q_rank", 0, kMost),
                       integer(d, "kv_rank", 1, kMost),
                       integer(d, "nope_dim", 1, kMost),
                       integer(d, "rope_dim", 1, kMost),
                       integer(d, "value_dim", 1, kMost),
                       integer(d, "joins_latents", 0, 1) == 1,
                       float(norm_eps)};
  if (c.joins_latents && !c.q_rank) throw std::invalid_argument("joins_latents: such a model has a q_rank");
  return c;
}

// The sizes of the indexer of sparse attention; an empty dict if the model has none.
inline IndexConfig index_config(const nb::dict &d, const LatentConfig &latent, double norm_eps) {
  if (nb::len(d) == 0) return {};
  if (!latent.q_rank) throw std::invalid_argument("indexer: such a model has latent attention with a q_rank");
  return {integer(d, "num_heads", 1, kMostHeads), integer(d, "head_dim", latent.rope_dim, kMostSize / kMostHeads),
          integer(d, "topk", 1, INT32_MAX), float(norm_eps)};
}

// The sizes of the recurrent layers of a model; an empty dict if it has none.
inline RecurrentConfig recurrent_config(const nb::dict &d) {
  if (nb::len(d) == 0) return {};
  const RecurrentKind kind{integer(d, "kind", 0, int(RecurrentKind::mixed_qkv))};
  const bool has_key_dim = kind != RecurrentKind::short_conv && kind != RecurrentKind::mixed_qkv;
  const bool has_rank = kind == RecurrentKind::mamba1 || kind == RecurrentKind::rg_lru;
  const RecurrentConfig c{.kind = kind,
                          .num_heads = integer(d, "num_heads", 1, kMostHeads),
                          .num_key_heads = integer(d, "num_key_heads", 1, kMostHeads),
                          .key_dim = integer(d, "key_dim", has_key_dim, kMostSize / kMostHeads),
                          .value_dim = integer(d, "value_dim", 1, kMostSize / kMostHeads),
                          .conv_kernel = integer(d, "conv_kernel", 1, kMostHeads),
                          .rank = integer(d, "rank", has_rank, kMostSize / kMostHeads),
                          .tiled = bool(integer(d, "tiled", 0, 1)),
                          .channel_decays = bool(integer(d, "channel_decays", 0, 1)),
                          .heads_kernel = integer(d, "heads_kernel", 1, kMostHeads)};
  in_range(int64_t(c.num_heads) * c.value_dim, 1, kMostSize, "num_heads times value_dim");
  const int64_t kernels = c.conv_kernel + c.heads_kernel;
  in_range(kernels * c.channel_stride(), 1, kMostSize, "conv_kernel times the channels");
  if (c.channel_decays && !c.gated_delta()) throw std::invalid_argument("channel_decays: those of gated_delta alone");
  if (!c.has_keys() && c.num_heads > 1) throw std::invalid_argument("num_heads of mamba1 and of rg_lru is not 1");
  if (c.rg_lru() && (c.key_dim != 1 || c.value_dim % c.rank)) {
    throw std::invalid_argument("rg_lru: key_dim is not 1, or value_dim no multiple of rank");
  }
  if (c.mixed_qkv() ? c.num_inputs() < 1 || c.key_dim : c.heads_kernel > 1) {
    throw std::invalid_argument("heads_kernel: of mixed_qkv alone, whose convolutions read more than one token");
  }
  if (c.num_heads % c.num_key_heads) throw std::invalid_argument("num_heads is not a multiple of num_key_heads");
  return c;
}

// (num_kv_heads, head_dim, num_heads, value_dim) of layers whose heads are not those of the model.
using MoreHeads = std::vector<std::tuple<int, int, int, int>>;

inline KVConfig kv_config(const std::string &format, int num_blocks, int block_size, int num_slots, int num_kv_heads,
                          int head_dim, int value_dim, const nb::dict &recurrent, const MoreHeads &more_heads = {},
                          bool keys_are_values = false, int num_states = 0, int num_state_slots = 0,
                          int index_dim = 0) {
  constexpr int kMost = INT32_MAX;
  const bool has_states = nb::len(recurrent) > 0;
  std::vector<HeadShape> more;
  for (const auto &[count, dim, queries, value] : more_heads) {
    in_range(count, 1, kMostHeads, "num_kv_heads of more_heads");
    in_range(queries, 1, kMostHeads, "num_heads of more_heads");
    if (queries % count) throw std::invalid_argument("num_heads of more_heads is not a multiple of num_kv_heads");
    in_range(dim, 1, kMostSize / queries, "head_dim of more_heads");
    in_range(value, 1, kMostSize / queries, "value_dim of more_heads");
    more.push_back(HeadShape::of(count, dim, queries, value));
  }
  if (index_dim && !keys_are_values) throw std::invalid_argument("index_dim: the keys of such layers are their values");
  return {by_name(kKVFormats, format, "KV format"),
          in_range(num_blocks, 1, kMost, "num_blocks"),
          in_range(block_size, 1, kMost, "block_size"),
          in_range(num_slots, has_states ? 0 : 1, kMostSize, "num_slots"),
          HeadShape::of(in_range(num_kv_heads, 1, kMostHeads, "num_kv_heads"),
                        in_range(head_dim, 1, kMostSize, "head_dim"), num_kv_heads,
                        in_range(value_dim, 1, kMostSize, "value_dim")),
          keys_are_values,
          recurrent_config(recurrent),
          std::move(more),
          in_range(num_states, 0, has_states ? kMost - num_blocks : 0, "num_states"),
          in_range(num_state_slots, 0, kMostSize, "num_state_slots"),
          in_range(index_dim, 0, kMostSize, "index_dim")};
}

}  // namespace foreword::kernels
