// Products of a large matrix with a few columns, y = W x, for decoding on a CPU.
//
// Such a product costs what reading W costs, if each weight that is read meets all columns at once. W lies in panels of 16
// outputs, so that it is read from end to end once; sums stay in registers. What is small and comes before or after, a
// norm, a residual, a softmax, is done on the way: as operations of their own they would cost more in being started than in
// arithmetic.
//
// Weights are float32, bfloat16, or int8 with a float32 scale an output. The fewer bytes, the more the arithmetic matters.
// A processor with products for the narrow types gets x in two digits of such a type, whose sum is x to about 16 bits, and
// both digits are columns of their own. Elsewhere weights are widened to float32 on the way. Either way what is rounded is
// the weight alone, not x.
//
// This file is compiled once for each level of processor that `__init__.py` names.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>
#if defined(__AVX512F__) || defined(__AMX_TILE__)
#include <immintrin.h>
#endif
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4)));

enum Kind { kFloat32, kBfloat16, kInt8 };
template <Kind K>
constexpr int kDepth = K == kFloat32 ? 1 : K == kBfloat16 ? 2 : 4;  // inputs of a group: 32 bits of each output

// [16 panels, inputs]: in memory [panels, groups, 16, depth], 64 bytes a group.
struct Matrix {
  Kind kind;
  const Ints* groups;   // the first panel's
  const float* scale;   // [16 panels] of int8
  int64_t panels, depth;  // groups of a panel
};

// What is done with a sum before it is written.
struct After {
  const float* residual = nullptr;  // is added, shaped as y
  bool relu = false;
};

// Writes the outputs of a panel for one column; y and the residual begin at the panel's first.
// Not inlined: it would be compiled a hundred times.
[[gnu::noinline]] void Write(const Lanes& sum, float* y, const float* residual, int64_t stride, bool relu) {
  for (int lane = 0; lane < kLanes; ++lane) {
    const float value = sum[lane] + (residual ? residual[lane * stride] : 0.0f);
    y[lane * stride] = relu ? std::max(value, 0.0f) : value;
  }
}

// The part of a product that a task computes: from its first panel on, for some of the columns.
struct Place {
  const Ints* groups;
  const float* scale;
  float* y;
  const float* residual;

  Place(const Matrix& w, int64_t panel, int64_t column, float* y, int64_t stride, const After& after)
      : groups(w.groups + panel * w.depth), scale(w.scale ? w.scale + panel * kLanes : nullptr),
        y(y + panel * kLanes * stride + column),
        residual(after.residual ? after.residual + panel * kLanes * stride + column : nullptr) {}
};

// Of 16 outputs the weights of a group's input j, as float32.
template <Kind K>
inline Lanes Widened(Ints group, int j) {
  if constexpr (K == kInt8) {
    return __builtin_convertvector(group << (24 - 8 * j) >> 24, Lanes);
  } else {
    if constexpr (K == kBfloat16) group = j ? group & static_cast<int32_t>(0xffff0000u) : group << 16;
    Lanes weights;
    std::memcpy(&weights, &group, sizeof weights);
    return weights;
  }
}

// P panels times C columns of x [inputs, stride], weights widened.
template <Kind K, int P, int C>
void Block(const Place& at, const float* x, int64_t depth, int64_t stride, bool relu) {
  Lanes sum[P][C];
  for (int p = 0; p < P; ++p)
    for (int c = 0; c < C; ++c) sum[p][c] = Lanes{};
  for (int64_t g = 0; g < depth; ++g) {
    for (int p = 0; p < P; ++p) __builtin_prefetch(at.groups + p * depth + g + 48);
    for (int j = 0; j < kDepth<K>; ++j, x += stride)
      for (int p = 0; p < P; ++p) {
        const Lanes weights = Widened<K>(at.groups[p * depth + g], j);
        for (int c = 0; c < C; ++c) sum[p][c] += weights * x[c];
      }
  }
  for (int p = 0; p < P; ++p)
    for (int c = 0; c < C; ++c) {
      if constexpr (K == kInt8) sum[p][c] *= *reinterpret_cast<const Lanes*>(at.scale + p * kLanes);
      const int64_t first = p * kLanes * stride + c;
      Write(sum[p][c], at.y + first, at.residual ? at.residual + first : nullptr, stride, relu);
    }
}

template <Kind K, int P>
void Columns(int count, const Place& at, const float* x, int64_t depth, int64_t stride, bool relu) {
  switch (count) {
#define CASE(C) \
  case C:       \
    if constexpr (C <= kColumns) return Block<K, P, C>(at, x, depth, stride, relu); else return;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
  }
}

template <Kind K>
void Panels(int64_t from, int64_t to, const Matrix& w, const float* x, float* y, int64_t columns, const After& after) {
  const int64_t blocks = (columns + kColumns - 1) / kColumns;
  for (int64_t panel = from; panel < to;) {
    const bool pair = kPanels == 2 && panel + 2 <= to;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = columns * b / blocks, count = columns * (b + 1) / blocks - first;
      const Place at(w, panel, first, y, columns, after);
      if (pair) Columns<K, kPanels>(count, at, x + first, w.depth, columns, after.relu);
      else Columns<K, 1>(count, at, x + first, w.depth, columns, after.relu);
    }
    panel += pair ? 2 : 1;
  }
}

void Widening(int64_t from, int64_t to, const Matrix& w, const float* x, float* y, int64_t columns,
              const After& after = {}) {
  if (w.kind == kFloat32) Panels<kFloat32>(from, to, w, x, y, columns, after);
  if (w.kind == kBfloat16) Panels<kBfloat16>(from, to, w, x, y, columns, after);
  if (w.kind == kInt8) Panels<kInt8>(from, to, w, x, y, columns, after);
}

// Whether this level multiplies x in digits.
constexpr bool kDigits[] = {
    false,
#ifdef __AVX512BF16__
    true,
#else
    false,
#endif
#ifdef __AVX512VNNI__
    true,
#else
    false,
#endif
};

// Columns in two digits each, hi and lo: int8, x = scale (256 hi + lo); or bfloat16, x = hi + lo.
struct Digits {
  std::vector<int32_t> rows;   // [columns, 2, length], padded with zeros
  std::vector<float> scale;    // [columns] of int8
  std::vector<int32_t> sums;   // [columns, 2] of int8
  int64_t length, columns;     // 32-bit groups of a row; columns, the padding's included

  const int32_t* Row(int64_t column, int digit) const { return rows.data() + (2 * column + digit) * length; }

  // From x [inputs, stride].
  void Fill(Kind kind, const float* x, int64_t inputs, int64_t stride) {
    const int depth = kind == kInt8 ? kDepth<kInt8> : kDepth<kBfloat16>;
    length = (inputs + 16 * depth - 1) / (16 * depth) * 16;
    columns = stride <= 8 ? stride : (stride + 7) / 8 * 8;  // whole tiles
    rows.assign(2 * columns * length, 0);
    scale.assign(columns, 0.0f), sums.assign(2 * columns, 0);
    for (int64_t c = 0; c < stride; ++c) {
      int32_t* row = rows.data() + 2 * c * length;
      if (kind == kInt8) FillInt8(c, x + c, inputs, stride, reinterpret_cast<int8_t*>(row));
      else FillBfloat16(x + c, inputs, stride, reinterpret_cast<uint16_t*>(row));
    }
  }

 private:
  static Lanes Load(const float* x, int64_t i, int64_t inputs, int64_t stride) {
    Lanes found = {};
    if (stride == 1 && i + kLanes <= inputs) return *reinterpret_cast<const Lanes*>(x + i);
    for (int lane = 0; lane < kLanes && i + lane < inputs; ++lane) found[lane] = x[(i + lane) * stride];
    return found;
  }

  void FillInt8(int64_t c, const float* x, int64_t inputs, int64_t stride, int8_t* row) {
    constexpr float kMost = 32639.0f;  // 127 * 256 + 127
    const Lanes magic = Lanes{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
    Lanes most = {}, bad = {};
    for (int64_t i = 0; i < inputs; i += kLanes) {
      const Lanes value = Load(x, i, inputs, stride);
      const Lanes size = value < 0.0f ? -value : value;
      most = size > most ? size : most;
      bad += value * 0.0f;  // NaN if any is NaN or infinite
    }
    float largest = 0.0f, trouble = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, most[lane]), trouble += bad[lane];
    scale[c] = largest / kMost + trouble;
    const float by = largest > 0.0f ? kMost / largest : 0.0f;
    Ints sum_hi = {}, sum_lo = {}, zero;
    std::memcpy(&zero, &magic, sizeof zero);
    for (int64_t i = 0; i < inputs; i += kLanes) {
      const Lanes moved = Load(x, i, inputs, stride) * by + magic;
      Ints whole;
      std::memcpy(&whole, &moved, sizeof whole);
      whole -= zero;
      const Ints lo = whole << 24 >> 24, hi = (whole - lo) >> 8;
      typedef int8_t Bytes __attribute__((vector_size(kLanes)));
      const Bytes low = __builtin_convertvector(lo, Bytes), high = __builtin_convertvector(hi, Bytes);
      std::memcpy(row + i, &high, sizeof high);
      std::memcpy(row + 4 * length + i, &low, sizeof low);
      sum_hi += hi, sum_lo += lo;
    }
    for (int lane = 0; lane < kLanes; ++lane) sums[2 * c] += sum_hi[lane], sums[2 * c + 1] += sum_lo[lane];
  }

  void FillBfloat16(const float* x, int64_t inputs, int64_t stride, uint16_t* row) {
    auto rounded = [](Lanes value) {  // to the nearest bfloat16, the even one of two
      Ints bits;
      std::memcpy(&bits, &value, sizeof bits);
      return bits + 0x7fff + ((bits >> 16) & 1);
    };
    for (int64_t i = 0; i < inputs; i += kLanes) {
      const Lanes value = Load(x, i, inputs, stride);
      const Ints hi = rounded(value), top = hi & static_cast<int32_t>(0xffff0000u);
      Lanes near;
      std::memcpy(&near, &top, sizeof near);
      const Ints lo = rounded(value - near);
      for (int lane = 0; lane < kLanes; ++lane) {
        row[i + lane] = static_cast<uint32_t>(hi[lane]) >> 16;
        row[2 * length + i + lane] = static_cast<uint32_t>(lo[lane]) >> 16;
      }
    }
  }
};

#if defined(__AVX512VNNI__) || defined(__AVX512BF16__)

template <Kind K>
using Sum = std::conditional_t<K == kInt8, Ints, Lanes>;

// sum + a group of weights times that of a digit; int8 weights count 128 too many.
template <Kind K>
inline Sum<K> Dot(Sum<K> sum, Ints weights, int32_t digits) {
#ifdef __AVX512VNNI__
  if constexpr (K == kInt8) return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(digits));
#endif
#ifdef __AVX512BF16__
  if constexpr (K == kBfloat16)
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)weights, (__m512bh)_mm512_set1_epi32(digits));
#endif
  return sum;
}

// Of both digits' sums, without the 128 that int8 weights counted too many, the float32 of a column.
template <Kind K>
inline Lanes Joined(const Sum<K>& hi, const Sum<K>& lo, const Digits& x, int64_t column, const float* scale) {
  if constexpr (K == kInt8)
    return (__builtin_convertvector(hi, Lanes) * 256.0f + __builtin_convertvector(lo, Lanes)) *
           (x.scale[column] * *reinterpret_cast<const Lanes*>(scale));
  else
    return hi + lo;
}

constexpr int kDotColumns = 4;  // with two panels and two digits 16 of 32 registers hold sums

template <Kind K, int P, int C>
void DotBlock(const Place& at, const Digits& x, int64_t column, int64_t depth, int64_t stride, bool relu) {
  Sum<K> sum[P][C][2];
  const int32_t* digits[C][2];
  for (int c = 0; c < C; ++c)
    for (int d = 0; d < 2; ++d) {
      digits[c][d] = x.Row(column + c, d);
      for (int p = 0; p < P; ++p) sum[p][c][d] = Sum<K>{};
    }
  for (int64_t g = 0; g < depth; ++g)
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(at.groups + p * depth + g + 48);
      Ints weights = at.groups[p * depth + g];
      if constexpr (K == kInt8) weights ^= static_cast<int32_t>(0x80808080u);
      for (int c = 0; c < C; ++c)
        for (int d = 0; d < 2; ++d) sum[p][c][d] = Dot<K>(sum[p][c][d], weights, digits[c][d][g]);
    }
  for (int p = 0; p < P; ++p)
    for (int c = 0; c < C; ++c) {
      if constexpr (K == kInt8)
        for (int d = 0; d < 2; ++d) sum[p][c][d] -= 128 * x.sums[2 * (column + c) + d];
      const int64_t first = p * kLanes * stride + c;
      Write(Joined<K>(sum[p][c][0], sum[p][c][1], x, column + c, at.scale + p * kLanes), at.y + first,
            at.residual ? at.residual + first : nullptr, stride, relu);
    }
}

template <Kind K, int P>
void DotColumns(int count, const Place& at, const Digits& x, int64_t column, int64_t depth, int64_t stride, bool relu) {
  switch (count) {
    case 1: return DotBlock<K, P, 1>(at, x, column, depth, stride, relu);
    case 2: return DotBlock<K, P, 2>(at, x, column, depth, stride, relu);
    case 3: return DotBlock<K, P, 3>(at, x, column, depth, stride, relu);
    case 4: return DotBlock<K, P, 4>(at, x, column, depth, stride, relu);
  }
}

template <Kind K>
void DotPanels(int64_t from, int64_t to, const Matrix& w, const Digits& x, float* y, int64_t columns, const After& after) {
  const int64_t blocks = (columns + kDotColumns - 1) / kDotColumns;
  for (int64_t panel = from; panel < to;) {
    const bool pair = panel + 2 <= to;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = columns * b / blocks, count = columns * (b + 1) / blocks - first;
      const Place at(w, panel, first, y, columns, after);
      if (pair) DotColumns<K, 2>(count, at, x, first, w.depth, columns, after.relu);
      else DotColumns<K, 1>(count, at, x, first, w.depth, columns, after.relu);
    }
    panel += pair ? 2 : 1;
  }
}

#ifdef __AMX_TILE__

// How the tiles lie that TileBlock uses: 0-3 sums, 4-5 weights, 6-7 digits of up to 8 columns.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, none[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileShapes(int digits) {
    for (int tile = 0; tile < 8; ++tile) bytes[tile] = 64, rows[tile] = tile == 4 || tile == 5 ? 16 : digits;
  }
};

// P panels times B blocks of 8 columns, of which `count` are real.
template <Kind K, int P, int B>
void TileBlock(const Place& at, const Digits& x, int64_t column, int64_t count, int64_t depth, int64_t stride, bool relu) {
#define MULTIPLY(SUM, X, W) \
  if constexpr (K == kInt8) _tile_dpbssd(SUM, X, W); else _tile_dpbf16ps(SUM, X, W);
  const int64_t row = x.length * sizeof(int32_t);
  _tile_zero(0);
  if constexpr (B > 1) _tile_zero(1);
  if constexpr (P > 1) _tile_zero(2);
  if constexpr (P > 1 && B > 1) _tile_zero(3);
  for (int64_t g = 0; g < depth; g += 16) {
    for (int p = 0; p < P; ++p)
      for (int line = 0; line < 16; ++line) __builtin_prefetch(at.groups + p * depth + g + 48 + line);
    _tile_loadd(4, at.groups + g, 64);
    _tile_loadd(6, x.Row(column, 0) + g, row);
    MULTIPLY(0, 6, 4)
    if constexpr (B > 1) {
      _tile_loadd(7, x.Row(column + 8, 0) + g, row);
      MULTIPLY(1, 7, 4)
    }
    if constexpr (P > 1) {
      _tile_loadd(5, at.groups + depth + g, 64);
      MULTIPLY(2, 6, 5)
      if constexpr (B > 1) MULTIPLY(3, 7, 5)
    }
  }
#undef MULTIPLY
  alignas(64) Sum<K> sum[P][B][16];
  _tile_stored(0, sum[0][0], 64);
  if constexpr (B > 1) _tile_stored(1, sum[0][B - 1], 64);
  if constexpr (P > 1) _tile_stored(2, sum[P - 1][0], 64);
  if constexpr (P > 1 && B > 1) _tile_stored(3, sum[P - 1][B - 1], 64);
  for (int p = 0; p < P; ++p)
    for (int64_t c = 0; c < count; ++c) {
      const int64_t first = p * kLanes * stride + c;
      const Sum<K>* found = sum[p][c / 8] + 2 * (c % 8);
      Write(Joined<K>(found[0], found[1], x, column + c, at.scale + p * kLanes), at.y + first,
            at.residual ? at.residual + first : nullptr, stride, relu);
    }
}

template <Kind K>
void TilePanels(int64_t from, int64_t to, const Matrix& w, const Digits& x, float* y, int64_t columns, const After& after) {
  const TileShapes shapes(static_cast<int>(std::min<int64_t>(16, 2 * columns)));
  _tile_loadconfig(&shapes);
  for (int64_t panel = from; panel < to;) {
    const bool pair = panel + 2 <= to;
    for (int64_t first = 0; first < columns; first += 16) {
      const int64_t count = std::min<int64_t>(16, columns - first);
      const Place at(w, panel, first, y, columns, after);
      if (pair && count > 8) TileBlock<K, 2, 2>(at, x, first, count, w.depth, columns, after.relu);
      else if (pair) TileBlock<K, 2, 1>(at, x, first, count, w.depth, columns, after.relu);
      else if (count > 8) TileBlock<K, 1, 2>(at, x, first, count, w.depth, columns, after.relu);
      else TileBlock<K, 1, 1>(at, x, first, count, w.depth, columns, after.relu);
    }
    panel += pair ? 2 : 1;
  }
  _tile_release();
}

#endif
#endif

// A level's best way for digits.
void ByDigits(int64_t from, int64_t to, const Matrix& w, const Digits& x, float* y, int64_t columns, const After& after) {
#ifdef __AMX_TILE__
  if (w.depth % 16 == 0)
    return w.kind == kInt8 ? TilePanels<kInt8>(from, to, w, x, y, columns, after)
                           : TilePanels<kBfloat16>(from, to, w, x, y, columns, after);
#endif
#ifdef __AVX512VNNI__
  if (w.kind == kInt8) return DotPanels<kInt8>(from, to, w, x, y, columns, after);
#endif
#ifdef __AVX512BF16__
  if (w.kind == kBfloat16) return DotPanels<kBfloat16>(from, to, w, x, y, columns, after);
#endif
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

// Whether the buffer holds panels [.., P, G, 16, depth].
bool Understood(const ffi::AnyBuffer& w) {
  const auto shape = w.dimensions();
  const auto type = w.element_type();
  const int64_t depth = type == ffi::F32 ? 1 : type == ffi::BF16 ? 2 : type == ffi::S8 ? 4 : 0;
  return depth && shape.size() >= 4 && shape[shape.size() - 2] == kLanes && shape[shape.size() - 1] == depth;
}

// The panels from group `first` on.
Matrix Laid(const ffi::AnyBuffer& w, const float* scale, int64_t first = 0) {
  const auto shape = w.dimensions();
  const auto type = w.element_type();
  const Kind kind = type == ffi::F32 ? kFloat32 : type == ffi::BF16 ? kBfloat16 : kInt8;
  const Ints* groups = static_cast<const Ints*>(w.untyped_data()) + first;
  return {kind, groups, scale, shape[shape.size() - 4], shape[shape.size() - 3]};
}

// y [16 P, N] = w [P, G, 16, depth] * x [I, N], in parallel.
ffi::Error Multiply(ffi::ThreadPool& pool, const ffi::AnyBuffer& w, const Array& scale, const float* x,
                    ffi::Span<const int64_t> given, ffi::ResultBuffer<ffi::F32>& y, const After& after) {
  const auto shape = w.dimensions(), found = y->dimensions();
  if (!Understood(w) || shape.size() != 4 || given.size() != 2 || found.size() != 2 || given[0] != shape[1] * shape[3] ||
      found[0] != shape[0] * kLanes || found[1] != given[1] ||
      scale.element_count() != static_cast<size_t>(w.element_type() == ffi::S8 ? found[0] : 0))
    return ffi::Error::InvalidArgument("columns: expected w [P, G, 16, depth], scale of int8 [16 P], x [I, N], y [16 P, N]");
  const Matrix matrix = Laid(w, scale.typed_data());
  const int64_t inputs = given[0], columns = given[1];
  const int64_t size = std::max<int64_t>(2, (1 << 17) / (matrix.depth * 64) / 2 * 2);  // panels of a task
  float* out = y->typed_data();
  thread_local Digits kept;  // this call ends after all that read it
  const bool by_digits = kDigits[matrix.kind];
  if (by_digits) kept.Fill(matrix.kind, x, inputs, columns);
  const Digits* digits = &kept;
  Spread(pool, (matrix.panels + size - 1) / size, [=](int64_t i) {
    const int64_t from = i * size, to = std::min(matrix.panels, (i + 1) * size);
    if (by_digits) ByDigits(from, to, matrix, *digits, out, columns, after);
    else Widening(from, to, matrix, x, out, columns, after);
  });
  return ffi::Error::Success();
}

ffi::Error Added(ffi::ThreadPool pool, ffi::AnyBuffer w, Array scale, Array x, Array residual,
                 ffi::ResultBuffer<ffi::F32> y) {
  if (residual.element_count() != y->element_count())
    return ffi::Error::InvalidArgument("columns: expected a residual of the shape of y");
  return Multiply(pool, w, scale, x.typed_data(), x.dimensions(), y, {residual.typed_data()});
}

// y = w * norm(x), for x [I, N]: each column divided by the root of its mean square, times by [I].
ffi::Error Normed(ffi::ThreadPool pool, ffi::AnyBuffer w, Array scale, Array x, Array by, ffi::ResultBuffer<ffi::F32> y,
                  float epsilon, bool relu) {
  const auto given = x.dimensions();
  if (given.size() != 2 || by.element_count() != static_cast<size_t>(given[0]))
    return ffi::Error::InvalidArgument("columns: expected x [I, N] and a norm's scale [I]");
  const int64_t inputs = given[0], columns = given[1];
  const float *in = x.typed_data(), *factors = by.typed_data();
  thread_local std::vector<float> normed, factor;
  normed.resize(inputs * columns), factor.assign(columns, 0.0f);
  for (int64_t i = 0; i < inputs; ++i)
    for (int64_t c = 0; c < columns; ++c) factor[c] += in[i * columns + c] * in[i * columns + c];
  for (float& f : factor) f = 1.0f / std::sqrt(f / inputs + epsilon);
  for (int64_t i = 0; i < inputs; ++i)
    for (int64_t c = 0; c < columns; ++c) normed[i * columns + c] = in[i * columns + c] * factor[c] * factors[i];
  return Multiply(pool, w, scale, normed.data(), given, y, {nullptr, relu});
}

// e^x for x <= 0, to about two units in the last place; what is below -87 counts as -87.
Lanes Exp(Lanes x) {
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

// found [B, H, K, N] = values * softmax(keys * query [B, H, K, N] + bias [B, L]), for keys [L, K] and values [K, L] of each
// head in panels.
ffi::Error Attend(ffi::ThreadPool pool, ffi::AnyBuffer keys, ffi::AnyBuffer values, Array query, Array bias,
                  ffi::ResultBuffer<ffi::F32> found) {
  const auto shape = keys.dimensions(), asked = query.dimensions();
  if (!Understood(keys) || !Understood(values) || shape.size() != 6 || asked.size() != 4 || keys.element_type() == ffi::S8 ||
      values.element_type() != keys.element_type() || shape[3] * shape[5] != asked[2] || asked[2] % kLanes ||
      values.element_count() != keys.element_count() || bias.element_count() != static_cast<size_t>(shape[0] * shape[2] * kLanes))
    return ffi::Error::InvalidArgument("columns: expected keys and values in panels, query [B, H, K, N], bias [B, L]");
  const int64_t heads = shape[1], length = shape[2] * kLanes, width = asked[2], columns = asked[3];
  const int64_t groups = shape[2] * shape[3];  // of a head
  const float *q = query.typed_data(), *add = bias.typed_data();
  float* out = found->typed_data();
  Spread(pool, shape[0] * heads, [=](int64_t i) {
    thread_local std::vector<float> scores, most, sum;
    const int64_t count = length * columns;
    scores.resize((count + kLanes - 1) / kLanes * kLanes);
    most.assign(columns, -INFINITY), sum.assign(columns, 0.0f);
    float* s = scores.data();
    Widening(0, length / kLanes, Laid(keys, nullptr, i * groups), q + i * width * columns, s, columns);
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
    Widening(0, width / kLanes, Laid(values, nullptr, i * groups), s, y, columns);
    for (int64_t w = 0; w < width; ++w)
      for (int64_t c = 0; c < columns; ++c) y[w * columns + c] /= sum[c];
  });
  return ffi::Error::Success();
}

}  // namespace

// Whether this process may use what this level needs; the system lends tiles on request.
extern "C" int pipejax_ready() {
#ifdef __AMX_TILE__
  constexpr int kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return 1;
#endif
}

#define ARRAY .Arg<Array>()
#define PANELS .Arg<ffi::AnyBuffer>()
#define FOUND .Ret<ffi::Buffer<ffi::F32>>()
#define POOL ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_added, Added, POOL PANELS ARRAY ARRAY ARRAY FOUND);
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_normed, Normed,
                              POOL PANELS ARRAY ARRAY ARRAY FOUND.Attr<float>("epsilon").Attr<bool>("relu"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_attend, Attend, POOL PANELS PANELS ARRAY ARRAY FOUND);
