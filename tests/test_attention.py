"""Attention and its handwritten gradient, compared with softmax as JAX differentiates it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.model import dropout
from pipejax.model.attention import attend

B, H, Q, C, K = 2, 3, 5, 7, 4


def plain(queries, keys, values, bias, seed, rate):
    scores = jnp.einsum("bhqk,bhck->bhqc", queries, keys) + bias
    weights = jax.nn.softmax(scores, axis=-1)
    if seed is not None:
        lines = dropout.of_heads(dropout.lines(seed, (weights.shape[0], weights.shape[2])), weights.shape[1])
        weights = jnp.where(dropout.mask_of(lines, weights.shape[3], rate), weights / dropout.share_kept(rate), 0)
    return jnp.einsum("bhqc,bhck->bhqk", weights, values)


def draw(shape, seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(B, H, Q, C), (1, H, Q, C), (B, 1, Q, C), (B, 1, 1, C), (1, 1, 1, C)], ids=str)
def test_value_and_gradient_equal_softmax(shape, rate):
    queries, keys, values = draw((B, H, Q, K), 0), draw((B, H, C, K), 1), draw((B, H, C, K), 2)
    bias = draw(shape, 3).at[..., 2].set(-1e9)
    seed = dropout.make_seed(jax.random.key(0)) if rate else None
    direction = draw((B, H, Q, K), 4)

    def derived(function):
        def value(*arrays):
            return (function(*arrays, seed, rate) * direction).sum()

        return function(queries, keys, values, bias, seed, rate), jax.grad(value, (0, 1, 2, 3))(
            queries, keys, values, bias
        )

    with jax.default_matmul_precision("highest"):
        (found, gradients), (expected, wanted) = derived(attend), derived(plain)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    for own, other in zip(gradients, wanted, strict=True):
        assert own.shape == other.shape and np.abs(other).max() > 0.1
        np.testing.assert_allclose(own, other, atol=1e-5)  # difference from float64: ours 4e-6, JAX's 1e-6
    assert not gradients[1][:, :, 2].any() and not gradients[3][..., 2].any()  # masked tokens get no gradient


@pytest.mark.slow
def test_gradients_of_a_query_cancel_in_bfloat16():
    """Softmax does not change if the same number is added to all scores of a query; bfloat16 does not represent 0.9."""
    shapes = [(4, 8, n, 32) for n in (64, 48, 48)]
    arrays = [draw(shape, seed).astype(jnp.bfloat16) for seed, shape in enumerate(shapes)]
    bias, seed = jnp.zeros((4, 8, 64, 48)), dropout.make_seed(jax.random.key(0))
    direction = draw(shapes[0], 3)
    gradient = jax.grad(lambda bias: (attend(*arrays, bias, seed, 0.1) * direction).sum())(bias)
    rows = (attend(*arrays, bias, seed, 0.1) * direction).sum(-1)
    assert abs(float((gradient.sum(-1) * jnp.sign(rows)).sum() / jnp.abs(rows).sum())) < 4e-4


def test_query_without_visible_keys_attends_uniformly():
    queries, keys, values = draw((B, H, Q, K), 0), draw((B, H, C, K), 1), draw((B, H, C, K), 2)
    found = attend(queries, keys, values, jnp.full((1, 1, 1, C), -1e9), None, 0.0)
    np.testing.assert_allclose(found, jnp.broadcast_to(values.mean(2, keepdims=True), found.shape), atol=1e-6)


def test_large_scores_stay_finite():
    queries, keys, values = 100 * draw((B, H, Q, K), 0), 100 * draw((B, H, C, K), 1), draw((B, H, C, K), 2)
    gradient = jax.grad(lambda q: attend(q, keys, values, jnp.zeros((1, 1, 1, C)), None, 0.0).sum())(queries)
    assert np.isfinite(gradient).all()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_bfloat16_keeps_its_dtype_and_stays_close(rate):
    arrays = [draw((B, H, n, K), seed).astype(jnp.bfloat16) for seed, n in enumerate((Q, C, C))]
    bias, seed = draw((1, H, Q, C), 3), dropout.make_seed(jax.random.key(0)) if rate else None

    def value(function, arrays):
        return (function(*arrays, bias, seed, rate).astype(jnp.float32) ** 2).sum()

    own = jax.grad(lambda arrays: value(attend, arrays))(arrays)
    assert attend(*arrays, bias, seed, rate).dtype == jnp.bfloat16 and all(x.dtype == jnp.bfloat16 for x in own)
    exact = jax.grad(lambda arrays: value(plain, arrays))([x.astype(jnp.float32) for x in arrays])
    for one, other in zip(own, exact, strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other, atol=0.03 * float(jnp.abs(other).max()))
