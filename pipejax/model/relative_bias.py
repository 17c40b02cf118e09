"""T5's relative bias spread over queries and keys, so that its gradient is made of dense sums and products.

The gradient of a lookup is a scatter: an addition for each score, most of them to the same few numbers. On a GPU these
wait for each other, and where results must be the same in each run they are sorted before. So it is a product there.

Shapes: H heads, L length, G rows of queries, Q queries, C keys, K buckets.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.model.stock import picture

Array = jax.Array
ELEMENTS = 2**24  # of the products' one-hot factor, at the most at once: 64 MiB


def along_diagonals(values: Array, length: int) -> Array:
    """[H, L, L] from values [H, 2 L - 1] of key - query = 1 - L to L - 1, the bias of neighbours in a sequence.

    Rows that are one longer than those of the result shift by one each. There is nothing to look up, and what a
    gradient does with it is to sum over diagonals.
    """
    heads, longer = values.shape[0], 2 * length
    rows = jnp.broadcast_to(jnp.pad(values, ((0, 0), (0, 1)))[:, None], (heads, length, longer))
    shifted = rows.reshape(heads, -1)[:, : length * (longer - 1)].reshape(heads, length, longer - 1)
    return shifted[:, :, length - 1 :]


@jax.custom_vjp
def by_bucket(table: Array, bucket: Array) -> Array:
    """[G, H, Q, C], the rows of table [K, H] that bucket i32 [G, Q, C] names."""
    return jnp.moveaxis(table[bucket], -1, 1)


def _forward(table: Array, bucket: Array) -> tuple[Array, tuple[Array, Array]]:
    return by_bucket(table, bucket), (table, bucket)


def _backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, np.ndarray]:
    table, bucket = kept
    found = jax.lax.platform_dependent(table, bucket, gradient, cpu=_scatter, default=_multiply)
    return found, np.zeros(bucket.shape, jax.dtypes.float0)


def _scatter(table: Array, bucket: Array, gradient: Array) -> Array:
    """As JAX differentiates a lookup: on a CPU, where additions come one after the other anyway, it is the fastest."""
    return jnp.zeros_like(table).at[bucket].add(jnp.moveaxis(gradient, 1, -1))


def _multiply(table: Array, bucket: Array, gradient: Array) -> Array:
    (groups, queries, keys), count = bucket.shape, table.shape[0]
    least = -(-groups * queries * keys * count // ELEMENTS)
    parts = next(n for n in range(1, queries + 1) if queries % n == 0 and n >= min(least, queries))
    size = queries // parts

    def products(number: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(bucket, number * size, size, axis=1)
        own_gradient = jax.lax.dynamic_slice_in_dim(gradient, number * size, size, axis=2)
        chosen = (own[:, None] == jnp.arange(count)[:, None, None]).astype(gradient.dtype)
        # Rows of queries stay apart until the end: they may lie on several devices.
        return jnp.einsum("gkqc,ghqc->gkh", chosen, own_gradient, precision=jax.lax.Precision.HIGHEST)

    return jax.lax.map(products, jnp.arange(parts)).sum((0, 1)).astype(table.dtype)


by_bucket.defvjp(_forward, _backward)


STOCK = picture(globals())  # see `t5.is_packed`
