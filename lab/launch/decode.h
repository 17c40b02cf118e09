// The steps of a decode in one launch, equal to `decoding.core.decode` with `inference.step_decoder`.
//
// All blocks work on the same phase of a step: there are eight phases for a layer, with a barrier after each. A barrier has
// a watchdog: if a block does not arrive in time, all blocks end, and a word of the results records it.
#pragma once

#include "attention.h"
#include "product.h"
#include "strategy.h"

namespace launch {

// Waits until `arrivals` blocks have arrived, and prefetches memory meanwhile. Returns false if this block or another one
// has waited too long.
CALLED bool WaitForAll(Room& room, Control& control, int arrivals, const char* ahead, int bytes) {
  Dawdle(room.numbers.dawdle);
  Wait();
  One([&] { Arrive(control.arrived); });
  Fetch(ahead, bytes);
  One([&] {
    const Watch watch;
    for (int tries = 1; Read(control.arrived) < arrivals && !Read(control.failed); ++tries) {
      if (tries % 64 == 0 && watch.Over(room.numbers.patience)) Write(control.failed, 1);
      Rest();
    }
    Arrived();
    room.failed = Read(control.failed);
  });
  Wait();
  return !room.failed;
}

template <typename T>
struct Decode {
  Room& room;
  const int block, blocks;
  const Numbers& n;
  const Given<T>& given;
  const Layer<T>* layers;
  const Scratch<T>& scratch;
  const int inner, count_squares;
  const float epsilon, factor;
  int barriers = 0, count = 0;

  // All pointers are in the memory of the block: the members of Given, the layers, and after `results` the scratch. An
  // eighth of a layer's pointers and some others are results as well, in the same memory.
  DEVICE Decode(Room& room, int block, int blocks, int results)
      : room(room), block(block), blocks(blocks), n(room.numbers), given(*reinterpret_cast<const Given<T>*>(room.pointers)),
        layers(reinterpret_cast<const Layer<T>*>(room.pointers + sizeof(Given<T>) / sizeof(void*))),
        scratch(*reinterpret_cast<const Scratch<T>*>(room.pointers + results)), inner(n.H * n.K), count_squares(Parts(n.D, 8)),
        epsilon(given.floats->epsilon), factor(given.floats->factor) {}

  DEVICE void Run() {
    if (block == n.absent) return;
    if (block == 0) Open();
    while (Meet() && Read(given.control->goes_on)) {
      Embed();
      if (!MeetBefore(layers[0].self_inwards, 3 * inner, n.D)) return;
      for (int i = 0; i < n.layers; ++i)
        if (!RunLayer(layers[i], i + 1 < n.layers ? layers[i + 1].self_inwards : given.head, i + 1 < n.layers ? 3 * inner : n.V)) return;
      Head();
      if (!Meet()) return;
      Search();
      if (!Meet()) return;
      if (block == 0) GoOn();
    }
  }

  DEVICE bool Meet() {
    return WaitForAll(room, *given.control, ++barriers * blocks, static_cast<const char*>(nullptr), 0);
  }

  // Like `Meet`, but prefetches the first rows of this block's next product meanwhile.
  DEVICE bool MeetBefore(const T* rows, int outputs, int inputs) {
    const Split split(outputs, blocks);
    const int output = 8 * block * split.together, own = Least(8 * split.together, outputs - output);
    return WaitForAll(room, *given.control, ++barriers * blocks, reinterpret_cast<const char*>(rows + (long long)output * inputs),
                      own * inputs * int(sizeof(T)));
  }

  DEVICE bool RunLayer(const Layer<T>& layer, const T* next, int next_outputs) {
    const int gates = n.activation ? 2 : 1;
    FindRoots();
    Of(layer.self_inwards, 3 * inner, n.D, Normed(layer.self_norm, 1), [&](int query, int output, float sum, float) {
      return Put(layer, query, output, T(sum));
    });
    if (!MeetBefore(layer.self_outwards, n.D, inner)) return false;
    LookIntoCache(layer);
    if (!Meet()) return false;
    Add(layer.self_outwards, inner, scratch.found);
    if (!MeetBefore(layer.cross_query, inner, n.D)) return false;
    FindRoots();
    Of(layer.cross_query, inner, n.D, Normed(layer.cross_norm, 1), [&](int query, int output, float sum, float) {
      return float(scratch.query[query * inner + output] = T(sum));
    });
    if (!MeetBefore(layer.cross_outwards, n.D, inner)) return false;
    LookIntoSource(layer);
    if (!Meet()) return false;
    Add(layer.cross_outwards, inner, scratch.found);
    if (!MeetBefore(layer.feed_inwards, gates * n.F, n.D)) return false;
    FindRoots();
    const T* values = n.activation ? layer.feed_inwards + (long long)n.F * n.D : nullptr;
    Product(room, block, blocks, count, layer.feed_inwards, values, n.F, n.D, Normed(layer.feed_norm, 1),
            [&](int query, int output, float sum, float value) {
              return float(scratch.hidden[(long long)query * n.F + output] = T(Activate(float(T(sum)), float(T(value)))));
            });
    if (!MeetBefore(layer.feed_outwards, n.D, n.F)) return false;
    Add(layer.feed_outwards, n.F, scratch.hidden);
    return MeetBefore(next, next_outputs, n.D);
  }

  // --- phases ---

  DEVICE void Embed() {
    Each(n.B + 1, [&](int b) { room.first[b] = scratch.first[b]; });
    count = room.first[n.B];
    Each(count, [&](int i) { room.asked[i] = scratch.asked[i]; });
    if (block == 0)
      Each(count, [&](int i) {
        const Asked& asked = room.asked[i];
        given.filled_row[asked.example * n.C + asked.slot] = asked.row;
        given.filled_time[asked.example * n.C + asked.slot] = asked.time;
      });
    for (int query = block; query < count; query += blocks) {
      const T* row = given.embedding + (long long)room.asked[query].token * n.D;
      Each(count_squares, [&](int i) {
        float sum = 0;
        for (int e = 8 * i; e < 8 * i + 8; ++e) {
          scratch.x[query * n.D + e] = row[e];
          sum += float(row[e]) * float(row[e]);
        }
        scratch.squares[query * count_squares + i] = sum;
      });
    }
  }

  // The inverse root mean square of each query.
  DEVICE void FindRoots() {
    EachWarp(count, [&](int query) {
      const float sum = SumOfWarp(count_squares, [&](int i) { return scratch.squares[query * count_squares + i]; });
      OneOfWarp([&] { room.inverse[query] = InverseRoot(sum / n.D + epsilon); });
    });
  }

  // Eight numbers of a query after the norm, times a factor.
  struct NormedInput {
    const T* x;
    const float *inverse, *scale;
    int inputs;
    float factor;
    DEVICE Eight<T> operator()(int query, int i) const {
      Eight<T> found = *reinterpret_cast<const Eight<T>*>(x + query * inputs + i);
      UNROLL(8)
      for (int e = 0; e < 8; ++e) {
        found.x[e] = T(float(found.x[e]) * inverse[query] * scale[i + e]);
        if (factor != 1) found.x[e] = T(float(found.x[e]) * float(T(factor)));
      }
      return found;
    }
  };

  struct PlainInput {
    const T* columns;
    int inputs;
    DEVICE Eight<T> operator()(int query, int i) const {
      return *reinterpret_cast<const Eight<T>*>(columns + (long long)query * inputs + i);
    }
  };

  DEVICE NormedInput Normed(const float* scale, float factor) const { return {scratch.x, room.inverse, scale, n.D, factor}; }

  template <typename Input, typename Take>
  DEVICE void Of(const T* rows, int outputs, int inputs, Input input, Take take, float* squares = nullptr) {
    Product(room, block, blocks, count, rows, static_cast<const T*>(nullptr), outputs, inputs, input, take, squares);
  }

  // Adds the product of a matrix with columns [N, inputs] to the residual.
  DEVICE void Add(const T* rows, int inputs, const T* columns) {
    Of(rows, n.D, inputs, PlainInput{columns, inputs}, [&](int query, int output, float sum, float) {
      T& x = scratch.x[query * n.D + output];
      return float(x = T(float(x) + float(T(sum))));
    }, scratch.squares);
  }

  // Stores a number of a query, or of its key or value, which are written to the cache.
  DEVICE float Put(const Layer<T>& layer, int query, int output, T x) {
    const int part = output / inner, at = output % inner;
    if (part == 0) {
      scratch.query[query * inner + at] = x;
    } else {
      const Asked& asked = room.asked[query];
      const long long head = asked.example * n.H + at / n.K, k = at % n.K;
      if (part == 1) layer.cache_keys[(head * n.K + k) * n.C + asked.slot] = x;
      else layer.cache_values[(head * n.C + asked.slot) * n.K + k] = x;
    }
    return 0;
  }

  DEVICE void LookIntoCache(const Layer<T>& layer) {
    const int size = GroupSize(n, count, blocks), units = CountGroups(n, room, size) * n.H;
    for (int i = block; i < units; i += blocks) {
      const Unit unit = FindUnit(n, room, i, size);
      const long long head = unit.example * n.H + unit.head;
      const int *rows = given.filled_row + unit.example * n.C, *times = given.filled_time + unit.example * n.C;
      const float* table = given.bias + unit.head * n.distances;
      auto bias = [&](int query, int slot) {
        const Asked& asked = room.asked[query];
        const int row = rows[slot], time = times[slot];
        if (row > asked.row || time > asked.time || row == kNever) return kUnseen;
        return table[Least(asked.row + asked.time - row - time, n.distances - 1)];
      };
      Attend(room, n, unit, scratch.query, layer.cache_keys + head * n.K * n.C, layer.cache_values + head * n.C * n.K, n.C,
             scratch.reach[unit.example], bias, scratch.found);
    }
  }

  DEVICE void LookIntoSource(const Layer<T>& layer) {
    const int size = GroupSize(n, count, blocks), units = CountGroups(n, room, size) * n.H;
    for (int i = block; i < units; i += blocks) {
      const Unit unit = FindUnit(n, room, i, size);
      const long long at = (long long)(unit.example * n.H + unit.head) * n.K * n.L;
      const int* mask = given.mask + unit.example * n.L;
      auto bias = [&](int, int slot) { return mask[slot] ? 0.f : kUnseen; };
      Attend(room, n, unit, scratch.query, layer.memory_keys + at, layer.memory_values + at, n.L, n.L, bias, scratch.found);
    }
  }

  DEVICE float Activate(float gate, float value) const {
    if (!n.activation) return gate > 0 ? gate : 0;
    if (n.activation == 2) return gate / (1 + Exp(-gate)) * value;
    return 0.5f * gate * (1 + Tanh(0.7978845608f * (gate + 0.044715f * gate * gate * gate))) * value;
  }

  DEVICE void Head() {
    FindRoots();
    Of(given.head, n.V, n.D, Normed(given.norm, factor), [&](int query, int output, float sum, float) {
      return scratch.logits[(long long)query * n.V + output] = sum;
    });
  }

  // Finds the highest logit of each part of the vocabulary; of equal logits, the lowest token counts.
  DEVICE void Search() {
    auto& search = room.search;
    const int part = Parts(n.V, n.parts);
    for (int i = block; i < count * n.parts; i += blocks) {
      const int begin = i % n.parts * part, end = Least(begin + part, n.V);
      const float* logits = scratch.logits + (long long)(i / n.parts) * n.V;
      Each(kThreads, [&](int at) {
        search.best[at] = -3e38f, search.token[at] = n.V - 1;
        for (int token = begin + at; token < end; token += kThreads)
          if (logits[token] > search.best[at]) search.best[at] = logits[token], search.token[at] = token;
      });
      for (int half = kThreads / 2; half; half /= 2)
        Each(half, [&](int at) { Choose(search.best[at], search.token[at], search.best[at + half], search.token[at + half]); });
      Each(1, [&](int) { scratch.best[i] = search.best[0], scratch.best_token[i] = search.token[0]; });
    }
  }

  DEVICE static void Choose(float& best, int& token, float other, int other_token) {
    if (other > best || (other == best && other_token < token)) best = other, token = other_token;
  }

  // --- the strategy, computed by the first block ---

  // Lists the first queries.
  DEVICE void Open() {
    Each(n.B * n.R, [&](int i) { room.state.rows[i] = given.rows[i]; });
    List();
  }

  // Appends the tokens to rows, and lists the next queries.
  DEVICE void GoOn() {
    Each(n.B * n.R, [&](int i) { room.state.rows[i] = given.rows[i]; });
    Each(count, [&](int i) {
      float best = -3e38f;
      int token = n.V - 1;
      for (int part = 0; part < n.parts; ++part)
        Choose(best, token, scratch.best[i * n.parts + part], scratch.best_token[i * n.parts + part]);
      room.state.answer[room.asked[i].example * n.R + room.asked[i].row] = token;
    });
    int most = 0;
    for (int b = 0; b < n.B; ++b) most = Most(most, room.first[b + 1] - room.first[b]);
    Each(n.B, [&](int b) {
      Example& example = given.examples[b];
      example.used += n.apart ? room.first[b + 1] - room.first[b] : most;
      Advance(n, example, room.state.rows + b * n.R, room.state.answer + b * n.R, given.tokens + (long long)b * n.R * (n.T + 1));
      Ask(n, example, room.state.rows + b * n.R);
    });
    Each(n.B * n.R, [&](int i) { given.rows[i] = room.state.rows[i]; });
    One([&] { --given.control->left; });
    List();
  }

  DEVICE void List() {
    One([&] {
      int asked = 0, done = 0, used = 0;
      bool pauses = given.control->left <= 0;
      for (int b = 0; b < n.B; ++b) {
        const Example& example = given.examples[b];
        done += example.done, used = Most(used, example.used);
        pauses = pauses || (example.done && given.watched[b]);
        scratch.first[b] = asked;
        int slot = example.used;
        for (int i = 0; i < n.R; ++i) {
          const Row& row = room.state.rows[b * n.R + i];
          if (row.live) scratch.asked[asked++] = {b, i, row.time, slot++, row.fed};
        }
        scratch.reach[b] = slot;
      }
      scratch.first[n.B] = asked;
      Write(given.control->goes_on, done < n.B && used <= n.limit && !pauses);
    });
    Wait();
  }
};

}  // namespace launch
