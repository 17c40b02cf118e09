"""A custom method that shares nothing with pipejax's methods: layout, loss, strategy, answers and end token differ.

Row i of `rows` begins at time 2 i, independent of the other rows, and ends by its own end token, which is never fed. At
each place two tokens are correct: the next token of the row, and the first token of its next word. A setting is the
weight of the second one.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax import grid
from pipejax.decoding import TRUNCATIONS, Decoded, Plain, Query, SourceIds
from pipejax.methods import Ids, Method, Spells, Target, spell
from pipejax.system.fields import setting

if TYPE_CHECKING:
    from pipejax.decoding import Strategy

STOP = 2  # ends a row


@flax.struct.dataclass
class State:
    """All arrays have a first axis of B."""

    time: jax.Array  # i32 [B]
    tokens: jax.Array  # i32 [B, R, W]
    count: jax.Array  # i32 [B, R], the tokens of each row, its end included
    ended: jax.Array  # bool [B, R]
    done: jax.Array  # bool [B]


@dataclasses.dataclass(frozen=True)
class Steps(Plain):
    """`rows` rows of at most `width` tokens."""

    rows: int
    width: int
    bos: int
    eos: int = STOP

    @property
    def most_queries(self) -> int:
        return self.rows

    @property
    def slots(self) -> int:
        return self.rows * self.width

    @property
    def places(self) -> tuple[int, int]:
        return self.rows, self.times

    @property
    def times(self) -> int:
        return 2 * (self.rows - 1) + self.width

    def start(self, row: Any) -> Any:
        return 2 * row

    def init(self, batch: int, source: SourceIds | None = None) -> State:
        none = jnp.zeros((batch, self.rows), jnp.int32)
        tokens = jnp.zeros((batch, self.rows, self.width), jnp.int32)
        return State(none[:, 0], tokens, none, none > 0, none[:, 0] > 0)

    def _open(self, state: State) -> jax.Array:
        begun = self.start(jnp.arange(self.rows)) <= state.time[:, None]
        return begun & ~state.ended & (state.count < self.width) & ~state.done[:, None]

    def query(self, state: State) -> tuple[State, Query]:
        last = jnp.take_along_axis(state.tokens, jnp.maximum(state.count - 1, 0)[:, :, None], axis=2)[:, :, 0]
        fed = jnp.where(state.count == 0, self.bos, last)
        row = jnp.arange(self.rows)[None]
        return state, Query(fed, row, jnp.broadcast_to(state.time[:, None], fed.shape), self._open(state))

    def advance(self, state: State, answers: jax.Array) -> State:
        live = self._open(state)
        here = live[:, :, None] & (jnp.arange(self.width) == state.count[:, :, None])
        count, ended = state.count + live, state.ended | (live & (answers == self.eos))
        time = jnp.where(state.done, state.time, state.time + 1)
        over = (ended | (count == self.width)).all(axis=1)
        # A pause without an open row ends at the next start.
        idle = (
            ~(ended | (count == self.width) | (self.start(jnp.arange(self.rows)) > time[:, None])).any(axis=1) & ~over
        )
        time = jnp.where(idle, time + time % 2, time)
        tokens = jnp.where(here, answers[:, :, None], state.tokens)
        return State(time, tokens, count, ended, state.done | over)

    def stop(self, state: State, which: jax.Array) -> State:
        return dataclasses.replace(state, done=state.done | which)

    def done(self, state: State) -> jax.Array:
        return state.done

    def result(self, state: State) -> Decoded:
        cut = (~state.ended & (state.count == self.width)).any(axis=1)
        code = jnp.where(cut, TRUNCATIONS.index("max_length"), TRUNCATIONS.index(None)).astype(jnp.int32)
        return Decoded(state.tokens, state.count - state.ended, state.time, code)


@dataclasses.dataclass(frozen=True)
class Staggered(Method):
    """See above."""

    rows: int = setting(3, least=1, most=9)
    width: int = setting(6, least=1)
    second: float = setting(0.25, least=0.0, most=1.0)  # the weight of the second target token

    name: ClassVar[str] = "staggered"
    can: ClassVar[frozenset[str]] = frozenset(("sample", "score", "limit", "stream", "serve", "export"))
    choices: ClassVar[int] = 2

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        spelled = [row[: self.width - 1] for row in spell(rows, spells, ids.eos) if row][: self.rows]
        spelled += [[]] * (self.rows - len(spelled))
        slots = [
            (fed, (next_, row[0] if row else STOP), i, 2 * i + j)
            for i, row in enumerate(spelled)
            for j, (fed, next_) in enumerate(zip([ids.bos, *row], [*row, STOP], strict=True))
        ]
        inputs, targets, row_of, time = (np.asarray(x, np.int32) for x in zip(*slots, strict=True))
        weights = np.broadcast_to(np.asarray([1.0, self.second], np.float32), targets.shape)
        return Target(grid.Flat(inputs, targets, np.array(weights), row_of, time), len(rows) > self.rows)

    def most_slots(self, most: int) -> int:
        return self.rows * self.width

    def loss(self, logits: Any, targets: Any, weights: Any) -> Any:
        """The logarithm of the weighted probabilities of the target tokens."""
        log_probs = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(log_probs, targets, axis=-1)
        real = weights[..., 0] > 0
        found = jax.nn.logsumexp(jnp.where(weights > 0, chosen + jnp.log(jnp.maximum(weights, 1e-9)), -1e9), axis=-1)
        return -jnp.where(real, found, 0).sum(), real.sum().astype(jnp.float32)

    def strategy(self, ids: Ids) -> "Strategy":
        return Steps(self.rows, self.width, ids.bos)
