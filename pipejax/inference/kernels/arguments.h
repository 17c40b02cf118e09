// What a call is given: arrays, matrices, and the layers that they make up.
#pragma once

#include <cstdint>

#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pipejax {

// Reads a call's arguments in order, and remembers whether all are as they must be.
class Arguments {
 public:
  explicit Arguments(ffi::RemainingArgs& given) : given_(given) {}

  template <typename T = float>
  const T* Array(int64_t count) {
    const ffi::AnyBuffer found = Next();
    good_ &= static_cast<int64_t>(found.element_count()) == count;
    return static_cast<const T*>(found.untyped_data());
  }

  // Numbers of the next one.
  int64_t Count() const { return next_ < given_.size() ? given_.get<ffi::AnyBuffer>(next_).value().element_count() : 0; }

  // [outputs, inputs] in panels, and the scale after it.
  Matrix Weights(int64_t outputs, int64_t inputs) {
    const Matrix matrix = Panels(1, outputs, inputs);
    const float* scale = Array(matrix.kind == kInt8 ? outputs : 0);
    return {matrix.kind, matrix.groups, scale, matrix.panels, matrix.depth, matrix.digits};
  }

  // The first of so many matrices [outputs, inputs] in panels, one after the other.
  Matrix Panels(int64_t count, int64_t outputs, int64_t inputs) {
    const ffi::AnyBuffer found = Next();
    const auto type = found.element_type();
    const Kind kind = type == ffi::F32 ? kFloat32 : type == ffi::BF16 ? kBfloat16 : kInt8;
    good_ &= (kind != kInt8 || type == ffi::S8) && static_cast<int64_t>(found.element_count()) == count * outputs * inputs;
    const int64_t depth = inputs / (kind == kFloat32 ? 1 : kind == kBfloat16 ? 2 : 4);
    return {kind, static_cast<const Ints*>(found.untyped_data()), nullptr, outputs / kPanel, depth, kDigits[kind]};
  }

  bool Good() const { return good_ && next_ == given_.size(); }

 private:
  ffi::AnyBuffer Next() {
    good_ &= next_ < given_.size();
    return given_.get<ffi::AnyBuffer>(good_ ? next_++ : 0).value();
  }

  ffi::RemainingArgs& given_;
  size_t next_ = 0;
  bool good_ = true;
};

// The matrix that comes so many after this one.
inline Matrix After(const Matrix& first, int64_t number) {
  Matrix found = first;
  found.groups += number * first.panels * first.depth * kParts;
  return found;
}

// The same matrix, for columns in two digits where they would have one.
inline Matrix Finer(Matrix matrix) {
  if (matrix.digits) matrix.digits = 2;
  return matrix;
}

struct FeedForward {
  const float* norm;
  Matrix inwards, outwards;

  FeedForward(Arguments& given, int64_t size, int64_t feed, bool gated)
      : norm(given.Array(size)), inwards(given.Weights(gated ? 2 * feed : feed, size)), outwards(given.Weights(size, feed)) {}
};

struct EncoderLayer {
  const float* norm;
  Matrix inwards, outwards;
  FeedForward feed_forward;

  EncoderLayer(Arguments& given, int64_t size, int64_t inner, int64_t feed, bool gated)
      : norm(given.Array(size)), inwards(given.Weights(3 * inner, size)), outwards(given.Weights(size, inner)),
        feed_forward(given, size, feed, gated) {}
};

struct DecoderLayer {
  const float* norm;
  Matrix inwards, outwards;
  const float* cross_norm;
  Matrix query, cross_outwards, keys, values;  // the latter two for float32: for a few columns digits are no faster
  FeedForward feed_forward;

  DecoderLayer(Arguments& given, int64_t size, int64_t width, int64_t heads, int64_t feed, bool gated, int64_t batch,
               int64_t length, int64_t slots)
      : norm(given.Array(size)), inwards(given.Weights(3 * heads * width, size)),
        outwards(given.Weights(size, heads * width)), cross_norm(given.Array(size)),
        query(given.Weights(heads * width, size)), cross_outwards(given.Weights(size, heads * width)),
        keys(given.Panels(batch * heads, length, width)), values(given.Panels(batch * heads, width, length)),
        feed_forward(given, size, feed, gated) {
    keys.digits = values.digits = 0;
    given.Array(batch * heads * width * slots), given.Array(batch * heads * width * slots);  // the results, in place
  }
};

}  // namespace pipejax
