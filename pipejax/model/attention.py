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
from pipejax.model.dropout import Lines
from pipejax.model.stock import picture

Array = jax.Array


def attend(
    queries: Array,
    keys: Array,
    values: Array,
    bias: Array,
    seed: Array | None,
    rate: float,
    *,
    over_sources: bool = False,
) -> Array:
    """softmax(queries keys^T + bias) values, [B, H, Q, K]; of keys and values C, of bias f32 [B|1, H|1, Q|1, C].

    The softmax is float32; queries are not divided by sqrt(K): T5's are not. `seed`: u32 [2], of dropout; None:
    without. `over_sources`: whether the keys are of sources, which dropout counts for each source.
    """
    lines = None
    if seed is not None:
        batch, heads, count, _ = queries.shape
        lines = dropout.of_heads(dropout.lines(seed, (batch, count), over_sources=over_sources), heads)
    return _attend(queries, keys, values, bias, lines, rate)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(queries: Array, keys: Array, values: Array, bias: Array, lines: Lines | None, rate: float) -> Array:
    return _forward(queries, keys, values, bias, lines, rate)[0]


def _left(weights: Array, lines: Lines | None, rate: float) -> Array:
    """The weights after dropout, not rescaled: the division by the kept share is applied to the float32 sums."""
    return weights if lines is None else dropout.left(weights, lines, rate)


Kept = tuple[Array, Array, Array, Array, Lines | None, Array, Array, Array]  # for the backward pass


def _share_left(lines: Lines | None, rate: float) -> float:
    return 1.0 if lines is None else dropout.share_kept(rate)


def _forward(
    queries: Array, keys: Array, values: Array, bias: Array, lines: Lines | None, rate: float
) -> tuple[Array, Kept]:
    scores = jnp.einsum("bhqk,bhck->bhqc", queries, keys, preferred_element_type=jnp.float32) + bias
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    sums = weights.sum(axis=-1, keepdims=True) * _share_left(lines, rate)
    weights = weights.astype(values.dtype)
    found = jnp.einsum("bhqc,bhck->bhqk", _left(weights, lines, rate), values, preferred_element_type=jnp.float32)
    found = (found / sums).astype(values.dtype)
    return found, (queries, keys, values, bias, lines, weights, sums, found)


def _backward(rate: float, kept: Kept, gradient: Array) -> tuple[Array | None, ...]:
    queries, keys, values, bias, lines, weights, sums, found = kept
    gradient = gradient / sums
    rows = (gradient * found).sum(axis=-1, keepdims=True) * _share_left(lines, rate)
    gradient = gradient.astype(values.dtype)
    d_values = jnp.einsum("bhqc,bhqk->bhck", _left(weights, lines, rate), gradient)
    d_weights = jnp.einsum("bhqk,bhck->bhqc", gradient, values, preferred_element_type=jnp.float32)
    d_scores = weights * (_left(d_weights, lines, rate) - rows)
    alike = tuple(axis for axis, size in enumerate(bias.shape) if size == 1 and d_scores.shape[axis] != 1)
    d_bias = d_scores.sum(axis=alike, keepdims=True)
    d_scores = d_scores.astype(values.dtype)
    d_queries = jnp.einsum("bhqc,bhck->bhqk", d_scores, keys)
    d_keys = jnp.einsum("bhqc,bhqk->bhck", d_scores, queries)
    return d_queries, d_keys, d_values, d_bias, None


_attend.defvjp(_forward, _backward)


STOCK = picture(globals())  # see `t5.is_packed`
