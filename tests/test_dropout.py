"""Dropout's masks: their rate, their independence, and equal masks in the backward pass."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.apps import demo
from pipejax.backbones.t5gemma import GemmaStack, T5GemmaConfig
from pipejax.backbones.t5gemma2 import T5Gemma2Config
from pipejax.backbones.umt5 import UMT5Config
from pipejax.data.batches import TrainingBatches, collate
from pipejax.data.encoding import encode_example
from pipejax.model import dropout, layers, sharding, t5
from pipejax.training.step import Trainer, batch_loss, split_into_parts
from support.oracle import random_params
from support.tiny import DEEP, MODEL, STEP, change


def masks(count, shape, rate):
    keys = jax.random.split(jax.random.key(0), count)
    return np.stack([dropout.mask(dropout.make_seed(key), shape, rate) for key in keys])


def independent(a, b):
    """Whether the correlation of two masks is at most five standard deviations of chance."""
    a, b = (x.astype(np.float64).ravel() - x.mean() for x in (a, b))
    return abs((a * b).mean() / (a.std() * b.std())) < 5 / np.sqrt(a.size)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(64, 1024), (2, 4, 64, 128), (65536, 1), (1, 65536)], ids=str)
def test_every_place_is_dropped_at_the_rate(shape, rate):
    drawn = masks(8, shape, rate)
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(1 - drawn.mean() - rate) < 5 * deviation / np.sqrt(drawn.size)
    for axis in range(1, drawn.ndim):  # each row, column, head, ... has the same share
        means = 1 - drawn.mean(axis=axis)
        size = drawn.shape[axis]
        assert means.std() < 1.1 * deviation / np.sqrt(size) + 0.01
    lines = drawn.reshape(len(drawn), -1).mean(axis=1)
    assert np.abs(1 - lines - rate).max() < 5 * deviation / np.sqrt(drawn[0].size)


def test_masks_of_two_seeds_rows_and_places_are_independent():
    drawn = masks(6, (2, 4, 128, 256), 0.5)
    for i in range(len(drawn)):
        for j in range(i):
            assert independent(drawn[i], drawn[j])
    one = drawn[0]
    for shift in (1, 2, 3, 64):
        for axis in range(one.ndim):
            if shift < one.shape[axis]:
                near, far = np.split(one, [one.shape[axis] - shift], axis)[0], np.split(one, [shift], axis)[1]
                assert independent(near, far), (axis, shift)
    diagonal = one[:, :, :-1, :-1], one[:, :, 1:, 1:]
    assert independent(*diagonal)


def test_runs_of_dropped_places_have_the_expected_lengths():
    """Pairs, triples and quadruples of neighbours are counted, in which a weak hash shows first."""
    flat = masks(4, (256, 1024), 0.5).astype(np.int64)
    for width in (2, 3, 4):
        for axis in (1, 2):
            windows = np.lib.stride_tricks.sliding_window_view(flat, width, axis=axis)[:, ::width, ::width]
            codes = (windows * 2 ** np.arange(width)).sum(-1).ravel()
            counts = np.bincount(codes, minlength=2**width)
            expected = len(codes) / 2**width
            assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


def test_gradient_has_the_mask_of_the_value_and_sums_are_kept():
    x, seed = jnp.ones((200, 300)), dropout.make_seed(jax.random.key(1))
    value, back = jax.vjp(lambda x: dropout.drop(x, seed, 0.25), x)
    assert set(np.unique(value)) == {np.float32(0), np.float32(1) / np.float32(0.75)}
    np.testing.assert_array_equal(back(x)[0], value)
    assert abs(float(value.mean()) - 1) < 0.02


def test_a_mask_is_the_same_in_parts_on_many_devices():
    seed = dropout.make_seed(jax.random.key(2))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", None, "b"))
    drawn = jax.jit(lambda seed: dropout.mask(seed, (8, 5, 64), 0.3), out_shardings=spread)(seed)
    np.testing.assert_array_equal(drawn, dropout.mask(seed, (8, 5, 64), 0.3))


def test_nothing_is_dropped_without_a_rate_or_in_decoding():
    x = jnp.ones((3, 4))
    assert layers.Dropout(0.0).apply({}, x, False) is x and layers.Dropout(0.5).apply({}, x, True) is x
    rngs = {"dropout": jax.random.key(0)}
    assert not layers.Dropout(0.5).apply({}, jnp.ones((30, 40)), False, rngs=rngs).all()


def test_bits_match_definition():
    """The definition is in plain Python, for an array of any axes."""

    def mixed(x):
        for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> shift)) * multiplier % 2**32
        return x ^ (x >> 16)

    golden, (first, second), rate = 0x9E3779B9, (2**31 + 5, 77), 0.1
    shape = 3, 5, 2, 41
    found = np.asarray(dropout.mask(jnp.asarray([first, second], jnp.uint32), shape, rate))
    for example, token, head, column in np.ndindex(shape):
        line = mixed(mixed((example * golden + token + first) % 2**32) ^ second)
        line = mixed((line + (head + 1) * golden) % 2**32)
        group, within = divmod(column, 16)
        bits = mixed((line + (8 * group + within % 8) * golden) % 2**32)
        half = bits % 2**16 if within < 8 else bits // 2**16
        assert found[example, token, head, column] == (half >= 6554)  # 0.1 x 2**16, rounded


@pytest.mark.parametrize("rate, dropped", [(0.1, 6554), (0.5, 2**15), (1e-9, 1), (1 - 1e-9, 2**16 - 1), (0.0, 0)])
def test_a_rate_is_a_multiple_of_two_to_the_minus_16(rate, dropped):
    assert dropout.threshold(rate) == dropped and dropout.share_kept(rate) == 1 - dropped / 2**16


def test_dropout_keeps_mean_at_rounded_rate():
    rate = 2**-16 * 1.4  # rounds to one in 2**16
    value = np.asarray(dropout.drop(jnp.ones((64, 2**16)), jnp.asarray([1, 2], jnp.uint32), rate))
    assert set(np.unique(value)) == {0, np.float32(1 / (1 - 2**-16))} and abs(value.mean() - 1) < 3e-5


def test_dropout_is_independent_across_shared_hashes_and_heads():
    lines = dropout.lines(jnp.asarray([8, 9], jnp.uint32), (16, 64))
    drawn = np.asarray(dropout.mask_of(dropout.of_heads(lines, 6), 256, 0.5))
    pairs = drawn.reshape(*drawn.shape[:-1], -1, 2, 8)
    assert independent(pairs[..., 0, :], pairs[..., 1, :])
    for head in range(1, 6):
        assert independent(drawn[:, 0], drawn[:, head])
    assert independent(drawn[:, 0], np.asarray(dropout.mask_of(lines, 256, 0.5)))  # a share of the token's features


def test_masks_follow_examples_into_packed_rows_and_parts():
    """An example has the same bits alone, packed with others at an odd slot, padded, or in another part."""
    sizes, length, seed = {4: 5, 0: 9, 7: 3, 2: 6}, 6, jnp.asarray([3, 1], jnp.uint32)

    def drawn(numbers, example, *, over_sources):
        with dropout.numbered(jnp.asarray(numbers), length, jnp.asarray(example)):
            lines = dropout.lines(seed, np.shape(example), over_sources=over_sources)
            return np.asarray(dropout.mask_of(lines, 40, 0.5))

    def of_sources(numbers, example, shape):
        with dropout.numbered(jnp.asarray(numbers), length, jnp.asarray(example)):
            return np.asarray(dropout.mask(seed, (*shape, 8), 0.5))

    alone = {
        number: {over: drawn([number], np.zeros((1, 12), int), over_sources=over)[0] for over in (False, True)}
        for number in sizes
    }
    rows = [[4, 0], [7, 2]]
    example = [np.pad(np.repeat([0, 1], [sizes[n] for n in row]), (0, 16 - sum(sizes[n] for n in row))) for row in rows]
    for over in (False, True):
        packed = drawn([*rows[0], *rows[1]], example, over_sources=over)
        for number, row, at in ((4, 0, 0), (0, 0, 5), (7, 1, 0), (2, 1, 3)):
            size = sizes[number]
            column = (rows[row].index(number) * length) if over else at
            count = length if over else size
            np.testing.assert_array_equal(
                packed[row, at : at + size, column : column + count], alone[number][over][:size, :count]
            )
    whole = of_sources([4, 0, 7, 2], example, (4, length))
    part = of_sources([7, 2], example[1:], (2, length))
    np.testing.assert_array_equal(part, whole[2:])
    assert independent(whole[0], whole[1])


def demo_batch(tokenizer, pack):
    config = change(STEP, grid={"delay": 1})
    encoded = [encode_example(e, tokenizer, config, MODEL) for e in demo.examples("train")[:8]]
    return jax.tree.map(jnp.asarray, collate(encoded, pack).arrays)


def loss_of(model, params, arrays, parts=1):
    """The loss in several parts, with dropout."""
    key = jax.random.key(4)
    if parts == 1:
        return float(jax.jit(lambda p, batch: batch_loss(model, p, batch, key)[0])(params, arrays))
    compute = jax.jit(lambda p, batch, part: batch_loss(model, p, batch, key, part=part)[0])
    apart = split_into_parts(arrays, parts)
    return sum(float(compute(params, {k: x[i] for k, x in apart.items()}, jnp.int32(i))) for i in range(parts))


def test_dropout_masks_of_loss_ignore_remat_packing_and_parts(tokenizer):
    params = random_params(MODEL, np.random.default_rng(0))
    model, other = (t5.T5(MODEL, dropout=0.4, remat=remat) for remat in ("none", "layers"))
    expected = loss_of(model, params, demo_batch(tokenizer, 1))
    assert loss_of(other, params, demo_batch(tokenizer, 4), parts=2) == pytest.approx(expected, rel=2e-6)


BACKBONES = {
    "t5": DEEP,
    "umt5": UMT5Config(**vars(DEEP)),
    "t5gemma": T5GemmaConfig(
        *(GemmaStack(16, 24, 4, 2, 4, query_pre_attn_scalar=4, sliding_window=5),) * 2, 64, 3, 3, dropout_rate=0.0
    ),
    "t5gemma2": T5Gemma2Config(
        *(GemmaStack(16, 24, 4, 2, 4, query_pre_attn_scalar=4, sliding_window=5, attn_logit_softcapping=0.0),) * 2,
        *(64, 3, 3),
        final_logit_softcapping=0.0,
        eoi_token_index=63,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKBONES)
def test_every_backbone_has_the_same_masks(tokenizer, name):
    config = BACKBONES[name]
    shapes = jax.eval_shape(config.init_params, jax.random.key(0))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: 0.3 * rng.standard_normal(x.shape, np.float32), shapes)
    expected = loss_of(config.module(dropout=0.4), params, demo_batch(tokenizer, 1))
    assert abs(expected - loss_of(config.module(), params, demo_batch(tokenizer, 1))) > 1e-3 * expected
    for remat, pack, parts in (("dots", 1, 1), ("layers", 2, 1), ("none", 4, 2), ("dots", 2, 4)):
        found = loss_of(config.module(dropout=0.4, remat=remat), params, demo_batch(tokenizer, pack), parts)
        assert found == pytest.approx(expected, rel=1e-5), (remat, pack, parts)


class FlaxLayer(t5.EncoderLayer):
    """A layer that drops with Flax's module as well."""

    @nn.compact
    def __call__(self, x, bias, padding, deterministic):
        return nn.Dropout(0.3)(super().__call__(x, bias, padding, deterministic), deterministic=deterministic)


class FlaxEncoder(t5.Encoder):
    layer = FlaxLayer


class FlaxT5(t5.T5):
    encoder_stack = FlaxEncoder


@pytest.mark.slow
def test_flax_dropout_masks_ignore_remat_and_differ_between_parts(tokenizer):
    params, arrays = random_params(DEEP, np.random.default_rng(0)), demo_batch(tokenizer, 1)
    expected, *others = (
        loss_of(FlaxT5(DEEP, dropout=0.1, remat=remat), params, arrays) for remat in ("none", "dots", "layers")
    )
    assert others == pytest.approx([expected] * 2, rel=1e-5)
    alike = {name: jnp.concatenate([x[:1]] * 2) for name, x in arrays.items()}  # both parts contain the same example
    parts = split_into_parts(alike, 2)
    compute = jax.jit(lambda batch, part: batch_loss(FlaxT5(DEEP), params, batch, jax.random.key(4), part=part)[0])
    one, two = (float(compute({k: x[i] for k, x in parts.items()}, jnp.int32(i))) for i in range(2))
    assert abs(one - two) > 1e-3 * one


@pytest.mark.slow
def test_training_has_the_same_losses_on_every_mesh_with_every_remat_packed_and_accumulated(tokenizer):
    """Whole steps, with their updates, are compared."""
    config = change(
        STEP,
        train={"dropout": 0.3, "batch_size": 8, "length_group": 1, "pack": 1, "shapes": 1},
        grid={"delay": 1},
        mesh={"data": 1},
    )

    def losses(**train):
        devices = train.pop("devices", 1)
        own = change(config, train=train, mesh={"data": devices})
        trainer, found = Trainer(own), []
        batches, state = TrainingBatches(demo.examples("train")[:64], tokenizer, own, MODEL), trainer.fresh()
        for step in range(3):
            placed = sharding.put_batch(batches[step].arrays, trainer.mesh)
            state, values = trainer.step(state, placed, trainer.dropout_key(step + 1))
            found.append(float(values["loss"]))
        return found

    expected = losses(remat="none")
    for other in (
        {"remat": "layers"},
        {"remat": "dots", "devices": 4},
        {"remat": "none", "pack": 2, "accumulate": 4},
        {"remat": "layers", "pack": 2, "devices": 4},
        {"remat": "none", "accumulate": 2, "devices": 4},
    ):
        assert losses(**other) == pytest.approx(expected, rel=1e-5), other
    assert losses(remat="none", seed=1) != pytest.approx(expected, rel=1e-3)
