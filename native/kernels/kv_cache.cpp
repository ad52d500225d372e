#include "kernels/kv_cache.h"

#include <algorithm>
#include <cstring>

namespace foreword::kernels {

namespace {

// Bytes of a key of one token and head.
size_t token_bytes(KVFormat format, const HeadShape &heads) {
  const size_t element = format == KVFormat::f32 ? 4 : format == KVFormat::bf16 ? 2 : 1;
  return size_t(heads.padded_dim) * element + (format == KVFormat::i8 ? sizeof(float) : 0);
}

}  // namespace

KVLayer KVCache::shape(const KVConfig &c, const HeadShape &heads) {
  KVLayer layer{};
  layer.format = c.format;
  layer.tiled = c.block_size % kTile == 0;
  layer.block_size = c.block_size;
  layer.num_kv_heads = heads.num_kv_heads;
  layer.head_dim = heads.head_dim;
  layer.padded_dim = heads.padded_dim;
  layer.token_bytes = token_bytes(c.format, heads);
  layer.tile_bytes = kTile * layer.token_bytes;
  layer.head_stride = product(2 * layer.token_bytes, size_t(c.block_size));
  auto of_block = [&](const HeadShape &of) {
    return product(product(2 * token_bytes(c.format, of), size_t(c.block_size)), size_t(of.num_kv_heads));
  };
  layer.block_stride = of_block(c.heads());
  for (const HeadShape &other : c.more_heads) layer.block_stride = std::max(layer.block_stride, of_block(other));
  if (c.recurrent.num_heads) {
    layer.block_stride = std::max(layer.block_stride, product(c.recurrent.state_floats(), sizeof(float)));
  }
  layer.block_stride = product(layer.block_stride, size_t(c.num_slots));
  return layer;
}

size_t KVCache::bytes(const KVConfig &c) { return product(shape(c).block_stride, size_t(c.num_blocks)); }

KVCache::KVCache(const KVConfig &config) : config_(config), memory_(bytes(config)) {}

KVLayer KVCache::layer(int slot, const HeadShape &heads) const {
  KVLayer layer = shape(config_, heads);
  layer.base = memory_.data() + layer.block_stride / size_t(config_.num_slots) * size_t(slot);
  return layer;
}

float *KVCache::state(int slot, int32_t block) const {
  const KVLayer of = layer(slot);
  return reinterpret_cast<float *>(of.base + size_t(block) * of.block_stride);
}

void KVCache::copy_blocks(const int32_t *sources, const int32_t *destinations, int count) {
  const size_t size = shape(config_).block_stride;
  Buffer<uint8_t> between;
  between.reserve(product(size, size_t(count)));
  for (int i = 0; i < count; ++i) std::memcpy(between.data() + size * size_t(i), block(sources[i]), size);
  for (int i = 0; i < count; ++i) std::memcpy(block(destinations[i]), between.data() + size * size_t(i), size);
}

void KVCache::touch(int begin, int end, int head_begin, int head_end) {
  constexpr size_t kPage = 4096;
  const KVLayer of = shape(config_);
  const size_t slot_bytes = of.block_stride / size_t(config_.num_slots), first = of.head_stride * size_t(head_begin);
  const size_t last = head_end == config_.num_kv_heads ? slot_bytes : of.head_stride * size_t(head_end);
  for (int id = begin; id < end; ++id) {
    for (int slot = 0; slot < config_.num_slots; ++slot) {
      volatile uint8_t *bytes = block(id) + slot_bytes * size_t(slot);
      for (size_t at = first; at < last; at += kPage) bytes[at] = bytes[at];
      bytes[last - 1] = bytes[last - 1];
    }
  }
}

void KVCache::read_blocks(const int32_t *blocks, int count, uint8_t *data) const {
  const size_t size = block_bytes();
  for (int i = 0; i < count; ++i) std::memcpy(data + size * size_t(i), block(blocks[i]), size);
}

void KVCache::write_blocks(const int32_t *blocks, int count, const uint8_t *data) {
  const size_t size = block_bytes();
  for (int i = 0; i < count; ++i) std::memcpy(block(blocks[i]), data + size * size_t(i), size);
}

void KVCache::zero_blocks(const int32_t *blocks, int count) {
  for (int i = 0; i < count; ++i) std::memset(block(blocks[i]), 0, shape(config_).block_stride);
}

uint8_t *KVCache::block(int32_t id) const { return memory_.data() + shape(config_).block_stride * size_t(id); }

}  // namespace foreword::kernels
