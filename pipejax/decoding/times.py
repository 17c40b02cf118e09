"""Comparisons of times over rows and along rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array

NEVER = 2**30  # later than any time


def over_earlier_rows(scan: Callable[..., Array], x: Array, first: int) -> Array:
    """Returns [B, R], the minimum or maximum of `x` over all earlier rows.

    Args:
      scan: `jax.lax.cummin` or `jax.lax.cummax`.
      x: [B, R].
      first: the result for row 0.
    """
    return jnp.pad(scan(x, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=first)


def count_before(x: Array, *, axis: int) -> Array:
    """Returns i32, number of entries before the first True along an axis; all of them if there is none."""
    number = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    found: Array = jnp.where(x, number, x.shape[axis]).min(axis=axis)
    return found
