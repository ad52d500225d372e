#include "kernels/thread_pool.h"

#include <cstdio>
#include <cstdlib>
#include <set>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sched.h>
#endif

namespace foreword::kernels {
namespace {

// A pause takes 40 to 140 cycles. Other threads usually arrive within microseconds, unless another process uses a core.
constexpr int kSpins = 500;
constexpr int kIdleSpins = 5000;  // between steps, before a thread sleeps

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `done()`, then yields the processor between checks: the awaited thread may need it.
template <class F>
void spin_until(F &&done) {
  for (int spins = 0; !done(); ++spins) {
    if (spins < kSpins) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) : size_(num_threads < 1 ? 1 : num_threads) {
  for (int thread = 1; thread < size_; ++thread) threads_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  quit_ = true;
  region_.fetch_add(1, std::memory_order_release);
  region_.notify_all();
  for (auto &thread : threads_) thread.join();
}

void ThreadPool::run_region(Function function, void *context) {
  if (size_ == 1) return function(context, 0);
  function_ = function;
  context_ = context;
  running_.store(size_ - 1, std::memory_order_relaxed);
  region_.fetch_add(1, std::memory_order_release);
  region_.notify_all();
  function(context, 0);
  spin_until([this] { return running_.load(std::memory_order_acquire) == 0; });
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  for (;;) {
    for (int spins = 0; region_.load(std::memory_order_acquire) == seen; ++spins) {
      if (spins < kIdleSpins) {
        pause();
      } else {
        region_.wait(seen, std::memory_order_acquire);
      }
    }
    ++seen;
    if (quit_) return;
    function_(context_, thread);
    running_.fetch_sub(1, std::memory_order_release);
  }
}

void ThreadPool::barrier() {
  if (size_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (waiting_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    waiting_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  spin_until([this, phase] { return phase_.load(std::memory_order_acquire) != phase; });
}

namespace {

// Cores this process may use, hardware threads of one core counted once.
int physical_cores() {
  const int logical = int(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return logical > 0 ? logical : 1;
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    const std::string path = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list";
    char line[256] = {};
    if (std::FILE *file = std::fopen(path.c_str(), "r")) {
      if (!std::fgets(line, sizeof line, file)) line[0] = 0;
      std::fclose(file);
    }
    cores.insert(line[0] ? std::string(line) : std::to_string(cpu));
  }
  if (!cores.empty()) return int(cores.size());
#endif
  return logical > 0 ? logical : 1;
}

}  // namespace

int default_num_threads() {
  const char *variable = std::getenv("FOREWORD_NUM_THREADS");
  if (!variable || !*variable) return physical_cores();
  char *end = nullptr;
  const long count = std::strtol(variable, &end, 10);
  if (*end || count < 1 || count > 4096) {
    throw std::invalid_argument(std::string("FOREWORD_NUM_THREADS = '") + variable + "' is not a number of threads");
  }
  return int(count);
}

}  // namespace foreword::kernels
