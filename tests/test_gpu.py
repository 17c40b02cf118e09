"""The kernels for GPUs: products and attention equal NumPy's, decodes equal XLA's.

Without a GPU they run as ordinary computations. `python -m lab.benchmarks.suite` runs this module on a GPU.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.decoding import Beam, Pipelined, Sequential, Sizes
from pipejax.inference.backends import XLA, fastest
from pipejax.inference.step_decoder import StepDecoder
from pipejax.inference.weights import Matrix
from pipejax.kernels import gpu
from pipejax.kernels.backends import Gpu
from pipejax.kernels.gpu import GpuDecoder
from pipejax.model.t5 import MASKED, Memory
from support import oracle
from support.one_program import compiled
from support.tiny import IN_BLOCKS

INTERPRET = jax.default_backend() != "gpu"


def close(found: Any, expected: Any, rtol: float, atol: float) -> None:
    """Asserts closeness to NumPy; on a GPU, whose float32 products have 10 bits (TF32), within these bits."""
    if not INTERPRET:
        rtol, atol = 5e-3, 5e-3 * float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=atol)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def decoder(heads: int, width: int, batch: int, memory: Memory | None = None, kind: Any = GpuDecoder) -> Any:
    """A decoder without weights, in float32; only the batch of the memory's sizes matters here."""
    config = dataclasses.replace(IN_BLOCKS, num_heads=heads, d_kv=width, layer_norm_epsilon=1e-3)
    memory = memory or Memory((), (), jnp.ones((batch, 1), bool))
    more = {"interpret": INTERPRET} if kind is GpuDecoder else {}
    return kind(config, None, memory, jnp.dtype(jnp.float32), **more)


@pytest.mark.parametrize(
    "outputs, inputs, queries",
    [
        *((16, 16, 2), (48, 768, 16), (8208, 32, 2)),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((48, 80, 5), (48, 80, 70))),
    ],
)
def test_products_equal_numpys(outputs: int, inputs: int, queries: int) -> None:
    rows, x, residual = normal(1, outputs, inputs), 9 * normal(2, inputs, queries), normal(3, outputs, queries)
    scale = np.abs(normal(4, inputs)) + 0.1
    matrix, own = Matrix(jnp.asarray(rows), jnp.zeros(0)), decoder(2, 16, 1)
    assert own._multiplies(matrix, x)
    wide = x.astype(np.float64)
    close(own._add(matrix, jnp.asarray(x), jnp.asarray(residual)), residual + rows @ wide, rtol=1e-5, atol=1e-3)
    normed = wide / np.sqrt((wide**2).mean(axis=0) + 1e-3) * scale[:, None]
    close(own._of_normed(matrix, jnp.asarray(x), jnp.asarray(scale), 0.5), rows @ normed / 2, rtol=1e-4, atol=1e-4)
    layer: Any = SimpleNamespace(feed_inwards=matrix, feed_norm=jnp.asarray(scale))
    close(own._activate(jnp.asarray(x), layer), np.maximum(rows @ normed, 0), rtol=1e-4, atol=1e-4)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(
    "queries, spread", [(1, 1.0), (5, 30.0), pytest.param(20, 3.0, marks=pytest.mark.slow), (33, 1.0)]
)
def test_attention_to_a_memory_equals_numpys(queries: int, spread: float) -> None:
    """Some slots are masked, and all slots of one example are."""
    batch, heads, width, length = 3, 2, 32, 192
    query, keys = spread * normal(1, heads * width, batch * queries), normal(2, batch, heads, width, length)
    values, mask = normal(3, batch, heads, length, width), np.arange(length) < np.asarray([[70], [192], [0]])
    memory = Memory((jnp.asarray(keys),), (jnp.asarray(values),), jnp.asarray(mask))
    found = decoder(heads, width, batch, memory)._attend_memory(0, jnp.asarray(query))
    by_head = query.astype(np.float64).reshape(heads, width, batch, queries)
    scores = np.einsum("hkbq,bhkl->bhql", by_head, keys) + np.where(mask, 0, -1e9)[:, None, None]
    expected = np.einsum("bhql,bhlk->hkbq", softmax(scores), values).reshape(query.shape)
    real = np.s_[:, : 2 * queries]  # the third result is not used
    close(found[real], expected[real], rtol=1e-3, atol=1e-4)
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    "queries, start",
    [
        *((1, [130, 2]), (6, [63]), (33, [100])),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, [0]), (6, [0]), (20, [0, 64]))),
    ],
)
def test_attention_to_a_cache_equals_numpys(queries: int, start: list[int]) -> None:
    """Empty slots have arbitrary numbers; the new keys and values are written there, and nothing else changes."""
    batch, heads, width, slots = 2, 3, 16, 140
    projected = normal(1, 3 * heads * width, batch * queries)
    keys, values = normal(4, batch, heads, width, slots), normal(5, batch, heads, slots, width)
    seen = np.random.default_rng(6).random((batch, queries, slots)) < 0.6
    query, key, value = projected.reshape(3, heads, width, batch, queries)
    for b, first in enumerate(np.broadcast_to(start, batch)):
        keys[b, ..., first:], values[b, :, first:] = 1e4 * keys[b, ..., first:], 1e4 * values[b, :, first:]
        seen[b, :, first + queries :] = False
        seen[b, np.arange(queries), first + np.arange(queries)] = True  # itself
    before = [x.reshape(batch * heads, *x.shape[2:]).copy() for x in (keys, values)]
    for b, first in enumerate(np.broadcast_to(start, batch)):
        keys[b, ..., first : first + queries] = key[:, :, b]
        values[b, :, first : first + queries] = value[:, :, b].swapaxes(1, 2)
    bias = np.where(seen[:, None], normal(7, batch, heads, queries, slots), MASKED).astype(np.float32)
    given = *(jnp.asarray(x) for x in (projected, *before, bias)), jnp.asarray(start)
    found, new_keys, new_values = decoder(heads, width, batch)._attend_cache(*given)
    np.testing.assert_array_equal(new_keys.reshape(keys.shape), keys)
    np.testing.assert_array_equal(new_values.reshape(values.shape), values)
    scores = np.einsum("hkbq,bhkc->bhqc", query, keys.astype(np.float64)) + bias
    expected = np.einsum("bhqc,bhck->hkbq", softmax(scores), values).reshape(found.shape)
    close(found, expected, rtol=1e-3, atol=1e-4)
    others = decoder(heads, width, batch, kind=StepDecoder)._attend_cache(*given)
    for ours, other in zip((found, new_keys, new_values), others, strict=True):
        close(ours, other, rtol=1e-3, atol=1e-4)


def test_unsupported_shapes_use_xla() -> None:
    """Cases: heads of 8, 65 queries of an example, one query, other sizes of matrices, int8, another dtype."""
    values = jnp.asarray(normal(1, 1, 2, 64, 8))
    memory = Memory((jnp.zeros((1, 2, 8, 64)),), (values,), jnp.ones((1, 64), bool))
    found = decoder(2, 8, 1, memory)._attend_memory(0, jnp.ones((16, 3)))
    close(found, np.repeat(values.mean(2).reshape(16, 1), 3, axis=1), rtol=1e-3, atol=1e-4)
    cache = jnp.zeros((2, 16, 70)), jnp.zeros((2, 70, 16))
    found, *_ = decoder(2, 16, 1)._attend_cache(jnp.ones((96, 65)), *cache, jnp.zeros((1, 2, 65, 70)), jnp.asarray([0]))
    close(found, 65 / 70 * jnp.exp(16) / (65 / 70 * jnp.exp(16) + 5 / 70), rtol=1e-4, atol=0)
    own, none = decoder(2, 16, 1), jnp.zeros(0)
    several = jnp.zeros((32, 2))
    for shape in ((24, 32), (32, 40)):
        assert not own._multiplies(Matrix(jnp.zeros(shape), none), several)
    assert not own._multiplies(Matrix(jnp.zeros((32, 32), jnp.int8), jnp.ones(32)), several)
    assert not own._multiplies(Matrix(jnp.zeros((32, 32), jnp.bfloat16), none), several)
    assert own._multiplies(Matrix(jnp.zeros((32, 32)), none), several)
    assert not own._multiplies(Matrix(jnp.zeros((32, 32)), none), several[:, :1])  # one query of one example
    assert not own._attends(1)
    assert decoder(2, 16, 2)._attends(1)


@pytest.mark.parametrize(
    "strategy, batch, feed_forward, tied",
    [
        pytest.param(Sequential(max_length=40), 1, "relu", True, marks=pytest.mark.long),
        pytest.param(Pipelined(delay=1, time_max=23, sub_max=6), 3, "gated-gelu", False, marks=pytest.mark.long),
        pytest.param(Beam(20, 3), 2, "relu", True, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_decodes_equal_decodes_without_kernels(strategy, batch: int, feed_forward: str, tied: bool) -> None:
    """Caches grow, with and without queries gathered from several examples."""
    config = dataclasses.replace(IN_BLOCKS, num_decoder_layers=1, feed_forward=feed_forward, tied_head=tied)
    rng = np.random.default_rng(batch)
    source, length = rng.integers(0, 48, (batch, 12)).astype(np.int32), rng.integers(1, 13, batch).astype(np.int32)
    sizes = Sizes.fit(strategy, batch, query_counts=(4,), slots=(21,))
    ours, others = (compiled(config, strategy, sizes, backend=backend) for backend in (Gpu(interpret=INTERPRET), XLA))
    for seed in range(2):
        params = jax.tree.map(jnp.asarray, oracle.random_params(config, np.random.default_rng(seed), eos_scale=1.2))
        found, expected = (jax.device_get(program(params, source, length)) for program in (ours, others))
        for name in ("tokens", "lengths", "steps", "truncated"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.slow
def test_trial_passes_and_finds_wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < gpu.trial(20, interpret=INTERPRET) < gpu.TOLERANCE
    jax.clear_caches()
    with monkeypatch.context() as patch:
        wrong = lambda sums, *given, **named: finish((sums[0], sums[1] * 2, sums[2]), *given, **named)  # noqa: E731
        patch.setattr(gpu, "_finish", wrong)
        assert gpu.trial(20, interpret=INTERPRET) > gpu.TOLERANCE
    jax.clear_caches()


finish = gpu._finish


def test_kernels_are_used_on_a_gpu_only() -> None:
    here = jax.default_backend() == "gpu"
    assert gpu.use() == here
    assert isinstance(fastest(IN_BLOCKS, jnp.bfloat16), Gpu) == here
