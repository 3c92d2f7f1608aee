// Work on the threads of XLA's pool and of the caller, or on threads that give way to all others.

#ifndef AREAL_JAX_NATIVE_THREADS_H_
#define AREAL_JAX_NATIVE_THREADS_H_

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace areal_jax {

namespace ffi = xla::ffi;

// Threads of this library that run when no other thread wants their processor. They live until the process ends.
class YieldingThreads {
 public:
  explicit YieldingThreads(int64_t count) {
    for (int64_t i = 0; i < count; ++i) std::thread([this] { Serve(); }).detach();
  }

  void Schedule(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back(std::move(work));
    }
    changed_.notify_one();
  }

 private:
  void Serve() {
#ifdef __linux__
    // A low niceness would not do: a thread that wakes takes the processor of none but threads of this policy at once.
    const sched_param none{};
    sched_setscheduler(0, SCHED_IDLE, &none);  // of this thread alone
#endif
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      const std::function<void()> work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
};

// Works under way in this process to which phases give way.
inline std::atomic<int64_t>& Preferred() {
  static std::atomic<int64_t> works{0};
  return works;
}

// Memory that is kept for the next call: pages of new memory cost more than what is written to them.
class KeptMemory {
 public:
  // A line's beginning; returned with what is given back.
  std::shared_ptr<float> Take(int64_t size) {
    constexpr int64_t kLine = 64 / sizeof(float);
    Piece piece{nullptr, 0};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) piece = std::move(free_.back()), free_.pop_back();
    }
    if (piece.size < size) piece.memory.reset(new float[size + kLine]), piece.size = size;
    const auto at = reinterpret_cast<uintptr_t>(piece.memory.get());
    auto* line = reinterpret_cast<float*>((at + 63) / 64 * 64);
    auto held = std::make_shared<Piece>(std::move(piece));
    return std::shared_ptr<float>(line, [this, held](float*) {
      std::lock_guard<std::mutex> lock(mutex_);
      free_.push_back(std::move(*held));
    });
  }

 private:
  struct Piece {
    std::unique_ptr<float[]> memory;
    int64_t size;
  };
  std::mutex mutex_;
  std::vector<Piece> free_;
};

// Phases of work, one after the other: each has items, which threads take as they come. A thread stays until the last
// phase is done, because waking one costs more than most phases. The caller never waits for a thread to come.
class Phases {
 public:
  // work(i) for every i < items, once all that was added before is done; items < 2^20. May be computed after the caller
  // has returned: what `work` refers to is kept by Keep.
  void Add(int64_t items, std::function<void(int64_t)> work) { phases_.push_back({items, std::move(work)}); }

  // Until the last phase is done.
  template <typename T>
  T& Keep(T value) {
    auto kept = std::make_shared<T>(std::move(value));
    kept_.push_back(kept);
    return *kept;
  }

  // Memory for `size` numbers, until the last phase is done.
  float* Reserve(int64_t size) {
    static auto* const memory = new KeptMemory();
    return Keep(memory->Take(size)).get();
  }

  // On XLA's threads and the caller's; done when it returns.
  ffi::Future Run(ffi::ThreadPool& pool) {
    return Start(pool.num_threads(), true, [&pool](std::function<void()> work) { pool.Schedule(std::move(work)); });
  }

  // As Run, unless other work is preferred: then on threads that give way, and on none of XLA's, all of which the
  // preferred work may want.
  ffi::Future RunBehindPreferred(ffi::ThreadPool& pool) {
    if (!Preferred().load(std::memory_order_relaxed)) return Run(pool);
    const int64_t threads = pool.num_threads();
    static auto* const yielding = new YieldingThreads(threads);
    return Start(threads, false, [](std::function<void()> work) { yielding->Schedule(std::move(work)); });
  }

 private:
  struct Phase {
    int64_t items;
    std::function<void(int64_t)> work;
  };
  struct State {
    std::vector<Phase> phases;
    std::vector<std::shared_ptr<void>> kept;
    // phase (24 bits), its items (20) and how many of them are taken (20): one number, so that no thread takes an item
    // of a phase by the count of another
    std::atomic<uint64_t> ticket{0};
    std::atomic<int64_t> done{0};
  };
  // `leads`: the caller's thread is one of so many threads.
  template <typename Schedule>
  ffi::Future Start(int64_t threads, bool leads, Schedule schedule) {
    auto state = std::make_shared<State>();  // a thread that comes after the last phase touches this alone
    state->phases = std::move(phases_);
    state->kept = std::move(kept_);
    int64_t most = 1;
    for (const Phase& phase : state->phases) most = std::max(most, phase.items);
    ffi::Promise done;
    ffi::Future future(done);  // before a thread has a copy of the promise
    if (!leads) schedule([state, done]() mutable { Lead(*state), done.SetAvailable(); });
    for (int64_t i = 1; i < std::min(threads, most); ++i) schedule([state] { Help(*state); });
    if (leads) Lead(*state), done.SetAvailable();
    return future;
  }

  static constexpr uint64_t kMask = (1 << 20) - 1, kOver = ~uint64_t{0};
  static constexpr int64_t kPatience = 4000;  // turns of waiting before the processor is given to others

  static uint64_t Pack(uint64_t phase, uint64_t items) { return phase << 40 | items << 20; }
  static bool IsLeft(uint64_t ticket) { return ticket != kOver && (ticket & kMask) < (ticket >> 20 & kMask); }

  static bool Take(State& state) {
    uint64_t ticket = state.ticket.load(std::memory_order_acquire);
    while (IsLeft(ticket)) {
      if (!state.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      state.phases[ticket >> 40].work(ticket & kMask);
      state.done.fetch_add(1, std::memory_order_release);
      return true;
    }
    return false;
  }

  static void Lead(State& state) {
    for (size_t p = 0; p < state.phases.size(); ++p) {
      const int64_t items = state.phases[p].items;
      state.done.store(0, std::memory_order_relaxed);
      state.ticket.store(Pack(p, items), std::memory_order_release);
      while (Take(state)) {
      }
      for (int64_t turn = 0; state.done.load(std::memory_order_acquire) < items; ++turn) Wait(turn);
    }
    state.ticket.store(kOver, std::memory_order_release);
    state.kept.clear();
  }

  static void Help(State& state) {
    for (int64_t turn = 0; state.ticket.load(std::memory_order_acquire) != kOver; ++turn) {
      if (Take(state)) {
        turn = 0;
      } else {
        Wait(turn);
      }
    }
  }

  static void Wait(int64_t turn) {
    if (turn > kPatience) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  std::vector<Phase> phases_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_THREADS_H_
