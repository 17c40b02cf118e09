// Products of a weight matrix with columns, y = W x.
//
// With a few columns, such a product takes as long as reading W, if each weight is multiplied with all columns when it is
// read. W is stored in panels of 16 outputs, so that memory is read sequentially; sums stay in registers. With many columns
// arithmetic takes longer than reading.
//
// Weights are float32, bfloat16, or int8 with a float32 scale for each output. ByWidening converts them to float32 when they
// are read. On processors with instructions for products of bfloat16 or int8, ByDigits in narrow.h is faster. products.cc
// contains both functions, so that the compiler can compile it at the same time as t5.cc.
//
// The numbers of a column are consecutive in memory, in x and in y.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "digits.h"

// A function of this library that another source file of the library calls, and nothing outside the library.
#define PIPEJAX_INTERNAL __attribute__((visibility("hidden")))

namespace pipejax {

// A matrix [16 * panels, inputs], stored as [panels, groups, 16, numbers in 32 bits]. A group has 64 bytes, kParts registers.
struct Matrix {
  Kind kind;
  const Ints* groups;   // the groups of the first panel
  const float* scale;   // [16 * panels], only for int8
  int64_t panels, depth;  // number of panels, and of groups of a panel
  int digits;             // number of digits of the columns for this matrix (digits.h); 0: columns are float32
  int64_t apart = depth;  // number of groups from the beginning of a panel to the beginning of the next

  int64_t Outputs() const { return panels * kPanel; }
  int64_t Inputs() const { return depth * (kind == kInt8 ? 4 : kind == kBfloat16 ? 2 : 1); }
};

// Writes the weights of an output to x, as float32.
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

// The array that receives results, and how they are stored: written, written with negative ones replaced by 0, or added.
enum Then { kPut, kPutPositive, kAdd };
struct Results {
  float* at;
  int64_t stride;  // numbers from a column to the next
  Then then = kPut;

  // Stores a register of results of a column, from the output `output` on.
  void Write(int64_t output, int64_t column, Lanes sum) const {
    float* y = at + column * stride + output;
    if (then == kAdd) sum += Load(y);
    if (then == kPutPositive) sum = sum > 0.0f || sum != sum ? sum : Lanes{};
    Store(y, sum);
  }
};

// Calls run with `count`, 1 to Most, as a compile-time constant.
template <int Most, typename Run>
inline void WithConstant(int64_t count, Run run) {
  if constexpr (Most > 1)
    if (count != Most) return WithConstant<Most - 1>(count, run);
  run(std::integral_constant<int, Most>{});
}

// Multiplies the panels `from` to `to` - 1 of w with `columns` columns of x.
PIPEJAX_INTERNAL void ByWidening(int64_t from, int64_t to, const Matrix& w, const float* x, int64_t stride, int64_t columns,
                                 const Results& y);

}  // namespace pipejax
