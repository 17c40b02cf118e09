// The tables of the arguments of the kernel's calls, in order. Python packs arguments by these tables (fields.py); C++
// unpacks them and checks the type and shape of each field (arguments.h). The numbers of a call are one attribute. The fields
// are its arguments: first the fields of the call, then the fields of each layer.
//
//   ARRAY(name, type, shape ...)
//   MATRIX(name, outputs, inputs)    a matrix in panels of float32, bfloat16 or int8, followed by its scale: f32 [outputs]
//                                    for int8, f32 [0] for other types
//   PANELS(name, count, count, outputs, inputs)  [count, count] such matrices, followed by their scales: f32 [count, count,
//                                    outputs] for int8, f32 [count, count, 0] for other types
#pragma once

#define STEP_NUMBERS(NUMBER)                                                                      \
  NUMBER(B) /* examples of the batch */                                                           \
  NUMBER(N) /* queries */                                                                         \
  NUMBER(Q) /* places for queries of an example */                                                \
  NUMBER(C) /* slots that the mask covers */                                                      \
  NUMBER(S) /* slots of the cache, whole panels, at least C */                                    \
  NUMBER(L) /* tokens of a source, whole panels */                                                \
  NUMBER(P) /* distances of the bias */                                                           \
  NUMBER(tables) /* tables of the bias: 1 for all layers, or one for each layer */                \
  NUMBER(D) /* width */                                                                           \
  NUMBER(H) /* heads */                                                                           \
  NUMBER(K) /* width of a head */                                                                 \
  NUMBER(F) /* width of the feed-forward network */                                               \
  NUMBER(V) /* outputs of the head, whole panels */                                               \
  NUMBER(words) /* size of the vocabulary: the outputs after it are padding */                    \
  NUMBER(layers)                                                                                  \
  NUMBER(activation) /* 0: relu, 1: gelu, 2: silu; the latter two have a gate */

#define STEP_FIELDS(ARRAY, MATRIX, PANELS)                                                        \
  ARRAY(tokens, i32, N)                                                                           \
  ARRAY(place, i32, N) /* index of each query among the B Q places; B Q: a filler */              \
  ARRAY(start, i32, B) /* an example's query q goes to slot start + q */                          \
  ARRAY(mask, pred, B, Q, C) /* whether a query sees a slot, its own included */                  \
  ARRAY(position, i32, B, Q)                                                                      \
  ARRAY(key_position, i32, B, C)                                                                  \
  ARRAY(row, i32, B, C) /* coordinates of the slots */                                            \
  ARRAY(time, i32, B, C)                                                                          \
  ARRAY(bias, f32, tables, H, P)                                                                  \
  ARRAY(memory_mask, pred, B, L)                                                                  \
  ARRAY(norm, f32, D)                                                                             \
  MATRIX(head, V, D)                                                                              \
  MATRIX(embedding, V, D)

#define DECODER_LAYER_FIELDS(ARRAY, MATRIX, PANELS)                                               \
  ARRAY(self_norm, f32, D)                                                                        \
  MATRIX(self_inwards, 3 * H * K, D)                                                              \
  MATRIX(self_outwards, D, H * K)                                                                 \
  ARRAY(cross_norm, f32, D)                                                                       \
  MATRIX(cross_query, H * K, D)                                                                   \
  MATRIX(cross_outwards, D, H * K)                                                                \
  PANELS(memory_keys, B, H, L, K)                                                                 \
  ARRAY(memory_balance, f32, B, H, K) /* factors by which queries are multiplied */               \
  PANELS(memory_values, B, H, K, L)                                                               \
  FEED_FORWARD_FIELDS(ARRAY, MATRIX)                                                              \
  ARRAY(cache_keys, f32, B * H, K, S) /* these two arrays are also results, written in place */     \
  ARRAY(cache_values, f32, B * H, S, K)

#define FEED_FORWARD_FIELDS(ARRAY, MATRIX)                                                        \
  ARRAY(feed_norm, f32, D)                                                                        \
  MATRIX(feed_inwards, (activation ? 2 : 1) * F, D)                                               \
  MATRIX(feed_outwards, D, F)

#define ENCODE_NUMBERS(NUMBER)                                                                    \
  NUMBER(B) NUMBER(L) NUMBER(D) NUMBER(H) NUMBER(K) NUMBER(F) /* as in STEP_NUMBERS; any L */     \
  NUMBER(M) /* slots of the memory, at least L, whole pairs of panels */                          \
  NUMBER(tables) /* as in STEP_NUMBERS */                                                         \
  NUMBER(layers)                                                                                  \
  NUMBER(memories) /* layers of the decoder */                                                    \
  NUMBER(activation)

#define ENCODE_FIELDS(ARRAY, MATRIX, PANELS)                                                      \
  ARRAY(embedded, f32, B, L, D) /* without layers: outputs of an encoder */                       \
  ARRAY(length, i32, B) /* number of real tokens of each source */                                \
  ARRAY(bias, f32, tables, H, 2 * L - 1) /* for each offset key - query from 1 - L to L - 1 */    \
  ARRAY(norm, f32, D)

#define ENCODER_LAYER_FIELDS(ARRAY, MATRIX, PANELS)                                               \
  ARRAY(norm, f32, D)                                                                             \
  MATRIX(inwards, 3 * H * K, D)                                                                   \
  MATRIX(outwards, D, H * K)                                                                      \
  FEED_FORWARD_FIELDS(ARRAY, MATRIX)

#define MEMORY_FIELDS(ARRAY, MATRIX, PANELS)                                                      \
  MATRIX(projection, 2 * H * K, D) /* the projections to keys and to values */

#define PRODUCT_NUMBERS(NUMBER)                                                                   \
  NUMBER(N) /* columns */                                                                         \
  NUMBER(I) /* inputs: numbers of a column */                                                     \
  NUMBER(O) /* outputs, whole panels */                                                           \
  NUMBER(finer) /* 1: columns that would have one digit have two */

#define PRODUCT_FIELDS(ARRAY, MATRIX, PANELS)                                                     \
  ARRAY(columns, f32, N, I)                                                                       \
  MATRIX(matrix, O, I)

#define PEAKS_FIELDS(ARRAY, MATRIX, PANELS)                                                       \
  PRODUCT_FIELDS(ARRAY, MATRIX, PANELS) /* the matrix is float32 */                               \
  MATRIX(rough, O, I) /* the same matrix, rounded to int8 */                                      \
  ARRAY(apart, f32, O) /* largest difference of both products, divided by the column's norm; inf: unknown, or padding */
