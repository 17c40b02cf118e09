// Products of a weight matrix with columns: the definitions of ByWidening (products.h) and ByDigits (narrow.h). They are half
// of the kernel's machine code, because each number of panels and columns that fits into the registers has a function.
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "narrow.h"

namespace pipejax {
namespace {

// The weights of a register of outputs for input j of a group, as float32.
template <Kind K>
inline Lanes Widened(Ints group, int j) {
  if constexpr (K == kInt8) return __builtin_convertvector(group << (24 - 8 * j) >> 24, Lanes);
  if constexpr (K == kBfloat16) return Floats(j ? group & static_cast<int32_t>(0xffff0000u) : group << 16);
  return Floats(group);
}

// Multiplies P panels with C columns, with weights converted to float32.
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
      for (int c = 0; c < C; ++c)  // the outer loop, so that not all columns need registers at the same time
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

#if defined(__AVX512VNNI__) || defined(__AVX512BF16__)

constexpr int kDotSums = 24;  // of the 32 registers, the number that contains sums
template <int D>
constexpr int kDotPanels = D == 1 ? 4 : 2;

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

}  // namespace

void ByWidening(int64_t from, int64_t to, const Matrix& w, const float* x, int64_t stride, int64_t columns,
                       const Results& y) {
  if (w.kind == kFloat32) WidenedPanels<kFloat32>(from, to, w, x, stride, columns, y);
  if (w.kind == kBfloat16) WidenedPanels<kBfloat16>(from, to, w, x, stride, columns, y);
  if (w.kind == kInt8) WidenedPanels<kInt8>(from, to, w, x, stride, columns, y);
}

void ByDigits(int64_t from, int64_t to, const Matrix& w, const Digits& x, int64_t begin, int64_t end,
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
