// The memory of keys and values, blocks with `num_slots` layers, and behind it that of recurrent states, with
// `num_state_slots` layers each. A block's layers are adjacent, so that the first request maps few (huge) pages.
#pragma once

#include <vector>

#include "kernels/formats.h"
#include "kernels/memory.h"
#include "kernels/recurrent.h"

namespace foreword::kernels {

// The heads of a layer: of its keys and values, and of its queries. padded_dim, padded_value: the sizes of a key and of
// a value, rounded up to whole vectors of every instruction set.
struct HeadShape {
  int num_kv_heads, head_dim, padded_dim, num_heads, value_dim, padded_value;

  int per_key() const { return num_heads / num_kv_heads; }
  static HeadShape of(int num_kv_heads, int head_dim, int num_heads, int value_dim) {
    auto padded = [](int dim) { return (dim + kTile - 1) / kTile * kTile; };
    return {num_kv_heads, head_dim, padded(head_dim), num_heads, value_dim, padded(value_dim)};
  }
};

struct KVConfig {
  KVFormat format;
  int num_blocks, block_size, num_slots;
  HeadShape heads;  // those of the model
  bool keys_are_values;  // latent attention: each head is stored once
  RecurrentConfig recurrent;
  std::vector<HeadShape> more_heads = {};  // other shapes of some layers; a slot has room for the largest
  // States of one request each, whose ids follow those of the blocks. 0: a block also holds such a state.
  int num_states = 0;
  int num_state_slots = 0;
  // The size of an indexer's key, one per token of a layer, behind its other keys, which are values too. 0: there are
  // none.
  int index_dim = 0;

  int parts() const { return keys_are_values ? 1 : 2; }
  int num_ids() const { return num_blocks + num_states; }
  int first_state() const { return num_states ? num_blocks : 0; }
};

class KVCache {
 public:
  explicit KVCache(const KVConfig &config);

  // Bytes of a pool with this configuration, computed without allocating it.
  static size_t bytes(const KVConfig &config);

  const KVConfig &config() const { return config_; }
  KVLayer layer(int slot) const { return layer(slot, config_.heads); }
  KVLayer layer(int slot, const HeadShape &heads) const;
  // The keys of a layer's indexer, as those of one head.
  KVLayer index_layer(int slot) const;
  // The state of a recurrent layer, recurrent.state_floats() floats.
  float *state(int slot, int32_t id) const;
  // See Mapping. Call it before anything is written.
  void use_small_pages() const { memory_.use_small_pages(); }
  // Copies blocks or states in all layers. All sources are read before any destination is written.
  void copy_blocks(const int32_t *sources, const int32_t *destinations, int count);
  // Writes to every page of the key heads [head_begin, head_end) of blocks [begin, end), in all layers, and changes
  // nothing: the system provides the memory at the first write. States are written with the last head.
  void touch(int begin, int end, int head_begin, int head_end);
  // Bytes of a block or a state, all its layers.
  size_t bytes_of(int32_t id) const { return id < config_.num_blocks ? block_bytes_ : state_bytes_; }
  // Copies whole blocks or states to or from `data`, bytes_of() for each.
  void read_blocks(const int32_t *blocks, int count, uint8_t *data) const;
  void write_blocks(const int32_t *blocks, int count, const uint8_t *data);
  // Sets blocks or states in all layers to zero.
  void zero_blocks(const int32_t *blocks, int count);

 private:
  uint8_t *block(int32_t id) const;

  KVConfig config_;
  size_t slot_bytes_, block_bytes_, state_bytes_, states_at_;
  Mapping memory_;
};

}  // namespace foreword::kernels
