// A few threads that run one function together, again and again, with barriers inside it.
//
// While they wait for one another they spin, then yield; between runs they sleep, so that the cores are free for others.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace trunkline {

class Threads {
 public:
  explicit Threads(int count) : count_(count) {
    for (int i = 1; i < count; i++) workers_.emplace_back([this, i] { work(i); });
  }

  ~Threads() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  // Calls task(thread) on each thread, the caller being thread 0, and returns when all are done.
  template <class Task>
  void run(Task&& task) {
    if (count_ == 1) return task(0);
    context_ = &task;
    call_ = [](void* context, int thread) { (*(std::remove_reference_t<Task>*)context)(thread); };
    {
      std::lock_guard<std::mutex> lock(mutex_);
      runs_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    task(0);
    barrier();
  }

  // Every thread waits here until all have come.
  void barrier() {
    if (count_ == 1) return;
    const unsigned round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == count_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
      // when another program holds the core that is waited for, spinning on would only take a second one from it
      if (spins < BARRIER_SPINS)
        _mm_pause();
      else
        sched_yield();
    }
  }

  // The part of `total` things that is the thread's: contiguous, as even as can be.
  struct Range {
    int begin, end;
  };
  Range share(int thread, int total) const {
    return {int((long)total * thread / count_), int((long)total * (thread + 1) / count_)};
  }

 private:
  static constexpr int BARRIER_SPINS = 4000;

  void work(int thread) {
    unsigned seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stopped_ || runs_.load(std::memory_order_relaxed) != seen; });
        if (stopped_) return;
        seen++;
      }
      call_(context_, thread);
      barrier();
    }
  }

  const int count_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopped_ = false;
  std::atomic<unsigned> runs_{0};
  void* context_ = nullptr;
  void (*call_)(void*, int) = nullptr;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> round_{0};
};

}  // namespace trunkline
