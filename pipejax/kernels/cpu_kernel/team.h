// A team of threads that works through the phases of a call one after the other.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

namespace pipejax {

// The calling thread is the leader. Threads of XLA's pool join when they are free, and spin between phases, because phases
// are too short for sleeping. The leader never waits for a thread that has not started. If the queue of the pool is full, the
// pool runs a scheduled task in the thread that schedules it. In this case the task must return at once: a leader that ran
// Help would wait for the end of its own call.
class Team {
 public:
  // `alone`: the leader does all the work, because it is too little for other threads.
  template <typename Pool>
  explicit Team(Pool& pool, bool alone = false)
      : state_(std::make_shared<State>()), threads_(alone ? 1 : std::max<int64_t>(1, pool.num_threads())) {
    const auto leader = std::this_thread::get_id();
    for (int64_t i = 1; i < threads_; ++i)
      pool.Schedule([state = state_, leader] {
        if (std::this_thread::get_id() != leader) Help(*state);
      });
  }

  ~Team() { state_->ticket.store(kOver, std::memory_order_release); }

  Team(const Team&) = delete;

  int64_t Threads() const { return threads_; }

  // Runs a phase: task(0) ... task(count - 1), in shares of `grain` tasks, and waits until all have ended.
  template <typename Task>
  void Run(int64_t count, int64_t grain, const Task& task) {
    const int64_t shares = (count + grain - 1) / grain;
    auto share = [&](int64_t i) {
      for (int64_t j = i * grain; j < std::min(count, (i + 1) * grain); ++j) task(j);
    };
    if (threads_ < 2 || shares < 2) {
      for (int64_t i = 0; i < shares; ++i) share(i);
      return;
    }
    State& state = *state_;
    state.context = &share;
    state.call = [](const void* context, int64_t i) { (*static_cast<const decltype(share)*>(context))(i); };
    state.done.store(0, std::memory_order_relaxed);
    state.ticket.store(static_cast<uint64_t>(shares) << 32, std::memory_order_release);
    while (Take(state)) continue;
    while (state.done.load(std::memory_order_acquire) < shares) Pause();
  }

 private:
  static constexpr uint64_t kOver = ~uint64_t{0}, kNext = 0xffffffff;

  struct State {
    alignas(64) std::atomic<uint64_t> ticket{0};  // upper 32 bits: number of shares of the phase; lower: the next share
    alignas(64) std::atomic<int64_t> done{0};     // number of shares that have ended
    const void* context;
    void (*call)(const void*, int64_t);
  };

  // Takes and runs a share of the phase; returns false if none is left. The phase does not end before the share has ended.
  static bool Take(State& state) {
    uint64_t ticket = state.ticket.load(std::memory_order_acquire);
    while (ticket != kOver && (ticket & kNext) < ticket >> 32)
      if (state.ticket.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
        state.call(state.context, ticket & kNext);
        state.done.fetch_add(1, std::memory_order_release);
        return true;
      }
    return false;
  }

  static void Help(State& state) {
    for (int idle = 0; state.ticket.load(std::memory_order_acquire) != kOver;) {
      if (Take(state)) idle = 0;
      else if (++idle % 64) Pause();
      else std::this_thread::yield();
    }
  }

  static void Pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  std::shared_ptr<State> state_;
  int64_t threads_;
};

}  // namespace pipejax
