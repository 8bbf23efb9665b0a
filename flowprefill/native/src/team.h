// Threads that work on one slice together, and how they wait for each other.
//
// A wait spins for some microseconds, since the next piece of work is usually that near, and then
// sleeps: a thread that spins on keeps its core from whoever else wants it, which may be the thread
// that it waits for.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <immintrin.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace flowprefill {

// A number that others wait to see change.
class Signal {
 public:
  uint32_t value() const { return value_.load(); }
  void raise() {
    value_.fetch_add(1);
    if (num_sleepers_.load() > 0) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
  }
  // spin(i) is called at each turn before the thread sleeps.
  template <class Spin>
  void wait_while(uint32_t old, int spins, const Spin& spin) {
    for (int i = 0; i < spins; ++i) {
      if (value_.load(std::memory_order_acquire) != old) return;
      spin(i);
    }
    num_sleepers_.fetch_add(1);
    while (value_.load() == old) futex(FUTEX_WAIT_PRIVATE, old);
    num_sleepers_.fetch_sub(1);
  }

 private:
  void futex(int operation, uint32_t argument) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&value_), operation, argument, nullptr, nullptr,
            0);
  }
  std::atomic<uint32_t> value_{0};
  std::atomic<int> num_sleepers_{0};
};

inline void pause(int) { _mm_pause(); }

// Memory that will be read next: brought into the cache while a thread waits.
struct Ahead {
  const void* start = nullptr;
  size_t bytes = 0;
  void operator()(int turn) const {
    constexpr size_t LINES = 2, LINE = 64;
    const size_t from = turn * LINES * LINE;
    if (from >= bytes) return _mm_pause();
    for (size_t at = from; at < from + LINES * LINE; at += LINE)
      _mm_prefetch(static_cast<const char*>(start) + at, _MM_HINT_T1);
  }
};

constexpr int BARRIER_SPINS = 8000;  // about 200 us
constexpr int IDLE_SPINS = 8000;

class Threads;

// The members that share the steps of one piece of work: all threads, or one alone.
class Team {
 public:
  Team() = default;
  Team(Threads& threads, int member) : threads_(&threads), member_(member) {}
  bool is_alone() const;
  int member() const { return member_; }
  // Calls work(i) once for each i in 0..count, shared among the members; wait() before the next.
  template <class Work>
  void split(int count, const Work& work);
  // Returns when all members are here.
  void wait(const Ahead& ahead = {});

 private:
  Threads* threads_ = nullptr;  // null: one member
  int member_ = 0;
};

// The calling thread and num_threads - 1 others.
class Threads {
 public:
  explicit Threads(int num_threads) : num_threads_(num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { serve(i); });
  }
  ~Threads() {
    is_closing_ = true;
    start_.raise();
    for (auto& worker : workers_) worker.join();
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int size() const { return num_threads_; }

  // Every thread runs job(index of the thread); returns when all have.
  void run(const std::function<void(int)>& job) {
    if (num_threads_ == 1) {
      job(0);
      return;
    }
    job_ = &job;
    next_.store(num_threads_);
    num_running_.store(num_threads_);
    const uint32_t end = end_.value();
    start_.raise();
    job(0);
    if (num_running_.fetch_sub(1) > 1) end_.wait_while(end, BARRIER_SPINS, pause);
  }

 private:
  friend class Team;
  void serve(int index) {
    uint32_t seen = 0;
    for (;;) {
      start_.wait_while(seen, IDLE_SPINS, pause);
      ++seen;
      if (is_closing_) return;
      (*job_)(index);
      if (num_running_.fetch_sub(1) == 1) end_.raise();
    }
  }

  void barrier(const Ahead& ahead) {
    const uint32_t before = all_here_.value();
    if (num_here_.fetch_add(1) + 1 == num_threads_) {
      num_here_.store(0);
      next_.store(num_threads_);
      all_here_.raise();
    } else {
      all_here_.wait_while(before, BARRIER_SPINS, ahead);
    }
  }

  const int num_threads_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<bool> is_closing_{false};
  Signal start_, end_, all_here_;
  std::atomic<int> num_running_{0}, num_here_{0};
  // Of the step between two barriers: its next piece of work. Piece `member` is that member's own,
  // so that it can be known in advance.
  std::atomic<int> next_{0};
  std::vector<std::thread> workers_;
};

inline bool Team::is_alone() const { return threads_ == nullptr || threads_->size() == 1; }

template <class Work>
void Team::split(int count, const Work& work) {
  if (is_alone()) {
    for (int i = 0; i < count; ++i) work(i);
    return;
  }
  for (int i = member_; i < count; i = threads_->next_.fetch_add(1)) work(i);
}

inline void Team::wait(const Ahead& ahead) {
  if (!is_alone()) threads_->barrier(ahead);
}

}  // namespace flowprefill
