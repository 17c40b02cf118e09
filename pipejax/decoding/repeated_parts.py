"""Finds the end of sequential answers that repeat themselves (`decode.unique_rows`).

As on a grid (`Rows.find_circle`), an answer repeats itself when two consecutive rows each equal a row before them. In a
sequential answer the rows are the parts between separators, so the separator after the second part ends the answer,
like an end token. A separator is found by its token alone. If its text ends with a space, which belongs to the token
after it, the same token without a space counts as a separator as well, as in "f(x;a;b)".

Shapes: B batch, T the most tokens of an answer.
"""

import jax
import jax.numpy as jnp

from pipejax.decoding.strategy import Array
from pipejax.decoding.times import NEVER


def find_end(tokens: Array, before: Array, after: Array, separator: int) -> Array:
    """Returns i32 [B, 1], the least number of tokens above `before` after which an answer repeats itself, or NEVER.

    The parts of an answer are its tokens between two separators. An answer repeats itself at the separator that ends a
    part if this part and the part before it each equal an earlier part. Empty parts equal no part.

    Args:
      tokens: i32 [B, 1, T], the tokens of the answers, each in the only row of its grid.
      before: i32 [B, 1], the number of tokens of each answer before the last call.
      after: i32 [B, 1], the number of tokens after it; further tokens are ignored.
      separator: the token.
    """
    tokens, before, after = tokens[:, 0], before[:, 0], after[:, 0]
    place = jnp.arange(tokens.shape[1])
    ends = (tokens == separator) & (place < after[:, None])
    # The place of the last separator before each place, or -1.
    last = jnp.pad(jax.lax.cummax(jnp.where(ends, place, -1), axis=1), ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    begins = jnp.pad(ends, ((0, 0), (1, 0)), constant_values=True)[:, :-1]  # the places at which a part begins

    def at(x: Array, where: Array) -> Array:
        """Returns the entries [B] of an array [B, T] at places [B]; the first entry for negative places."""
        return jnp.take_along_axis(x, jnp.maximum(where, 0)[:, None], axis=1)[:, 0]

    def equals_earlier(first: Array, end: Array) -> Array:
        """Returns bool [B], whether the part from place `first` to `end` - 1, both i32 [B], equals an earlier part."""
        size = end - first

        def compare(offset: Array, same: Array) -> Array:
            here = tokens[:, jnp.minimum(place + offset, len(place) - 1)]
            return same & ((here == at(tokens, first + offset)[:, None]) | (offset >= size[:, None]))

        is_end = jnp.take_along_axis(ends, jnp.minimum(place + size[:, None], len(place) - 1), axis=1)
        same = jax.lax.fori_loop(0, size.max(), compare, begins & is_end & (place < first[:, None]))
        found: Array = same.any(axis=1) & (size > 0)
        return found

    def look(number: Array, found: Array) -> Array:
        end = before + number
        first = at(last, end) + 1
        previous_end = first - 1
        repeats = equals_earlier(first, end) & equals_earlier(at(last, previous_end) + 1, previous_end)
        repeats &= at(ends, end) & (end < after) & (previous_end >= 0)
        return jnp.where(repeats, jnp.minimum(found, end + 1), found)

    never = jnp.full(len(tokens), NEVER, jnp.int32)
    has_new = (ends & (place >= before[:, None])).any()
    count = jnp.where(has_new, (after - before).max(), 0)
    found: Array = jax.lax.fori_loop(0, count, look, never)
    return found[:, None]
