"""A batch whose examples come and go: between two calls of the compiled loop others take the places that are free.

Shapes: B places, R rows of the grid, W times, L slots of the memory, C slots of the cache.
"""

import copy
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax import decoding
from pipejax.data.shapes import bucket, memory_length, pad
from pipejax.decoding import MOST_LIKELY, Carry, Decoded, Grammar, Refillable, Sampling, Stretch, Wishes
from pipejax.inference.compiler import Needs
from pipejax.inference.programs import Programs, encode_batch, schedule
from pipejax.inference.schema import Schema
from pipejax.inference.weights import Weights
from pipejax.model import lora
from pipejax.model.precision import precision
from pipejax.model.t5 import Memory

Array = jax.Array
SLICE = 0.1  # seconds between two looks at what is written; to stop and go on costs some milliseconds
MOST_STEPS = 256  # in between, at the most
NO_END = 1 << 30  # steps, more than any decode takes
DONATED = {"place": 0, "go_on": 2}  # arguments whose memory the result takes


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
        self.strategy = strategy
        self.starts = np.asarray(strategy.start(np.arange(strategy.places[0])))  # i64 [R], times of first tokens
        self.places = places
        self._model, self._backend, self._ready = programs.model, programs.backend, programs.on(1)
        self._sizes = schedule(strategy, places)
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
            "empty": self._emptied,
            "widen": self._backend.widen,
            "place": _placed,
            "grow": self._grown,
            "go_on": self._gone_on,
        }
        self.clear()

    def clear(self) -> None:
        """Nobody uses it, and it holds no memory."""
        places = self.places
        self._in_use, self._scored = np.zeros(places, bool), np.zeros(places, bool)
        self._sampling = Sampling.together([MOST_LIKELY] * places)
        self._begins, self._ends = np.zeros(places, bool), np.zeros(places, bool)
        self._memory: Memory | None = None
        self._carry: Carry | None = None
        self._slots, self._steps = self._sizes.slots[0], 1

    def give(self, forced: np.ndarray | None, schema: Schema | None = None) -> None:
        """Says what is known of all answers, `forced` [R, W] as in `Wishes`, while nobody has a place."""
        assert not self._in_use.any(), "answers of other rows are under way"
        self._forced = None if forced is None else np.repeat(forced[None], self.places, axis=0)
        self.schema = schema
        self._grammar = None if schema is None else schema.grammar(self.strategy, [None] * self.places)
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
        with precision(self._model.dtype):
            memory = self._encodings.of(np.asarray(ids, np.int32), adapter, self._encoded)
            length = memory.mask.shape[1]
            if self._memory is None or (not self._in_use.any() and self._length != length):
                self._slots = self._sizes.slots[0]
                self._memory, carry = self._call("empty", self._ready.decoding, memory, slots=self._slots)
                self._carry = self._with_states(carry)
            self._memory, memory = self._widened(self._memory, length), self._widened(memory, self._length)
            many = self.places > 1
            self._memory = self._call("place", self._memory, memory, np.int32(place)) if many else memory
        self._scored[place] = log_probs
        if self.schema is not None and self._grammar is not None:
            self._grammar.last[place] = self.schema.grammar(self.strategy, [row_tokens]).last[0]
        for field in dataclasses.fields(self._sampling):
            getattr(self._sampling, field.name)[place] = getattr(sampling, field.name)
        self._in_use[place] = self._begins[place] = True
        return place

    def _encoded(self, ids: np.ndarray, adapter: int | None) -> Memory:
        source, own = pad([ids], bucket(len(ids))), None if adapter is None else np.asarray([adapter], np.int32)
        memory: Memory = self._call("encode", self._ready.encoding, source, np.asarray([len(ids)], np.int32), own)
        return memory

    def _widened(self, memory: Memory, length: int) -> Memory:
        """With at least so many slots: by doubling them, which takes few programs."""
        while (own := memory.mask.shape[1]) < length:
            memory = self._call("widen", memory, slots=2 * own)
        return memory

    @property
    def _length(self) -> int:
        return 0 if self._memory is None else self._memory.mask.shape[1]

    def needs(self, length: int, *, logits: bool, adapter: int | None) -> Needs:
        """Those to be compiled before a source joins whoever has a place; `logits`: whether it is drawn or scored."""
        own, taken = memory_length(bucket(length)), self._in_use.any()
        slots = self._slots if taken or own == self._length else self._sizes.slots[0]
        most = max(own, self._length) if taken else own
        return self.needs_of(bucket(length), most, slots, {logits, *self._kinds()}, adapter)

    def _kinds(self) -> list[bool]:
        """Whether each of those that have a place is sampled or scored."""
        return [*map(bool, (self._scored | (self._sampling.temperature > 0))[self._in_use])]

    def needs_of(
        self, source: int | None, length: int, slots: int, logits: Iterable[bool], adapter: int | None = None
    ) -> Needs:
        """Those of a source, if there is one, and of steps with that memory, cache and kinds."""
        found: dict[Hashable, Callable[[], object]] = {}
        own: tuple[Any, ...] = self.strategy, self.places, length
        if source is not None:
            found["encode", source] = partial(self._program, "encode", *self._of_source(source, adapter))
            found["room", *own] = partial(self._make_room, length, adapter)
        for kind in sorted({*logits}):
            wishes = self._wishes(kind)
            found["steps", *own, slots, *_shapes(wishes)] = partial(self._make_steps, length, slots, wishes, adapter)
        return {key: make for key, make in found.items() if key not in self._compiled}

    def _of_source(self, length: int, adapter: int | None) -> tuple[Any, ...]:
        source, of_each = jax.ShapeDtypeStruct((1, length), np.int32), jax.ShapeDtypeStruct((1,), np.int32)
        return self._ready.encoding, source, of_each, None if adapter is None else of_each

    def _shape(self, length: int, adapter: int | None) -> Memory:
        """That of the memory of one source."""
        if (key := ("memory", length)) not in self._compiled:
            self._compiled[key] = jax.eval_shape(self._functions["encode"], *self._of_source(length, adapter))
        memory: Memory = self._compiled[key]
        return memory

    def _make_room(self, length: int, adapter: int | None) -> None:
        """Compiles all that puts a source into a memory of that length."""
        one = self._shape(length, adapter)
        memory, _ = self._program("empty", self._ready.decoding, one, slots=self._sizes.slots[0]).out_info
        if self.places > 1:
            self._program("place", memory, one, np.int32(0))
        while length > memory_length(1):  # shorter ones become as long
            length //= 2
            for n in {1, self.places}:
                many = jax.tree.map(
                    lambda x, n=n: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), self._shape(length, adapter)
                )
                self._program("widen", many, slots=2 * length)

    def _make_steps(self, length: int, slots: int, wishes: Wishes, adapter: int | None) -> None:
        """Compiles the steps with a cache of that size, and its growing."""
        one = self._shape(length, adapter)
        memory, carry = self._program("empty", self._ready.decoding, one, slots=self._sizes.slots[0]).out_info
        if wishes.grammar is not None:
            carry = dataclasses.replace(carry, states=jax.ShapeDtypeStruct(wishes.grammar.starts.shape, np.int32))
        for size in self._sizes.slots[1:]:
            if size <= slots:
                carry = self._program("grow", self._ready.decoding, memory, carry, slots=size).out_info
        each = np.zeros(self.places, bool)
        given = self._ready.decoding, memory, carry, wishes, each, each, np.int32(1), self._switch.address, each
        self._program("go_on", *given)

    def _program(self, name: str, *given: Any, **static: int) -> Any:
        """The compiled function for arguments of these shapes, which may be shapes alone."""
        whose = () if name == "encode" else (self.strategy, self.places)
        key = name, *whose, *static.values(), *_shapes(given)
        if key not in self._compiled:
            with precision(self._model.dtype):
                made = jax.jit(partial(self._functions[name], **static), donate_argnums=DONATED.get(name, ()))
                self._compiled[key] = made.lower(*given).compile()
        return self._compiled[key]

    def _call(self, name: str, *given: Any, **static: int) -> Any:
        return self._program(name, *given, **static)(*given)

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
        """Time, row and place in it of each token beyond the `known` i32 [R] of each row, in the order of steps."""
        lengths = decoded.lengths[place]
        rows = np.flatnonzero(lengths > known)
        first, begin, end = (x[rows].tolist() for x in (self.starts, known, lengths))
        return sorted((first[k] + j, i, j) for k, i in enumerate(rows.tolist()) for j in range(begin[k], end[k]))

    def _run_steps(self, steps: int) -> tuple[Decoded, np.ndarray, int]:
        """The answers as far as they are written, which are done, and the number of steps taken."""
        assert self._memory is not None, "nobody has a place"
        self.lacks, wishes = {}, self._wishes(any(self._kinds()))
        with precision(self._model.dtype):
            while True:
                given = self._ready.decoding, self._memory, self._carry, wishes, self._begins, self._ends
                more = np.int32(steps), self._switch.address, self._in_use
                decoded, done, left, self._carry = self._call("go_on", *given, *more)
                self._begins, self._ends = np.zeros_like(self._begins), np.zeros_like(self._ends)
                decoded, done, left = jax.device_get((decoded, done, left))
                left = abs(int(left))
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
                self._carry = self._call("grow", self._ready.decoding, self._memory, self._carry, slots=slots)

    def _wishes(self, logits: bool) -> Wishes:
        """Those of all, in a program that computes all logits or the highest alone."""
        wishes = Wishes(forced=self._forced, grammar=self._grammar)
        scored = self._scored.any()
        return dataclasses.replace(wishes, sampling=self._sampling, scores=True, scored=scored) if logits else wishes

    def _decoder(self, weights: Weights, memory: Memory) -> Any:
        return self._backend.decoder(self._model, lora.choose(weights, memory.adapter), memory)

    def _emptied(self, weights: Weights, memory: Memory, *, slots: int) -> tuple[Memory, Carry]:
        """A memory and a carry whose places nobody uses; `memory`: of one source."""
        many = jax.tree.map(lambda x: jnp.zeros((self.places, *x.shape[1:]), x.dtype), memory)
        decoder = self._decoder(weights, many)
        state, wishes = self.strategy.init(self.places), Wishes(scores=True)
        state = self.strategy.stop(state, jnp.ones(self.places, bool))
        carry = decoding.begin(self.strategy, decoder, state, self._sizes, wishes=wishes, apart=True)
        return many, decoding.grow(decoder, carry, slots)

    def _with_states(self, carry: Carry) -> Carry:
        """The carry as the grammar needs it; `refill` puts in the states of examples that begin."""
        states = None if self._grammar is None else jnp.zeros(self._grammar.starts.shape, jnp.int32)
        return dataclasses.replace(carry, states=states)

    def _grown(self, weights: Weights, memory: Memory, carry: Carry, *, slots: int) -> Carry:
        return decoding.grow(self._decoder(weights, memory), carry, slots)

    def _gone_on(
        self,
        weights: Weights,
        memory: Memory,
        carry: Carry,
        wishes: Wishes,
        begins: Array,
        ends: Array,
        most: Array,
        switch: Array,
        watched: Array,
    ) -> tuple[Decoded, Array, Array | None, Carry]:
        """The answers as far as they are written, which are done, the number of steps left, and the carry."""
        strategy, sizes = self.strategy, self._sizes
        carry = decoding.refill(strategy, carry, begins=begins, ends=ends, sizes=sizes, wishes=wishes)
        decoder, slots = self._decoder(weights, memory), carry.filled.row.shape[1]
        found: Stretch = decoding.decode(
            strategy,
            decoder,
            carry,
            sizes=sizes,
            slots=slots,
            wishes=wishes,
            pause_after=most,
            listen=lambda count: self._backend.listen(count, switch),
            watched=watched,
        )
        return found.decoded, strategy.done(found.carry.state), found.steps_left, found.carry


def _shapes(tree: Any) -> tuple[Hashable, ...]:
    """The key of a tree: its structure, and the shapes and dtypes of its arrays."""
    return jax.tree.structure(tree), tuple((x.shape, x.dtype) for x in jax.tree.leaves(tree))


def _placed(memory: Memory, new: Memory, place: Array) -> Memory:
    """The memory with that of one source at a place."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, place, axis=0), memory, new)
