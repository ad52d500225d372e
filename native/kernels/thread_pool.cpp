#include "kernels/thread_pool.h"

#include <algorithm>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
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

// The processors that this process may use; none where the system does not tell.
std::set<int> allowed_cpus() {
  std::set<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.insert(cpu);
  }
#endif
  return cpus;
}

int64_t this_process() {
#if defined(__unix__) || defined(__APPLE__)
  return getpid();
#else
  return 0;
#endif
}

// The calling thread runs on these processors while this object lives.
class Pinned {
#if defined(__linux__)

 public:
  explicit Pinned(const std::vector<int> &cpus) {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int cpu : cpus) CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
  }
  ~Pinned() { sched_setaffinity(0, sizeof before_, &before_); }

 private:
  cpu_set_t before_;
#else

 public:
  explicit Pinned(const std::vector<int> &) {}
#endif
};

CpuGroups checked(CpuGroups groups) {
  const std::set<int> allowed = groups.empty() ? std::set<int>() : allowed_cpus();
  for (const std::vector<int> &cpus : groups) {
    if (cpus.empty()) throw std::invalid_argument("cpu_groups: a group has no processors");
    for (int cpu : cpus) {
      if (allowed.contains(cpu)) continue;
      throw std::invalid_argument("cpu_groups: this process may not use processor " + std::to_string(cpu));
    }
  }
  return groups;
}

int checked(int num_threads) {
  if (num_threads >= 1 && num_threads <= kMaxThreads) return num_threads;
  throw std::invalid_argument("num_threads = " + std::to_string(num_threads) +
                              " is not a number of threads from 1 to " + std::to_string(kMaxThreads));
}

}  // namespace

int current_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

ThreadPool::ThreadPool(int num_threads, CpuGroups groups)
    : groups_(checked(std::move(groups))),
      size_(checked(num_threads)),
      process_(this_process()),
      queues_(size_t(size_)) {
  const int num_teams = std::max(1, int(groups_.size()));
  if (size_ < num_teams) {
    throw std::invalid_argument("num_threads = " + std::to_string(size_) + ": " + std::to_string(num_teams) +
                                " groups of processors need a thread each");
  }
  for (int team = 0; team < num_teams; ++team) {
    const Share share = share_of(size_, team, num_teams);
    for (int i = share.begin; i < share.end; ++i) teams_.push_back({team, i - share.begin, share.end - share.begin});
  }
  try {
    threads_.reserve(size_t(size_));
    for (int thread = 1; thread < size_; ++thread) threads_.emplace_back([this, thread] { work(thread); });
  } catch (const std::system_error &) {
    stop();
    const std::string most = std::to_string(threads_.size() + 1);
    throw std::invalid_argument("num_threads = " + std::to_string(size_) + ": this process can have only " + most +
                                ". Use fewer threads, or raise its limits (ulimit -u, ulimit -v)");
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (process_ != this_process()) {
    new std::vector<std::thread>(std::move(threads_));  // threads of another process: neither joined nor destroyed
  } else {
    stop();
  }
}

void ThreadPool::stop() {
  quit_ = true;
  region_.fetch_add(1, std::memory_order_release);
  region_.notify_all();
  for (auto &thread : threads_) thread.join();
}

void ThreadPool::check_process() const {
  if (size_ == 1 || process_ == this_process()) return;
  throw std::runtime_error("the model was created in process " + std::to_string(process_) + " and its threads are not "
                           "in this one, which was forked from it. Create the model after the fork, or start "
                           "processes with the 'spawn' method");
}

void ThreadPool::run_region(Function function, void *context) {
  std::optional<Pinned> pinned;
  if (!groups_.empty()) pinned.emplace(groups_[0]);
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
  std::optional<Pinned> pinned;
  if (!groups_.empty()) pinned.emplace(groups_[size_t(team(thread).group)]);
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

}  // namespace foreword::kernels
