// Vector registers, the types of weights, and columns split into digits of int8 or bfloat16.
//
// Processors with instructions for narrow products multiply int8 weights with int8 columns, and bfloat16 weights with bfloat16
// columns. A float32 number x of a column is split into one or two digits of this type. The sum of two digits is x to about 16
// bits, but needs twice the arithmetic. With VNNI, products of int8 are limited by arithmetic, so a column has one int8 digit.
// Its few largest numbers, which would make the steps of the digit coarse, have a second digit, so that networks with outliers
// lose no more accuracy than others. In products with the head, and in attention to a source, every number has two digits.
// Tiles (AMX) are fast enough for two digits in all products with weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace pipejax {

constexpr int kPanel = 16;  // outputs of a panel
// kLanes: float32 numbers of a register (GCC keeps longer vectors in memory). kPanels, kColumns: panels and columns that are
// multiplied at a time, limited by the number of registers for sums.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kPanels = 2, kColumns = 8;  // 16 of 32 registers contain sums
#elif defined(__AVX__)
constexpr int kLanes = 8, kPanels = 1, kColumns = 6;  // 12 of 16 registers contain sums
#else
constexpr int kLanes = 4, kPanels = 1, kColumns = 6;  // 24 of 32 registers on Arm; an x86 without AVX has 16 and is slower
#endif
constexpr int kParts = kPanel / kLanes;  // number of registers for the outputs of a panel

typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4)));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * sizeof(uint16_t)), aligned(2)));
typedef int8_t Bytes __attribute__((vector_size(kLanes), aligned(1)));

inline Lanes Load(const float* x) { return *reinterpret_cast<const Lanes*>(x); }
inline void Store(float* y, const Lanes& value) { *reinterpret_cast<Lanes*>(y) = value; }
inline Ints Bits(Lanes x) { Ints bits; std::memcpy(&bits, &x, sizeof x); return bits; }
inline Lanes Floats(Ints x) { Lanes floats; std::memcpy(&floats, &x, sizeof x); return floats; }

// x y + z, rounded once if the processor has such an instruction. The compiler must not fuse other operations
// (-ffp-contract=off): it would do so in some instances of a template only, and the results for a column would then depend on
// the number of columns.
inline Lanes Fma(Lanes x, Lanes y, Lanes z) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__) && defined(__AVX__)
  return (Lanes)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (Lanes)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
  return x * y + z;
#endif
}
inline Lanes Fma(Lanes x, float y, Lanes z) { return Fma(x, Lanes{} + y, z); }

inline float Most(const Lanes& x) {
#ifdef __AVX512F__
  return _mm512_reduce_max_ps((__m512)x);
#else
  float most = x[0];
  for (int i = 1; i < kLanes; ++i) most = std::max(most, x[i]);
  return most;
#endif
}
inline int32_t Sum(const Ints& x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_epi32((__m512i)x);
#else
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += x[i];
  return sum;
#endif
}
inline float Sum(const Lanes& x) { float sum = 0.0f; for (int i = 0; i < kLanes; ++i) sum += x[i]; return sum; }

constexpr float kLeast = 1e-30f;  // if the largest number is smaller, int8 numbers are 0, as 1 / scale might be infinite

// Updates `most`, the largest magnitude of each lane, and `bad`, which becomes NaN if a number is NaN or infinite.
inline void Measure(Lanes value, Lanes& most, Lanes& bad) {
  const Lanes size = value < 0.0f ? -value : value;
  most = size > most ? size : most;
  bad += value * 0.0f;
}

// The nearest integers; |x| must be below 2^22.
inline Ints Whole(Lanes x) {
  const Lanes magic = Lanes{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to integers
  return Bits(x + magic) - Bits(magic);
}

// The nearest bfloat16 in the upper half of each lane; ties round to even.
inline Ints Rounded(Lanes x) {
  const Ints bits = Bits(x);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

// An allocator whose memory begins at a cache line; otherwise each load of a register would access two lines. Elements that
// `resize` adds are not initialised.
template <typename T>
struct Lines {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};
  Lines() = default;
  template <typename U>
  Lines(const Lines<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* at, size_t) { ::operator delete(at, kLine); }
  template <typename U>
  void construct(U*) {}
  template <typename U, typename... Given>
  void construct(U* at, Given&&... given) { ::new (at) U(std::forward<Given>(given)...); }
  bool operator==(const Lines&) const { return true; }
  bool operator!=(const Lines&) const { return false; }
};
using Floats32 = std::vector<float, Lines<float>>;
using Ints32 = std::vector<int32_t, Lines<int32_t>>;

enum Kind { kFloat32, kBfloat16, kInt8 };
template <Kind K>
constexpr int kDepth = K == kFloat32 ? 1 : K == kBfloat16 ? 2 : 4;  // inputs of a group, which has 32 bits for each output

#ifdef __AMX_TILE__
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif
// The number of digits of columns in products with weights of each Kind, with the instruction set that is compiled for; 0:
// there are no narrow products, and columns are float32.
constexpr int kDigits[] = {
    0,
#ifdef __AVX512BF16__
    2,
#else
    0,
#endif
#ifdef __AVX512VNNI__
    kTiles ? 2 : 1,
#else
    0,
#endif
};

// Columns split into digits. With two digits hi and lo: x = scale (256 hi + lo) for int8, x = hi + lo for bfloat16. With one
// digit of int8: x = scale lo, except for a few outliers x = scale (256 hi + lo), whose hi is stored separately.
class Digits {
 public:
  struct Outlier {
    int32_t group, hi;  // the group of four inputs; hi in the byte of the input, with zeros in the other bytes
  };

  // Allocates room for `columns` columns of `inputs` numbers, in `digits` digits.
  void Reserve(Kind kind, int digits, int64_t columns, int64_t inputs) {
    kind_ = kind, digits_ = digits, inputs_ = inputs;
    const int depth = kind == kInt8 ? kDepth<kInt8> : kDepth<kBfloat16>;
    length_ = (inputs + 16 * depth - 1) / (16 * depth) * 16;
    const int64_t whole = columns <= 8 ? columns : (columns + 7) / 8 * 8;  // whole tiles
    rows_.resize(digits * whole * length_);
    std::fill(rows_.begin() + digits * columns * length_, rows_.end(), 0);
    scale_.resize(whole), sums_.resize(digits * whole);
    if (digits == 2) return;  // there are no outliers
    most_ = std::max<int64_t>(4, inputs / 128), outliers_.resize(whole * most_), count_.resize(whole);
  }

  void Fill(int64_t column, const float* x) {
    int32_t* row = rows_.data() + digits_ * column * length_;
    const int64_t whole = inputs_ / kLanes * kLanes;
    alignas(64) float rest[kLanes] = {};
    if (whole < inputs_) {
      std::fill(row, row + digits_ * length_, 0);
      std::copy(x + whole, x + inputs_, rest);
    }
    if (kind_ == kBfloat16) FillBfloat16(x, rest, whole, reinterpret_cast<uint16_t*>(row));
    else if (digits_ == 2) FillInt8(column, x, rest, whole, reinterpret_cast<int8_t*>(row));
#ifdef __AVX512VNNI__
    else FillOne(column, x, rest, whole, reinterpret_cast<int8_t*>(row));
#endif
  }

  int Count() const { return digits_; }
  const int32_t* Row(int64_t column, int digit) const { return rows_.data() + (digits_ * column + digit) * length_; }
  int64_t RowBytes() const { return length_ * sizeof(int32_t); }
  const float* Scales(int64_t column) const { return scale_.data() + column; }
  int32_t SumOf(int64_t column, int digit) const { return sums_[digits_ * column + digit]; }
  const Outlier* Outliers(int64_t column) const { return outliers_.data() + column * most_; }
  int64_t OutlierCount(int64_t column) const { return count_[column]; }

 private:
  // The digits of a number 256 High + Low, both signed and of 8 bits.
  static Ints Low(Ints number) { return number << 24 >> 24; }
  static Ints High(Ints number) { return (number - Low(number)) >> 8; }

  void FillInt8(int64_t column, const float* x, const float* rest, int64_t whole, int8_t* row) {
    constexpr float kMost = 32639.0f;  // 127 * 256 + 127
    Lanes most = {}, bad = {};
    for (int64_t i = 0; i < whole; i += kLanes) Measure(Load(x + i), most, bad);
    Measure(Load(rest), most, bad);
    const float largest = Most(most);
    scale_[column] = largest / kMost + Sum(bad);
    const float by = largest < kLeast ? 0.0f : kMost / largest;
    Ints sum_hi = {}, sum_lo = {};
    auto put = [&](int64_t i, Lanes value) {
      const Ints number = Whole(value * by), lo = Low(number), hi = High(number);
      *reinterpret_cast<Bytes*>(row + i) = __builtin_convertvector(hi, Bytes);
      *reinterpret_cast<Bytes*>(row + 4 * length_ + i) = __builtin_convertvector(lo, Bytes);
      sum_hi += hi, sum_lo += lo;
    };
    for (int64_t i = 0; i < whole; i += kLanes) put(i, Load(x + i));
    if (whole < inputs_) put(whole, Load(rest));
    sums_[2 * column] = Sum(sum_hi), sums_[2 * column + 1] = Sum(sum_lo);
  }

#ifdef __AVX512VNNI__
  // Splits a column into one digit and outliers. The range of the digit is the largest magnitude divided by 2^(j/4), for the
  // greatest j <= 15 with at most `most_` outliers. The search for j first uses the maxima of 64 lanes, which are fast to
  // count: at most most_ / 2 of them may be out of range.
  void FillOne(int64_t column, const float* x, const float* rest, int64_t whole, int8_t* row) {
    constexpr int kSteps = 16;
    static const float* const kPowers = [] {
      static float powers[kSteps];
      for (int j = 0; j < kSteps; ++j) powers[j] = std::exp2(-0.25f * j);
      return powers;
    }();
    Lanes most[4] = {}, bad = {};
    for (int64_t i = 0; i < whole; i += kLanes) Measure(Load(x + i), most[i / kLanes % 4], bad);
    Measure(Load(rest), most[whole / kLanes % 4], bad);
    const Lanes both = most[0] > most[1] ? most[0] : most[1], others = most[2] > most[3] ? most[2] : most[3];
    const float largest = Most(both > others ? both : others);
    const float trouble = Sum(bad);
    if (trouble != 0.0f || largest < kLeast) {
      std::fill(row, row + 4 * length_, 0);
      scale_[column] = trouble, count_[column] = 0, sums_[column] = 0;
      return;
    }
    auto outside = [&](int j) {
      const __m512 range = _mm512_set1_ps(largest * kPowers[j]);
      int count = 0;
      for (const Lanes& lane : most) count += __builtin_popcount(_mm512_cmp_ps_mask((__m512)lane, range, _CMP_GT_OQ));
      return count;
    };
    int steps = 0;
    for (int half = kSteps / 2; half; half /= 2)
      if (outside(steps + half) <= most_ / 2) steps += half;
    while (!PutOne(column, x, rest, whole, row, largest * kPowers[steps])) --steps;
  }

  // Writes a column whose digit has the given range. Returns false if there are more than `most_` outliers.
  bool PutOne(int64_t column, const float* x, const float* rest, int64_t whole, int8_t* row, float range) {
    const float by = 127.0f / range;
    Outlier* outliers = outliers_.data() + column * most_;
    int64_t count = 0;
    Ints sum = {};
    auto put = [&](int64_t i, Lanes value) {
      const Ints number = Whole(value * by), hi = High(number);
      *reinterpret_cast<Bytes*>(row + i) = __builtin_convertvector(Low(number), Bytes);
      sum += number;
      for (uint32_t out = _mm512_test_epi32_mask((__m512i)hi, (__m512i)hi); out; out &= out - 1, ++count) {
        if (count == most_) return false;
        const int lane = __builtin_ctz(out);
        outliers[count] = {static_cast<int32_t>(i + lane) / 4, (hi[lane] & 0xff) << (8 * (lane % 4))};
      }
      return true;
    };
    for (int64_t i = 0; i < whole; i += kLanes)
      if (!put(i, Load(x + i))) return false;
    if (whole < inputs_ && !put(whole, Load(rest))) return false;
    scale_[column] = range / 127.0f, count_[column] = count;
    sums_[column] = Sum(sum);
    return true;
  }
#endif

  void FillBfloat16(const float* x, const float* rest, int64_t whole, uint16_t* row) {
    auto put = [&](int64_t i, Lanes value) {
      const Ints hi = Rounded(value);
      *reinterpret_cast<Shorts*>(row + i) = __builtin_convertvector(hi >> 16, Shorts);
      const Ints lo = Rounded(value - Floats(hi & static_cast<int32_t>(0xffff0000u)));
      *reinterpret_cast<Shorts*>(row + 2 * length_ + i) = __builtin_convertvector(lo >> 16, Shorts);
    };
    for (int64_t i = 0; i < whole; i += kLanes) put(i, Load(x + i));
    if (whole < inputs_) put(whole, Load(rest));
  }

  Kind kind_ = kInt8;
  int digits_ = 2;
  int64_t inputs_ = 0, length_ = 0;  // numbers of a column; 32-bit groups of a row, a multiple of 16
  int64_t most_ = 0;                 // the largest number of outliers of a column
  Ints32 rows_;                      // [columns, digits, length], padded with zeros
  std::vector<float> scale_;         // [columns], for int8
  std::vector<int32_t> sums_;        // [columns, digits], for int8: sums of digits; with one digit, of 256 hi + lo
  std::vector<Outlier> outliers_;    // [columns, most], for one digit of int8
  std::vector<int32_t> count_;       // [columns], the number of outliers
};

}  // namespace pipejax
