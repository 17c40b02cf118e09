"""The padded shapes of training batches: their number, and the padding that they cause."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from pipejax.config import Config, DataConfig, TrainConfig
from pipejax.data.batches import longest
from pipejax.data.shapes import FIRST, Shapes, choose_pairs, deal, levels, round_up
from pipejax.grid import flatten

LIMIT = (2048, 1536)


def lognormal(rng, median, high, most, n):
    """Whole numbers with this median and 95th percentile, cut at `most`."""
    return np.clip(np.round(np.exp(rng.normal(np.log(median), np.log(high / median) / 1.645, n))), 1, most).astype(int)


# Median, 95 % and maximum in T5's tokens: sources, rows of a target, tokens of a row.
SETS = {
    "spans": ((331, 676, 1460), (2, 6, 21), (4, 13, 70)),
    "short_summaries": ((826, 1869, 2048), (3, 4, 6), (18, 28, 48)),
    "steps": ((931, 2249, 2048), (11, 24, 54), (9, 27, 504)),
}


def like(name, n=4000):
    """Source tokens and slots [n, 2] of examples like those of a set; targets end at 512."""
    rng = np.random.default_rng(len(name))
    source, rows, tokens = SETS[name]
    sources = lognormal(rng, *source, n)
    targets = [int((lognormal(rng, *tokens, count) + 1).sum()) + 1 for count in lognormal(rng, *rows, n)]
    return np.stack([sources, np.minimum(targets, 512)], axis=1)


def trained(lengths, shapes, *, steps=2000, size=24, group=16, pack=3):
    """The shape of each batch of a training, its padded and its real lengths: as `TrainingBatches` draws, from scratch.

    [steps, 4]: padded source tokens and slots of the batch, real ones.
    """
    rng = np.random.default_rng(5)
    stream = itertools.chain.from_iterable(rng.permutation(len(lengths)) for _ in itertools.count())
    used, sums = [], []
    for number in range(steps // group):
        drawn = lengths[list(itertools.islice(stream, group * size))]
        drawn = drawn[shapes.order(drawn)].reshape(group, size, 2)
        for place, part in enumerate(rng.permutation(group)):
            batch = drawn[part]
            width = max(sum(row) for row in np.reshape(batch[deal(batch[:, 1].tolist(), pack), 1], (-1, pack)))
            need = int(batch[:, 0].max()), int(width)
            used.append(shapes.fit(need, number * group + place))
            assert used[-1][0] >= need[0] and used[-1][1] >= need[1]
            sums.append((used[-1][0] * size, used[-1][1] * size // pack, *batch.sum(0)))
    return used, np.asarray(sums)


@pytest.mark.parametrize("name", SETS)
def test_few_shapes_pad_little(name):
    """This holds by default, for examples that are not in the sample."""
    sample, lengths = np.split(like(name, 8000), 2)
    shapes = choose_pairs(sample, size=24, group=16, pack=3, most=TrainConfig().shapes, limit=LIMIT)
    used, sums = trained(lengths, shapes)
    padded, real = sums[:, :2].sum(), sums[:, 2:].sum()
    assert len(set(used)) <= 24 and padded < 1.35 * real
    assert sums[:, 0].sum() < 1.35 * sums[:, 2].sum() and sums[:, 1].sum() < 1.5 * sums[:, 3].sum()
    # A short training compiles a few of them.
    assert len(set(used[:40])) <= 9 and len(set(used[:10])) <= 5
    assert all(n <= LIMIT[axis] for pair in used for axis, n in enumerate(pair))


def test_the_choice_is_the_best_for_lengths_of_two_kinds():
    """Short and long sources and targets, each batch of one kind, need four shapes without any padding."""
    kinds = [(64, 8), (64, 40), (256, 8), (256, 40)]
    lengths = np.repeat(kinds, 12, axis=0)
    shapes = choose_pairs(lengths, size=4, group=12, pack=1, most=4, limit=(256, 64))
    assert sorted(shapes.pairs) == kinds and shapes.pairs[0] == (256, 40)
    used, sums = trained(lengths, shapes, steps=96, size=4, group=12, pack=1)
    assert set(used) == set(kinds) and (sums[:, :2].sum(0) == sums[:, 2:].sum(0)).all()


@pytest.mark.parametrize("steps, most", [(100, 3), (340, 5), (1000, 6)])
def test_few_short_examples_have_few_shapes(steps, most):
    """For 406 examples, a further shape would save less time by padding than its compilation takes."""
    rng = np.random.default_rng(1)
    lengths = np.stack([lognormal(rng, 30, 60, 120, 406), lognormal(rng, 12, 24, 60, 406)], axis=1)
    sizes = {"size": 24, "group": 16, "pack": 3, "most": TrainConfig().shapes, "limit": LIMIT}
    shapes = choose_pairs(lengths, **sizes, steps=steps)
    everything = choose_pairs(lengths, **sizes)
    (used, sums), (_, least) = (trained(lengths, chosen, steps=steps) for chosen in (shapes, everything))
    assert 1 < len(set(used)) <= len(shapes.pairs) <= most and len(everything.pairs) == 22
    # All others together would have saved less than their compilations cost.
    assert 0 < (sums - least)[:, :2].sum() < (22 - len(shapes.pairs)) * 2**15
    assert choose_pairs(lengths, **sizes, steps=steps) == shapes  # like another process


@pytest.mark.parametrize("name", SETS)
def test_long_runs_have_the_requested_number_of_shapes(name):
    """The shortest run of the paper has 1,907 steps."""
    sizes = {"size": 24, "group": 16, "pack": 3, "limit": LIMIT}
    shapes = choose_pairs(like(name), **sizes, most=22, steps=1907)
    assert shapes == choose_pairs(like(name), **sizes, most=22) and len(shapes.pairs) == 22


def test_larger_batches_double_the_largest_shape():
    shapes = Shapes((96,), ((96, 40), (32, 16)), (1000, 64), (50.0, 10.0))
    assert shapes.fit((30, 16)) == (32, 16) and shapes.fit((30, 17)) == (96, 40)
    assert shapes.fit((97, 3)) == (192, 40) and shapes.fit((500, 41)) == (768, 64)
    assert shapes.fit((800, 64)) == (1000, 64)
    assert shapes.fit((30, 65)) == shapes.fit((30, 71)) == (96, 72)  # shapes of older limits, which were too low


def test_shapes_are_introduced_gradually_and_survive_json():
    shapes = choose_pairs(like("spans", 500), size=24, group=16, pack=3, most=12, limit=LIMIT)
    assert len(shapes.pairs) == 12 and len(shapes.in_use(0)) == FIRST
    assert [len(shapes.in_use(step)) for step in (7, 8, 40, 1000)] == [4, 5, 9, 12]
    assert Shapes.from_json(json.loads(json.dumps(shapes.to_json()))) == shapes


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_levels_pad_the_least(most):
    lengths = np.random.default_rng(most).integers(1, 9, 20).tolist()

    def padding(tops):
        return sum(min(top for top in tops if top >= n) - n for n in lengths)

    distinct = sorted(set(lengths))
    others = itertools.combinations(distinct[:-1], min(most, len(distinct)) - 1)
    assert padding(levels(lengths, most)) == min(padding((*tops, distinct[-1])) for tops in others)


def test_rounding_is_tight():
    sizes = sorted({round_up(n) for n in range(1, 2049)})
    assert sizes[:4] == [8, 16, 24, 32] and sizes[-3:] == [1920, 1984, 2048]
    assert all(n <= round_up(n) < max(n + 8, 17 / 16 * n) for n in range(1, 2049))


def test_no_batch_exceeds_the_longest_shape():
    """Each row feeds its eos, too: many short ones need more slots than they have tokens that count."""
    for rows in ([[7] * 3] * 80, [[7]] * 160, [[7] * 320]):
        target = flatten(rows, delay=1, bos=0, eos=1)
        tokens = int(target.weights.sum())
        data, train = DataConfig(max_target=tokens), TrainConfig(pack=2, batch_size=2, method="pipelined")
        assert 2 * len(target.inputs) <= longest(Config(data=data, train=train))[1] < 3.2 * tokens
    assert longest(Config(data=data, train=dataclasses.replace(train, method="sequential")))[1] == round_up(2 * tokens)
