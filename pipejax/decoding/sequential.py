"""Token by token: the ordinary greedy decoder of T5, the baseline."""

import dataclasses

import flax.struct
import jax.numpy as jnp

from pipejax.decoding.core import TRUNCATIONS, Array, Decoded, Query


@flax.struct.dataclass
class State:
    """After t steps."""

    step: Array  # i32 scalar, t
    tokens: Array  # i32 [B, max_length + 1], bos first
    length: Array  # i32 [B], tokens generated, eos included
    ended: Array  # bool [B], eos was generated


@dataclasses.dataclass(frozen=True)
class Sequential:
    """At most `max_length` tokens, eos included."""

    max_length: int
    bos: int = 0
    eos: int = 1

    @property
    def slots(self) -> int:
        """One a step."""
        return self.max_length

    def init(self, batch: int) -> State:
        """bos alone."""
        tokens = jnp.zeros((batch, self.max_length + 1), jnp.int32).at[:, 0].set(self.bos)
        return State(step=jnp.int32(0), tokens=tokens, length=jnp.zeros(batch, jnp.int32), ended=jnp.zeros(batch, bool))

    def query(self, state: State) -> tuple[State, Query]:
        """The last token sees all before it."""
        behind = state.step - jnp.arange(self.slots)
        token = jnp.take(state.tokens, state.step, axis=1)[:, None]
        return state, Query(
            tokens=token, mask=(behind >= 0)[None, None], distance=jnp.abs(behind)[None, None], start=state.step
        )

    def advance(self, state: State, next_tokens: Array) -> State:
        """Appends where no eos came yet."""
        going = ~self.done(state)
        step = state.step + 1
        return State(
            step=step,
            tokens=state.tokens.at[:, step].set(next_tokens[:, 0]),
            length=jnp.where(going, step, state.length),
            ended=state.ended | (going & (next_tokens[:, 0] == self.eos)),
        )

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
