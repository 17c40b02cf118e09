"""The pipelined decoder: Algorithm 1 of the paper over a fixed grid of sub_max rows and time_max time-steps."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax import grid
from pipejax.decoding.gathering import Query
from pipejax.decoding.interface import TRUNCATIONS, Array, Decoded, Plain, SourceIds, Strategy, ends_of, is_end

NEVER = 2**30  # the end of a row that has not ended: later than any time


@flax.struct.dataclass
class GridState:
    """After `time` time-steps (t of Algorithm 1)."""

    time: Array  # i32 [B]
    tokens: Array  # i32 [B, S, T + 1], generated ones by row and absolute time
    last: Array  # i32 [B, S], the newest token of each row, an end token once the row has ended
    started: Array  # i32 [B], number of rows that have started (k of Algorithm 1)
    end: Array  # i32 [B, S], the time at which the end token of each row was generated, else NEVER
    retired: Array  # bool [B, S], True where that token was fed as well
    complete: Array  # bool [B], True: no further row starts, as one was empty or the answer runs in circles
    done: Array  # bool [B]
    steps: Array  # i32 [B], time-steps taken


@dataclasses.dataclass(frozen=True)
class Pipelined(Plain):
    """A new row every `delay` steps, one token a step for every open row. With a delay of 0 all rows start at once.

    By default only an empty row, or the last of `sub_max` rows, ends spawning, and decoding stops once no row can start
    and all have ended. `literal` follows the paper's lines 5-13 to the letter: rows keep starting after an empty one,
    and decoding stops the first time that all started rows have ended.

    Unless it is literal, `unique` ends spawning when the answer runs in circles, too: see `circle`.
    """

    delay: int
    time_max: int
    sub_max: int
    literal: bool = False
    bos: int = 0
    eos: int = 1
    unique: bool = False
    other_ends: tuple[int, ...] = ()  # tokens that end a row as well

    def __init_subclass__(cls) -> None:
        """Raises a TypeError if a subclass has other starts, which its steps would not follow."""
        if "start" in vars(cls):
            raise TypeError(
                f"{cls.__name__}.start: rows start as `delay` says; other starts need a strategy of their own"
            )

    @property
    def rows(self) -> int:
        """Those that start before time runs out."""
        return grid.count_rows(self.delay, self.time_max, self.sub_max)

    @property
    def most_queries(self) -> int:
        """One a row."""
        return self.rows

    @property
    def slots(self) -> int:
        """In each call as many as any example of a batch can feed then; examples share slots.

        The first row feeds in every call. One more may come in the second, and another every `delay` calls: where no
        row is open, time goes to the next start, and the first call there feeds the eos of all rows since the last
        such place beside the new bos.
        """
        if not self.delay:
            return self.rows * self.time_max
        return self.time_max + sum(self.time_max - 1 - i * self.delay for i in range(self.rows - 1))

    @property
    def places(self) -> tuple[int, int]:
        """The grid."""
        return self.rows, self.time_max

    def start(self, row: grid.Numbers) -> grid.Numbers:
        """That of its bos."""
        return grid.start(row, self.delay)

    @property
    def on_grid(self) -> "Pipelined":
        """Itself."""
        return self

    def init(self, batch: int, source: SourceIds | None = None) -> GridState:
        """An empty grid."""
        none = jnp.zeros((batch, self.rows), jnp.int32)
        return GridState(
            time=none[:, 0],
            tokens=jnp.zeros((batch, self.rows, self.time_max + 1), jnp.int32),
            last=none,
            started=none[:, 0],
            end=none + NEVER,
            retired=none > 0,
            complete=none[:, 0] > 0,
            done=none[:, 0] > 0,
            steps=none[:, 0],
        )

    def query(self, state: GridState) -> tuple[GridState, Query]:
        """Starts a row, or all, where due (lines 5-7), then asks for every open row at once (line 8).

        The end token of a row is fed once, since later rows may see it: together with the next query of a later row,
        the first that can see it, and at the place where it was generated.
        """
        rows = jnp.arange(self.rows)
        due = grid.is_start(state.time, self.delay) & (state.started < self.rows) & ~state.done
        if not self.literal:
            due &= ~state.complete
        started = state.started + due * grid.count_starts(self.delay, self.rows)
        born = (rows >= state.started[:, None]) & (rows < started[:, None])
        is_open = self._open(started, state.end, state.done)
        last_open = jnp.where(is_open, rows, -1).max(axis=1)
        ended = (state.end != NEVER) & ~state.retired & (rows < last_open[:, None])
        fed = jnp.where(born, self.bos, state.last)
        time = jnp.where(ended, state.end, state.time[:, None])
        state = dataclasses.replace(state, started=started, retired=state.retired | ended)
        return state, Query(tokens=fed, row=rows[None], time=time, live=is_open | ended)

    def advance(self, state: GridState, next_tokens: Array) -> GridState:
        """Adds the tokens of open rows (lines 9-11) and looks whether it is over (lines 12-13).

        Time-steps in which no row is open count and need no decoder: time goes to the next start.
        """
        rows, time = jnp.arange(self.rows), jnp.where(state.done, state.time, state.time + 1)
        exists = rows < state.started[:, None]
        open_before = self._open(state.started, state.end, state.done)
        ends = open_before & is_end(next_tokens, ends_of(self))
        end = jnp.where(ends, time[:, None], state.end)
        complete = state.complete | (ends & (time[:, None] == grid.start(rows, self.delay) + 1)).any(axis=1)
        fresh = open_before[:, :, None] & (jnp.arange(self.time_max + 1) == time[:, None, None])
        tokens = jnp.where(fresh, next_tokens[:, :, None], state.tokens)
        if self.unique and not self.literal:
            length = end - grid.start(rows, self.delay)
            complete |= self.circle(self._align(tokens), length, end != NEVER, ends) < NEVER
        over = (~exists | (end != NEVER)).all(axis=1)
        if not self.literal:
            over &= complete | (state.started == self.sub_max)
        done = state.done | over
        idle = ~self._open(state.started, end, done).any(axis=1) & ~done
        now = jnp.where(idle, jnp.minimum(grid.next_start(time, self.delay), self.time_max), time)
        return GridState(
            time=now,
            tokens=tokens,
            last=jnp.where(open_before, next_tokens, state.last),
            started=state.started,
            end=end,
            retired=state.retired,
            complete=complete,
            done=done | (now == self.time_max),
            steps=jnp.where(state.done, state.steps, jnp.where(over, time, now)),
        )

    def _open(self, started: Array, end: Array, done: Array) -> Array:
        """bool [B, S], True at rows that have started and not ended, of examples that are not done."""
        return (jnp.arange(self.rows) < started[:, None]) & (end == NEVER) & ~done[:, None]

    def stop(self, state: GridState, which: Array) -> GridState:
        """See `Refillable`."""
        return dataclasses.replace(state, done=state.done | which)

    def done(self, state: GridState) -> Array:
        """As found by the last step."""
        return state.done

    def result(self, state: GridState) -> Decoded:
        """The rows, each moved to start at its first token (line 14)."""
        rows = jnp.arange(self.rows)
        exists = rows < state.started[:, None]
        first, tokens = grid.start(rows, self.delay) + 1, self._align(state.tokens)
        stop = jnp.minimum(state.end, state.steps[:, None] + 1)  # the eos, or just beyond the last token
        lengths = jnp.where(exists, jnp.maximum(stop - first, 0), 0)
        cut = (exists & (state.end == NEVER)).any(axis=1)
        truncated = self.cut(cut, state.complete, state.started)
        return Decoded(tokens=tokens, lengths=lengths, steps=state.steps, truncated=truncated)

    def _align(self, tokens: Array) -> Array:
        """Of tokens [B, S, T + 1] by absolute time those [B, S, T] from each row's first on."""
        first = grid.start(jnp.arange(self.rows), self.delay) + 1
        places = jnp.minimum(first[:, None] + jnp.arange(self.time_max), self.time_max)
        return jnp.take_along_axis(tokens, places[None], axis=2)

    def cut(self, cut: Array, complete: Array, started: Array) -> Array:
        """Codes i32 [B], from whether a row was open at the end, whether rows ended it, and how many had started.

        Rows that start together are as many as there are to be: none is missing.
        """
        full = (started == self.sub_max) & (self.delay > 0)
        code = {name: i for i, name in enumerate(TRUNCATIONS)}
        otherwise = code["time_max"] if self.delay and not self.literal else code[None]
        found = jnp.where(
            cut, code["time_max"], jnp.where(complete, code[None], jnp.where(full, code["sub_max"], otherwise))
        )
        return found.astype(jnp.int32)

    def calls(self, decoded: Decoded) -> np.ndarray:
        """One a step in which a row was open."""
        pairs = zip(np.asarray(decoded.lengths), np.asarray(decoded.steps), strict=True)
        return np.asarray([grid.pipelined_calls(lengths, delay=self.delay, steps=steps) for lengths, steps in pairs])

    def circle(self, tokens: Array, length: Array, ended: Array, ends: Array) -> Array:
        """i32 [B], the time at which the answer is seen to run in circles, or NEVER.

        It does once two rows, one right after the other, have ended and each has the tokens of a row before it. A row
        cannot end before an equal one above it does, so what is equal by then is known by then. `length` counts the end
        token, which may differ; `ends`: bool [B, R], rows that ended only now; if none did, nothing is compared.
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
            until = grid.start(rows, self.delay) + length
            both = jnp.where(repeats[:, 1:] & repeats[:, :-1], jnp.maximum(until[:, 1:], until[:, :-1]), NEVER)
            return both.min(axis=1, initial=NEVER)

        never = jnp.full(len(ended), NEVER, jnp.int32)
        time: Array = jax.lax.cond(ends.any(), found, lambda: never)
        return time

    def may_begin(self, ended: Array, length: Array, circle: Array | None = None) -> Array:
        """bool [B, R], whether a row starts once those before it are written up to its start (lines 5-7, 12-13).

        `ended`: bool [B, R], by an end token; `length`: i32 [B, R], tokens of each row, that one included; `circle`: if
        one may be.
        """
        if self.delay == 0:
            return jnp.ones_like(ended)
        first = grid.start(jnp.arange(self.rows), self.delay)
        if not self.literal:
            none_empty = ~over_earlier_rows(jax.lax.cummax, (ended & (length == 1)).astype(jnp.int32), 0).astype(bool)
            return none_empty if circle is None else none_empty & (first < circle[:, None])
        # It stops when all rows have ended: some row before it must be open when it starts.
        latest = over_earlier_rows(jax.lax.cummax, jnp.where(ended, first + length, NEVER), NEVER)
        return jax.lax.cummin((latest > first).astype(jnp.int32), axis=1).astype(bool)


def over_earlier_rows(scan: Callable[..., Array], x: Array, first: int) -> Array:
    """The running extreme [B, R] of all rows before each one; `first` at the first row."""
    return jnp.pad(scan(x, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=first)


class OnGrid(Strategy, Protocol):
    """A greedy strategy whose answers are rows of a grid, each on its own: what drafts can be verified for."""

    @property
    def on_grid(self) -> Pipelined:
        """The grid on which Algorithm 1 writes the same answers."""

    def cut(self, cut: Array, complete: Array, started: Array) -> Array:
        """Codes i32 [B], as `Pipelined.cut`."""
