#include "kernels/kv_cache.h"

#include <algorithm>
#include <cstring>

namespace foreword::kernels {

namespace {

// Bytes of a key, or a value, of one token and head.
size_t token_bytes(KVFormat format, int padded_dim) {
  const size_t element = format == KVFormat::f32 ? 4 : format == KVFormat::bf16 ? 2 : 1;
  return size_t(padded_dim) * element + (format == KVFormat::i8 ? sizeof(float) : 0);
}

// Bytes of the key of one token and head, and of its value, if that is stored.
size_t both_bytes(const KVConfig &c, const HeadShape &heads) {
  return token_bytes(c.format, heads.padded_dim) + (c.keys_are_values ? 0 : token_bytes(c.format, heads.padded_value));
}

// Bytes of a layer's keys and values in a block, but for those of an indexer.
size_t keys_bytes(const KVConfig &c) {
  auto of_heads = [&](const HeadShape &of) {
    return product(product(both_bytes(c, of), size_t(c.block_size)), size_t(of.num_kv_heads));
  };
  size_t most = of_heads(c.heads);
  for (const HeadShape &other : c.more_heads) most = std::max(most, of_heads(other));
  return most;
}

HeadShape index_shape(const KVConfig &c) { return HeadShape::of(1, c.index_dim, 1, c.index_dim); }

size_t slot_bytes(const KVConfig &c) {
  if (!c.index_dim) return keys_bytes(c);
  const size_t of_token = token_bytes(c.format, index_shape(c).padded_dim);
  return product(2, keys_bytes(c)) / 2 + product(2 * of_token, size_t(c.block_size)) / 2;
}

size_t state_bytes(const KVConfig &c) {
  if (!c.recurrent.num_heads) return 0;
  return product(product(c.recurrent.state_floats(), sizeof(float)), size_t(c.num_state_slots));
}

size_t block_bytes(const KVConfig &c) {
  const size_t keys = product(slot_bytes(c), size_t(c.num_slots));
  return c.num_states ? keys : std::max(keys, state_bytes(c));
}

// Where states begin that are not in blocks, at a whole cache line. Throws std::bad_alloc for half of
// the largest size, so that the sum with the states is a size, too.
size_t states_at(const KVConfig &c) {
  return (product(block_bytes(c), 2 * size_t(c.num_blocks)) / 2 + 63) / 64 * 64;
}

}  // namespace

size_t KVCache::bytes(const KVConfig &c) {
  return states_at(c) + product(state_bytes(c), 2 * size_t(c.num_states)) / 2;
}

KVCache::KVCache(const KVConfig &config)
    : config_(config),
      slot_bytes_(slot_bytes(config)),
      block_bytes_(block_bytes(config)),
      state_bytes_(state_bytes(config)),
      states_at_(states_at(config)),
      memory_(bytes(config)) {}

KVLayer KVCache::layer(int slot, const HeadShape &heads) const {
  KVLayer layer{};
  layer.format = config_.format;
  layer.tiled = config_.block_size % kTile == 0;
  layer.parts = config_.parts();
  layer.block_size = config_.block_size;
  layer.num_kv_heads = heads.num_kv_heads;
  layer.padded_dim = heads.padded_dim;
  layer.padded_value = heads.padded_value;
  layer.token_bytes = token_bytes(config_.format, heads.padded_dim);
  layer.both_bytes = both_bytes(config_, heads);
  layer.tile_bytes = kTile * layer.token_bytes;
  layer.both_tiles_bytes = kTile * layer.both_bytes;
  layer.head_stride = product(layer.both_bytes, size_t(config_.block_size));
  layer.block_stride = block_bytes_;
  layer.base = memory_.data() + slot_bytes_ * size_t(slot);
  return layer;
}

KVLayer KVCache::index_layer(int slot) const {
  KVLayer layer = this->layer(slot, index_shape(config_));
  layer.base += keys_bytes(config_);
  return layer;
}

float *KVCache::state(int slot, int32_t id) const {
  return reinterpret_cast<float *>(block(id)) + config_.recurrent.state_floats() * size_t(slot);
}

void KVCache::copy_blocks(const int32_t *sources, const int32_t *destinations, int count) {
  const int32_t *end = sources + count;
  if (std::find_first_of(sources, end, destinations, destinations + count) == end) {  // no source is written
    for (int i = 0; i < count; ++i) read_blocks(sources + i, 1, block(destinations[i]));
    return;
  }
  size_t total = 0;
  for (int i = 0; i < count; ++i) total += bytes_of(sources[i]);
  Buffer<uint8_t> between;
  between.reserve(total);
  read_blocks(sources, count, between.data());
  write_blocks(destinations, count, between.data());
}

void KVCache::touch(int begin, int end, int head_begin, int head_end) {
  auto touch = [](uint8_t *from, uint8_t *to) {
    constexpr size_t kPage = 4096;
    if (from >= to) return;
    for (volatile uint8_t *at = from; at < to; at += kPage) *at = *at;
    volatile uint8_t *last = to - 1;
    *last = *last;
  };
  const bool is_last = head_end == config_.heads.num_kv_heads;
  const size_t stride = layer(0).head_stride, first = stride * size_t(head_begin);
  const size_t last = is_last ? slot_bytes_ : stride * size_t(head_end);
  for (int id = begin; id < end; ++id) {
    const size_t keys = id < config_.num_blocks ? slot_bytes_ * size_t(config_.num_slots) : 0;
    for (size_t slot = 0; slot < keys; slot += slot_bytes_) touch(block(id) + slot + first, block(id) + slot + last);
    if (is_last) touch(block(id) + keys, block(id) + bytes_of(id));
  }
}

void KVCache::read_blocks(const int32_t *blocks, int count, uint8_t *data) const {
  for (int i = 0; i < count; data += bytes_of(blocks[i++])) std::memcpy(data, block(blocks[i]), bytes_of(blocks[i]));
}

void KVCache::write_blocks(const int32_t *blocks, int count, const uint8_t *data) {
  for (int i = 0; i < count; data += bytes_of(blocks[i++])) std::memcpy(block(blocks[i]), data, bytes_of(blocks[i]));
}

void KVCache::zero_blocks(const int32_t *blocks, int count) {
  for (int i = 0; i < count; ++i) std::memset(block(blocks[i]), 0, bytes_of(blocks[i]));
}

uint8_t *KVCache::block(int32_t id) const {
  if (id < config_.num_blocks) return memory_.data() + block_bytes_ * size_t(id);
  return memory_.data() + states_at_ + state_bytes_ * size_t(id - config_.num_blocks);
}

}  // namespace foreword::kernels
