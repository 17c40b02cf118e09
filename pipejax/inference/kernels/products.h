// Products of a weight matrix with columns, y = W x.
//
// With a few columns such a product costs what reading W costs, if each weight that is read meets all columns at once. W
// lies in panels of 16 outputs, so that it is read from end to end; sums stay in registers. With many columns it costs
// arithmetic, and a task takes as many of them as the cache holds.
//
// Weights are float32, bfloat16, or int8 with a float32 scale an output. A processor with products of the narrow types
// gets x in digits (digits.h), which are columns of their own. Elsewhere weights are widened to float32 on the way.
//
// A column's numbers lie side by side, in x and in y.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "digits.h"
#include "team.h"

namespace pipejax {

// [16 panels, inputs]: in memory [panels, groups, 16, depth], 64 bytes or kParts registers a group.
struct Matrix {
  Kind kind;
  const Ints* groups;   // the first panel's
  const float* scale;   // [16 panels] of int8
  int64_t panels, depth;  // groups of a panel

  int64_t Outputs() const { return panels * kPanel; }
  int64_t Inputs() const { return depth * (kind == kInt8 ? 4 : kind == kBfloat16 ? 2 : 1); }
};

// Where results go, and how.
enum Then { kPut, kPutPositive, kAdd };
struct Results {
  float* at;
  int64_t stride;  // from a column to the next
  Then then = kPut;

  // Some outputs for a column, from that number on.
  void Write(int64_t output, int64_t column, Lanes sum) const {
    float* y = at + column * stride + output;
    if (then == kAdd) sum += Load(y);
    if (then == kPutPositive) sum = sum > 0.0f || sum != sum ? sum : Lanes{};
    Store(y, sum);
  }
};

// Of some outputs the weights of a group's input j, as float32.
template <Kind K>
inline Lanes Widened(Ints group, int j) {
  if constexpr (K == kInt8) return __builtin_convertvector(group << (24 - 8 * j) >> 24, Lanes);
  if constexpr (K == kBfloat16) return Floats(j ? group & static_cast<int32_t>(0xffff0000u) : group << 16);
  return Floats(group);
}

// P panels times C columns, weights widened.
template <Kind K, int P, int C>
void Block(const Matrix& w, int64_t panel, const float* x, int64_t stride, int64_t column, const Results& y) {
  constexpr int kAll = P * kParts;
  Lanes sum[kAll][C];
  for (int p = 0; p < kAll; ++p)
    for (int c = 0; c < C; ++c) sum[p][c] = Lanes{};
  const Ints* groups[P];
  for (int p = 0; p < P; ++p) groups[p] = w.groups + (panel + p) * w.depth * kParts;
  x += column * stride;
  for (int64_t g = 0; g < w.depth; ++g) {
    for (int p = 0; p < P; ++p) __builtin_prefetch(groups[p] + (g + 48) * kParts);
    for (int j = 0; j < kDepth<K>; ++j, ++x) {
      Lanes weights[kAll];
      for (int p = 0; p < kAll; ++p) weights[p] = Widened<K>(groups[p / kParts][g * kParts + p % kParts], j);
      for (int c = 0; c < C; ++c)  // outside, lest all columns' numbers are kept in registers at once
        for (int p = 0; p < kAll; ++p) sum[p][c] += weights[p] * x[c * stride];
    }
  }
  for (int p = 0; p < kAll; ++p)
    for (int c = 0; c < C; ++c) {
      const int64_t output = panel * kPanel + p * kLanes;
      if constexpr (K == kInt8) sum[p][c] *= Load(w.scale + output);
      y.Write(output, column + c, sum[p][c]);
    }
}

template <Kind K, int P>
void Blocks(int count, const Matrix& w, int64_t panel, const float* x, int64_t stride, int64_t column, const Results& y) {
  switch (count) {
#define CASE(C) \
  case C:       \
    if constexpr (C <= kColumns) return Block<K, P, C>(w, panel, x, stride, column, y); else return;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
  }
}

template <Kind K>
void WidenedPanels(int64_t from, int64_t to, const Matrix& w, const float* x, int64_t stride, int64_t columns,
                   const Results& y) {
  const int64_t blocks = (columns + kColumns - 1) / kColumns;
  for (int64_t panel = from; panel < to;) {
    const bool pair = kPanels == 2 && panel + 2 <= to;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = columns * b / blocks, count = columns * (b + 1) / blocks - first;
      if (pair) Blocks<K, kPanels>(count, w, panel, x, stride, first, y);
      else Blocks<K, 1>(count, w, panel, x, stride, first, y);
    }
    panel += pair ? 2 : 1;
  }
}

// Panels `from` to `to` of w times so many columns of x.
inline void ByWidening(int64_t from, int64_t to, const Matrix& w, const float* x, int64_t stride, int64_t columns,
                       const Results& y) {
  if (w.kind == kFloat32) WidenedPanels<kFloat32>(from, to, w, x, stride, columns, y);
  if (w.kind == kBfloat16) WidenedPanels<kBfloat16>(from, to, w, x, stride, columns, y);
  if (w.kind == kInt8) WidenedPanels<kInt8>(from, to, w, x, stride, columns, y);
}

#if defined(__AVX512VNNI__) || defined(__AVX512BF16__)

template <Kind K>
using Total = std::conditional_t<K == kInt8, Ints, Lanes>;

// A group of weights as Dot takes it: int8 without a sign, 128 too many.
template <Kind K>
inline Ints Unsigned(Ints weights) {
  return K == kInt8 ? weights ^ static_cast<int32_t>(0x80808080u) : weights;
}

// sum + a group of weights times that of a digit.
template <Kind K>
inline Total<K> Dot(Total<K> sum, Ints weights, Ints digits) {
#ifdef __AVX512VNNI__
  if constexpr (K == kInt8) return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)digits);
#endif
#ifdef __AVX512BF16__
  if constexpr (K == kBfloat16)
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)weights, (__m512bh)(__m512i)digits);
#endif
  return sum;
}

// What the sums of a column's digits stand for.
template <Kind K, int D>
inline Lanes Joined(const Total<K>* sums, const Matrix& w, int64_t panel, float scale) {
  Lanes found = __builtin_convertvector(sums[0], Lanes);
  if constexpr (D == 2) found = found * (K == kInt8 ? 256.0f : 1.0f) + __builtin_convertvector(sums[1], Lanes);
  return K == kInt8 ? found * (scale * Load(w.scale + panel * kPanel)) : found;
}

constexpr int kDotSums = 24;  // of 32 registers
template <int D>
constexpr int kDotPanels = D == 1 ? 4 : 2;

// P panels times C columns in D digits.
template <Kind K, int D, int P, int C>
void DotBlock(const Matrix& w, int64_t panel, const Digits& x, int64_t column, const Results& y) {
  Total<K> sum[P][C][D];
  const int32_t* digits[C][D];
  for (int c = 0; c < C; ++c) {
    for (int d = 0; d < D; ++d) {
      digits[c][d] = x.Row(column + c, d);
      for (int p = 0; p < P; ++p) sum[p][c][d] = Total<K>{};
    }
  }
  const Ints* groups = w.groups + panel * w.depth;
  for (int64_t g = 0; g < w.depth; ++g) {
    Ints weights[P];
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(groups + p * w.depth + g + 48);
      weights[p] = Unsigned<K>(groups[p * w.depth + g]);
    }
    for (int c = 0; c < C; ++c)
      for (int d = 0; d < D; ++d) {
        const Ints digit = Ints{} + digits[c][d][g];
        for (int p = 0; p < P; ++p) sum[p][c][d] = Dot<K>(sum[p][c][d], weights[p], digit);
      }
  }
  for (int c = 0; c < C; ++c) {
    if constexpr (K == kInt8 && D == 1) {
      Total<K> high[P] = {};
      const Digits::Outlier* outliers = x.Outliers(column + c);
      for (int64_t i = 0; i < x.OutlierCount(column + c); ++i)
        for (int p = 0; p < P; ++p)
          high[p] = Dot<K>(high[p], Unsigned<K>(groups[p * w.depth + outliers[i].group]), Ints{} + outliers[i].hi);
      for (int p = 0; p < P; ++p) sum[p][c][0] += high[p] << 8;
    }
    for (int p = 0; p < P; ++p) {
      if constexpr (K == kInt8)
        for (int d = 0; d < D; ++d) sum[p][c][d] -= 128 * x.SumOf(column + c, d);
      y.Write((panel + p) * kPanel, column + c, Joined<K, D>(sum[p][c], w, panel + p, x.Scale(column + c)));
    }
  }
}

template <Kind K, int D, int P>
void DotBlocks(int count, const Matrix& w, int64_t panel, const Digits& x, int64_t column, const Results& y) {
  switch (count) {
#define CASE(C) \
  case C:       \
    if constexpr (kDotPanels<D> * D * C <= kDotSums) return DotBlock<K, D, P, C>(w, panel, x, column, y); else return;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
  }
}

template <Kind K, int D>
void DotPanels(int64_t from, int64_t to, const Matrix& w, const Digits& x, int64_t begin, int64_t end, const Results& y) {
  constexpr int64_t kMost = kDotSums / kDotPanels<D> / D;
  const int64_t columns = end - begin, blocks = (columns + kMost - 1) / kMost;
  for (int64_t panel = from; panel < to;) {
    const int64_t together = panel + kDotPanels<D> <= to ? kDotPanels<D> : panel + 2 <= to ? 2 : 1;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = columns * b / blocks, count = columns * (b + 1) / blocks - first;
      if (together == 1) DotBlocks<K, D, 1>(count, w, panel, x, begin + first, y);
      else if (together == 2) DotBlocks<K, D, 2>(count, w, panel, x, begin + first, y);
      else DotBlocks<K, D, kDotPanels<D>>(count, w, panel, x, begin + first, y);
    }
    panel += together;
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
void TileBlock(const Matrix& w, int64_t panel, const Digits& x, int64_t column, int64_t count, bool far, const Results& y) {
#define MULTIPLY(SUM, X, W) \
  { if constexpr (K == kInt8) _tile_dpbssd(SUM, X, W); else _tile_dpbf16ps(SUM, X, W); }
  const Ints* groups = w.groups + panel * w.depth;
  const int64_t row = x.RowBytes();
  const int32_t *digits = x.Row(column, 0), *more = digits + 4 * row;
  _tile_zero(0);
  if constexpr (B > 1) _tile_zero(1);
  if constexpr (P > 1) _tile_zero(2);
  if constexpr (P > 1 && B > 1) _tile_zero(3);
  for (int64_t g = 0; g < w.depth; g += 16) {
    if (far)
      for (int p = 0; p < P; ++p)
        for (int line = 0; line < 16; ++line) __builtin_prefetch(groups + p * w.depth + g + 48 + line);
    _tile_loadd(4, groups + g, 64);
    _tile_loadd(6, digits + g, row);
    MULTIPLY(0, 6, 4)
    if constexpr (B > 1) {
      _tile_loadd(7, more + g, row);
      MULTIPLY(1, 7, 4)
    }
    if constexpr (P > 1) {
      _tile_loadd(5, groups + w.depth + g, 64);
      MULTIPLY(2, 6, 5)
      if constexpr (B > 1) MULTIPLY(3, 7, 5)
    }
  }
#undef MULTIPLY
  alignas(64) Total<K> sum[P][B][16];
  _tile_stored(0, sum[0][0], 64);
  if constexpr (B > 1) _tile_stored(1, sum[0][B - 1], 64);
  if constexpr (P > 1) _tile_stored(2, sum[P - 1][0], 64);
  if constexpr (P > 1 && B > 1) _tile_stored(3, sum[P - 1][B - 1], 64);
  for (int p = 0; p < P; ++p)
    for (int64_t c = 0; c < count; ++c) {
      const Total<K>* found = sum[p][c / 8] + 2 * (c % 8);
      y.Write((panel + p) * kPanel, column + c, Joined<K, 2>(found, w, panel + p, x.Scale(column + c)));
    }
}

template <Kind K>
void TilePair(int64_t panel, int64_t to, const Matrix& w, const Digits& x, int64_t first, int64_t end, bool far,
              const Results& y) {
  const int64_t count = std::min<int64_t>(16, end - first);
  const bool pair = panel + 2 <= to;
  if (pair && count > 8) TileBlock<K, 2, 2>(w, panel, x, first, count, far, y);
  else if (pair) TileBlock<K, 2, 1>(w, panel, x, first, count, far, y);
  else if (count > 8) TileBlock<K, 1, 2>(w, panel, x, first, count, far, y);
  else TileBlock<K, 1, 1>(w, panel, x, first, count, far, y);
}

// `begin` is a multiple of 8.
template <Kind K>
void TilePanels(int64_t from, int64_t to, const Matrix& w, const Digits& x, int64_t begin, int64_t end, const Results& y) {
  const TileShapes shapes(end <= 8 ? 2 * end : 16);
  _tile_loadconfig(&shapes);
  if (end - begin <= 32) {  // each weight is read once, from far away
    for (int64_t panel = from; panel < to; panel += 2)
      for (int64_t first = begin; first < end; first += 16) TilePair<K>(panel, to, w, x, first, end, true, y);
  } else {  // digits stay near, and weights come by in the order in which they lie
    for (int64_t first = begin; first < end; first += 16)
      for (int64_t panel = from; panel < to; panel += 2) TilePair<K>(panel, to, w, x, first, end, false, y);
  }
  _tile_release();
}

#endif
#endif

// Panels `from` to `to` of w times the columns `begin` to `end` of x, in a level's best way.
inline void ByDigits(int64_t from, int64_t to, const Matrix& w, const Digits& x, int64_t begin, int64_t end,
                     const Results& y) {
#ifdef __AMX_TILE__
  if (w.depth % 16 == 0)
    return w.kind == kInt8 ? TilePanels<kInt8>(from, to, w, x, begin, end, y)
                           : TilePanels<kBfloat16>(from, to, w, x, begin, end, y);
#endif
#ifdef __AVX512VNNI__
  if (w.kind == kInt8) return DotPanels<kInt8, kDigits[kInt8]>(from, to, w, x, begin, end, y);
#endif
#ifdef __AVX512BF16__
  if (x.Count() == 1) return DotPanels<kBfloat16, 1>(from, to, w, x, begin, end, y);
  return DotPanels<kBfloat16, 2>(from, to, w, x, begin, end, y);
#endif
}

// What matrices are multiplied with: columns, and their digits where a matrix wants them.
class Operand {
 public:
  // Columns [count, inputs]; `make(c, column)` gives the numbers of one, in the room that it is offered or elsewhere.
  template <typename Make>
  void Set(Team& team, Kind kind, int64_t count, int64_t inputs, Make make) {
    count_ = count, inputs_ = inputs;
    const int digits = kDigits[kind];
    if (digits) digits_.Reserve(kind, digits, count, inputs);
    else floats_.resize(count * inputs);
    team.Run(count, std::max<int64_t>(1, 4096 / inputs), [&](int64_t c) {  // a share is worth a thread's attention
      thread_local std::vector<float> room;
      if (digits) room.resize(inputs);
      float* offered = digits ? room.data() : floats_.data() + c * inputs;
      const float* made = make(c, offered);
      if (digits) digits_.Fill(c, made);
      else if (made != offered) std::copy(made, made + inputs, offered);
    });
  }

  // y = w * this, in parallel.
  void Times(Team& team, const Matrix& w, const Results& y) const {
    const int64_t size = Panels(team, w), parts = (w.panels + size - 1) / size, chunks = (count_ + kChunk - 1) / kChunk;
    team.Run(parts * chunks, 1, [&](int64_t i) {
      const int64_t from = i % parts * size, to = std::min(w.panels, from + size);
      const int64_t begin = i / parts * kChunk, end = std::min(count_, begin + kChunk);
      Multiply(from, to, w, begin, end, {y.at + begin * y.stride, y.stride, y.then});
    });
  }

  // Of each column of w * this the number of the highest of so many outputs, the lowest number of equals; the last number
  // if an output is NaN. What is multiplied never leaves a task.
  void Highest(Team& team, const Matrix& w, int64_t outputs, int32_t* number) {
    const int64_t size = Panels(team, w), parts = (w.panels + size - 1) / size, chunks = (count_ + kChunk - 1) / kChunk;
    peaks_.resize(parts * count_);
    team.Run(parts * chunks, 1, [&](int64_t i) {
      thread_local std::vector<float> found;
      const int64_t from = i % parts * size, to = std::min(w.panels, from + size);
      const int64_t begin = i / parts * kChunk, end = std::min(count_, begin + kChunk), stride = (to - from) * kPanel;
      found.resize((end - begin) * stride);
      Multiply(from, to, w, begin, end, {found.data() - from * kPanel, stride});
      for (int64_t c = begin; c < end; ++c)
        peaks_[c * parts + i % parts] = Peak(found.data() + (c - begin) * stride, from * kPanel, std::min(outputs, to * kPanel));
    });
    for (int64_t c = 0; c < count_; ++c) {
      const std::pair<float, int32_t>* peaks = peaks_.data() + c * parts;
      int64_t best = 0;
      bool bad = false;
      for (int64_t part = 0; part < parts; ++part) {
        bad |= peaks[part].first != peaks[part].first;
        if (peaks[part].first > peaks[best].first) best = part;
      }
      number[c] = bad ? outputs - 1 : peaks[best].second;
    }
  }

 private:
  static constexpr int64_t kChunk = 128;  // columns of a task: their digits stay in the cache

  // Of a task, an even number: about 128 KiB of weights at the most, and about as many tasks for each thread.
  static int64_t Panels(const Team& team, const Matrix& w) {
    const int64_t bytes = w.panels * w.depth * 64, all = team.Threads() << 17;
    const int64_t tasks = team.Threads() * ((bytes + all - 1) / all);
    return std::max<int64_t>(4, (w.panels + tasks - 1) / tasks) / 4 * 4;
  }

  // Panels `from` to `to` of w times the columns `begin` to `end`; y.at is where the first of these goes.
  void Multiply(int64_t from, int64_t to, const Matrix& w, int64_t begin, int64_t end, const Results& y) const {
    if (kDigits[w.kind]) ByDigits(from, to, w, digits_, begin, end, {y.at - begin * y.stride, y.stride, y.then});
    else ByWidening(from, to, w, floats_.data() + begin * inputs_, inputs_, end - begin, y);
  }

  // The highest of x, whose numbers are `from` to `to`, and the lowest number that it has; NaN if there is one.
  static std::pair<float, int32_t> Peak(const float* x, int64_t from, int64_t to) {
    Lanes high = Lanes{} - INFINITY, bad = {};
    Ints at = {};
    for (int64_t i = 0; i < to - from; i += kLanes) {
      Lanes value = Load(x + i);
      if (i + kLanes > to - from)
        for (int64_t lane = to - from - i; lane < kLanes; ++lane) value[lane] = -INFINITY;
      const Ints above = value > high;
      high = above ? value : high;
      at = above ? Ints{} + static_cast<int32_t>(i) : at;
      bad = value != value ? value : bad;
    }
    float highest = high[0];
    int32_t lowest = at[0];
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      const float value = high[lane], trouble = bad[lane];
      const int32_t number = at[lane] + lane;
      if (trouble != trouble) return {trouble, 0};
      if (value > highest || (value == highest && number < lowest)) highest = value, lowest = number;
    }
    return {highest, static_cast<int32_t>(from) + lowest};
  }

  int64_t count_ = 0, inputs_ = 0;
  std::vector<float> floats_;
  Digits digits_;
  std::vector<std::pair<float, int32_t>> peaks_;  // [columns, tasks]
};

}  // namespace pipejax
