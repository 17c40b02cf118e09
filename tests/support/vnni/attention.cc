// Self-attention in blocks and attention to a source, for calls from Python.
#include "attention.h"

extern "C" void attend(const float* queries, const float* keys, const float* values, int64_t length, int64_t width,
                       const float* bias, float* found) {
  pipejax::AttendBlocks(queries, keys, values, width, length, width, bias + length - 1, found, width);
}

extern "C" void look(const float* queries, const float* keys, const float* values, int64_t count, int64_t length, int64_t width,
                     float* balanced, float* found) {
  using namespace pipejax;
  const int64_t whole = (length + 2 * kPanel - 1) / (2 * kPanel) * 2 * kPanel;
  Ints32 of_keys(whole * width / 4), of_values(whole * width / 4);
  Floats32 key_scales(whole), value_scales(width), balance(width);
  PackBalancedKeys(keys, width, length, whole, width, of_keys.data(), key_scales.data(), balance.data());
  PackValuesInInt8(values, width, length, whole, width, of_values.data(), value_scales.data());
  for (int64_t i = 0; i < count * width; ++i) balanced[i] = queries[i] * balance[i % width];
  auto groups = [](const Ints32& panels) { return reinterpret_cast<const Ints*>(panels.data()); };
  const Matrix k{kInt8, groups(of_keys), key_scales.data(), whole / kPanel, width / 4, 2};
  const Matrix v{kInt8, groups(of_values), value_scales.data(), width / kPanel, whole / 4, 2};
  AttendPanels(k, v, balanced, width, count, length, [](int64_t, float*) {}, found, width);
}
