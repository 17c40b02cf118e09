"""Token by token: the ordinary greedy decoder of T5, the baseline. One row of the grid."""

import dataclasses
from typing import ClassVar

import flax.struct
import jax.numpy as jnp

from pipejax.decoding.gathering import Query
from pipejax.decoding.interface import TRUNCATIONS, Array, Decoded, Plain, SourceIds, ends_of, is_end
from pipejax.decoding.pipelined import Pipelined
from pipejax.grid import Numbers


@flax.struct.dataclass
class SequenceState:
    """The answers as far as they are written."""

    tokens: Array  # i32 [B, max_length]
    last: Array  # i32 [B], the newest token
    length: Array  # i32 [B], tokens generated, the end token included
    ended: Array  # bool [B], an end token was generated
    given_up: Array  # bool [B]


@dataclasses.dataclass(frozen=True)
class Sequential(Plain):
    """At most `max_length` tokens, the end token included."""

    max_length: int
    bos: int = 0
    eos: int = 1
    other_ends: tuple[int, ...] = ()  # tokens that end an answer as well
    most_queries: ClassVar[int] = 1

    @property
    def slots(self) -> int:
        """One a step."""
        return self.max_length

    @property
    def places(self) -> tuple[int, int]:
        """One row."""
        return 1, self.max_length

    def start(self, row: Numbers) -> Numbers:
        """At once."""
        return 0 * row

    @property
    def on_grid(self) -> Pipelined:
        """The same answers as the only row of a grid."""
        return Pipelined(1, self.max_length, sub_max=1, bos=self.bos, eos=self.eos, other_ends=self.other_ends)

    def cut(self, cut: Array, complete: Array, started: Array) -> Array:
        """Codes i32 [B]: only the first argument, whether no end token came, matters to one row."""
        return jnp.where(cut, TRUNCATIONS.index("max_length"), TRUNCATIONS.index(None)).astype(jnp.int32)

    def init(self, batch: int, source: SourceIds | None = None) -> SequenceState:
        """bos alone."""
        first = jnp.full(batch, self.bos, jnp.int32)
        tokens, zeros = jnp.zeros((batch, self.max_length), jnp.int32), jnp.zeros(batch, jnp.int32)
        return SequenceState(tokens=tokens, last=first, length=zeros, ended=zeros > 0, given_up=zeros > 0)

    def query(self, state: SequenceState) -> tuple[SequenceState, Query]:
        """The last token sees all before it."""
        row = jnp.zeros((1, 1), jnp.int32)
        return state, Query(state.last[:, None], row, time=state.length[:, None], live=~self.done(state)[:, None])

    def advance(self, state: SequenceState, next_tokens: Array) -> SequenceState:
        """Appends where no end token came yet."""
        going, found = ~self.done(state), next_tokens[:, :1]
        here = going[:, None] & (jnp.arange(self.max_length) == state.length[:, None])
        return SequenceState(
            tokens=jnp.where(here, found, state.tokens),
            last=found[:, 0],
            length=state.length + going,
            ended=state.ended | (going & is_end(found[:, 0], ends_of(self))),
            given_up=state.given_up,
        )

    def stop(self, state: SequenceState, which: Array) -> SequenceState:
        """See `Refillable`."""
        return dataclasses.replace(state, given_up=state.given_up | which)

    def done(self, state: SequenceState) -> Array:
        """An end token, or no room left."""
        return state.ended | state.given_up | (state.length >= self.max_length)

    def result(self, state: SequenceState) -> Decoded:
        """One row."""
        return Decoded(
            tokens=state.tokens[:, None],
            lengths=(state.length - state.ended)[:, None],
            steps=state.length,
            truncated=self.cut(~state.ended, state.ended, state.length),
        )
