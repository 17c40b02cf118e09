// Attention of a few queries of one example and head, which is the work of one block, to the cache or to a source.
#pragma once

#include "arguments.h"

namespace launch {

constexpr float kUnseen = -1e30f;

// A unit of work: a group of queries of an example, and a head.
struct Unit {
  int example, query, count, head;  // the first query and the number of queries
};

// The number of queries in a group, so small that all blocks have work.
DEVICE int GroupSize(const Numbers& n, int queries, int blocks) {
  return Most(1, Least(kGroup, queries * n.H / blocks));
}

DEVICE int CountGroups(const Numbers& n, const Room& room, int size) {
  int groups = 0;
  for (int b = 0; b < n.B; ++b) groups += Parts(room.first[b + 1] - room.first[b], size);
  return groups;
}

DEVICE Unit FindUnit(const Numbers& n, const Room& room, int number, int size) {
  int group = number / n.H, b = 0;
  for (int own; group >= (own = Parts(room.first[b + 1] - room.first[b], size)); ++b) group -= own;
  const int query = room.first[b] + group * size;
  return {b, query, Least(size, room.first[b + 1] - query), number % n.H};
}

// Computes the outputs [K] of a unit's queries from `keys` [K, stride] and `values` [slots, K] of its head. bias(query, slot)
// is kUnseen for slots that are not visible; without visible slots the output is zero. The softmax is computed block by
// block (Milakov and Gimelshein 2018).
template <typename T, typename Bias>
CALLED void Attend(Room& room, const Numbers& n, const Unit& unit, const T* query, const T* keys, const T* values, int stride,
                   int slots, Bias bias, T* found) {
  auto& look = room.look;
  const int width = n.K, inner = n.H * n.K, parts = kThreads / width, own = unit.count;
  const long long at = (long long)unit.query * inner + unit.head * width;
  Each(own * width, [&](int i) { look.query[i / width][i % width] = float(query[at + i / width * inner + i % width]); });
  Each(kGroup, [&](int g) { look.top[g] = kUnseen, look.total[g] = 0; });
  Each(parts * width, [&](int i) {
    for (int g = 0; g < kGroup; ++g) look.found[g * kThreads + i] = 0;
  });
  for (int begin = 0; begin < slots; begin += kSlots) {
    const int some = Least(kSlots, slots - begin);
    Each(some, [&](int c) {
      float score[kGroup] = {};
      UNROLL(8)
      for (int k = 0; k < width; ++k) {
        const float key = float(keys[(long long)k * stride + begin + c]);
        UNROLL(4)
        for (int g = 0; g < kGroup; ++g) score[g] += look.query[g][k] * key;
      }
      UNROLL(4)
      for (int g = 0; g < kGroup; ++g)
        if (g < own) {
          const float more = bias(unit.query + g, begin + c);
          look.scores[g][c] = more == kUnseen ? kUnseen : score[g] + more;
        }
    });
    EachWarp(own, [&](int g) {
      const float before = look.top[g], total = look.total[g];
      const float highest = MaxOfWarp(some, [&](int c) { return look.scores[g][c]; });
      const float top = highest > before ? highest : before;
      const float sum = SumOfWarp(some, [&](int c) {
        const float score = look.scores[g][c];
        return look.scores[g][c] = score == kUnseen ? 0 : Exp(score - top);
      });
      OneOfWarp([&] { look.top[g] = top, look.kept[g] = Exp(before - top), look.total[g] = total * look.kept[g] + sum; });
    });
    Each(parts * width, [&](int i) {
      float sum[kGroup];
      UNROLL(4)
      for (int g = 0; g < kGroup; ++g) sum[g] = g < own ? look.found[g * kThreads + i] * look.kept[g] : 0;
      UNROLL(4)
      for (int c = i / width; c < some; c += parts) {
        const float value = float(values[(long long)(begin + c) * width + i % width]);
        UNROLL(4)
        for (int g = 0; g < kGroup; ++g)
          if (g < own) sum[g] += look.scores[g][c] * value;
      }
      UNROLL(4)
      for (int g = 0; g < kGroup; ++g) look.found[g * kThreads + i] = sum[g];
    });
  }
  Each(own * width, [&](int i) {
    const int g = i / width, k = i % width;
    float sum = 0;
    for (int part = 0; part < parts; ++part) sum += look.found[g * kThreads + part * width + k];
    found[at + g * inner + k] = T(look.total[g] > 0 ? sum / look.total[g] : 0);
  });
}

}  // namespace launch
