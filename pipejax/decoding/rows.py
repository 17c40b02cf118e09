"""The rows of an answer as far as they are generated, and the rules of Algorithm 1 about them.

A row is kept as it is read: its tokens from the first on, its end token included. The j-th token of row i is generated
at time start(i) + j (j = 1, 2, ...), and the query that generates it feeds the token before it, at time start(i) + j -
1. So the newest query of a row with `length` tokens has the time start(i) + length, and no clock is needed: without
drafts all open rows have the same newest time, as each of them grows by one token a call.

Shapes: B batch, R rows of the grid, T the most tokens of a row.
"""

import dataclasses
from typing import Any, Protocol, Self

import flax.struct
import jax
import jax.numpy as jnp

from pipejax import grid
from pipejax.decoding.interface import Array, Plain, Strategy
from pipejax.decoding.times import NEVER, over_earlier_rows
from pipejax.system import Tree


@flax.struct.dataclass
class RowState:
    """The rows of a batch as far as they are generated. All arrays have a first axis of B."""

    tokens: Array  # i32 [B, R, T], the generated tokens of each row, its end included; meaningless beyond `length`
    length: Array  # i32 [B, R], number of generated tokens
    last: Array  # i32 [B, R], the newest token of each row; bos if none is generated
    ended: Array  # bool [B, R], True once a token that ends the row is generated
    retired: Array  # bool [B, R], True once that token is fed as well
    started: Array  # i32 [B], number of rows that have started (k of Algorithm 1)
    done: Array  # bool [B]
    circle: Array | None = None  # i32 [B], the time at which the answer runs in circles, or NEVER; if rows are unique
    drafts: Tree = None  # a `DraftState`, if there are drafts


class Rows(Plain):
    """The rules of Algorithm 1 (paper section 3.4) over a fixed grid of `rows` rows and `time_max` time-steps.

    A new row starts every `delay` time-steps; with a delay of 0 all rows start at time 0. By default only an empty row,
    or the last of `sub_max` rows, ends spawning, and decoding stops once no row can start and all have ended. `literal`
    follows the paper's lines 5-13 to the letter: rows keep starting after an empty one, and decoding stops the first
    time that all started rows have ended. Unless it is literal, `unique` ends spawning when the answer runs in circles,
    too: see `find_circle`.

    Subclasses are frozen dataclasses that give these settings.
    """

    delay: int  # Δt
    time_max: int
    sub_max: int
    literal: bool
    unique: bool
    bos: int
    eos: int
    other_ends: tuple[int, ...]  # tokens that end a row, beside eos

    @property
    def rows(self) -> int:
        """R, the number of rows that start before time runs out."""
        return grid.count_rows(self.delay, self.time_max, self.sub_max)

    @property
    def places(self) -> tuple[int, int]:
        """R and T, the grid."""
        return self.rows, self.time_max

    @property
    def slots_without_drafts(self) -> int:
        """The most slots that a batch fills if each row feeds one token a call; its examples share slots.

        The first row feeds in every call. One more query may come in the second call, and another one every `delay`
        calls: where no row is open, time goes to the next start, and the first call there feeds the eos of all rows
        since the last such place beside the new bos.
        """
        if not self.delay:
            return self.rows * self.time_max
        return self.time_max + sum(self.time_max - 1 - i * self.delay for i in range(self.rows - 1))

    def start(self, row: grid.Numbers) -> grid.Numbers:
        """The time of a row's bos."""
        return grid.start(row, self.delay)

    def replace(self, **changes: Any) -> Self:
        """The strategy with other settings, by their names."""
        changed: Self = dataclasses.replace(self, **changes)
        return changed

    @property
    def first(self) -> Array:
        """i32 [R], the time of each row's bos."""
        first: Array = grid.start(jnp.arange(self.rows), self.delay)
        return first

    def has_started(self, state: RowState) -> Array:
        """bool [B, R], the rows that have started."""
        return jnp.arange(self.rows) < state.started[:, None]

    def find_open(self, state: RowState) -> Array:
        """bool [B, R], the rows that have started, have not ended and have time left, of examples that are not done."""
        # Numbers, not flags [B]: of flags beside rows LLVM makes a vector that it then cannot compile for AVX-512.
        begun = jnp.where(state.done, 0, state.started)
        in_time = self.first + state.length < self.time_max
        return (jnp.arange(self.rows) < begun[:, None]) & ~state.ended & in_time

    def is_closed(self, state: RowState) -> Array:
        """bool [B], no row starts any more, by what is generated so far."""
        next_start = grid.start(state.started, self.delay)
        if self.delay == 0:
            closed = state.started < 0
        elif self.literal:  # a row starts only if another one is open then
            until = jnp.where(state.ended, self.first + state.length, NEVER)
            closed = jnp.where(self.has_started(state), until, -1).max(axis=1) <= next_start
            closed &= state.started > 0
        else:
            closed = self._has_empty(state)
            if state.circle is not None:
                closed |= state.circle <= next_start
        return closed | (state.started == self.rows)

    def _has_empty(self, state: RowState) -> Array:
        return (state.ended & (state.length == 1)).any(axis=1)

    def find_unfed(self, state: RowState, asks: Array) -> Array:
        """bool [B, R], the ended rows whose last token is not fed and can be seen by a later row that asks."""
        rows = jnp.arange(self.rows)
        last = jnp.where(asks, rows, -1).max(axis=1)
        return state.ended & ~state.retired & (rows < last[:, None])

    def settle(self, state: RowState) -> RowState:
        """The state, done where every started row has ended or run out of time, and none starts any more."""
        goes_on = self.has_started(state) & ~state.ended & (self.first + state.length < self.time_max)
        return dataclasses.replace(state, done=state.done | (~goes_on.any(axis=1) & self.is_closed(state)))

    def find_circle(self, tokens: Array, length: Array, ended: Array, ends: Array) -> Array:
        """i32 [B], the time at which the answer is seen to run in circles, or NEVER.

        It does once two rows, one right after the other, have ended and each has the tokens of a row before it. A row
        cannot end before an equal one above it does, so what is equal by then is known by then. The tokens that end
        them may differ.

        Args:
          tokens: i32 [B, R, T].
          length: i32 [B, R], the end token included.
          ended: bool [B, R], by an end token.
          ends: bool [B, R], the rows that ended in the last call; if none did, nothing is compared.
        """
        rows = jnp.arange(self.rows)

        def compare(column: Array, same: Array) -> Array:
            here = tokens[:, :, column]
            return same & ((here[:, :, None] == here[:, None]) | (column >= length[:, :, None] - 1))

        def found() -> Array:
            same = ended[:, None] & (length[:, :, None] == length[:, None]) & (rows < rows[:, None])
            # No farther than rows are written: bounds may be generous.
            same = jax.lax.fori_loop(0, jnp.where(ended, length, 0).max(), compare, same)
            repeats = ended & same.any(axis=2)
            until = self.first + length
            both = jnp.where(repeats[:, 1:] & repeats[:, :-1], jnp.maximum(until[:, 1:], until[:, :-1]), NEVER)
            return both.min(axis=1, initial=NEVER)

        never = jnp.full(len(ended), NEVER, jnp.int32)
        time: Array = jax.lax.cond(ends.any(), found, lambda: never)
        return time

    def may_begin(self, ended: Array, length: Array, circle: Array | None = None) -> Array:
        """bool [B, R], whether a row starts once those before it are written up to its start (lines 5-7, 12-13).

        The arguments are as in `RowState`, of rows that are written or drafted.
        """
        if self.delay == 0:
            return jnp.ones_like(ended)
        if not self.literal:
            empty = (ended & (length == 1)).astype(jnp.int32)
            none_empty = ~over_earlier_rows(jax.lax.cummax, empty, 0).astype(bool)
            return none_empty if circle is None else none_empty & (self.first < circle[:, None])
        # Decoding stops when all rows have ended: some row before it must be open when it starts.
        latest = over_earlier_rows(jax.lax.cummax, jnp.where(ended, self.first + length, NEVER), NEVER)
        return jax.lax.cummin((latest > self.first).astype(jnp.int32), axis=1).astype(bool)


class OnGrid(Strategy, Protocol):
    """A greedy strategy whose answers are rows of a grid, each on its own: what drafts can be verified for."""

    @property
    def on_grid(self) -> Rows:
        """The strategy of Algorithm 1 that writes the same answers."""

    def cut(self, cut: Array, complete: Array, started: Array) -> Array:
        """See `Rows.cut`."""
