"""The state of the rows of an answer, and the rules of Algorithm 1: which rows start, are open, and end decoding.

The state stores the tokens of each row by their index in the row, not by their time, up to and including the end
token. The j-th token of row i is generated at time start(i) + j (j = 1, 2, ...). The query that generates this token
feeds the previous token, at time start(i) + j - 1. So the newest query of a row with `length` tokens has the time
start(i) + length, and the state needs no clock: without drafts all open rows have the same newest time, since each of
them grows by one token in each call.

Shapes: B batch, R rows of the grid, T the most tokens of a row.
"""

import dataclasses
from typing import Any, Protocol, Self

import flax.struct
import jax
import jax.numpy as jnp

from pipejax import grid
from pipejax.decoding.strategy import Array, Plain, Strategy
from pipejax.decoding.times import NEVER, over_earlier_rows
from pipejax.system import Tree


@flax.struct.dataclass
class RowState:
    """The state of the rows of a batch. All arrays have a first axis of B."""

    tokens: Array  # i32 [B, R, T], the generated tokens of each row, end token included; undefined beyond `length`
    length: Array  # i32 [B, R], number of generated tokens
    last: Array  # i32 [B, R], the newest token of each row; bos if none is generated
    ended: Array  # bool [B, R], True once an end token of the row is generated
    retired: Array  # bool [B, R], True once this end token is fed, so that later rows can see it
    started: Array  # i32 [B], number of rows that have started (k of Algorithm 1)
    done: Array  # bool [B]
    # i32 [B], the time at which the answer is known to repeat itself, or NEVER: see `Rows.find_circle`. The field is
    # None unless `unique` is set without `literal`.
    circle: Array | None = None
    drafts: Tree = None  # a `DraftState`, if there are drafts


class Rows(Plain):
    """The rules of Algorithm 1 (paper section 3.4) over a fixed grid of `rows` rows and `time_max` time-steps.

    A new row starts every `delay` time-steps; with a delay of 0 all rows start at time 0. By default rows start until
    one of them is empty or `sub_max` rows have started, and decoding stops when no more row can start and all rows have
    ended. With `literal`, lines 5-13 of the paper are followed exactly: rows also start after an empty row, and
    decoding stops as soon as all started rows have ended. With `unique` and without `literal`, no more rows start when
    the answer repeats itself: see `find_circle`.

    Subclasses are frozen dataclasses whose fields are these settings.
    """

    delay: int  # Δt
    time_max: int
    sub_max: int
    literal: bool
    unique: bool
    bos: int
    eos: int
    other_ends: tuple[int, ...]  # tokens that end a row, beside eos
    separator: int | None = None  # as in `Sequential`; on a grid of several rows None

    @property
    def rows(self) -> int:
        """R, the largest number of rows: at most `sub_max`, and only rows that start before `time_max`."""
        return grid.count_rows(self.delay, self.time_max, self.sub_max)

    @property
    def places(self) -> tuple[int, int]:
        """R and T, the size of the grid."""
        return self.rows, self.time_max

    @property
    def slots_without_drafts(self) -> int:
        """The most slots that a batch fills if each row feeds one token in a call and its examples share slots.

        The first row is fed in every call. From the second call on, a call may have a second query; from `delay` calls
        later on, a third query; and so forth. If no row is open, time jumps to the next start; the first call there
        feeds the new bos and the end tokens of all rows that ended since the previous jump.
        """
        if not self.delay:
            return self.rows * self.time_max
        return self.time_max + sum(self.time_max - 1 - i * self.delay for i in range(self.rows - 1))

    def start(self, row: grid.Numbers) -> grid.Numbers:
        """Returns the time of a row's bos."""
        return grid.start(row, self.delay)

    def replace(self, **changes: Any) -> Self:
        """Returns a copy of the strategy with other values of the named settings."""
        changed: Self = dataclasses.replace(self, **changes)
        return changed

    @property
    def first(self) -> Array:
        """i32 [R], the time of each row's bos."""
        first: Array = grid.start(jnp.arange(self.rows), self.delay)
        return first

    def has_started(self, state: RowState) -> Array:
        """Returns bool [B, R], the rows that have started."""
        return jnp.arange(self.rows) < state.started[:, None]

    def find_open(self, state: RowState) -> Array:
        """Returns bool [B, R], the open rows: started, not ended, with time left, in examples that are not done."""
        # This is an integer comparison, because LLVM cannot compile `& ~done[:, None]` for AVX-512, where it becomes a
        # vector of flags.
        begun = jnp.where(state.done, 0, state.started)
        in_time = self.first + state.length < self.time_max
        return (jnp.arange(self.rows) < begun[:, None]) & ~state.ended & in_time

    def is_closed(self, state: RowState) -> Array:
        """Returns bool [B], whether the tokens generated so far imply that no more rows start."""
        next_start = grid.start(state.started, self.delay)
        if self.delay == 0:
            closed = state.started < 0
        elif self.literal:  # a row starts only if another row is open at that time
            until = jnp.where(state.ended, self.first + state.length, NEVER)
            closed = jnp.where(self.has_started(state), until, -1).max(axis=1) <= next_start
            closed &= state.started > 0
        else:
            closed = self._has_empty(state)
            if state.circle is not None:
                closed |= state.circle <= next_start
        return closed | (state.started == self.rows)

    def _has_empty(self, state: RowState) -> Array:
        """Returns bool [B], whether a row of the answer is empty: its first token is an end token."""
        return (state.ended & (state.length == 1)).any(axis=1)

    def find_unfed(self, state: RowState, asks: Array) -> Array:
        """Returns bool [B, R], the ended rows whose end token must be fed now.

        An end token is fed once, in the first call in which a later row has a query and may therefore see it.

        Args:
          state: the rows.
          asks: bool [B, R], the rows that have a query in this call.
        """
        rows = jnp.arange(self.rows)
        last = jnp.where(asks, rows, -1).max(axis=1)
        return state.ended & ~state.retired & (rows < last[:, None])

    def settle(self, state: RowState) -> RowState:
        """Marks examples as done if all their started rows have ended or run out of time and no more rows start."""
        is_open = self.has_started(state) & ~state.ended & (self.first + state.length < self.time_max)
        return dataclasses.replace(state, done=state.done | (~is_open.any(axis=1) & self.is_closed(state)))

    def find_circle(self, tokens: Array, length: Array, ended: Array, ends: Array) -> Array:
        """Returns i32 [B], the time at which the answer is known to repeat itself, or NEVER.

        An answer repeats itself once two consecutive rows have ended and each of these rows equals a row above it. A
        row never ends before an equal row above it, so the rows above are complete by then. End tokens are not
        compared.

        Args:
          tokens: i32 [B, R, T].
          length: i32 [B, R], the end token included.
          ended: bool [B, R], by an end token.
          ends: bool [B, R], the rows that ended in the last call; if no row ended, nothing is compared.
        """
        rows = jnp.arange(self.rows)

        def compare(column: Array, same: Array) -> Array:
            here = tokens[:, :, column]
            return same & ((here[:, :, None] == here[:, None]) | (column >= length[:, :, None] - 1))

        def found() -> Array:
            same = ended[:, None] & (length[:, :, None] == length[:, None]) & (rows < rows[:, None])
            # Compares only columns that are in use, as T may be much larger.
            same = jax.lax.fori_loop(0, jnp.where(ended, length, 0).max(), compare, same)
            repeats = ended & same.any(axis=2)
            until = self.first + length
            both = jnp.where(repeats[:, 1:] & repeats[:, :-1], jnp.maximum(until[:, 1:], until[:, :-1]), NEVER)
            return both.min(axis=1, initial=NEVER)

        never = jnp.full(len(ended), NEVER, jnp.int32)
        time: Array = jax.lax.cond(ends.any(), found, lambda: never)
        return time

    def least_above(self, x: Array) -> Array:
        """Returns i32 [B, R], the least `x` of the rows above on which each row depends, or `NEVER` without such rows.

        If rows start at the same time, a row depends on the rows that it sees. Otherwise a row depends on all rows
        above, because they determine whether the row starts.
        """
        if self.delay or self.group is None:
            return over_earlier_rows(jax.lax.cummin, x, NEVER)
        rows = jnp.arange(self.rows)
        groups = self.group(rows)
        depends = grid.shares_group(groups[:, None], groups) & (rows < rows[:, None])
        return jnp.where(depends, x[:, None], NEVER).min(axis=2)

    def may_begin(self, ended: Array, length: Array, circle: Array | None = None) -> Array:
        """Returns bool [B, R], whether each row starts, given the rows above it up to its start (lines 5-7, 12-13).

        Args:
          ended, length, circle: as in `RowState`; drafted tokens may be included.
        """
        if self.delay == 0:
            return jnp.ones_like(ended)
        if not self.literal:
            empty = (ended & (length == 1)).astype(jnp.int32)
            none_empty = ~over_earlier_rows(jax.lax.cummax, empty, 0).astype(bool)
            return none_empty if circle is None else none_empty & (self.first < circle[:, None])
        # Decoding stops when all started rows have ended, so a row above must be open at the start of each row.
        latest = over_earlier_rows(jax.lax.cummax, jnp.where(ended, self.first + length, NEVER), NEVER)
        return jax.lax.cummin((latest > self.first).astype(jnp.int32), axis=1).astype(bool)


class OnGrid(Strategy, Protocol):
    """A greedy strategy that generates the rows of a grid, so that its answers can be drafted."""

    @property
    def on_grid(self) -> Rows:
        """The strategy of Algorithm 1 that generates the same answers."""

    def cut(self, cut: Array, complete: Array, started: Array) -> Array:
        """See `GridStrategy.cut`."""
