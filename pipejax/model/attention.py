"""Attention with an additive bias, and a hand-written gradient.

Shapes: B batch, H heads, Q queries, C keys, K head width.

Most of the time is spent on passes over arrays [B, H, Q, C]. To save passes, the softmax is normalised after the
product with the values: its row sums divide the outputs [B, H, Q, K] instead of the weights. The sum over keys in the
gradient of the softmax is computed from outputs and output gradients, too (Dao et al. 2022, arXiv 2205.14135, appendix
B.2). Only one array [B, H, Q, C], the unnormalised weights, is kept for the backward pass.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pipejax.model import dropout
from pipejax.model.dropout import Lines
from pipejax.model.snapshot import snapshot

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
    """Computes softmax(queries keys^T + bias) values, [B, H, Q, K]. As in T5, scores are not divided by sqrt(K).

    Scores and softmax are float32; the weights are rounded to the dtype of the values before the second product.

    Args:
      queries: [B, H, Q, K].
      keys: [B, H, C, K].
      values: [B, H, C, K].
      bias: f32 [B|1, H|1, Q|1, C], added to the scores; masked keys have a large negative bias.
      seed: u32 [2], the seed of dropout on the weights; None: no dropout.
      rate: the probability that a weight is dropped.
      over_sources: whether the keys are tokens of sources; dropout then numbers the keys within each source.
    """
    lines = None
    if seed is not None:
        batch, heads, count, _ = queries.shape
        lines = dropout.of_heads(dropout.lines(seed, (batch, count), over_sources=over_sources), heads)
    return _attend(queries, keys, values, bias, lines, rate)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(queries: Array, keys: Array, values: Array, bias: Array, lines: Lines | None, rate: float) -> Array:
    """Computes `attend` with given lines [B, H, Q] of dropout, or None for no dropout."""
    return _forward(queries, keys, values, bias, lines, rate)[0]


def _left(weights: Array, lines: Lines | None, rate: float) -> Array:
    """Returns the weights after dropout, without rescaling: `sums` contains the probability that a weight is kept."""
    return weights if lines is None else dropout.zero_dropped(weights, lines, rate)


Kept = tuple[Array, Array, Array, Array, Lines | None, Array, Array, Array]  # the residuals of the backward pass


def _share_left(lines: Lines | None, rate: float) -> float:
    """Returns the probability that a weight is kept."""
    return 1.0 if lines is None else dropout.share_kept(rate)


def _forward(
    queries: Array, keys: Array, values: Array, bias: Array, lines: Lines | None, rate: float
) -> tuple[Array, Kept]:
    """Returns the outputs [B, H, Q, K], and the residuals for `_backward`.

    `weights` are the powers e^(score - maximum) [B, H, Q, C]; `sums`, f32 [B, H, Q, 1], are their row sums times the
    probability that a weight is kept.
    """
    scores = jnp.einsum("bhqk,bhck->bhqc", queries, keys, preferred_element_type=jnp.float32) + bias
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    sums = weights.sum(axis=-1, keepdims=True) * _share_left(lines, rate)
    weights = weights.astype(values.dtype)
    found = jnp.einsum("bhqc,bhck->bhqk", _left(weights, lines, rate), values, preferred_element_type=jnp.float32)
    found = (found / sums).astype(values.dtype)
    return found, (queries, keys, values, bias, lines, weights, sums, found)


def _backward(rate: float, kept: Kept, gradient: Array) -> tuple[Array | None, ...]:
    """Returns the gradients of queries, keys, values and bias, from the `gradient` of the outputs, [B, H, Q, K].

    For the softmax p of a row and the gradient g of its weights, the gradient of the scores is p (g - sum(p g)). The
    sum over keys equals the sum over channels of the row's output times the output's gradient (`rows`).
    """
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


SNAPSHOT = snapshot(globals())  # see `t5.is_packed`
