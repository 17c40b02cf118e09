"""Our own kernel: products equal NumPy's, decodes equal those without it, and its absence costs no more than a line."""

import dataclasses
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.config import T5Config
from pipejax.decoding import Pipelined
from pipejax.inference import kernels, programs
from pipejax.inference.backends import OwnKernel
from pipejax.model import t5
from pipejax.model.quantization import quantize
from pipejax.system import compile_cache, processor
from pipejax.system.errors import UserError
from support import oracle
from support.logged import logged
from support.one_program import compiled

CONFIG = T5Config(
    vocab_size=48,
    d_model=24,
    d_kv=16,
    d_ff=40,
    num_heads=2,
    num_layers=1,
    num_decoder_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)


HERE = [level.name for level in kernels.LEVELS if level.needs <= processor.features()]
DTYPES = {"float32": np.float32, "bfloat16": jnp.bfloat16, "int8": np.int8}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The kernels that this module compiles are in a cache of its own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def kernel(cache):
    """The kernel for this processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compile_cache.VARIABLE, str(cache))
        with logged() as said:
            used = kernels.use()
        if not used:
            pytest.skip(f"no kernel here: {said}")
    assert all(line.startswith("compiling a kernel") for line in said)
    return used


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.slow if i else ()) for i, name in enumerate(HERE)],
)
def level(request, cache):
    """Each kernel that this processor can run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compile_cache.VARIABLE, str(cache))
        patch.setenv(kernels.VARIABLE, request.param)
        used = kernels.use()
    if not used:
        pytest.skip("no kernel here")
    assert used.level in HERE[HERE.index(request.param) :]
    return used


def laid(matrix, weights):
    """A matrix f32 [O, I] in panels, its scale, and what it is in float64."""
    if weights == "int8":
        narrow, scale = quantize(jnp.asarray(matrix), 1)
        return kernels.panels(narrow), scale, np.asarray(narrow, np.float64) * np.asarray(scale, np.float64)[:, None]
    narrow = jnp.asarray(matrix).astype(DTYPES[weights])
    return kernels.panels(narrow), jnp.zeros(0), np.asarray(narrow.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize(
    "outputs, inputs, columns",
    [
        *((96, 40, n) for n in (1, 2, 7, 8, 9, 12, 33)),
        *((16, 4, n) for n in (1, 5)),
        *((48, 128, n) for n in (1, 8, 9, 17, 64)),  # inputs that fill tiles, and an odd number of panels
        *((432, 768, n) for n in (3, 16)),
    ],
)
def test_products_equal_numpys(level, outputs, inputs, columns, weights):
    """Only the weight is rounded, whatever multiplies: x counts to 16 bits of its column's largest number."""
    rng = np.random.default_rng(columns)
    matrix = rng.standard_normal((outputs, inputs)).astype(np.float32)
    x = (rng.standard_normal((inputs, columns)) * 10.0 ** rng.uniform(-3, 3, columns)).astype(np.float32)
    residual = rng.standard_normal((outputs, columns)).astype(np.float32)
    panels, scale, exact = laid(matrix, weights)
    found = jax.jit(level.added)(panels, scale, x, residual)
    expected = residual + exact @ x.astype(np.float64)
    rounding = np.abs(x).max(axis=0) * np.sqrt((exact**2).sum(axis=1))[:, None]
    assert (np.abs(found - expected) / rounding).max() < (1e-5 if weights == "float32" else 5e-5)


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("columns", [1, 3, 8, 21])
def test_norm_and_relu_on_the_way(level, columns, weights):
    rng = np.random.default_rng(columns)
    matrix, x = rng.standard_normal((64, 52)).astype(np.float32), 9 * rng.standard_normal((52, columns))
    x, factors = x.astype(np.float32), rng.uniform(0.1, 3.0, 52).astype(np.float32)
    panels, scale, exact = laid(matrix, weights)
    wide = x.astype(np.float64)
    normed = exact @ (wide / np.sqrt((wide**2).mean(axis=0) + 1e-3) * factors[:, None])
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if weights == "float32" else {"rtol": 1e-4, "atol": 3e-3}
    np.testing.assert_allclose(level.normed(panels, scale, x, factors, epsilon=1e-3), normed, **tolerance)
    np.testing.assert_allclose(
        level.normed(panels, scale, x, factors, epsilon=1e-3, relu=True), np.maximum(normed, 0), **tolerance
    )


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("trouble", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(level, weights, trouble):
    x = np.ones((64, 3), np.float32)
    x[5, 1] = trouble
    panels, scale, _ = laid(np.ones((16, 64), np.float32), weights)
    found = np.asarray(level.added(panels, scale, x, jnp.zeros((16, 3))))
    assert np.isfinite(found[:, [0, 2]]).all() and not np.isfinite(found[:, 1]).any()


def test_columns_of_zeros(level):
    panels, scale, _ = laid(np.zeros((16, 64), np.float32), "int8")
    assert not np.asarray(level.added(panels, scale, jnp.zeros((64, 2)), jnp.zeros((16, 2)))).any()


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [1, 2, 8, 19])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_attention_equals_numpys(level, columns, spread, weights):
    """Scores from nearly equal to hundreds apart; slots that nobody sees, and an example whose slots all are such."""
    rng = np.random.default_rng(columns)
    batch, heads, length, width = 3, 2, 48, 32
    keys, values = jnp.asarray(rng.standard_normal((2, batch, heads, length, width))).astype(DTYPES[weights])
    query = (spread * rng.standard_normal((batch, heads, width, columns))).astype(np.float32)
    bias = np.where(rng.random((batch, length)) < 0.3, t5.MASKED, 0.0).astype(np.float32)
    bias[2] = t5.MASKED
    found = jax.jit(level.attend)(query, kernels.panels(keys), kernels.panels(values.swapaxes(2, 3)), bias)
    keys, values = (np.asarray(x, np.float64) for x in (keys, values))
    scores = keys @ query + bias[:, None, :, None]
    scores = scores.astype(np.float32).astype(np.float64)  # what is masked keeps no digits, here as there
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    expected = values.swapaxes(2, 3) @ (weights / weights.sum(axis=2, keepdims=True))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5 * max(spread, 1))


@pytest.mark.parametrize("weights", DTYPES)
def test_rows_of_a_matrix_in_panels(weights):
    matrix = np.random.default_rng(0).standard_normal((48, 24)).astype(np.float32)
    panels, scale, exact = laid(matrix, weights)
    found = kernels.rows(panels, jnp.asarray([0, 17, 47, 17])).astype(jnp.float32)
    np.testing.assert_allclose(
        found * (scale[jnp.asarray([0, 17, 47, 17])][:, None] if scale.size else 1), exact[[0, 17, 47, 17]], rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"d_model": 32, "d_ff": 48}, {"d_model": 32, "feed_forward": "gated-gelu"}])
def test_decodes_are_those_without_it(kernel, changes):
    """Where matrices fit panels and where they do not."""
    config, backend = dataclasses.replace(CONFIG, **changes), OwnKernel(kernel)
    model, strategy = t5.T5(config), Pipelined(delay=1, time_max=15, sub_max=10)

    with_it, without = compiled(config, strategy, backend=backend), compiled(config, strategy)
    source, length = np.arange(40).reshape(4, 10), np.asarray([10, 3, 7, 5], np.int32)
    ready = jax.eval_shape(
        lambda key: programs.prepare(model, t5.init_params(config, key), backend=backend), jax.random.key(0)
    )
    memory = jax.eval_shape(partial(programs.encode_batch, model, backend=backend), ready.encoding, source, length)
    part = partial(programs.decode_batch, model, strategy, sizes=programs.schedule(strategy, 4), slots=200)
    text = jax.jit(part).lower(ready.decoding, memory, None).as_text()
    assert {name for name in kernels.TARGETS if name in text} >= {*kernels.TARGETS[0 if changes else 1 :]}
    rows = 0
    for seed in range(4):
        params = jax.tree.map(jnp.asarray, oracle.random_params(config, np.random.default_rng(seed)))
        a, b = (jax.device_get(f(params, source, length)) for f in (with_it, without))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(x, y)
        rows += int((a.lengths > 0).sum())
    assert rows > 20


def test_it_is_compiled_once(kernel, cache, monkeypatch, said):
    monkeypatch.setenv(compile_cache.VARIABLE, str(cache))
    monkeypatch.setattr(kernels, "_tried", {})
    assert kernels.use() == kernel and not said
    assert len(list(cache.glob(f"columns-{kernel.level}-*.so"))) == 1


def test_a_level_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv(kernels.VARIABLE, "sse9")
    with pytest.raises(UserError, match=r"PIPEJAX_NATIVE: found 'sse9'; expected off, amx, bf16, .*native"):
        kernels.use()


def test_a_file_that_others_may_write_is_made_anew(tmp_path, monkeypatch):
    """Whatever the umask is: the linker makes it as open as that allows."""
    compiler, runs = tmp_path / "c++", tmp_path / "runs"
    compiler.write_text(
        f'#!/bin/sh\nfor last; do :; done\necho broken > "$last"\nchmod 777 "$last"\necho x >> {runs}\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(kernels, "_load", lambda library, level: True)  # loading is not what this is about
    monkeypatch.setattr(kernels, "_tried", {})
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    before = os.umask(0)
    try:
        assert kernels._first(directory, [*kernels.LEVELS[-1:]])
    finally:
        os.umask(before)
    (library,) = directory.glob("*.so")
    assert library.stat().st_mode & 0o777 == 0o700
    assert kernels._first(directory, [*kernels.LEVELS[-1:]]) and runs.read_text() == "x\n"  # it is taken as it is
    library.chmod(0o777)
    assert kernels._first(directory, [*kernels.LEVELS[-1:]]) and runs.read_text() == "x\nx\n"
    (library,) = directory.glob("*.so")
    assert library.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "variables, says",
    [
        ({kernels.VARIABLE: "off"}, ""),
        ({compile_cache.VARIABLE: "off"}, ""),
        ({"CXX": "/bin/false"}, "without its own kernel"),
        ({"CXX": "no-such-compiler"}, "without its own kernel"),
    ],
)
def test_without_it(tmp_path, monkeypatch, variables, says, said):
    for name, value in ({compile_cache.VARIABLE: str(tmp_path)} | variables).items():
        monkeypatch.setenv(name, value)
    assert not kernels.use()
    assert says in "\n".join(said) and len(said) <= 2
    assert not list(tmp_path.glob("*.so"))


def test_what_cannot_be_loaded_is_done_without_and_made_anew(tmp_path, monkeypatch, said):
    """A compiler that stops half-way, a disk that forbids programs."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho broken > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "_tried", {})
    monkeypatch.setattr(kernels, "_registered", set())
    assert not kernels.use()
    assert "decoding goes without its own kernel" in said[-1] and "cannot be loaded" in said[-1]
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cache_that_is_open_to_others_is_left_alone(tmp_path, monkeypatch, said):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "cache"))
    assert compile_cache.safe_directory() is None
    assert "open to others" in said[0]
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "new"))
    assert compile_cache.safe_directory() == tmp_path / "new"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
