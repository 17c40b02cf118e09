"""Dropout's masks: how often, how independently, and the same ones in the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.model import dropout, layers


def masks(count, shape, rate):
    keys = jax.random.split(jax.random.key(0), count)
    return np.stack([dropout.mask(dropout.make_seed(key), shape, rate) for key in keys])


def independent(a, b):
    """Whether two masks correlate no more than chance has it, to five standard deviations."""
    a, b = (x.astype(np.float64).ravel() - x.mean() for x in (a, b))
    return abs((a * b).mean() / (a.std() * b.std())) < 5 / np.sqrt(a.size)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(64, 1024), (2, 4, 64, 128), (65536, 1), (1, 65536)], ids=str)
def test_every_place_is_dropped_at_the_rate(shape, rate):
    drawn = masks(8, shape, rate)
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(1 - drawn.mean() - rate) < 5 * deviation / np.sqrt(drawn.size)
    for axis in range(1, drawn.ndim):  # of each row, column, head, ... the same share
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


def test_runs_are_as_long_as_chance_has_them():
    """Pairs, triples and quadruples of neighbours: a weak hash shows there first."""
    flat = masks(4, (256, 1024), 0.5).astype(np.int64)
    for width in (2, 3, 4):
        for axis in (1, 2):
            windows = np.lib.stride_tricks.sliding_window_view(flat, width, axis=axis)[:, ::width, ::width]
            codes = (windows * 2 ** np.arange(width)).sum(-1).ravel()
            counts = np.bincount(codes, minlength=2**width)
            expected = len(codes) / 2**width
            assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


def test_the_gradient_goes_where_the_value_went_and_sums_are_kept():
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
