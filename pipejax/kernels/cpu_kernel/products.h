// Products of a weight matrix with columns, y = W x.
//
// With a few columns such a product costs what reading W costs, if each weight that is read meets all columns at once. W
// lies in panels of 16 outputs, so that it is read from end to end; sums stay in registers. With many columns it costs
// arithmetic.
//
// Weights are float32, bfloat16, or int8 with a float32 scale an output. Here they are widened to float32 on the way; a
// processor with products of the narrow types has better ones (narrow.h).
//
// A column's numbers lie side by side, in x and in y.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "digits.h"

namespace pipejax {

// [16 panels, inputs]: in memory [panels, groups, 16, depth], 64 bytes or kParts registers a group.
struct Matrix {
  Kind kind;
  const Ints* groups;   // the first panel's
  const float* scale;   // [16 panels] of int8
  int64_t panels, depth;  // groups of a panel
  int digits;             // in how many of them columns are for it (digits.h); 0: float32
  int64_t apart = depth;  // groups from a panel to the next

  int64_t Outputs() const { return panels * kPanel; }
  int64_t Inputs() const { return depth * (kind == kInt8 ? 4 : kind == kBfloat16 ? 2 : 1); }
};

// The weights of an output, widened.
inline void Row(const Matrix& w, int64_t output, float* x) {
  const int32_t* groups = reinterpret_cast<const int32_t*>(w.groups) + output / kPanel * w.apart * kPanel + output % kPanel;
  for (int64_t g = 0; g < w.depth; ++g, groups += kPanel) {
    if (w.kind == kInt8)
      for (int j = 0; j < 4; ++j) *x++ = static_cast<float>(static_cast<int8_t>(*groups >> 8 * j)) * w.scale[output];
    else if (w.kind == kBfloat16)
      for (int32_t half : {*groups << 16, *groups & static_cast<int32_t>(0xffff0000u)}) std::memcpy(x++, &half, sizeof half);
    else
      std::memcpy(x++, groups, sizeof *groups);
  }
}

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
  for (int p = 0; p < P; ++p) groups[p] = w.groups + (panel + p) * w.apart * kParts;
  x += column * stride;
  for (int64_t g = 0; g < w.depth; ++g) {
    for (int p = 0; p < P; ++p) __builtin_prefetch(groups[p] + (g + 48) * kParts);
    for (int j = 0; j < kDepth<K>; ++j, ++x) {
      Lanes weights[kAll];
      for (int p = 0; p < kAll; ++p) weights[p] = Widened<K>(groups[p / kParts][g * kParts + p % kParts], j);
      for (int c = 0; c < C; ++c)  // outside, lest all columns' numbers are kept in registers at once
        for (int p = 0; p < kAll; ++p) sum[p][c] = Fma(weights[p], x[c * stride], sum[p][c]);
    }
  }
  for (int p = 0; p < kAll; ++p)
    for (int c = 0; c < C; ++c) {
      const int64_t output = panel * kPanel + p * kLanes;
      if constexpr (K == kInt8) sum[p][c] *= Load(w.scale + output);
      y.Write(output, column + c, sum[p][c]);
    }
}

// run(count), a constant of the compiler's there; 1 to Most.
template <int Most, typename Run>
inline void WithConstant(int64_t count, Run run) {
  if constexpr (Most > 1)
    if (count != Most) return WithConstant<Most - 1>(count, run);
  run(std::integral_constant<int, Most>{});
}

template <Kind K>
void WidenedPanels(int64_t from, int64_t to, const Matrix& w, const float* x, int64_t stride, int64_t columns,
                   const Results& y) {
  const int64_t blocks = (columns + kColumns - 1) / kColumns;
  for (int64_t panel = from; panel < to;) {
    const bool pair = kPanels == 2 && panel + 2 <= to;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = columns * b / blocks, count = columns * (b + 1) / blocks - first;
      WithConstant<kColumns>(count, [&](auto c) {
        if (pair) Block<K, kPanels, c()>(w, panel, x, stride, first, y);
        else Block<K, 1, c()>(w, panel, x, stride, first, y);
      });
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

}  // namespace pipejax
