// What a call of the kernel is given, field by field in order: Python packs by these tables (fields.py), C++ unpacks by
// them and checks each field's type and shape (arguments.h). Numbers come first, in one attribute; then, in one row of
// arguments, the call's own fields and those of each layer.
//
//   ARRAY(name, type, shape ...)
//   MATRIX(name, outputs, inputs)            in panels of float32, bfloat16 or int8, and after it its scale f32 [outputs],
//                                            [0] but for int8
//   PANELS(name, count, count, outputs, inputs)  so many such matrices, and after them their scales f32 [count, count,
//                                            outputs], the last 0 but for int8
#pragma once

#define STEP_NUMBERS(NUMBER)                                                                      \
  NUMBER(B) /* examples */                                                                        \
  NUMBER(N) /* queries */                                                                         \
  NUMBER(Q) /* places for queries of an example */                                                \
  NUMBER(C) /* slots in reach */                                                                  \
  NUMBER(S) /* slots of the cache, whole panels, at least C */                                    \
  NUMBER(L) /* tokens of a source, whole panels */                                                \
  NUMBER(P) /* distances of the bias */                                                           \
  NUMBER(tables) /* of the bias: 1, or as many as layers */                                       \
  NUMBER(D) /* width */                                                                           \
  NUMBER(H) /* heads */                                                                           \
  NUMBER(K) /* width of a head */                                                                 \
  NUMBER(F) /* width of the feed-forward network */                                               \
  NUMBER(V) /* outputs of the head, whole panels */                                               \
  NUMBER(words) /* of these outputs the first are words */                                        \
  NUMBER(layers)                                                                                  \
  NUMBER(activation) /* 0: relu, 1: gelu, 2: silu; the latter two have a gate */

#define STEP_FIELDS(ARRAY, MATRIX, PANELS)                                                        \
  ARRAY(tokens, i32, N)                                                                           \
  ARRAY(place, i32, N) /* of each query among all B Q; B Q: none */                               \
  ARRAY(start, i32, B) /* an example's query q goes to slot start + q */                          \
  ARRAY(mask, pred, B, Q, C) /* who sees whom, itself included */                                 \
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
  ARRAY(memory_balance, f32, B, H, K) /* what queries are multiplied with */                      \
  PANELS(memory_values, B, H, K, L)                                                               \
  FEED_FORWARD_FIELDS(ARRAY, MATRIX)                                                              \
  ARRAY(cache_keys, f32, B * H, K, S) /* these two are the results as well, in place */           \
  ARRAY(cache_values, f32, B * H, S, K)

#define FEED_FORWARD_FIELDS(ARRAY, MATRIX)                                                        \
  ARRAY(feed_norm, f32, D)                                                                        \
  MATRIX(feed_inwards, (activation ? 2 : 1) * F, D)                                               \
  MATRIX(feed_outwards, D, F)

#define ENCODE_NUMBERS(NUMBER)                                                                    \
  NUMBER(B) NUMBER(L) NUMBER(D) NUMBER(H) NUMBER(K) NUMBER(F) /* as in a step; any L */           \
  NUMBER(M) /* slots of the memory, at least L, whole pairs of panels */                          \
  NUMBER(tables) /* as in a step */                                                               \
  NUMBER(layers)                                                                                  \
  NUMBER(memories) /* layers of the decoder */                                                    \
  NUMBER(activation)

#define ENCODE_FIELDS(ARRAY, MATRIX, PANELS)                                                      \
  ARRAY(embedded, f32, B, L, D)                                                                   \
  ARRAY(length, i32, B) /* real tokens */                                                         \
  ARRAY(bias, f32, tables, H, 2 * L - 1) /* of key - query = 1 - L and so on */                   \
  ARRAY(norm, f32, D)

#define ENCODER_LAYER_FIELDS(ARRAY, MATRIX, PANELS)                                               \
  ARRAY(norm, f32, D)                                                                             \
  MATRIX(inwards, 3 * H * K, D)                                                                   \
  MATRIX(outwards, D, H * K)                                                                      \
  FEED_FORWARD_FIELDS(ARRAY, MATRIX)

#define MEMORY_FIELDS(ARRAY, MATRIX, PANELS)                                                      \
  MATRIX(projection, 2 * H * K, D) /* keys and values */

#define PRODUCT_NUMBERS(NUMBER)                                                                   \
  NUMBER(N) /* columns */                                                                         \
  NUMBER(I) /* numbers of a column */                                                             \
  NUMBER(O) /* outputs, whole panels */                                                           \
  NUMBER(finer) /* whether columns have two digits where they would have one */

#define PRODUCT_FIELDS(ARRAY, MATRIX, PANELS)                                                     \
  ARRAY(columns, f32, N, I)                                                                       \
  MATRIX(matrix, O, I)

#define PEAKS_FIELDS(ARRAY, MATRIX, PANELS)                                                       \
  PRODUCT_FIELDS(ARRAY, MATRIX, PANELS) /* float32 */                                             \
  MATRIX(rough, O, I)                   /* the same in int8 */                                    \
  ARRAY(apart, f32, O) /* how far their products are at the most, by the column's length; inf: unknown, or no output */
