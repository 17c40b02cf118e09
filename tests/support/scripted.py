"""Decoding with a perfect model that costs nothing and writes given rows, to count decoder calls."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax import decoding
from pipejax.decoding import Carry, Decoded, GridStrategy, Plain, Query, Segment, Sizes, SourceIds, Step

Array = jax.Array


@flax.struct.dataclass
class State:
    """The state of the drafting strategy, and the answers of the scripted model."""

    inner: Any
    script: Array  # i32 [B, R, W], tokens of each row; an eos after the last


@dataclasses.dataclass(frozen=True)
class Scripted(Plain):
    """Drafted decoding in which the model answers any query by a script."""

    inner: GridStrategy

    @property
    def most_queries(self) -> int:
        return self.inner.most_queries

    @property
    def slots(self) -> int:
        return self.inner.slots

    def begun(self, source: SourceIds, script: Array) -> State:
        return State(self.inner.init(len(script), source), script)

    def init(self, batch: int, source: SourceIds | None = None) -> State:
        raise NotImplementedError

    def query(self, state: State) -> tuple[State, Query]:
        inner, query = self.inner.query(state.inner)
        return State(inner, state.script), query

    def advance(self, state: State, answers: Array) -> State:
        """Replaces the answers by the script's answers."""
        columns = jnp.arange(self.inner.width)
        place = state.inner.length[:, None] + columns[:, None]  # [B, 1 + D, R]
        place = jnp.minimum(place, state.script.shape[2] - 1).swapaxes(1, 2)
        says = jnp.take_along_axis(state.script, place, axis=2).swapaxes(1, 2)
        return State(self.inner.advance(state.inner, says.reshape(answers.shape)), state.script)

    def kept(self, state: State) -> Array | None:
        return self.inner.kept(state.inner)

    def done(self, state: State) -> Array:
        return self.inner.done(state.inner)

    def result(self, state: State) -> Decoded:
        return self.inner.result(state.inner)

    def calls(self, decoded: Decoded) -> Any:
        return self.inner.calls(decoded)


class NoModel:
    """Computes nothing."""

    def cache(self, slots: int, old: Array | None) -> Array:
        return jnp.zeros(0)

    def __call__(self, step: Step, cache: Array) -> tuple[Array, Array]:
        return jnp.zeros((2, len(step.tokens))), cache

    def greedy(self, step: Step, cache: Array) -> tuple[Array, Array]:
        return jnp.zeros(len(step.tokens), jnp.int32), cache


def decode(
    strategy: GridStrategy,
    sources: Sequence[Sequence[int]],
    answers: Sequence[Sequence[Sequence[int]]],
    *,
    length: int = 1,
    width: int = 1,
    forced: np.ndarray | None = None,
) -> Decoded:
    """Decodes a batch with a model that answers with the given rows of ids, which have no eos.

    `length`, `width`: the least lengths of padded sources, and of padded rows with their eos. `forced`: as in
    `DecodingOptions`: the rows begin with these tokens.
    """
    longest = max(length, *map(len, sources))
    ids = np.asarray([[*s, *[0] * (longest - len(s))] for s in sources], np.int32)
    width = max(width, *(len(row) + 1 for rows in answers for row in [*rows, []]))
    says = script(answers, strategy.rows, width, strategy.eos)
    real = np.asarray(list(map(len, sources)), np.int32)
    found: Decoded = jax.device_get(_decoded(strategy, SourceIds(ids, real, forced=forced), says))
    return found


def script(answers: Sequence[Sequence[Sequence[int]]], rows: int, width: int, eos: int) -> np.ndarray:
    """The script i32 [B, rows, width]: the tokens of each row of each answer, truncated to width, then eos."""
    says = np.full((len(answers), rows, width), eos, np.int32)
    for b, answer in enumerate(answers):
        for i, row in enumerate(answer[:rows]):
            says[b, i, : len(row)] = row[:width]
    return says


@partial(jax.jit, static_argnums=0)
def _decoded(strategy: GridStrategy, source: SourceIds, script: Array) -> Decoded:
    strategy = strategy if source.forced is None else strategy.bind_source(source)
    scripted, model = Scripted(strategy), NoModel()
    sizes = Sizes.fit(scripted, len(script))

    def stretch(slots: int, carry: Carry | None) -> Segment:
        begun = carry or decoding.begin(scripted, model, scripted.begun(source, script), sizes)
        return decoding.decode(scripted, model, begun, sizes=sizes, slots=slots)

    return stretch(sizes.slots[-1], None).decoded
