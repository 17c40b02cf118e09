// Products of a large matrix with a few columns, y = W x, for decoding on a CPU.
//
// Such a product costs what reading W costs, if each weight that is read meets all columns at once. W lies in panels of 16
// outputs, [panel, input, 16], so that it is read from end to end once; sums stay in registers.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kLanes = 16;
#ifdef __AVX512F__
constexpr int kPanels = 2, kColumns = 8;  // 16 of 32 registers hold sums
#else
constexpr int kPanels = 1, kColumns = 6;
#endif

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));

// y [P * 16, stride] = w [P, inputs, 16] * x [inputs, stride] for C columns.
template <int P, int C>
void Block(const float* w, const float* x, float* y, int64_t inputs, int64_t stride) {
  Lanes sum[P][C];
  for (int p = 0; p < P; ++p)
    for (int c = 0; c < C; ++c) sum[p][c] = Lanes{};
  for (int64_t i = 0; i < inputs; ++i, x += stride) {
    for (int p = 0; p < P; ++p) {
      const float* at = w + (p * inputs + i) * kLanes;
      __builtin_prefetch(at + 48 * kLanes);
      const Lanes weights = *reinterpret_cast<const Lanes*>(at);
      for (int c = 0; c < C; ++c) sum[p][c] += weights * x[c];
    }
  }
  for (int p = 0; p < P; ++p)
    for (int lane = 0; lane < kLanes; ++lane)
      for (int c = 0; c < C; ++c) y[(p * kLanes + lane) * stride + c] = sum[p][c][lane];
}

template <int P>
void Columns(int count, const float* w, const float* x, float* y, int64_t inputs, int64_t stride) {
  switch (count) {
#define CASE(C) \
  case C:       \
    if constexpr (C <= kColumns) return Block<P, C>(w, x, y, inputs, stride); else return;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
}

void Panels(int64_t from, int64_t to, const float* w, const float* x, float* y, int64_t inputs, int64_t columns) {
  const int64_t blocks = (columns + kColumns - 1) / kColumns;
  for (int64_t panel = from; panel < to;) {
    const bool pair = kPanels == 2 && panel + 2 <= to;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = columns * b / blocks, count = columns * (b + 1) / blocks - first;
      const float* part = w + panel * inputs * kLanes;
      float* out = y + panel * kLanes * columns + first;
      if (pair) Columns<kPanels>(count, part, x + first, out, inputs, columns);
      else Columns<1>(count, part, x + first, out, inputs, columns);
    }
    panel += pair ? 2 : 1;
  }
}

// Runs task(0) ... task(count - 1) here and on the pool's threads. Nobody waits for a thread that has not begun.
template <typename Task>
void Spread(ffi::ThreadPool& pool, int64_t count, Task task) {
  struct State { std::atomic<int64_t> next{0}, done{0}; };
  auto state = std::make_shared<State>();
  auto work = [state, count, task] {
    for (int64_t i; (i = state->next.fetch_add(1)) < count;) {
      task(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(decltype(work)(work));
  work();
  while (state->done.load(std::memory_order_acquire) < count) std::this_thread::yield();
}

ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> w, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = w.dimensions(), given = x.dimensions(), found = y->dimensions();
  const size_t rank = shape.size();
  if (rank < 3 || given.size() != rank - 1 || found.size() != rank - 1 || shape[rank - 1] != kLanes ||
      given[rank - 3] != shape[rank - 2] || found[rank - 3] != shape[rank - 3] * kLanes || found[rank - 2] != given[rank - 2])
    return ffi::Error::InvalidArgument("columns: expected w [.., P, I, 16], x [.., I, N], y [.., 16 P, N]");
  int64_t batch = 1;
  for (size_t i = 0; i + 3 < rank; ++i) batch *= shape[i];
  const int64_t panels = shape[rank - 3], inputs = shape[rank - 2], columns = given[rank - 2];
  const int64_t size = std::max<int64_t>(2, (1 << 17) / (inputs * kLanes * 4) / 2 * 2);  // panels of a task
  const int64_t tasks = (panels + size - 1) / size;
  const float *weights = w.typed_data(), *in = x.typed_data();
  float* out = y->typed_data();
  const int64_t group = std::max<int64_t>(1, (1 << 17) / (panels * inputs * kLanes * 4));  // small products of a task
  Spread(pool, tasks > 1 ? batch * tasks : (batch + group - 1) / group, [=](int64_t i) {
    const int64_t first = tasks > 1 ? i / tasks : i * group, last = tasks > 1 ? first + 1 : std::min(batch, first + group);
    const int64_t from = tasks > 1 ? i % tasks * size : 0, to = std::min(panels, tasks > 1 ? from + size : panels);
    for (int64_t b = first; b < last; ++b)
      Panels(from, to, weights + b * panels * inputs * kLanes, in + b * inputs * columns,
             out + b * panels * kLanes * columns, inputs, columns);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_columns, Product,
                              ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
