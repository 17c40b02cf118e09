"""A decoder of integers: its logits hash the visible cache slots, so that a missing or wrong slot changes them.

Sums of whole numbers are the same in any order and with any number of empty slots, so the results of two programs are
equal in every bit.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pipejax.decoding import SourceIds, Step

Array = jax.Array


def mix(*numbers: Any) -> Array:
    """A hash u32 of whole numbers, whose shapes are broadcast."""
    found = jnp.uint32(0x9E3779B9)
    for number in numbers:
        found = (found ^ jnp.asarray(number).astype(jnp.uint32)) * jnp.uint32(0x85EBCA6B)
        found = (found ^ (found >> 13)) * jnp.uint32(0xC2B2AE35)
        found = found ^ (found >> 16)
    return found


@dataclasses.dataclass(frozen=True)
class Hashed:
    """A `decoding.Model`. Its cache has hashes of tokens, u32 [B, C], at the places where XLA writes: see `_write`."""

    model: Array  # i32 scalar, the number of the random model
    source: Array  # i32 [B], a number for each source
    vocabulary: int
    eos: int = 1

    def cache(self, slots: int, old: Array | None) -> Array:
        """See `Model`."""
        more = slots - (0 if old is None else old.shape[1])
        held = jnp.zeros((len(self.source), 0), jnp.uint32) if old is None else old
        return jnp.pad(held, ((0, 0), (0, more)))

    def __call__(self, step: Step, cache: Array) -> tuple[Array, Array]:
        """See `Model`."""
        batch, width = step.row.shape
        tokens = step.tokens if step.query_at_place is None else step.tokens[step.query_at_place.reshape(-1)]
        cache = _write(cache, mix(self.model, tokens.reshape(batch, width)), step.start)
        back = step.position[:, :, None] - step.key_position[:, None]
        seen = jnp.where(step.mask, mix(cache[:, None], back), 0).sum(axis=2, dtype=jnp.uint32)
        found = mix(self.model, self.source[:, None], seen).reshape(-1)
        if step.place_of_query is not None:
            found = found[jnp.minimum(step.place_of_query, len(found) - 1)]
        ids = jnp.arange(self.vocabulary)[:, None]
        # Whole numbers up to 2^12; the probability of eos depends on the model, so that rows end early and late.
        drawn = mix(ids, found[None]) % 4096
        likely = mix(self.model, 77) % 5 * jnp.uint32(160)
        return (drawn + jnp.where(ids == self.eos, likely, 0)).astype(jnp.float32) / 512, cache

    def greedy(self, step: Step, cache: Array) -> tuple[Array, Array]:
        """See `Model`."""
        logits, cache = self(step, cache)
        return logits.argmax(axis=0).astype(jnp.int32), cache


def _write(cache: Array, new: Array, start: Array) -> Array:
    """Writes as the step decoder: a start that is too late is moved back until all fit, over used slots."""
    if len(start) == 1:
        return jax.lax.dynamic_update_slice_in_dim(cache, new, start[0], axis=1)
    put = jax.vmap(lambda old, new, at: jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=0))
    found: Array = put(cache, new, start)
    return found


@dataclasses.dataclass(frozen=True)
class Small:
    """A `drafters.SmallModel` whose decoder is a `Hashed`."""

    model: Hashed

    def decoder(self, memory: Any) -> Hashed:
        """See `SmallModel`."""
        return self.model


def bound_to(strategy: Any, model: Hashed, source: SourceIds) -> Any:
    """The strategy for a batch of sources; `model` is also the small model of the drafter `FromModel`."""
    return strategy.bind_source(dataclasses.replace(source, parameters=Small(model)))
