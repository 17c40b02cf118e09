"""Training batches depend only on their number, not on the process that encodes them; examples in a batch."""

import threading

import numpy as np
import pytest

from pipejax.apps import demo
from pipejax.data import batches
from pipejax.data.batches import Share, TrainingBatches, choose_shapes, collate, fixed_batches, pack_size, prefetch
from pipejax.data.encoding import encode_example
from pipejax.data.examples import Example, Stream
from pipejax.data.shapes import Shapes
from pipejax.system.errors import UserError
from support.tiny import MODEL, RUN, change

CONFIG = change(RUN, train={"shapes": 2})
SHAPES = Shapes(tuple(range(64)), ((128, 128),), (128, 128), (50.0, 10.0))
DRAW = change(CONFIG, train={"batch_size": 6, "length_group": 8})


def of_length(*words):
    """Examples whose sources have given numbers of words."""
    return [Example(str(n), " ".join(["apples"] * n), ("apples",)) for n in words]


def test_batches_are_a_function_of_their_number(tokenizer):
    examples = demo.examples("train")[:50]
    a, b = (TrainingBatches(examples, tokenizer, CONFIG, MODEL) for _ in range(2))
    in_order = [a[i].ids for i in range(12)]
    assert [b[i].ids for i in (11, 4, 0)] == [in_order[i] for i in (11, 4, 0)]
    first_epoch = [i for ids in in_order[:6] for i in ids]
    assert len(set(first_epoch)) == 48  # no example twice in an epoch
    resumed = prefetch(TrainingBatches(examples, tokenizer, CONFIG, MODEL), 5)
    assert [next(resumed).ids for _ in range(3)] == in_order[5:8]
    other = TrainingBatches(examples, tokenizer, change(CONFIG, train={"seed": 1}), MODEL)
    assert other[0].ids != in_order[0]


@pytest.mark.parametrize(
    "rows",
    [
        [range(4), range(4, 8)],
        [(0, 3, 4, 7), (1, 2, 5, 6)],  # a mesh may order its devices in this way
        [range(3), range(3, 6), range(6, 8)],
        [range(i, i + 1) for i in range(8)],
        [range(4), range(4), range(4, 8), range(4, 8)],  # a "tensor" axis over two processes
    ],
    ids=str,
)
def test_several_processes_share_the_encoding_of_the_same_batches(tokenizer, monkeypatch, rows):
    # Some examples are cut by these limits.
    cut, train = {"max_source": 27, "max_target": 20}, {"batch_size": 24, "length_group": 4}
    config, examples, count = change(CONFIG, data=cut, train=train), demo.examples("train")[:600], 8
    alone = TrainingBatches(examples, tokenizer, config, MODEL)
    whole, pack, n = [alone[i] for i in range(count)], pack_size(config.train), len(rows)
    said, all_said, made = [b""] * n, threading.Barrier(n), [0] * n
    results, own = [[] for _ in rows], threading.local()

    def tell(mine):
        said[own.index] = mine
        all_said.wait(60)
        told = list(said)
        all_said.wait(60)
        return told

    def counted(*arguments):
        made[own.index] += 1
        return encode_example(*arguments)

    def process(index):
        own.index = index
        share = Share(index, n, frozenset(rows[index]), tell)
        batches = TrainingBatches(examples, tokenizer, config, MODEL, alone.shapes, share)
        results[index] = [batches[i] for i in range(count)]

    monkeypatch.setattr(batches, "encode_example", counted)
    threads = [threading.Thread(target=process, args=[i]) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, batch in enumerate(whole):
        for name, expected in batch.arrays.items():
            united = np.full_like(expected, 99)
            for index, held in enumerate(rows):
                found = results[index][number].arrays[name]
                assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
                each = len(found) // 8
                assert len(found) == each * 8 and each in (1, pack)
                for row in held:
                    united[row * each : (row + 1) * each] = found[row * each : (row + 1) * each]
            assert united.tobytes() == expected.tobytes()
        for result in results:
            assert result[number].ids == batch.ids and (result[number].lengths == batch.lengths).all()
            assert result[number][3:] == batch[3:]
    assert len({batch[3:] for batch in whole}) > 1 and all(a != b for a, b in (batch[3:] for batch in whole))
    drawn = count * 24
    for index, held in enumerate(rows):
        # A process encodes its share of the draw, and the rows of its own that the others have encoded.
        assert made[index] <= drawn * (1 / n + len(held) / 8) and made[index] < drawn


def test_batches_of_similar_lengths_are_shuffled_in_each_draw(tokenizer):
    drawn = TrainingBatches(of_length(*range(1, 49)), tokenizer, DRAW, MODEL, SHAPES)
    # An epoch is a draw here. Each batch has six consecutive lengths; the shortest one identifies it.
    order = [[min(drawn[i].lengths[:, 0]) for i in range(first, first + 8)] for first in (0, 8, 16)]
    assert all(np.ptp(drawn[i].lengths[:, 0]) == 5 for i in range(24))
    assert sorted(order[0]) == sorted(order[1]) == sorted(order[2])
    assert len(set(map(tuple, order))) == 3 and sorted(order[0]) not in order


def test_each_batch_is_padded_as_at_its_own_step(tokenizer):
    class Seen:
        order, steps = SHAPES.order, list[int]()

        def fit(self, need, step):
            self.steps.append(step)
            return SHAPES.fit(need)

    seen = Seen()
    drawn = TrainingBatches(of_length(*range(1, 49)), tokenizer, DRAW, MODEL, seen)
    assert drawn[9].ids and seen.steps == list(range(8, 16))


def test_cut_sources_and_targets_are_counted(tokenizer):
    config = change(CONFIG, data={"max_source": 8, "max_target": 8})
    sources, targets = ("apples " * 3, "apples " * 20), ("apples", "apples " * 20)
    given = [(0, 0), (1, 0), (1, 0), (0, 1), (1, 1)]  # which sources are longer than the limit
    encoded = [
        encode_example(Example("x", sources[a].strip(), (targets[b].strip(),)), tokenizer, config, MODEL)
        for a, b in given
    ]
    assert collate(encoded)[3:] == (3, 2)


def test_shapes_are_chosen_by_a_sample_of_all_examples(tokenizer, monkeypatch):
    """The order of examples has no effect, and no more texts than necessary are read."""
    monkeypatch.setattr(batches, "SAMPLE", 40)
    encoded = list[str]()

    def noted(example, *rest):
        encoded.append(example.id)
        return encode_example(example, *rest)

    monkeypatch.setattr(batches, "encode_example", noted)
    examples = of_length(*[3] * 100, *[300] * 100)
    config = change(CONFIG, data={"max_source": 2048})
    shapes = choose_shapes(examples, tokenizer, config, MODEL)
    assert len(encoded) == 40 and 10 < encoded.count("300") < 30
    assert any(300 < source < 400 for source, _ in shapes.pairs)
    monkeypatch.setattr(batches, "CHARACTERS", 5000)
    encoded.clear()
    choose_shapes(of_length(*[300] * 200), tokenizer, config, MODEL)
    assert len(encoded) == 3  # texts have 2,099 characters


def test_stream_contains_a_whole_draw(tokenizer):
    examples = of_length(*range(1, 49))
    for size, refused in ((47, True), (48, False)):
        stream = Stream(["x"], lambda files, n=size: iter([examples[:n]]), size)
        if refused:
            with pytest.raises(UserError, match=r"^data\.stream: found 47; expected at least 48"):
                TrainingBatches(stream, tokenizer, DRAW, MODEL, SHAPES)
        else:
            assert len(TrainingBatches(stream, tokenizer, DRAW, MODEL, SHAPES)[0].ids) == 6


def test_neighbours_in_length_are_scored_together(tokenizer):
    lengths = np.random.default_rng(0).permutation(np.arange(1, 49))
    encoded = [encode_example(example, tokenizer, DRAW, MODEL) for example in of_length(*lengths.tolist())]
    taken = [batch.lengths[:, 0] for batch in fixed_batches(encoded, DRAW.train, SHAPES)]
    assert len(taken) == 8 and all(np.ptp(each) == 5 for each in taken)
