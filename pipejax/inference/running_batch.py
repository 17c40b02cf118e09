"""A batch whose examples come and go: between two calls of the compiled loop others take the places that are free.

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
    Grammar,
    GridStrategy,
    Refillable,
    Sampling,
    SourceIds,
    Strategy,
    Stretch,
    Wishes,
)
from pipejax.inference.compiler import Needs
from pipejax.inference.programs import Drafting, Programs, encode_batch, schedule
from pipejax.inference.schema import Schema
from pipejax.model import lora
from pipejax.model.precision import precision
from pipejax.model.t5 import Memory
from pipejax.system import Tree

Array = jax.Array
SLICE = 0.1  # seconds between two looks at what is written; to stop and go on costs some milliseconds
MOST_STEPS = 256  # in between, at the most
NO_END = 1 << 30  # steps, more than any decode takes
DONATED = {"place": 0, "step": 2}  # arguments whose memory the result takes


class Encodings:
    """Memories of sources by ids and adapter; the one that was not asked for the longest makes room for a new one.

    Of one model, and written by one thread; any may read the numbers.
    """

    def __init__(self, most: int) -> None:
        """Keeps the memories of at most so many sources; 0: of none."""
        self._most = most
        self._kept: OrderedDict[tuple[bytes, int | None], Memory] = OrderedDict()
        self.hits = self.misses = self.bytes = 0  # sources found, sources encoded, bytes of the kept memories

    def of(self, ids: np.ndarray, adapter: int | None, encode: Callable[[np.ndarray, int | None], Memory]) -> Memory:
        """The memory of a source, i32 [L]: the very arrays that `encode` made of the same before, if they are kept."""
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
        """Keeps none, and counts from zero."""
        self._kept.clear()
        self.hits = self.misses = self.bytes = 0


def _size(memory: Memory) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(memory))


@flax.struct.dataclass
class Encoded:
    """Encoded sources, one or the places of a batch, as the decoder and a drafter read them."""

    memory: Memory
    source: SourceIds | None  # the ids; None: the strategy does not read them

    @property
    def length(self) -> int:
        """L, slots of the memory."""
        length: int = self.memory.mask.shape[1]
        return length


class Steps(NamedTuple):
    """The key of programs that take steps."""

    strategy: Strategy
    places: int
    length: int  # L, of the memory
    slots: int  # C, of the cache
    logits: bool  # whether tokens are sampled or scored
    table: tuple[int, ...] | None  # [K, P], the shape of a schema's table
    shapes: tuple[Hashable, ...] = ()  # of the wishes


Call = Callable[..., Any]  # a program by its name, with its arguments: runs it, or finds the shapes of its results


class Switch:
    """While it is thrown, batches pause after each step, those that decode already as well. For all threads."""

    def __init__(self) -> None:
        """Not thrown."""
        self._thrown = np.zeros(1, np.int32)
        # u32 [2], of the i32 that is not 0 then, the low half first.
        self.address = np.asarray([self._thrown.ctypes.data], np.uint64).view(np.uint32)

    def throw(self) -> None:
        """Lets them pause."""
        self._thrown[0] = 1

    def reset(self) -> None:
        """Lets them go on."""
        self._thrown[0] = 0


class RunningBatch:
    """Decodes up to `places` sources side by side on one device. Not to be used by several threads.

    What an example is decoded to does not depend on the others. Programs are compiled as they are needed: an encoder
    for each padded length, a decoder for each power of two that holds the longest source and each size of the cache,
    and another one where tokens are sampled or scored.
    """

    def __init__(
        self,
        programs: Programs,
        strategy: Refillable,
        places: int,
        switch: "Switch | None" = None,
        encodings: Encodings | None = None,
        compiled: dict[Hashable, Any] | None = None,
    ) -> None:
        """Nothing compiles yet. `compiled`: by another thread, so `advance` waits for no compiler."""
        self.strategy = programs.suit(strategy)
        self.starts = np.asarray(strategy.start(np.arange(strategy.places[0])))  # i64 [R], times of first tokens
        self.places = places
        # Whether rows may be generated ahead of others.
        self.has_drafts = isinstance(self.strategy, GridStrategy) and self.strategy.drafts is not None
        self._model, self._backend = programs.model, programs.backend
        self._encoder, self._weights = programs.on(1).encoding, programs.on(1).decoding
        self._drafting: Drafting | None = None
        if small := programs.small_of(strategy):
            self._drafting = Drafting(small.model, small.backend)
            self._small_encoder, self._weights = small.on(1).encoding, (self._weights, small.on(1).decoding)
        self._sizes = schedule(self.strategy, places)
        self.cache_sizes = self._sizes.slots  # as the cache grows
        self._forced: np.ndarray | None = None
        self._grammar: Grammar | None = None
        self.schema: Schema | None = None
        self._switch = switch or Switch()
        self._encodings = encodings or Encodings(0)
        self._compiled, self._waits = compiled if compiled is not None else {}, compiled is None
        self.lacks: Needs = {}  # for a step that `advance` could not take: a larger cache's programs are not compiled
        self._adapter: int | None = None  # of the latest source
        self._functions: dict[str, Callable[..., Any]] = {
            "encode": partial(encode_batch, self._model, backend=self._backend),
            "widen": self._widened,
            "empty": self._emptied,
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
        """Nobody uses it, and it holds no memory."""
        places = self.places
        self._in_use, self._scored = np.zeros(places, bool), np.zeros(places, bool)
        self._sampling = Sampling.together([MOST_LIKELY] * places)
        self._begins, self._ends = np.zeros(places, bool), np.zeros(places, bool)
        self._encoded: Encoded | None = None
        self._carry: Carry | None = None
        self._slots, self._steps = self._sizes.slots[0], 1

    def give(self, forced: np.ndarray | None, schema: Schema | None = None) -> None:
        """Says what is known of all answers, `forced` [R, W] as in `Wishes`, while nobody has a place."""
        assert not self._in_use.any(), "answers of other rows are under way"
        self._forced = None if forced is None else np.repeat(forced[None], self.places, axis=0)
        self.schema = schema
        grammar = None if schema is None else schema.grammar(self.strategy, [None] * self.places)
        # Its table goes to the device once, and not with each call.
        self._grammar = grammar and dataclasses.replace(grammar, table=jax.device_put(grammar.table))
        if self._carry is not None:
            self._carry = self._with_states(self._carry)

    def twin(self) -> "RunningBatch":
        """Another batch that nobody uses, with the same programs: what is compiled for one serves both."""
        other = copy.copy(self)
        other.clear()
        return other

    @property
    def fullest(self) -> int:
        """The place whose example takes the most slots of the cache."""
        assert self._carry is not None, "nobody has a place"
        return int(np.where(self._in_use, np.asarray(self._carry.used), -1).argmax())

    @property
    def free(self) -> list[int]:
        """Places that nobody uses."""
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
        """Encodes a source unless that was just done, and returns its place; it begins with the next `advance`.

        `row_tokens`: of a row at the most, if it follows a schema; None: as many as the grid holds.
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
            self._encoded, self._carry, one = self._join(self._call, self._encoded, self._carry, one)
            self._encoded = self._place(self._call, self._encoded, one, place)
        self._scored[place] = log_probs
        if self.schema is not None and self._grammar is not None:
            self._grammar.last[place] = self.schema.grammar(self.strategy, [row_tokens]).last[0]
        for field in dataclasses.fields(self._sampling):
            getattr(self._sampling, field.name)[place] = getattr(sampling, field.name)
        self._in_use[place] = self._begins[place] = True
        return place

    # What happens when a source joins and when steps are taken: by running programs, or by finding the shapes of their
    # results, which compiles them. `call` does either.

    def _encode_source(self, call: Call, source: Any, length: Any, adapter: int | None) -> Memory:
        """The memory of a source i32 [1, n] with its `length` i32 [1]."""
        own = None if adapter is None else np.asarray([adapter], np.int32)
        memory: Memory = call("encode", self._encoder, source, length, own)
        return memory

    def _read(self, call: Call, memory: Memory, source: Any, length: Any) -> Encoded:
        """The encoded source, with its ids and the small model's memory where the strategy reads them."""
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
        """Makes room for one more source: all of them get memories of the same length, by doubling the shorter ones."""
        if encoded is None or carry is None:
            encoded, carry = call("empty", self._weights, one, slots=self._sizes.slots[0])
            carry = self._with_states(carry)
        length = encoded.length
        while encoded.length < one.length:
            encoded = call("widen", encoded, slots=2 * encoded.length)
        while one.length < encoded.length:
            one = call("widen", one, slots=2 * one.length)
        if self.strategy.reads_source and encoded.length > length:
            carry = dataclasses.replace(carry, state=call("reread", self._weights, encoded, carry.state))
        return encoded, carry, one

    def _place(self, call: Call, encoded: Encoded, one: Encoded, place: int) -> Encoded:
        """Puts a source at a place."""
        many: Encoded = call("place", encoded, one, np.int32(place)) if self.places > 1 else one
        return many

    def _grow(self, call: Call, encoded: Encoded, carry: Carry, slots: int) -> Carry:
        """Grows the cache to so many slots."""
        grown: Carry = call("grow", self._weights, encoded, carry, slots=slots)
        return grown

    def _step(
        self, call: Call, encoded: Encoded, carry: Carry, wishes: Wishes, steps: int
    ) -> tuple[Decoded, Array, Array, Carry]:
        """Takes steps, as `_stepped`."""
        changes = self._begins, self._ends, np.int32(steps), self._switch.address, self._in_use
        found: tuple[Decoded, Array, Array, Carry] = call("step", self._weights, encoded, carry, wishes, *changes)
        return found

    @property
    def _length(self) -> int:
        return 0 if self._encoded is None else self._encoded.length

    def needs(self, length: int, *, logits: bool, adapter: int | None) -> Needs:
        """The programs to compile before a source of `length` tokens can be added; `logits`: sampled or scored."""
        own, taken = memory_length(bucket(length)), self._in_use.any()
        slots = self._slots if taken or own == self._length else self._sizes.slots[0]
        most = max(own, self._length) if taken else own
        return self.needs_of(bucket(length), most, slots, {logits, *self._kinds()}, adapter)

    def _kinds(self) -> list[bool]:
        """Whether each of the requests that have a place is sampled or scored."""
        return [*map(bool, (self._scored | (self._sampling.temperature > 0))[self._in_use])]

    def needs_of(
        self, source: int | None, length: int, slots: int, logits: Iterable[bool], adapter: int | None = None
    ) -> Needs:
        """The programs for a source of that padded length (None: no source), and for steps.

        Args:
          source: padded length of the source.
          length: L, of the memory that holds all sources.
          slots: C, of the cache.
          logits: the kinds of steps, sampled or scored (True) or not.
          adapter: of the source.
        """
        found: dict[Hashable, Callable[[], object]] = {}
        own = self.strategy, self.places, length
        if source is not None:
            reads = ("small",) if self._drafting else ()
            found["encode", source, *reads] = partial(self._compile_source, source, adapter)
            found["room", *own] = partial(self._compile_room, length, adapter)
        for kind in sorted({*logits}):
            wishes = self._wishes(kind)
            table = None if self.schema is None else self.schema.table.moves.shape
            key = Steps(*own, slots, kind, table, _shapes(wishes))
            found[key] = partial(self._compile_steps, length, slots, wishes, adapter)
        return {key: make for key, make in found.items() if key not in self._compiled}

    def _compile_source(self, length: int, adapter: int | None) -> Encoded:
        """Compiles the encoders for a source of that padded length; the shapes of what they find."""
        source, of_each = jax.ShapeDtypeStruct((1, length), np.int32), jax.ShapeDtypeStruct((1,), np.int32)
        with precision(self._model.dtype):
            return self._read(self._find, self._encode_source(self._find, source, of_each, adapter), source, of_each)

    def _shape_of_source(self, length: int, adapter: int | None) -> Encoded:
        """The shapes of a source with a memory of that length; compiles nothing."""
        if (key := ("memory", length, self.strategy)) not in self._compiled:
            source, of_each = jax.ShapeDtypeStruct((1, length), np.int32), jax.ShapeDtypeStruct((1,), np.int32)

            def shapes(name: str, *given: Any) -> Any:
                return jax.eval_shape(self._functions[name], *given)

            with precision(self._model.dtype):
                memory = self._encode_source(shapes, source, of_each, adapter)
                self._compiled[key] = self._read(shapes, memory, source, of_each)
        found: Encoded = self._compiled[key]
        return found

    def _compile_room(self, length: int, adapter: int | None) -> None:
        """Compiles all programs by which a source joins a batch, or is joined, so that memories have that length."""
        one, shorter = self._shape_of_source(length, adapter), length if self.places > 1 else 0
        encoded, carry, _ = self._join(self._find, None, None, one)
        self._place(self._find, encoded, one, 0)
        while shorter > memory_length(1):
            shorter //= 2
            short = self._shape_of_source(shorter, adapter)
            self._join(self._find, encoded, carry, short)
            self._join(self._find, *self._join(self._find, None, None, short)[:2], one)

    def _compile_steps(self, length: int, slots: int, wishes: Wishes, adapter: int | None) -> None:
        """Compiles the steps with a cache of that size, and its growing."""
        encoded, carry, _ = self._join(self._find, None, None, self._shape_of_source(length, adapter))
        for size in self._sizes.slots[1:]:
            if size <= slots:
                carry = self._grow(self._find, encoded, carry, size)
        self._step(self._find, encoded, carry, wishes, 1)

    def _program(self, name: str, *given: Any, **static: int) -> Any:
        """The compiled function for arguments of these shapes, which may be shapes alone."""
        whose = () if name.startswith("encode") else (self.strategy, self.places)
        key = name, *whose, *static.values(), *_shapes(given)
        if key not in self._compiled:
            with precision(self._model.dtype):
                made = jax.jit(partial(self._functions[name], **static), donate_argnums=DONATED.get(name, ()))
                self._compiled[key] = made.lower(*given).compile()
        return self._compiled[key]

    def _call(self, name: str, *given: Any, **static: int) -> Any:
        """The result of a program."""
        return self._program(name, *given, **static)(*given)

    def _find(self, name: str, *given: Any, **static: int) -> Any:
        """The shapes of a program's result, for arguments that may be shapes; compiles it."""
        return self._program(name, *given, **static).out_info

    def drop(self, place: int) -> None:
        """Frees a place, whether its answer is over or not."""
        self._in_use[place] = self._begins[place] = False
        self._sampling.temperature[place], self._scored[place] = 0, False
        self._ends[place] = True

    def advance(self, most: int = NO_END, *, often: bool = True) -> tuple[Decoded, np.ndarray]:
        """Takes steps until an example is done, or, `often` or where no switch is heard, for `SLICE` seconds.

        Returns arrays [B, ...]: what is written so far, and which places are done, or in use by nobody.
        """
        begun = time.perf_counter()
        often = often or not self._backend.can_listen
        decoded, done, taken = self._run_steps(min(self._steps, most) if often else most)
        self._steps = int(np.clip(SLICE * max(taken, 1) / (time.perf_counter() - begun), 1, MOST_STEPS))
        return decoded, done

    def steps_for(self, tokens: int, taken: int) -> int:
        """The fewest steps, after those that an example took, in which its answer can grow by so many tokens."""
        step = taken
        while tokens > 0 and step < self.starts.max():  # as long as not all rows have begun
            tokens -= int((self.starts <= step).sum())
            step += 1
        return step - taken + max(-(-tokens // len(self.starts)), 0)

    def news(self, decoded: Decoded, place: int, known: np.ndarray) -> list[tuple[int, int, int]]:
        """Time, row and place in it of each token beyond the `known` i32 [R] of each row, in the order of steps.

        With drafts some rows are generated ahead of others: tokens of a time-step come once all rows have reached it.
        """
        lengths = decoded.lengths[place]
        if self.has_drafts:
            lengths = np.minimum(lengths, np.maximum(int(decoded.steps[place]) - self.starts, 0))
        rows = np.flatnonzero(lengths > known)
        first, begin, end = (x[rows].tolist() for x in (self.starts, known, lengths))
        return sorted((first[k] + j, i, j) for k, i in enumerate(rows.tolist()) for j in range(begin[k], end[k]))

    def _run_steps(self, steps: int) -> tuple[Decoded, np.ndarray, int]:
        """The answers as far as they are written, which are done, and the number of steps taken."""
        assert self._encoded is not None and self._carry is not None, "no source has a place"
        self.lacks, wishes = {}, self._wishes(any(self._kinds()))
        with precision(self._model.dtype):
            while True:
                found = self._step(self._call, self._encoded, self._carry, wishes, steps)
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

    def _wishes(self, logits: bool) -> Wishes:
        """Those of all, in a program that computes all logits or the highest alone."""
        wishes = Wishes(forced=self._forced, grammar=self._grammar)
        scored = self._scored.any()
        return dataclasses.replace(wishes, sampling=self._sampling, scores=True, scored=scored) if logits else wishes

    # The programs, traced.

    def _meet(self, weights: Tree, encoded: Encoded) -> tuple[Refillable, Any]:
        """The strategy, with its small model if it drafts by one, and the decoder of all places."""
        strategy: Strategy = self.strategy
        memory = encoded.memory
        if self._drafting:
            weights, small = weights
            assert encoded.source is not None
            strategy = self._drafting.lend(strategy, small, encoded.source)
        return cast(Refillable, strategy), self._backend.decoder(
            self._model, lora.choose(weights, memory.adapter), memory
        )

    def _widened(self, encoded: Encoded, *, slots: int) -> Encoded:
        """The same sources with memories of so many slots."""
        source = encoded.source
        if source is not None:
            small = source.memory
            if self._drafting:
                small = self._drafting.backend.widen(small, slots)
            ids = jnp.pad(source.ids, ((0, 0), (0, slots - encoded.length)))
            source = dataclasses.replace(source, ids=ids, memory=small)
        return Encoded(self._backend.widen(encoded.memory, slots), source)

    def _emptied(self, weights: Tree, one: Encoded, *, slots: int) -> tuple[Encoded, Carry]:
        """Encoded sources and a carry for places of which none is in use; `one`: a source."""
        many = jax.tree.map(lambda x: jnp.zeros((self.places, *x.shape[1:]), x.dtype), one)
        strategy, decoder = self._meet(weights, many)
        state, wishes = strategy.init(self.places, many.source), Wishes(scores=True)
        state = strategy.stop(state, jnp.ones(self.places, bool))
        carry = decoding.begin(strategy, decoder, state, self._sizes, wishes=wishes, apart=True)
        return many, decoding.grow(decoder, carry, slots)

    def _reread(self, weights: Tree, encoded: Encoded, state: Tree) -> Tree:
        """A strategy's state for sources that were padded to another length; the same program for each cache size."""
        strategy, _ = self._meet(weights, encoded)
        return strategy.reread(state, encoded.source)

    def _with_states(self, carry: Carry) -> Carry:
        """The carry as the grammar needs it; `refill` puts in the states of examples that begin."""
        states = None if self._grammar is None else jnp.zeros(self._grammar.starts.shape, jnp.int32)
        return dataclasses.replace(carry, states=states)

    def _grown(self, weights: Tree, encoded: Encoded, carry: Carry, *, slots: int) -> Carry:
        return decoding.grow(self._meet(weights, encoded)[1], carry, slots)

    def _stepped(
        self,
        weights: Tree,
        encoded: Encoded,
        carry: Carry,
        wishes: Wishes,
        begins: Array,
        ends: Array,
        most: Array,
        switch: Array,
        watched: Array,
    ) -> tuple[Decoded, Array, Array | None, Carry]:
        """The answers as far as they are written, which are done, the number of steps left, and the carry."""
        (strategy, decoder), sizes = self._meet(weights, encoded), self._sizes
        carry = decoding.refill(
            strategy, carry, begins=begins, ends=ends, sizes=sizes, wishes=wishes, source=encoded.source
        )
        found: Stretch = decoding.decode(
            strategy,
            decoder,
            carry,
            sizes=sizes,
            slots=carry.filled.row.shape[1],
            wishes=wishes,
            pause_after=most,
            listen=lambda count: self._backend.listen(count, switch),
            watched=watched,
        )
        return found.decoded, strategy.done(found.carry.state), found.steps_left, found.carry


def _shapes(tree: Any) -> tuple[Hashable, ...]:
    """The key of a tree: its structure, and the shapes and dtypes of its arrays."""
    return jax.tree.structure(tree), tuple((x.shape, x.dtype) for x in jax.tree.leaves(tree))


def _placed(encoded: Encoded, new: Encoded, place: Array) -> Encoded:
    """The encoded sources with a new one at a place."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, place, axis=0), encoded, new)
