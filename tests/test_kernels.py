"""The CPU kernel: products equal NumPy's, decodes equal decodes without it, and a missing kernel costs one line."""

import contextlib
import dataclasses
import os
import platform
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.decoding import Pipelined, Step
from pipejax.decoding.choice import first_argmax
from pipejax.decoding.gathering import NOWHERE, Filled
from pipejax.inference.backends import fastest
from pipejax.inference.weights import as_matrix
from pipejax.kernels import cpu_decoder, cpu_kernel
from pipejax.kernels.backends import OwnKernel
from pipejax.kernels.cpu_kernel import fields
from pipejax.model import t5
from pipejax.model.quantization import quantize
from pipejax.system import compile_cache
from pipejax.system.errors import UserError
from support import oracle, quantised
from support.kernel_models import HERE, SHAPES, WEIGHTS, in_one_digit, in_rows, laid_out, made
from support.one_program import compiled
from support.tiny import IN_BLOCKS
from support.trees import same_bits


@pytest.fixture(scope="module")
def level(kernel):
    """The best supported level; `test_each_supported_level_agrees_with_the_reference` tests the others."""
    return kernel


# Queries of each example in a step and in the next: one column to sixty-four, of one example or of three.
CALLS = [((1,),), ((6,), (13,)), ((5, 0, 2), (0, 1, 4)), ((12, 11, 12), (22, 21, 21))]
# Against exact arithmetic with the same rounded weights, by the largest magnitude. Activations keep 16 bits where the
# processor multiplies narrow numbers, and are float32 elsewhere.
LOGITS = {"auto": 3e-5, "bfloat16": 3e-4, "int8": 3e-4}
# With VNNI activations become one int8 digit. A number between two steps may be rounded differently from NumPy, and all
# later numbers in its column change: this many columns may differ, and by this much.
FALLEN, OFF = 0.1, 0.02
# Keys and values of narrow weights have at least the precision of int8: half a step of 127. Keys less their mean may be
# twice as large as the largest key. The rounding of activations is added. With one digit, a number may change its step.
KEYS = 1 / 127 + LOGITS["int8"], 0.02


def rounding(weights, level):
    """NumPy's activations at a level: one int8 digit with VNNI, two digits with AMX, float32 elsewhere."""
    if in_one_digit(weights, level):
        return quantised.activations(quantised.one_digit)
    if weights == "int8" and "amx_int8" in level.needs:
        return quantised.activations(lambda x: quantised.narrow(x, -1, quantised.TWO_DIGITS))
    return contextlib.nullcontext()


class Asked:
    """Random tokens that examples feed in several calls, with their visibility and positions."""

    def __init__(self, rng, calls, vocabulary):
        """Each call: how many each example asks."""
        self.calls, self.batch = calls, len(calls[0])
        counts = np.sum(calls, axis=0)
        self.tokens = [rng.integers(0, vocabulary, n) for n in counts]
        self.visible = [np.tril(rng.random((n, n)) < 0.6) | np.eye(n, dtype=bool) for n in counts]
        self.position = [rng.integers(0, 40, n) for n in counts]
        # A call writes one token at each place, from the place of its example.
        self.slots = sum(max(live) for live in calls) + 3

    def of(self, b, call):
        """The tokens of an example in a call, which are written to slots of these numbers."""
        before = sum(live[b] for live in self.calls[:call])
        return range(before, before + self.calls[call][b])

    def distances(self, b):
        """The distances between an example's tokens; a token that lies ahead has the distance 0."""
        return np.maximum(self.position[b][:, None] - self.position[b], 0)

    def step(self, call, fillers):
        """The step of the decoder; the last queries are fillers."""
        places = max(self.calls[call])
        mask = np.zeros((self.batch, places, self.slots), bool)
        position, key_position = (np.zeros((self.batch, n), np.int32) for n in (places, self.slots))
        number, columns, tokens = np.zeros((self.batch, places), np.int32), [], []
        for b in range(self.batch):
            queries = self.of(b, call)
            key_position[b, : queries.stop] = self.position[b][: queries.stop]
            for q, query in enumerate(queries):
                mask[b, q, : queries.stop] = self.visible[b][query, : queries.stop]
                position[b, q] = self.position[b][query]
                number[b, q] = len(columns)
                columns.append(b * places + q)
                tokens.append(self.tokens[b][query])
        if self.batch > 1:
            columns, tokens = columns + [self.batch * places] * fillers, tokens + [1] * fillers
        several = (None, None) if self.batch == 1 else (jnp.asarray(number), jnp.asarray(columns, jnp.int32))
        nowhere, start = jnp.zeros((self.batch, places), jnp.int32), [self.of(b, call).start for b in range(self.batch)]
        seen = jnp.asarray(mask), jnp.asarray(position), jnp.asarray(key_position), nowhere, nowhere
        fed = np.arange(self.slots) < np.asarray([[self.of(b, call).stop] for b in range(self.batch)])
        filled = Filled(
            jnp.asarray(np.where(fed, 0, NOWHERE), jnp.int32), jnp.broadcast_to(jnp.arange(self.slots), fed.shape)
        )
        return Step(jnp.asarray(tokens, jnp.int32), *several, *seen, jnp.asarray(start, jnp.int32), filled)


def check_calls(level, shape, weights, calls):
    """Compares consecutive calls of the decoder on one cache with NumPy's decoder, which has no cache."""
    model, own, ready, exact = made(shape, weights, level)
    rng, c, batch, slots = np.random.default_rng(len(calls[0])), model.config, len(calls[0]), 48
    asked, lengths = Asked(rng, calls, c.vocab_size), rng.integers(1, slots, batch)
    seen = rng.standard_normal((batch, c.num_decoder_layers, 2, slots, c.num_heads * c.d_kv)).astype(np.float32)
    seen = seen.reshape(*seen.shape[:-1], c.num_heads, c.d_kv)  # [B, layers, 2, L, H, K]
    by_head = seen.transpose(1, 2, 0, 4, 3, 5)
    if weights == "int8":  # in the layout of the kernel
        seen = np.stack([quantised.narrow(seen[:, :, 0], 4), quantised.narrow(seen[:, :, 1], 2)], axis=2)
    seen = quantised.bfloat16(seen) if weights == "bfloat16" else seen
    seen = seen.reshape(*seen.shape[:-2], -1)
    memory = t5.Memory(
        tuple(jnp.asarray(layer[0].swapaxes(2, 3)) for layer in by_head),
        tuple(jnp.asarray(layer[1]) for layer in by_head),
        jnp.asarray(np.arange(slots) < lengths[:, None]),
    )

    @jax.jit
    def decode(steps, memory):
        decoder, found = own.decoder(model, ready.decoding, laid_out(memory, weights)), []
        cache = decoder.cache(asked.slots, None)
        for step in steps:
            tokens, _ = decoder.greedy(step, cache)
            logits, cache = decoder(step, cache)
            found.append((logits, tokens))
        return found

    found = decode([asked.step(call, fillers=2 * call) for call in range(len(calls))], memory)
    looked_at = quantised.sources_in_two_digits() if in_one_digit(weights, level) else contextlib.nullcontext()
    with rounding(weights, level), looked_at:
        wanted = [
            quantised.logits(
                exact, c, seen[b, :, :, : lengths[b]], asked.tokens[b], asked.visible[b], asked.distances(b)
            )
            if len(asked.tokens[b])
            else np.zeros((0, c.vocab_size))
            for b in range(batch)
        ]
    off = []
    for call, (logits, tokens) in enumerate(found):
        now = np.concatenate([wanted[b][asked.of(b, call)] for b in range(batch)]).T
        assert logits.shape == (c.vocab_size, now.shape[1] + (2 * call if batch > 1 else 0))
        off += list(np.abs(logits[:, : now.shape[1]] - now).max(axis=0) / np.abs(now).max())
        np.testing.assert_array_equal(tokens[: now.shape[1]], np.argmax(logits[:, : now.shape[1]], axis=0))
    off = np.asarray(off)
    assert (off > LOGITS[weights]).mean() <= (FALLEN if in_one_digit(weights, level) else 0)
    assert off.max() <= max(LOGITS[weights], OFF)


def check_encoder(level, shape, weights, lengths=(70, 1, 33, 64)):
    """Compares sources of given lengths with NumPy; keys and values have the precision of the weights."""
    model, own, ready, exact = made(shape, weights, level)
    c, source = model.config, np.random.default_rng(1).integers(0, 48, (len(lengths), max(lengths)))
    length = np.asarray(lengths, np.int32)
    found = jax.jit(lambda s, n: own.encode(model, ready.encoding, s, n))(source, length)
    slots = found.mask.shape[1]
    np.testing.assert_array_equal(found.mask, np.arange(slots) < length[:, None])
    blocks = quantised.attention_in_blocks() if in_one_digit(weights, level) else contextlib.nullcontext()
    with rounding(weights, level), blocks:
        wanted = [quantised.memory(exact, c, ids[:n]) for ids, n in zip(source, length, strict=True)]
    most = max(np.abs(x).max() for x in wanted)
    for i in range(c.num_decoder_layers):
        keys, values = in_rows(found.keys[i]), in_rows(found.values[i]).swapaxes(2, 3)
        for j, x in enumerate((keys, values)):
            x = x.swapaxes(1, 2).reshape(len(length), slots, -1)
            assert np.isfinite(x).all()
            for b, n in enumerate(length):
                mean = wanted[b][i, j].mean(axis=0) if j == 0 and weights == "int8" else 0
                error = np.abs(x[b, :n] - (wanted[b][i, j] - mean)).max()
                assert error <= (3e-5 if weights == "auto" else KEYS[in_one_digit(weights, level)]) * most


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "shape, calls",
    [*(("silu", calls) for calls in CALLS), *((shape, CALLS[2]) for shape in ("small", "gelu", "outliers"))],
)
def test_the_decoder_equals_numpys(level, shape, weights, calls):
    check_calls(level, shape, weights, calls)


@pytest.mark.parametrize("shape, weights", [(shape, weights) for shape in SHAPES for weights in WEIGHTS])
def test_the_encoder_equals_numpys(level, shape, weights):
    check_encoder(level, shape, weights)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["small", pytest.param("silu", marks=pytest.mark.long), "spread"])
def test_the_encoder_equals_numpys_on_sources_of_several_blocks(level, shape):
    check_encoder(level, shape, "int8", lengths=(2, 31, 32, 513, 1030))


@pytest.mark.parametrize("weights", [pytest.param(x, marks=() if x == "int8" else pytest.mark.slow) for x in WEIGHTS])
def test_non_finite_source_stays_non_finite(level, weights):
    """An infinite number in one token spoils its whole source, and no other source of the batch."""
    model, own, _, _ = made("silu", weights, level)
    params = jax.tree.map(jnp.asarray, oracle.random_params(model.config, np.random.default_rng(5)))
    params["shared"]["embedding"] = params["shared"]["embedding"].at[7, 3].set(np.inf)
    ready, source = own.prepare(model, params), np.random.default_rng(1).integers(8, 48, (2, 70))
    source[0, 40] = 7
    length = np.asarray([70, 60], np.int32)
    both = own.encode(model, ready.encoding, source, length)
    alone = own.encode(model, ready.encoding, source[1:], length[1:])
    for x, y in zip((*both.keys, *both.values), (*alone.keys, *alone.values), strict=True):
        np.testing.assert_array_equal(in_rows(x)[1], in_rows(y)[0])
        assert np.isfinite(in_rows(y)).all()
    for x in both.keys:
        assert not np.isfinite(in_rows(x)[0, :, :70]).any()
    for x in both.values:
        assert not np.isfinite(in_rows(x)[0, :, :, :70]).any()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "avx2" else pytest.mark.long) for name in HERE[1:]]
)
def test_each_supported_level_agrees_with_the_reference(name, kernel_cache, monkeypatch):
    """The other kernels that this processor can run, as a processor without the best one would."""
    monkeypatch.setenv(compile_cache.VARIABLE, str(kernel_cache))
    monkeypatch.setenv(cpu_kernel.VARIABLE, name)
    other = cpu_kernel.use()
    if not other:
        pytest.skip("no kernel here")
    assert other.name in HERE[HERE.index(name) :]
    for weights in WEIGHTS:
        for calls in CALLS[1:3] if weights == "int8" else CALLS[2:3]:
            check_calls(other, "silu", weights, calls)
        check_encoder(other, "silu", weights)


FULL = """
#include "team.h"
struct Full {  // a pool whose queue has no room, so that its caller runs everything
  int64_t num_threads() const { return 3; }
  template <typename Task> void Schedule(Task task) { task(); }
};
int main() {
  Full pool;
  int64_t sum = 0;
  pipejax::Team(pool).Run(10, 1, [&](int64_t i) { sum += i; });
  return sum != 45;
}
"""


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler here")
def test_a_pool_without_room_stops_no_team(tmp_path):
    (tmp_path / "full.cc").write_text(FULL)
    program = [str(tmp_path / "full"), str(tmp_path / "full.cc")]
    subprocess.run(["c++", "-std=c++17", "-pthread", f"-I{cpu_kernel.SOURCES[0].parent}", "-o", *program], check=True)
    subprocess.run(program[:1], check=True, timeout=10)


@pytest.mark.long
@pytest.mark.skipif(platform.machine() != "x86_64", reason="options of an x86's compiler")
def test_kernel_with_registers_of_four_numbers_equals_numpy(kernel_cache, monkeypatch):
    """ARM, and x86 without AVX, have such registers."""
    plain = cpu_kernel.Level("plain", frozenset(), "-march=x86-64-v2", cpu_kernel.LEVELS[-1].reading)
    monkeypatch.setenv(compile_cache.VARIABLE, str(kernel_cache))
    monkeypatch.setattr(cpu_kernel, "LEVELS", (plain,))
    monkeypatch.setattr(cpu_kernel, "_tried", {})
    assert cpu_kernel.use() == plain
    for weights in WEIGHTS:
        check_calls(plain, "silu", weights, CALLS[2])
        check_encoder(plain, "silu", weights)


@pytest.mark.skipif(not shutil.which("clang++"), reason="no clang++ here")
def test_clang_compiles_the_kernel(level, tmp_path):
    assert not cpu_kernel.build(level, "clang++", tmp_path / "t5.so")


def answers(level, weights, columns, changed):
    """Logits and greedy answers of a head of 5,003 words [V, D], changed by `changed`."""
    config = dataclasses.replace(IN_BLOCKS, vocab_size=5003, tied_head=False)
    params = oracle.random_params(config, np.random.default_rng(5))
    head = params["lm_head"]["kernel"]
    params["lm_head"]["kernel"] = changed(head.T.copy()).T
    model, own = t5.T5(config), OwnKernel(weights, level)
    ready = own.prepare(model, jax.tree.map(jnp.asarray, params))
    memory = t5.Memory((jnp.ones((1, 2, 16, 16)),) * 2, (jnp.ones((1, 2, 16, 16)),) * 2, jnp.ones((1, 16), bool))
    decoder = own.decoder(model, ready.decoding, laid_out(memory, weights))
    asked = Asked(np.random.default_rng(0), ((columns,),), 5003)
    step, cache = asked.step(0, 0), decoder.cache(asked.slots, None)
    return np.asarray(decoder(step, cache)[0]), np.asarray(decoder.greedy(step, cache)[0])


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    ("different", "columns"), [(1, 40), (30, 40), (1500, 40), (5003, 40), (30, 3), (5003, 4), (30, 9)]
)
def test_first_of_equal_highest_logits_is_chosen(level, weights, different, columns):
    """5,003 words have many equal logits. The last panel is filled up with words whose logit is zero."""
    logits, found = answers(level, weights, columns, lambda head: np.resize(head[:different], head.shape))
    np.testing.assert_array_equal(found, np.argmax(logits, axis=0))
    assert found.max() < different and (logits.max(axis=0) < 0).any() == (different == 1)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("columns", [3, 5])
def test_nan_in_a_row_of_the_head_reaches_the_output(level, weights, columns):
    def spoiled(head):
        head[1700] = np.nan
        return head

    logits, found = answers(level, weights, columns, spoiled)
    assert np.isnan(logits[1700]).all() and np.isfinite(np.delete(logits, 1700, axis=0)).all()
    np.testing.assert_array_equal(found, 5002)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("trouble", [np.nan, np.inf])
@pytest.mark.parametrize("columns", [1, 5])
def test_non_finite_values_stay_non_finite(level, weights, trouble, columns):
    model, own, _, _ = made("small", weights, level)
    params = jax.tree.map(jnp.asarray, oracle.random_params(model.config, np.random.default_rng(5)))
    norm = params["decoder"]["layers_0"]["self_attention"]["norm"]
    table = params["shared"]["embedding"]
    params["shared"]["embedding"] = table.at[7, :].set(0.0).at[7, 3].set(1.0)
    norm["scale"] = norm["scale"].at[3].set(trouble)
    for x in range(48):
        if x != 7:
            params["shared"]["embedding"] = params["shared"]["embedding"].at[x, 3].set(0.0)
    ready = own.prepare(model, params)
    asked = Asked(np.random.default_rng(0), ((columns,),), 48)
    memory = t5.Memory((jnp.ones((1, 2, 16, 16)),) * 2, (jnp.ones((1, 2, 16, 16)),) * 2, jnp.ones((1, 16), bool))
    laid = laid_out(memory, weights)
    decoder = own.decoder(model, ready.decoding, laid)
    step = asked.step(0, 0)
    step = step.replace(tokens=jnp.full_like(step.tokens, 7))
    cache = decoder.cache(asked.slots, None)
    found, token = decoder(step, cache)[0], decoder.greedy(step, cache)[0]
    assert not np.isfinite(found).any()
    np.testing.assert_array_equal(token, first_argmax(found))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda w, s: (w.replace(norm=w.norm[:-1]), s), r"step: norm: found F32 \[\d+\]; expected F32 \[\d+\]"),
        (
            lambda w, s: (
                w.replace(layers=(w.layers[0], w.layers[1].replace(cross_query=w.layers[1].self_inwards))),
                s,
            ),
            r"step: layer 1: cross_query: found F32 \[6, \d+, 16, 1\]; expected F32 \[2, \d+, 16, 1\]",
        ),
        (lambda w, s: (w, s.replace(position=s.position * 1.0)), r"step: position: found F32 \[1, 3\]; expected S32 "),
        (lambda w, s: (w, s.replace(start=s.start + 9)), "step: a cache that is full"),
    ],
    ids=["shape", "layer", "type", "full"],
)
def test_error_names_the_invalid_field(level, spoil, says):
    model, own, ready, _ = made("small", "auto", level)
    asked = Asked(np.random.default_rng(0), ((3,),), 48)
    memory = t5.Memory((jnp.ones((1, 2, 16, 16)),) * 2, (jnp.ones((1, 2, 16, 16)),) * 2, jnp.ones((1, 16), bool))
    weights, step = spoil(ready.decoding, asked.step(0, 0))
    decoder = own.decoder(model, weights, laid_out(memory, "auto"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=says):
        jax.block_until_ready(decoder(step, decoder.cache(asked.slots, None)))


def test_error_names_a_missing_or_unknown_field():
    layer = dict.fromkeys(fields.TABLES["ENCODER_LAYER_FIELDS"])
    assert fields.arrays("ENCODER_LAYER_FIELDS", layer) == []
    del layer["feed_norm"]
    with pytest.raises(TypeError, match=r"^ENCODER_LAYER_FIELDS: missing: feed_norm; unknown: weight$"):
        fields.arrays("ENCODER_LAYER_FIELDS", layer | {"weight": None})


@pytest.mark.parametrize("weights", WEIGHTS)
def test_panels_contain_the_matrix(weights):
    """Outputs are filled up to whole panels."""
    rows = np.random.default_rng(0).standard_normal((50, 24)).astype(np.float32)
    table = {"embedding": jnp.asarray(rows)}
    held, plain = cpu_decoder.matrix(table, weights=weights), as_matrix(table, weights, "float32")
    same_bits(held, cpu_decoder.matrix({"kernel": jnp.asarray(rows.T)}, weights=weights))
    assert held.rows.shape[0] == 4
    whole = in_rows(held.replace(scale=jnp.zeros(0)))
    np.testing.assert_array_equal(whole[:50], plain.rows.astype(jnp.float32))
    assert not whole[50:].any()


def test_int8_is_within_half_a_step_of_each_output():
    rows = np.random.default_rng(0).standard_normal((32, 24)).astype(np.float32) * np.logspace(-4, 4, 32)[:, None]
    whole, scale = quantize(jnp.asarray(rows, jnp.float32).at[5].set(0.0), 1)
    exact = np.asarray(whole, np.float64) * np.asarray(scale, np.float64)[:, None]
    rows[5] = 0
    assert (np.abs(exact - rows) <= 0.501 * np.abs(rows).max(axis=1, keepdims=True) / 127).all()
    assert np.abs(np.asarray(whole)).max() == 127


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"d_model": 24}, {"feed_forward": "gated-gelu"}])
def test_decodes_equal_decodes_without_the_kernel(kernel, kernel_cache, monkeypatch, changes):
    """XLA decodes if the kernel does not support the model."""
    monkeypatch.setenv(compile_cache.VARIABLE, str(kernel_cache))
    config = dataclasses.replace(IN_BLOCKS, **changes)
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


def test_kernel_is_compiled_once(kernel, kernel_cache, monkeypatch, said):
    monkeypatch.setenv(compile_cache.VARIABLE, str(kernel_cache))
    monkeypatch.setattr(cpu_kernel, "_tried", {})
    before = {file: file.stat().st_mtime_ns for file in kernel_cache.iterdir()}
    assert before and cpu_kernel.use() == kernel and not said
    assert {file: file.stat().st_mtime_ns for file in kernel_cache.iterdir()} == before


def test_shipped_kernel_needs_no_compiler_and_no_cache(kernel, kernel_cache, tmp_path, monkeypatch, said):
    compiled = max(kernel_cache.glob(f"t5-{kernel.name}-*.so"), key=lambda file: file.stat().st_atime_ns)
    level = kernel._replace(name="shipped")  # a name can be given once
    monkeypatch.setattr(cpu_kernel, "LEVELS", (level,))
    monkeypatch.setattr(cpu_kernel, "SHIPPED", tmp_path)
    monkeypatch.setattr(cpu_kernel, "_tried", {})
    monkeypatch.setenv("CXX", "/bin/false")  # the suite has no cache by default
    shutil.copyfile(compiled, cpu_kernel.shipped(level))
    cpu_kernel.shipped(level).chmod(0o666)  # installers give files the permissions of the package's code
    assert cpu_kernel.use() == level and not said


def test_shipped_kernel_of_other_sources_or_systems_is_not_used(tmp_path, monkeypatch, said):
    level = cpu_kernel.LEVELS[-1]
    monkeypatch.setattr(cpu_kernel, "LEVELS", (level,))
    monkeypatch.setattr(cpu_kernel, "SHIPPED", tmp_path)
    monkeypatch.setattr(cpu_kernel, "_registered", set())
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/bin/false")
    library = cpu_kernel.shipped(level)
    library.write_text("for another system")
    monkeypatch.setattr(cpu_kernel, "_tried", {})
    assert not cpu_kernel.use()
    assert (
        str(library) in said[0]
        and "cannot be loaded on this machine" in said[0]
        and "without pipejax's kernel" in said[-1]
    )
    assert library.read_text() == "for another system"
    said.clear()
    source = tmp_path / "t5.cc"
    source.write_text("other sources")
    monkeypatch.setattr(cpu_kernel, "SOURCES", [source])
    monkeypatch.setattr(cpu_kernel, "_tried", {})
    assert not cpu_kernel.use() and str(library) not in "\n".join(said)


def test_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv(cpu_kernel.VARIABLE, "sse9")
    with pytest.raises(UserError, match=r"PIPEJAX_NATIVE: found 'sse9'; expected off, amx, bf16, .*native"):
        cpu_kernel.use()


def test_file_writable_by_others_is_recompiled(tmp_path, monkeypatch):
    """The umask has no effect, although the linker creates files with the permissions that it allows."""
    compiler, runs = tmp_path / "c++", tmp_path / "runs"
    compiler.write_text(
        f'#!/bin/sh\nfor last; do :; done\necho broken > "$last"\nchmod 777 "$last"\n'
        f'case "$*" in *-shared*) echo x >> {runs};; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(cpu_kernel, "_load", lambda library, level: True)  # this test is not about loading
    monkeypatch.setattr(cpu_kernel, "_tried", {})
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv(compile_cache.VARIABLE, str(directory))
    before = os.umask(0)
    try:
        assert cpu_kernel._first_compiled([*cpu_kernel.LEVELS[-1:]])
    finally:
        os.umask(before)
    (library,) = directory.glob("*.so")
    assert library.stat().st_mode & 0o777 == 0o700
    # The file is used unchanged.
    assert cpu_kernel._first_compiled([*cpu_kernel.LEVELS[-1:]]) and runs.read_text() == "x\n"
    library.chmod(0o777)
    assert cpu_kernel._first_compiled([*cpu_kernel.LEVELS[-1:]]) and runs.read_text() == "x\nx\n"
    (library,) = directory.glob("*.so")
    assert library.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "variables, says",
    [
        ({cpu_kernel.VARIABLE: "off"}, ""),
        ({compile_cache.VARIABLE: "off"}, ""),
        ({"CXX": "/bin/false"}, "without pipejax's kernel"),
        ({"CXX": "no-such-compiler"}, "without pipejax's"),
    ],
)
def test_decoding_works_without_the_kernel(tmp_path, monkeypatch, variables, says, said):
    for name, value in ({compile_cache.VARIABLE: str(tmp_path)} | variables).items():
        monkeypatch.setenv(name, value)
    assert not cpu_kernel.use()
    assert says in "\n".join(said) and len(said) <= 2
    assert not list(tmp_path.glob("*.so"))


def test_unloadable_kernel_is_not_used_and_recompiled(tmp_path, monkeypatch, said):
    """Causes are an interrupted compiler, and a disk that forbids programs."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nfor last; do :; done\necho broken > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_kernel, "_tried", {})
    monkeypatch.setattr(cpu_kernel, "_registered", set())
    assert not cpu_kernel.use()
    assert "decoding runs without pipejax's kernel" in said[-1] and "cannot be loaded" in said[-1]
    assert not list((tmp_path / "cache").glob("*.so"))


def test_cache_writable_by_others_is_not_used(tmp_path, monkeypatch, said):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "cache"))
    assert compile_cache.safe_directory() is None
    assert "open to others" in said[0]
    monkeypatch.setenv(compile_cache.VARIABLE, str(tmp_path / "new"))
    assert compile_cache.safe_directory() == tmp_path / "new"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
