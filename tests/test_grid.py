"""The grid equals tables by hand: the example of Figure 2, its mask, distances and steps."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax import grid
from support import oracle

BOS, EOS = 0, 1
A, B, C, D, E = 11, 12, 13, 14, 15

# "A B C <sep> D E", delay 1: (row, time) of every slot with a target, 0-based rows; F is the empty row.
PLACES = {
    "bos1": (0, 0),
    "A": (0, 1),
    "B": (0, 2),
    "C": (0, 3),
    "bos2": (1, 1),
    "D": (1, 2),
    "E": (1, 3),
    "bosF": (2, 2),
}
# The visible tokens of each token, with distances.
SEES = {
    "bos1": {"bos1": 0},
    "A": {"bos1": 1, "A": 0},
    "B": {"bos1": 2, "A": 1, "B": 0},
    "C": {"bos1": 3, "A": 2, "B": 1, "C": 0},
    "bos2": {"bos1": 2, "A": 1, "bos2": 0},  # predicts D from exactly these tokens
    "D": {"bos1": 3, "A": 2, "B": 1, "bos2": 1, "D": 0},
    "E": {"bos1": 4, "A": 3, "B": 2, "C": 1, "bos2": 2, "D": 1, "E": 0},
    "bosF": {"bos1": 4, "A": 3, "B": 2, "bos2": 2, "D": 1, "bosF": 0},
}


# The same rows with delay 0: they start together, and none is empty.
PLACES_TOGETHER = {"bos1": (0, 0), "A": (0, 1), "B": (0, 2), "C": (0, 3), "bos2": (1, 0), "D": (1, 1), "E": (1, 2)}
SEES_TOGETHER = {
    **{name: SEES[name] for name in ("bos1", "A", "B", "C")},
    "bos2": {"bos1": 1, "bos2": 0},  # nothing of the row above is written yet
    "D": {"bos1": 2, "A": 1, "bos2": 1, "D": 0},
    "E": {"bos1": 3, "A": 2, "B": 1, "bos2": 2, "D": 1, "E": 0},
}


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("places, sees", [(PLACES, SEES), (PLACES_TOGETHER, SEES_TOGETHER)], ids=["figure", "together"])
def test_mask_and_distances_of_figure_2(places, sees, array):
    for query, key in itertools.product(places, places):
        pair = (*map(array, places[query]), *map(array, places[key]))
        assert bool(grid.visible(*pair)) == (key in sees[query]), (query, key)
        if key in sees[query]:
            assert int(grid.distance(*pair)) == sees[query][key], (query, key)


@pytest.mark.parametrize("delay", range(6))
def test_position_differences_equal_distances_of_visible_tokens(delay):
    row, time = (x.reshape(-1) for x in np.meshgrid(np.arange(6), np.arange(30), indexing="ij"))
    row, time = (x[time >= grid.start(row, delay)] for x in (row, time))
    pairs = row[:, None], time[:, None], row[None], time[None]
    position = grid.position(row, time)
    apart, seen = position[:, None] - position, grid.visible(*pairs)
    np.testing.assert_array_equal(apart[seen], grid.distance(*pairs)[seen])
    assert seen.sum() > 3000


def test_flattened_target_equals_figure_2():
    flat = grid.flatten([[A, B, C], [D, E]], delay=1, bos=BOS, eos=EOS)
    assert flat.inputs.tolist() == [BOS, A, B, C, BOS, D, E, BOS]
    assert flat.targets.tolist() == [A, B, C, EOS, D, E, EOS, EOS]
    assert list(zip(flat.row.tolist(), flat.time.tolist(), strict=True)) == list(PLACES.values())
    assert flat.weights.tolist() == [1.0] * 8


def test_rows_that_start_together_have_no_empty_row():
    flat = grid.flatten([[A, B, C], [D, E]], delay=0, bos=BOS, eos=EOS)
    assert flat.inputs.tolist() == [BOS, A, B, C, BOS, D, E]
    assert flat.targets.tolist() == [A, B, C, EOS, D, E, EOS]
    assert list(zip(flat.row.tolist(), flat.time.tolist(), strict=True)) == list(PLACES_TOGETHER.values())
    flat = grid.flatten([[A], [D, E]], delay=0, bos=BOS, eos=EOS)  # E sees that the row above has ended
    assert flat.inputs.tolist() == [BOS, A, EOS, BOS, D, E]
    assert flat.weights.tolist() == [1, 1, 0, 1, 1, 1] and flat.time.tolist() == [0, 1, 2, 0, 1, 2]


def test_row_names_are_fed_and_not_queried():
    flat = grid.flatten([[A, B, C], [D, E]], delay=0, bos=BOS, eos=EOS, names=[1, 2])
    assert flat.inputs.tolist() == [BOS, A, B, C, BOS, D, E]
    assert flat.weights.tolist() == [0, 1, 1, 1, 0, 0, 1]
    assert flat.targets[flat.weights > 0].tolist() == [B, C, EOS, EOS]


def test_an_eos_is_fed_where_a_later_token_sees_it():
    """Δt = 2: row 1 is "A" and ends at time 2, where row 2 begins; the first row's eos is a key for all of row 2."""
    flat = grid.flatten([[A], [D, E]], delay=2, bos=BOS, eos=EOS)
    assert flat.inputs.tolist() == [BOS, A, EOS, BOS, D, E, BOS]
    assert flat.weights.tolist() == [1, 1, 0, 1, 1, 1, 1]
    assert flat.time.tolist() == [0, 1, 2, 2, 3, 4, 4]
    assert flat.targets[flat.weights > 0].tolist() == [A, EOS, D, E, EOS, EOS]


def test_omitted_eos_is_visible_to_no_query():
    rng = np.random.default_rng(0)
    left_out = 0
    for _ in range(200):
        delay = int(rng.integers(0, 5))
        rows = [rng.integers(2, 9, rng.integers(1, 6)).tolist() for _ in range(rng.integers(0, 6))]
        flat = grid.flatten(rows, delay=delay, bos=BOS, eos=EOS)
        found = {(r, t) for r, t, w in zip(flat.row, flat.time, flat.weights, strict=True) if not w}
        queries = [(r, t) for r, t, w in zip(flat.row, flat.time, flat.weights, strict=True) if w]
        for i, row in enumerate(rows):
            eos = (i, i * delay + len(row) + 1)
            seen = any(r >= i and t >= eos[1] for r, t in queries)
            assert (eos in found) == seen
            left_out += not seen
    assert left_out > 50


def test_one_row_without_empty_row_is_a_t5_target():
    flat = grid.flatten([[A, B, C]], delay=1, bos=BOS, eos=EOS, final=False)
    assert flat.inputs.tolist() == [BOS, A, B, C]
    assert flat.targets.tolist() == [A, B, C, EOS]
    assert flat.row.tolist() == [0] * 4 and flat.time.tolist() == [0, 1, 2, 3]


def test_target_without_rows_has_the_empty_row():
    flat = grid.flatten([], delay=1, bos=BOS, eos=EOS)
    assert (flat.inputs.tolist(), flat.targets.tolist(), flat.weights.tolist()) == ([BOS], [EOS], [1.0])


# lengths, delay, sub_max, time_max -> pipelined, sequential; by hand
STEPS = [
    ([3, 2], 1, 20, 50, 4, 7),  # Figure 2
    ([3, 2], 1, 2, 50, 4, 7),
    ([1, 1, 1], 1, 3, 50, 4, 6),  # no empty row: the last of three starts at 3 and ends with step 4
    ([1, 1, 1], 1, 4, 50, 4, 6),
    ([4], 3, 20, 50, 5, 5),
    ([1], 3, 20, 50, 4, 2),  # the empty row starts after step 3
    ([], 2, 20, 50, 1, 1),
    ([9, 9], 1, 20, 5, 5, 20),
    ([3, 2, 5], 0, 3, 50, 6, 13),  # rows that start together: the longest row with its eos
    ([9, 2], 0, 2, 5, 5, 13),
    ([14] * 8, 1, 20, 50, 22, 120),
    ([4] * 5, 1, 20, 50, 9, 25),
    ([40] * 7, 1, 20, 50, 47, 287),
]


@pytest.mark.parametrize("lengths, delay, sub_max, time_max, pipelined, sequential", STEPS)
def test_steps_equal_hand_computed_steps(lengths, delay, sub_max, time_max, pipelined, sequential):
    assert grid.pipelined_steps(lengths, delay=delay, sub_max=sub_max, time_max=time_max) == pipelined
    assert grid.sequential_steps(lengths) == sequential
    assert grid.sequential_steps(lengths, separator=0) == sum(lengths) + 1


def test_steps_equal_algorithm_1_on_scripted_rows():
    rng = np.random.default_rng(1)
    for _ in range(300):
        delay, sub_max, time_max = (int(rng.integers(1, n)) for n in (5, 8, 25))
        rows = [[7] * int(rng.integers(1, 7)) for _ in range(rng.integers(0, 8))]
        run = oracle.algorithm1(
            oracle.scripted_next_tokens(rows), delay=delay, time_max=time_max, sub_max=sub_max, stop="empty_row"
        )
        found = grid.pipelined_steps([len(r) for r in rows], delay=delay, sub_max=sub_max, time_max=time_max)
        assert found == run.steps


@pytest.mark.parametrize("stop", ["empty_row", "literal"])
def test_calls_equal_algorithm_1(stop):
    """Time-steps without an open row need no call; rows that never started do not count."""
    rng = np.random.default_rng(2)
    fewer = 0
    for _ in range(300):
        delay, sub_max, time_max = (int(rng.integers(1, n)) for n in (5, 8, 25))
        rows = [[7] * int(rng.integers(0 if stop == "literal" else 1, 7)) for _ in range(rng.integers(0, 8))]
        run = oracle.algorithm1(
            oracle.scripted_next_tokens(rows), delay=delay, time_max=time_max, sub_max=sub_max, stop=stop
        )
        lengths = [len(row) - 1 - (row[-1] == 1) for row in run.all_rows]
        assert grid.pipelined_calls([*lengths, 0, 0], delay=delay, steps=run.steps) == run.calls
        fewer += run.calls < run.steps
    assert fewer > 10 or stop == "literal"
