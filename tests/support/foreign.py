"""A family of custom methods: rows start at any time, and a step has one or two queries of a row.

Each row ends by eos, which is never fed. If a step has two queries of a row, the second query feeds BLANK instead of
the token that is not known yet.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax import grid
from pipejax.decoding import TRUNCATIONS, Decoded, Plain, Query, SourceIds
from pipejax.methods import Ids, Method, Spells, Target, spell

BLANK = 4


@flax.struct.dataclass
class State:
    """All arrays have a first axis of B."""

    step: jax.Array  # i32 [B]
    tokens: jax.Array  # i32 [B, R, W]
    count: jax.Array  # i32 [B, R], tokens of each row, eos included
    ended: jax.Array  # bool [B, R]
    given_up: jax.Array  # bool [B]


@dataclasses.dataclass(frozen=True)
class Lines(Plain):
    """Rows that start at the times `starts`, multiples of `together`, and have at most `width` tokens."""

    starts: tuple[int, ...]
    width: int
    together: int
    bos: int
    eos: int

    @property
    def most_queries(self) -> int:
        return len(self.starts) * self.together

    @property
    def slots(self) -> int:
        return len(self.starts) * self.width

    @property
    def places(self) -> tuple[int, int]:
        return len(self.starts), max(self.starts) + self.width

    def start(self, row: Any) -> Any:
        return np.asarray(self.starts)[row]

    def init(self, batch: int, source: SourceIds | None = None) -> State:
        none = jnp.zeros((batch, len(self.starts)), jnp.int32)
        return State(none[:, 0], jnp.zeros((*none.shape, self.width), jnp.int32), none, none > 0, none[:, 0] > 0)

    def open(self, state: State) -> jax.Array:
        begun = jnp.asarray(self.starts) <= self.together * state.step[:, None]
        return begun & ~state.ended & (state.count < self.width) & ~state.given_up[:, None]

    def query(self, state: State) -> tuple[State, Query]:
        last = jnp.take_along_axis(state.tokens, jnp.maximum(state.count - 1, 0)[:, :, None], axis=2)
        first = jnp.where(state.count[:, :, None] == 0, self.bos, last)
        fed = jnp.concatenate([first, jnp.full((*first.shape[:2], self.together - 1), BLANK)], axis=2)
        time = self.together * state.step[:, None, None] + jnp.arange(self.together) + 0 * fed
        row = jnp.arange(len(self.starts))[:, None] + 0 * fed
        live = jnp.broadcast_to(self.open(state)[:, :, None], fed.shape)
        return state, Query(*(x.reshape(len(x), -1) for x in (fed, row, time, live)))

    def advance(self, state: State, answers: jax.Array) -> State:
        found, tokens, count, ended = (
            answers.reshape(len(answers), -1, self.together),
            state.tokens,
            state.count,
            state.ended,
        )
        asked = self.open(state)
        for j in range(self.together):
            live = asked & ~ended
            here = live[:, :, None] & (jnp.arange(self.width) == count[:, :, None])
            tokens, count = jnp.where(here, found[:, :, j : j + 1], tokens), count + live
            ended |= live & (found[:, :, j] == self.eos)
        return State(state.step + ~self.done(state), tokens, count, ended, state.given_up)

    def stop(self, state: State, which: jax.Array) -> State:
        return dataclasses.replace(state, given_up=state.given_up | which)

    def done(self, state: State) -> jax.Array:
        return (state.ended | (state.count == self.width)).all(axis=1) | state.given_up

    def result(self, state: State) -> Decoded:
        code = jnp.where(state.ended.all(axis=1), TRUNCATIONS.index(None), TRUNCATIONS.index("max_length"))
        return Decoded(state.tokens, state.count - state.ended, state.step, code.astype(jnp.int32))


@dataclasses.dataclass(frozen=True)
class Uneven(Method):
    """A method whose rows start at unequal distances in time."""

    starts: ClassVar[tuple[int, ...]] = (0, 1, 4)
    width: int = 6
    together: ClassVar[int] = 1

    name: ClassVar[str] = "uneven"
    can: ClassVar[frozenset[str]] = frozenset(("score", "stream", "prefix", "serve"))
    steps: ClassVar[type[Lines]] = Lines

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        kept = [row[: self.width - 1] for row in spell(self.ordered(rows), spells, ids.eos)][: len(self.starts)]
        slots = list[tuple[int, int, float, int, int]]()
        for i, row in enumerate([*kept, *[[]] * (len(self.starts) - len(kept))]):
            said = [*row, ids.eos]
            for j in range(-(-len(said) // self.together) * self.together):
                fed = BLANK if j % self.together else [ids.bos, *said][j]
                answer = said[j] if j < len(said) else ids.eos
                slots.append((fed, answer, float(j < len(said)), i, self.starts[i] + j))
        inputs, targets, weights, row_of, time = zip(*slots, strict=True)
        ids_fed, answers, row_at, time_at = (np.asarray(x, np.int32) for x in (inputs, targets, row_of, time))
        return Target(
            grid.Flat(ids_fed, answers, np.asarray(weights, np.float32), row_at, time_at), len(rows) > len(self.starts)
        )

    def ordered(self, rows: Sequence[Any]) -> list[Any]:
        """The rows in the order in which they are written."""
        return [*rows]

    def most_slots(self, most: int) -> int:
        return len(self.starts) * self.width

    def strategy(self, ids: Ids) -> Any:
        return self.steps(self.starts, self.width, self.together, ids.bos, ids.eos)


@dataclasses.dataclass(frozen=True)
class Pairs(Uneven):
    """A method with two tokens of a row in a step."""

    starts: ClassVar[tuple[int, ...]] = (0, 2, 6)
    together: ClassVar[int] = 2

    name: ClassVar[str] = "pairs"


@dataclasses.dataclass(frozen=True)
class Backwards(Uneven):
    """A method that writes from the last row to the first."""

    starts: ClassVar[tuple[int, ...]] = (0, 1, 2)

    name: ClassVar[str] = "backwards"

    def ordered(self, rows: Sequence[Any]) -> list[Any]:
        return [*rows][::-1]

    def order(self, lengths: Sequence[int]) -> list[int]:
        return super().order(lengths)[::-1]
