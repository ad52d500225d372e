// Paged attention over tiles of 16 keys, and the layout of keys and values in a block.
#pragma once

#include "kernels/formats.h"
#include "kernels/simd/simd.h"

namespace foreword::kernels::FOREWORD_ISA {

void store_kv(const KVLayer &kv, int64_t slot, int head, const float *k, const float *v, void *scratch);
size_t attention_scratch_bytes(const AttentionConfig &config);
int attention_queries(const AttentionConfig &config);
void attend(const KVLayer &kv, const AttentionConfig &config, const AttentionTile &tile, void *scratch);
void merge_splits(const AttentionConfig &config, const AttentionTile &tile, int num_splits, size_t split_stride);

}  // namespace foreword::kernels::FOREWORD_ISA
