"""A decode in one launch, run on a CPU: its tokens equal those of the step decoder, and no wait is endless."""

import dataclasses
import importlib.util
import logging
import re
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab import launch
from lab.launch import nvrtc, trial
from lab.launch.emulated import SOURCES, blocks, register
from pipejax import decoding
from pipejax.config import T5Config
from pipejax.decoding import GREEDILY, Beam, DecodingOptions, Pipelined, Sampling, Sequential, Sizes
from pipejax.inference import backends
from pipejax.inference.backends import XLA
from pipejax.inference.programs import decode_batch, encode_batch
from pipejax.model.t5 import T5
from support import oracle

pytestmark = pytest.mark.slow

SMALL = T5Config(
    vocab_size=11,
    d_model=32,
    d_kv=16,
    d_ff=64,
    num_heads=2,
    num_layers=1,
    num_decoder_layers=2,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)
change = partial(dataclasses.replace, SMALL)
MODELS = {  # differences of published models: v1.0 and v1.1, more heads than width, fewer, other widths of heads
    "small": SMALL,
    "v1.1": change(d_ff=96, num_heads=6, feed_forward="gated-gelu", tied_head=False, scale_head=False, vocab_size=9),
    "large": change(d_model=64, d_ff=160, num_heads=4, num_decoder_layers=3, vocab_size=16),
    "silu": change(d_model=96, d_kv=32, num_heads=1, feed_forward="gated-silu", tied_head=False, vocab_size=10),
}
CASES: list[tuple[Any, int, int]] = [  # strategy, batch, blocks
    (Pipelined(1, 14, 5), 3, 4),
    (Pipelined(2, 12, 4, literal=True, other_ends=(4, 6)), 8, 3),
    (Pipelined(0, 9, 4), 2, 5),
    (Pipelined(3, 16, 6), 1, 2),
    (Sequential(15, other_ends=(5,)), 5, 3),
]


@pytest.fixture(autouse=True)
def registered(kernel_cache: Path) -> None:
    register(kernel_cache)


def fields(decoded: Any) -> list[np.ndarray]:
    """The fields of a decode, with zeros after the ends of rows."""
    real = np.arange(decoded.tokens.shape[2]) < np.asarray(decoded.lengths)[:, :, None]
    return [np.where(real, decoded.tokens, 0), *map(np.asarray, (decoded.lengths, decoded.steps, decoded.truncated))]


@cache
def programs(config: T5Config, strategy: Any, batch: int, by: Any = None, dtype: str = "float32") -> Any:
    """Functions from parameters and sources to memories, and from memories to decodes; `by`: blocks of a launch."""
    model, sizes = T5(config, dtype=jnp.dtype(dtype)), Sizes.fit(strategy, batch)

    @jax.jit
    def encode(params: Any, source: jax.Array, length: jax.Array) -> Any:
        ready = XLA.prepare(model, params)
        return ready.decoding, encode_batch(model, ready.encoding, source, length)

    static: Any = {"sizes": sizes, "slots": sizes.slots[-1]}

    def theirs(weights: Any, memory: Any) -> Any:
        return decode_batch(model, strategy, (weights, None), memory, None, **static)

    ours = partial(launch.decode_batch, model, strategy, backend=XLA, blocks=by, **static)
    return encode, jax.jit(ours if by else theirs)


def drawn(config: T5Config, batch: int, seed: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Random parameters, and sources of several lengths."""
    rng = np.random.default_rng(seed)
    params = jax.tree.map(jnp.asarray, oracle.random_params(config, rng))
    source = rng.integers(2, config.vocab_size, (batch, 12)).astype(np.int32)
    return params, source, rng.integers(1, 13, batch).astype(np.int32)


def check_decodes(name: str, case: int, seeds: range) -> int:
    """Compares decodes of random models with the step decoder; returns the number of rows that ended with eos."""
    config, (strategy, batch, count) = MODELS[name], CASES[case]
    encode, theirs = programs(config, strategy, batch)
    _, ours = programs(config, strategy, batch, blocks(count, dawdle=200))
    ended = 0
    for seed in seeds:
        encoded = encode(*drawn(config, batch, seed))
        (found, failed), expected = ours(*encoded), theirs(*encoded)
        assert not failed and found.over
        for one, other in zip(fields(found.decoded), fields(expected.decoded), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=f"{name}, {strategy}, model {seed}")
        ended += int((np.asarray(expected.decoded.truncated) == 0).sum())
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("name, case", [("small", 0), ("v1.1", 1)])
def test_tokens_equal_step_decoder(name: str, case: int) -> None:
    assert check_decodes(name, case, range(2))


@pytest.mark.long
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_more_random_models_equal_step_decoder(name: str, case: int) -> None:
    check_decodes(name, case, range(100 * case, 100 * case + 10))


@pytest.mark.parametrize(
    "name, case, steps",
    [("v1.1", 0, 5), *(pytest.param(x, i % 5, i, marks=pytest.mark.long) for i, x in enumerate(list(MODELS) * 3))],
)
def test_logits_in_bfloat16(name: str, case: int, steps: int) -> None:
    """Compares the logits of a step in the middle of a decode."""
    config, (strategy, batch, count) = MODELS[name], CASES[case]
    encode, _ = programs(config, strategy, batch, dtype="bfloat16")
    weights, memory = encode(*drawn(config, batch, 7))
    decoder: Any = XLA.decoder(T5(config, dtype=jnp.bfloat16), weights, memory)
    compared = jax.jit(partial(trial.compare, decoder, strategy, blocks(count), steps=steps))
    failed, apart = compared()
    assert not failed
    assert apart < 1e-2


def members(struct: str) -> list[str]:
    """The members of a struct in arguments.h."""
    text = re.sub(r"//.*", "", (SOURCES / "arguments.h").read_text())
    found = re.search(rf"struct {struct} {{(.*?)}};", text, re.DOTALL)
    assert found
    return re.findall(r"(\w+)(?:\[\w+\])?\s*(?=[,;])", found[1])


def test_arguments_are_in_the_order_of_the_structs() -> None:
    strategy, shape = Pipelined(1, 14, 5), SimpleNamespace(mask=np.zeros((2, 12)))
    weights = SimpleNamespace(bias=np.zeros((1, 2, 9)), layers=[None, None])
    decoder, carry = SimpleNamespace(config=SMALL, memory=shape, weights=weights), SimpleNamespace(used=[0])
    sizes: Any = {"sizes": Sizes.fit(strategy, 2), "slots": 30}
    numbers = launch.numbers_of(decoder, strategy, carry, **sizes, blocks=blocks())  # type: ignore[arg-type]
    assert [*numbers] == members("Numbers")
    assert (numbers["B"], numbers["R"], numbers["L"], numbers["distances"]) == (2, 5, 12, 9)
    assert [*launch._scratch(numbers, "float32")] == members("Scratch")
    assert (*launch.EXAMPLE, "used") == (*members("Example"),)
    assert (*launch.ROW, "live", "fed", "time") == (*members("Row"),)


def test_paused_decode_continues_with_either_decoder() -> None:
    """Pauses are after some steps, at the end of a watched example, and with a full cache; examples have own slots."""
    config, strategy, batch = change(num_decoder_layers=1), Pipelined(1, 12, 4), 3
    encode, theirs = programs(config, strategy, batch)
    for seed in range(40):
        weights, memory = encode(*drawn(config, batch, seed))
        expected = theirs(weights, memory)
        steps = np.asarray(expected.decoded.steps)
        if len(set(steps.tolist())) == batch and steps.min() > 4:
            break
    decoder, sizes = XLA.decoder(T5(config), weights, memory), Sizes.fit(strategy, batch, slots=(13,))
    small, large = sizes.slots

    @jax.jit
    def begin() -> Any:
        return decoding.begin(strategy, decoder, strategy.init(batch), sizes, apart=True)

    @partial(jax.jit, static_argnames=("slots", "by_launch"))
    def go_on(carry: Any, most: Any, watched: Any, slots: int, by_launch: bool) -> Any:
        given = {"sizes": sizes, "slots": slots, "pause_after": most, "watched": watched}
        if by_launch:
            return launch.decode(decoder, strategy, carry, **given, blocks=blocks(3))[0]
        return decoding.decode(strategy, decoder, carry, **given)

    nobody, watched = np.zeros(batch, bool), np.arange(batch) == steps.argmin()
    plan = [
        (np.int32(2), nobody, small),
        (np.int32(50), nobody, small),
        (np.int32(50), watched, large),
        (np.int32(50), nobody, large),
    ]
    turns = (True, True, True, True), (False, True, False, True), (True, False, True, False)
    seen = []
    for turn in turns:
        carry, lines = begin(), []
        for (most, watch, slots), by_launch in zip(plan, turn, strict=True):
            found = go_on(carry, most, watch, slots, by_launch)
            carry = found.carry
            lines.append(
                [int(found.over), int(found.steps_left), *np.asarray(carry.used), *np.asarray(found.decoded.steps)]
            )
        seen.append(lines)
        for one, other in zip(fields(found.decoded), fields(expected.decoded), strict=True):
            np.testing.assert_array_equal(one, other)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0][1] == 0 and 0 < seen[0][1][1] < 50 and not seen[0][2][0] and seen[0][3][0]


def test_each_step_equals_step_decoder() -> None:
    """Cases include steps without open rows, and batches with finished and truncated examples."""
    config, strategy, batch = change(num_decoder_layers=1), Pipelined(4, 11, 4), 3
    encode, _ = programs(config, strategy, batch)
    static: Any = {"sizes": (sizes := Sizes.fit(strategy, batch)), "slots": sizes.slots[-1]}

    @jax.jit
    def begin(weights: Any, memory: Any) -> Any:
        return decoding.begin(strategy, XLA.decoder(T5(config), weights, memory), strategy.init(batch), sizes)

    @jax.jit
    def take_step(weights: Any, memory: Any, carry: Any) -> Any:
        decoder, one = XLA.decoder(T5(config), weights, memory), jnp.int32(1)
        found, failed, _ = launch.decode(decoder, strategy, carry, **static, pause_after=one, blocks=blocks(2))
        return found, failed, decoding.decode(strategy, decoder, carry, **static, pause_after=one)

    jumped = waited_cut = jumped_to_end = 0
    for seed in range(20):
        weights, memory = encode(*drawn(config, batch, seed))
        carry, before, is_over = begin(weights, memory), np.zeros(batch, int), False
        while not is_over:
            found, failed, expected = take_step(weights, memory, carry)
            for one, other in zip(fields(found.decoded), fields(expected.decoded), strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"model {seed}")
            assert not failed and found.over == expected.over
            carry, is_over = found.carry, bool(found.over)
            steps, done = np.asarray(expected.decoded.steps), np.asarray(expected.carry.state.done)
            is_cut = done & (np.asarray(expected.decoded.truncated) > 0)
            jumped += int((steps > before + 1).sum())
            jumped_to_end += int(((steps > before + 1) & (steps == strategy.time_max)).sum())
            waited_cut += int(is_cut.any() and not is_over)
            before = steps
    assert jumped and waited_cut and jumped_to_end


def test_missing_block_is_reported() -> None:
    config, strategy = SMALL, Sequential(6)
    encode, _ = programs(config, strategy, 2)
    _, ours = programs(config, strategy, 2, blocks(3, absent=1, patience=300))
    _, failed = ours(*encode(*drawn(config, 2, 0)))
    assert failed


def test_unsupported_settings_do_not_use_the_kernel() -> None:
    config, strategy = SMALL, Pipelined(1, 12, 4)

    def fits(
        config: T5Config = config, strategy: Any = strategy, batch: int = 2, options: Any = GREEDILY, **more: Any
    ) -> bool:
        backend = backends.Xla(**more)
        params, source, length = drawn(config, 1, 0)
        ready = jax.eval_shape(partial(backend.prepare, T5(config)), params)
        memory = jax.eval_shape(partial(encode_batch, T5(config), backend=backend), ready.encoding, source, length)
        decoder: Any = backend.decoder(T5(config), ready.decoding, memory)
        return launch.fits(decoder, strategy, batch, options)

    assert fits()
    assert fits(batch=64)
    assert not fits(batch=65)
    assert not fits(strategy=Pipelined(1, 12, 4, unique=True))
    assert not fits(strategy=Beam(12, 3))
    assert fits(strategy=Pipelined(1, 12, 4, other_ends=(2, 3, 4, 5, 6, 7, 8)))
    assert not fits(strategy=Pipelined(1, 12, 4, other_ends=(2, 3, 4, 5, 6, 7, 8, 9)))
    assert not fits(options=DecodingOptions(sampling=Sampling(1.0)))
    assert not fits(options=DecodingOptions(scores=True))
    assert not fits(config=change(d_ff=80))
    assert not fits(config=change(d_kv=8))
    assert not fits(weights="bfloat16")
    assert not fits(weights="int8")


@pytest.mark.slow
def test_trial_of_the_kernel_passes() -> None:
    assert trial.agrees(blocks(3))


def test_kernel_is_tried_before_use(caplog, monkeypatch) -> None:
    monkeypatch.setattr(trial, "_decoder", lambda: None)
    monkeypatch.setattr(trial, "compare", lambda *_, **__: (jnp.asarray(False), jnp.asarray(0.01)))
    assert trial.agrees(blocks(3))
    said = []
    for found in ((False, 0.07), (True, 0.0), (False, float("nan"))):
        monkeypatch.setattr(trial, "compare", lambda *_, found=found, **__: tuple(map(jnp.asarray, found)))
        with caplog.at_level(logging.WARNING):
            assert not trial.agrees(blocks(3))
        said.append(caplog.records[-1].message.partition(": ")[2])
    why = "its logits are off by 0.07", "its blocks wait too long", "its logits are off by nan"
    assert said == [f"on this device {x}" for x in why]
    monkeypatch.setattr(trial, "compare", lambda *_, **__: 1 / 0)
    assert not trial.agrees(blocks(3))
    assert caplog.records[-1].message == "decoding does not use one launch: division by zero"


def test_missing_nvrtc_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(OSError, match="found no NVRTC; expected the package nvidia-cuda-nvrtc"):
        nvrtc.ptx(3, 1, "90")
