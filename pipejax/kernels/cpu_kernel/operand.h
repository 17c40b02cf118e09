// The columns of a product, and the division of a product among the threads of a team. A task has as many columns as fit into
// the processor's cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "narrow.h"
#include "team.h"

namespace pipejax {

// The columns of a product, in float32 or in digits, as the matrix requires (Matrix::digits).
class Operand {
 public:
  // Sets the columns [count, inputs] for a product with w. make(c, room) returns the address of the numbers of column c, which
  // it may write to `room`.
  template <typename Make>
  void Set(Team& team, const Matrix& w, int64_t count, Make make) {
    const int64_t inputs = w.Inputs();
    const int digits = w.digits;
    count_ = count, inputs_ = inputs;
    if (digits) digits_.Reserve(w.kind, digits, count, inputs);
    else floats_.resize(count * inputs);
    team.Run(count, std::max<int64_t>(1, 2048 / inputs), [&](int64_t c) {  // shares are large enough for a thread
      thread_local Floats32 room;
      if (digits) room.resize(inputs);
      float* offered = digits ? room.data() : floats_.data() + c * inputs;
      const float* made = make(c, offered);
      if (digits) digits_.Fill(c, made);
      else if (made != offered) std::copy(made, made + inputs, offered);
    });
  }

  // Computes y = w * this, in parallel.
  void Times(Team& team, const Matrix& w, const Results& y) const {
    Share(team, w, Panels(team, w), [&](int64_t from, int64_t to, int64_t begin, int64_t end) {
      Multiply(from, to, w, begin, end, {y.at + begin * y.stride, y.stride, y.then});
    });
  }

  // For each column of w * this, sets `number` to the index of the highest of the first `outputs` outputs: the lowest index if
  // several are equal, and outputs - 1 if an output is NaN. The products of a task are not written to shared memory.
  void Highest(Team& team, const Matrix& w, int64_t outputs, int32_t* number) {
    const int64_t size = Panels(team, w), parts = (w.panels + size - 1) / size;
    peaks_.resize(parts * count_);
    // With fewer than 4 columns, reading the weights takes longer than arithmetic, so bounds would save no time.
    const bool bounded = kBounds && w.kind == kInt8 && w.digits == 2 && count_ >= 4;
    if (bounded) floors_.assign(count_, -INFINITY), helped_ = vain_ = 0;
    Share(team, w, size, [&](int64_t from, int64_t to, int64_t begin, int64_t end) {
      if (bounded && BoundsHelp()) {
        const bool helped = PeaksWithin(w, outputs, from, to, begin, end, peaks_.data() + from / size, parts);
        __atomic_add_fetch(helped ? &helped_ : &vain_, 1, __ATOMIC_RELAXED);
        if (helped) return;
      }
      thread_local Floats32 found;
      const int64_t stride = (to - from) * kPanel;
      found.resize((end - begin) * stride);
      Multiply(from, to, w, begin, end, {found.data() - from * kPanel, stride});
      for (int64_t c = begin; c < end; ++c)
        peaks_[c * parts + from / size] = Peak(found.data() + (c - begin) * stride, from * kPanel, std::min(outputs, to * kPanel));
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
#if defined(__AVX512VNNI__) && !defined(__AMX_TILE__)  // tiles are fast enough without bounds
  static constexpr bool kBounds = true;
#else
  static constexpr bool kBounds = false;
#endif
  static constexpr int64_t kChunk = 128;  // the most columns of a task, so that their digits stay in the cache

  // The number of panels of a task, a multiple of four: at most about 128 KiB of weights, and about equally many tasks for
  // each thread.
  static int64_t Panels(const Team& team, const Matrix& w) {
    const int64_t bytes = w.panels * w.depth * 64, all = team.Threads() << 17;
    const int64_t tasks = team.Threads() * ((bytes + all - 1) / all);
    return std::max<int64_t>(4, (w.panels + tasks - 1) / tasks) / 4 * 4;
  }

  // Calls run(from, to, begin, end) in parallel, for each `size` panels of w and each kChunk columns.
  template <typename Run>
  void Share(Team& team, const Matrix& w, int64_t size, Run run) const {
    const int64_t parts = (w.panels + size - 1) / size, chunks = (count_ + kChunk - 1) / kChunk;
    team.Run(parts * chunks, 1, [&](int64_t i) {
      const int64_t from = i % parts * size, begin = i / parts * kChunk;
      run(from, std::min(w.panels, from + size), begin, std::min(count_, begin + kChunk));
    });
  }

  // Multiplies the panels `from` to `to` - 1 of w with the columns `begin` to `end` - 1; y.at is the address of the results of
  // column `begin`.
  void Multiply(int64_t from, int64_t to, const Matrix& w, int64_t begin, int64_t end, const Results& y) const {
    if (w.digits) ByDigits(from, to, w, digits_, begin, end, {y.at - begin * y.stride, y.stride, y.then});
    else ByWidening(from, to, w, floats_.data() + begin * inputs_, inputs_, end - begin, y);
  }

  // Sets the peaks of the panels `from` to `to` - 1, or -inf if they cannot be the highest outputs of all. Bounds from first
  // digits (BoundBlock) are computed for all panels. Second digits are multiplied only with panels whose upper bound is at
  // least the highest lower bound known so far, in this task or in others. Returns false, without setting peaks, if there are
  // so many of these panels that computing all products is faster.
  bool PeaksWithin(const Matrix& w, int64_t outputs, int64_t from, int64_t to, int64_t begin, int64_t end,
                   std::pair<float, int32_t>* peaks, int64_t apart) {
#ifdef __AVX512VNNI__
    thread_local Floats32 kept;
    const int64_t columns = end - begin, blocks = (columns + 7) / 8;
    kept.resize((to - from + 1) * columns * kPanel);
    float *floors = kept.data(), *tops = floors + columns * kPanel;  // [columns, 16]; [panels, columns, 16]
    std::fill(floors, tops, -INFINITY);
    auto tell = [&](int64_t panel, int64_t column, Lanes low, Lanes high) {
      for (int64_t lane = std::max<int64_t>(0, outputs - panel * kPanel); lane < kPanel; ++lane) low[lane] = high[lane] = -INFINITY;
      float* floor = floors + (column - begin) * kPanel;
      Store(floor, low > Load(floor) ? low : Load(floor));
      Store(tops + ((panel - from) * columns + column - begin) * kPanel, high);
    };
    for (int64_t panel = from; panel < to; panel += 2)
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = columns * b / blocks, count = columns * (b + 1) / blocks - first;
        WithConstant<8>(count, [&](auto c) {
          if (panel + 2 <= to) BoundBlock<2, c()>(w, panel, digits_, begin + first, tell);
          else BoundBlock<1, c()>(w, panel, digits_, begin + first, tell);
        });
      }
    thread_local std::vector<std::pair<int64_t, int64_t>> reaching;  // column and panel
    reaching.clear();
    for (int64_t c = 0; c < columns; ++c) {
      const float floor = Raised(floors_[begin + c], Most(Load(floors + c * kPanel)));
      for (int64_t panel = from; panel < to; ++panel) {
        const Lanes top = Load(tops + ((panel - from) * columns + c) * kPanel);
        if (_mm512_cmp_ps_mask((__m512)top, _mm512_set1_ps(floor), _CMP_NLT_UQ)) reaching.emplace_back(c, panel);  // NaN does
      }
    }
    if (static_cast<int64_t>(reaching.size()) * 4 > columns * (to - from)) return false;
    for (int64_t c = 0; c < columns; ++c) peaks[(begin + c) * apart] = {-INFINITY, 0};
    for (const auto [c, panel] : reaching) {
      alignas(64) float found[kPanel];
      DotBlock<kInt8, 2, 1, 1>(w, panel, digits_, begin + c, {found - panel * kPanel, 0});
      const auto peak = Peak(found, panel * kPanel, std::min(outputs, (panel + 1) * kPanel));
      auto& best = peaks[(begin + c) * apart];
      if (peak.first > best.first || peak.first != peak.first) best = peak;
    }
    return true;
#else
    return false;
#endif
  }

  // Whether bounds have saved work in about half of the tasks so far. Up to 8 further failures are accepted, since the first
  // tasks know only low bounds of the highest output.
  bool BoundsHelp() const { return __atomic_load_n(&vain_, __ATOMIC_RELAXED) <= __atomic_load_n(&helped_, __ATOMIC_RELAXED) + 8; }

  // Sets `floor` to the maximum of both numbers and returns it. If two threads do so at the same time, one value may be lost;
  // then a later task computes more panels than necessary.
  static float Raised(float& floor, float value) {
    float known;
    __atomic_load(&floor, &known, __ATOMIC_RELAXED);
    if (known >= value) return known;
    __atomic_store(&floor, &value, __ATOMIC_RELAXED);
    return value;
  }

  // The highest of the outputs x, which have the indices `from` to `to` - 1, and its lowest index; NaN if an output is NaN.
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
  Floats32 floats_;
  Digits digits_;
  std::vector<std::pair<float, int32_t>> peaks_;  // [columns, tasks]
  Floats32 floors_;  // for each column, a lower bound of the highest output
  int64_t helped_ = 0, vain_ = 0;  // numbers of tasks in which bounds saved work, and in which they did not
};

}  // namespace pipejax
