// The arguments of a launch, in the order in which `launch.decode` passes them, and the shared memory of a block.
//
// Shapes: B batch, R rows of the grid, T time-steps, C slots of the cache, L source length, D width, H heads, K head width,
// I = H K, F feed-forward width, V vocabulary, N queries of a step.
#pragma once

#include "device.h"

namespace launch {

constexpr int kQueries = 256;   // the largest N
constexpr int kTogether = 64;   // queries in one pass of a product
constexpr int kPointers = 400;  // most pointers of a launch
constexpr int kSlots = 512;     // slots in one pass of attention
constexpr int kGroup = 4;       // queries in one pass of attention
constexpr int kEnds = 8;        // most tokens that end a row
constexpr int kNever = 1 << 30;  // the end of a row that has not ended; the row of a slot that is not visible

struct Numbers {
  int B, R, T, C, L, D, H, K, F, V;
  int distances, layers, activation;                     // 0: relu, 1: gelu, 2: silu; the latter two have a gate
  int delay, sub_max, literal, bos;                      // settings of Algorithm 1
  int ends[kEnds];                                       // the tokens that end a row; unused places repeat the first
  int apart, limit;                                      // 1: each example counts its slots; most slots in use before a step
  int parts;                                             // parts of the search for a query's highest logit
  int patience, absent, dawdle;  // milliseconds of a wait; for tests: a block that never arrives, microseconds of delays
};

struct Floats {
  float epsilon, factor;  // the epsilon of norms; the factor of the input of the head
};

struct Control {  // zeros at the start, except `left`
  Word arrived, failed, goes_on;
  int left;  // steps until the launch pauses
};

struct Example {
  int time, started, complete, done, used;
};

struct Row {
  int last, end, retired;
  int live, fed, time;  // fields of the next query
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
  float *squares, *logits;  // [N, D / 8]: squares of x, summed over eight numbers; [N, V]
  float* best;              // [N, parts]
  int* best_token;
  Asked* asked;
  int *first, *reach;  // [B + 1]: an example's first query; [B]: its slots in use
};

// The memory of a block: shared memory on a GPU.
struct Room {
  const void* pointers[kPointers];
  Numbers numbers;
  int failed;
  int first[kQueries + 1];
  Asked asked[kQueries];
  float inverse[kQueries];  // the inverse root mean square of a query
  union {
    float sums[2][kWarps][kTogether * 8];  // sums of a product by warp; the second array is for a gate's value
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
