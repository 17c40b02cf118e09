"""Our own kernel: products equal NumPy's, decodes equal those without it, and its absence costs no more than a line."""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.config import T5Config
from pipejax.decoding import Pipelined, Step
from pipejax.inference import kernel_decoder, kernels, programs
from pipejax.inference.backends import OwnKernel, Xla, fastest
from pipejax.inference.step_decoder import Cache
from pipejax.inference.weights import narrowed
from pipejax.model import t5
from pipejax.model.quantization import quantize
from pipejax.system import compile_cache, processor
from pipejax.system.errors import UserError
from support import oracle
from support.logged import logged
from support.one_program import compiled

CONFIG = T5Config(
    vocab_size=48,
    d_model=32,
    d_kv=16,
    d_ff=48,
    num_heads=2,
    num_layers=1,
    num_decoder_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)


HERE = [level.name for level in kernels.LEVELS if level.needs <= processor.features()]


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


@pytest.fixture(scope="module")
def level(kernel):
    """The best that this processor can run; `test_each_level` has the others."""
    return kernel


WEIGHTS = ("auto", "bfloat16", "int8")
SHAPES = {  # what fills tiles and what does not, tied and not, an odd number of panels
    "small": {},
    "gelu": {"d_ff": 112, "feed_forward": "gated-gelu", "tied_head": False, "scale_head": False, "vocab_size": 50},
    "silu": {"d_model": 128, "d_kv": 64, "d_ff": 192, "feed_forward": "gated-silu"},
}


@functools.cache
def made(shape, weights, level):
    """A model with random weights, for our kernel and for XLA, both with the same rounded weights."""
    config = dataclasses.replace(CONFIG, **SHAPES[shape])
    model, params = t5.T5(config), jax.tree.map(jnp.asarray, oracle.random_params(config, np.random.default_rng(5)))
    backends = OwnKernel(weights, level), Xla(weights)
    prepare = jax.jit(programs.prepare, static_argnames=("model", "backend"))
    return model, backends, [prepare(model=model, params=params, backend=backend) for backend in backends]


def in_rows(panels):
    """[.., O / 16, I / depth, 16, depth] -> f32 [.., O, I]."""
    *batch, o, i, lanes, depth = panels.shape
    return np.asarray(panels.swapaxes(-2, -3).astype(jnp.float32)).reshape(*batch, o * lanes, i * depth)


def a_step(rng, *, batch, places, live, queries, slots, start, vocabulary):
    """A step whose examples ask so many queries each, and which of its columns are real."""
    mask = rng.random((batch, places, slots)) < 0.6
    first = np.maximum(start - 3 * np.arange(batch), 0)
    number, columns = np.zeros((batch, places), np.int32), []
    for b, count in enumerate(live):
        mask[b, :, first[b] :] = False
        for q in range(count):
            mask[b, q, first[b] : first[b] + q + 1] = rng.random(q + 1) < 0.5
            mask[b, q, first[b] + q] = True
            number[b, q] = len(columns)
            columns.append(b * places + q)
        mask[b, count:] = False
    place = np.asarray(columns + [batch * places] * (queries - len(columns)), np.int32)
    tokens, distance = rng.integers(0, vocabulary, queries), rng.integers(0, 40, (batch, places, slots))
    several = (None, None) if batch == 1 else (jnp.asarray(number), jnp.asarray(place))
    step = (jnp.asarray(tokens, jnp.int32), *several, jnp.asarray(mask), jnp.asarray(distance, jnp.int32))
    nowhere = jnp.zeros((batch, places), jnp.int32)
    return Step(*step, nowhere, nowhere, jnp.asarray(first, jnp.int32)), len(columns)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "live, places, slots", [((1,), 1, 9), ((6,), 7, 40), ((5, 0, 2), 6, 33), ((12, 11, 12), 12, 64)]
)
def test_a_step_equals_xlas(level, shape, weights, live, places, slots):
    """One column to many, fillers, examples that ask nothing. Only weights are rounded: activations keep 16 bits."""
    model, (own, xla), (ours, theirs) = made(shape, weights, level)
    rng, c, batch = np.random.default_rng(len(live)), model.config, len(live)
    start, queries = slots - places - 3 if slots > places + 3 else 0, batch * places
    step, real = a_step(
        rng, batch=batch, places=places, live=live, queries=queries, slots=slots, start=start, vocabulary=c.vocab_size
    )
    heads, length = batch * c.num_heads, 48
    keys = rng.standard_normal((2, c.num_decoder_layers, batch, c.num_heads, length, c.d_kv)).astype(np.float32)
    keys = jnp.asarray(keys).astype(jnp.float32 if weights == "auto" else jnp.bfloat16)  # as the kernel holds them
    seen = jnp.asarray(np.arange(length) < rng.integers(1, length, (batch, 1)))
    memory = t5.Memory(tuple(x.swapaxes(2, 3) for x in keys[0]), tuple(keys[1]), seen)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), memory).replace(mask=seen)
    cached = rng.standard_normal((2, c.num_decoder_layers, heads, c.d_kv, slots)).astype(np.float32)
    cached[..., start:] = 0
    cache = Cache(tuple(map(jnp.asarray, cached[0])), tuple(map(jnp.asarray, cached[1].swapaxes(2, 3))))

    laid = kernel_decoder.lay_out_memory(memory, weights=weights)
    a, after = jax.jit(lambda s, m, k: own.decoder(model, ours.decoding, m)(s, k))(step, laid, cache)
    b, wanted = jax.jit(lambda s, m, k: xla.decoder(model, theirs.decoding, m)(s, k))(step, wide, cache)
    assert a.shape == b.shape == (c.vocab_size, queries)
    scale = float(jnp.abs(b[:, :real]).max())
    np.testing.assert_allclose(a[:, :real], b[:, :real], atol=(3e-5 if weights == "auto" else 3e-4) * scale)
    for x, y, axis in ((after.keys, wanted.keys, 2), (after.values, wanted.values, 1)):
        for mine, other in zip(x, y, strict=True):
            mine, other = (np.moveaxis(np.asarray(v), axis, -1).reshape(batch, -1, slots) for v in (mine, other))
            for e, count in enumerate(live):
                part = slice(None, int(step.start[e]) + count)
                np.testing.assert_allclose(mine[e, :, part], other[e, :, part], atol=3e-3 * np.abs(other).max())


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_encoder_equals_the_models(level, shape, weights):
    """Sources of one token, of all, and between; keys and values are bfloat16, so an error of 2^-8 is rounding."""
    model, (own, xla), (ours, theirs) = made(shape, weights, level)
    source = np.random.default_rng(1).integers(0, 48, (4, 70))
    length = np.asarray([70, 1, 33, 64], np.int32)
    a = jax.jit(lambda s, n: own.encode(model, ours.encoding, s, n))(source, length)
    b = jax.jit(lambda s, n: xla.encode(model, theirs.encoding, s, n))(source, length)
    np.testing.assert_array_equal(a.mask, b.mask)
    real = np.asarray(b.mask)[:, None, :, None]
    for i in range(model.config.num_decoder_layers):
        for found, wanted in (
            (in_rows(a.keys[i]), b.keys[i].swapaxes(2, 3)),
            (in_rows(a.values[i]).swapaxes(2, 3), b.values[i]),
        ):
            wanted = np.asarray(wanted)
            error = np.abs(found - wanted)[np.broadcast_to(real, found.shape)].max()
            assert error <= (0 if weights == "auto" else 2**-7 * np.abs(wanted).max())
            assert np.isfinite(found).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE[1:])
def test_each_level(name, cache, monkeypatch):
    """The other kernels that this processor can run, as a processor without the best one would."""
    monkeypatch.setenv(compile_cache.VARIABLE, str(cache))
    monkeypatch.setenv(kernels.VARIABLE, name)
    other = kernels.use()
    if not other:
        pytest.skip("no kernel here")
    assert other.name in HERE[HERE.index(name) :]
    for weights in WEIGHTS:
        test_a_step_equals_xlas(other, "silu", weights, (5, 0, 2), 6, 33)
        test_the_encoder_equals_the_models(other, "silu", weights)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("trouble", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(level, weights, trouble):
    """In its column alone."""
    model, (own, _), _ = made("small", weights, level)
    params = jax.tree.map(jnp.asarray, oracle.random_params(model.config, np.random.default_rng(5)))
    norm = params["decoder"]["layers_0"]["self_attention"]["norm"]
    table = params["shared"]["embedding"]
    params["shared"]["embedding"] = table.at[7, :].set(0.0).at[7, 3].set(1.0)
    norm["scale"] = norm["scale"].at[3].set(trouble)
    for x in range(48):
        if x != 7:
            params["shared"]["embedding"] = params["shared"]["embedding"].at[x, 3].set(0.0)
    ready = programs.prepare(model, params, backend=own)
    step, _ = a_step(np.random.default_rng(0), batch=1, places=1, live=(1,), queries=1, slots=9, start=0, vocabulary=48)
    memory = t5.Memory((jnp.ones((1, 2, 16, 16)),) * 2, (jnp.ones((1, 2, 16, 16)),) * 2, jnp.ones((1, 16), bool))
    laid = kernel_decoder.lay_out_memory(memory, weights=weights)
    decoder = own.decoder(model, ready.decoding, laid)
    found = decoder(step.replace(tokens=jnp.asarray([7])), decoder.cache(9, None))[0]
    assert not np.isfinite(found).any()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_matrix_in_panels(weights):
    """Outputs are filled up to whole panels; rows can be looked up."""
    rows = np.random.default_rng(0).standard_normal((50, 24)).astype(np.float32)
    held, plain = (
        kernel_decoder.matrix(jnp.asarray(rows), weights=weights),
        narrowed(jnp.asarray(rows), weights, "float32"),
    )
    assert held.rows.shape[0] == 4
    np.testing.assert_array_equal(in_rows(held.rows)[:50], plain.rows.astype(jnp.float32))
    assert not in_rows(held.rows)[50:].any()
    which = np.asarray([0, 17, 49, 17])
    np.testing.assert_array_equal(kernels.rows(held.rows, which), plain.rows[which])


def test_int8_is_within_half_a_step_of_each_output():
    rows = np.random.default_rng(0).standard_normal((32, 24)).astype(np.float32) * np.logspace(-4, 4, 32)[:, None]
    whole, scale = quantize(jnp.asarray(rows, jnp.float32).at[5].set(0.0), 1)
    exact = np.asarray(whole, np.float64) * np.asarray(scale, np.float64)[:, None]
    rows[5] = 0
    assert (np.abs(exact - rows) <= 0.501 * np.abs(rows).max(axis=1, keepdims=True) / 127).all()
    assert np.abs(np.asarray(whole)).max() == 127


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"d_model": 24}, {"feed_forward": "gated-gelu"}])
def test_decodes_are_those_without_it(kernel, cache, monkeypatch, changes):
    """And where it does not fit, XLA decodes."""
    monkeypatch.setenv(compile_cache.VARIABLE, str(cache))
    config = dataclasses.replace(CONFIG, **changes)
    backend = fastest(config, jnp.float32)
    assert isinstance(backend, OwnKernel) == (config.d_model % 16 == 0)
    if config.d_model % 16:
        return
    strategy = Pipelined(delay=1, time_max=15, sub_max=10)
    with_it, without = compiled(config, strategy, backend=backend), compiled(config, strategy)
    source, length = np.arange(40).reshape(4, 10), np.asarray([10, 3, 7, 5], np.int32)
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
    assert len(list(cache.glob(f"t5-{kernel.name}-*.so"))) == 1


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
