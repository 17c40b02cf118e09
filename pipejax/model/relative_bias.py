"""Expands T5's relative bias to queries and keys, with a gradient that consists of dense sums and products.

JAX differentiates a lookup into a scatter: one addition for each score, most of them to the same few numbers. On a GPU
these additions wait for each other, and in deterministic mode they are sorted first. So on accelerators the gradient is
computed as a product with a one-hot matrix.

Shapes: H heads, L length, G rows of queries, Q queries, C keys, K buckets.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.model.snapshot import snapshot

Array = jax.Array
ELEMENTS = 2**24  # the most elements of the one-hot matrix at a time: 64 MiB in float32


def along_diagonals(values: Array, length: int) -> Array:
    """Returns [H, L, L], the bias between the tokens of a sequence, from its values at each offset.

    The matrix is constant along its diagonals. The result is made by reshaping instead of a lookup: the values of all
    offsets are repeated as rows of length 2 L, and reading them as rows of length 2 L - 1 shifts each row by one more
    column. The gradient sums over diagonals.

    Args:
      values: [H, 2 L - 1], for the offsets key - query from 1 - L to L - 1.
      length: L.
    """
    heads, longer = values.shape[0], 2 * length
    rows = jnp.broadcast_to(jnp.pad(values, ((0, 0), (0, 1)))[:, None], (heads, length, longer))
    shifted = rows.reshape(heads, -1)[:, : length * (longer - 1)].reshape(heads, length, longer - 1)
    return shifted[:, :, length - 1 :]


@jax.custom_vjp
def by_bucket(table: Array, bucket: Array) -> Array:
    """Returns the bias [G, H, Q, C]: the rows of `table` [K, H] that `bucket`, i32 [G, Q, C], selects."""
    return jnp.moveaxis(table[bucket], -1, 1)


def _forward(table: Array, bucket: Array) -> tuple[Array, tuple[Array, Array]]:
    return by_bucket(table, bucket), (table, bucket)


def _backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, np.ndarray]:
    table, bucket = kept
    found = jax.lax.platform_dependent(table, bucket, gradient, cpu=_scatter, default=_multiply)
    return found, np.zeros(bucket.shape, jax.dtypes.float0)


def _scatter(table: Array, bucket: Array, gradient: Array) -> Array:
    """Returns the gradient of the table, computed by a scatter.

    This is the fastest way on a CPU, which does the additions one by one anyway.
    """
    return jnp.zeros_like(table).at[bucket].add(jnp.moveaxis(gradient, 1, -1))


def _multiply(table: Array, bucket: Array, gradient: Array) -> Array:
    """Returns the gradient of the table, [K, H], by products of the one-hot matrix of buckets with the gradient.

    The queries are divided into equal parts, so that a one-hot matrix has at most about ELEMENTS elements.
    """
    (groups, queries, keys), count = bucket.shape, table.shape[0]
    least = -(-groups * queries * keys * count // ELEMENTS)
    parts = next(n for n in range(1, queries + 1) if queries % n == 0 and n >= min(least, queries))
    size = queries // parts

    def products(number: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(bucket, number * size, size, axis=1)
        own_gradient = jax.lax.dynamic_slice_in_dim(gradient, number * size, size, axis=2)
        chosen = (own[:, None] == jnp.arange(count)[:, None, None]).astype(gradient.dtype)
        # The axis of rows is kept until the end, since the rows may be on different devices.
        return jnp.einsum("gkqc,ghqc->gkh", chosen, own_gradient, precision=jax.lax.Precision.HIGHEST)

    return jax.lax.map(products, jnp.arange(parts)).sum((0, 1)).astype(table.dtype)


by_bucket.defvjp(_forward, _backward)


SNAPSHOT = snapshot(globals())  # see `t5.is_packed`
