"""Continuous batching: a batch with a fixed number of places, whose examples are added and removed during decoding.

`RunningBatch.add` encodes a source and assigns it a free place. `RunningBatch.advance` calls the compiled loop, which
begins the new examples, stops the dropped ones, and takes steps with all of them until an example is done or a pause is
due. Examples are added and dropped between two calls. All sources share one memory length L and one cache size C. Both
grow when a source or an answer needs it, and are reset when a source is added while no place is in use.

Every compiled computation is a program with a name and arguments. The methods that call programs have an argument
`call`, which either runs a program or only compiles it and returns the shapes of its results. In this way `needs_of`
compiles exactly the programs that `add` and `advance` will run.

Shapes: B places, R rows of the grid, W times, L slots of the memory, C slots of the cache.
"""

import copy
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax import decoding
from pipejax.data.shapes import bucket, memory_length, pad
from pipejax.decoding import (
    MOST_LIKELY,
    Carry,
    Decoded,
    DecodingOptions,
    Refillable,
    Rule,
    Sampling,
    Segment,
    SourceIds,
    Strategy,
)
from pipejax.inference.answer_format import AnswerFormat
from pipejax.inference.compiler import Needs
from pipejax.inference.programs import Drafting, Programs, encode_batch, schedule
from pipejax.model import lora
from pipejax.model.precision import precision
from pipejax.model.t5 import Memory
from pipejax.system import Tree
from pipejax.system.compiled import CompiledPrograms

Array = jax.Array
SLICE = 0.1  # target seconds of one `advance`; each pause of the loop costs some milliseconds
MOST_STEPS = 256  # the most steps of one `advance`
NO_END = 1 << 30  # a number of steps that no decode reaches
DONATED = {"place": 0, "step": 2}  # by program, the argument whose memory is donated to the result


class Encodings:
    """A least-recently-used cache of encoded sources of one model, by token ids and adapter.

    Only one thread may call its methods; all threads may read the counters.
    """

    def __init__(self, most: int) -> None:
        """Keeps the memories of at most `most` sources; 0 disables the cache."""
        self._most = most
        self._kept: OrderedDict[tuple[bytes, int | None], Memory] = OrderedDict()
        self.hits = self.misses = self.bytes = 0  # sources found, sources encoded, bytes of the kept memories

    def of(self, ids: np.ndarray, adapter: int | None, encode: Callable[[np.ndarray, int | None], Memory]) -> Memory:
        """Returns the memory of a source: the cached one, or the result of `encode`, which is then cached.

        Args:
          ids: i32 [n], the token ids.
          adapter: the number of the adapter, if there are adapters.
          encode: encodes ids with an adapter.
        """
        key = ids.tobytes(), adapter
        memory = self._kept.pop(key, None)
        if memory is not None:
            self.hits += 1
        else:
            self.misses += 1
            memory = encode(ids, adapter)
            self.bytes += _size(memory)
        self._kept[key] = memory
        while len(self._kept) > self._most:
            self.bytes -= _size(self._kept.popitem(last=False)[1])
        return memory

    def clear(self) -> None:
        """Empties the cache and resets the counters."""
        self._kept.clear()
        self.hits = self.misses = self.bytes = 0


def _size(memory: Memory) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(memory))


@flax.struct.dataclass
class Encoded:
    """Encoded sources, one or all places of a batch, for the decoder and a drafter."""

    memory: Memory
    source: SourceIds | None  # the ids, for strategies that read them

    @property
    def length(self) -> int:
        """L, the number of slots of the memory."""
        length: int = self.memory.mask.shape[1]
        return length


class Steps(NamedTuple):
    """The key of programs that take steps."""

    strategy: Strategy
    places: int
    length: int  # L, of the memory
    slots: int  # C, of the cache
    logits: bool  # whether tokens are sampled or scored
    answer_format: str  # `AnswerFormat.program_label`; "": free rows
    shapes: tuple[Hashable, ...] = ()  # of the options


Call = Callable[..., Any]  # (name of a program, *arguments) -> its results, or their shapes


class Switch:
    """A flag in memory that running loops read: while it is set, batches pause after each step. Thread-safe."""

    def __init__(self) -> None:
        """Creates a switch that is not set."""
        self._thrown = np.zeros(1, np.int32)
        # u32 [2], the address of the flag, an i32, low half first.
        self.address = np.asarray([self._thrown.ctypes.data], np.uint64).view(np.uint32)

    def throw(self) -> None:
        """Sets the flag: batches pause."""
        self._thrown[0] = 1

    def reset(self) -> None:
        """Clears the flag: batches continue."""
        self._thrown[0] = 0


class RunningBatch:
    """Decodes up to `places` sources in parallel on one device. Not thread-safe.

    The answer of an example does not depend on the other examples. Programs are compiled when they are needed: an
    encoder for each padded length of sources, and a decoder for each memory length (a power of two), each cache size,
    and each kind of steps (with and without logits, which sampling and scores need).
    """

    def __init__(
        self,
        programs: Programs,
        strategy: Refillable,
        places: int,
        switch: "Switch | None" = None,
        encodings: Encodings | None = None,
        compiled: CompiledPrograms | None = None,
    ) -> None:
        """Creates an empty batch; compiles nothing.

        Args:
          programs: the model, its backend and weights.
          strategy: the strategy of all answers.
          places: B, the most examples at a time.
          switch: pauses the loop when it is set.
          encodings: a cache of encoded sources.
          compiled: a table of programs that another thread fills. If given, `advance` never compiles: it stops and
            sets `lacks` if a program is missing. None: programs are compiled when they are called.
        """
        self.strategy = programs.tuned_for(strategy)
        self.starts = np.asarray(strategy.start(np.arange(strategy.places[0])))  # i64 [R], times of first tokens
        self.places = places
        # Whether rows may be generated ahead of others.
        self.has_drafts = getattr(self.strategy, "drafts", None) is not None
        self._model, self._backend = programs.model, programs.backend
        self._encoder, self._weights = programs.on(1).encoding, programs.on(1).decoding
        self._drafting: Drafting | None = None
        if small := programs.small_of(strategy):
            self._drafting = Drafting(small.model, small.backend)
            self._small_encoder, self._weights = small.on(1).encoding, (self._weights, small.on(1).decoding)
        self._sizes = schedule(self.strategy, places)
        self.cache_sizes = self._sizes.slots  # the sizes through which the cache grows
        self._forced: np.ndarray | None = None
        self._rules: tuple[Rule, ...] = ()
        self.answer_format: AnswerFormat | None = None
        self._switch = switch or Switch()
        self._encodings = encodings or Encodings(0)
        self._compiled, self._waits = compiled if compiled is not None else CompiledPrograms(), compiled is None
        self.lacks: Needs = {}  # programs of a larger cache that the last `advance` needed and that are not compiled
        self._adapter: int | None = None  # the adapter of the latest source
        self._functions: dict[str, Callable[..., Any]] = {
            "encode": partial(encode_batch, self._model, backend=self._backend),
            "widen": self._widened,
            "empty": self._empty_state,
            "reread": self._reread,
            "place": _placed,
            "grow": self._grown,
            "step": self._stepped,
        }
        if self._drafting:
            self._functions["encode small"] = partial(
                encode_batch, self._drafting.model, backend=self._drafting.backend
            )
        self.clear()

    def clear(self) -> None:
        """Frees all places and the memory of their arrays."""
        places = self.places
        self._in_use, self._scored = np.zeros(places, bool), np.zeros(places, bool)
        self._sampling = Sampling.together([MOST_LIKELY] * places)
        self._begins, self._ends = np.zeros(places, bool), np.zeros(places, bool)
        self._encoded: Encoded | None = None
        self._carry: Carry | None = None
        self._slots, self._steps = self._sizes.slots[0], 1

    def give(self, forced: np.ndarray | None, answer_format: AnswerFormat | None = None) -> None:
        """Sets the forced tokens and the answer format shared by all examples. The batch must be empty.

        Args:
          forced: i32 [R, W], as in `DecodingOptions` for one example; None: no tokens are forced.
          answer_format: the format of all answers.
        """
        assert not self._in_use.any(), "the batch must be empty"
        self._forced = None if forced is None else np.repeat(forced[None], self.places, axis=0)
        self.answer_format = answer_format
        # Arrays that all examples share are transferred to the device once, not with each call.
        rules = () if answer_format is None else (answer_format.rule(self.strategy, [None] * self.places),)
        self._rules = tuple(rule.on_device() for rule in rules)
        if self._carry is not None:
            self._carry = self._with_states(self._carry, self._rules)

    def empty_copy(self) -> "RunningBatch":
        """Creates an empty batch with the same strategy and number of places, which shares the compiled programs."""
        other = copy.copy(self)
        other.clear()
        return other

    @property
    def fullest(self) -> int:
        """Returns the place whose example uses the most slots of the cache."""
        assert self._carry is not None, "no place is in use"
        return int(np.where(self._in_use, np.asarray(self._carry.used), -1).argmax())

    @property
    def free(self) -> list[int]:
        """The places that are not in use."""
        return np.flatnonzero(~self._in_use).tolist()

    def add(
        self,
        ids: Any,
        sampling: Sampling = MOST_LIKELY,
        *,
        log_probs: bool = True,
        row_tokens: int | None = None,
        adapter: int | None = None,
    ) -> int:
        """Adds a source at a free place; its decoding begins with the next `advance`.

        Args:
          ids: i32 [n], the token ids of the source.
          sampling: how tokens are drawn.
          log_probs: whether log-probabilities are computed.
          row_tokens: the most tokens of a row, if the batch has an answer format; None: the bounds of the grid.
          adapter: the number of the adapter, if there are adapters.

        Returns:
          The place.
        """
        place, self._adapter = self.free[0], adapter
        source, length = pad([np.asarray(ids, np.int32)], bucket(len(ids))), np.asarray([len(ids)], np.int32)
        with precision(self._model.dtype):
            memory = self._encodings.of(
                np.asarray(ids, np.int32), adapter, lambda *_: self._encode_source(self._call, source, length, adapter)
            )
            one = self._read(self._call, memory, source, length)
            if self._encoded is None or (not self._in_use.any() and self._encoded.length != one.length):
                self._slots, self._encoded, self._carry = self._sizes.slots[0], None, None
            is_new = self._carry is None
            self._encoded, carry, one = self._join(self._call, self._encoded, self._carry, one)
            self._carry = self._with_states(carry, self._rules) if is_new else carry
            self._encoded = self._place(self._call, self._encoded, one, place)
        self._scored[place] = log_probs
        if self.answer_format is not None:
            self._rules = (self._rules[0].put(place, self.answer_format.rule(self.strategy, [row_tokens])),)
        for field in dataclasses.fields(self._sampling):
            getattr(self._sampling, field.name)[place] = getattr(sampling, field.name)
        self._in_use[place] = self._begins[place] = True
        return place

    # The programs that `add` and `advance` call. `call` is `_call`, which runs a program, or `_find`, which compiles it
    # and returns the shapes of its results.

    def _encode_source(self, call: Call, source: Any, length: Any, adapter: int | None) -> Memory:
        """Returns the memory of a source i32 [1, n] of `length` i32 [1] tokens."""
        own = None if adapter is None else np.asarray([adapter], np.int32)
        memory: Memory = call("encode", self._encoder, source, length, own)
        return memory

    def _read(self, call: Call, memory: Memory, source: Any, length: Any) -> Encoded:
        """Returns the encoded source, with its ids and the small model's memory if the strategy needs them."""
        if not self.strategy.reads_source:
            return Encoded(memory, None)
        ids, small = np.zeros((1, memory.mask.shape[1]), np.int32), None
        if isinstance(source, np.ndarray):
            ids[:, : source.shape[1]] = source
        if self._drafting:
            small = call("encode small", self._small_encoder, source, length, None)
        return Encoded(memory, SourceIds(ids, length, small, apart=True))

    def _join(
        self, call: Call, encoded: Encoded | None, carry: Carry | None, one: Encoded
    ) -> tuple[Encoded, Carry, Encoded]:
        """Brings the sources of the batch and a new one to the same memory length, by doubling the shorter ones."""
        if encoded is None or carry is None:
            encoded, carry = call("empty", self._weights, one, slots=self._sizes.slots[0])
        length = encoded.length
        while encoded.length < one.length:
            encoded = call("widen", encoded, slots=2 * encoded.length)
        while one.length < encoded.length:
            one = call("widen", one, slots=2 * one.length)
        if self.strategy.reads_source and encoded.length > length:
            carry = dataclasses.replace(carry, state=call("reread", self._weights, encoded, carry.state))
        return encoded, carry, one

    def _place(self, call: Call, encoded: Encoded, one: Encoded, place: int) -> Encoded:
        """Writes an encoded source to a place of the batch."""
        many: Encoded = call("place", encoded, one, np.int32(place)) if self.places > 1 else one
        return many

    def _grow(self, call: Call, encoded: Encoded, carry: Carry, slots: int) -> Carry:
        """Grows the cache to `slots` slots."""
        grown: Carry = call("grow", self._weights, encoded, carry, slots=slots)
        return grown

    def _step(
        self, call: Call, encoded: Encoded, carry: Carry, options: DecodingOptions, steps: int
    ) -> tuple[Decoded, Array, Array, Carry]:
        """Takes at most `steps` steps; see `_stepped`."""
        changes = self._begins, self._ends, np.int32(steps), self._switch.address, self._in_use
        found: tuple[Decoded, Array, Array, Carry] = call("step", self._weights, encoded, carry, options, *changes)
        return found

    @property
    def _length(self) -> int:
        return 0 if self._encoded is None else self._encoded.length

    def needs(self, length: int, *, logits: bool, adapter: int | None) -> Needs:
        """Returns the programs to compile before a source can be added.

        Args:
          length: number of tokens of the source.
          logits: whether its answer is sampled or scored.
          adapter: as for `add`.
        """
        own, taken = memory_length(bucket(length)), self._in_use.any()
        slots = self._slots if taken or own == self._length else self._sizes.slots[0]
        most = max(own, self._length) if taken else own
        return self.needs_of(bucket(length), most, slots, {logits, *self._kinds()}, adapter)

    def _kinds(self) -> list[bool]:
        """Returns, for each place in use, whether its example is sampled or scored."""
        return [*map(bool, (self._scored | (self._sampling.temperature > 0))[self._in_use])]

    def needs_of(
        self, source: int | None, length: int, slots: int, logits: Iterable[bool], adapter: int | None = None
    ) -> Needs:
        """Returns the programs to compile for adding a source and for steps, without the compiled ones.

        Args:
          source: the padded length of the source; None: no source is added.
          length: L, the memory length of the batch.
          slots: C, the cache size.
          logits: the kinds of steps: with logits (True), for sampling and scores, or without.
          adapter: as for `add`.
        """
        found: dict[Hashable, Callable[[], object]] = {}
        own = self.strategy, self.places, length
        if source is not None:
            reads = ("small",) if self._drafting else ()
            found["encode", source, *reads] = partial(self._trace_source, self._find, source, adapter)
            found["room", *own] = partial(self._compile_room, length, adapter)
        for kind in sorted({*logits}):
            options = self._options(kind)
            label = "" if self.answer_format is None else self.answer_format.program_label
            key = Steps(*own, slots, kind, label, _shapes(options))
            found[key] = partial(self._compile_steps, length, slots, options, adapter)
        return {key: make for key, make in found.items() if key not in self._compiled}

    def _trace_source(self, call: Call, length: int, adapter: int | None) -> Encoded:
        """Returns the shapes of an encoded source of a padded length; `call` returns shapes."""
        source, of_each = jax.ShapeDtypeStruct((1, length), np.int32), jax.ShapeDtypeStruct((1,), np.int32)
        with precision(self._model.dtype):
            return self._read(call, self._encode_source(call, source, of_each, adapter), source, of_each)

    def _shape_of_source(self, length: int, adapter: int | None) -> Encoded:
        """Returns the shapes of a source with a memory of `length` slots; compiles nothing."""

        def shapes(name: str, *given: Any) -> Any:
            return jax.eval_shape(self._functions[name], *given)

        key = "memory", length, self.strategy
        found: Encoded = self._compiled.find(key, lambda: self._trace_source(shapes, length, adapter))
        return found

    def _compile_room(self, length: int, adapter: int | None) -> None:
        """Compiles the programs that bring sources of all shorter memory lengths to `length`, and place a source."""
        one, shorter = self._shape_of_source(length, adapter), length if self.places > 1 else 0
        encoded, carry, _ = self._join(self._find, None, None, one)
        self._place(self._find, encoded, one, 0)
        while shorter > memory_length(1):
            shorter //= 2
            short = self._shape_of_source(shorter, adapter)
            self._join(self._find, encoded, carry, short)
            self._join(self._find, *self._join(self._find, None, None, short)[:2], one)

    def _compile_steps(self, length: int, slots: int, options: DecodingOptions, adapter: int | None) -> None:
        """Compiles the steps with a cache of `slots` slots, and the programs that grow the cache to this size."""
        encoded, carry, _ = self._join(self._find, None, None, self._shape_of_source(length, adapter))
        carry = self._with_states(carry, options.rules)  # by now the batch may have another format
        for size in self._sizes.slots[1:]:
            if size <= slots:
                carry = self._grow(self._find, encoded, carry, size)
        self._step(self._find, encoded, carry, options, 1)

    def _program(self, name: str, *given: Any, **static: int) -> Any:
        """Returns the compiled program for arguments of these shapes, which may be `ShapeDtypeStruct`s."""
        whose = () if name.startswith("encode") else (self.strategy, self.places)
        key = name, *whose, *static.values(), *_shapes(given)

        def compile_program() -> jax.stages.Compiled:
            with precision(self._model.dtype):
                made = jax.jit(partial(self._functions[name], **static), donate_argnums=DONATED.get(name, ()))
                return made.lower(*given).compile()

        return self._compiled.find(key, compile_program)

    def _call(self, name: str, *given: Any, **static: int) -> Any:
        """Runs a program."""
        return self._program(name, *given, **static)(*given)

    def _find(self, name: str, *given: Any, **static: int) -> Any:
        """Compiles a program and returns the shapes of its results."""
        return self._program(name, *given, **static).out_info

    def drop(self, place: int) -> None:
        """Frees a place; its example need not be done."""
        self._in_use[place] = self._begins[place] = False
        self._sampling.temperature[place], self._scored[place] = 0, False
        self._ends[place] = True

    def advance(self, most: int = NO_END, *, often: bool = True) -> tuple[Decoded, np.ndarray]:
        """Takes steps until an example is done, the switch is set, or `most` steps are taken.

        Args:
          most: the most steps to take.
          often: whether to return after about `SLICE` seconds, too. This is always so on backends that cannot read a
            switch.

        Returns:
          The rows so far, arrays [B, ...], and bool [B], the places that are done or not in use.
        """
        begun = time.perf_counter()
        often = often or not self._backend.can_listen
        decoded, done, taken = self._run_steps(min(self._steps, most) if often else most)
        self._steps = int(np.clip(SLICE * max(taken, 1) / (time.perf_counter() - begun), 1, MOST_STEPS))
        return decoded, done

    def steps_for(self, tokens: int, taken: int) -> int:
        """Returns the fewest steps in which an answer can grow by `tokens` tokens, after `taken` steps."""
        step = taken
        while tokens > 0 and step < self.starts.max():  # until all rows have begun
            tokens -= int((self.starts <= step).sum())
            step += 1
        return step - taken + max(-(-tokens // len(self.starts)), 0)

    def new_tokens(self, decoded: Decoded, place: int, known: np.ndarray) -> list[tuple[int, int, int]]:
        """Lists the new tokens of an example as (time, row, index in the row), in the order of steps.

        With drafts some rows are generated ahead of others: the tokens of a time-step are listed once all rows have
        reached it.

        Args:
          decoded: the result of `advance`.
          place: the place of the example.
          known: i32 [R], number of tokens of each row that were listed before.
        """
        lengths = decoded.lengths[place]
        if self.has_drafts:
            lengths = np.minimum(lengths, np.maximum(int(decoded.steps[place]) - self.starts, 0))
        rows = np.flatnonzero(lengths > known)
        first, begin, end = (x[rows].tolist() for x in (self.starts, known, lengths))
        return sorted((first[k] + j, i, j) for k, i in enumerate(rows.tolist()) for j in range(begin[k], end[k]))

    def _run_steps(self, steps: int) -> tuple[Decoded, np.ndarray, int]:
        """Runs the loop; returns the rows so far, bool [B] of done examples, and the number of steps taken."""
        assert self._encoded is not None and self._carry is not None, "no source was added"
        self.lacks, options = {}, self._options(any(self._kinds()))
        with precision(self._model.dtype):
            while True:
                found = self._step(self._call, self._encoded, self._carry, options, steps)
                self._carry = found[-1]
                self._begins, self._ends = np.zeros_like(self._begins), np.zeros_like(self._ends)
                decoded, done, more = jax.device_get(found[:-1])
                left = abs(int(more))
                if left < steps or done[self._in_use].any() or not self._in_use.any():
                    return decoded, done, steps - left
                # The first step did not fit into the cache.
                if self._slots == self._sizes.slots[-1]:
                    raise self._sizes.full()
                slots = next(n for n in self._sizes.slots if n > self._slots)
                if not self._waits:
                    self.lacks = self.needs_of(None, self._length, slots, self._kinds(), self._adapter)
                    if self.lacks:
                        return decoded, done, 0
                self._slots = slots
                self._carry = self._grow(self._call, self._encoded, self._carry, slots)

    def _options(self, logits: bool) -> DecodingOptions:
        """Returns the options of all places, for steps with or without logits."""
        options = DecodingOptions(forced=self._forced, rules=self._rules)
        scored = self._scored.any()
        return dataclasses.replace(options, sampling=self._sampling, scores=True, scored=scored) if logits else options

    def _with_states(self, carry: Carry, rules: tuple[Rule, ...]) -> Carry:
        """Returns the carry with states for the rules; `refill` initialises them for new examples."""
        shapes = [jax.eval_shape(rule.init, self.places, self.strategy.places[0]) for rule in rules]
        return dataclasses.replace(carry, states=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tuple(shapes)))

    # The functions of the programs, which are traced.

    def _bind(self, weights: Tree, encoded: Encoded) -> tuple[Refillable, Any]:
        """Returns the strategy, bound to its small model if it has one, and the decoder of all places."""
        strategy: Strategy = self.strategy
        memory = encoded.memory
        if self._drafting:
            weights, small = weights
            assert encoded.source is not None
            strategy = self._drafting.bind_draft_model(strategy, small, encoded.source)
        return cast(Refillable, strategy), self._backend.decoder(
            self._model, lora.choose(weights, memory.adapter), memory
        )

    def _widened(self, encoded: Encoded, *, slots: int) -> Encoded:
        """Returns the same sources with memories of `slots` slots."""
        source = encoded.source
        if source is not None:
            small = source.memory
            if self._drafting:
                small = self._drafting.backend.widen(small, slots)
            ids = jnp.pad(source.ids, ((0, 0), (0, slots - encoded.length)))
            source = dataclasses.replace(source, ids=ids, memory=small)
        return Encoded(self._backend.widen(encoded.memory, slots), source)

    def _empty_state(self, weights: Tree, one: Encoded, *, slots: int) -> tuple[Encoded, Carry]:
        """Returns encoded sources (zeros) and a carry for an empty batch.

        `one` is an encoded source, for its shapes.
        """
        many = jax.tree.map(lambda x: jnp.zeros((self.places, *x.shape[1:]), x.dtype), one)
        strategy, decoder = self._bind(weights, many)
        state, options = strategy.init(self.places, many.source), DecodingOptions(scores=True)
        state = strategy.stop(state, jnp.ones(self.places, bool))
        carry = decoding.begin(strategy, decoder, state, self._sizes, options=options, apart=True)
        return many, decoding.grow(decoder, carry, slots)

    def _reread(self, weights: Tree, encoded: Encoded, state: Tree) -> Tree:
        """Returns the strategy's state for sources padded to another length; one program for each cache size."""
        strategy, _ = self._bind(weights, encoded)
        return strategy.reread(state, encoded.source)

    def _grown(self, weights: Tree, encoded: Encoded, carry: Carry, *, slots: int) -> Carry:
        return decoding.grow(self._bind(weights, encoded)[1], carry, slots)

    def _stepped(
        self,
        weights: Tree,
        encoded: Encoded,
        carry: Carry,
        options: DecodingOptions,
        begins: Array,
        ends: Array,
        most: Array,
        switch: Array,
        watched: Array,
    ) -> tuple[Decoded, Array, Array | None, Carry]:
        """Begins and stops examples, then takes steps until the loop pauses.

        Args:
          weights: of the model and the small model.
          encoded: the sources of all places.
          carry: the state of all places.
          options: the options of all places.
          begins: bool [B], the examples to begin.
          ends: bool [B], the examples to stop.
          most: i32 scalar, the most steps.
          switch: u32 [2], the address of a `Switch`.
          watched: bool [B], the examples that pause the loop when they are done.

        Returns:
          The rows so far, bool [B] of done examples, the number of steps left of `most`, and the new carry.
        """
        (strategy, decoder), sizes = self._bind(weights, encoded), self._sizes
        carry = decoding.refill(
            strategy, carry, begins=begins, ends=ends, sizes=sizes, options=options, source=encoded.source
        )
        found: Segment = decoding.decode(
            strategy,
            decoder,
            carry,
            sizes=sizes,
            slots=carry.filled.row.shape[1],
            options=options,
            pause_after=most,
            listen=lambda count: self._backend.listen(count, switch),
            watched=watched,
        )
        return found.decoded, strategy.done(found.carry.state), found.steps_left, found.carry


def _shapes(tree: Any) -> tuple[Hashable, ...]:
    """Returns a hashable key of a tree's structure and of the shapes and dtypes of its arrays."""
    return jax.tree.structure(tree), tuple((x.shape, x.dtype) for x in jax.tree.leaves(tree))


def _placed(encoded: Encoded, new: Encoded, place: Array) -> Encoded:
    """Returns the encoded sources with the source `new` at a place."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, place, axis=0), encoded, new)
