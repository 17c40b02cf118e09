// Attention of one head, and the element-wise functions between two matrix products: norm, softmax and activations.
#pragma once

#include "narrow.h"

namespace pipejax {

// e^x for x <= 0, with an error of about two units in the last place; values below -87 are replaced by -87.
inline Lanes Exp(Lanes x) {
  x = x < -87.0f ? Lanes{} - 87.0f : x;
  const Lanes magic = Lanes{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
  const Lanes n = Fma(x, 1.44269504f, magic) - magic;
  const Lanes r = Fma(n, 2.12194440e-4f, Fma(n, -0.693359375f, x));
  Lanes sum = Lanes{} + 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    sum = Fma(sum, r, Lanes{} + c);
  sum = Fma(sum * r, r, r) + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return sum * Floats(power);
}

// Replaces `count` scores by e^(score - maximum), and returns the inverse of their sum. The array has room for whole
// registers; the remaining entries become zeros. The sum is float64, so that its float32 value does not depend on the lanes
// in which the scores are.
inline float Softmax(float* scores, int64_t count) {
  const int64_t whole = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(scores + count, scores + whole, -INFINITY);
  Lanes most = Lanes{} - INFINITY;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Lanes value = Load(scores + i);
    most = value > most ? value : most;
  }
  float largest = -INFINITY;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, most[lane]);
  constexpr int kHalf = kLanes / 2;
  typedef float Half __attribute__((vector_size(kHalf * sizeof(float)), aligned(4)));
  typedef double Wide __attribute__((vector_size(kHalf * sizeof(double))));
  auto half = [&](int64_t i) { return __builtin_convertvector(*reinterpret_cast<const Half*>(scores + i), Wide); };
  Wide low = {}, high = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    Store(scores + i, Exp(Load(scores + i) - largest));
    low += half(i), high += half(i + kHalf);
  }
  low += high;
  double total = 0.0;
  for (int lane = 0; lane < kHalf; ++lane) total += low[lane];
  for (int64_t i = count; i < whole; ++i) total -= scores[i], scores[i] = 0.0f;
  return static_cast<float>(1.0 / total);
}

// normed = x / rms(x) * scale, where rms is the root of the mean square plus epsilon.
inline void Norm(const float* x, const float* scale, float epsilon, int64_t size, float* normed) {
  Lanes squares = {};
  for (int64_t i = 0; i < size; i += kLanes) squares = Fma(Load(x + i), Load(x + i), squares);
  const float inverse = 1.0f / std::sqrt(Sum(squares) / size + epsilon);
  for (int64_t i = 0; i < size; i += kLanes) Store(normed + i, Load(x + i) * inverse * Load(scale + i));
}

// The SiLU activation, x / (1 + e^-x).
inline Lanes Silu(Lanes x) {
  const Lanes power = Exp(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? power : Lanes{} + 1.0f) / (1.0f + power);
}

// The tanh approximation of the GELU activation: x times the logistic function of 2 sqrt(2 / pi) (x + 0.044715 x^3).
inline Lanes Gelu(Lanes x) {
  const Lanes inner = 1.5957691216f * Fma(0.044715f * x * x, x, x);
  const Lanes power = Exp(inner < 0.0f ? inner : -inner);
  return x * (inner < 0.0f ? power : Lanes{} + 1.0f) / (1.0f + power);
}

// The cache of a head: keys [width, slots] and values [slots, width], where `slots` fills whole registers.
struct Cache {
  float *keys, *values;
  int64_t slots, width;

  void Put(int64_t slot, const float* key, const float* value) const {
    for (int64_t k = 0; k < width; ++k) keys[k * slots + slot] = key[k];
    std::copy(value, value + width, values + slot * width);
  }

  // Computes attention of one or two queries over the slots slot(0) ... slot(count - 1), all of them below `used`. Values
  // are summed in this order. `bias` contains one number for each of these slots. Consecutive queries are `apart` numbers
  // apart, their biases `bias_apart` and their results `found_apart`.
  template <int Queries, typename Slot>
  void Attend(const float* query, int64_t apart, Slot slot, int64_t count, int64_t used, const float* bias,
              int64_t bias_apart, float* found, int64_t found_apart) const {
    thread_local Floats32 kept;
    const int64_t vectors = (used + kLanes - 1) / kLanes, room = vectors * kLanes;
    kept.resize(2 * Queries * room);
    float *all = kept.data(), *scores = all + Queries * room;
    std::fill(all, scores, 0.0f);
    Add<Queries>(width, query, apart, vectors, all, room, [&](int64_t k) { return keys + k * slots; });
    float share[Queries];
    for (int q = 0; q < Queries; ++q) {
      for (int64_t i = 0; i < count; ++i) scores[q * room + i] = all[q * room + slot(i)] + bias[q * bias_apart + i];
      share[q] = Softmax(scores + q * room, count);
      std::fill(found + q * found_apart, found + q * found_apart + width, 0.0f);
    }
    Add<Queries>(count, scores, room, width / kLanes, found, found_apart, [&](int64_t i) { return values + slot(i) * width; });
    for (int q = 0; q < Queries; ++q)
      for (float* at = found + q * found_apart; at < found + q * found_apart + width; at += kLanes) Store(at, Load(at) * share[q]);
  }

 private:
  static constexpr int kTogether = kLanes == 16 ? 8 : 4;  // independent sums; a single sum would wait for each addition

  // For each query, adds the sum of x[i] * row(i) over `count` rows to `sums`; a row fills `vectors` registers.
  template <int Queries, typename Row>
  static void Add(int64_t count, const float* x, int64_t apart, int64_t vectors, float* sums, int64_t sums_apart, Row row) {
    constexpr int kMost = kTogether / Queries;
    for (int64_t v = 0; v < vectors; v += kMost)
      WithConstant<kMost>(std::min<int64_t>(kMost, vectors - v), [&](auto n) {
        constexpr int kRegisters = decltype(n)::value;
        Lanes sum[Queries][kRegisters];
        for (int q = 0; q < Queries; ++q)
          for (int r = 0; r < kRegisters; ++r) sum[q][r] = Load(sums + q * sums_apart + (v + r) * kLanes);
        for (int64_t i = 0; i < count; ++i) {
          const float* at = row(i) + v * kLanes;
          for (int r = 0; r < kRegisters; ++r) {
            const Lanes value = Load(at + r * kLanes);
            for (int q = 0; q < Queries; ++q) sum[q][r] = Fma(value, x[q * apart + i], sum[q][r]);
          }
        }
        for (int q = 0; q < Queries; ++q)
          for (int r = 0; r < kRegisters; ++r) Store(sums + q * sums_apart + (v + r) * kLanes, sum[q][r]);
      });
  }
};

// The number of keys whose attention weights share a scale when they are rounded to digits of int8. The largest of these
// weights is 32,639 steps of two digits. Each weight is rounded by at most half a step, so 512 of them by at most 256 steps,
// which is at most 1/127 of their sum for any source length.
constexpr int64_t kWeighed = 512;

// Computes attention of queries [count, width] over keys [length, width] and values [width, length] in panels. The first
// `seen` keys and values are real. bias(c, scores) adds the bias of query c to its scores. Consecutive queries are `stride`
// numbers apart, and their results `found_stride`.
template <typename Bias>
void AttendPanels(const Matrix& keys, const Matrix& values, const float* queries, int64_t stride, int64_t count,
                  int64_t seen, Bias bias, float* found, int64_t found_stride) {
  thread_local Floats32 kept;
  thread_local Digits split;
  const int64_t length = keys.Outputs(), width = values.Outputs();
  kept.resize(count * (length + 1));
  float *scores = kept.data(), *shares = scores + count * length;
  auto times = [&](const Matrix& w, const float* x, int64_t apart, const Results& y) {
    if (!w.digits) return ByWidening(0, w.panels, w, x, apart, count, y);
    split.Reserve(w.kind, w.digits, count, w.Inputs());
    for (int64_t c = 0; c < count; ++c) split.Fill(c, x + c * apart);
    ByDigits(0, w.panels, w, split, 0, count, y);
  };
  times(keys, queries, stride, {scores, length});
  for (int64_t c = 0; c < count; ++c) {
    bias(c, scores + c * length);
    shares[c] = Softmax(scores + c * length, seen);
    std::fill(scores + c * length + (seen + kLanes - 1) / kLanes * kLanes, scores + (c + 1) * length, 0.0f);
  }
  const int64_t together = values.kind == kInt8 && values.digits ? kWeighed : length, each = length / values.depth;
  for (int64_t from = 0; from < length; from += together) {
    Matrix part = values;
    part.groups += from / each * kParts, part.depth = std::min(together, length - from) / each;
    times(part, scores + from, length, {found, found_stride, from ? kAdd : kPut});
  }
  for (int64_t c = 0; c < count; ++c)
    for (int64_t k = 0; k < width; k += kLanes) {
      float* at = found + c * found_stride + k;
      Store(at, Load(at) * shares[c]);
    }
}

// The rounding of numbers to int8, with the largest magnitude mapped to 127. The scale is NaN if a number is not finite.
struct Int8 {
  Lanes scale, by;

  Int8(Lanes largest, Lanes bad) : scale(largest / 127.0f + bad), by(largest < kLeast ? Lanes{} : 127.0f / largest) {}

  // Rounds a row of `width` numbers to int8 and returns its scale and the sum of its int8 numbers. x(k) is the register of
  // the numbers from k on; put(group, bytes) stores a register of int8 numbers, from the group of four numbers `group` on.
  template <typename Numbers, typename Put>
  static std::pair<float, int32_t> Row(Numbers x, int64_t width, Put put) {
    Lanes most = {}, bad = {};
    for (int64_t k = 0; k < width; k += kLanes) Measure(x(k), most, bad);
    const Int8 number(Lanes{} + Most(most), Lanes{} + Sum(bad));
    Ints sum = {};
    for (int64_t k = 0; k < width; k += kLanes) {
      const Ints whole = Whole(x(k) * number.by);
      put(k / 4, __builtin_convertvector(whole, Bytes));
      sum += whole;
    }
    return {number.scale[0], Sum(sum)};
  }
};

inline Lanes Size(Lanes x) { return x < 0.0f ? -x : x; }

// The mean over `length` positions of each channel of number(l).
template <typename Number>
Lanes Average(int64_t length, Number number) {
  Lanes sum = {};
  for (int64_t l = 0; l < length; ++l) sum += number(l);
  return sum / static_cast<float>(std::max<int64_t>(length, 1));
}

// Rounds the keys [length, width] of a head to int8 and lays them out in panels [whole, width]. Each key has its own scale;
// the keys from `length` on are zeros. key(l, k) is the register of the channels from k on of key l.
template <typename Key>
void PackKeysInInt8(Key key, int64_t length, int64_t whole, int64_t width, int32_t* panels, float* scales) {
  for (int64_t l = 0; l < whole; ++l) {
    int32_t* at = panels + l / kPanel * width / 4 * kPanel + l % kPanel;
    auto put = [&](int64_t group, Bytes bytes) {
      for (int j = 0; j < kLanes / 4; ++j) std::memcpy(at + (group + j) * kPanel, reinterpret_cast<const int8_t*>(&bytes) + 4 * j, 4);
    };
    if (l < length) {
      scales[l] = Int8::Row([&](int64_t k) { return key(l, k); }, width, put).first;
      continue;
    }
    scales[l] = 0.0f;
    for (int64_t group = 0; group < width / 4; group += kLanes / 4) put(group, Bytes{});
  }
}

// Like PackKeysInInt8, for keys that are balanced first, since a channel with large numbers would make the steps of all
// other channels coarse. The mean of each channel is subtracted, which changes all scores of a query by the same amount, so
// the softmax stays the same. Then each channel is divided by a power of two near its mean magnitude, on which a single token
// has little influence. `of_queries` [width] receives these powers, by which queries must be multiplied.
inline void PackBalancedKeys(const float* keys, int64_t stride, int64_t length, int64_t whole, int64_t width, int32_t* panels,
                             float* scales, float* of_queries) {
  thread_local Floats32 kept;
  kept.resize(2 * width);
  float *mean = kept.data(), *by = mean + width;
  for (int64_t k = 0; k < width; k += kLanes) {
    const Lanes middle = Average(length, [&](int64_t l) { return Load(keys + l * stride + k); });
    const Lanes size = Average(length, [&](int64_t l) { return Size(Load(keys + l * stride + k) - middle); });
    const Lanes power = Floats(Bits(size) & 0x7f800000);
    Store(mean + k, middle);
    Store(of_queries + k, size < kLeast ? Lanes{} : power);
    Store(by + k, size < kLeast ? Lanes{} : 1.0f / power);
  }
  auto key = [&](int64_t l, int64_t k) { return (Load(keys + l * stride + k) - Load(mean + k)) * Load(by + k); };
  PackKeysInInt8(key, length, whole, width, panels, scales);
}

// Rounds the values [length, width] of a head to int8 and lays them out in panels [width, whole]. Each output (channel) has
// its own scale; the values from `length` on are zeros.
inline void PackValuesInInt8(const float* values, int64_t stride, int64_t length, int64_t whole, int64_t width,
                             int32_t* panels, float* scales) {
  for (int64_t k = 0; k < width; k += kLanes) {
    Lanes most = {}, bad = {};
    for (int64_t l = 0; l < length; ++l) Measure(Load(values + l * stride + k), most, bad);
    const Int8 number(most, bad);
    Store(scales + k, number.scale);
    int32_t* at = panels + k / kPanel * whole / 4 * kPanel + k % kPanel;
    for (int64_t l = 0; l < whole; l += 4, at += kPanel) {
      Ints group = {};
      for (int64_t j = 0; j < 4 && l + j < length; ++j)
        group |= (Whole(Load(values + (l + j) * stride + k) * number.by) & 0xff) << 8 * j;
      std::memcpy(at, &group, sizeof group);
    }
  }
}

// Lays the keys [length, width] of a head out in panels [whole, width] of float32 or bfloat16. The keys from `length` on are
// zeros.
inline void PackKeys(Kind kind, const float* keys, int64_t stride, int64_t length, int64_t whole, int64_t width,
                     int32_t* panels) {
  if (kind == kFloat32) {
    for (int64_t l = 0; l < whole; ++l) {
      int32_t* at = panels + l / kPanel * width * kPanel + l % kPanel;
      for (int64_t k = 0; k < width; ++k) at[k * kPanel] = 0;
      if (l < length)
        for (int64_t k = 0; k < width; ++k) std::memcpy(at + k * kPanel, keys + l * stride + k, sizeof(float));
    }
    return;
  }
  const int64_t depth = width / 2;
  for (int64_t l = 0; l < whole; ++l) {
    int32_t* at = panels + l / kPanel * depth * kPanel + l % kPanel;
    if (l >= length) {
      for (int64_t g = 0; g < depth; ++g) at[g * kPanel] = 0;
      continue;
    }
    alignas(64) uint16_t halves[kLanes];
    for (int64_t k = 0; k < width; k += kLanes) {
      *reinterpret_cast<Shorts*>(halves) = __builtin_convertvector(Rounded(Load(keys + l * stride + k)) >> 16, Shorts);
      for (int j = 0; j < kLanes / 2; ++j) std::memcpy(at + (k / 2 + j) * kPanel, halves + 2 * j, sizeof(int32_t));
    }
  }
}

// Lays the values [length, width] of a head out in panels [width, whole] of float32 or bfloat16. The values from `length` on
// are zeros.
inline void PackValues(Kind kind, const float* values, int64_t stride, int64_t length, int64_t whole, int64_t width,
                       int32_t* panels) {
  for (int64_t k = 0; k < width; k += kPanel)
    for (int64_t l = 0; l < whole; l += kind == kFloat32 ? 1 : 2, panels += kPanel)
      for (int part = 0; part < kPanel; part += kLanes) {
        const float* at = values + l * stride + k + part;
        if (kind == kFloat32) {
          const Lanes number = l < length ? Load(at) : Lanes{};
          std::memcpy(panels + part, &number, sizeof number);
          continue;
        }
        const Ints first = l < length ? Rounded(Load(at)) : Ints{};
        const Ints second = l + 1 < length ? Rounded(Load(at + stride)) : Ints{};
        const Ints both = (first >> 16 & 0xffff) | (second & static_cast<int32_t>(0xffff0000u));
        std::memcpy(panels + part, &both, sizeof both);
      }
}

// Computes self-attention of a source in one head. Queries, keys and values are [length, width] with `stride` numbers from a
// row to the next, and results have `found_stride`. `bias` points to the bias of a query for its own key; bias[d] is the bias
// for the key d positions later, where d may be negative.
inline void AttendWhole(Kind kind, const float* queries, const float* keys, const float* values, int64_t stride,
                        int64_t length, int64_t width, const float* bias, float* found, int64_t found_stride) {
  thread_local Ints32 packed;
  const int64_t whole = (length + 2 * kPanel - 1) / (2 * kPanel) * 2 * kPanel, depth = kind == kFloat32 ? 1 : 2;
  packed.resize(2 * whole * width / depth);
  int32_t *key_panels = packed.data(), *value_panels = key_panels + whole * width / depth;
  PackKeys(kind, keys, stride, length, whole, width, key_panels);
  PackValues(kind, values, stride, length, whole, width, value_panels);
  auto groups = [](const int32_t* panels) { return reinterpret_cast<const Ints*>(panels); };
  const Matrix k{kind, groups(key_panels), nullptr, whole / kPanel, width / depth, kDigits[kind]};
  const Matrix v{kind, groups(value_panels), nullptr, width / kPanel, whole / depth, kDigits[kind]};
  constexpr int64_t kQueries = 32;  // queries at a time, so that their scores stay in the processor's cache
  for (int64_t q = 0; q < length; q += kQueries) {
    auto add = [&](int64_t c, float* scores) {
      const float* of_query = bias - (q + c);
      for (int64_t l = 0; l < length; ++l) scores[l] += of_query[l];
    };
    AttendPanels(k, v, queries + q * stride, stride, std::min(kQueries, length - q), length, add, found + q * found_stride,
                 found_stride);
  }
}

// Computes the same as AttendWhole, in int8; see blocks.cc.
PIPEJAX_INTERNAL void AttendBlocks(const float* queries, const float* keys, const float* values, int64_t stride, int64_t length,
                                   int64_t width, const float* bias, float* found, int64_t found_stride);

}  // namespace pipejax
