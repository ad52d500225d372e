// The memory of keys and values: one pool of blocks, with room in every block for `num_slots` layers.
#pragma once

#include "kernels/formats.h"
#include "kernels/memory.h"

namespace foreword::kernels {

struct KVConfig {
  KVFormat format;
  int num_blocks, block_size, num_slots, num_kv_heads, head_dim, padded_dim;
};

class KVCache {
 public:
  explicit KVCache(const KVConfig &config);

  // Bytes a pool with this configuration takes; computed without taking them.
  static size_t bytes(const KVConfig &config);

  const KVConfig &config() const { return config_; }
  KVLayer layer(int slot) const;
  // Copies blocks' keys and values of all layers, for copy on write. All sources are read before any destination is written.
  void copy_blocks(const int32_t *sources, const int32_t *destinations, int count);

 private:
  static KVLayer shape(const KVConfig &config);

  KVConfig config_;
  Mapping memory_;
};

}  // namespace foreword::kernels
