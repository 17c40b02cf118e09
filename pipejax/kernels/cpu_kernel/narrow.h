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

constexpr int kDotSums = 24;  // of the 32 registers, the number that contains sums
template <int D>
constexpr int kDotPanels = D == 1 ? 4 : 2;

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

template <Kind K, int D>
void DotPanels(int64_t from, int64_t to, const Matrix& w, const Digits& x, int64_t begin, int64_t end, const Results& y) {
  constexpr int kMost = kDotSums / kDotPanels<D> / D;
  const int64_t columns = end - begin, blocks = (columns + kMost - 1) / kMost;
  for (int64_t panel = from; panel < to;) {
    const int64_t together = panel + kDotPanels<D> <= to ? kDotPanels<D> : panel + 2 <= to ? 2 : 1;
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t first = columns * b / blocks, count = columns * (b + 1) / blocks - first;
      WithConstant<kMost>(count, [&](auto c) {
        if (together == 1) DotBlock<K, D, 1, c()>(w, panel, x, begin + first, y);
        else if (together == 2) DotBlock<K, D, 2, c()>(w, panel, x, begin + first, y);
        else DotBlock<K, D, kDotPanels<D>, c()>(w, panel, x, begin + first, y);
      });
    }
    panel += together;
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
#ifdef __AMX_TILE__

// The configuration of the tiles that TileBlock uses: 0-3 for sums, 4-5 for weights, 6-7 for the digits of up to 8 columns
// each. The time of a product is proportional to the rows of its digits, so with 9 to 16 columns the tiles of the second block
// have only as many rows as needed.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, none[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileShapes(int64_t columns) {
    const int first = 2 * std::min<int64_t>(columns, 8), second = columns > 8 && columns < 16 ? 2 * (columns - 8) : first;
    for (int tile = 0; tile < 8; ++tile)
      bytes[tile] = 64, rows[tile] = tile == 4 || tile == 5 ? 16 : tile % 2 ? second : first;
  }
};

// Multiplies P panels with B blocks of 8 columns; the first `count` columns are real. `far`: weights are prefetched.
template <Kind K, int P, int B>
void TileBlock(const Matrix& w, int64_t panel, const Digits& x, int64_t column, int64_t count, bool far, const Results& y) {
#define MULTIPLY(SUM, X, W) \
  { if constexpr (K == kInt8) _tile_dpbssd(SUM, X, W); else _tile_dpbf16ps(SUM, X, W); }
  const Ints* groups = w.groups + panel * w.apart;
  const int64_t row = x.RowBytes();
  const int32_t *digits = x.Row(column, 0), *more = digits + 4 * row;
  _tile_zero(0);
  if constexpr (B > 1) _tile_zero(1);
  if constexpr (P > 1) _tile_zero(2);
  if constexpr (P > 1 && B > 1) _tile_zero(3);
  for (int64_t g = 0; g < w.depth; g += 16) {
    if (far)
      for (int p = 0; p < P; ++p)
        for (int line = 0; line < 16; ++line) __builtin_prefetch(groups + p * w.apart + g + 48 + line);
    _tile_loadd(4, groups + g, 64);
    _tile_loadd(6, digits + g, row);
    MULTIPLY(0, 6, 4)
    if constexpr (B > 1) {
      _tile_loadd(7, more + g, row);
      MULTIPLY(1, 7, 4)
    }
    if constexpr (P > 1) {
      _tile_loadd(5, groups + w.apart + g, 64);
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
  const Results results = y;  // a copy, because the compiler must assume that writes through y.at may change y
  const float* scale = x.Scales(column);
  for (int p = 0; p < P; ++p) {
    const Lanes scales = Scales<K>(w, panel + p);
    for (int64_t c = 0; c < count; ++c)
      results.Write((panel + p) * kPanel, column + c, Joined<K, 2>(sum[p][c / 8] + 2 * (c % 8), scales, scale[c]));
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
  const TileShapes shapes(end - begin);
  _tile_loadconfig(&shapes);
  if (end - begin <= 32) {  // the outer loop is over panels, so that each weight is read once from memory
    for (int64_t panel = from; panel < to; panel += 2)
      for (int64_t first = begin; first < end; first += 16) TilePair<K>(panel, to, w, x, first, end, true, y);
  } else {  // the outer loop is over columns, so that digits stay in the cache and weights are read sequentially
    for (int64_t first = begin; first < end; first += 16)
      for (int64_t panel = from; panel < to; panel += 2) TilePair<K>(panel, to, w, x, first, end, false, y);
  }
  _tile_release();
}

#endif
#endif

// Multiplies the panels `from` to `to` - 1 of w with the columns `begin` to `end` - 1 of x, by the fastest instructions of the
// instruction set that is compiled for.
inline void ByDigits(int64_t from, int64_t to, const Matrix& w, const Digits& x, int64_t begin, int64_t end,
                     const Results& y) {
#ifdef __AMX_TILE__
  if (w.depth % 16 == 0)
    return w.kind == kInt8 ? TilePanels<kInt8>(from, to, w, x, begin, end, y)
                           : TilePanels<kBfloat16>(from, to, w, x, begin, end, y);
#endif
#ifdef __AVX512VNNI__
  if (w.kind == kInt8 && x.Count() == 1) return DotPanels<kInt8, 1>(from, to, w, x, begin, end, y);
  if (w.kind == kInt8) return DotPanels<kInt8, 2>(from, to, w, x, begin, end, y);
#endif
#ifdef __AVX512BF16__
  return DotPanels<kBfloat16, 2>(from, to, w, x, begin, end, y);
#endif
}

}  // namespace pipejax
