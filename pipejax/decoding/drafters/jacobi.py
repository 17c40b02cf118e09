"""Drafts of the model's own: its answers to what it was asked before, right or wrong (Santilli et al. 2023)."""

import dataclasses

import jax.numpy as jnp

from pipejax.decoding.drafters.interface import Draft, Written
from pipejax.decoding.interface import SourceIds


@dataclasses.dataclass(frozen=True)
class Jacobi:
    """Jacobi iteration: each call answers at all places of the draft, and the answers are the next draft.

    A place that was not asked yet is guessed to repeat the one before it.
    """

    odds: tuple[float, ...] = (0.6,)

    def init(self, source: SourceIds, rows: int) -> None:
        """It remembers nothing: the answers come with what is written."""

    def propose(self, state: None, written: Written, most: int) -> tuple[None, Draft]:
        """The answers of the call before, moved up to what is written by now."""
        last = jnp.take_along_axis(written.tokens, jnp.maximum(written.length - 1, 0)[:, :, None], axis=2)
        known = jnp.minimum(jnp.arange(most), written.guessed[:, :, None] - 1)
        tokens = jnp.take_along_axis(written.guesses, jnp.maximum(known, 0), axis=2)
        tokens = jnp.where(written.guessed[:, :, None] > 0, tokens, last)
        begun = (written.length > 0) | (written.guessed > 0)
        return None, Draft(tokens, jnp.where(begun, most, 0), jnp.zeros_like(written.length))
