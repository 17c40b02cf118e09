// The arguments of a launch, in the order in which `launch.decode` gives them, and the room of a block.
//
// Shapes: B batch, R rows of the grid, T time-steps, C slots of the cache, L source length, D width, H heads, K head width,
// I = H K, F feed-forward width, V vocabulary, N queries of a step.
#pragma once

#include "device.h"

namespace launch {

constexpr int kQueries = 256;   // N, at the most
constexpr int kTogether = 64;   // queries of a product at once
constexpr int kPointers = 400;  // of a launch, at the most
constexpr int kSlots = 512;     // that attention looks at together
constexpr int kGroup = 4;       // queries of attention that look at them together
constexpr int kEnds = 8;        // tokens that end a row, at the most
constexpr int kNever = 1 << 30;  // the end of a row that has not ended; the row of a slot that nobody sees

struct Numbers {
  int B, R, T, C, L, D, H, K, F, V;
  int distances, layers, activation;                     // 0: relu, 1: gelu, 2: silu; the latter two have a gate
  int delay, sub_max, literal, bos;                      // of Algorithm 1
  int ends[kEnds];                                       // the tokens that end a row; the first again in the place of none
  int apart, limit;                                      // slots of each example apart; a step begins up to so many
  int parts;                                             // of the search for a query's highest logit
  int patience, absent, dawdle;  // milliseconds of a wait; tests: a block that never comes, microseconds of delays
};

struct Floats {
  float epsilon, factor;  // of norms; of what the head reads
};

struct Control {  // begins as zeros but for `left`
  Word arrived, failed, goes_on;
  int left;  // steps until it pauses
};

struct Example {
  int time, started, complete, done, used;
};

struct Row {
  int last, end, retired;
  int live, fed, time;  // of the next query
};

struct Asked {  // a live query
  int example, row, time, slot, token;
};

template <typename T>
struct Layer {
  const float* self_norm;
  const T *self_inwards, *self_outwards;
  const float* cross_norm;
  const T *cross_query, *cross_outwards;
  const float* feed_norm;
  const T *feed_inwards, *feed_outwards;
  const T *memory_keys, *memory_values;  // [B, H, K, L], [B, H, L, K]
  T *cache_keys, *cache_values;          // [B, H, K, C], [B, H, C, K]
};

template <typename T>
struct Given {
  const Numbers* numbers;
  const Floats* floats;
  const int *watched, *mask;  // [B], [B, L]
  const T *embedding, *head;
  const float *norm, *bias;  // bias [H, distances]
  Control* control;
  Example* examples;              // [B]
  Row* rows;                      // [B, R]
  int *tokens;                    // [B, R, T + 1]
  int *filled_row, *filled_time;  // [B, C]
};

template <typename T>
struct Scratch {  // [N, ..] each
  T *x, *query, *found, *hidden;
  float *squares, *logits;  // [N, D / 8]: of x, eight numbers each; [N, V]
  float* best;              // [N, parts]
  int* best_token;
  Asked* asked;
  int *first, *reach;  // [B + 1] an example's first query; [B] its slots in use
};

// Of a block: shared memory of a GPU.
struct Room {
  const void* pointers[kPointers];
  Numbers numbers;
  int failed;
  int first[kQueries + 1];
  Asked asked[kQueries];
  float inverse[kQueries];  // of a query's root mean square
  union {
    float sums[2][kWarps][kTogether * 8];  // of a product, by warp; the second of a gate's value
    struct {
      float query[kGroup][128], scores[kGroup][kSlots], found[kThreads * kGroup], top[kGroup], total[kGroup], kept[kGroup];
    } look;
    struct {
      float best[kThreads];
      int token[kThreads];
    } search;
    struct {
      Row rows[kQueries];
      int answer[kQueries];
    } state;
  };
};

}  // namespace launch
