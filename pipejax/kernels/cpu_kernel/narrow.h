// Products y = W x of an int8 or bfloat16 matrix with columns in digits of the same type (digits.h), for processors with
// instructions for them: VNNI, BF16, AMX. Each digit of a column is multiplied like a separate column.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "products.h"

namespace pipejax {

#if defined(__AVX512VNNI__) || defined(__AVX512BF16__)

template <Kind K>
using Total = std::conditional_t<K == kInt8, Ints, Lanes>;

// A group of weights in the form that Dot needs: int8 weights become unsigned, by adding 128.
template <Kind K>
inline Ints Unsigned(Ints weights) {
  return K == kInt8 ? weights ^ static_cast<int32_t>(0x80808080u) : weights;
}

// The sum plus the product of a group of weights and a group of digits.
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

// Combines the sums of a column's digits into the results of a panel. `of_panel` are the scales of int8 weights, `scale` is
// the scale of the column.
template <Kind K, int D>
inline Lanes Joined(const Total<K>* sums, Lanes of_panel, float scale) {
  Lanes found = __builtin_convertvector(sums[0], Lanes);
  if constexpr (D == 2) found = found * (K == kInt8 ? 256.0f : 1.0f) + __builtin_convertvector(sums[1], Lanes);
  return K == kInt8 ? found * (scale * of_panel) : found;
}

// The scales of a panel of int8 weights.
template <Kind K>
inline Lanes Scales(const Matrix& w, int64_t panel) {
  return K == kInt8 ? Load(w.scale + panel * kPanel) : Lanes{};
}

// Multiplies P panels with C columns in D digits.
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
  const Ints* groups = w.groups + panel * w.apart;
  for (int64_t g = 0; g < w.depth; ++g) {
    Ints weights[P];
    for (int p = 0; p < P; ++p) {
      __builtin_prefetch(groups + p * w.apart + g + 48);
      weights[p] = Unsigned<K>(groups[p * w.apart + g]);
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
          high[p] = Dot<K>(high[p], Unsigned<K>(groups[p * w.apart + outliers[i].group]), Ints{} + outliers[i].hi);
      for (int p = 0; p < P; ++p) sum[p][c][0] += high[p] << 8;
    }
    for (int p = 0; p < P; ++p) {
      if constexpr (K == kInt8)
        for (int d = 0; d < D; ++d) sum[p][c][d] -= 128 * x.SumOf(column + c, d);
      y.Write((panel + p) * kPanel, column + c, Joined<K, D>(sum[p][c], Scales<K>(w, panel + p), *x.Scales(column + c)));
    }
  }
}

#ifdef __AVX512VNNI__

// Computes bounds of the products of P int8 panels with C columns in two digits from the first digits alone, with little more
// than half of the arithmetic. The magnitude of a second digit is at most 128, so the second digits change an output by at
// most 128 times the sum of the magnitudes of its weights. Calls tell(panel, column, low, high).
template <int P, int C, typename Tell>
void BoundBlock(const Matrix& w, int64_t panel, const Digits& x, int64_t column, Tell tell) {
  Ints sum[P][C] = {}, size[P] = {};
  const int32_t* digits[C];
  for (int c = 0; c < C; ++c) digits[c] = x.Row(column + c, 0);
  const Ints ones = Ints{} + 0x01010101, *groups = w.groups + panel * w.apart;
  for (int64_t g = 0; g < w.depth; ++g) {
    Ints weights[P];
    for (int p = 0; p < P; ++p) {
      const Ints* at = groups + p * w.apart + g;
      __builtin_prefetch(at + 48);
      weights[p] = Unsigned<kInt8>(*at);
      size[p] = Dot<kInt8>(size[p], (Ints)_mm512_abs_epi8((__m512i)*at), ones);
    }
    for (int c = 0; c < C; ++c) {
      const Ints digit = Ints{} + digits[c][g];
      for (int p = 0; p < P; ++p) sum[p][c] = Dot<kInt8>(sum[p][c], weights[p], digit);
    }
  }
  for (int p = 0; p < P; ++p)
    for (int c = 0; c < C; ++c) {
      const Lanes middle = __builtin_convertvector(sum[p][c] - 128 * x.SumOf(column + c, 0), Lanes) * 256.0f;
      const Lanes rest = __builtin_convertvector(size[p], Lanes) * 128.0f, scale = Scales<kInt8>(w, panel + p) * *x.Scales(column + c);
      const Lanes apart = rest + ((middle < 0.0f ? -middle : middle) + rest) * 1e-6f;  // 1e-6 exceeds the rounding errors
      tell(panel + p, column + c, (middle - apart) * scale, (middle + apart) * scale);
    }
}

#endif
#endif

// Multiplies the panels `from` to `to` - 1 of w with the columns `begin` to `end` - 1 of x, by the fastest instructions of the
// instruction set that is compiled for.
PIPEJAX_INTERNAL void ByDigits(int64_t from, int64_t to, const Matrix& w, const Digits& x, int64_t begin, int64_t end,
                               const Results& y);

}  // namespace pipejax
