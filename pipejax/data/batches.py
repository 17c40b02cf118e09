"""Batches of flat slots for training: how examples share them, which process makes what, and in which order.

Shapes: B batch, L source length, G rows of target slots, N slots of a row. The targets of B / G consecutive examples
share a row, one after the other, so that little of it is padding.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax import grid
from pipejax.config import Config, T5Config, TrainConfig
from pipejax.data.encoding import Encoded, encode
from pipejax.data.examples import Example
from pipejax.data.padding import pad, round_up
from pipejax.data.shapes import Pair, Shapes, choose
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.extras import extra

SAMPLE, CHARACTERS = 4000, 4_000_000  # examples whose lengths the shapes are chosen by, and their text, at the most


class Batch(NamedTuple):
    """Padded arrays for the device, and what only the host wants to know."""

    arrays: dict[str, np.ndarray]
    ids: list[str]
    lengths: np.ndarray  # i64 [B, 2], real source tokens and target slots of each example
    cut_sources: int
    cut_targets: int


def pack_size(config: TrainConfig) -> int:
    """Examples to a row of target slots: `train.pack`, or 1 to 4 by the batch size alone.

    The mesh has no say in it: the same batch, and the same dropout, whatever it is trained on. Up to eight devices
    (fewer where the batch size is not divisible by eight) still get whole rows.
    """
    if config.pack:
        return config.pack
    share = config.batch_size // math.gcd(config.batch_size, 8)
    return next(size for size in (4, 3, 2, 1) if share % size == 0)


def deal(lengths: Sequence[int], size: int) -> list[int]:
    """An order in which runs of `size` have nearly equal sums: the longest first, each to the least full run."""
    runs: list[list[int]] = [[] for _ in range(len(lengths) // size)]
    sums = [0] * len(runs)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        run = min((r for r in range(len(runs)) if len(runs[r]) < size), key=sums.__getitem__)
        runs[run].append(i)
        sums[run] += lengths[i]
    return [i for run in runs for i in run]


def longest(config: Config) -> Pair:
    """The shape of a batch whose sources and targets are all as long as they may be.

    A pipelined target has a slot more for each row whose eos is fed; a row has two tokens or more, its eos included.
    """
    slots = config.data.max_target
    if config.train.objective != "sequential":
        slots += (slots - 1) // 2
    return round_up(config.data.max_source), round_up(slots * pack_size(config.train))


def abstract_batch(config: TrainConfig, shape: Pair) -> dict[str, tuple[int, ...]]:
    """The shapes of a batch's arrays, by name."""
    size, rows = config.batch_size, config.batch_size // pack_size(config)
    slots = dict.fromkeys((*grid.Flat._fields, "example"), (rows, shape[1]))
    return {"source": (size, shape[0]), "source_length": (size,), "slots": (rows,), **slots}


def _round(need: Pair) -> Pair:
    return round_up(need[0]), round_up(need[1])


def collate(examples: Sequence[Encoded], pack: int = 1, fit: Callable[[Pair], Pair] = _round) -> Batch:
    """Pads examples to one batch; with `pack` that many share a row of slots, and the examples change places.

    `fit` says to what: it gets the longest source and row of slots.

    Arrays: source i32 [B, L]; source_length i32 [B]; slots i32 [G], real slots of a row; inputs, targets, row, time,
    example (0 to pack - 1) i32 [G, N]; weights f32 [G, N].
    """
    return _stack([examples[i] for i in _dealt(examples, pack)], pack, fit)


def _dealt(examples: Sequence[Encoded], pack: int) -> list[int]:
    """The places of a batch's examples in the order in which they share rows of slots."""
    return deal([len(e.target.inputs) for e in examples], pack)


def _stack(examples: Sequence[Encoded], pack: int, fit: Callable[[Pair], Pair]) -> Batch:
    """The batch of examples that are in their final order."""
    sources = [e.source for e in examples]
    lengths = np.asarray([len(s) for s in sources], np.int32)
    groups = [examples[i : i + pack] for i in range(0, len(examples), pack)]
    slots = np.asarray([sum(len(e.target.inputs) for e in group) for group in groups], np.int32)
    length, width = fit((int(lengths.max()), int(slots.max())))
    arrays = {"source": pad(sources, length), "source_length": lengths}
    for name in grid.Flat._fields:
        arrays[name] = pad([np.concatenate([getattr(e.target, name) for e in group]) for group in groups], width)
    numbers = [np.repeat(np.arange(len(g), dtype=np.int32), [len(e.target.inputs) for e in g]) for g in groups]
    arrays |= {"example": pad(numbers, width), "slots": slots}
    return Batch(
        arrays,
        [e.id for e in examples],
        _lengths(examples),
        sum(e.source_was_cut for e in examples),
        sum(e.target_was_cut for e in examples),
    )


def _lengths(examples: Sequence[Encoded]) -> np.ndarray:
    """i64 [n, 2], source tokens and slots."""
    return np.asarray([(len(e.source), len(e.target.inputs)) for e in examples], np.int64).reshape(-1, 2)


def choose_shapes(examples: Sequence[Example], tokenizer: Tokenizer, config: Config, model: T5Config) -> Shapes:
    """The shapes for training on these examples, by a sample of them; the same on every machine."""
    sample, characters = list[Encoded](), 0
    for i in np.random.default_rng(0).permutation(len(examples))[:SAMPLE]:
        example = examples[int(i)]
        sample.append(encode(example, tokenizer, config, model))
        characters += len(example.source)
        if characters > CHARACTERS:
            break
    train = config.train
    sizes = {"size": train.batch_size, "group": train.length_group, "pack": pack_size(train)}
    return choose(_lengths(sample), **sizes, most=train.shapes, limit=longest(config))


@dataclasses.dataclass(frozen=True)
class Share:
    """What one of several processes makes of every batch; by default it is the only one."""

    index: int = 0
    count: int = 1
    rows: frozenset[int] = frozenset()  # of slots, that its devices hold; several may hold the same
    tell: Callable[[bytes], list[bytes]] = lambda mine: [mine]  # what each one says, by index


class TrainingBatches(Sequence[Batch]):
    """An endless sequence of batches; number i is the same on every machine, so a run's data position is its step.

    Examples are shuffled anew for each epoch. `train.length_group` batches are drawn together and parted by
    length, so that little of them is padding; their order is shuffled again.

    Of several processes each encodes its share of what is drawn, tells the others how long that is, and encodes what
    its own rows lack still: 2 / n of all at the most, unless processes hold the same rows. Elsewhere it has zeros of
    the right lengths. All must ask for the same batches in the same order.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        config: Config,
        model: T5Config,
        shapes: Shapes | None = None,
        share: Share | None = None,
    ) -> None:
        """Reads nothing yet, or a sample if no shapes are given."""
        self.share = share or Share()
        self.group, self.size, self.seed = config.train.length_group, config.train.batch_size, config.train.seed
        self.pack = pack_size(config.train)
        self.shapes = shapes or choose_shapes(examples, tokenizer, config, model)
        with extra("train", "training"):
            import grain
        self._encoded = (
            grain.MapDataset.source(examples)
            .seed(self.seed)
            .shuffle()
            .repeat(None)
            .map(lambda example: encode(example, tokenizer, config, model))
        )
        self._drawn = functools.lru_cache(maxsize=2)(self._draw)

    def __len__(self) -> int:
        return len(self._encoded) // self.size

    def __getitem__(self, index: Any) -> Any:
        """The batch of that number."""
        drawn, place = divmod(index, self.group)
        return self._drawn(drawn)[place]

    def _draw(self, number: int) -> list[Batch]:
        count = self.group * self.size
        numbers = range(number * count, (number + 1) * count)
        drawn = self._look(numbers)
        batches = self.shapes.order(_lengths(drawn)).reshape(self.group, self.size)
        order = np.random.default_rng([self.seed, number]).permutation(self.group)
        return [
            _stack(
                self._fill(numbers, drawn, batches[batch]),
                self.pack,
                functools.partial(self.shapes.fit, step=number * self.group + place),
            )
            for place, batch in enumerate(order)
        ]

    def _look(self, numbers: range) -> list[Encoded]:
        """Examples of these numbers: those of this process's share, and the lengths of the others."""
        index, count = self.share.index, self.share.count
        own = [self._encoded[i] for i in numbers[index::count]]
        known = [(e.id, len(e.source), len(e.target.inputs), e.source_was_cut, e.target_was_cut) for e in own]
        told = self.share.tell(json.dumps(known).encode())
        shares = [own if i == index else [_blank(*e) for e in json.loads(text)] for i, text in enumerate(told)]
        return [shares[i % count][i // count] for i in range(len(numbers))]

    def _fill(self, numbers: range, drawn: Sequence[Encoded], places: np.ndarray) -> list[Encoded]:
        """The examples of a batch in their final order, whole where this process holds their row."""
        share, places = self.share, places[_dealt([drawn[i] for i in places], self.pack)]
        lacks = [
            i % share.count != share.index and place // self.pack in share.rows
            for place, i in enumerate(places.tolist())
        ]
        return [self._encoded[numbers[i]] if lack else drawn[i] for i, lack in zip(places, lacks, strict=True)]


def _blank(name: str, source: int, slots: int, *cut: bool) -> Encoded:
    """What stands for an example of that length where only its length matters."""
    target = grid.Flat(
        *(np.zeros(slots, np.float32 if field == "weights" else np.int32) for field in grid.Flat._fields)
    )
    return Encoded(name, np.zeros(source, np.int32), target, *cut)


def prefetch(batches: Sequence[Batch], start: int) -> Iterator[Batch]:
    """Batches from the `start`-th on, made in a thread of its own a few ahead of their use."""
    with extra("train", "training"):
        import grain
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    iterator = iter(grain.MapDataset.source(batches).to_iter_dataset(reading))
    iterator.set_state({"next_index": start})
    return iterator


def fixed_batches(examples: Sequence[Encoded], config: TrainConfig, shapes: Shapes) -> Iterator[Batch]:
    """All examples once, in order of length; the last batch is filled up with weightless copies."""
    ordered, size = [examples[i] for i in shapes.order(_lengths(examples))], config.batch_size
    for first in range(0, len(ordered), size):
        part = ordered[first : first + size]
        filler = part[-1]._replace(target=part[-1].target._replace(weights=np.zeros_like(part[-1].target.weights)))
        yield collate([*part, *[filler] * (size - len(part))], pack_size(config), shapes.fit)
