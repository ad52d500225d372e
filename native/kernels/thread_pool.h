// Threads that run one function together: one parallel region per step, with barriers inside it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <thread>
#include <vector>

namespace foreword::kernels {

constexpr int kMaxThreads = 1024;

// Processors that share a memory, such as those of a NUMA node.
using CpuGroups = std::vector<std::vector<int>>;

// The half-open share of `thread` when [0, n) is divided into nearly equal parts.
struct Share {
  int begin, end;
};
inline Share share_of(int n, int thread, int num_threads) {
  return {int(int64_t(n) * thread / num_threads), int(int64_t(n) * (thread + 1) / num_threads)};
}

// The calling thread is thread 0, so a pool of size n owns n - 1 threads. They spin shortly after a region, because the
// next step usually follows at once, then sleep: an idle pool uses no processor time.
class ThreadPool {
 public:
  // `num_threads`: from 1 to kMaxThreads. Throws std::invalid_argument if it is out of range or so many threads cannot
  // start.
  // `groups`: the threads are divided among them, and each runs on the processors of its group alone; so does the
  // caller of `run` meanwhile, on those of the first. Without groups the threads are one team and run anywhere. Throws
  // std::invalid_argument for a processor that this process may not use, and for fewer threads than groups.
  explicit ThreadPool(int num_threads, CpuGroups groups = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;

  int size() const { return size_; }

  // The threads of a group: this one is number `member` of `size`.
  struct Team {
    int group, member, size;
  };
  const Team &team(int thread) const { return teams_[size_t(thread)]; }
  Team all(int thread) const { return {0, thread, size_}; }  // all threads as one team
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

  // Inside a region, by every thread, with arguments equal in a team: calls f(part, end) for parts of [0, n), each part
  // on one thread of the team. A thread begins with its own share, which ends at `end`, and then takes what is left of
  // others: cores differ in speed, and other programs may use one. `unit`: parts begin at multiples of it in a share.
  // The data that f reads must be written before a barrier, also if this thread's share contains it.
  template <class F>
  void divide(int thread, const Team &team, int n, int unit, F &&f) {
    const uint32_t call = queues_[size_t(thread)].start();
    for (int i = 0; i < std::min(team.size, 1 + kHelped); ++i) {
      const int member = (team.member + i) % team.size;
      const Share share = share_of(n, member, team.size);
      const int size = share.end - share.begin, part = std::max((size - 1) / (kParts * unit) + 1, 1) * unit;
      Queue &queue = queues_[size_t(thread - team.member + member)];
      for (int taken; (taken = queue.take(call)) * int64_t(part) < size;) {
        const int begin = share.begin + taken * part;
        f(Share{begin, std::min(begin + part, share.end)}, share.end);
      }
    }
  }

 private:
  // Parts of a share, and other threads whose shares a thread takes from, at most.
  static constexpr int kParts = 8, kHelped = 3;

  // The parts of the owner's share that are taken in its current call of `divide`: call << 32 | parts.
  class alignas(64) Queue {
   public:
    // By the owner. The number of the call, the same on every thread.
    uint32_t start() {
      const uint32_t call = uint32_t(state_.load(std::memory_order_relaxed) >> 32) + 1;
      state_.store(uint64_t(call) << 32, std::memory_order_relaxed);
      return call;
    }
    // The number of a part; at least kParts if the owner is at another call: it has not begun this one, or ended it.
    int take(uint32_t call) {
      uint64_t state = state_.load(std::memory_order_relaxed);
      do {
        if (state >> 32 != call || uint32_t(state) >= kParts) return kParts;
      } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_relaxed));
      return int(uint32_t(state));
    }

   private:
    std::atomic<uint64_t> state_{0};
  };

  using Function = void (*)(void *, int);
  void run_region(Function function, void *context);
  void work(int thread);
  void stop();

  const CpuGroups groups_;
  const int size_;
  const int64_t process_;
  std::vector<Team> teams_;  // by thread
  std::vector<std::thread> threads_;
  std::vector<Queue> queues_;  // by thread
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

// The share of a team when [0, n) is divided among the teams, and that of a thread when its team divides [0, n).
inline Share team_share(int n, const ThreadPool &pool, int group) { return share_of(n, group, pool.num_teams()); }
inline Share member_share(int n, const ThreadPool::Team &team) { return share_of(n, team.member, team.size); }

}  // namespace foreword::kernels
