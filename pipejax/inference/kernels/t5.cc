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

  void Feed(const FeedForward& layer) {
    const int64_t wide = activation ? 2 * feed : feed;
    hidden.resize(count * wide);
    OfNormed(layer.norm, layer.inwards, {hidden.data(), wide, activation ? kPut : kPutPositive});
    if (!activation) return Add(layer.outwards, hidden);
    operand.Set(team, layer.outwards, count, [&](int64_t c, float* room) {
      const float *gate = hidden.data() + c * wide, *value = gate + feed;
      for (int64_t i = 0; i < feed; i += kLanes)
        Store(room + i, (activation == 1 ? Gelu(Load(gate + i)) : Silu(Load(gate + i))) * Load(value + i));
      return room;
    });
    operand.Times(team, layer.outwards, {x.data(), size, kAdd});
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
  std::vector<int64_t> columns, examples, places, asking;
  std::vector<int32_t> tokens;
  std::vector<Order> order;
  Operand operand;
};

constexpr int32_t kNowhere = 1 << 30;  // the row of a slot that nobody sees, as in gathering.py

ffi::Error Wrong(const char* what) { return ffi::Error::InvalidArgument(what); }

// The arguments, N = columns, Q = places of an example, S >= C whole panels of slots, in that order:
//   tokens i32 [N]; bias by distance f32 [H, distances]; mask pred [B, Q, C]; position of each query i32 [B, Q] and of each
//   slot i32 [B, C]; start i32 [B]; row and time of each slot i32 [B, C]; place of each column i32 [N], B * Q for none; mask of the memory pred [B, L];
//   last norm [D]; head [V, D]; embedding [V, D] if it is not `tied` to the head;
//   a layer each: norm, qkv, out; norm, query, out, keys [B, H, L, K] and values [B, H, K, L] of the memory; norm, in, out;
//   keys f32 [B * H, K, S] and values f32 [B * H, S, K] of the cache.
// A matrix is followed by its scale. The results: logits f32 [N, V], or i32 [N] which of the first `tokens` logits is the
// highest; a layer each keys and values of the cache, in place.
ffi::Error Step(ffi::ThreadPool pool, ffi::RemainingArgs given, ffi::RemainingRets results, int64_t layers, int64_t heads,
                int64_t feed, int64_t activation, int64_t vocabulary, int64_t tokens, int64_t tied, float epsilon) {
  const auto of_fed = given.get<ffi::AnyBuffer>(0).value().dimensions(), of_mask = given.get<ffi::AnyBuffer>(2).value().dimensions();
  const auto of_bias = given.get<ffi::AnyBuffer>(1).value().dimensions(), of_memory = given.get<ffi::AnyBuffer>(9).value().dimensions();
  const auto of_cache = given.get<ffi::AnyBuffer>(given.size() - 2).value().dimensions();
  if (of_fed.size() != 1 || of_mask.size() != 3 || of_bias.size() != 2 || of_memory.size() != 2 || of_cache.size() != 3 ||
      results.size() != static_cast<size_t>(1 + 2 * layers))
    return Wrong("step: arguments of other ranks");
  const int64_t all = of_fed[0], batch = of_mask[0], queries = of_mask[1], slots = of_mask[2];
  const int64_t distances = of_bias[1], length = of_memory[1], width = of_cache[1], inner = heads * width, wide = of_cache[2];

  thread_local Rooms kept;
  Rooms& rooms = kept;  // the one of the thread that leads, for all
  Team team(pool);
  Arguments arguments(given);
  const int32_t* fed = arguments.Array<int32_t>(all);
  const float* biases = arguments.Array(heads * distances);
  const bool* mask = arguments.Array<bool>(batch * queries * slots);
  const int32_t* position = arguments.Array<int32_t>(batch * queries);
  const int32_t* key_position = arguments.Array<int32_t>(batch * slots);
  const int32_t* start = arguments.Array<int32_t>(batch);
  const int32_t* row_of = arguments.Array<int32_t>(batch * slots);
  const int32_t* time_of = arguments.Array<int32_t>(batch * slots);
  const int32_t* place = arguments.Array<int32_t>(all);
  const bool* memory_mask = arguments.Array<bool>(batch * length);
  const int64_t size = arguments.Count();
  const float* last = arguments.Array(size);
  const Matrix head = Finer(arguments.Weights(vocabulary, size)), table = tied ? head : arguments.Weights(vocabulary, size);
  std::vector<DecoderLayer> stacked;
  for (int64_t layer = 0; layer < layers; ++layer)
    stacked.emplace_back(arguments, size, width, heads, feed, activation != 0, batch, length, wide);
  if (wide < slots || wide % kPanel) return Wrong("step: a cache of another size");
  if (!arguments.Good() || tokens < 1 || tokens > vocabulary) return Wrong("step: arguments of other shapes");
  if (*std::min_element(start, start + batch) < 0 || *std::max_element(start, start + batch) + queries > slots)
    return Wrong("step: a cache that is full");

  // Only real queries are computed. One sees itself, so a place that sees nothing is a filler's.
  auto &columns = rooms.columns, &places = rooms.places, &examples = rooms.examples;
  columns.clear(), places.clear(), examples.assign(batch + 1, 0);
  for (int64_t n = 0; n < all; ++n) {
    const int64_t at = place[n];
    if (at >= batch * queries || !mask[at * slots + start[at / queries] + at % queries]) continue;
    columns.push_back(n), places.push_back(at);
    ++examples[at / queries + 1];
  }
  rooms.asking.clear();  // examples with columns: in a server's batch most places may be empty
  for (int64_t b = 0; b < batch; ++b)
    if (examples[b + 1]) rooms.asking.push_back(b);
  for (int64_t b = 0; b < batch; ++b) examples[b + 1] += examples[b];  // where an example's columns begin
  const std::vector<int64_t>& asking = rooms.asking;
  const int64_t count = columns.size(), most = *std::max_element(start, start + batch) + queries;
  const int64_t room = (most + kLanes - 1) / kLanes * kLanes;

  // Slots as they lie on the grid, not as they were fed: sums in another order have other last bits, and where drafts or
  // other examples of a batch change what is fed when, the answer would not be the same.
  auto& order = rooms.order;
  order.resize(batch);
  for (int64_t b : asking) {
    const int32_t *row = row_of + b * slots, *time = time_of + b * slots;
    auto& chosen = order[b].slots;
    chosen.clear();
    for (int32_t slot = 0; slot < start[b] + queries; ++slot)
      if (row[slot] < kNowhere) chosen.push_back(slot);
    auto earlier = [&](int32_t one, int32_t other) {
      return time[one] != time[other] ? time[one] < time[other] : row[one] < row[other];
    };
    const bool sorted = std::is_sorted(chosen.begin(), chosen.end(), earlier);
    order[b].fed = sorted && (chosen.empty() || chosen.back() + size_t{1} == chosen.size());
    if (!sorted) std::stable_sort(chosen.begin(), chosen.end(), earlier);
  }

  rooms.x.resize(count * size), rooms.found.resize(count * inner);
  for (int64_t c = 0; c < count; ++c)
    Row(table, std::clamp<int64_t>(fed[columns[c]], 0, vocabulary - 1), rooms.x.data() + c * size);
  rooms.bias.resize(count * heads * room);
  team.Run(count * heads, 4, [&](int64_t i) {
    const int64_t at = places[i / heads], b = at / queries, own = position[at];
    const bool* seen = mask + at * slots;
    const int32_t* others = key_position + b * slots;
    const float* by_distance = biases + i % heads * distances;
    float* bias = rooms.bias.data() + i * room;
    for (int32_t slot : order[b].slots)
      *bias++ = seen[slot] ? by_distance[std::clamp<int64_t>(own - others[slot], 0, distances - 1)] : -1e9f;
  });

  Stack stack{team, count, size, inner, feed, epsilon, static_cast<int>(activation), rooms.x, rooms.operand, rooms.hidden};
  auto& projected = rooms.projected;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const DecoderLayer& own = stacked[layer];
    ffi::AnyBuffer cached_keys = *results.get<ffi::AnyBuffer>(1 + 2 * layer).value();
    ffi::AnyBuffer cached_values = *results.get<ffi::AnyBuffer>(2 + 2 * layer).value();

    projected.resize(count * 3 * inner);
    stack.OfNormed(own.norm, own.inwards, {projected.data(), 3 * inner});
    team.Run(asking.size() * heads, 1, [&](int64_t task) {
      const int64_t b = asking[task / heads], h = task % heads, i = b * heads + h, used = start[b] + queries;
      const Cache cache{static_cast<float*>(cached_keys.untyped_data()) + i * width * wide,
                        static_cast<float*>(cached_values.untyped_data()) + i * wide * width, wide, width};
      const float* first = projected.data() + h * width;
      const int64_t filled = order[b].slots.size();
      const int32_t* slots_of = order[b].slots.data();
      for (int64_t c = examples[b]; c < examples[b + 1]; ++c)
        cache.Put(start[b] + places[c] % queries, first + c * 3 * inner + inner, first + c * 3 * inner + 2 * inner);
      for (int64_t c = examples[b]; c < examples[b + 1];) {
        const int64_t pair = std::min<int64_t>(2, examples[b + 1] - c), row = 3 * inner;
        auto attend = [&](auto slot) {
          WithConstant<2>(pair, [&](auto count) {
            const float* bias = rooms.bias.data() + (c * heads + h) * room;
            float* found = rooms.found.data() + c * inner + h * width;
            cache.Attend<decltype(count)::value>(first + c * row, row, slot, filled, used, bias, heads * room, found, inner);
          });
        };
        if (order[b].fed) attend([](int64_t i) { return i; });  // faster
        else attend([&](int64_t i) { return slots_of[i]; });
        c += pair;
      }
    });
    stack.Add(own.outwards, rooms.found);

    stack.OfNormed(own.cross_norm, own.query, {projected.data(), inner});
    team.Run(asking.size() * heads, 1, [&](int64_t task) {
      const int64_t b = asking[task / heads], h = task % heads, i = b * heads + h, from = examples[b], to = examples[b + 1];
      const bool* seen = memory_mask + b * length;
      auto bias = [&](int64_t, float* scores) {
        for (int64_t l = 0; l < length; ++l) scores[l] += seen[l] ? 0.0f : -1e9f;
      };
      AttendPanels(After(own.keys, i), After(own.values, i), projected.data() + from * inner + h * width, inner, to - from, length, bias,
                   rooms.found.data() + from * inner + h * width, inner);
    });
    stack.Add(own.cross_outwards, rooms.found);
    stack.Feed(own.feed_forward);
  }

  ffi::AnyBuffer answers = *results.get<ffi::AnyBuffer>(0).value();
  if (answers.element_type() == ffi::S32) {
    int32_t* tokens_of = static_cast<int32_t*>(answers.untyped_data());
    rooms.tokens.resize(count);
    stack.SetNormed(last, head);
    rooms.operand.Highest(team, head, tokens, rooms.tokens.data());
    std::fill(tokens_of, tokens_of + all, 0);
    for (int64_t c = 0; c < count; ++c) tokens_of[columns[c]] = rooms.tokens[c];
    return ffi::Error::Success();
  }
  float* logits = static_cast<float*>(answers.untyped_data());
  const bool in_place = count == all;  // then columns are in order
  if (!in_place) rooms.hidden.resize(count * vocabulary);
  float* found = in_place ? logits : rooms.hidden.data();
  stack.OfNormed(last, head, {found, vocabulary});
  if (in_place) return ffi::Error::Success();
  std::fill(logits, logits + all * vocabulary, 0.0f);
  for (int64_t c = 0; c < count; ++c)
    std::copy(found + c * vocabulary, found + (c + 1) * vocabulary, logits + columns[c] * vocabulary);
  return ffi::Error::Success();
}

// The arguments: x f32 [B, L, D]; length i32 [B]; bias f32 [H, 2 L - 1], of key - query = 1 - L and so on; last norm [D];
// a layer of the encoder each: norm, qkv, out; norm, in, out; a layer of the decoder each: keys and values [2 H K, D].
// A matrix is followed by its scale. The results: a layer of the decoder each, in panels of float32 or bfloat16, keys
// [B, H, M, K] and values [B, H, K, M], zeros past a source's length. The encoder's own attention is of their type as well.
ffi::Error Encode(ffi::ThreadPool pool, ffi::RemainingArgs given, ffi::RemainingRets results, int64_t layers,
                  int64_t heads, int64_t feed, int64_t activation, int64_t width, int64_t memory, float epsilon) {
  const auto of_x = given.get<ffi::AnyBuffer>(0).value().dimensions();
  if (of_x.size() != 3) return Wrong("encode: arguments of other ranks");
  const int64_t batch = of_x[0], length = of_x[1], size = of_x[2], inner = heads * width, memories = results.size() / 2;

  thread_local Rooms kept;
  Rooms& rooms = kept;  // the one of the thread that leads, for all
  Team team(pool);
  Arguments arguments(given);
  const float* embedded = arguments.Array(batch * length * size);
  const int32_t* lengths = arguments.Array<int32_t>(batch);
  const float* bias = arguments.Array(heads * (2 * length - 1));
  const float* last = arguments.Array(size);
  std::vector<EncoderLayer> stacked;
  for (int64_t layer = 0; layer < layers; ++layer) stacked.emplace_back(arguments, size, inner, feed, activation != 0);
  std::vector<Matrix> projections;
  for (int64_t layer = 0; layer < memories; ++layer) projections.push_back(arguments.Weights(2 * inner, size));
  if (!arguments.Good()) return Wrong("encode: arguments of other shapes");

  const bool wide = (*results.get<ffi::AnyBuffer>(0).value()).element_type() == ffi::F32;
  const Kind kind = wide ? kFloat32 : kBfloat16;
  const int64_t depth = wide ? 1 : 2;
  auto& first = rooms.examples;  // an example's first column: only real tokens are computed
  first.assign(1, 0);
  for (int64_t b = 0; b < batch; ++b) first.push_back(first[b] + std::clamp<int64_t>(lengths[b], 0, length));
  const int64_t count = first[batch];
  rooms.x.resize(count * size), rooms.found.resize(count * inner);
  for (int64_t b = 0; b < batch; ++b)
    std::copy(embedded + b * length * size, embedded + b * length * size + (first[b + 1] - first[b]) * size,
              rooms.x.data() + first[b] * size);

  Stack stack{team, count, size, inner, feed, epsilon, static_cast<int>(activation), rooms.x, rooms.operand, rooms.hidden};
  auto& projected = rooms.projected;
  for (const EncoderLayer& layer : stacked) {
    // Queries and shares in as many as its other activations; tiles take two.
    const int digits = !kDigits[kind] ? 0 : layer.inwards.digits == 1 ? 1 : 2;
    const int64_t row = 3 * inner;
    projected.resize(count * row);
    stack.OfNormed(layer.norm, layer.inwards, {projected.data(), row});
    team.Run(batch * heads, 1, [&](int64_t i) {
      thread_local Ints32 packed;
      const int64_t b = i / heads, h = i % heads, real = first[b + 1] - first[b];
      const int64_t whole = (real + 2 * kPanel - 1) / (2 * kPanel) * 2 * kPanel;
      const float* queries = projected.data() + first[b] * row + h * width;
      packed.resize(2 * whole * width / depth);
      int32_t *keys = packed.data(), *values = keys + whole * width / depth;
      PackKeys(kind, queries + inner, row, real, whole, width, keys);
      PackValues(kind, queries + 2 * inner, row, real, whole, width, values);
      const Matrix k{kind, reinterpret_cast<const Ints*>(keys), nullptr, whole / kPanel, width / depth, digits};
      const Matrix v{kind, reinterpret_cast<const Ints*>(values), nullptr, width / kPanel, whole / depth, digits};
      constexpr int64_t kQueries = 32;  // at a time: their scores stay in the cache
      for (int64_t q = 0; q < real; q += kQueries) {
        auto add = [&](int64_t c, float* scores) {
          const float* of_query = bias + h * (2 * length - 1) + length - 1 - (q + c);
          for (int64_t l = 0; l < real; ++l) scores[l] += of_query[l];
        };
        AttendPanels(k, v, queries + q * row, row, std::min(kQueries, real - q), real, add,
                     rooms.found.data() + (first[b] + q) * inner + h * width, inner);
      }
    });
    stack.Add(layer.outwards, rooms.found);
    stack.Feed(layer.feed_forward);
  }
  for (int64_t layer = 0; layer < memories; ++layer) {
    projected.resize(count * 2 * inner);
    stack.OfNormed(last, projections[layer], {projected.data(), 2 * inner});
    int32_t* keys = static_cast<int32_t*>((*results.get<ffi::AnyBuffer>(2 * layer).value()).untyped_data());
    int32_t* values = static_cast<int32_t*>((*results.get<ffi::AnyBuffer>(2 * layer + 1).value()).untyped_data());
    team.Run(batch * heads, 1, [&](int64_t i) {
      const int64_t b = i / heads, h = i % heads, real = first[b + 1] - first[b];
      const float* at = projected.data() + first[b] * 2 * inner + h * width;
      PackKeys(kind, at, 2 * inner, real, memory, width, keys + i * memory * width / depth);
      PackValues(kind, at + inner, 2 * inner, real, memory, width, values + i * memory * width / depth);
    });
  }
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
      .Attr<int64_t>("layers").Attr<int64_t>("heads").Attr<int64_t>("feed").Attr<int64_t>("activation")
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_step, pipejax::Step, STACK.Attr<int64_t>("vocabulary").Attr<int64_t>("tokens")
                              .Attr<int64_t>("tied").Attr<float>("epsilon"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_encode, pipejax::Encode,
                              STACK.Attr<int64_t>("width").Attr<int64_t>("memory").Attr<float>("epsilon"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(pipejax_left, pipejax::Left, ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::S32>>()
                              .Arg<ffi::Buffer<ffi::U32>>().Ret<ffi::Buffer<ffi::S32>>());
