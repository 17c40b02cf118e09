// The encoder of a T5, and a step of its decoder, each in one call, for CPUs.
//
// A step consists of about a hundred matrix products and as many small operations between them. If each of them were a
// separate operation of XLA, starting and synchronising them would take as much time as the arithmetic. So one team of threads
// computes all of them in one call. `pipejax.model.t5` and `pipejax.inference.step_decoder` compute the same functions; tests
// compare them.
//
// The file is compiled for one of the instruction sets in `__init__.py` (LEVELS).
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "arguments.h"
#include "attention.h"
#include "operand.h"

namespace pipejax {
namespace {

// The operations that encoder and decoder layers have in common, on columns x [count, size].
struct Stack {
  Team& team;
  int64_t count, size, inner, feed;
  float epsilon;
  int activation;  // 0: relu, 1: gelu, 2: silu; the latter two have a gate
  Floats32& x;

  // y = w * norm(x).
  void OfNormed(const float* scale, const Matrix& w, const Results& y) {
    SetNormed(scale, w);
    operand.Times(team, w, y);
  }

  // Sets the operand, for a product with w, to norm(x).
  void SetNormed(const float* scale, const Matrix& w) {
    operand.Set(team, w, count, [&](int64_t c, float* room) {
      Norm(x.data() + c * size, scale, epsilon, size, room);
      return room;
    });
  }

  // x += w * columns.
  void Add(const Matrix& w, const Floats32& columns) {
    const int64_t inputs = w.Inputs();
    operand.Set(team, w, count, [&](int64_t c, float*) { return columns.data() + c * inputs; });
    operand.Times(team, w, {x.data(), size, kAdd});
  }

  // Adds the output of the feed-forward network to x.
  template <typename Layer>
  void Feed(const Layer& layer) {
    const int64_t wide = activation ? 2 * feed : feed;
    hidden.resize(count * wide);
    OfNormed(layer.feed_norm, layer.feed_inwards, {hidden.data(), wide, activation ? kPut : kPutPositive});
    if (!activation) return Add(layer.feed_outwards, hidden);
    operand.Set(team, layer.feed_outwards, count, [&](int64_t c, float* room) {
      const float *gate = hidden.data() + c * wide, *value = gate + feed;
      for (int64_t i = 0; i < feed; i += kLanes)
        Store(room + i, (activation == 1 ? Gelu(Load(gate + i)) : Silu(Load(gate + i))) * Load(value + i));
      return room;
    });
    operand.Times(team, layer.feed_outwards, {x.data(), size, kAdd});
  }

  Operand& operand;
  Floats32& hidden;
};

// The slots of an example in the order in which attention sums them.
struct Order {
  std::vector<int32_t> slots;
  bool fed;  // whether this is the order in which they were fed, so that slots[i] = i
};

// The buffers of a call, which are kept for the next call.
struct Rooms {
  Floats32 x, projected, found, hidden, bias;
  std::vector<int64_t> columns, examples, places, asking, reach;
  std::vector<int32_t> tokens;
  std::vector<Order> order;
  Operand operand;
};

constexpr int32_t kNowhere = 1 << 30;  // the row of a slot that no query sees; NOWHERE in gathering.py

ffi::Error Wrong(const std::string& what) { return ffi::Error::InvalidArgument(what); }

template <typename T>
T* ResultAt(ffi::RemainingRets& results, int64_t number) {
  return static_cast<T*>((*results.get<ffi::AnyBuffer>(number).value()).untyped_data());
}

// The parts of a decoder step, in the order in which they are called.
struct DecoderStep : StepNumbers, StepFields {
  Team& team;
  Rooms& rooms;
  const int64_t inner = H * K, row_size = 3 * inner;
  int64_t count = 0, room = 0;  // number of columns; number of slots that they may see, rounded up to whole registers

  // Collects the columns, one for each real query. A query sees its own slot, so a place that does not see it is a filler.
  void Gather() {
    auto &columns = rooms.columns, &places = rooms.places, &examples = rooms.examples;
    columns.clear(), places.clear(), examples.assign(B + 1, 0);
    for (int64_t n = 0; n < N; ++n) {
      const int64_t at = place[n];
      if (at >= B * Q || !mask[at * C + start[at / Q] + at % Q]) continue;
      columns.push_back(n), places.push_back(at);
      ++examples[at / Q + 1];
    }
    rooms.asking.clear();  // examples with columns; in the batch of a server most examples may have none
    rooms.reach.assign(B, 1);  // for each source, the number of slots up to its last token
    for (int64_t b = 0; b < B; ++b) {
      if (examples[b + 1]) rooms.asking.push_back(b);
      for (int64_t l = L; l > rooms.reach[b]; --l)
        if (memory_mask[b * L + l - 1]) rooms.reach[b] = l;
    }
    for (int64_t b = 0; b < B; ++b) examples[b + 1] += examples[b];  // examples[b]: the first column of example b
    count = columns.size();
    room = (*std::max_element(start, start + B) + Q + kLanes - 1) / kLanes * kLanes;
  }

  // Sorts the slots by their time and row on the grid, instead of the order in which they were fed. A sum in another order may
  // differ in the last bits. Drafts and other examples of the batch change the order of feeding, and must not change answers.
  void SortSlots() {
    rooms.order.resize(B);
    for (int64_t b : rooms.asking) {
      const int32_t *rows = row + b * C, *times = time + b * C;
      auto& chosen = rooms.order[b].slots;
      chosen.clear();
      for (int32_t slot = 0; slot < start[b] + Q; ++slot)
        if (rows[slot] < kNowhere) chosen.push_back(slot);
      auto earlier = [&](int32_t one, int32_t other) {
        return times[one] != times[other] ? times[one] < times[other] : rows[one] < rows[other];
      };
      const bool sorted = std::is_sorted(chosen.begin(), chosen.end(), earlier);
      rooms.order[b].fed = sorted && (chosen.empty() || chosen.back() + size_t{1} == chosen.size());
      if (!sorted) std::stable_sort(chosen.begin(), chosen.end(), earlier);
    }
  }

  void Embed() {
    rooms.x.resize(count * D), rooms.found.resize(count * inner);
    for (int64_t c = 0; c < count; ++c)
      Row(embedding, std::clamp<int64_t>(tokens[rooms.columns[c]], 0, V - 1), rooms.x.data() + c * D);
  }

  // Sets the bias of each column and head for the slots in their order, from the given table of the relative bias.
  void SetBias(int64_t table) {
    rooms.bias.resize(count * H * room);
    team.Run(count * H, 4, [&](int64_t i) {
      const int64_t at = rooms.places[i / H], b = at / Q, own = position[at], farthest = P - 1;
      const bool* seen = mask + at * C;
      const int32_t* others = key_position + b * C;
      const float* by_distance = bias + (table * H + i % H) * P;
      float* to = rooms.bias.data() + i * room;
      for (int32_t slot : rooms.order[b].slots)
        *to++ = seen[slot] ? by_distance[std::clamp<int64_t>(own - others[slot], 0, farthest)] : -1e9f;
    });
  }

  void Layer(Stack& stack, const DecoderLayer& layer, float* keys, float* values) {
    rooms.projected.resize(count * row_size);
    stack.OfNormed(layer.self_norm, layer.self_inwards, {rooms.projected.data(), row_size});
    team.Run(rooms.asking.size() * H, 1, [&](int64_t task) { AttendCache(rooms.asking[task / H], task % H, keys, values); });
    stack.Add(layer.self_outwards, rooms.found);
    stack.OfNormed(layer.cross_norm, layer.cross_query, {rooms.projected.data(), inner});
    team.Run(rooms.asking.size() * H, 1, [&](int64_t task) { AttendMemory(rooms.asking[task / H], task % H, layer); });
    stack.Add(layer.cross_outwards, rooms.found);
    stack.Feed(layer);
  }

  // Computes self-attention of the columns of an example in one head, after writing their keys and values to the cache.
  void AttendCache(int64_t b, int64_t h, float* keys, float* values) {
    const int64_t i = b * H + h, used = start[b] + Q, from = rooms.examples[b], to = rooms.examples[b + 1];
    const Cache cache{keys + i * K * S, values + i * S * K, S, K};
    const float* first = rooms.projected.data() + h * K;
    const Order& order = rooms.order[b];
    const int64_t filled = order.slots.size();
    const int32_t* slots = order.slots.data();
    for (int64_t c = from; c < to; ++c)
      cache.Put(start[b] + rooms.places[c] % Q, first + c * row_size + inner, first + c * row_size + 2 * inner);
    for (int64_t c = from; c < to; c += 2) {
      auto attend = [&](auto slot) {
        WithConstant<2>(std::min<int64_t>(2, to - c), [&](auto pair) {
          const float* of_pair = rooms.bias.data() + (c * H + h) * room;
          float* found = rooms.found.data() + c * inner + h * K;
          cache.Attend<decltype(pair)::value>(first + c * row_size, row_size, slot, filled, used, of_pair, H * room, found,
                                              inner);
        });
      };
      if (order.fed) attend([](int64_t i) { return i; });  // faster
      else attend([&](int64_t i) { return slots[i]; });
    }
  }

  // Computes cross-attention of the columns of an example in one head.
  void AttendMemory(int64_t b, int64_t h, const DecoderLayer& layer) {
    const int64_t i = b * H + h, from = rooms.examples[b], length = rooms.reach[b];
    const bool* seen = memory_mask + b * L;
    auto add = [&](int64_t, float* scores) {
      for (int64_t l = 0; l < length; ++l) scores[l] += seen[l] ? 0.0f : -1e9f;
    };
    const int64_t at = from * inner + h * K;
    const float* balance = layer.memory_balance + i * K;
    for (float* query = rooms.projected.data() + at; query < rooms.projected.data() + rooms.examples[b + 1] * inner; query += inner)
      for (int64_t k = 0; k < K; k += kLanes) Store(query + k, Load(query + k) * Load(balance + k));
    AttendPanels(WithOutputs(After(layer.memory_keys, i), length), WithInputs(After(layer.memory_values, i), length),
                 rooms.projected.data() + at, inner,
                 rooms.examples[b + 1] - from, length, add, rooms.found.data() + at, inner);
  }

  // Sets `chosen`, i32 [N], to the token with the highest logit of each query; 0 for fillers.
  void Choose(Stack& stack, int32_t* chosen) {
    const Matrix finer = Finer(head);
    rooms.tokens.resize(count);
    stack.SetNormed(norm, finer);
    rooms.operand.Highest(team, finer, words, rooms.tokens.data());
    std::fill(chosen, chosen + N, 0);
    for (int64_t c = 0; c < count; ++c) chosen[rooms.columns[c]] = rooms.tokens[c];
  }

  // Sets the logits, f32 [N, V]; 0 for fillers.
  void Head(Stack& stack, float* logits) {
    const bool in_place = count == N;  // then the columns are the queries in order
    if (!in_place) rooms.hidden.resize(count * V);
    float* found = in_place ? logits : rooms.hidden.data();
    stack.OfNormed(norm, Finer(head), {found, V});
    if (in_place) return;
    std::fill(logits, logits + N * V, 0.0f);
    for (int64_t c = 0; c < count; ++c) std::copy(found + c * V, found + (c + 1) * V, logits + rooms.columns[c] * V);
  }
};

// Computes a decoder step (STEP_FIELDS and DECODER_LAYER_FIELDS in fields.h). The results are the logits f32 [N, V] or the
// tokens with the highest logits i32 [N], followed by the keys and values of each layer's cache, which are written in place.
// One more result, if there is one, gets the outputs of the decoder, f32 [N, D].
ffi::Error Step(ffi::ThreadPool pool, ffi::RemainingArgs given, ffi::RemainingRets results, ffi::Span<const int64_t> attribute,
                float epsilon) {
  if (attribute.size() != StepNumbers::kCount) return Wrong("step: numbers of another table");
  const StepNumbers numbers(attribute.begin());
  Arguments arguments(given);
  const StepFields fields(arguments, numbers);
  const auto layers = Layers<DecoderLayer>(arguments, numbers, numbers.layers);
  if (const std::string wrong = arguments.Wrong(); !wrong.empty()) return Wrong("step: " + wrong);
  if (numbers.tables != 1 && numbers.tables != numbers.layers) return Wrong("step: tables of some layers");
  const size_t end = 1 + 2 * layers.size();
  const bool outputs = results.size() == end + 1;
  if (numbers.S < numbers.C || numbers.S % kPanel || results.size() != end + outputs)
    return Wrong("step: a cache of another size");
  if (outputs && static_cast<int64_t>((*results.get<ffi::AnyBuffer>(end).value()).element_count()) != numbers.N * numbers.D)
    return Wrong("step: outputs of another size");
  const ffi::AnyBuffer answers = *results.get<ffi::AnyBuffer>(0).value();
  const bool greedy = answers.element_type() == ffi::S32;
  if (numbers.words < 1 || numbers.words > numbers.V ||
      static_cast<int64_t>(answers.element_count()) != numbers.N * (greedy ? 1 : numbers.V))
    return Wrong("step: other words than the head has");
  const auto [least, most] = std::minmax_element(fields.start, fields.start + numbers.B);
  if (*least < 0 || *most + numbers.Q > numbers.C) return Wrong("step: a cache that is full");

  thread_local Rooms kept;
  Rooms& rooms = kept;  // the buffers of the leading thread, which all threads use
  Team team(pool);
  DecoderStep step{numbers, fields, team, rooms};
  step.Gather();
  step.SortSlots();
  step.Embed();
  Stack stack{team, step.count, step.D, step.inner, step.F, epsilon, static_cast<int>(step.activation),
              rooms.x, rooms.operand, rooms.hidden};
  for (size_t i = 0; i < layers.size(); ++i) {
    if (i < static_cast<size_t>(step.tables)) step.SetBias(i);
    step.Layer(stack, layers[i], ResultAt<float>(results, 1 + 2 * i), ResultAt<float>(results, 2 + 2 * i));
  }
  if (greedy) step.Choose(stack, ResultAt<int32_t>(results, 0));
  else step.Head(stack, ResultAt<float>(results, 0));
  if (outputs) {
    float* found = ResultAt<float>(results, end);
    std::fill_n(found, step.N * step.D, 0.0f);
    for (int64_t c = 0; c < step.count; ++c)
      Norm(rooms.x.data() + c * step.D, step.norm, epsilon, step.D, found + rooms.columns[c] * step.D);
  }
  return ffi::Error::Success();
}

// Computes the encoder (ENCODE_FIELDS, ENCODER_LAYER_FIELDS and MEMORY_FIELDS in fields.h). The results for each layer of the
// decoder are keys [B, H, M, K], their scales, the factors of queries [B, H, K], values [B, H, K, M] and their scales, in the
// form of PANELS in fields.h, with zeros after the length of a source. One more result, if there is one, gets the outputs of
// the encoder, f32 [B, L, D]. The self-attention of the encoder is computed in float32 if keys and values are float32.
// Otherwise it is computed in bfloat16, or in int8 if columns of int8 weights have one digit. Without encoder layers,
// `embedded` has the outputs of an encoder, which are not normalised again.
ffi::Error Encode(ffi::ThreadPool pool, ffi::RemainingArgs given, ffi::RemainingRets results, ffi::Span<const int64_t> attribute,
                  float epsilon) {
  if (attribute.size() != EncodeNumbers::kCount) return Wrong("encode: numbers of another table");
  const EncodeNumbers numbers(attribute.begin());
  Arguments arguments(given);
  const EncodeFields fields(arguments, numbers);
  const auto layers = Layers<EncoderLayer>(arguments, numbers, numbers.layers);
  const auto memories = Layers<MemoryLayer>(arguments, numbers, numbers.memories);
  if (const std::string wrong = arguments.Wrong(); !wrong.empty()) return Wrong("encode: " + wrong);
  if (numbers.tables != 1 && numbers.tables != numbers.layers) return Wrong("encode: tables of some layers");
  const bool encoded = layers.empty();
  const bool outputs = results.size() == 5 * memories.size() + 1;
  if (results.size() != 5 * memories.size() + outputs || memories.empty()) return Wrong("encode: other results than memories");
  const int64_t batch = numbers.B, length = numbers.L, size = numbers.D, heads = numbers.H, width = numbers.K;
  const int64_t inner = heads * width, memory = numbers.M;
  const auto type = (*results.get<ffi::AnyBuffer>(0).value()).element_type();
  const Kind kind = type == ffi::F32 ? kFloat32 : kBfloat16;
  const bool in_int8 = type == ffi::S8;
  const int64_t whole = batch * inner * memory, scales = in_int8 ? batch : 0;
  const int64_t sizes[] = {whole, scales * heads * memory, batch * inner, whole, scales * inner};
  for (size_t i = 0; i < 5 * memories.size(); ++i) {
    const ffi::AnyBuffer found = *results.get<ffi::AnyBuffer>(i).value();
    if (static_cast<int64_t>(found.element_count()) != sizes[i % 5] || found.element_type() != (i % 5 % 3 ? ffi::F32 : type))
      return Wrong("encode: a memory of another size");
  }
  if (memory < length || memory % kPanel) return Wrong("encode: a memory of another size");
  if (outputs && static_cast<int64_t>((*results.get<ffi::AnyBuffer>(5 * memories.size()).value()).element_count()) !=
                     batch * length * size)
    return Wrong("encode: outputs of another size");

  thread_local Rooms kept;
  Rooms& rooms = kept;  // the buffers of the leading thread, which all threads use
  Team team(pool);
  const int64_t depth = in_int8 ? 4 : kind == kBfloat16 ? 2 : 1;
  auto& first = rooms.examples;  // the first column of each example; only real tokens have columns
  first.assign(1, 0);
  for (int64_t b = 0; b < batch; ++b) first.push_back(first[b] + std::clamp<int64_t>(fields.length[b], 0, length));
  const int64_t count = first[batch];
  rooms.x.resize(count * size), rooms.found.resize(count * inner);
  for (int64_t b = 0; b < batch; ++b)
    std::copy(fields.embedded + b * length * size, fields.embedded + b * length * size + (first[b + 1] - first[b]) * size,
              rooms.x.data() + first[b] * size);

  Stack stack{team, count, size, inner, numbers.F, epsilon, static_cast<int>(numbers.activation),
              rooms.x, rooms.operand, rooms.hidden};
  auto& projected = rooms.projected;
  for (size_t number = 0; number < layers.size(); ++number) {
    const EncoderLayer& layer = layers[number];
    const int64_t row = 3 * inner, table = numbers.tables == 1 ? 0 : number;
    projected.resize(count * row);
    stack.OfNormed(layer.norm, layer.inwards, {projected.data(), row});
    team.Run(batch * heads, 1, [&](int64_t i) {
      const int64_t b = i / heads, h = i % heads, real = first[b + 1] - first[b];
      const float *queries = projected.data() + first[b] * row + h * width, *keys = queries + inner, *values = keys + inner;
      const float* bias = fields.bias + (table * heads + h) * (2 * length - 1) + length - 1;  // the bias of offset 0
      float* found = rooms.found.data() + first[b] * inner + h * width;
      if (layer.inwards.digits == 1) AttendBlocks(queries, keys, values, row, real, width, bias, found, inner);
      else AttendWhole(kind, queries, keys, values, row, real, width, bias, found, inner);
    });
    stack.Add(layer.outwards, rooms.found);
    stack.Feed(layer);
  }
  if (outputs) {
    float* found = ResultAt<float>(results, 5 * memories.size());
    std::fill_n(found, batch * length * size, 0.0f);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t c = first[b]; c < first[b + 1]; ++c)
        Norm(rooms.x.data() + c * size, fields.norm, epsilon, size, found + (b * length + c - first[b]) * size);
  }
  for (size_t layer = 0; layer < memories.size(); ++layer) {
    projected.resize(count * 2 * inner);
    const Matrix& projection = memories[layer].projection;
    if (encoded) rooms.operand.Set(team, projection, count, [&](int64_t c, float*) { return rooms.x.data() + c * size; });
    else stack.SetNormed(fields.norm, projection);
    rooms.operand.Times(team, projection, {projected.data(), 2 * inner});
    int32_t *keys = ResultAt<int32_t>(results, 5 * layer), *values = ResultAt<int32_t>(results, 5 * layer + 3);
    float *key_scales = ResultAt<float>(results, 5 * layer + 1), *value_scales = ResultAt<float>(results, 5 * layer + 4);
    float* balance = ResultAt<float>(results, 5 * layer + 2);
    team.Run(batch * heads, 1, [&](int64_t i) {
      const int64_t b = i / heads, h = i % heads, real = first[b + 1] - first[b];
      const float* at = projected.data() + first[b] * 2 * inner + h * width;
      int32_t *own_keys = keys + i * memory * width / depth, *own_values = values + i * memory * width / depth;
      if (in_int8) {
        PackBalancedKeys(at, 2 * inner, real, memory, width, own_keys, key_scales + i * memory, balance + i * width);
        PackValuesInInt8(at + inner, 2 * inner, real, memory, width, own_values, value_scales + i * width);
      } else {
        std::fill_n(balance + i * width, width, 1.0f);
        PackKeys(kind, at, 2 * inner, real, memory, width, own_keys);
        PackValues(kind, at + inner, 2 * inner, real, memory, width, own_values);
      }
    });
  }
  return ffi::Error::Success();
}

// Computes a matrix product (PRODUCT_FIELDS in fields.h), f32 [N, O].
ffi::Error Product(ffi::ThreadPool pool, ffi::RemainingArgs given, ffi::ResultBuffer<ffi::F32> result,
                   ffi::Span<const int64_t> attribute) {
  if (attribute.size() != ProductNumbers::kCount) return Wrong("product: numbers of another table");
  const ProductNumbers numbers(attribute.begin());
  Arguments arguments(given);
  const ProductFields fields(arguments, numbers);
  if (const std::string wrong = arguments.Wrong(); !wrong.empty()) return Wrong("product: " + wrong);
  if (static_cast<int64_t>(result->element_count()) != numbers.N * numbers.O) return Wrong("product: a result of another size");
  thread_local Operand kept;
  Operand& operand = kept;  // the operand of the leading thread, which all threads use
  constexpr int64_t kSmall = 1 << 20;  // multiplications below which the leader computes the product alone
  Team team(pool, numbers.N * numbers.I * numbers.O < kSmall);
  const Matrix matrix = numbers.finer ? Finer(fields.matrix) : fields.matrix;
  operand.Set(team, matrix, numbers.N, [&](int64_t c, float*) { return fields.columns + c * numbers.I; });
  operand.Times(team, matrix, {result->typed_data(), numbers.O});
  return ffi::Error::Success();
}

// Computes the highest products of each column (PEAKS_FIELDS in fields.h), f32 [N, O]. Products that may be the highest are
// exact. In place of others there are upper bounds, which are lower than the highest product by more than `margin`. The bounds
// come from the int8 copy of the matrix, which has a quarter of the bytes. All products are exact if the lower bound of the
// highest is farther from 0 than `limit`, or if the column is so small or large that bounds might underflow or overflow.
ffi::Error Peaks(ffi::ThreadPool pool, ffi::RemainingArgs given, ffi::ResultBuffer<ffi::F32> result,
                 ffi::Span<const int64_t> attribute, float margin, float limit) {
  if (attribute.size() != ProductNumbers::kCount) return Wrong("peaks: numbers of another table");
  const ProductNumbers numbers(attribute.begin());
  Arguments arguments(given);
  const PeaksFields fields(arguments, numbers);
  if (const std::string wrong = arguments.Wrong(); !wrong.empty()) return Wrong("peaks: " + wrong);
  const int64_t count = numbers.N, inputs = numbers.I, outputs = numbers.O;
  if (static_cast<int64_t>(result->element_count()) != count * outputs) return Wrong("peaks: a result of another size");
  if (fields.matrix.kind != kFloat32 || fields.rough.kind != kInt8) return Wrong("peaks: matrices of other kinds");
  const float *columns = fields.columns, *apart = fields.apart;
  float* found = result->typed_data();
  constexpr double kSmall = 0x1p-40, kLarge = 0x1p60;
  std::vector<float> lengths(count), floors(count, -INFINITY);
  for (int64_t c = 0; c < count; ++c) {
    double squares = 0;
    for (int64_t k = 0; k < inputs; ++k) squares += static_cast<double>(columns[c * inputs + k]) * columns[c * inputs + k];
    const double length = std::sqrt(squares) * (1 + 1e-6);
    const bool bounded = length >= kSmall && length <= kLarge;  // SMALL and LARGE in products.py; false if length is NaN
    lengths[c] = bounded ? static_cast<float>(length) : INFINITY;
  }
  constexpr int64_t kTask = 8;  // panels of a task
  const int64_t panels = fields.rough.panels, tasks = (panels + kTask - 1) / kTask;
  std::vector<float> of_tasks(tasks * count, -INFINITY);
  Team team(pool);
  team.Run(tasks, 1, [&](int64_t i) {
    const int64_t from = i * kTask, to = std::min(panels, from + kTask);
    ByWidening(from, to, fields.rough, columns, inputs, count, {found, outputs});
    for (int64_t c = 0; c < count; ++c)
      for (int64_t o = from * kPanel; o < to * kPanel; ++o) {
        const float least = found[c * outputs + o] - apart[o] * lengths[c];
        if (least > of_tasks[i * count + c]) of_tasks[i * count + c] = least;
      }
  });
  for (int64_t c = 0; c < count; ++c) {
    for (int64_t i = 0; i < tasks; ++i) floors[c] = std::max(floors[c], of_tasks[i * count + c]);
    floors[c] = std::abs(floors[c]) <= limit ? floors[c] - margin : -INFINITY;
  }
  team.Run(tasks, 1, [&](int64_t i) {
    for (int64_t panel = i * kTask; panel < std::min(panels, (i + 1) * kTask); ++panel) {
      bool lower = true;  // whether all bounds are below the floors; a comparison with NaN is false
      for (int64_t c = 0; c < count; ++c)
        for (int64_t o = panel * kPanel; o < (panel + 1) * kPanel; ++o) {
          float& most = found[c * outputs + o];
          most += apart[o] * lengths[c];
          lower &= most < floors[c];
        }
      if (!lower) ByWidening(panel, panel + 1, fields.matrix, columns, inputs, count, {found, outputs});
    }
  });
  return ffi::Error::Success();
}

// Returns the number of steps left, negated if the switch is set: an i32 in host memory at `address`, low half first.
ffi::Error Left(ffi::Buffer<ffi::S32> left, ffi::Buffer<ffi::U32> address, ffi::ResultBuffer<ffi::S32> result) {
  if (left.element_count() != 1 || address.element_count() != 2 || result->element_count() != 1)
    return Wrong("left: arguments of other sizes");
  const uint32_t* halves = address.typed_data();
  const auto* thrown = reinterpret_cast<const int32_t*>(uintptr_t{halves[1]} << 32 | halves[0]);
  *result->typed_data() = __atomic_load_n(thrown, __ATOMIC_RELAXED) ? -*left.typed_data() : *left.typed_data();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pipejax

// Whether the system allows this process to use the instructions of this level. Tiles (AMX) must be requested.
extern "C" int pipejax_ready() {
#ifdef __AMX_TILE__
  constexpr int kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return 1;
#endif
}

#define STACK \
  ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().RemainingRets() \
      .Attr<ffi::Span<const int64_t>>("numbers").Attr<float>("epsilon")
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_step, pipejax::Step, STACK);
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_encode, pipejax::Encode, STACK);
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_product, pipejax::Product, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs()
                              .Ret<ffi::Buffer<ffi::F32>>().Attr<ffi::Span<const int64_t>>("numbers"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_peaks, pipejax::Peaks, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs()
                              .Ret<ffi::Buffer<ffi::F32>>().Attr<ffi::Span<const int64_t>>("numbers")
                              .Attr<float>("margin").Attr<float>("limit"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_left, pipejax::Left, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>()
                              .Arg<ffi::Buffer<ffi::U32>>().Ret<ffi::Buffer<ffi::S32>>());
