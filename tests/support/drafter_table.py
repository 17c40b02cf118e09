"""A drafter whose guesses come from a table."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pipejax.decoding.drafters import Draft

GUESSED = 16  # tokens of a row in a table of guesses


@dataclasses.dataclass(frozen=True)
class Table:
    """Guesses from a table, which is the source: the guess for row i with j tokens is `table[i][j:]`."""

    odds: tuple[float, ...] = (0.9,)

    def init(self, source: Any, rows: int) -> Any:
        """The table."""
        return source.ids.reshape(len(source.ids), -1, GUESSED)[:, :rows]

    def propose(self, table: Any, written: Any, most: int) -> Any:
        """The tokens of the table at the places after the generated tokens."""
        places = written.length[:, :, None] + jnp.arange(most)
        tokens = jnp.take_along_axis(table, jnp.minimum(places, GUESSED - 1), axis=2)
        count = jnp.clip(GUESSED - written.length, 0, most)
        return table, Draft(tokens, count, jnp.zeros_like(count))
