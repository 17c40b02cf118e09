"""Continuous batching: a batch with a fixed number of places, whose examples are added and removed during decoding.

`RunningBatch.add` encodes a source and assigns it a free place. `RunningBatch.advance` calls the compiled loop, which
begins the new examples, stops the dropped ones, and takes steps with all running examples until an example is done or a
pause is due. Examples are added and dropped between two calls. All sources share one memory length L and one cache size
C. L grows when a source needs more slots, and C grows when an answer needs more slots; L and C are reset when a source
is added while no place is in use.

`batch_programs` has the programs that a batch runs or compiles ahead of time, and `encodings` its encoded sources.

Shapes: B places for examples of a batch, R rows of the grid, W times, L slots of the memory, C slots of the cache.
"""

import copy
import dataclasses
import enum
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from pipejax.data.shapes import bucket, memory_length, pad
from pipejax.decoding import (
    MOST_LIKELY,
    Carry,
    Decoded,
    DecodingOptions,
    Refillable,
    Rule,
    Sampling,
    Strategy,
)
from pipejax.inference.answer_format import AnswerFormat
from pipejax.inference.batch_programs import BatchPrograms, Changes
from pipejax.inference.decoding_options import Constraints, RuleSettings, repetition_of
from pipejax.inference.encodings import Encoded, Encodings
from pipejax.inference.programs import Programs, shapes_of
from pipejax.model.precision import precision
from pipejax.system.compiled import CompiledPrograms, Needs

Array = jax.Array
SLICE = 0.1  # the intended duration of one `advance` in seconds; each pause of the loop costs some milliseconds
MOST_STEPS = 256  # the most steps of one `advance`
NO_END = 1 << 30  # a number of steps that no decode reaches


class StepKind(enum.IntEnum):
    """The kinds of steps, by the tokens that a step returns; each kind includes the kinds before it."""

    TOKENS = 0  # the most likely tokens
    LOGITS = 1  # sampled tokens, or log-probabilities
    REPETITION = 2  # tokens chosen with the rule against repetition

    @classmethod
    def of(cls, sampling: Sampling, log_probs: bool) -> "StepKind":
        """Returns the kind of steps that an answer needs."""
        return cls(2 if sampling.limits_repetition else log_probs or sampling.temperature > 0)


class Steps(NamedTuple):
    """The key of programs that take steps."""

    strategy: Strategy
    places: int
    length: int  # L, the number of slots of the memory
    slots: int  # C, the number of slots of the cache
    kind: StepKind
    answer_format: str  # `AnswerFormat.program_label`; "": free rows
    shapes: tuple[Hashable, ...] = ()  # the shapes of the options


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

    The answer of an example does not depend on the other examples. Programs are compiled on first use: an encoder for
    each padded length of sources, and a decoder for each memory length (a power of two), each cache size, and each kind
    of steps (`StepKind`).
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
          switch: the switch that pauses the loop.
          encodings: a cache of encoded sources.
          compiled: a table of programs that another thread fills. If given, `advance` never compiles: it stops and sets
            `lacks` if a program is missing. None: a program is compiled at its first call.
        """
        self._programs = BatchPrograms(programs, strategy, places, compiled)
        self._programs_for = partial(BatchPrograms, programs, strategy, places, self._programs.compiled)
        self.starts = np.asarray(
            strategy.start(np.arange(strategy.places[0]))
        )  # i64 [R], times of the queries that generate first tokens
        self.places = places
        self._forced: np.ndarray | None = None
        self._rules: tuple[Rule, ...] = ()  # the rules that all steps follow
        self._rule_settings = RuleSettings()
        self.answer_format: AnswerFormat | None = None
        self._switch = switch or Switch()
        self._encodings = encodings or Encodings(0)
        self._waits = compiled is None
        self.lacks: Needs = {}  # programs that the last `advance` needed for a larger cache, and that are not compiled
        self._adapter: int | None = None  # the adapter of the latest source
        self.clear()

    @property
    def strategy(self) -> Refillable:
        """The strategy of all answers, tuned for the weights and the forced tokens."""
        return self._programs.strategy

    @property
    def has_drafts(self) -> bool:
        """Whether a row may be generated ahead of other rows."""
        return getattr(self.strategy, "drafts", None) is not None

    @property
    def cache_sizes(self) -> tuple[int, ...]:
        """The sizes through which the cache grows."""
        return self._programs.sizes.slots

    def clear(self) -> None:
        """Frees all places and the memory of their arrays."""
        places = self.places
        self._in_use, self._scored = np.zeros(places, bool), np.zeros(places, bool)
        self._sampling = Sampling.together([MOST_LIKELY] * places)
        self._begins, self._ends = np.zeros(places, bool), np.zeros(places, bool)
        self._encoded: Encoded | None = None
        self._carry: Carry | None = None
        self._slots, self._steps = self.cache_sizes[0], 1

    def give(self, constraints: Constraints) -> None:
        """Sets the constraints of all answers. The batch must be empty."""
        assert not self._in_use.any(), "the batch must be empty"
        forced, self.answer_format, rules, self._rule_settings = constraints
        self._forced = None if forced is None else np.repeat(forced[None], self.places, axis=0)
        if self.answer_format is not None:
            rules = self.answer_format.rule(self.strategy, [None] * self.places), *rules
        # Arrays that all examples share are transferred to the device once, not with each call.
        self._rules = tuple(rule.on_device() for rule in rules)
        programs = self._programs_for(options=DecodingOptions(forced=self._forced, rules=self._rules))
        if programs.strategy != self.strategy:
            self._programs = programs
            self.clear()
        if self._carry is not None:
            self._carry = self._programs.with_states(self._carry, self._rules)

    def empty_copy(self) -> "RunningBatch":
        """Creates an empty batch with the same strategy and number of places, which shares the compiled programs."""
        other = copy.copy(self)
        other.clear()
        return other

    @property
    def fullest(self) -> int:
        """The place whose example uses the most slots of the cache."""
        assert self._carry is not None, "no place is in use"
        return int(np.where(self._in_use, np.asarray(self._carry.used), -1).argmax())

    @property
    def free(self) -> list[int]:
        """The places that are not in use."""
        return np.flatnonzero(~self._in_use).tolist()

    def add(
        self,
        ids: Sequence[int] | np.ndarray,
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
        programs, run = self._programs, self._programs.run
        with precision(programs.functions.model.dtype):
            memory = self._encodings.of(
                np.asarray(ids, np.int32),
                adapter,
                lambda *_: programs.encode_source(run, source, length, adapter),
                kind=programs.encoder,
            )
            one = programs.read(run, memory, source, length)
            if self._encoded is None or (not self._in_use.any() and self._encoded.length != one.length):
                self._slots, self._encoded, self._carry = self.cache_sizes[0], None, None
            is_new = self._carry is None
            self._encoded, carry, one = programs.join(run, self._encoded, self._carry, one)
            self._carry = programs.with_states(carry, self._rules) if is_new else carry
            self._encoded = programs.place(run, self._encoded, one, place)
        self._scored[place] = log_probs
        if self.answer_format is not None:
            of_format = self._rules[0].put(place, self.answer_format.rule(self.strategy, [row_tokens]))
            self._rules = of_format, *self._rules[1:]
        for field in dataclasses.fields(self._sampling):
            getattr(self._sampling, field.name)[place] = getattr(sampling, field.name)
        self._in_use[place] = self._begins[place] = True
        return place

    @property
    def _length(self) -> int:
        return 0 if self._encoded is None else self._encoded.length

    def needs(self, length: int, *, kind: StepKind, adapter: int | None) -> Needs:
        """Returns the programs to compile before a source can be added.

        Args:
          length: number of tokens of the source.
          kind: the kind of steps that its answer needs.
          adapter: as for `add`.
        """
        own, taken = memory_length(bucket(length)), self._in_use.any()
        slots = self._slots if taken or own == self._length else self.cache_sizes[0]
        most = max(own, self._length) if taken else own
        return self.needs_of(bucket(length), most, slots, {kind, *self._kinds()}, adapter)

    def _kinds(self) -> list[StepKind]:
        """Returns the kind of steps that each place in use needs."""
        logits, repetition = self._scored | (self._sampling.temperature > 0), self._sampling.limits_repetition
        return [*map(StepKind, np.where(repetition, 2, logits)[self._in_use].tolist())]

    def needs_of(
        self, source: int | None, length: int, slots: int, kinds: Iterable[StepKind], adapter: int | None = None
    ) -> Needs:
        """Returns the programs to compile for adding a source and for steps, without the compiled programs.

        Args:
          source: the padded length of the source; None: no source is added.
          length: L, the memory length of the batch.
          slots: C, the cache size.
          kinds: the kinds of steps.
          adapter: as for `add`.
        """
        found: dict[Hashable, Callable[[], object]] = {}
        programs, own = self._programs, (self.strategy, self.places, length)
        if source is not None:
            reads = (self.strategy.drafter,) if programs.functions.has_reader else ()
            found[programs.encoder, source, *reads] = partial(programs.trace_source, programs.find, source, adapter)
            found["room", *own] = partial(programs.compile_room, length, adapter)
        for kind in sorted({*kinds}):
            options = self._options(kind)
            label = "" if self.answer_format is None else self.answer_format.program_label
            key = Steps(*own, slots, kind, label, shapes_of(options))
            found[key] = partial(programs.compile_steps, length, slots, options, adapter)
        return {key: make for key, make in found.items() if key not in programs.compiled}

    def drop(self, place: int) -> None:
        """Frees a place, whether its example is done or not."""
        self._in_use[place] = self._begins[place] = False
        for field in dataclasses.fields(MOST_LIKELY):
            getattr(self._sampling, field.name)[place] = getattr(MOST_LIKELY, field.name)
        self._scored[place] = False
        self._ends[place] = True

    def advance(self, most: int = NO_END, *, often: bool = True) -> tuple[Decoded, np.ndarray]:
        """Takes steps until an example is done, the switch is set, or `most` steps are taken.

        Args:
          most: the most steps to take.
          often: whether to return after about `SLICE` seconds as well. With a backend that cannot read a switch,
            `advance` always returns after about this time.

        Returns:
          The rows so far, arrays [B, ...]; and bool [B], the places whose example is done or that are not in use.
        """
        begun = time.perf_counter()
        often = often or not self._programs.functions.backend.can_listen
        decoded, done, taken = self._run_steps(min(self._steps, most) if often else most)
        self._steps = int(np.clip(SLICE * max(taken, 1) / (time.perf_counter() - begun), 1, MOST_STEPS))
        return decoded, done

    def steps_for(self, tokens: int, taken: int) -> int:
        """Returns the smallest number of steps in which an answer can grow by `tokens` tokens, after `taken` steps."""
        step = taken
        while tokens > 0 and step < self.starts.max():  # repeats until all rows have begun
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
        self.lacks, options = {}, self._options(max(self._kinds(), default=StepKind.TOKENS))
        programs = self._programs
        # `_options` may append the rule against repetition, which has no state, to the batch's rules.
        states = *self._carry.states[: len(self._rules)], *[None] * (len(options.rules) - len(self._rules))
        self._carry = dataclasses.replace(self._carry, states=states)
        with precision(programs.functions.model.dtype):
            while True:
                changes = Changes(self._begins, self._ends, np.int32(steps), self._switch.address, self._in_use)
                found = programs.step(programs.run, self._encoded, self._carry, options, changes)
                self._carry = found[-1]
                self._begins, self._ends = np.zeros_like(self._begins), np.zeros_like(self._ends)
                decoded, done, more = jax.device_get(found[:-1])
                left = abs(int(more))
                if left < steps or done[self._in_use].any() or not self._in_use.any():
                    return decoded, done, steps - left
                # The first step did not fit into the cache.
                if self._slots == self.cache_sizes[-1]:
                    raise self._programs.sizes.full()
                slots = next(n for n in self.cache_sizes if n > self._slots)
                if not self._waits:
                    self.lacks = self.needs_of(None, self._length, slots, self._kinds(), self._adapter)
                    if self.lacks:
                        return decoded, done, 0
                self._slots = slots
                self._carry = programs.grow(programs.run, self._encoded, self._carry, slots)

    def _options(self, kind: StepKind) -> DecodingOptions:
        """Returns the options of the whole batch for steps of a kind."""
        if kind == StepKind.TOKENS:
            return DecodingOptions(forced=self._forced, rules=self._rules)
        rules, sampling, scored = self._rules, self._sampling, self._scored.any()
        if kind == StepKind.REPETITION:
            bos = self._programs.bos
            rules = *rules, repetition_of(sampling, self._forced, self.strategy, bos, self._rule_settings)
        return DecodingOptions(sampling=sampling, forced=self._forced, rules=rules, scores=True, scored=scored)
