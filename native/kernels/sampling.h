// Sampling the next tokens of a batch. sampler.cpp defines the draw from one row of logits.
#pragma once

#include "kernels/isa.h"
#include "kernels/thread_pool.h"

namespace foreword::kernels {

struct SamplingInput {
  int num_logits, vocab_size;
  const float *logits;  // [L, vocab_size], rows logits_stride floats apart
  ptrdiff_t logits_stride;
  const int64_t *positions;  // [L]
  const int32_t *rows;       // [L]: the row of the parameters below
  int64_t num_rows;
  const float *temperature;
  const int32_t *top_k;
  const float *top_p, *min_p;
  const int64_t *seeds;
};

// Scratch memory of one thread.
size_t sampling_scratch_bytes(const Isa &isa, int vocab_size);

// out[i] = the token drawn from logits[i] with the parameters at rows[i] for positions[i]. `pool`: null for the calling
// thread alone. `scratch`: memory for each thread. Throws std::invalid_argument if a row is out of range, before
// anything is written.
void sample(const SamplingInput &input, const Isa &isa, ThreadPool *pool, uint8_t *scratch, int32_t *out);

}  // namespace foreword::kernels
