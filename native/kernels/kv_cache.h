// The memory of keys, values and recurrent states: one pool of blocks, each with `num_slots` layers. A block's layers
// are adjacent, so that the first request maps few (huge) pages.
#pragma once

#include <vector>

#include "kernels/formats.h"
#include "kernels/memory.h"
#include "kernels/recurrent.h"

namespace foreword::kernels {

// The heads of the keys and values of a layer. padded_dim: head_dim rounded up to whole vectors of every instruction
// set.
struct HeadShape {
  int num_kv_heads, head_dim, padded_dim;
};

struct KVConfig {
  KVFormat format;
  int num_blocks, block_size, num_slots, num_kv_heads, head_dim, padded_dim;
  RecurrentConfig recurrent;  // a block also holds the states of one request in num_slots recurrent layers
  std::vector<HeadShape> more_heads = {};  // other shapes of some layers; a slot has room for the largest

  HeadShape heads() const { return {num_kv_heads, head_dim, padded_dim}; }
};

class KVCache {
 public:
  explicit KVCache(const KVConfig &config);

  // Bytes of a pool with this configuration, computed without allocating it.
  static size_t bytes(const KVConfig &config);

  const KVConfig &config() const { return config_; }
  KVLayer layer(int slot) const { return layer(slot, config_.heads()); }
  KVLayer layer(int slot, const HeadShape &heads) const;
  // The state of a recurrent layer in a block, recurrent.state_floats() floats.
  float *state(int slot, int32_t block) const;
  // See Mapping. Call it before anything is written.
  void use_small_pages() const { memory_.use_small_pages(); }
  // Copies blocks in all layers, for copy on write. All sources are read before any destination
  // is written.
  void copy_blocks(const int32_t *sources, const int32_t *destinations, int count);
  // Writes to every page of the key heads [head_begin, head_end) of blocks [begin, end), in all layers, and changes
  // nothing: the system provides the memory at the first write.
  void touch(int begin, int end, int head_begin, int head_end);
  // Bytes of a block, all its layers.
  size_t block_bytes() const { return shape(config_).block_stride; }
  // Copies whole blocks to or from `data`, block_bytes() for each.
  void read_blocks(const int32_t *blocks, int count, uint8_t *data) const;
  void write_blocks(const int32_t *blocks, int count, const uint8_t *data);
  // Sets blocks in all layers to zero.
  void zero_blocks(const int32_t *blocks, int count);

 private:
  static KVLayer shape(const KVConfig &config, const HeadShape &heads);
  static KVLayer shape(const KVConfig &config) { return shape(config, config.heads()); }
  uint8_t *block(int32_t id) const;

  KVConfig config_;
  Mapping memory_;
};

}  // namespace foreword::kernels
