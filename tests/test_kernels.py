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
from pipejax.inference.backends import OWN_KERNEL
from pipejax.model import t5
from pipejax.system import compile_cache
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


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The kernel, compiled into a cache of its own."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compile_cache.VARIABLE, str(directory))
        with logged() as said:
            used = kernels.use()
        if not used:
            pytest.skip(f"no kernel here: {said}")
    assert len(said) == 1 and said[0].startswith("compiling a kernel")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 12, 20, 33])
@pytest.mark.parametrize("outputs, inputs", [(96, 40), (16, 1), (1200, 768)])
def test_products_equal_numpys(kernel, outputs, inputs, columns):
    rng = np.random.default_rng(columns)
    matrix = rng.standard_normal((outputs, inputs)).astype(np.float32)
    x = rng.standard_normal((inputs, columns)).astype(np.float32)
    residual = rng.standard_normal((outputs, columns)).astype(np.float32)
    found = jax.jit(lambda m, x, r: kernels.added(kernels.panels(m), x, r))(matrix, x, residual)
    np.testing.assert_allclose(found, residual + matrix.astype(np.float64) @ x, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("columns", [1, 3, 8, 21])
def test_norm_and_relu_on_the_way(kernel, columns):
    rng = np.random.default_rng(columns)
    matrix, x = rng.standard_normal((64, 50)).astype(np.float32), 9 * rng.standard_normal((50, columns))
    x, scale = x.astype(np.float32), rng.uniform(0.1, 3.0, 50).astype(np.float32)
    m = kernels.panels(jnp.asarray(matrix))
    wide = x.astype(np.float64)
    normed = matrix @ (wide / np.sqrt((wide**2).mean(axis=0) + 1e-3) * scale[:, None])
    np.testing.assert_allclose(kernels.normed(m, x, scale, epsilon=1e-3), normed, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(
        kernels.normed(m, x, scale, epsilon=1e-3, relu=True), np.maximum(normed, 0), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("columns", [1, 2, 8, 19])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_attention_equals_numpys(kernel, columns, spread):
    """Scores from nearly equal to hundreds apart; slots that nobody sees, and an example whose slots all are such."""
    rng = np.random.default_rng(columns)
    batch, heads, length, width = 3, 2, 48, 32
    keys, values = rng.standard_normal((2, batch, heads, length, width)).astype(np.float32)
    query = (spread * rng.standard_normal((batch, heads, width, columns))).astype(np.float32)
    bias = np.where(rng.random((batch, length)) < 0.3, t5.MASKED, 0.0).astype(np.float32)
    bias[2] = t5.MASKED
    laid = kernels.panels(jnp.asarray(keys)), kernels.panels(jnp.asarray(values).swapaxes(2, 3))
    found = jax.jit(kernels.attend)(query, *laid, bias)
    scores = keys.astype(np.float64) @ query + bias[:, None, :, None]
    scores = scores.astype(np.float32).astype(np.float64)  # what is masked keeps no digits, here as there
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    expected = values.swapaxes(2, 3) @ (weights / weights.sum(axis=2, keepdims=True))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5 * max(spread, 1))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"d_model": 32, "d_ff": 48}, {"d_model": 32, "feed_forward": "gated-gelu"}])
def test_decodes_are_those_without_it(kernel, changes):
    """Where matrices fit panels and where they do not."""
    config = dataclasses.replace(CONFIG, **changes)
    model, strategy = t5.T5(config), Pipelined(delay=1, time_max=15, sub_max=10)

    with_it, without = compiled(config, strategy, backend=OWN_KERNEL), compiled(config, strategy)
    source, length = np.arange(40).reshape(4, 10), np.asarray([10, 3, 7, 5], np.int32)
    ready = jax.eval_shape(
        lambda key: programs.prepare(model, t5.init_params(config, key), backend=OWN_KERNEL), jax.random.key(0)
    )
    memory = jax.eval_shape(partial(programs.encode_batch, model, backend=OWN_KERNEL), ready.encoding, source, length)
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


def test_it_is_compiled_once(kernel, monkeypatch, said):
    monkeypatch.setenv(compile_cache.VARIABLE, str(kernel))
    assert kernels.use() and kernels._load(kernel) and not said
    assert len(list(kernel.glob("*.so"))) == 1


def test_a_file_that_others_may_write_is_made_anew(tmp_path, monkeypatch):
    """Whatever the umask is: the linker makes it as open as that allows."""
    compiler, runs = tmp_path / "c++", tmp_path / "runs"
    compiler.write_text(
        f'#!/bin/sh\nfor last; do :; done\necho broken > "$last"\nchmod 777 "$last"\necho x >> {runs}\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(kernels, "_tried", {tmp_path: True})  # loading is not what this is about
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    before = os.umask(0)
    try:
        assert kernels._load(directory)
    finally:
        os.umask(before)
    (library,) = directory.glob("*.so")
    assert library.stat().st_mode & 0o777 == 0o700
    assert kernels._load(directory) and runs.read_text() == "x\n"  # it is taken as it is
    library.chmod(0o777)
    assert kernels._load(directory) and runs.read_text() == "x\nx\n"
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
