// Work on the threads of XLA's pool and of the caller.

#ifndef AREAL_JAX_NATIVE_THREADS_H_
#define AREAL_JAX_NATIVE_THREADS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace areal_jax {

// Phases of work, one after the other: each has items, which threads take as they come. A thread stays until the last
// phase is done, because waking one costs more than most phases. The caller never waits for a thread to come.
class Phases {
 public:
  // work(i) for every i < items, once all that was added before is done; items < 2^20.
  void Add(int64_t items, std::function<void(int64_t)> work) { phases_.push_back({items, std::move(work)}); }

  void Run(xla::ffi::ThreadPool& pool) {
    auto state = std::make_shared<State>();  // a thread that comes after the last phase touches this alone
    state->phases = std::move(phases_);
    int64_t most = 1;
    for (const Phase& phase : state->phases) most = std::max(most, phase.items);
    for (int64_t i = 1; i < std::min<int64_t>(pool.num_threads(), most); ++i) {
      pool.Schedule([state] { Help(*state); });
    }
    for (size_t p = 0; p < state->phases.size(); ++p) {
      const int64_t items = state->phases[p].items;
      state->done.store(0, std::memory_order_relaxed);
      state->ticket.store(Pack(p, items), std::memory_order_release);
      while (Take(*state)) {
      }
      for (int64_t turn = 0; state->done.load(std::memory_order_acquire) < items; ++turn) Wait(turn);
    }
    state->ticket.store(kOver, std::memory_order_release);
  }

 private:
  struct Phase {
    int64_t items;
    std::function<void(int64_t)> work;
  };
  struct State {
    std::vector<Phase> phases;
    // phase (24 bits), its items (20) and how many of them are taken (20): one number, so that no thread takes an item
    // of a phase by the count of another
    std::atomic<uint64_t> ticket{0};
    std::atomic<int64_t> done{0};
  };
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
};

}  // namespace areal_jax

#endif  // AREAL_JAX_NATIVE_THREADS_H_
