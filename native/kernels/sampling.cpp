#include "kernels/sampling.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace foreword::kernels {

size_t sampling_scratch_bytes(const Isa &isa, int vocab_size) {
  return (isa.sample_scratch_bytes(vocab_size) + 63) / 64 * 64;
}

void sample(const SamplingInput &in, const Isa &isa, ThreadPool *pool, uint8_t *scratch, int32_t *out) {
  int searches = 0;  // rows that draw from the whole vocabulary; the others cost less than waking a thread
  for (int i = 0; i < in.num_logits; ++i) {
    const int32_t row = in.rows[i];
    if (row < 0 || row >= in.num_rows) {
      throw std::invalid_argument("rows[" + std::to_string(i) + "] = " + std::to_string(row) + " is outside [0, " +
                                  std::to_string(in.num_rows) + ")");
    }
    searches += in.temperature[row] > 0.f && in.top_k[row] <= 0;
  }
  std::atomic<int> next{0};
  auto work = [&](uint8_t *memory) {
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < in.num_logits;) {
      const int32_t row = in.rows[i];
      const SamplingRow options{in.temperature[row], in.top_k[row],           in.top_p[row],
                                in.min_p[row],       uint64_t(in.seeds[row]), in.positions[i]};
      out[i] = isa.sample_row(in.logits + i * in.logits_stride, in.vocab_size, options, memory);
    }
  };
  if (!pool || searches < 2) return work(scratch);
  const size_t bytes = sampling_scratch_bytes(isa, in.vocab_size);
  pool->run([&](int thread) { work(scratch + bytes * size_t(thread)); });
}

}  // namespace foreword::kernels
