// Products of a large matrix with a few columns, y = W x, for decoding on a CPU.
//
// Such a product costs what reading W costs, if each weight that is read meets all columns at once. W lies in panels of 16
// outputs, [panel, input, 16], so that it is read from end to end once; sums stay in registers. What is small and comes
// before or after, a norm, a residual, a softmax, is done on the way: as operations of their own they would cost more in
// being started than in arithmetic.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

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

// What is done with a sum before it is written.
struct After {
  const float* residual = nullptr;  // is added, shaped as y
  bool relu = false;
};

// y [P * 16, stride] = w [P, inputs, 16] * x [inputs, stride] for C columns.
template <int P, int C>
void Block(const float* w, const float* x, float* y, int64_t inputs, int64_t stride, const After& after) {
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
      for (int c = 0; c < C; ++c) {
        const int64_t at = (p * kLanes + lane) * stride + c;
        const float value = sum[p][c][lane] + (after.residual ? after.residual[at] : 0.0f);
        y[at] = after.relu ? std::max(value, 0.0f) : value;
      }
}

template <int P>
void Columns(int count, const float* w, const float* x, float* y, int64_t inputs, int64_t stride, const After& after) {
  switch (count) {
#define CASE(C) \
  case C:       \
    if constexpr (C <= kColumns) return Block<P, C>(w, x, y, inputs, stride, after); else return;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
  }
}

void Panels(int64_t from, int64_t to, const float* w, const float* x, float* y, int64_t inputs, int64_t columns,
            const After& after = {}) {
  const int64_t blocks = (columns + kColumns - 1) / kColumns;
  for (int64_t panel = from; panel < to;) {
    const bool pair = kPanels == 2 && panel + 2 <= to;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = columns * b / blocks, count = columns * (b + 1) / blocks - first;
      const float* part = w + panel * inputs * kLanes;
      const int64_t at = panel * kLanes * columns + first;
      const After here{after.residual ? after.residual + at : nullptr, after.relu};
      if (pair) Columns<kPanels>(count, part, x + first, y + at, inputs, columns, here);
      else Columns<1>(count, part, x + first, y + at, inputs, columns, here);
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

typedef ffi::Buffer<ffi::F32> Array;

// y [16 P, N] = w [P, I, 16] * x [I, N], in parallel.
ffi::Error Multiply(ffi::ThreadPool& pool, const Array& w, const float* x, ffi::Span<const int64_t> given,
                    ffi::ResultBuffer<ffi::F32>& y, const After& after) {
  const auto shape = w.dimensions(), found = y->dimensions();
  if (shape.size() != 3 || given.size() != 2 || found.size() != 2 || shape[2] != kLanes || given[0] != shape[1] ||
      found[0] != shape[0] * kLanes || found[1] != given[1])
    return ffi::Error::InvalidArgument("columns: expected w [P, I, 16], x [I, N], y [16 P, N]");
  const int64_t panels = shape[0], inputs = shape[1], columns = given[1];
  const int64_t size = std::max<int64_t>(2, (1 << 17) / (inputs * kLanes * 4) / 2 * 2);  // panels of a task
  const float* weights = w.typed_data();
  float* out = y->typed_data();
  Spread(pool, (panels + size - 1) / size, [=](int64_t i) {
    Panels(i * size, std::min(panels, (i + 1) * size), weights, x, out, inputs, columns, after);
  });
  return ffi::Error::Success();
}

ffi::Error Added(ffi::ThreadPool pool, Array w, Array x, Array residual, ffi::ResultBuffer<ffi::F32> y) {
  if (residual.element_count() != y->element_count())
    return ffi::Error::InvalidArgument("columns: expected a residual of the shape of y");
  return Multiply(pool, w, x.typed_data(), x.dimensions(), y, {residual.typed_data()});
}

// y = w * norm(x), for x [I, N]: each column divided by the root of its mean square, times scale [I].
ffi::Error Normed(ffi::ThreadPool pool, Array w, Array x, Array scale, ffi::ResultBuffer<ffi::F32> y, float epsilon,
                  bool relu) {
  const auto given = x.dimensions();
  if (given.size() != 2 || scale.element_count() != static_cast<size_t>(given[0]))
    return ffi::Error::InvalidArgument("columns: expected x [I, N] and scale [I]");
  const int64_t inputs = given[0], columns = given[1];
  const float *in = x.typed_data(), *by = scale.typed_data();
  std::vector<float> normed(inputs * columns), factor(columns, 0.0f);
  for (int64_t i = 0; i < inputs; ++i)
    for (int64_t c = 0; c < columns; ++c) factor[c] += in[i * columns + c] * in[i * columns + c];
  for (float& f : factor) f = 1.0f / std::sqrt(f / inputs + epsilon);
  for (int64_t i = 0; i < inputs; ++i)
    for (int64_t c = 0; c < columns; ++c) normed[i * columns + c] = in[i * columns + c] * factor[c] * by[i];
  return Multiply(pool, w, normed.data(), given, y, {nullptr, relu});
}

// e^x for x <= 0, to about two units in the last place; what is below -87 counts as -87.
Lanes Exp(Lanes x) {
  typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));
  x = x < -87.0f ? Lanes{} - 87.0f : x;
  const Lanes magic = Lanes{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
  const Lanes n = (x * 1.44269504f + magic) - magic;
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes sum = Lanes{} + 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    sum = sum * r + c;
  sum = sum * r * r + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  Lanes scale;
  std::memcpy(&scale, &power, sizeof scale);
  return sum * scale;
}

// found [B, H, K, N] = values [B, H, K / 16, L, 16] * softmax(keys [B, H, L / 16, K, 16] * query [B, H, K, N] + bias [B, L]).
ffi::Error Attend(ffi::ThreadPool pool, Array keys, Array values, Array query, Array bias, ffi::ResultBuffer<ffi::F32> found) {
  const auto shape = keys.dimensions(), asked = query.dimensions();
  if (shape.size() != 5 || asked.size() != 4 || shape[3] != asked[2] || shape[4] != kLanes || asked[2] % kLanes ||
      values.element_count() != keys.element_count() || bias.element_count() != static_cast<size_t>(shape[0] * shape[2] * kLanes))
    return ffi::Error::InvalidArgument("columns: expected keys [B, H, L / 16, K, 16], query [B, H, K, N], bias [B, L]");
  const int64_t heads = shape[1], length = shape[2] * kLanes, width = asked[2], columns = asked[3];
  const float *k = keys.typed_data(), *v = values.typed_data(), *q = query.typed_data(), *add = bias.typed_data();
  float* out = found->typed_data();
  Spread(pool, shape[0] * heads, [=](int64_t i) {
    thread_local std::vector<float> scores, most, sum;
    const int64_t count = length * columns;
    scores.resize((count + kLanes - 1) / kLanes * kLanes);
    most.assign(columns, -INFINITY), sum.assign(columns, 0.0f);
    float* s = scores.data();
    Panels(0, length / kLanes, k + i * length * width, q + i * width * columns, s, width, columns);
    for (int64_t l = 0; l < length; ++l)
      for (int64_t c = 0; c < columns; ++c) most[c] = std::max(most[c], s[l * columns + c] += add[i / heads * length + l]);
    for (int64_t l = 0; l < length; ++l)
      for (int64_t c = 0; c < columns; ++c) s[l * columns + c] -= most[c];
    for (int64_t at = 0; at < count; at += kLanes) {
      Lanes* part = reinterpret_cast<Lanes*>(s + at);
      *part = Exp(*part);
    }
    for (int64_t l = 0; l < length; ++l)
      for (int64_t c = 0; c < columns; ++c) sum[c] += s[l * columns + c];
    float* y = out + i * width * columns;
    Panels(0, width / kLanes, v + i * length * width, s, y, length, columns);
    for (int64_t w = 0; w < width; ++w)
      for (int64_t c = 0; c < columns; ++c) y[w * columns + c] /= sum[c];
  });
  return ffi::Error::Success();
}

}  // namespace

#define ARRAY .Arg<Array>()
#define FOUND .Ret<ffi::Buffer<ffi::F32>>()
#define POOL ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_added, Added, POOL ARRAY ARRAY ARRAY FOUND);
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_normed, Normed, POOL ARRAY ARRAY ARRAY FOUND.Attr<float>("epsilon").Attr<bool>("relu"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_attend, Attend, POOL ARRAY ARRAY ARRAY ARRAY FOUND);
