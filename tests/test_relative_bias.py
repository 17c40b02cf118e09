"""The relative bias and its gradient equal lookups that JAX differentiates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.config import T5Config
from pipejax.model import relative_bias
from pipejax.model.layers import RelativeBias, logits_of
from pipejax.model.relative_bias import along_diagonals, by_bucket


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_values_along_diagonals_and_their_gradient(length):
    values, direction = normal(0, 3, 2 * length - 1), normal(1, 3, length, length)

    def looked_up(values):
        places = jnp.arange(length)
        return values[:, places[None] - places[:, None] + length - 1]

    found, pull = jax.vjp(lambda x: along_diagonals(x, length), values)
    expected, wanted = jax.vjp(looked_up, values)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(pull(direction)[0], wanted(direction)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("elements", [2**24, 40])
def test_by_bucket_equals_indexing_the_table(elements, monkeypatch):
    """The gradient is computed in one product and in several."""
    monkeypatch.setattr(relative_bias, "ELEMENTS", elements)
    table, bucket = normal(0, 5, 3), np.random.default_rng(1).integers(0, 5, (2, 6, 4)).astype(np.int32)
    direction = normal(2, 2, 3, 6, 4)
    found, pull = jax.vjp(lambda table: by_bucket(table, jnp.asarray(bucket)), table)
    expected, wanted = jax.vjp(lambda table: table[bucket].transpose(0, 3, 1, 2), table)
    np.testing.assert_array_equal(found, expected)
    elsewhere = relative_bias._multiply(table, jnp.asarray(bucket), direction)  # for other devices than a CPU
    for gradient in (pull(direction)[0], elsewhere):
        np.testing.assert_allclose(gradient, wanted(direction)[0], rtol=1e-5, atol=1e-6)


def test_bias_of_a_sequence_follows_its_offsets():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 3, "num_layers": 1, "num_decoder_layers": 1}
    model = T5Config(8, **sizes, relative_attention_num_buckets=8, relative_attention_max_distance=20)
    bias = RelativeBias(model, bidirectional=True)
    places = jnp.arange(45)[None]
    params = bias.init(jax.random.key(0), places, places)
    np.testing.assert_array_equal(bias.apply(params, 45, method="within"), bias.apply(params, places, places))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_and_their_gradient(dtype):
    hidden, rows, direction = normal(0, 2, 3, 16).astype(dtype), normal(1, 40, 16), normal(2, 2, 3, 40)
    found, pull = jax.vjp(lambda *given: logits_of(*given, dtype), hidden, rows)
    expected, wanted = jax.vjp(lambda hidden, rows: hidden.astype(jnp.float32) @ rows.T, hidden, rows)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == jnp.float32 else {"rtol": 0.02, "atol": 0.1}
    np.testing.assert_allclose(found, expected, **near)
    for own, other, given in zip(pull(direction), wanted(direction), (hidden, rows), strict=True):
        assert own.dtype == given.dtype
        np.testing.assert_allclose(own.astype(jnp.float32), other.astype(jnp.float32), **near)
