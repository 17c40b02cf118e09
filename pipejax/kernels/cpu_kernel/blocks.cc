// Self-attention of a source in int8, in blocks of keys, for processors with int8 products (VNNI) and without tiles.
//
// The scores of a few queries with a block of keys stay in the first-level cache. The softmax is computed incrementally: for
// each query the maximum of the scores so far, the sum of their powers e^(score - maximum), and the sum of the values weighted
// by these powers are kept (Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).
//
// Each query, each key, and each channel of the values of a block is rounded to int8 with its own scale. A channel that is
// large in keys and small in queries would make the steps of all other channels of the keys coarse. So keys and queries are
// balanced before rounding (see Balance), which does not change their products up to a constant for each query.
//
// The powers of a query in a block are rounded to 16-bit integers, the largest of which is 65,280 = 255 * 256. The upper byte,
// rounded, is the first digit; the remainder, with a sign, is the second digit. The values are multiplied with the first
// digits. The second digits are multiplied only with the mean of the block's values if an upper bound of the error of this
// approximation is at most kCoarse; otherwise they are multiplied with the values as well.
//
// Upper bounds of the error of an output, relative to the largest magnitude A of its channel's values, for each step:
//
//  - Scores: 2 tanh(d / 2), where d is the largest error of a score. With the steps s = (largest magnitude) / 127 of a balanced
//    query q and of a key k, rounding to int8 changes their score by at most sum(|q| s_k + |k| s_q + s_q s_k / 2) / 2. The
//    exponential function adds an error of 1e-4, and rounding to float32 adds a little. A change of scores by up to d changes a
//    softmax by at most tanh(d / 2) in total variation, and two values differ by at most 2 A.
//  - Powers: 1/127. Each power is rounded by at most half a step, so 512 of them by at most 256 steps, while their sum is at
//    least 65,280 steps.
//  - Second digits multiplied with the mean: kCoarse, 1/128. For the values v of a channel with the mean m and second digits r,
//    the error is sum(r (v - m)), which is at most sum|r| max|v - m| and at most sqrt(sum r^2 sum (v - m)^2).
//  - Values: 1/168. Rounding to int8 changes them by at most A / 254, and the first digits sum to at most 1.51 times the
//    powers.
//
// The last three errors together are at most 1/46, 2.2 % of A.
#include "attention.h"

namespace pipejax {
namespace {

#ifdef __AVX512VNNI__

constexpr int64_t kBlock = 512;  // keys of a block
constexpr int kAsking = 24;      // queries that are combined with a block while it is in the cache
constexpr int kTogether = 6;     // queries at a time: with four panels 24 of 32 registers contain sums
constexpr float kCoarse = 1.0f / 130;  // the accepted error of first digits alone: 1 / 128, less 1 / 127 of it (see Raise)
constexpr int32_t kSteps = 256;  // steps of the second digit in one step of the first digit

// Without unrolling GCC keeps the sums in memory between loops, which is slow, as these products have only as many inputs as
// a head has channels.
#define UNROLLED _Pragma("GCC unroll 8")

// Factors for the keys and queries of a head, by which the mean magnitudes of keys and of queries become equal in each
// channel. A single token has little influence on a mean. The mean of the keys is subtracted first; this changes all scores
// of a query by the same amount, so the softmax stays the same.
struct Balance {
  Floats32 mean, of_keys, of_queries;  // [width]

  void Set(const float* queries, const float* keys, int64_t stride, int64_t length, int64_t width) {
    for (auto* x : {&mean, &of_keys, &of_queries}) x->resize(width);
    for (int64_t k = 0; k < width; k += kLanes) {
      const Lanes middle = Average(length, [&](int64_t l) { return Load(keys + l * stride + k); });
      const Lanes key = Average(length, [&](int64_t l) { return Size(Load(keys + l * stride + k) - middle); });
      const Lanes query = Average(length, [&](int64_t l) { return Size(Load(queries + l * stride + k)); });
      const Lanes root = (Lanes)_mm512_sqrt_ps((__m512)key), other = (Lanes)_mm512_sqrt_ps((__m512)query);
      Store(mean.data() + k, middle);
      Store(of_keys.data() + k, key < kLeast ? Lanes{} : other / root);
      Store(of_queries.data() + k, query < kLeast ? Lanes{} : root / other);
    }
  }
};

// Up to kAsking queries in int8, and the state of their incremental softmax.
struct Asking {
  Ints32 numbers;                          // [queries, width] in groups of four
  float scale[kAsking];
  int32_t offset[kAsking];                 // -128 times the sum of a query's numbers, as keys are stored unsigned, plus 128
  float most[kAsking], total[kAsking];     // the highest score so far, and the sum of the powers
  alignas(64) float scores[kTogether * kBlock];
  alignas(64) int32_t digits[kTogether * kBlock / 4];  // first digits of the powers, unsigned bytes
  alignas(64) int32_t finer[kTogether * kBlock / 4];   // second digits, signed bytes in the order of packing (see InOrder)

  void Set(const float* queries, int64_t stride, int64_t count, int64_t width, const Balance& balance) {
    numbers.resize(kAsking * width / 4);
    for (int64_t c = 0; c < count; ++c) {
      auto put = [&](int64_t group, Bytes bytes) { std::memcpy(numbers.data() + c * width / 4 + group, &bytes, sizeof bytes); };
      auto query = [&](int64_t k) { return Load(queries + c * stride + k) * Load(balance.of_queries.data() + k); };
      const auto [own, sum] = Int8::Row(query, width, put);
      scale[c] = own, offset[c] = -128 * sum, most[c] = -INFINITY, total[c] = 0.0f;
    }
  }
};

// How the digits of a query's powers are added to its result: the address of the result, the weight of a digit, and the
// factor of the mean of the values.
struct Share {
  float *found, weight, lost;
};

// A block of keys and values.
class KeyBlock {
 public:
  // Rounds the keys and values [length, width] of the block to int8 and lays them out in panels, followed by zeros up to a
  // multiple of 64 keys.
  void Set(const float* keys, const float* values, int64_t stride, int64_t length, int64_t width, const Balance& balance) {
    length_ = length, whole_ = (length + 63) / 64 * 64, width_ = width;
    keys_.resize(whole_ * width / 4), values_.resize(whole_ * width / 4);
    key_scales_.resize(whole_), value_scales_.resize(width), means_.resize(width), sums_.resize(width);
    auto key = [&](int64_t l, int64_t k) {
      return (Load(keys + l * stride + k) - Load(balance.mean.data() + k)) * Load(balance.of_keys.data() + k);
    };
    PackKeysInInt8(key, length, whole_, width, keys_.data(), key_scales_.data());
    PackValuesInInt8(values, stride, length, whole_, width, values_.data(), value_scales_.data());
    for (int64_t k = 0; k < width; k += kLanes) {
      Lanes sum = {};
      for (int64_t l = 0; l < length; ++l) sum += Load(values + l * stride + k);
      Store(means_.data() + k, sum / static_cast<float>(length));
      const Ints* groups = reinterpret_cast<const Ints*>(values_.data()) + k / kPanel * whole_ / 4;
      Ints numbers = {};
      for (int64_t g = 0; g < whole_ / 4; ++g) numbers = Dot<kInt8>(numbers, Ints{} + 0x01010101, groups[g]);
      *reinterpret_cast<Ints*>(sums_.data() + k) = numbers;
    }
    SetSpread(values, stride);
  }

  // Adds the block to the attention of the C queries from `first` on. `bias` points to the bias of query `first` for the
  // first key of the block.
  template <int C>
  void Attend(Asking& asking, int64_t first, const float* bias, float* found, int64_t found_stride) const {
    Lanes high[C];
    std::fill(high, high + C, Lanes{} - INFINITY);
    for (int64_t key = 0; key < whole_; key += 4 * kPanel) Score<C>(asking, first, bias, key, high);
    Share shares[C], finer[C];
    int count = 0;  // number of queries whose second digits are multiplied with the values
    int of[C];
    for (int c = 0; c < C; ++c) {
      float &most = asking.most[first + c], &total = asking.total[first + c];
      const float highest = Most(high[c]), now = std::max(most, highest), fade = std::exp(most - now);
      const Raised raised = Raise(asking, c, highest);
      const float weight = std::exp(highest - now);
      const bool fine = std::min(raised.sizes * farthest_, std::sqrt(raised.squares) * spread_) > raised.sum * kCoarse;
      shares[c] = {found + c * found_stride, weight, fine ? 0.0f : raised.rest * weight};
      if (fine) finer[count] = {shares[c].found, weight / kSteps, 0.0f}, of[count++] = c;
      most = now, total = total * fade + raised.sum * weight;
      for (float* at = shares[c].found; at < shares[c].found + width_; at += kLanes) Store(at, Load(at) * fade);
    }
    WeighAll<C>(asking, shares, 0);
    if (!count) return;
    for (int i = 0; i < count; ++i) Refine(asking, of[i], i);
    WithConstant<C>(count, [&](auto n) { WeighAll<n()>(asking, finer, 128); });
  }

 private:
  // Computes the scores of the queries with the keys of four panels; -inf for keys after the last one of the block.
  template <int C>
  void Score(Asking& asking, int64_t first, const float* bias, int64_t key, Lanes* high) const {
    constexpr int P = 4;
    const int64_t depth = width_ / 4;
    const Ints* groups = reinterpret_cast<const Ints*>(keys_.data()) + key / kPanel * depth;
    const int32_t* numbers = asking.numbers.data() + first * depth;
    Ints sum[P][C];
    UNROLLED for (int c = 0; c < C; ++c)
      UNROLLED for (int p = 0; p < P; ++p) sum[p][c] = Ints{} + asking.offset[first + c];
    for (int64_t g = 0; g < depth; ++g) {
      Ints keys[P];
      UNROLLED for (int p = 0; p < P; ++p) keys[p] = Unsigned<kInt8>(groups[p * depth + g]);
      UNROLLED for (int c = 0; c < C; ++c) {
        const Ints number = Ints{} + numbers[c * depth + g];
        UNROLLED for (int p = 0; p < P; ++p) sum[p][c] = Dot<kInt8>(sum[p][c], keys[p], number);
      }
    }
    UNROLLED for (int p = 0; p < P; ++p, key += kPanel) {
      const __mmask16 real = (1u << std::clamp<int64_t>(length_ - key, 0, kPanel)) - 1;
      const Lanes scales = Load(key_scales_.data() + key);
      UNROLLED for (int c = 0; c < C; ++c) {
        const Lanes own = (Lanes)_mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), real, bias + key - c);
        const Lanes score = Fma(__builtin_convertvector(sum[p][c], Lanes), scales * asking.scale[first + c], own);
        Store(asking.scores + c * kBlock + key, score);
        high[c] = score > high[c] ? score : high[c];
      }
    }
  }

  // Sets `farthest_` and `spread_`, measures of how much values differ from the mean of their channel.
  void SetSpread(const float* values, int64_t stride) {
    farthest_ = spread_ = 0.0f;
    for (int64_t k = 0; k < width_; k += kLanes) {
      const Lanes mean = Load(means_.data() + k), largest = Load(value_scales_.data() + k) * 127.0f;
      const Lanes by = largest < kLeast ? Lanes{} : 1.0f / largest;
      Lanes farthest = {}, squares = {};
      for (int64_t l = 0; l < length_; ++l) {
        const Lanes apart = Size(Load(values + l * stride + k) - mean) * by;
        farthest = apart > farthest ? apart : farthest, squares = Fma(apart, apart, squares);
      }
      for (int lane = 0; lane < kLanes; ++lane) {  // std::max ignores NaN
        farthest_ = std::max(farthest_, farthest[lane]), spread_ = std::max(spread_, std::sqrt(squares[lane]));
      }
    }
  }

  // The sum of a query's powers, and of their second digits the sum, the sum of magnitudes and the sum of squares. The unit
  // is a step of the first digit.
  struct Raised {
    float sum, rest, sizes, squares;
  };

  // Computes the powers 255 e^(score - highest) of a query in two digits, with a relative error of 1e-4. In the sums of
  // magnitudes and of squares, the digit -128 counts as 127.
  Raised Raise(Asking& asking, int c, float highest) const {
    constexpr float kLog2E = 1.44269504f, kLog2OfMost = 15.99435344f;  // log2(e), log2(255 * kSteps)
    const Lanes offset = Lanes{} + kLog2OfMost;
    const Ints ones = Ints{} + 0x01010101;
    Ints units = {}, rest = {}, sizes = {}, squares = {}, bad = {};
    for (int64_t key = 0; key < whole_; key += 4 * kPanel) {
      Ints powers[4];
      UNROLLED for (int p = 0; p < 4; ++p) {
        const Lanes exponent = Fma(Load(asking.scores + c * kBlock + key + p * kPanel) - highest, kLog2E, offset);
        const Lanes part = (Lanes)_mm512_reduce_ps((__m512)exponent, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        Lanes root = Lanes{} + 7.8024521e-2f;
        for (float factor : {2.2606716e-1f, 6.9583356e-1f, 9.9992522e-1f}) root = Fma(root, part, Lanes{} + factor);
        powers[p] = (Ints)_mm512_cvtps_epi32(_mm512_scalef_ps((__m512)root, (__m512)exponent));
        bad |= powers[p];  // the conversion of NaN gives the smallest integer, whose sign bit is set
      }
      const __m512i low = _mm512_packus_epi32((__m512i)powers[0], (__m512i)powers[1]);
      const __m512i high = _mm512_packus_epi32((__m512i)powers[2], (__m512i)powers[3]);
      const __m512i half = _mm512_set1_epi16(kSteps / 2), byte = _mm512_set1_epi16(kSteps - 1);
      auto first = [&](__m512i words) { return _mm512_srli_epi16(_mm512_add_epi16(words, half), 8); };
      auto second = [&](__m512i words) { return _mm512_and_si512(words, byte); };
      const Ints digits = InOrder(_mm512_packus_epi16(first(low), first(high)));
      const Ints finer = (Ints)_mm512_packus_epi16(second(low), second(high));
      *reinterpret_cast<Ints*>(asking.digits + (c * kBlock + key) / 4) = digits;
      *reinterpret_cast<Ints*>(asking.finer + (c * kBlock + key) / 4) = finer;
      units = Dot<kInt8>(units, digits, ones);
      rest = Dot<kInt8>(rest, ones, finer);
      const Ints size = (Ints)_mm512_min_epu8(_mm512_abs_epi8((__m512i)finer), _mm512_set1_epi8(127));
      sizes = Dot<kInt8>(sizes, size, ones), squares = Dot<kInt8>(squares, size, size);
    }
    constexpr float kStep = 1.0f / kSteps;
    const float all = Sum(rest) * kStep;
    const bool broken = _mm512_movepi32_mask((__m512i)bad);
    return {broken ? NAN : Sum(units) + all, all, Sum(sizes) * kStep, Sum(squares) * kStep * kStep};
  }

  // Reorders the bytes of four packed vectors. Packing interleaves groups of four bytes of the vectors; the result contains
  // one vector after the other.
  static Ints InOrder(__m512i bytes) {
    const Ints order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return (Ints)_mm512_permutexvar_epi32((__m512i)order, bytes);
  }

  // Copies the second digits of query c, plus 128, to the place of the first digits of query `to`, which are no longer
  // needed.
  void Refine(Asking& asking, int c, int to) const {
    for (int64_t group = 0; group < whole_ / 4; group += kLanes) {
      const Ints finer = *reinterpret_cast<const Ints*>(asking.finer + c * kBlock / 4 + group);
      const Ints whole = finer ^ static_cast<int32_t>(0x80808080);
      *reinterpret_cast<Ints*>(asking.digits + to * kBlock / 4 + group) = InOrder((__m512i)whole);
    }
  }

  template <int C>
  void WeighAll(const Asking& asking, const Share* shares, int32_t zero) const {
    for (int64_t panel = 0; panel < width_ / kPanel; panel += 4)
      WithConstant<4>(std::min<int64_t>(4, width_ / kPanel - panel),
                      [&](auto p) { Weigh<p(), C>(asking, panel, shares, zero); });
  }

  // Adds the values of P panels to the results of C queries, weighted by the digits of their powers minus `zero`.
  template <int P, int C>
  void Weigh(const Asking& asking, int64_t panel, const Share* shares, int32_t zero) const {
    const int64_t depth = whole_ / 4;
    const Ints* groups = reinterpret_cast<const Ints*>(values_.data()) + panel * depth;
    Ints sum[P][C];
    UNROLLED for (int p = 0; p < P; ++p) {
      const Ints nothing = *reinterpret_cast<const Ints*>(sums_.data() + (panel + p) * kPanel) * -zero;
      UNROLLED for (int c = 0; c < C; ++c) sum[p][c] = nothing;
    }
    for (int64_t g = 0; g < depth; ++g) {
      Ints values[P];
      UNROLLED for (int p = 0; p < P; ++p) values[p] = groups[p * depth + g];
      UNROLLED for (int c = 0; c < C; ++c) {
        const Ints digits = Ints{} + asking.digits[c * kBlock / 4 + g];
        UNROLLED for (int p = 0; p < P; ++p) sum[p][c] = Dot<kInt8>(sum[p][c], digits, values[p]);
      }
    }
    UNROLLED for (int p = 0; p < P; ++p) {
      const int64_t k = (panel + p) * kPanel;
      const Lanes scales = Load(value_scales_.data() + k), means = Load(means_.data() + k);
      UNROLLED for (int c = 0; c < C; ++c) {
        float* at = shares[c].found + k;
        Store(at, Load(at) + (__builtin_convertvector(sum[p][c], Lanes) * (scales * shares[c].weight) + means * shares[c].lost));
      }
    }
  }

  int64_t length_, whole_, width_;
  Ints32 keys_, values_, sums_;  // sums_: for each channel, the sum of its int8 values
  Floats32 key_scales_, value_scales_, means_;
  // The largest difference of a value from the mean of its channel, and the root of the sum of the squares of these
  // differences, both relative to the channel's largest magnitude; the maximum over all channels.
  float farthest_, spread_;
};

#endif

}  // namespace

void AttendBlocks(const float* queries, const float* keys, const float* values, int64_t stride, int64_t length, int64_t width,
                  const float* bias, float* found, int64_t found_stride) {
#ifdef __AVX512VNNI__
  thread_local std::vector<KeyBlock> blocks;
  thread_local Asking asking;
  thread_local Balance balance;
  if (length) balance.Set(queries, keys, stride, length, width);
  blocks.resize(std::max<size_t>(blocks.size(), (length + kBlock - 1) / kBlock));
  for (int64_t from = 0; from < length; from += kBlock)
    blocks[from / kBlock].Set(keys + from * stride, values + from * stride, stride, std::min(kBlock, length - from), width, balance);
  for (int64_t q = 0; q < length; q += kAsking) {
    const int64_t count = std::min<int64_t>(kAsking, length - q);
    float* at = found + q * found_stride;
    asking.Set(queries + q * stride, stride, count, width, balance);
    for (int64_t c = 0; c < count; ++c) std::fill_n(at + c * found_stride, width, 0.0f);
    for (int64_t from = 0; from < length; from += kBlock)
      for (int64_t first = 0; first < count; first += kTogether)
        WithConstant<kTogether>(std::min<int64_t>(kTogether, count - first), [&](auto c) {
          blocks[from / kBlock].Attend<c()>(asking, first, bias + from - q - first, at + first * found_stride, found_stride);
        });
    for (int64_t c = 0; c < count; ++c, at += found_stride)
      for (int64_t k = 0; k < width; k += kLanes) Store(at + k, Load(at + k) / asking.total[c]);
  }
#endif
}

}  // namespace pipejax
