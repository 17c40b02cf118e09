// Attention in blocks, to be called from Python.
#include "blocks.h"

extern "C" void attend(const float* queries, const float* keys, const float* values, int64_t length, int64_t width,
                       const float* bias, float* found) {
  pipejax::AttendBlocks(queries, keys, values, width, length, width, bias + length - 1, found, width);
}
