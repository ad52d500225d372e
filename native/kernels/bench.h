// Timing of single kernels.
#pragma once

#include "kernels/isa.h"
#include "kernels/thread_pool.h"

namespace foreword::kernels {

struct LinearShape {
  Format format;
  bool exact;  // integer weights with 15-bit activations
  int outputs, inputs, rows;
  int copies;  // distinct weight matrices, to exceed the caches
};

// Best seconds of `rounds` for the product with one of the copies, activations prepared.
double time_linear(const LinearShape &shape, const Isa &isa, ThreadPool &pool, int rounds);

struct AttentionShape {
  KVFormat format;
  int num_reqs, queries, context;  // new tokens of each request, and its tokens in all
  int num_heads, num_kv_heads, head_dim;
  int copies;  // distinct caches
};

// Best seconds of `rounds` for attention of one layer.
double time_attention(const AttentionShape &shape, const Isa &isa, ThreadPool &pool, int rounds);

}  // namespace foreword::kernels
