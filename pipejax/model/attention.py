"""Attention under an additive bias, with its gradient by hand.

Shapes: B batch, H heads, Q queries, C keys, K head width.

What costs is each pass over an array [B, H, Q, C]. So the sums of softmax's rows divide the results [B, H, Q, K]
instead of the weights, and its gradient sums over those, too (Dao et al. 2022, arXiv 2205.14135, appendix B.2). One
such array is kept for the backward pass.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pipejax.model import dropout
from pipejax.model.stock import picture

Array = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def attend(queries: Array, keys: Array, values: Array, bias: Array, seed: Array | None, rate: float) -> Array:
    """softmax(queries keys^T + bias) values, [B, H, Q, K]; of keys and values C, of bias f32 [B|1, H|1, Q|1, C].

    The softmax is float32; queries are not divided by sqrt(K): T5's are not. `seed`: u32 [2], of dropout.
    """
    return _forward(queries, keys, values, bias, seed, rate)[0]


def _left(weights: Array, seed: Array | None, rate: float) -> Array:
    """The weights that dropout leaves; the division by 1 - rate is for the float32 sums."""
    return weights if seed is None else dropout.left(weights, seed, rate)


Kept = tuple[Array, Array, Array, Array, Array | None, Array, Array, Array]  # for the backward pass


def _share_left(seed: Array | None, rate: float) -> float:
    return 1.0 if seed is None else 1 - rate


def _forward(
    queries: Array, keys: Array, values: Array, bias: Array, seed: Array | None, rate: float
) -> tuple[Array, Kept]:
    scores = jnp.einsum("bhqk,bhck->bhqc", queries, keys, preferred_element_type=jnp.float32) + bias
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    sums = weights.sum(axis=-1, keepdims=True) * _share_left(seed, rate)
    weights = weights.astype(values.dtype)
    found = jnp.einsum("bhqc,bhck->bhqk", _left(weights, seed, rate), values, preferred_element_type=jnp.float32)
    found = (found / sums).astype(values.dtype)
    return found, (queries, keys, values, bias, seed, weights, sums, found)


def _backward(rate: float, kept: Kept, gradient: Array) -> tuple[Array | None, ...]:
    queries, keys, values, bias, seed, weights, sums, found = kept
    gradient = gradient / sums
    rows = (gradient * found).sum(axis=-1, keepdims=True) * _share_left(seed, rate)
    gradient = gradient.astype(values.dtype)
    d_values = jnp.einsum("bhqc,bhqk->bhck", _left(weights, seed, rate), gradient)
    d_weights = jnp.einsum("bhqk,bhck->bhqc", gradient, values, preferred_element_type=jnp.float32)
    d_scores = weights * (_left(d_weights, seed, rate) - rows)
    alike = tuple(axis for axis, size in enumerate(bias.shape) if size == 1 and d_scores.shape[axis] != 1)
    d_bias = d_scores.sum(axis=alike, keepdims=True)
    d_scores = d_scores.astype(values.dtype)
    d_queries = jnp.einsum("bhqc,bhck->bhqk", d_scores, keys)
    d_keys = jnp.einsum("bhqc,bhqk->bhck", d_scores, queries)
    return d_queries, d_keys, d_values, d_bias, None


attend.defvjp(_forward, _backward)


STOCK = picture(globals())  # see `t5.is_stock`
