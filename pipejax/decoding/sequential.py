"""Token by token: the ordinary greedy decoder of T5, the baseline. One row of the grid."""

import dataclasses

import flax.struct
import jax.numpy as jnp
import numpy as np

from pipejax.decoding.core import TRUNCATIONS, Array, Decoded, Query, SourceIds, first_argmax


@flax.struct.dataclass
class State:
    """After t steps."""

    step: Array  # i32 scalar, t
    tokens: Array  # i32 [B, max_length + 1], bos first
    last: Array  # i32 [B], the newest token
    length: Array  # i32 [B], tokens generated, eos included
    ended: Array  # bool [B], eos was generated


@dataclasses.dataclass(frozen=True)
class Sequential:
    """At most `max_length` tokens, eos included."""

    max_length: int
    bos: int = 0
    eos: int = 1

    @property
    def rows(self) -> int:
        """One."""
        return 1

    @property
    def slots(self) -> int:
        """One a step."""
        return self.max_length

    def init(self, batch: int, source: SourceIds | None = None) -> State:
        """bos alone."""
        first = jnp.full(batch, self.bos, jnp.int32)
        tokens = jnp.zeros((batch, self.max_length + 1), jnp.int32).at[:, 0].set(first)
        zeros = jnp.zeros(batch, jnp.int32)
        return State(step=jnp.int32(0), tokens=tokens, last=first, length=zeros, ended=zeros > 0)

    def query(self, state: State) -> tuple[State, Query]:
        """The last token sees all before it."""
        row = jnp.zeros((1, 1), jnp.int32)
        return state, Query(tokens=state.last[:, None], row=row, time=row + state.step, live=~self.done(state)[:, None])

    def choose(self, logits: Array) -> Array:
        """Greedily: i32 [N]."""
        return first_argmax(logits)

    def advance(self, state: State, next_tokens: Array) -> State:
        """Appends where no eos came yet."""
        going, step, found = ~self.done(state), state.step + 1, next_tokens[:, 0]
        return State(
            step=step,
            tokens=state.tokens.at[:, step].set(found),
            last=found,
            length=jnp.where(going, step, state.length),
            ended=state.ended | (going & (found == self.eos)),
        )

    def kept(self, state: State) -> None:
        """All."""

    def done(self, state: State) -> Array:
        """eos, or no room left."""
        return state.ended | (state.length >= self.max_length)

    def result(self, state: State) -> Decoded:
        """One row."""
        code = jnp.where(state.ended, TRUNCATIONS.index(None), TRUNCATIONS.index("max_length"))
        return Decoded(
            tokens=state.tokens[:, None, 1:],
            lengths=(state.length - state.ended)[:, None],
            steps=state.length,
            truncated=code.astype(jnp.int32),
        )

    def calls(self, decoded: Decoded) -> np.ndarray:
        """One a step."""
        return np.asarray(decoded.steps)
