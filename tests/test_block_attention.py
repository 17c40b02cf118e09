"""Attention in blocks is compared with `attend`; the kernels for GPUs run as ordinary computations."""

import os
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import grid
from pipejax.config import Config, MeshConfig, TrainConfig
from pipejax.inference import programs
from pipejax.inference.backends import XLA
from pipejax.kernels import block_attention, child_trials
from pipejax.kernels.block_attention import attend_in_blocks
from pipejax.model import backbone, dropout, layers
from pipejax.model.attention import attend
from pipejax.model.backbone import choose_blocks
from pipejax.model.layers import buckets
from pipejax.model.sharding import batch_sharding, make_mesh
from pipejax.model.slots import Blocks, Distances, Seen, Slots
from pipejax.model.t5_config import ARCHITECTURES, T5Config
from pipejax.system import distributed
from pipejax.training import step
from pipejax.training.step import batch_loss

Array = jax.Array
LONGEST = 128  # all larger distances share one bucket


def bidirectional() -> np.ndarray:
    half = buckets(np.arange(LONGEST + 1), count=16, longest=LONGEST)
    return np.concatenate([half[:0:-1] + 16, half])


def backwards() -> np.ndarray:
    return np.concatenate([np.zeros(LONGEST, np.int32), buckets(np.arange(LONGEST + 1), count=32, longest=LONGEST)])


def encoder(rng: np.random.Generator, batch: int, length: int) -> tuple[Slots, Slots, np.ndarray | None]:
    real = rng.integers(0, length + 1, batch)
    position = np.broadcast_to(np.arange(length), (batch, length))
    slots = Slots(np.where(position < real[:, None], 0, -1), position=position, consecutive=bool(rng.integers(0, 4)))
    return slots, slots, bidirectional()


def decoder(rng: np.random.Generator, batch: int, length: int) -> tuple[Slots, Slots, np.ndarray | None]:
    """Sequences of several targets, with any Δt, and padding."""
    every: list[Any] = []
    for _ in range(batch):
        delay = int(rng.integers(0, 4))
        parts: list[Any] = []
        while sum(len(part[0]) for part in parts) < length:
            rows = [[2] * int(n) for n in rng.integers(0, 12, rng.integers(1, 6))]
            flat = grid.flatten(rows, delay=delay, bos=0, eos=1)
            parts.append((np.full(len(flat.row), len(parts)), flat.row, flat.time))
        group, row, time = (np.concatenate(x)[:length] for x in zip(*parts, strict=True))
        group = np.where(np.arange(length) < length - rng.integers(0, length // 4 + 1), group, -1)
        every.append((group, row, time, row + time))
    group, row, time, position = (np.stack(x) for x in zip(*every, strict=True))
    slots = Slots(group, row, time, position)
    return slots, slots, backwards()


def across(rng: np.random.Generator, batch: int, queries: int, keys: int) -> tuple[Slots, Slots, np.ndarray | None]:
    """Slots that see the sources of their own examples; some examples have no source."""
    of_queries, of_keys = (
        np.sort(rng.integers(0, count, (batch, n)), axis=1) for n, count in ((queries, 4), (keys, 3))
    )
    return Slots(of_queries), Slots(np.where(rng.random((batch, keys)) < 0.2, -1, of_keys)), None


def visible(of_queries: Slots, of_keys: Slots) -> np.ndarray:
    seen: Any = (of_queries.example[:, :, None] == of_keys.example[:, None]) & (of_keys.example >= 0)[:, None]
    if of_queries.row is not None:
        places = of_queries.row, of_queries.time, of_keys.row, of_keys.time
        q_row, q_time, k_row, k_time = (x[:, :, None] if n < 2 else x[:, None] for n, x in enumerate(places))
        seen = seen & grid.visible(q_row, q_time, k_row, k_time)
    if of_queries.group is not None:
        seen = seen & ((of_keys.group[:, None] == of_queries.group[:, :, None]) | (of_keys.group == 0)[:, None])
    return np.asarray(seen)


def apart(
    rng: np.random.Generator,
    slots: tuple[Slots, Slots, np.ndarray | None],
    *,
    width: int = 16,
    rate: float = 0.0,
    dtype: Any = jnp.float32,
    scale: float = 1.0,
    heads: int = 2,
    arrays: int | None = None,
) -> list[float]:
    """The largest differences of results and gradients from those of `attend`, relative to the largest or to 1.

    `arrays`: the number of arrays with queries, keys and values. None: as in a T5, one in self-attention, and two in
    cross-attention.
    """
    of_queries, of_keys, bucket = slots
    arrays = arrays or (2 if bucket is None else 1)
    (batch, queries), keys = of_queries.example.shape, of_keys.example.shape[1]
    q, k, v = (
        jnp.asarray(rng.standard_normal((batch, heads, n, width)) * size, dtype)
        for n, size in ((queries, scale * width**-0.25), (keys, width**-0.25), (keys, 1.0))
    )
    table = jnp.asarray(rng.standard_normal((32, heads)), jnp.float32)
    seed = jnp.asarray(rng.integers(0, 2**32, 2), jnp.uint32) if rate else None
    seen: Any = visible(of_queries, of_keys)
    gradient = jnp.asarray(rng.standard_normal((batch, heads, queries, width)), jnp.float32)
    places = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32), (of_queries, of_keys, bucket))
    return [float(x) for x in compared((q, k, v, table), *places, jnp.asarray(seen), seed, gradient, rate, arrays)]


@partial(jax.jit, static_argnums=(7, 8))
def compared(
    given: tuple[Array, ...],
    of_queries: Slots,
    of_keys: Slots,
    bucket: Array | None,
    seen: Array,
    seed: Array | None,
    gradient: Array,
    rate: float,
    arrays: int,
) -> list[Array]:
    some = seen.any(-1)[:, None, :, None]

    def whole(q: Array, k: Array, v: Array, table: Array) -> Array:
        bias = jnp.where(seen[:, None], 0.0, -1e9)
        if bucket is not None:
            back = jnp.clip(of_queries.position[:, :, None] - of_keys.position[:, None], -LONGEST, LONGEST)
            bias += jnp.moveaxis(table[bucket[back + LONGEST]], -1, 1)
        return jnp.where(some, attend(q, k, v, bias, seed, rate).astype(jnp.float32), 0)

    def in_blocks(q: Array, k: Array, v: Array, table: Array) -> Array:
        distances = None if bucket is None else Distances(table, bucket)
        there = Seen(of_queries, of_keys, distances, Blocks(interpret=True))
        together: Any = {1: ((q, k, v), (), ()), 2: ((q,), (k, v), ()), 3: ((q,), (k,), (v,))}[arrays]
        first, *others = (jnp.concatenate(each, axis=1) if each else None for each in together)
        assert first is not None
        return attend_in_blocks(first, others[0], others[1], there, seed, rate).astype(jnp.float32)

    def computed(function: Any) -> Any:
        found, back = jax.vjp(function, *given)
        return found, *back(gradient * some)

    def difference(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.abs(a - b).max() / jnp.maximum(jnp.abs(a).max(), 1.0)  # a gradient may be 0 except for rounding

    return [difference(a, b) for a, b in zip(computed(whole), computed(in_blocks), strict=True)]


@pytest.mark.slow
def test_packed_grid_with_dropout_equals_attend() -> None:
    rng = np.random.default_rng(0)
    assert max(apart(rng, decoder(rng, 1, 70), rate=0.1, heads=1)) < 1e-5
    # The same program with distant places: whole blocks of pairs have one of the two outermost buckets.
    none = np.zeros((1, 70), np.int64)
    far = Slots(none, none, none, 200 * np.arange(70)[None])
    assert max(apart(rng, (far, far, bidirectional()), rate=0.1, heads=1)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_groups_of_rows_equal_attend(first: int, has_rows: bool) -> None:
    """Rows have 10 tokens, in groups of 8 rows: some whole blocks see each other, and some do not; all see group 0."""
    place, real = np.arange(230)[None], np.where(np.arange(230) < np.array([[230], [171]]), 0, -1)
    row, time, group = (np.broadcast_to(x, real.shape) for x in (place // 10, place % 10, first + place // 80))
    far = np.broadcast_to(200 * place, real.shape)  # all distances of two slots have one of the two outermost buckets
    rng = np.random.default_rng(9)
    slots = Slots(real, row, time, row + time, group) if has_rows else Slots(real, position=far, group=group)
    assert visible(slots, slots)[0].any(axis=1).all() and not visible(slots, slots)[0, 229, 80:160].any()
    assert max(apart(rng, (slots, slots, backwards()), rate=0.1)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_source_attention_equals_attend(rate: float) -> None:
    rng = np.random.default_rng(1)
    assert max(apart(rng, encoder(rng, 2, 300), rate=rate)) < 1e-5


@pytest.mark.slow
def test_slots_attend_to_their_own_sources() -> None:
    rng = np.random.default_rng(2)
    assert max(apart(rng, across(rng, 2, 50, 131), rate=0.1)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("length", [100, *(pytest.param(n, marks=pytest.mark.slow) for n in (40, 200))])
def test_the_band_of_whole_sources_has_the_gradient_of_the_bias(length: int) -> None:
    """The sources have no padding, and their lengths are no multiples of the blocks."""
    position = np.broadcast_to(np.arange(length), (2, length))
    slots = Slots(np.zeros((2, length), np.int32), position=position, consecutive=True)
    differences = apart(np.random.default_rng(length), (slots, slots, bidirectional()), rate=0.1)
    assert max(differences) < 1e-5, differences


@pytest.mark.slow
def test_large_scores_stay_finite() -> None:
    rng = np.random.default_rng(3)
    found, _, _, d_values, _ = differences = apart(rng, encoder(rng, 2, 80), scale=1e4)
    # One weight is 1 and the others are 0: other gradients are 0 except for rounding, so only their size is compared.
    # The gradient of the values computes scores of 1e4 again, with products in another order: they differ by 0.004.
    assert found < 1e-5 and d_values < 1e-2 and np.isfinite(differences).all()


def differences(number: int) -> tuple[list[float], float]:
    """The differences of a random case, and their bounds. Ten cases each share their sizes, and one program."""
    rng, half = np.random.default_rng(number // 10), number // 10 % 5 == 4
    length, queries, batch = int(700 ** rng.random()), int(200 ** rng.random()), int(rng.integers(1, 4))
    width, rate = int(rng.choice([32, 64, 128])), float(rng.choice([0.0, 0.1]))
    rng, loud = np.random.default_rng((1, number)), number % 5 == 3
    kind = number // 10 % 3
    slots = across(rng, batch, queries, length) if kind == 2 else (encoder, decoder)[kind](rng, batch, length)
    dtype, scale = jnp.bfloat16 if half else jnp.float32, 1e4 if loud else 1.0
    arrays = None if number // 30 % 2 else 3
    found = apart(rng, slots, width=width, rate=rate, dtype=dtype, scale=scale, arrays=arrays)
    # If scores are large, one weight is 1: gradients of queries, keys and table are 0 except for rounding.
    # In bfloat16, sums of products cancel to about 0.05 if a query sees a single key, whose gradient is 0.
    return ([found[0], found[3]], 0.1) if loud else (found, 0.1 if half else 2e-5)


@pytest.mark.long
@pytest.mark.parametrize("number", range(int(os.environ.get("PIPEJAX_TEST_CASES", "60"))))
def test_random_attention_equals_the_reference(number: int) -> None:
    found, most = differences(number)
    assert max(found) < most


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "layers"])
def test_training_step_equals_step_with_arrays(remat: str) -> None:
    """The loss and all gradients, including those of bias tables, are equal with the same bits of dropout."""
    config = T5Config(100, 32, 16, 64, 2, 1, 1)
    rng = np.random.default_rng(4)
    newborn = config.init_params(jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), jnp.float32), newborn)
    batch = packed(rng, examples=4, groups=2, length=70, slots=90)

    def computed(blocks: Blocks | None) -> Any:
        model = config.module(dropout=0.1, remat=remat, blocks=blocks)
        loss = lambda params: batch_loss(model, params, batch, jax.random.key(1))  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    ((expected, count), gradients), ((found, same_count), same_gradients) = (
        computed(None),
        computed(Blocks(interpret=True)),
    )
    assert count == same_count
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(same_gradients), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


def packed(rng: np.random.Generator, *, examples: int, groups: int, length: int, slots: int) -> dict[str, Array]:
    """A batch of random examples, several in each sequence."""
    whole = {name: np.zeros((groups, slots), np.int32) for name in ("inputs", "targets", "row", "time", "example")}
    weights, used = np.zeros((groups, slots), np.float32), np.zeros(groups, np.int32)
    for group in range(groups):
        for example in range(examples // groups):
            rows = [list(rng.integers(2, 100, rng.integers(1, 9))) for _ in range(3)]
            flat = grid.flatten(rows, delay=1, bos=0, eos=1)
            place = slice(used[group], used[group] + len(flat.row))
            for name in ("inputs", "targets", "row", "time"):
                whole[name][group, place] = getattr(flat, name)
            whole["example"][group, place], weights[group, place] = example, flat.weights
            used[group] = place.stop
    source = rng.integers(2, 100, (examples, length)).astype(np.int32)
    of_source = {"source": source, "source_length": rng.integers(10, length + 1, examples).astype(np.int32)}
    return {name: jnp.asarray(x) for name, x in (whole | of_source | {"weights": weights, "slots": used}).items()}


@pytest.mark.parametrize(
    "over_sources, length", [(False, 17), *(pytest.param(True, n, marks=pytest.mark.slow) for n in (17, 32))]
)
def test_packed_examples_have_the_masks_of_attend(over_sources: bool, length: int) -> None:
    """The bits of the kernel are read from values of one column each; examples begin at odd columns."""
    rng, count = np.random.default_rng(11), 64
    example = np.searchsorted([13, 40], np.arange(count), side="right")[None].astype(np.int32)
    q, k = (rng.standard_normal((1, 2, count, 64)).astype(np.float32) for _ in "qk")
    values, seed = np.tile(np.eye(count, dtype=np.float32), (1, 2, 1, 1)), np.asarray([3, 4], np.uint32)

    @jax.jit
    def attended(q: Array, k: Array, values: Array, seed: Array) -> tuple[Any, Any]:
        with dropout.numbered(jnp.asarray([5, 0, 9]), length, jnp.asarray(example)):
            seen = Seen(Slots(example * 0), Slots(example * 0), None, Blocks(interpret=True))
            found = attend_in_blocks(q, k, values, seen, seed, 0.5, over_sources=over_sources)
            return found, attend(q, k, values, jnp.zeros((1, 1, 1, 1)), seed, 0.5, over_sources=over_sources)

    found, expected = map(np.asarray, attended(q, k, values, seed))
    np.testing.assert_array_equal(found == 0, expected == 0)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert 0.45 < float((found == 0).mean()) < 0.55


@pytest.mark.long
def test_trial_accepts_correct_kernels() -> None:
    found = (float(block_attention.difference(32, trains=trains, interpret=True)) for trains in (False, True))
    assert all(0 < each < block_attention.TOLERANCE for each in found)


@pytest.mark.slow
def test_several_devices_attend_for_their_own_examples() -> None:
    """Bits of dropout equal those of one device, and so does the gradient of the shared table."""
    rng, mesh = np.random.default_rng(6), make_mesh(2, 2, 1)
    slots, _, bucket = jax.tree.map(jnp.asarray, decoder(rng, 4, 20))
    given = [jnp.asarray(rng.standard_normal((4, 2, 20, 16)), jnp.float32) for _ in "qkv"]
    table, seed = jnp.asarray(rng.standard_normal((32, 2)), jnp.float32), jnp.asarray([5, 7], jnp.uint32)

    def computed(blocks: Blocks) -> Any:
        def attended(q: Array, k: Array, v: Array, table: Array) -> Array:
            seen = Seen(slots, slots, Distances(table, bucket), blocks)
            return attend_in_blocks(q, k, v, seen, seed, 0.5)

        found, back = jax.vjp(attended, *given, table)
        return found, back(jnp.sin(jnp.arange(found.size, dtype=jnp.float32)).reshape(found.shape))

    one, several = (jax.jit(partial(computed, Blocks(split, True)))() for split in (None, batch_sharding(mesh)))
    assert several[0].sharding.num_devices == 4
    for a, b in zip(jax.tree.leaves(several), jax.tree.leaves(one), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()))


def test_each_device_has_the_slots_and_lines_of_its_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(projections: tuple[Array, ...], seen: Seen, lines: Any, rate: float) -> Array:
        queries, *_ = projections
        assert queries.shape == (2, 5, 3, 16) and seen.queries.example.shape == (2, 5)
        number = (lines.hashes[:, 0, :1] % 1000 + 1000 * seen.queries.example[:, :1]).astype(jnp.float32)
        return jnp.broadcast_to(number[..., None, None], queries.shape)

    monkeypatch.setattr(block_attention, "_attend_alone", alone)
    x, group = jnp.zeros((8, 3, 5, 16)), jnp.broadcast_to(jnp.arange(8)[:, None], (8, 5))
    seen = Seen(Slots(group), Slots(group), None, Blocks(batch_sharding(make_mesh(2, 2, 1))))
    found = jax.jit(attend_in_blocks, static_argnums=5)(x, x, x, seen, jnp.asarray([7, 9], jnp.uint32), 0.1)
    hashes = dropout.of_heads(dropout.lines(jnp.asarray([7, 9], jnp.uint32), (8, 5)), 3).hashes[:, 0, 0] % 1000
    assert found[:, 0, 0, 0].tolist() == [1000 * n + int(x) for n, x in enumerate(hashes)]


GPU: Any = SimpleNamespace(platform="cuda")


def test_stock_t5_uses_block_attention_on_a_gpu() -> None:
    split = batch_sharding(make_mesh(2, 1, 1))
    assert choose_blocks(ARCHITECTURES["base"], GPU, split) == Blocks(split)
    assert choose_blocks(ARCHITECTURES["base"], jax.devices()[0]) is None


class Foreign(T5Config):
    """A subclass without any declaration about its attention."""


@pytest.mark.parametrize(
    "config, mesh, line",
    [
        (T5Config(9, 16, 48, 16, 1, 1, 1), (1, 1, 1), "the width of heads, 48, is not a power of two"),
        (T5Config(9, 16, 8, 16, 1, 1, 1), (1, 1, 1), "the width of heads, 8, is not a power of two"),
        (ARCHITECTURES["base"], (2, 1, 2), "mesh.tensor=2 splits heads"),
        (Foreign(9, 16, 64, 16, 1, 1, 1), (1, 1, 1), "Foreign has no head_width"),
    ],
)
def test_reason_for_attention_by_arrays_is_logged_once(
    config: T5Config, mesh: tuple[int, int, int], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    backbone._warn.cache_clear()
    for _ in range(2):
        assert choose_blocks(config, GPU, batch_sharding(make_mesh(*mesh))) is None
    assert caplog.text.count(f"attention keeps arrays of queries by keys, which is slow: {line}") == 1


def test_processes_of_a_run_compile_the_same_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the trial of one process fails, no process attends in blocks."""
    backbone._warn.cache_clear()
    sharding = batch_sharding(make_mesh(1, 1, 1))
    assert choose_blocks(ARCHITECTURES["base"], GPU, sharding) is not None
    monkeypatch.setattr(distributed, "gather_texts", lambda why: [why, "its trial failed", "another"])
    assert choose_blocks(ARCHITECTURES["base"], GPU, sharding) is None
    assert choose_blocks(ARCHITECTURES["base"], GPU) is not None  # decoding
    assert "which is slow: its trial failed" in caplog.text


def test_changed_t5_attends_by_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "attend", lambda *given: None)
    assert choose_blocks(ARCHITECTURES["base"], GPU) is None


def test_wrong_kernels_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are tested by their difference from `attend`; an error of the compiler counts as well."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for found, line in ((0.01, ""), (0.2, "on this GPU the kernels' results differ"), (np.nan, "on this GPU")):
        monkeypatch.setattr(block_attention, "difference", lambda width, trains, found=found: found)
        said = block_attention.disagreement(64, True)
        assert said.startswith(line) and bool(said) == bool(line)


@pytest.mark.parametrize("trains", [False, True])
def test_the_verdict_of_a_trial_decides(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial runs in a child process: this one calls no kernel."""
    asked: list[Any] = []

    def refusal(*given: Any) -> str:
        asked.append(given)
        return "their trial failed"

    monkeypatch.setattr(child_trials, "refusal", refusal)
    assert block_attention.misfit(64, trains=trains) == ""  # this machine has no GPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(block_attention, "attend_in_blocks", None)
    assert block_attention.misfit(64, trains=trains) == "their trial failed"
    assert [given[1:] for given in asked] == [("pipejax.kernels.block_attention:disagreement", 64, trains)]
    assert block_attention.misfit(48, trains=trains).startswith("the width of heads, 48,") and len(asked) == 1


def test_the_trial_runs_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels would pass on a GPU whose compiler makes mistakes."""

    def stop(*given: Any) -> None:
        raise RuntimeError(f"interpret={given[3].blocks.interpret}")

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(block_attention, "attend_in_blocks", stop)
    with pytest.raises(RuntimeError, match="interpret=False"):
        block_attention.disagreement(64, False)


def test_decoding_and_training_use_block_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice depends on the device and the mesh."""
    asked: list[Any] = []

    def choose(*given: Any) -> Blocks:
        asked.append(given)
        return Blocks()

    for room in (programs, step):
        monkeypatch.setattr(room, "choose_blocks", choose)
    config, device = T5Config(100, 32, 16, 64, 2, 1, 1), jax.devices()[1]
    assert programs.Programs(config, jnp.dtype(jnp.float32), devices=[device]).model.blocks == Blocks()
    whole = Config(model=config, train=TrainConfig(batch_size=8), mesh=MeshConfig(data=2))
    assert step.Trainer(whole).model.blocks == Blocks()
    assert asked[0] == (config, device) and asked[1][2].mesh.size == 2


@pytest.mark.slow
def test_encoding_equals_encoding_with_arrays() -> None:
    rng, config = np.random.default_rng(8), T5Config(100, 32, 16, 64, 2, 1, 1)
    params = jax.tree.map(
        lambda x: 0.3 * rng.standard_normal(x.shape, np.float32), jax.eval_shape(config.init_params, jax.random.key(0))
    )
    source, length = jnp.asarray(rng.integers(2, 100, (2, 70)), jnp.int32), jnp.asarray([70, 31])
    found = [
        programs.encode_batch(
            config.module(blocks=blocks), XLA.prepare(config.module(), params).encoding, source, length
        )
        for blocks in (None, Blocks(interpret=True))
    ]
    for a, b in zip(found[0].keys + found[0].values, found[1].keys + found[1].values, strict=True):
        np.testing.assert_allclose(a[0], b[0], atol=1e-5)
    np.testing.assert_allclose(found[0].values[0][1, :, :31], found[1].values[0][1, :, :31], atol=1e-5)
