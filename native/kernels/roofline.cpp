#include "kernels/roofline.h"

#include <algorithm>
#include <vector>

#include "kernels/clock.h"
#include "kernels/memory.h"

namespace foreword::kernels {
namespace {

// Best rate of `work(thread) -> amount` on all threads.
template <class Work>
double best_rate(ThreadPool &pool, Work &&work) {
  constexpr int kRounds = 5;
  double best = 0.;
  std::vector<double> amounts(size_t(pool.size()));
  for (int round = 0; round < kRounds; ++round) {
    const double start = now();
    pool.run([&](int thread) { amounts[size_t(thread)] = double(work(thread)); });
    const double seconds = now() - start;
    double total = 0.;
    for (double amount : amounts) total += amount;
    best = std::max(best, total / seconds);
  }
  return best;
}

}  // namespace

Roofline measure_roofline(const Isa &isa, ThreadPool &pool, int megabytes) {
  constexpr int64_t kRepeats = 2'000'000;
  Roofline roofline{};
  roofline.f32_flops = best_rate(pool, [&](int) { return isa.peak_f32(kRepeats); });
  roofline.bf16_flops = best_rate(pool, [&](int) { return isa.peak_bf16(kRepeats); });
  roofline.i8_ops = best_rate(pool, [&](int) { return isa.peak_i8(kRepeats); });
  const size_t share = (size_t(megabytes) << 20) / size_t(pool.size()) / 64 * 64;
  Mapping data(share * size_t(pool.size()));
  auto part = [&](int thread) { return data.data() + share * size_t(thread); };
  pool.run([&](int thread) {
    for (size_t i = 0; i < share; i += 64) part(thread)[i] = 1;  // maps the pages
  });
  roofline.memory_bytes = best_rate(pool, [&](int thread) { return isa.read_memory(part(thread), share); });
  return roofline;
}

}  // namespace foreword::kernels
