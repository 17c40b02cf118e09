"""The embedding lookup and its gradient equal explicit sums."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pipejax.config import Config, DataConfig, MeshConfig, T5Config, TrainConfig
from pipejax.methods import losses
from pipejax.model import embedding
from pipejax.model.embedding import look_up, sum_by_token
from pipejax.training.memory import longest_batch
from pipejax.training.step import Trainer

TINY = T5Config(40, d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=1, num_decoder_layers=1)


def by_hand(tokens: np.ndarray, gradient: np.ndarray, vocabulary: int) -> np.ndarray:
    total = np.zeros((vocabulary, gradient.shape[-1]))
    for token, row in zip(tokens.ravel(), gradient.reshape(-1, gradient.shape[-1]), strict=True):
        total[token] += row
    return total


def drawn(kind: str, shape: tuple[int, ...], vocabulary: int) -> np.ndarray:
    random = np.random.default_rng(0)
    if kind == "all the last":
        return np.full(shape, vocabulary - 1, np.int32)
    if kind == "few words often":
        return (np.minimum(random.zipf(1.3, shape), vocabulary) - 1).astype(np.int32)
    return random.integers(0, vocabulary, shape).astype(np.int32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("kind", "shape", "vocabulary"),
    [
        ("any", (1, 1), 5),
        ("any", (1, 128), 300),
        ("any", (2, 129), 50),
        ("any", (3, 700), 3),
        ("few words often", (2, 1000), 500),
        ("all the last", (1, 400), 7),
    ],
)
def test_sums_by_token(kind, shape, vocabulary, dtype):
    """Tokens fill no block, one, several or whole blocks, or do not occur."""
    tokens = drawn(kind, shape, vocabulary)
    gradient = jnp.asarray(np.random.default_rng(1).normal(size=(*shape, 6)), dtype)
    found = sum_by_token(jnp.asarray(tokens), gradient, vocabulary=vocabulary)
    expected = by_hand(tokens, np.asarray(gradient, np.float64), vocabulary)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("where", ["cpu", "elsewhere"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_of_two_lookups_equals_the_sum(dtype, where, monkeypatch):
    if where == "elsewhere":
        monkeypatch.setattr(embedding, "_scatter", sum_by_token)
    random = np.random.default_rng(0)
    table = jnp.asarray(random.normal(size=(20, 4)), jnp.float32)
    tokens = tuple(jnp.asarray(random.integers(0, 20, shape), jnp.int32) for shape in ((4, 30), (2, 11)))
    directions = tuple(jnp.asarray(random.normal(size=(*each.shape, 4)), dtype) for each in tokens)
    found, pull = jax.vjp(lambda table: look_up(table, tokens, dtype, 2), table)
    for x, each in zip(found, tokens, strict=True):
        assert x.dtype == dtype
        np.testing.assert_array_equal(x, np.asarray(table)[np.asarray(each)].astype(dtype))
    pairs = zip(tokens, directions, strict=True)
    expected = sum(by_hand(np.asarray(t), np.asarray(d, np.float64), 20) for t, d in pairs)
    np.testing.assert_allclose(pull(directions)[0], expected, rtol=1e-5, atol=1e-5)


def test_each_device_sums_its_own_examples():
    """Batches do not move: devices exchange only one sum as large as the table."""
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    apart = NamedSharding(mesh, PartitionSpec("data"))
    random = np.random.default_rng(0)
    tokens = jax.device_put(random.integers(0, 30, (4, 300)).astype(np.int32), apart)
    gradient = jax.device_put(random.normal(size=(4, 300, 8)).astype(np.float32), apart)
    compiled = jax.jit(lambda t, g: sum_by_token(t, g, vocabulary=30)).lower(tokens, gradient).compile()
    crossing = re.findall(r"= (\S+) (all-\w+|collective-\w+|reduce-scatter)\(", compiled.as_text())
    assert [(shape.split("{")[0], kind) for shape, kind in crossing] == [("f32[30,8]", "all-reduce")]
    expected = by_hand(np.asarray(tokens), np.asarray(gradient, np.float64), 30)
    np.testing.assert_allclose(compiled(tokens, gradient), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"dtype": "bfloat16", "accumulate": 2, "remat": "layers"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "remat": "dots"}, marks=pytest.mark.slow),
    ],
)
def test_a_training_step_for_a_gpu_scatters_nothing(settings, monkeypatch):
    """The order of a scatter on a GPU varies, so two runs would differ."""
    monkeypatch.setattr(losses, "LOGITS", 200)  # makes the loss compute in parts
    data, train = DataConfig(max_source=48, max_target=24), TrainConfig(batch_size=4, **settings)
    whole = Config(model=TINY, data=data, train=train, mesh=MeshConfig(data=1))
    traced = Trainer(whole, jax.devices()[:1]).trace(longest_batch(whole))
    assert "scatter" in traced.lower().as_text()  # the form that is used if additions are sequential
    assert "scatter" not in traced.lower(lowering_platforms=("cuda",)).as_text()
