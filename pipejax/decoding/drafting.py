"""Greedy decoding in fewer decoder calls: a drafter guesses how rows go on, and one call verifies the guesses of all.

In a call each open row feeds its newest token and the tokens drafted after it: one column for each. A drafted token is
right if it is what the model answers to the token before it. By `grid.visible` an answer at time t depends on the row's
own tokens up to t and on the tokens up to t of the rows above it on the page, the lower numbers. So it counts only if
all of these were fed and are right, in this call or an earlier one: the accepted tokens are those that greedy decoding
generates, token for token. A token that was fed and does not count is taken out of the cache.

A row begins once the rows before it are written up to its start. With drafts that reach so far the row is asked in the
same call already, and begins if these drafts turn out right.

Shapes: B batch, R rows of the grid, T the most tokens of a row, D the most drafted tokens of a row in a call.
"""

import dataclasses
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from pipejax.decoding import trace as tracing
from pipejax.decoding.core import QUERIES
from pipejax.decoding.draft_lengths import TrackRecord, choose_lengths
from pipejax.decoding.drafters.interface import Borrower, Drafter, Written
from pipejax.decoding.gathering import Query, count_slots
from pipejax.decoding.interface import Array, Model, SourceIds, ends_of, is_end
from pipejax.decoding.rows import OnGrid, Rows, RowState
from pipejax.decoding.times import NEVER, count_before, over_earlier_rows
from pipejax.system import Tree


@flax.struct.dataclass
class DraftState:
    """The part of the state that exists only with drafts. Each example has its own."""

    calls: Array  # i32 [B], decoder calls that answered the example
    used: Array  # i32 [B], slots that these calls took
    apart: bool = flax.struct.field(pytree_node=False)  # whether examples take slots by themselves, or all the same
    fed: Array  # i32 [B, 1 + D, R], of the last call: the newest token of each row and its drafts
    live: Array  # bool [B, 1 + D, R], those that were fed
    kept: Array  # bool [B, 1 + D, R], those that count
    trust: Array  # i32 [B, R], the drafter's trust in its last drafts
    record: TrackRecord  # how often drafts were right
    guesses: Array  # i32 [B, R, D], the model's answers beyond the accepted tokens
    guessed: Array  # i32 [B, R], how many of them there are
    drafter: Tree  # the drafter's own state
    trace: tracing.Trace | None = None  # the fate of all drafts, if it is kept


class Verdict(NamedTuple):
    """The findings of a call about its drafts, [B, R] each."""

    asks: Array  # bool, the row was asked
    run: Array  # i32, its drafted tokens up to the first wrong one
    limit: Array  # i32, columns after its newest token that can count by the rows above it; below 0: not even that one
    gain: Array  # i32, tokens by which it grows if it has begun
    ends: Array  # bool, the last of these is an end token


@dataclasses.dataclass(frozen=True)
class Drafts:
    """The drafts of a strategy `Rows`: what is drafted, and how many drafts a call feeds. Static under jit.

    A drafted token that is too seldom right is not worth its column of the call: `choose_lengths` decides.
    """

    drafter: Drafter
    tokens: int = 8  # the most drafted tokens of a row in a call
    queries: tuple[int, ...] = ()  # the sizes of calls of a whole batch, ascending, but for the largest
    fixed: float = 3.0  # the cost of a call in any case, in columns
    rounded: bool = True  # whether a call costs all columns of its size, and not only those that are fed
    trace: bool = False  # whether the fate of drafts is kept (`Decoded.trace`)
    names: OnGrid | None = None  # the strategy whose `cut` says what truncated an answer; None: the rows' own

    @property
    def borrows(self) -> bool:
        """Whether the drafter is a model."""
        return isinstance(self.drafter, Borrower)

    def width(self, rows: Rows) -> int:
        """1 + D, columns of a row in a call."""
        return 1 + max(min(self.tokens, rows.time_max - 1), 1)

    def slots(self, rows: Rows) -> int:
        """The most slots that are filled: twice what all rows and times need, as `query` stops drafting before."""
        return 2 * rows.rows * rows.time_max

    def suit(self, platform: str, rows: int, *, costs: float, skips_fillers: bool) -> "Drafts":
        """The sizes and the price of calls on a platform, for a grid of so many rows; see `Strategy.suit`."""
        if platform != "cpu":  # weights are read for hundreds of columns in the time that a few take
            return dataclasses.replace(self, queries=(64, 256), fixed=256.0)
        one_row = (1, 2, 4) if rows == 1 else ()
        if skips_fillers:  # sizes differ in small things only, and each is one more loop
            return dataclasses.replace(self, queries=() if one_row else QUERIES, fixed=costs, rounded=False)
        return dataclasses.replace(self, queries=(*one_row, 8, 12, 20, 32, 48, 128), fixed=costs)

    def lend(self, model: Model[Tree], rows: Rows, batch: int) -> "Drafts":
        """The drafts of a drafter that has the decoder of its own model for a batch."""
        assert isinstance(self.drafter, Borrower), "it asks no model"
        # Each size is one more copy of its step, in each size of the loop around it: a few are enough.
        few = self.queries[:: max(len(self.queries) // 2, 1)]
        drafter = self.drafter.over(model, rows, self.width(rows) - 1, queries=few, batch=batch)
        return dataclasses.replace(self, drafter=drafter)

    def init(self, rows: Rows, batch: int, source: SourceIds | None) -> DraftState:
        """The state before the first call. The drafter reads the source."""
        assert source is not None, "drafters read the source"
        none = jnp.zeros((batch, rows.rows), jnp.int32)
        width = self.width(rows)
        asked, most = jnp.zeros((batch, width, rows.rows), jnp.int32), width - 1
        return DraftState(
            calls=none[:, 0],
            used=none[:, 0],
            apart=source.apart,
            fed=asked,
            live=asked > 0,
            kept=asked > 0,
            trust=none,
            record=TrackRecord.empty(batch, len(self.drafter.odds)),
            guesses=jnp.zeros((batch, rows.rows, most), jnp.int32),
            guessed=none,
            drafter=self.drafter.init(source, rows.rows),
            # There is a call a time-step at most: the open row that is furthest behind grows in each.
            trace=tracing.empty(batch, rows.time_max, rows.rows, most) if self.trace else None,
        )

    def query(self, rows: Rows, state: RowState) -> tuple[RowState, Query]:
        """The newest token of each open row with its drafts; an end token that was not fed yet; rows that may begin.

        Lines 5-8 of Algorithm 1, for a call that may take several time-steps of a row at once.
        """
        assert state.drafts is not None
        old, width, index = state.drafts, self.width(rows), jnp.arange(rows.rows)
        columns = jnp.arange(width)
        newest, is_open = rows.first + state.length, rows.find_open(state)
        most = jnp.where(rows.is_closed(state) | state.done, 0, rows.rows)
        begins = (index >= state.started[:, None]) & (index < most[:, None])
        written = Written(state.tokens, state.length, old.guesses, old.guessed)
        drafter, draft = self.drafter.propose(old.drafter, written, width - 1)
        before_end = count_before(is_end(draft.tokens, ends_of(rows)), axis=2)
        offered = jnp.minimum(jnp.minimum(draft.count, rows.time_max - 1 - newest), before_end + 1)
        may_draft = (is_open | begins) & self._has_room(rows, old)[:, None]
        offered = jnp.where(may_draft, jnp.maximum(offered, 0), 0)

        def reach(drafted: Array) -> tuple[Array, Array]:
            """The rows that are asked if so many tokens of each are drafted, and how many of these can count."""
            # An ended row holds up no other; no row starts after an empty one.
            closes = (state.length + before_end == 0) & (rows.delay > 0)
            far = jnp.where(before_end < drafted, jnp.where(closes, -1, NEVER), newest + drafted)
            limit = over_earlier_rows(jax.lax.cummin, jnp.where(is_open | begins, far, NEVER), NEVER)
            asks = is_open | (begins & (limit >= newest))
            return asks, jnp.where(asks, jnp.clip(limit - newest, 0, drafted), 0)

        certain, _ = reach(jnp.zeros_like(offered))
        needed = (certain | rows.find_unfed(state, certain)).sum()
        _, useful = reach(offered)
        odds = old.record.odds(self.drafter.odds, draft.trust)
        # A row that is asked only because of drafts needs one more draft to be right than its own.
        asks, drafted = reach(self.choose_lengths(rows, useful, odds, ~certain, needed))
        feeds_end = rows.find_unfed(state, asks)
        fed = jnp.concatenate([state.last[:, None], draft.tokens.swapaxes(1, 2)], axis=1)
        live = (asks[:, None] & (columns[:, None] <= drafted[:, None])) | (feeds_end[:, None] & (columns == 0)[:, None])
        drafts = dataclasses.replace(old, fed=fed, live=live, trust=draft.trust, drafter=drafter)
        state = dataclasses.replace(state, retired=state.retired | feeds_end, drafts=drafts)
        time = newest[:, None] + columns[:, None]
        row = jnp.broadcast_to(index, (1, width, rows.rows))
        return state, Query(*(x.reshape(x.shape[0], -1) for x in (fed, row, time, live)))

    def advance(self, rows: Rows, state: RowState, answers: Array) -> RowState:
        """Accepts the answers that count, i32 [B, (1 + D) * R] (lines 9-13 of Algorithm 1)."""
        assert state.drafts is not None
        old, width, started = state.drafts, self.width(rows), rows.has_started(state)
        columns = jnp.arange(width)
        live, answers = old.live, answers.reshape(old.live.shape)
        verdict = verify(rows, state, answers)
        # As if every row that was asked had begun; `begins` then says which of them did.
        ended, length, circle = state.ended | verdict.ends, state.length + verdict.gain, state.circle
        place = jnp.arange(rows.time_max) - state.length[:, :, None]
        found = jnp.take_along_axis(answers.swapaxes(1, 2), jnp.clip(place, 0, width - 1), axis=2)
        if circle is not None:
            # Rows that do not begin after all are compared too: their circle is later than what keeps them from it.
            tokens = jnp.where(place >= 0, found, state.tokens)
            circle = jnp.minimum(circle, rows.find_circle(tokens, length, ended, verdict.ends))
        begins = started | ((verdict.gain > 0) & rows.may_begin(ended, length, circle))
        gain, ends = jnp.where(begins, verdict.gain, 0), verdict.ends & begins
        ended, length = state.ended | ends, state.length + gain

        counts = jnp.where(begins & verdict.asks, jnp.minimum(verdict.run, verdict.limit), -1)  # the last right column
        kept = live & ((columns[:, None] <= counts[:, None]) | state.ended[:, None])
        tokens = jnp.where((place >= 0) & (place < gain[:, :, None]), found, state.tokens)
        at_end = jnp.clip(length - 1, 0, rows.time_max - 1)[:, :, None]
        last = jnp.where(length > 0, jnp.take_along_axis(tokens, at_end, axis=2)[:, :, 0], rows.bos)
        beyond = jnp.clip(gain[:, :, None] + jnp.arange(width - 1), 0, width - 1)
        fed = live.sum(axis=1)
        taken = count_slots(*(x.reshape(len(x), -1) for x in (live, kept)))
        drafts = dataclasses.replace(
            old,
            calls=old.calls + ~state.done,
            used=old.used + jnp.where(state.done, 0, taken if old.apart else taken.max()),
            kept=kept,
            record=old.record.add(old.trust, drafted=fed - 1, run=verdict.run, counts=counts),
            guesses=jnp.take_along_axis(answers.swapaxes(1, 2), beyond, axis=2),
            guessed=jnp.where(verdict.asks, jnp.maximum(fed - gain, 0), 0),
            trace=old.trace
            and tracing.record(
                old.trace,
                jnp.where(state.done, rows.time_max, old.calls),
                drafted=old.fed[:, 1:].swapaxes(1, 2),
                count=jnp.where(verdict.asks, fed - 1, -1),
                accepted=jnp.clip(counts, 0, gain),
                written=gain,
            ),
        )
        state = dataclasses.replace(
            state,
            tokens=tokens,
            length=length,
            last=last,
            ended=ended,
            retired=state.retired | (ends & (counts >= gain)),
            started=state.started + (begins & ~started).sum(axis=1),
            circle=circle,
            drafts=drafts,
        )
        return rows.settle(state)

    def choose_lengths(self, rows: Rows, count: Array, odds: Array, hangs: Array, needed: Array) -> Array:
        """Lengths of drafts at the price of these calls; arguments as of `draft_lengths.choose_lengths`."""
        width = self.width(rows)
        most = len(count) * rows.rows * width
        sizes = (*(n for n in self.queries if n < most), most) if self.rounded else None
        return choose_lengths(count, odds, hangs, needed, fixed=self.fixed, most=width - 1, sizes=sizes)

    def _has_room(self, rows: Rows, drafts: DraftState) -> Array:
        """bool [B], whether the slots suffice for drafts now and none later, in a call for each time-step."""
        later = rows.rows * (rows.time_max - drafts.calls - 1)
        return drafts.used + rows.rows * self.width(rows) + later <= self.slots(rows)


def verify(rows: Rows, state: RowState, answers: Array) -> Verdict:
    """Compares the drafts of the last call with the model's answers i32 [B, 1 + D, R]."""
    assert state.drafts is not None
    live, columns = state.drafts.live, jnp.arange(state.drafts.live.shape[1])
    newest = rows.first + state.length
    asks, drafts = live[:, 0] & ~state.ended, state.drafts.fed[:, 1:]
    run = count_before(~(live[:, 1:] & (drafts == answers[:, :-1])), axis=1)
    right = columns[:-1, None] < run[:, None]
    # How far a row's tokens are fed and right. An ended row whose end token is among them holds up no other.
    far = jnp.where((right & is_end(drafts, ends_of(rows))).any(axis=1), NEVER, newest + run)
    far = jnp.where(asks, far, jnp.where(rows.has_started(state), NEVER, -1))
    limit = over_earlier_rows(jax.lax.cummin, far, NEVER) - newest
    gain = jnp.where(asks, jnp.maximum(jnp.minimum(run, limit) + 1, 0), 0)
    ends_here = is_end(answers, ends_of(rows)) & (columns[:, None] < gain[:, None])
    return Verdict(asks, run, limit, jnp.minimum(gain, count_before(ends_here, axis=1) + 1), ends_here.any(axis=1))
