"""The lookup of tokens in the embedding table, with a gradient that no accelerator adds up in an order of its own.

JAX makes a scatter of a lookup's gradient. On a GPU that adds to the same row in whatever order its threads arrive, so
that two runs differ, or, where results must be the same, one addition waits for the other. Sorted tokens bring equal
ones together, and what is left are dense products of blocks.

Shapes: N tokens, V vocabulary, D width, S shards, n blocks of K tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax.model.stock import picture

Array = jax.Array
Tokens = tuple[Array, ...]
BLOCK = 128  # tokens that one product adds up


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look_up(table: Array, tokens: Tokens, dtype: DTypeLike, shards: int) -> tuple[Array, ...]:
    """For each array of tokens i32 [B, L] the rows of table [V, D] that they name, [B, L, D] in `dtype`.

    The gradient is summed in float32, whatever `dtype` is: a sum of ones in bfloat16 stays at 256, and a batch holds
    the same word more often than that. Of several arrays it is one sum: it is as large as the table.
    """
    return tuple(jnp.take(table, each, axis=0).astype(dtype) for each in tokens)


def _forward(
    table: Array, tokens: Tokens, dtype: DTypeLike, shards: int
) -> tuple[tuple[Array, ...], tuple[Array, Tokens]]:
    return look_up(table, tokens, dtype, shards), (table, tokens)


def _backward(
    dtype: DTypeLike, shards: int, kept: tuple[Array, Tokens], gradients: tuple[Array, ...]
) -> tuple[Array, tuple[np.ndarray, ...]]:
    table, tokens = kept
    found = jax.lax.platform_dependent(
        jnp.concatenate([each.reshape(shards, -1) for each in tokens], axis=1),
        jnp.concatenate([each.reshape(shards, -1, table.shape[1]) for each in gradients], axis=1),
        cpu=partial(_scatter, vocabulary=table.shape[0]),  # additions come one after the other there
        default=partial(sum_by_token, vocabulary=table.shape[0]),
    )
    return found.astype(table.dtype), tuple(np.zeros(each.shape, jax.dtypes.float0) for each in tokens)


def _scatter(tokens: Array, gradient: Array, *, vocabulary: int) -> Array:
    zero = jnp.zeros((vocabulary, gradient.shape[-1]), jnp.float32)
    return zero.at[tokens].add(gradient.astype(jnp.float32))


def sum_by_token(tokens: Array, gradient: Array, *, vocabulary: int) -> Array:
    """f32 [V, D], the sum of gradient [S, N, D] over the places of each token of tokens i32 [S, N].

    Equal tokens lie side by side when sorted. A product with what is equal within a block of K of them gives each
    place the sum of its token in the block. Of a token that began in an earlier block, the sums at the ends of that
    block and of all up to this one are added. So a token's whole sum stands at the last of its places.
    """
    shards, count, width = gradient.shape
    blocks = -(-count // BLOCK)
    # What fills the last block up is no token.
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


STOCK = picture(globals())  # see `t5.is_packed`
