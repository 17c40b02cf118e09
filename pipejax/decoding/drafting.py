"""Greedy decoding in fewer decoder calls: a drafter guesses how rows go on, and one call verifies the guesses of all.

In a call each open row feeds its newest token and the tokens drafted after it. A drafted token is right if it is what
the model answers to the token before it. By `grid.visible` an answer at time t depends on the row's own tokens up to t
and on those of the rows above it on the page, the lower numbers, up to t. So it counts only if all of these were fed
and right, in this call or before: what is accepted is what greedy decoding writes, token for token. A token that was
fed and does not count is taken out of the cache.

A row begins once the rows before it are written up to its start. With drafts that reach so far it is asked in the same
call already, and begins if they turn out right.
"""

import dataclasses
from functools import cached_property
from typing import ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.decoding import trace as tracing
from pipejax.decoding.core import QUERIES
from pipejax.decoding.draft_lengths import TrackRecord, choose_lengths
from pipejax.decoding.drafters.interface import Borrower, Drafter, Written
from pipejax.decoding.gathering import Query, count_slots
from pipejax.decoding.interface import Array, Decoded, Model, SourceIds, ends_of, is_end
from pipejax.decoding.pipelined import NEVER, OnGrid, Pipelined, over_earlier_rows
from pipejax.grid import Numbers, start
from pipejax.system import Tree


@flax.struct.dataclass
class DraftedState:
    """The rows as far as they are written, and the last questions."""

    tokens: Array  # i32 [B, R, T], of each row, the end token included
    length: Array  # i32 [B, R], how many
    ended: Array  # bool [B, R], by an end token
    retired: Array  # bool [B, R], that token was fed
    started: Array  # i32 [B], number of rows that have started
    done: Array  # bool [B]
    calls: Array  # i32 [B], decoder calls in which the example asked
    step: Array  # i32 scalar, decoder calls of the batch
    used: Array  # i32 scalar, slots that are taken
    fed: Array  # i32 [B, 1 + D, R], the newest token of each row and its drafts
    live: Array  # bool [B, 1 + D, R]
    kept: Array  # bool [B, 1 + D, R], what counts of it
    trust: Array  # i32 [B, R], the drafter's own trust in its last drafts
    record: TrackRecord  # how often drafts were right
    guesses: Array  # i32 [B, R, D], the model's answers beyond what was accepted
    guessed: Array  # i32 [B, R], how many
    drafter: object  # the drafter's own
    circle: Array | None = None  # i32 [B], as `Pipelined.circle`, if rows are to be unique
    trace: tracing.Trace | None = None  # what became of drafts, if it is kept


class Verdict(NamedTuple):
    """The findings of a call about its drafts, [B, R] each."""

    asks: Array  # bool, the row was asked
    run: Array  # i32, its drafted tokens up to the first wrong one
    limit: Array  # i32, columns after its newest token that can count by the rows above it; below 0: not even that one
    gain: Array  # i32, tokens by which it grows if it has begun
    ends: Array  # bool, the last of these is an end token


@dataclasses.dataclass(frozen=True)
class Drafted:
    """The answers of `inner`, in fewer calls.

    Drafted tokens that are too seldom right are not worth their column of the call: `choose_lengths` keeps those that
    are.
    """

    inner: OnGrid
    drafter: Drafter
    tokens: int = 8  # D, drafted for a row in a call, at the most
    queries: tuple[int, ...] = ()  # the sizes of calls of a whole batch, ascending, but for the largest
    fixed: float = 3.0  # the cost of a call in any case, in columns
    rounded: bool = True  # whether a call costs all columns of its size, and not only those that are fed
    trace: bool = False  # whether what becomes of drafts is kept (`Decoded.trace`)
    reads_source: ClassVar[bool] = True  # the drafter does
    choose: ClassVar[None] = None  # greedily

    @cached_property
    def grid(self) -> Pipelined:
        """The inner strategy on a grid: a sequential answer is its only row."""
        return self.inner.on_grid

    @property
    def eos(self) -> int:
        """The inner strategy's."""
        return self.inner.eos

    @property
    def other_ends(self) -> tuple[int, ...]:
        """The inner strategy's."""
        return self.grid.other_ends

    @property
    def places(self) -> tuple[int, int]:
        """The inner strategy's."""
        return self.inner.places

    def start(self, row: Numbers) -> Numbers:
        """As the inner strategy."""
        return self.inner.start(row)

    def position(self, row: Numbers, time: Numbers) -> Numbers:
        """As the inner strategy."""
        return self.grid.position(row, time)

    @property
    def borrows(self) -> bool:
        """If the drafter is a model."""
        return isinstance(self.drafter, Borrower)

    def lend(self, model: Model[Tree], batch: int) -> "Drafted":
        """See `Strategy`."""
        assert isinstance(self.drafter, Borrower), "it asks no model"
        # Each size is one more copy of its step, in each size of the loop around it: a few are enough.
        few = (self.queries or ())[:: max(len(self.queries or ()) // 2, 1)]
        drafter = self.drafter.over(model, self.grid, self.width - 1, queries=few, batch=batch)
        return dataclasses.replace(self, drafter=drafter)

    def suit(self, platform: str, *, costs: float, skips_fillers: bool) -> "Drafted":
        """With the sizes of calls that it may choose from there, and the price of a call."""
        if platform != "cpu":  # weights are read for hundreds of columns in the time that a few take
            return dataclasses.replace(self, queries=(64, 256), fixed=256.0)
        one_row = (1, 2, 4) if self.grid.rows == 1 else ()
        if skips_fillers:  # sizes differ in small things only, and each is one more loop
            return dataclasses.replace(self, queries=() if one_row else QUERIES, fixed=costs, rounded=False)
        return dataclasses.replace(self, queries=(*one_row, 8, 12, 20, 32, 48, 128), fixed=costs)

    @property
    def width(self) -> int:
        """D + 1, columns of a row in a call."""
        return 1 + max(min(self.tokens, self.grid.time_max - 1), 1)

    @property
    def most_queries(self) -> int:
        """The most queries of an example in one call."""
        return self.grid.rows * self.width

    @property
    def slots(self) -> int:
        """Twice what all rows and times need; `_has_room` sees to it that rejected drafts leave enough."""
        return 2 * self.grid.rows * self.grid.time_max

    def init(self, batch: int, source: SourceIds | None = None) -> DraftedState:
        """Nothing is written. The drafter reads the source."""
        assert source is not None, "drafters read the source"
        rows, times, width = self.grid.rows, self.grid.time_max, self.width
        none, asked = jnp.zeros((batch, rows), jnp.int32), jnp.zeros((batch, width, rows), jnp.int32)
        return DraftedState(
            tokens=jnp.zeros((batch, rows, times), jnp.int32),
            length=none,
            ended=none > 0,
            retired=none > 0,
            started=none[:, 0],
            done=none[:, 0] > 0,
            calls=none[:, 0],
            step=jnp.int32(0),
            used=jnp.int32(0),
            fed=asked,
            live=asked > 0,
            kept=asked > 0,
            trust=none,
            record=TrackRecord.empty(batch, len(self.drafter.odds)),
            guesses=jnp.zeros((batch, rows, width - 1), jnp.int32),
            guessed=none,
            drafter=self.drafter.init(source, rows),
            circle=none[:, 0] + NEVER if self.grid.unique and not self.grid.literal else None,
            # There is a call a time-step at most: the open row that is furthest behind grows in each.
            trace=tracing.empty(batch, times, rows, width - 1) if self.trace else None,
        )

    def query(self, state: DraftedState) -> tuple[DraftedState, Query]:
        """The newest token of each open row with its drafts; an end token that was not fed yet; rows that may begin."""
        rows, times, columns = jnp.arange(self.grid.rows), self.grid.time_max, jnp.arange(self.width)
        newest = self._first + state.length
        # Numbers, not flags [B]: of those beside rows LLVM makes a vector that it then cannot compile for AVX-512.
        begun = jnp.where(state.done, 0, state.started)
        most = jnp.where(self._is_closed(state) | state.done, 0, self.grid.rows)
        is_open = (rows < begun[:, None]) & ~state.ended & (newest < times)
        begins = (rows >= state.started[:, None]) & (rows < most[:, None])
        drafter, draft = self.drafter.propose(
            state.drafter, Written(state.tokens, state.length, state.guesses, state.guessed), self.width - 1
        )
        before_end = _before(is_end(draft.tokens, ends_of(self.grid)), axis=2)
        offered = jnp.minimum(jnp.minimum(draft.count, times - 1 - newest), before_end + 1)
        offered = jnp.where((is_open | begins) & self._has_room(state), jnp.maximum(offered, 0), 0)

        def reach(drafted: Array) -> tuple[Array, Array]:
            """The rows that are asked if so many tokens of each are drafted, and how many of these can count."""
            # An ended row holds nobody up; none that starts later follows an empty one.
            closes = (state.length + before_end == 0) & (self.grid.delay > 0)
            far = jnp.where(before_end < drafted, jnp.where(closes, -1, NEVER), newest + drafted)
            limit = over_earlier_rows(jax.lax.cummin, jnp.where(is_open | begins, far, NEVER), NEVER)
            asks = is_open | (begins & (limit >= newest))
            return asks, jnp.where(asks, jnp.clip(limit - newest, 0, drafted), 0)

        def find_unfed(asks: Array) -> Array:
            """Ended rows whose end token a row after them may see now."""
            highest = jnp.where(asks, rows, -1).max(axis=1)
            return state.ended & ~state.retired & (rows < highest[:, None])

        certain, _ = reach(jnp.zeros_like(offered))
        needed = (certain | find_unfed(certain)).sum()
        _, useful = reach(offered)
        # A row that is asked only because of drafts hangs on one more of them.
        asks, drafted = reach(
            self.choose_lengths(useful, state.record.odds(self.drafter.odds, draft.trust), ~certain, needed)
        )
        feeds_end = find_unfed(asks)
        fed = jnp.concatenate([self._last_tokens(state)[:, None], draft.tokens.swapaxes(1, 2)], axis=1)
        live = (asks[:, None] & (columns[:, None] <= drafted[:, None])) | (feeds_end[:, None] & (columns == 0)[:, None])
        state = dataclasses.replace(
            state,
            retired=state.retired | feeds_end,
            calls=state.calls + ~state.done,
            fed=fed,
            live=live,
            trust=draft.trust,
            drafter=drafter,
        )
        time = newest[:, None] + columns[:, None]
        row = jnp.broadcast_to(rows, (1, self.width, self.grid.rows))
        return state, Query(*(x.reshape(x.shape[0], -1) for x in (fed, row, time, live)))

    def advance(self, state: DraftedState, answers: Array) -> DraftedState:
        """Accepts what counts of the answers."""
        rows, columns = jnp.arange(self.grid.rows), jnp.arange(self.width)
        answers, live, started = answers.reshape(state.live.shape), state.live, rows < state.started[:, None]
        verdict = self._verify(state, answers)
        # As if every row that was asked had begun; `begins` then says which of them did.
        ended, length, circle = state.ended | verdict.ends, state.length + verdict.gain, state.circle
        place = jnp.arange(self.grid.time_max) - state.length[:, :, None]
        found = jnp.take_along_axis(answers.swapaxes(1, 2), jnp.clip(place, 0, self.width - 1), axis=2)
        if circle is not None:
            # Of a row that does not begin after all, too: it is later than what keeps that row from it.
            tokens = jnp.where(place >= 0, found, state.tokens)
            circle = jnp.minimum(circle, self.grid.circle(tokens, length, ended, verdict.ends))
        begins = started | ((verdict.gain > 0) & self.grid.may_begin(ended, length, circle))
        gain, ends = jnp.where(begins, verdict.gain, 0), verdict.ends & begins
        ended, length = state.ended | ends, state.length + gain

        accepted = jnp.minimum(verdict.run, verdict.limit)
        counts = jnp.where(begins & verdict.asks, accepted, -1)  # the last column that does
        kept = live & ((columns[:, None] <= counts[:, None]) | state.ended[:, None])
        fresh = (place >= 0) & (place < gain[:, :, None])
        beyond = jnp.clip(gain[:, :, None] + jnp.arange(self.width - 1), 0, self.width - 1)
        fed = live.sum(axis=1)
        state = dataclasses.replace(
            state,
            tokens=jnp.where(fresh, found, state.tokens),
            length=length,
            ended=ended,
            retired=state.retired | (ends & (counts >= gain)),
            started=state.started + (begins & ~started).sum(axis=1),
            step=state.step + 1,
            kept=kept,
            used=state.used + count_slots(_flat(live), _flat(kept)).max(),
            guesses=jnp.take_along_axis(answers.swapaxes(1, 2), beyond, axis=2),
            guessed=jnp.where(verdict.asks, jnp.maximum(fed - gain, 0), 0),
            record=state.record.add(state.trust, drafted=fed - 1, run=verdict.run, counts=counts),
            circle=circle,
        )
        finished = ended | (self._first + length >= self.grid.time_max)
        over = (finished | (rows >= state.started[:, None])).all(axis=1) & self._is_closed(state)
        if state.trace is not None:
            trace = tracing.record(
                state.trace,
                state.step - 1,
                drafted=state.fed[:, 1:].swapaxes(1, 2),
                count=jnp.where(verdict.asks, fed - 1, -1),
                accepted=jnp.clip(counts, 0, gain),
                written=gain,
            )
            state = dataclasses.replace(state, trace=trace)
        return dataclasses.replace(state, done=state.done | over)

    def _verify(self, state: DraftedState, answers: Array) -> "Verdict":
        """Compares the drafts of the last call with the model's answers i32 [B, 1 + D, R]."""
        live, columns = state.live, jnp.arange(self.width)
        newest, started = self._first + state.length, jnp.arange(self.grid.rows) < state.started[:, None]
        asks, drafts = live[:, 0] & ~state.ended, state.fed[:, 1:]
        run = _before(~(live[:, 1:] & (drafts == answers[:, :-1])), axis=1)
        right = columns[:-1, None] < run[:, None]
        # How far a row's tokens are fed and right. An ended row whose end token is among them holds nobody up.
        far = jnp.where((right & is_end(drafts, ends_of(self.grid))).any(axis=1), NEVER, newest + run)
        far = jnp.where(asks, far, jnp.where(started, NEVER, -1))
        limit = over_earlier_rows(jax.lax.cummin, far, NEVER) - newest
        gain = jnp.where(asks, jnp.maximum(jnp.minimum(run, limit) + 1, 0), 0)
        ends_here = is_end(answers, ends_of(self.grid)) & (columns[:, None] < gain[:, None])
        return Verdict(asks, run, limit, jnp.minimum(gain, _before(ends_here, axis=1) + 1), ends_here.any(axis=1))

    def kept(self, state: DraftedState) -> Array:
        """The mask of the tokens that the last call fed and that are right."""
        return _flat(state.kept)

    def done(self, state: DraftedState) -> Array:
        """As found by the last call."""
        return state.done

    def result(self, state: DraftedState) -> Decoded:
        """The rows, and the steps that Algorithm 1 would have taken for them."""
        started = jnp.arange(self.grid.rows) < state.started[:, None]
        complete = (state.ended & (state.length == 1)).any(axis=1)
        if state.circle is not None:
            complete |= state.circle < NEVER
        cut = (started & ~state.ended).any(axis=1)
        over = ~cut & (self.grid.literal | complete | (state.started == self.grid.sub_max))
        last = jnp.where(started, self._first + state.length, 0).max(axis=1)
        truncated = self.inner.cut(cut, complete, state.started)
        return Decoded(
            tokens=state.tokens,
            lengths=state.length - state.ended,
            steps=jnp.where(over, last, self.grid.time_max),
            truncated=truncated,
            calls=state.calls,
            trace=state.trace,
        )

    def calls(self, decoded: Decoded) -> np.ndarray:
        """As counted."""
        return np.asarray(decoded.calls)

    def choose_lengths(self, count: Array, odds: Array, hangs: Array, needed: Array) -> Array:
        """Lengths of drafts at the price of its calls; arguments as of `draft_lengths.choose_lengths`."""
        most = len(count) * self.most_queries
        sizes = (*(n for n in self.queries if n < most), most) if self.rounded else None
        return choose_lengths(count, odds, hangs, needed, fixed=self.fixed, most=self.width - 1, sizes=sizes)

    def _last_tokens(self, state: DraftedState) -> Array:
        """i32 [B, R], the newest token of each row, its bos if there is none."""
        at_end = jnp.maximum(state.length - 1, 0)[:, :, None]
        last = jnp.take_along_axis(state.tokens, at_end, axis=2)[:, :, 0]
        return jnp.where(state.length == 0, self.grid.bos, last)

    @property
    def _first(self) -> Array:
        """i32 [R], the time of each row's bos."""
        first: Array = start(jnp.arange(self.grid.rows), self.grid.delay)
        return first

    def _is_closed(self, state: DraftedState) -> Array:
        """bool [B], no row starts any more."""
        rows = jnp.arange(self.grid.rows)
        barred = (rows == state.started[:, None]) & ~self.grid.may_begin(state.ended, state.length, state.circle)
        return (state.started == self.grid.rows) | barred.any(axis=1)

    def _has_room(self, state: DraftedState) -> Array:
        """Whether the slots suffice for drafts now and none in any later call: there is a call a time-step at most."""
        later = self.grid.rows * (self.grid.time_max - state.step - 1)
        return state.used + self.most_queries + later <= self.slots


def _flat(x: Array) -> Array:
    return x.reshape(x.shape[0], -1)


def _before(x: Array, *, axis: int) -> Array:
    """i32, how many come before the first True along an axis; all if there is none."""
    number = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    found: Array = jnp.where(x, number, x.shape[axis]).min(axis=axis)
    return found
