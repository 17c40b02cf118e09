// A T5's encoder, and a step of its decoder, each in one call, for CPUs.
//
// A step is about a hundred products and as many small things between them. As operations of their own they would cost as
// much in being started and waited for as in arithmetic, so a team of threads goes through all of them together.
// The same functions as `pipejax.model.t5` and `pipejax.inference.step_decoder` compute, and tests hold them together.
//
// Compiled once for each level of processor that `__init__.py` names.
#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "arguments.h"
#include "attention.h"
#include "blocks.h"
#include "operand.h"

namespace pipejax {
namespace {

// What a layer of either stack does with columns [count, size].
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

  // The operand for w is norm(x).
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

// An example's slots in the order in which they are summed.
struct Order {
  std::vector<int32_t> slots;
  bool fed;  // that in which they were fed: each is its own number
};

// What a call needs room for; it keeps the room for the next.
struct Rooms {
  Floats32 x, projected, found, hidden, bias;
  std::vector<int64_t> columns, examples, places, asking, reach;
  std::vector<int32_t> tokens;
  std::vector<Order> order;
  Operand operand;
};

constexpr int32_t kNowhere = 1 << 30;  // the row of a slot that nobody sees, as in gathering.py

ffi::Error Wrong(const std::string& what) { return ffi::Error::InvalidArgument(what); }

template <typename T>
T* ResultAt(ffi::RemainingRets& results, int64_t number) {
  return static_cast<T*>((*results.get<ffi::AnyBuffer>(number).value()).untyped_data());
}

// A step of the decoder: its parts, in the order in which they are called.
struct DecoderStep : StepNumbers, StepFields {
  Team& team;
  Rooms& rooms;
  const int64_t inner = H * K, row_size = 3 * inner;
  int64_t count = 0, room = 0;  // columns; slots that they may see, in whole lanes

  // The columns: only real queries are computed. One sees itself, so a place that sees nothing is a filler's.
  void Gather() {
    auto &columns = rooms.columns, &places = rooms.places, &examples = rooms.examples;
    columns.clear(), places.clear(), examples.assign(B + 1, 0);
    for (int64_t n = 0; n < N; ++n) {
      const int64_t at = place[n];
      if (at >= B * Q || !mask[at * C + start[at / Q] + at % Q]) continue;
      columns.push_back(n), places.push_back(at);
      ++examples[at / Q + 1];
    }
    rooms.asking.clear();  // examples with columns: in a server's batch most places may be empty
    rooms.reach.assign(B, 1);  // slots of a source up to its last token
    for (int64_t b = 0; b < B; ++b) {
      if (examples[b + 1]) rooms.asking.push_back(b);
      for (int64_t l = L; l > rooms.reach[b]; --l)
        if (memory_mask[b * L + l - 1]) rooms.reach[b] = l;
    }
    for (int64_t b = 0; b < B; ++b) examples[b + 1] += examples[b];  // where an example's columns begin
    count = columns.size();
    room = (*std::max_element(start, start + B) + Q + kLanes - 1) / kLanes * kLanes;
  }

  // Slots as they lie on the grid, not as they were fed: sums in another order have other last bits, and where drafts or
  // other examples of a batch change what is fed when, the answer would not be the same.
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

  // The bias of each column and head for the slots in their order, by so many a table.
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

  // What the columns of an example find in a head's cache, after their own keys and values have come into it.
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

  // What they find in the source.
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

  // Of each query the word with the highest logit i32 [N]; of fillers 0.
  void Choose(Stack& stack, int32_t* chosen) {
    const Matrix finer = Finer(head);
    rooms.tokens.resize(count);
    stack.SetNormed(norm, finer);
    rooms.operand.Highest(team, finer, words, rooms.tokens.data());
    std::fill(chosen, chosen + N, 0);
    for (int64_t c = 0; c < count; ++c) chosen[rooms.columns[c]] = rooms.tokens[c];
  }

  // Logits f32 [N, V]; of fillers 0.
  void Head(Stack& stack, float* logits) {
    const bool in_place = count == N;  // then columns are in order
    if (!in_place) rooms.hidden.resize(count * V);
    float* found = in_place ? logits : rooms.hidden.data();
    stack.OfNormed(norm, Finer(head), {found, V});
    if (in_place) return;
    std::fill(logits, logits + N * V, 0.0f);
    for (int64_t c = 0; c < count; ++c) std::copy(found + c * V, found + (c + 1) * V, logits + rooms.columns[c] * V);
  }
};

// A step, of fields.h. The results: logits f32 [N, V], or i32 [N] which of the words has the highest; a layer each keys
// and values of the cache, in place.
ffi::Error Step(ffi::ThreadPool pool, ffi::RemainingArgs given, ffi::RemainingRets results, ffi::Span<const int64_t> attribute,
                float epsilon) {
  if (attribute.size() != StepNumbers::kCount) return Wrong("step: numbers of another table");
  const StepNumbers numbers(attribute.begin());
  Arguments arguments(given);
  const StepFields fields(arguments, numbers);
  const auto layers = Layers<DecoderLayer>(arguments, numbers, numbers.layers);
  if (const std::string wrong = arguments.Wrong(); !wrong.empty()) return Wrong("step: " + wrong);
  if (numbers.tables != 1 && numbers.tables != numbers.layers) return Wrong("step: tables of some layers");
  if (numbers.S < numbers.C || numbers.S % kPanel || results.size() != 1 + 2 * layers.size())
    return Wrong("step: a cache of another size");
  const ffi::AnyBuffer answers = *results.get<ffi::AnyBuffer>(0).value();
  const bool greedy = answers.element_type() == ffi::S32;
  if (numbers.words < 1 || numbers.words > numbers.V ||
      static_cast<int64_t>(answers.element_count()) != numbers.N * (greedy ? 1 : numbers.V))
    return Wrong("step: other words than the head has");
  const auto [least, most] = std::minmax_element(fields.start, fields.start + numbers.B);
  if (*least < 0 || *most + numbers.Q > numbers.C) return Wrong("step: a cache that is full");

  thread_local Rooms kept;
  Rooms& rooms = kept;  // the one of the thread that leads, for all
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
  return ffi::Error::Success();
}

// The encoder, of fields.h. The results: a layer of the decoder each keys [B, H, M, K], their scales, what queries are
// multiplied with [B, H, K], values [B, H, K, M] and their scales, as PANELS there, zeros past a source's length. The encoder's own attention is in float32 where they are, else
// in bfloat16, or in int8 where columns of int8 weights have one digit.
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
  if (results.size() != 5 * memories.size() || memories.empty()) return Wrong("encode: other results than memories");
  const int64_t batch = numbers.B, length = numbers.L, size = numbers.D, heads = numbers.H, width = numbers.K;
  const int64_t inner = heads * width, memory = numbers.M;
  const auto type = (*results.get<ffi::AnyBuffer>(0).value()).element_type();
  const Kind kind = type == ffi::F32 ? kFloat32 : kBfloat16;
  const bool in_int8 = type == ffi::S8;
  const int64_t whole = batch * inner * memory, scales = in_int8 ? batch : 0;
  const int64_t sizes[] = {whole, scales * heads * memory, batch * inner, whole, scales * inner};
  for (size_t i = 0; i < results.size(); ++i) {
    const ffi::AnyBuffer found = *results.get<ffi::AnyBuffer>(i).value();
    if (static_cast<int64_t>(found.element_count()) != sizes[i % 5] || found.element_type() != (i % 5 % 3 ? ffi::F32 : type))
      return Wrong("encode: a memory of another size");
  }
  if (memory < length || memory % kPanel) return Wrong("encode: a memory of another size");

  thread_local Rooms kept;
  Rooms& rooms = kept;  // the one of the thread that leads, for all
  Team team(pool);
  const int64_t depth = in_int8 ? 4 : kind == kBfloat16 ? 2 : 1;
  auto& first = rooms.examples;  // an example's first column: only real tokens are computed
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
      const float* bias = fields.bias + (table * heads + h) * (2 * length - 1) + length - 1;  // of a query's own key
      float* found = rooms.found.data() + first[b] * inner + h * width;
      if (layer.inwards.digits == 1) AttendBlocks(queries, keys, values, row, real, width, bias, found, inner);
      else AttendWhole(kind, queries, keys, values, row, real, width, bias, found, inner);
    });
    stack.Add(layer.outwards, rooms.found);
    stack.Feed(layer);
  }
  for (size_t layer = 0; layer < memories.size(); ++layer) {
    projected.resize(count * 2 * inner);
    stack.OfNormed(fields.norm, memories[layer].projection, {projected.data(), 2 * inner});
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

// A product of fields.h, f32 [N, O].
ffi::Error Product(ffi::ThreadPool pool, ffi::RemainingArgs given, ffi::ResultBuffer<ffi::F32> result,
                   ffi::Span<const int64_t> attribute) {
  if (attribute.size() != ProductNumbers::kCount) return Wrong("product: numbers of another table");
  const ProductNumbers numbers(attribute.begin());
  Arguments arguments(given);
  const ProductFields fields(arguments, numbers);
  if (const std::string wrong = arguments.Wrong(); !wrong.empty()) return Wrong("product: " + wrong);
  if (static_cast<int64_t>(result->element_count()) != numbers.N * numbers.O) return Wrong("product: a result of another size");
  thread_local Operand kept;
  Operand& operand = kept;  // the one of the thread that leads, for all
  constexpr int64_t kSmall = 1 << 20;  // products of two numbers
  Team team(pool, numbers.N * numbers.I * numbers.O < kSmall);
  const Matrix matrix = numbers.finer ? Finer(fields.matrix) : fields.matrix;
  operand.Set(team, matrix, numbers.N, [&](int64_t c, float*) { return fields.columns + c * numbers.I; });
  operand.Times(team, matrix, {result->typed_data(), numbers.O});
  return ffi::Error::Success();
}

// f32 [N, O]: a column's products that may be the highest, and bounds of all others that lie lower than it by `margin`. A
// quarter of the bytes is read for that. All are products where the highest is farther from 0 than `limit`, or where the
// column is so small or large that bounds might underflow or overflow.
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
    const bool bounded = length >= kSmall && length <= kLarge;  // as products.py has them; not if a number is none
    lengths[c] = bounded ? static_cast<float>(length) : INFINITY;
  }
  constexpr int64_t kTask = 8;  // panels
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
      bool lower = true;  // also where something is no number
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

// How many steps are left, below zero if the switch is thrown: an i32 of the host's at that address, low half first.
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

// Whether this process may use what this level needs; the system lends tiles on request.
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
