"""Algorithm 1 of the paper: the rows of an answer are generated side by side, with or without drafts.

`GridStrategy` implements the algorithm. `Pipelined` is the paper's decoder. `Sequential` is ordinary T5 decoding, the
special case of a single row. Drafts (`drafting`) only change how many tokens a call feeds and accepts.

Shapes as in `rows`: B batch, R rows of the grid, T the most tokens of a row.
"""

import dataclasses
from typing import Self

import jax.numpy as jnp
import numpy as np

from pipejax import grid
from pipejax.decoding import repeated_parts
from pipejax.decoding.drafters.drafter import Drafter
from pipejax.decoding.drafting import Drafts
from pipejax.decoding.gathering import Query
from pipejax.decoding.rows import Rows, RowState
from pipejax.decoding.strategy import TRUNCATIONS, Array, Decoded, SourceIds, ends_of, is_end
from pipejax.decoding.times import NEVER
from pipejax.system import Tree

CODE = {name: i for i, name in enumerate(TRUNCATIONS)}


class GridStrategy(Rows):
    """The steps of Algorithm 1. See `Rows` for settings and rules.

    In each call every open row feeds its newest token and generates the next one. Since later rows may see the end
    token of a row, this token is fed once, in the first call that has a query of a later row. The time of the fed end
    token is the time at which it was generated.
    """

    drafts: Drafts | None  # None: each row feeds one token in a call

    def __init_subclass__(cls) -> None:
        """Raises a TypeError if a subclass overrides `start`, since the steps would not follow it."""
        if "start" in vars(cls):
            raise TypeError(f"{cls.__name__}.start: rows start as `delay` says; other starts need another strategy")

    @property
    def width(self) -> int:
        """The most tokens that a row feeds in one call: its newest one and its drafts."""
        return 1 if self.drafts is None else self.drafts.width(self)

    @property
    def most_queries(self) -> int:
        """The most queries of an example in one call: `width` for each row, and its probes."""
        return self.rows * (1 if self.drafts is None else self.drafts.columns(self))

    @property
    def slots(self) -> int:
        """The most slots that a batch can fill."""
        return self.slots_without_drafts if self.drafts is None else self.drafts.slots(self)

    @property
    def queries(self) -> tuple[int, ...] | None:  # type: ignore[override]  # a constant of most strategies
        """See `Stepper`. With drafts, `Drafts` chooses the size of each call among these counts."""
        return None if self.drafts is None else self.drafts.query_counts

    @property
    def reads_source(self) -> bool:  # type: ignore[override]
        """Whether there is a drafter, which reads the source."""
        return self.drafts is not None

    @property
    def drafter(self) -> Drafter | None:
        """The drafter, if there are drafts."""
        return None if self.drafts is None else self.drafts.drafter

    @property
    def on_grid(self) -> Self:
        """The strategy itself, as it generates the rows of a grid."""
        return self

    def tuned_for(self, platform: str, *, costs: float, skips_fillers: bool) -> Self:
        """See `Strategy`. Tunes the sizes of calls among which drafts choose, and their costs."""
        if self.drafts is None:
            return self
        drafts = self.drafts.tuned_for(platform, self.rows, costs=costs, skips_fillers=skips_fillers)
        return self.replace(drafts=drafts)

    def bind_source(self, source: SourceIds) -> Self:
        """See `Strategy`."""
        return self if self.drafts is None else self.replace(drafts=self.drafts.bind_source(source, self))

    def init(self, batch: int, source: SourceIds | None = None) -> RowState:
        """Returns the state of an empty grid."""
        none = jnp.zeros((batch, self.rows), jnp.int32)
        return RowState(
            tokens=jnp.zeros((batch, self.rows, self.time_max), jnp.int32),
            length=none,
            last=none + self.bos,
            ended=none > 0,
            retired=none > 0,
            started=none[:, 0],
            done=none[:, 0] > 0,
            circle=none[:, 0] + NEVER if self.unique and not self.literal else None,
            drafts=None if self.drafts is None else self.drafts.init(self, batch, source),
        )

    def query(self, state: RowState) -> tuple[RowState, Query]:
        """Starts rows whose time has come (lines 5-7), then feeds the newest token of every open row (line 8)."""
        if self.drafts is not None:
            return self.drafts.query(self, state)
        rows, newest, is_open = jnp.arange(self.rows), self.first + state.length, self.find_open(state)
        # A row starts when all open rows have reached its start. If no row is open, it starts at once: the time-steps
        # until then count as steps, but need no call.
        reached = jnp.where(is_open, newest, NEVER).min(axis=1)
        begun = jnp.where(state.done | self.is_closed(state), self.rows, state.started)[:, None]
        begins = (rows == begun) & (self.first <= reached[:, None]) if self.delay else rows >= begun
        asks = is_open | begins
        unfed = self.find_unfed(state, asks)
        query = Query(tokens=state.last, row=rows[None], time=newest, live=asks | unfed)
        started = state.started + begins.sum(axis=1)
        return dataclasses.replace(state, retired=state.retired | unfed, started=started), query

    def advance(self, state: RowState, answers: Tree) -> RowState:
        """Appends the generated tokens to open rows (lines 9-11) and marks examples as done (lines 12-13)."""
        if self.drafts is not None:
            return self.drafts.advance(self, state, answers)
        asked = self.find_open(state)
        ends = asked & is_end(answers, ends_of(self))
        here = asked[:, :, None] & (jnp.arange(self.time_max) == state.length[:, :, None])
        tokens, length = jnp.where(here, answers[:, :, None], state.tokens), state.length + asked
        if self.separator is not None:
            ends |= asked & (repeated_parts.find_end(tokens, state.length, length, self.separator) <= length)
        ended, circle = state.ended | ends, state.circle
        if circle is not None:
            circle = jnp.minimum(circle, self.find_circle(tokens, length, ended, ends))
        last = jnp.where(asked, answers, state.last)
        state = dataclasses.replace(state, tokens=tokens, length=length, last=last, ended=ended, circle=circle)
        return self.settle(state)

    def stop(self, state: RowState, which: Array) -> RowState:
        """See `Refillable`."""
        return dataclasses.replace(state, done=state.done | which)

    def reread(self, state: RowState, source: SourceIds | None) -> RowState:
        """See `Refillable`. Resets the drafter's state, which changes no answer."""
        assert self.drafts is not None and source is not None, "only a drafter reads the source"
        drafter = self.drafts.init_drafter(source, self.rows)
        return dataclasses.replace(state, drafts=dataclasses.replace(state.drafts, drafter=drafter))

    def kept(self, state: RowState) -> Array | None:
        """See `Stepper`. With drafts, the accepted tokens of the last call."""
        if self.drafts is None:
            return None
        assert state.drafts is not None
        kept: Array = state.drafts.kept.reshape(len(state.done), -1)
        return kept

    def done(self, state: RowState) -> Array:
        """Returns whether each example is done, bool [B], as `advance` determined."""
        return state.done

    def result(self, state: RowState) -> Decoded:
        """Returns the rows without their end tokens (line 14), and the time-steps that Algorithm 1 takes for them.

        If spawning was ended neither by an empty row nor by `sub_max`, the number of steps is `time_max`. For an
        example that is not done it is the number of complete time-steps: those whose tokens are all generated.
        """
        started, drafts = self.has_started(state), state.drafts
        complete = self._has_empty(state)
        if state.circle is not None:
            complete |= state.circle < NEVER
        cut = (started & ~state.ended).any(axis=1)
        over = ~cut & (self.literal | complete | (state.started == self.sub_max))
        newest = self.first + state.length
        steps = jnp.where(started, newest, 0).max(axis=1)
        next_start = jnp.where(self.is_closed(state), NEVER, grid.start(state.started, self.delay))
        complete_steps = jnp.minimum(jnp.where(self.find_open(state), newest, NEVER).min(axis=1), next_start)
        names = self if self.drafts is None or self.drafts.names is None else self.drafts.names
        return Decoded(
            tokens=state.tokens,
            lengths=state.length - state.ended,
            steps=jnp.where(state.done, jnp.where(over, steps, self.time_max), complete_steps),
            truncated=names.cut(cut, complete, state.started),
            calls=None if drafts is None else drafts.calls,
            trace=None if drafts is None else drafts.trace,
        )

    def cut(self, cut: Array, complete: Array, started: Array) -> Array:
        """Returns the codes i32 [B] of `Decoded.truncated`.

        Args:
          cut: bool [B], whether a row was open at the end.
          complete: bool [B], whether an empty row or repeated rows ended the answer.
          started: i32 [B], number of rows that have started; not used with a delay of 0, where their number is given.
        """
        full = (started == self.sub_max) & (self.delay > 0)
        otherwise = CODE["time_max"] if self.delay and not self.literal else CODE[None]
        whole = jnp.where(complete, CODE[None], jnp.where(full, CODE["sub_max"], otherwise))
        return jnp.where(cut, CODE["time_max"], whole).astype(jnp.int32)

    def calls(self, decoded: Decoded) -> np.ndarray:
        """Returns i32 [B], one call for each time-step with an open row; with drafts, the counted calls."""
        if decoded.calls is not None:
            return np.asarray(decoded.calls)
        pairs = zip(np.asarray(decoded.lengths), np.asarray(decoded.steps), strict=True)
        return np.asarray([grid.pipelined_calls(lengths, delay=self.delay, steps=steps) for lengths, steps in pairs])


@dataclasses.dataclass(frozen=True)
class Pipelined(GridStrategy):
    """The pipelined decoder of the paper; see `Rows` for its settings."""

    delay: int
    time_max: int
    sub_max: int
    literal: bool = False
    bos: int = 0
    eos: int = 1
    unique: bool = False
    other_ends: tuple[int, ...] = ()  # further tokens that end a row
    drafts: Drafts | None = None


@dataclasses.dataclass(frozen=True)
class Sequential(GridStrategy):
    """Ordinary greedy decoding of T5, the baseline: a grid of one row.

    With a `separator`, an answer ends when it repeats itself: see `repeated_parts.find_end`.
    """

    max_length: int  # the most tokens of an answer, the end token included
    bos: int = 0
    eos: int = 1
    other_ends: tuple[int, ...] = ()  # further tokens that end an answer
    drafts: Drafts | None = None
    separator: int | None = None  # the token between two rows of an answer that must not repeat itself

    delay = 0
    sub_max = 1
    literal = False
    unique = False

    @property
    def time_max(self) -> int:  # type: ignore[override]  # a field of `Pipelined`
        """T, `max_length`."""
        return self.max_length

    def cut(self, cut: Array, complete: Array, started: Array) -> Array:
        """Returns the codes i32 [B] of `Decoded.truncated`: "max_length" for answers without an end token."""
        return jnp.where(cut, CODE["max_length"], CODE[None]).astype(jnp.int32)
