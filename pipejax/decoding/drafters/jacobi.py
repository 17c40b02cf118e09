"""Jacobi decoding: the drafts are the model's own tokens of the previous call (Santilli et al. 2023)."""

import dataclasses

import jax.numpy as jnp

from pipejax.decoding.drafters.drafter import Draft, Written
from pipejax.decoding.strategy import SourceIds


@dataclasses.dataclass(frozen=True)
class Jacobi:
    """Jacobi iteration: a call generates tokens at all places of the draft, and these tokens are the next draft.

    A place without a token of the previous call repeats the token before it.
    """

    odds: tuple[float, ...] = (0.6,)

    def init(self, source: SourceIds, rows: int) -> None:
        """Returns None: the drafter has no state, as `Written` contains the tokens of the previous call."""

    def propose(self, state: None, written: Written, most: int) -> tuple[None, Draft]:
        """Drafts the tokens of the previous call that follow the accepted ones."""
        last = jnp.take_along_axis(written.tokens, jnp.maximum(written.length - 1, 0)[:, :, None], axis=2)
        known = jnp.minimum(jnp.arange(most), written.guessed[:, :, None] - 1)
        tokens = jnp.take_along_axis(written.guesses, jnp.maximum(known, 0), axis=2)
        tokens = jnp.where(written.guessed[:, :, None] > 0, tokens, last)
        begun = (written.length > 0) | (written.guessed > 0)
        return None, Draft(tokens, jnp.where(begun, most, 0), jnp.zeros_like(written.length))
