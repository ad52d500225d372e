// Threads that run one function together: one parallel region per step, with barriers inside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

namespace foreword::kernels {

constexpr int kMaxThreads = 1024;

// Processors that share a memory, such as those of a NUMA node.
using CpuGroups = std::vector<std::vector<int>>;

// The calling thread is thread 0, so a pool of size n owns n - 1 threads. They spin shortly after a region, because the
// next step usually follows at once, then sleep: an idle pool uses no processor time.
class ThreadPool {
 public:
  // `num_threads`: from 1 to kMaxThreads; by default the variable FOREWORD_NUM_THREADS, else the physical cores that
  // this process may use. Throws std::invalid_argument if it is out of range or so many threads cannot start.
  // `groups`: the threads are divided among them, and each runs on the processors of its group alone; so does the caller
  // of `run` meanwhile, on those of the first. Without groups the threads are one team and run anywhere. Throws
  // std::invalid_argument for a processor that this process may not use, and for fewer threads than groups.
  explicit ThreadPool(std::optional<int> num_threads, CpuGroups groups = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;

  int size() const { return size_; }

  // The threads of a group: this one is number `member` of `size`.
  struct Team {
    int group, member, size;
  };
  const Team &team(int thread) const { return teams_[size_t(thread)]; }
  int num_teams() const { return teams_.back().group + 1; }

  // Throws std::runtime_error in a process forked after the threads started: it has none of them.
  void check_process() const;

  // Runs f(thread) on every thread and returns when all are done. f must not throw. One region at a time.
  template <class F>
  void run(F &&f) {
    run_region([](void *context, int thread) { (*static_cast<F *>(context))(thread); }, &f);
  }

  // Inside a region: waits for all threads. Everything written before it is visible after it.
  void barrier();

 private:
  using Function = void (*)(void *, int);
  void run_region(Function function, void *context);
  void work(int thread);
  void stop();

  const CpuGroups groups_;
  const int size_;
  const int64_t process_;
  std::vector<Team> teams_;  // of each thread
  std::vector<std::thread> threads_;
  Function function_ = nullptr;
  void *context_ = nullptr;
  bool quit_ = false;
  alignas(64) std::atomic<uint32_t> region_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> waiting_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// The processor that the calling thread runs on; −1 if the system does not tell.
int current_cpu();

// The half-open share of `thread` when [0, n) is divided into nearly equal parts.
struct Share {
  int begin, end;
};
inline Share share_of(int n, int thread, int num_threads) {
  return {int(int64_t(n) * thread / num_threads), int(int64_t(n) * (thread + 1) / num_threads)};
}

// The share of a team when [0, n) is divided among the teams, and that of a thread when its team divides [0, n).
inline Share team_share(int n, const ThreadPool &pool, int group) { return share_of(n, group, pool.num_teams()); }
inline Share member_share(int n, const ThreadPool::Team &team) { return share_of(n, team.member, team.size); }

}  // namespace foreword::kernels
