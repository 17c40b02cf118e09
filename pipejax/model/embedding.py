"""The lookup of tokens in the embedding table, with a gradient that is fast and deterministic on accelerators.

JAX differentiates a lookup into a scatter. On a GPU the order of the additions to a row depends on the timing of
threads, so two runs differ; in deterministic mode the additions to a row wait for each other. Here the tokens are
sorted instead, so that equal tokens are adjacent, and their gradients are summed by dense products of blocks.

Shapes: N tokens, V vocabulary, D width, S shards, n blocks of K tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax.model.snapshot import snapshot

Array = jax.Array
Tokens = tuple[Array, ...]
BLOCK = 128  # K, the number of tokens whose gradients one product sums


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look_up(table: Array, tokens: Tokens, dtype: DTypeLike, shards: int) -> tuple[Array, ...]:
    """Looks tokens up in an embedding table.

    The gradient of the table is summed in float32 for every `dtype`: in bfloat16 a sum of ones stops growing at 256,
    and a batch contains common words more often. There is one sum over all arrays of tokens, since each sum has the
    size of the table.

    Args:
      table: [V, D].
      tokens: several arrays i32 [B, L].
      dtype: the dtype of the results.
      shards: S, the number of devices over which the batch is split; each sorts its own tokens.

    Returns:
      For each array of tokens, the rows of the table, [B, L, D].
    """
    return tuple(jnp.take(table, each, axis=0).astype(dtype) for each in tokens)


def _forward(
    table: Array, tokens: Tokens, dtype: DTypeLike, shards: int
) -> tuple[tuple[Array, ...], tuple[Array, Tokens]]:
    return look_up(table, tokens, dtype, shards), (table, tokens)


def _backward(
    dtype: DTypeLike, shards: int, kept: tuple[Array, Tokens], gradients: tuple[Array, ...]
) -> tuple[Array, tuple[np.ndarray, ...]]:
    """Returns the gradient of the table, summed over all arrays of tokens, and no gradients (float0) of the tokens."""
    table, tokens = kept
    found = jax.lax.platform_dependent(
        jnp.concatenate([each.reshape(shards, -1) for each in tokens], axis=1),
        jnp.concatenate([each.reshape(shards, -1, table.shape[1]) for each in gradients], axis=1),
        cpu=partial(_scatter, vocabulary=table.shape[0]),  # a CPU does the additions one by one in a fixed order
        default=partial(sum_by_token, vocabulary=table.shape[0]),
    )
    return found.astype(table.dtype), tuple(np.zeros(each.shape, jax.dtypes.float0) for each in tokens)


def _scatter(tokens: Array, gradient: Array, *, vocabulary: int) -> Array:
    """Returns f32 [V, D], the sums of the gradients of equal tokens, as a scatter; arguments as of `sum_by_token`."""
    zero = jnp.zeros((vocabulary, gradient.shape[-1]), jnp.float32)
    return zero.at[tokens].add(gradient.astype(jnp.float32))


def sum_by_token(tokens: Array, gradient: Array, *, vocabulary: int) -> Array:
    """Returns f32 [V, D], the sums of the gradients [S, N, D] of equal tokens i32 [S, N]; rows of absent tokens are 0.

    The tokens of each shard are sorted, so that equal ones are adjacent, and divided into blocks of K. The product of a
    block's equality matrix [K, K] with its gradients gives each place the sum of its token over the block (`within`).
    For a token that began in an earlier block, `before` adds its sums at the ends of all earlier blocks that end with
    this token. So the last place of each token has its complete sum, from which the result is gathered.
    """
    shards, count, width = gradient.shape
    blocks = -(-count // BLOCK)
    # The last block is padded with an id beyond the vocabulary.
    ids = jnp.pad(tokens, ((0, 0), (0, blocks * BLOCK - count)), constant_values=vocabulary)
    order = jnp.argsort(ids, axis=1)
    ids = jnp.take_along_axis(ids, order, axis=1)
    apart = ids.reshape(shards, blocks, BLOCK)
    values = jnp.take_along_axis(gradient, order[..., None], axis=1, mode="clip")
    values = values.reshape(shards, blocks, BLOCK, width)

    product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    equal = (apart[..., :, None] == apart[..., None, :]).astype(values.dtype)
    within = product("snkj,snjd->snkd", equal, values)
    earlier = jnp.tri(blocks, k=-1, dtype=bool) & (apart[:, :, :1] == apart[:, None, :, -1])
    before = product("snm,smd->snd", earlier.astype(jnp.float32), within[:, :, -1])

    names = jnp.arange(vocabulary)
    ends = jax.vmap(lambda ids: jnp.searchsorted(ids, names, side="right", method="scan_unrolled"))(ids)
    last = jnp.maximum(ends - 1, 0)[..., None]  # [S, V, 1]
    there = jnp.take_along_axis(ids[..., None], last, axis=1) == names[:, None]
    began = jnp.take_along_axis(apart[:, :, :1], last // BLOCK, axis=1) == names[:, None]
    sums = jnp.take_along_axis(within.reshape(shards, -1, width), last, axis=1)
    sums += jnp.where(began, jnp.take_along_axis(before, last // BLOCK, axis=1), 0.0)
    return jnp.where(there, sums, 0.0).sum(0)


look_up.defvjp(_forward, _backward)


SNAPSHOT = snapshot(globals())  # see `t5.is_packed`
