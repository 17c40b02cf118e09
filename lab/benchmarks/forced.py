"""Decoding in which the lengths of rows are given, so that all systems do the same work with random weights."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax import decoding
from pipejax.decoding import Carry, Decoded, Pipelined, Plain, Query, Segment, Sequential, SourceIds
from pipejax.grid import pipelined_steps, sequential_steps
from pipejax.inference import programs
from pipejax.inference.backends import Backend, Ready
from pipejax.inference.weights import Weights
from pipejax.model.backbone import Module
from pipejax.model.precision import precision
from pipejax.model.t5 import Memory

Array = jax.Array


@flax.struct.dataclass
class State:
    """The state of the inner strategy, and the lengths of rows."""

    inner: Any
    lengths: Array  # i32 [B, S], tokens of each row without its eos; 0 for the empty row and those after it


def ended(strategy: Pipelined | Sequential, state: Any, next_tokens: Array, lengths: Array) -> Array:
    """The tokens i32 [B, S] of a step, with eos exactly in rows that have reached their `lengths` i32 [B or 1, S]."""
    position = state.length
    other = jnp.where(next_tokens == strategy.eos, strategy.eos + 1, next_tokens)
    return jnp.where(position >= lengths, strategy.eos, other)


@dataclasses.dataclass(frozen=True)
class Fixed(Pipelined):
    """Pipelined decoding with the same given lengths for every answer, for callers that accept no other strategy."""

    lengths: tuple[int, ...] = ()  # tokens of each row without its eos; fewer than `sub_max`

    def advance(self, state: Any, next_tokens: Array) -> Any:
        """Takes the model's tokens, except that each row ends at its given length."""
        lengths = jnp.asarray([*self.lengths, *[0] * (self.rows - len(self.lengths))])
        return super().advance(state, ended(self, state, next_tokens, lengths[None]))


@dataclasses.dataclass(frozen=True)
class Forced(Plain):
    """A strategy that takes the model's tokens, except that each row ends at its given length."""

    inner: Pipelined | Sequential

    @property
    def most_queries(self) -> int:
        """The most queries of a step of the inner strategy."""
        return self.inner.most_queries

    @property
    def slots(self) -> int:
        """The slots of the inner strategy."""
        return self.inner.slots

    def start(self, lengths: Array) -> State:
        """The state before the first step, for the `lengths` i32 [B, S] of rows."""
        return State(self.inner.init(lengths.shape[0]), lengths)

    def init(self, batch: int, source: SourceIds | None = None) -> State:
        """The state for answers without rows; `start` takes lengths."""
        return self.start(jnp.zeros((batch, self.most_queries), jnp.int32))

    def query(self, state: State) -> tuple[State, Query]:
        """The query of the inner strategy."""
        inner, query = self.inner.query(state.inner)
        return State(inner, state.lengths), query

    def advance(self, state: State, next_tokens: Array) -> State:
        """Writes eos at the given length of a row, and another token where the model would end the row."""
        forced = ended(self.inner, state.inner, next_tokens, state.lengths)
        return State(self.inner.advance(state.inner, forced), state.lengths)

    def done(self, state: State) -> Array:
        """Whether each answer of the inner strategy is complete."""
        return self.inner.done(state.inner)

    def result(self, state: State) -> Decoded:
        """The result of the inner strategy."""
        return self.inner.result(state.inner)

    def calls(self, decoded: Decoded) -> np.ndarray:
        """The decoder calls of each answer, as the inner strategy counts them."""
        return self.inner.calls(decoded)

    def wanted(self, rows: Sequence[int]) -> list[int]:
        """The lengths [S] for an answer with rows of the lengths `rows`."""
        if isinstance(self.inner, Sequential):
            return [sequential_steps(rows) - 1]
        return [*rows, *[0] * (self.most_queries - len(rows))]

    def steps(self, rows: Sequence[int]) -> int:
        """The decoder steps of an answer with rows of the lengths `rows`."""
        if isinstance(self.inner, Sequential):
            return sequential_steps(rows)
        grid = {"delay": self.inner.delay, "sub_max": self.inner.sub_max, "time_max": self.inner.time_max}
        return pipelined_steps(rows, **grid)


class Decoder:
    """Encodes and decodes with one forced strategy; compiles on the first use of a shape."""

    def __init__(self, model: Module, ready: Ready, strategy: Forced, *, backend: Backend) -> None:
        """Prepares the programs; each compiles when it is first used."""
        self.model, self.ready, self.strategy, self.backend = model, ready, strategy, backend
        self._encode = jax.jit(partial(programs.encode_batch, model, backend=backend))
        self._begin = jax.jit(self._begun)
        self._decode = jax.jit(self._part, static_argnames=("slots",))

    def _begun(self, weights: Weights, memory: Memory, lengths: Array) -> Carry:
        sizes = programs.schedule(self.strategy, lengths.shape[0])
        return decoding.begin(
            self.strategy, self.backend.decoder(self.model, weights, memory), self.strategy.start(lengths), sizes
        )

    def _part(self, weights: Weights, memory: Memory, carry: Carry, *, slots: int) -> Segment:
        sizes = programs.schedule(self.strategy, memory.mask.shape[0])
        return decoding.decode(
            self.strategy, self.backend.decoder(self.model, weights, memory), carry, sizes=sizes, slots=slots
        )

    def encode(self, source: np.ndarray, lengths: np.ndarray) -> Memory:
        """Encodes padded sources i32 [B, L], and returns their memory when it is complete."""
        with precision(self.model.dtype):
            return jax.block_until_ready(self._encode(self.ready.encoding, source, lengths))

    def decode(self, memory: Memory, rows: Sequence[Sequence[int]]) -> Decoded:
        """Decodes answers with rows of given lengths, one list of lengths for each example.

        Raises:
          AssertionError: the answers have other lengths, or took other numbers of steps.
        """
        lengths = np.asarray([self.strategy.wanted(r) for r in rows], np.int32)
        weights = self.ready.decoding
        with precision(self.model.dtype):
            begun = self._begin(weights, memory, lengths)
            found = decoding.run(
                lambda slots, carry: self._decode(weights, memory, carry or begun, slots=slots),
                programs.schedule(self.strategy, len(rows)),
            )
        decoded: Decoded = jax.device_get(found.decoded)
        assert decoded.steps.tolist() == [self.strategy.steps(r) for r in rows], "the steps do not fit the rows"
        assert (decoded.lengths == lengths).all(), "the rows do not have the given lengths"
        return decoded
