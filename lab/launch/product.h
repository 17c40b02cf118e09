// Products of a matrix [O, I] with the queries of a step: one or more warps compute a unit of eight outputs.
#pragma once

#include "arguments.h"

namespace launch {

// The split of a product among blocks: a block computes `together` units at once, each by `ways` warps that split the inputs.
struct Split {
  int units, together, ways;
  DEVICE Split(int outputs, int blocks) : units(Parts(outputs, 8)) {
    together = 1;
    while (together < kWarps && together * blocks < units) together *= 2;
    ways = kWarps / together;
  }
};

// Computes the sums [kTogether, 8] of up to eight rows with queries `begin` to `end`, over the inputs of this warp.
template <typename T, typename Input>
CALLED void Multiply(const T* rows, int outputs, int inputs, int way, int ways, int begin, int end, Input input, float* sums) {
  constexpr int kTiles = kTogether / 16;
  float found[kTiles][kHeld][4] = {};
  for (int i = 32 * way; i < inputs; i += 32 * ways) {
    Eight<T> row[kHeld];
    LANES(lane, at) {
      row[at] = Eight<T>{};
      if (lane / 4 < outputs) row[at] = *reinterpret_cast<const Eight<T>*>(rows + (long long)(lane / 4) * inputs + i + lane % 4 * 8);
    }
    UNROLL(4)
    for (int tile = 0; tile < kTiles; ++tile)
      if (begin + 16 * tile < end) {
        Eight<T> low[kHeld], high[kHeld];
        LANES(lane, at) {
          const int query = begin + 16 * tile + lane / 4;
          low[at] = high[at] = Eight<T>{};
          if (query < end) low[at] = input(query, i + lane % 4 * 8);
          if (query + 8 < end) high[at] = input(query + 8, i + lane % 4 * 8);
        }
        MultiplyAdd(found[tile], low, high, row, 0);
        MultiplyAdd(found[tile], low, high, row, 1);
      }
  }
  UNROLL(4)
  for (int tile = 0; tile < kTiles; ++tile)
    LANES(lane, at) {
      float* to = sums + (16 * tile + lane / 4) * 8 + lane % 4 * 2;
      to[0] = found[tile][at][0], to[1] = found[tile][at][1], to[64] = found[tile][at][2], to[65] = found[tile][at][3];
    }
}

// Calls take(query, output, sum, sum of the matrix `second`, if any) for all outputs of the first `count` queries. If
// `squares` [N, O / 8] is given, the squares of the returned numbers are summed over groups of eight.
template <typename T, typename Input, typename Take>
DEVICE void Product(Room& room, int block, int blocks, int count, const T* rows, const T* second, int outputs, int inputs,
                    Input input, Take take, float* squares = nullptr) {
  const Split split(outputs, blocks);
  for (int begin = 0; begin < count; begin += kTogether)
    for (int unit = block * split.together; unit < split.units; unit += blocks * split.together) {
      const int end = Least(begin + kTogether, count), own = Least(split.together, split.units - unit);
      EachWarp(own * split.ways, [&](int warp) {
        const int output = 8 * (unit + warp / split.ways), left = outputs - output;
        const long long at = (long long)output * inputs;
        for (int i = 0; i < (second ? 2 : 1); ++i)
          Multiply((i ? second : rows) + at, left, inputs, warp % split.ways, split.ways, begin, end, input, room.sums[i][warp]);
      });
      const int cells = 8 * (end - begin);
      Each(own * cells, [&](int i) {
        const int output = 8 * (unit + i / cells) + i % 8, cell = i % cells, warp = i / cells * split.ways;
        if (output >= outputs) return;
        float one = 0, other = 0;
        for (int way = 0; way < split.ways; ++way) {
          one += room.sums[0][warp + way][cell];
          if (second) other += room.sums[1][warp + way][cell];
        }
        room.sums[0][warp][cell] = take(begin + cell / 8, output, one, other);
      });
      if (squares)
        Each(own * (end - begin), [&](int i) {
          const int query = i % (end - begin), number = i / (end - begin);
          float sum = 0;
          for (int o = 0; o < 8; ++o) {
            const float x = room.sums[0][number * split.ways][query * 8 + o];
            sum += x * x;
          }
          squares[(begin + query) * split.units + unit + number] = sum;
        });
    }
}

}  // namespace launch
