"""The pipelined decoder: Algorithm 1 of the paper over a fixed grid of sub_max rows and time_max time-steps.

A cache slot is a place on the grid: slot = time * sub_max + row, so a step writes one run of sub_max slots.
"""

import dataclasses

import flax.struct
import jax.numpy as jnp

from pipejax import grid
from pipejax.decoding.core import TRUNCATIONS, Array, Decoded, Query

NEVER = 2**30  # the end of a row that has not ended: later than any time


@flax.struct.dataclass
class State:
    """After `time` time-steps (t of Algorithm 1)."""

    time: Array  # i32 scalar
    tokens: Array  # i32 [B, S, T + 1], by row and absolute time
    started: Array  # i32 [B], rows that have started (k of Algorithm 1)
    end: Array  # i32 [B, S], time at which a row's eos was generated, else NEVER
    empty_seen: Array  # bool [B], some row ended at once
    done: Array  # bool [B]
    steps: Array  # i32 [B], time-steps taken


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """A new row every `delay` steps, one token a step for every open row.

    By default only an empty row, or the last of `sub_max` rows, ends spawning, and decoding stops once no row can start
    and all have ended. `literal` follows the paper's lines 5-13 to the letter: rows keep starting after an empty one,
    and decoding stops the first time that all started rows have ended.
    """

    delay: int
    time_max: int
    sub_max: int
    literal: bool = False
    bos: int = 0
    eos: int = 1

    @property
    def slots(self) -> int:
        """Every place on the grid that can be fed: times 0 to time_max - 1."""
        return self.time_max * self.sub_max

    def init(self, batch: int) -> State:
        """An empty grid."""
        return State(
            time=jnp.int32(0),
            tokens=jnp.zeros((batch, self.sub_max, self.time_max + 1), jnp.int32),
            started=jnp.zeros(batch, jnp.int32),
            end=jnp.full((batch, self.sub_max), NEVER, jnp.int32),
            empty_seen=jnp.zeros(batch, bool),
            done=jnp.zeros(batch, bool),
            steps=jnp.zeros(batch, jnp.int32),
        )

    def query(self, state: State) -> tuple[State, Query]:
        """Starts a row where one is due (lines 5-7), then asks for every row at once (line 8).

        Rows that are not open ask too, to keep the shapes static; nobody sees their slots or takes their answers. The
        eos of a row is fed once, in the step after it was generated: higher rows may see it.
        """
        rows, slots = jnp.arange(self.sub_max), jnp.arange(self.slots)
        due = (state.time % self.delay == 0) & (state.started < self.sub_max) & ~state.done
        if not self.literal:
            due &= ~state.empty_seen
        started = state.started + due
        born = due[:, None] & (rows == state.started[:, None])
        fed = jnp.where(born, self.bos, jnp.take(state.tokens, state.time, axis=2))
        state = dataclasses.replace(state, started=started, tokens=state.tokens.at[:, :, state.time].set(fed))

        slot_row, slot_time = slots % self.sub_max, slots // self.sub_max
        first, last = grid.start(slot_row, self.delay), jnp.take(state.end, slot_row, axis=1)
        real = (slot_row < started[:, None]) & (slot_time >= first) & (slot_time <= last)  # [B, C]
        here = rows[:, None], state.time, slot_row, slot_time
        mask = grid.visible(*here) & real[:, None, :]
        return state, Query(tokens=fed, mask=mask, distance=grid.distance(*here)[None], start=state.time * self.sub_max)

    def advance(self, state: State, next_tokens: Array) -> State:
        """Adds the tokens of open rows (lines 9-11) and looks whether it is over (lines 12-13)."""
        rows, time = jnp.arange(self.sub_max), state.time + 1
        exists = rows < state.started[:, None]
        open_before = exists & (state.end == NEVER) & ~state.done[:, None]
        tokens = state.tokens.at[:, :, time].set(jnp.where(open_before, next_tokens, 0))
        ends = open_before & (next_tokens == self.eos)
        end = jnp.where(ends, time, state.end)
        empty_seen = state.empty_seen | (ends & (time == grid.start(rows, self.delay) + 1)).any(axis=1)
        over = (~exists | (end != NEVER)).all(axis=1)
        if not self.literal:
            over &= empty_seen | (state.started == self.sub_max)
        return State(
            time=time,
            tokens=tokens,
            started=state.started,
            end=end,
            empty_seen=empty_seen,
            done=state.done | over | (time == self.time_max),
            steps=jnp.where(state.done, state.steps, time),
        )

    def done(self, state: State) -> Array:
        """As found by the last step."""
        return state.done

    def result(self, state: State) -> Decoded:
        """The rows, each moved to start at its first token (line 14)."""
        rows, columns = jnp.arange(self.sub_max), jnp.arange(self.time_max)
        exists = rows < state.started[:, None]
        first = grid.start(rows, self.delay) + 1
        places = jnp.minimum(first[:, None] + columns, self.time_max)
        tokens = jnp.take_along_axis(state.tokens, places[None], axis=2)
        stop = jnp.minimum(state.end, state.steps[:, None] + 1)  # the eos, or just beyond the last token
        lengths = jnp.where(exists, jnp.maximum(stop - first, 0), 0)
        cut = (exists & (state.end == NEVER)).any(axis=1)
        full = state.started == self.sub_max
        code = {name: i for i, name in enumerate(TRUNCATIONS)}
        otherwise = code[None] if self.literal else code["time_max"]
        truncated = jnp.where(
            cut, code["time_max"], jnp.where(state.empty_seen, code[None], jnp.where(full, code["sub_max"], otherwise))
        )
        return Decoded(tokens=tokens, lengths=lengths, steps=state.steps, truncated=truncated.astype(jnp.int32))
