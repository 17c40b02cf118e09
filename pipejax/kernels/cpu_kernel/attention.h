// Attention of one head, and what else happens to columns between two products.
#pragma once

#include "narrow.h"

namespace pipejax {

// e^x for x <= 0, to about two units in the last place; what is below -87 counts as -87.
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

// e^(scores - their maximum) in place; returns the inverse of the sum. Past `count` there is room for whole lanes, and
// zeros come there. The sum is in float64, lest it depend on which lanes scores are in.
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

// x / rms(x) * scale.
inline void Norm(const float* x, const float* scale, float epsilon, int64_t size, float* normed) {
  Lanes squares = {};
  for (int64_t i = 0; i < size; i += kLanes) squares = Fma(Load(x + i), Load(x + i), squares);
  const float inverse = 1.0f / std::sqrt(Sum(squares) / size + epsilon);
  for (int64_t i = 0; i < size; i += kLanes) Store(normed + i, Load(x + i) * inverse * Load(scale + i));
}

// x / (1 + e^-x).
inline Lanes Silu(Lanes x) {
  const Lanes power = Exp(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? power : Lanes{} + 1.0f) / (1.0f + power);
}

// By its tanh approximation: x times the logistic function of 2 sqrt(2 / pi) (x + 0.044715 x^3).
inline Lanes Gelu(Lanes x) {
  const Lanes inner = 1.5957691216f * Fma(0.044715f * x * x, x, x);
  const Lanes power = Exp(inner < 0.0f ? inner : -inner);
  return x * (inner < 0.0f ? power : Lanes{} + 1.0f) / (1.0f + power);
}

// A head's cache of keys [width, slots] and values [slots, width]; whole lanes of slots.
struct Cache {
  float *keys, *values;
  int64_t slots, width;

  void Put(int64_t slot, const float* key, const float* value) const {
    for (int64_t k = 0; k < width; ++k) keys[k * slots + slot] = key[k];
    std::copy(value, value + width, values + slot * width);
  }

  // What so many queries, one or two, find in slot(0) .. slot(count - 1), all below `used`, summed in that order. `bias`
  // has a number for each of them.
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
  static constexpr int kTogether = kLanes == 16 ? 8 : 4;  // sums; a single one would wait for itself

  // For each query, sums += x of so many numbers times rows of so many registers.
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

// Keys whose weights share a scale in int8. Two digits have 32,639 steps, so rounding takes at most 256 of them, or 1/127 of
// the weights, however long a source is.
constexpr int64_t kWeighed = 512;

// What queries [count, width] find in keys [length, width] and values [width, length] in panels. `bias` adds a query's to
// its scores.
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

// Numbers in int8, 127 the largest. The scale is not a number if one of them is none.
struct Int8 {
  Lanes scale, by;

  Int8(Lanes largest, Lanes bad) : scale(largest / 127.0f + bad), by(largest < kLeast ? Lanes{} : 127.0f / largest) {}

  // Writes a row [width], x(0) ..., and returns its scale and the sum of its whole numbers; `put` gets so many at a time.
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

// Of so many numbers of each channel, number(l) ...
template <typename Number>
Lanes Average(int64_t length, Number number) {
  Lanes sum = {};
  for (int64_t l = 0; l < length; ++l) sum += number(l);
  return sum / static_cast<float>(std::max<int64_t>(length, 1));
}

// Lays a head's keys [length, width], key(l, k) ..., in panels of int8, each with a scale of its own; of what comes past them
// zeros.
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

// As PackKeysInInt8, of keys without a channel's mean, which adds as much to all scores of a query, and divided by a power of
// two near a channel's size on average, which a single token hardly changes: a large channel would make all others coarse.
// `of_queries` [width] are these powers, for the queries.
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

// Lays the values [length, width] of a head in panels [width, whole] of int8, each output with a scale of its own.
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

// Lays the keys [length, width] of a head in panels of float32 or bfloat16; of what comes past them zeros.
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

// Lays the values [length, width] of a head in panels [width, whole] of float32 or bfloat16.
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

// What a head's queries find in its keys and values, all [length, width] with so much from a row to the next. `bias` is that
// of a query's own key; those of others lie around it.
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
  constexpr int64_t kQueries = 32;  // at a time: their scores stay in the cache
  for (int64_t q = 0; q < length; q += kQueries) {
    auto add = [&](int64_t c, float* scores) {
      const float* of_query = bias - (q + c);
      for (int64_t l = 0; l < length; ++l) scores[l] += of_query[l];
    };
    AttendPanels(k, v, queries + q * stride, stride, std::min(kQueries, length - q), length, add, found + q * found_stride,
                 found_stride);
  }
}

}  // namespace pipejax
