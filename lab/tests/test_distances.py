"""The two other distances: decoding and training equal computations in plain lists."""

import dataclasses

import jax
import numpy as np
import pytest

from lab.experiments.distances import DISTANCES, DistanceConfig, Places
from pipejax.apps import demo
from pipejax.config import Config
from pipejax.data.batches import collate
from pipejax.data.encoding import encode_example
from pipejax.inference.generator import Generator
from pipejax.training.step import Trainer
from support import oracle
from support.tiny import FEW_WORDS, MODEL, RUN_ON_ONE, change


def row(cells, delay):
    """The difference of rows plus the difference of places."""
    places = [(i, time - i * delay) for i, time in cells]
    return [[abs(i - k) + abs(j - m) for k, m in places] for i, j in places]


def linear(cells, delay):
    """The place of the query in the text that it sees, row after row, minus the place of the key."""
    found = []
    for query, sees in zip(cells, oracle.visibility(cells), strict=True):
        text = sorted(cell for cell, seen in zip(cells, sees, strict=True) if seen)
        found.append([text.index(query) - text.index(cell) if cell in text else 0 for cell in cells])
    return found


IN_LISTS = {"row": row, "linear": linear}


def test_distances_in_the_papers_figure():
    """In Figure 2 of the paper, "A B C <sep> D E", E sees bos, A, B, C, bos2 and D."""
    cells = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    assert IN_LISTS.keys() == set(DISTANCES)
    assert row(cells, 1)[6] == [3, 2, 1, 2, 2, 1, 0]
    assert linear(cells, 1)[6] == [6, 5, 4, 3, 2, 1, 0]
    assert linear(cells, 1)[5] == [4, 3, 2, 0, 1, 0, 0]  # D sees neither C nor E


@pytest.mark.slow
@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("distance", DISTANCES)
def test_decoding_equals_plain_python(distance, delay):
    model = DistanceConfig(**vars(FEW_WORDS), distance=distance)
    params = oracle.random_params(FEW_WORDS, np.random.default_rng(5))
    generator = Generator(Config(model=model, method=Places(delay, rows=4, times=14)), params, None)
    rng = np.random.default_rng(delay)
    sources = [[*rng.integers(2, FEW_WORDS.vocab_size, rng.integers(2, 9)).tolist(), 1] for _ in range(16)]
    found = [generator.decode(sources, batch_size=size) for size in (1, 4)]
    stock, sure = 0, 0
    for i, source in enumerate(sources):
        encoded, margins = oracle.encode(params, FEW_WORDS, source), list[float]()

        def rows(**more):
            says = oracle.grid_next_tokens(params, FEW_WORDS, encoded, delay, **more)  # noqa: B023
            return oracle.algorithm1(says, delay=delay, time_max=14, sub_max=4, stop="empty_row").rows

        expected = rows(margins=margins, distances=lambda cells: IN_LISTS[distance](cells, delay))
        stock += rows() == expected
        if min(margins) > 1e-4:
            sure += 1
            assert [records[i]["row_ids"] for records in found] == [expected, expected]
    assert sure > 12 and stock < 12  # the distance matters


@pytest.mark.parametrize("distance", DISTANCES)
def test_training_loss_equals_plain_python(distance):
    """Several examples in a sequence: the others' tokens do not count."""
    method, model = Places(2, rows=4, times=12), DistanceConfig(**vars(MODEL), distance=distance)
    config = dataclasses.replace(change(RUN_ON_ONE, train={"batch_size": 6}), method=method, model=model)
    tokenizer, params = demo.DemoTask().tokenizer(), oracle.random_params(MODEL, np.random.default_rng(1))
    examples = demo.examples("train")[:6]
    batch = collate([encode_example(example, tokenizer, config, model) for example in examples], 3).arrays
    total, count = jax.device_get(Trainer(config).dev_loss(params, batch))
    expected, tokens = 0.0, 0
    for example in examples:
        rows = [tokenizer.encode(text) for text in example.targets]
        size = sum(len(ids) + 1 for ids in rows) + 1
        source = [*tokenizer.encode(example.source), 1]
        mean = oracle.teacher_forced_loss(
            params, MODEL, source, rows, 2, distances=lambda cells: IN_LISTS[distance](cells, 2)
        )
        expected, tokens = expected + size * mean, tokens + size
    assert count == tokens and abs(total - expected) < 1e-5 * expected
