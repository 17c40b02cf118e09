// Unpacks the arguments of a call, in the order of the tables in fields.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

#include "fields.h"
#include "products.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace pipejax {

using f32 = float;
using i32 = int32_t;
using pred = bool;

// Reads the arguments of a call in order, and remembers the first one with a wrong type or shape.
class Arguments {
 public:
  explicit Arguments(ffi::RemainingArgs& given) : given_(given) {}

  template <typename T>
  const T* Array(const char* name, std::initializer_list<int64_t> shape) {
    constexpr auto type = std::is_same_v<T, f32> ? ffi::F32 : std::is_same_v<T, i32> ? ffi::S32 : ffi::PRED;
    const ffi::AnyBuffer found = Next(name);
    Check(name, found, type, shape);
    return static_cast<const T*>(found.untyped_data());
  }

  // A matrix [outputs, inputs] in panels, followed by its scale.
  Matrix Weights(const char* name, int64_t outputs, int64_t inputs) {
    const ffi::AnyBuffer found = Next(name);
    const Kind kind = KindOf(found);
    const int64_t depth = inputs / kNumbers[kind];
    Check(name, found, kTypes[kind], {outputs / kPanel, depth, kPanel, kNumbers[kind]});
    const f32* scale = Array<f32>(name, {kind == kInt8 ? outputs : 0});
    return {kind, static_cast<const Ints*>(found.untyped_data()), scale, outputs / kPanel, depth, kDigits[kind]};
  }

  // The first of examples * heads matrices [outputs, inputs] in panels, which are consecutive and are followed by their
  // scales. They are multiplied with columns in float32, since for a few columns digits are not faster. For int8 with VNNI
  // the columns have two digits: with one digit, too many small attention weights would be rounded to zero. With tiles (AMX)
  // the choice was not measured.
  Matrix Panels(const char* name, int64_t examples, int64_t heads, int64_t outputs, int64_t inputs) {
    const ffi::AnyBuffer found = Next(name);
    const Kind kind = KindOf(found);
    const int64_t depth = inputs / kNumbers[kind];
    Check(name, found, kTypes[kind], {examples, heads, outputs / kPanel, depth, kPanel, kNumbers[kind]});
    const f32* scale = Array<f32>(name, {examples, heads, kind == kInt8 ? outputs : 0});
    const int digits = kind == kInt8 && !kTiles && kDigits[kInt8] ? 2 : 0;
    return {kind, static_cast<const Ints*>(found.untyped_data()), scale, outputs / kPanel, depth, digits};
  }

  // Sets the number of the layer to which the next arguments belong, for error messages.
  void Layer(int64_t number) { layer_ = number; }

  // A message about the first wrong argument, or about a wrong number of arguments; "" if there is no error.
  std::string Wrong() const {
    if (!wrong_.empty() || next_ == given_.size()) return wrong_;
    return "found " + std::to_string(given_.size()) + " arguments; expected " + std::to_string(next_);
  }

 private:
  static constexpr ffi::DataType kTypes[] = {ffi::F32, ffi::BF16, ffi::S8};  // indexed by Kind
  static constexpr int64_t kNumbers[] = {1, 2, 4};                           // numbers in 32 bits, indexed by Kind

  static Kind KindOf(const ffi::AnyBuffer& found) {
    const auto type = found.element_type();
    return type == ffi::F32 ? kFloat32 : type == ffi::BF16 ? kBfloat16 : kInt8;
  }

  ffi::AnyBuffer Next(const char* name) {
    if (next_ < given_.size()) return given_.get<ffi::AnyBuffer>(next_++).value();
    if (wrong_.empty()) wrong_ = Where(name) + ": found nothing; expected an argument";
    return given_.get<ffi::AnyBuffer>(0).value();
  }

  void Check(const char* name, const ffi::AnyBuffer& found, ffi::DataType type, std::initializer_list<int64_t> shape) {
    const auto own = found.dimensions();
    if (found.element_type() == type && own.size() == shape.size() && std::equal(own.begin(), own.end(), shape.begin())) return;
    if (!wrong_.empty()) return;
    std::ostringstream says;
    auto say = [&](ffi::DataType type, const int64_t* from, size_t rank) {
      says << type << " [";
      for (size_t i = 0; i < rank; ++i) says << (i ? ", " : "") << from[i];
      says << "]";
    };
    says << Where(name) << ": found ";
    say(found.element_type(), own.begin(), own.size());
    says << "; expected ";
    say(type, shape.begin(), shape.size());
    wrong_ = says.str();
  }

  std::string Where(const char* name) const {
    return layer_ < 0 ? name : "layer " + std::to_string(layer_) + ": " + name;
  }

  ffi::RemainingArgs& given_;
  size_t next_ = 0;
  int64_t layer_ = -1;
  std::string wrong_;
};

// Macros that define the struct of a table of numbers, and the struct of a table of fields whose shapes depend on them.
#define DECLARE_NUMBER(name) int64_t name;
#define READ_NUMBER(name) name = *at++;
#define COUNT_NUMBER(name) +1
#define NUMBERS(Name, TABLE)                                                      \
  struct Name {                                                                   \
    TABLE(DECLARE_NUMBER)                                                         \
    static constexpr size_t kCount = 0 TABLE(COUNT_NUMBER);                       \
    explicit Name(const int64_t* at) { TABLE(READ_NUMBER) }                       \
  };

#define KNOW_NUMBER(name) [[maybe_unused]] const int64_t name = numbers.name;
#define DECLARE_ARRAY(name, type, ...) const type* name;
#define DECLARE_MATRIX(name, ...) Matrix name;
#define READ_ARRAY(name, type, ...) name = given.Array<type>(#name, {__VA_ARGS__});
#define READ_MATRIX(name, ...) name = given.Weights(#name, __VA_ARGS__);
#define READ_PANELS(name, ...) name = given.Panels(#name, __VA_ARGS__);
#define FIELDS(Name, Numbers, NUMBERS_TABLE, TABLE)                               \
  struct Name {                                                                   \
    TABLE(DECLARE_ARRAY, DECLARE_MATRIX, DECLARE_MATRIX)                          \
    Name(Arguments& given, const Numbers& numbers) {                              \
      NUMBERS_TABLE(KNOW_NUMBER)                                                  \
      TABLE(READ_ARRAY, READ_MATRIX, READ_PANELS)                                 \
    }                                                                             \
  };

NUMBERS(StepNumbers, STEP_NUMBERS)
FIELDS(StepFields, StepNumbers, STEP_NUMBERS, STEP_FIELDS)
FIELDS(DecoderLayer, StepNumbers, STEP_NUMBERS, DECODER_LAYER_FIELDS)
NUMBERS(EncodeNumbers, ENCODE_NUMBERS)
FIELDS(EncodeFields, EncodeNumbers, ENCODE_NUMBERS, ENCODE_FIELDS)
FIELDS(EncoderLayer, EncodeNumbers, ENCODE_NUMBERS, ENCODER_LAYER_FIELDS)
FIELDS(MemoryLayer, EncodeNumbers, ENCODE_NUMBERS, MEMORY_FIELDS)
NUMBERS(ProductNumbers, PRODUCT_NUMBERS)
FIELDS(ProductFields, ProductNumbers, PRODUCT_NUMBERS, PRODUCT_FIELDS)
FIELDS(PeaksFields, ProductNumbers, PRODUCT_NUMBERS, PEAKS_FIELDS)

// Reads the fields of `count` layers.
template <typename Layer, typename Numbers>
std::vector<Layer> Layers(Arguments& given, const Numbers& numbers, int64_t count) {
  std::vector<Layer> found;
  found.reserve(count);
  for (int64_t layer = 0; layer < count; ++layer) given.Layer(layer), found.emplace_back(given, numbers);
  return found;
}

// The matrix that is `number` matrices of the same shape after `first`.
inline Matrix After(const Matrix& first, int64_t number) {
  Matrix found = first;
  found.groups += number * first.panels * first.apart * kParts;
  if (first.kind == kInt8) found.scale += number * first.Outputs();
  return found;
}

// The first panels of a matrix, which contain the first `outputs` outputs.
inline Matrix WithOutputs(Matrix matrix, int64_t outputs) {
  matrix.panels = (outputs + kPanel - 1) / kPanel;
  return matrix;
}

// A matrix restricted to its first `inputs` inputs, rounded up to a multiple of kPanel.
inline Matrix WithInputs(Matrix matrix, int64_t inputs) {
  matrix.depth = (inputs + kPanel - 1) / kPanel * kPanel / (matrix.Inputs() / matrix.depth);
  return matrix;
}

// The same matrix, whose columns have two digits if they would have one.
inline Matrix Finer(Matrix matrix) {
  if (matrix.digits) matrix.digits = 2;
  return matrix;
}

}  // namespace pipejax
