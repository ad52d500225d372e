// A decoder's weights, packed, and the memory a step works in. Knows sizes and kinds, never a model's name.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kv_cache.h"
#include "kernels/level.h"
#include "kernels/memory.h"
#include "kernels/thread_pool.h"

namespace foreword::kernels {

// Row buffers are padded to this many floats: whole panels and whole blocks of every level.
constexpr int kRowPadding = 64;
inline int padded_row(int size) { return (size + kRowPadding - 1) / kRowPadding * kRowPadding; }

// Matrices with one input whose outputs lie side by side in a row, each from a multiple of kRowPadding on.
struct Linear {
  struct Part {
    const PackedMatrix *matrix;
    int offset;  // of its first output in the row
  };
  std::vector<Part> parts;
  int cols = 0;
  int stride = 0;  // floats of an output row
  int num_panels = 0;
};

struct Mlp {
  Linear gate, up, down;
};

struct Moe {
  Linear router, shared_gate;
  std::vector<Mlp> experts;
  std::unique_ptr<Mlp> shared;
  int experts_per_token = 0;
  bool norm_topk = true;
};

using Vector = const float *;  // padded with zeros to padded_row(size); null if the layer has none

struct Layer {
  Vector attn_norm = nullptr, mlp_norm = nullptr, post_attn_norm = nullptr, post_mlp_norm = nullptr;
  Vector q_norm = nullptr, k_norm = nullptr;
  Vector q_bias = nullptr, k_bias = nullptr, v_bias = nullptr;
  Linear qkv, o;
  std::unique_ptr<Mlp> mlp;
  std::unique_ptr<Moe> moe;
  int rope = -1;  // index of its rotary embedding; −1: none
  int64_t sliding_window = 0;
  int group = 0, slot = 0;
};

struct Rope {
  std::vector<double> inv_freq;
  double scale;
};

struct ModelConfig {
  int hidden_size, num_heads, num_kv_heads, head_dim, vocab_size, num_groups;
  float norm_eps, query_scale, embedding_scale;
  Gate activation;
  float attn_softcap, final_softcap;  // 0: none
};

// The input of a product in each kind that some matrix asks for.
struct ActivationSet {
  Activations kinds[kNumActivationKinds];
  bool used[kNumActivationKinds] = {};
};

// `exact`: integer weights take 15-bit activations.
ActivationKind activation_kind(Format format, bool exact, const Level &level);

// Memory for activations. Uses of different widths share it: `view` lays `rows` rows of `cols` inputs out in it.
class ActivationBuffer {
 public:
  void reserve(int rows, int cols, const bool *kinds);
  ActivationSet view(int rows, int cols) const;

 private:
  Buffer<uint8_t> memory_[kNumActivationKinds];
  bool used_[kNumActivationKinds] = {};
};

class Model {
 public:
  Model(const ModelConfig &config, const KVConfig &kv, const Level &level, int num_threads);

  // Packing. `source` stays in use only by `set_embedding`, whose rows are read as tokens need them.
  const PackedMatrix *pack(const SourceMatrix &source, Format format, bool exact);
  Vector copy_vector(const float *data, int size);
  Linear make_linear(const std::vector<const PackedMatrix *> &matrices);
  void set_embedding(const SourceMatrix &source) { embedding = source; }

  size_t packed_bytes() const { return arena_.used(); }

  const ModelConfig config;
  const Level &level;
  ThreadPool pool;
  KVCache kv;
  SourceMatrix embedding{};
  Vector final_norm = nullptr;
  Linear lm_head;
  std::vector<Layer> layers;
  std::vector<Rope> ropes;
  int padded_dim;  // head_dim rounded up to whole vectors of every level

 private:
  Arena arena_;
  std::vector<std::unique_ptr<PackedMatrix>> matrices_;
};

}  // namespace foreword::kernels
