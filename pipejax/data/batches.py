"""Training batches: packing targets into sequences, the order of examples, and the work of each process.

A slot is one decoder position. The targets of B / G consecutive examples are packed one after the other into a sequence
of slots, so that little of the sequence is padding. (A sequence is a row of the batch's arrays; a row of the grid is a
part of one target.) Shapes: B batch, L source length, G sequences, N slots of a sequence.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pipejax import grid, methods
from pipejax.config import Config, TrainConfig
from pipejax.data.encoding import Encoded, encode_example
from pipejax.data.examples import Example, Shuffled, Stream
from pipejax.data.shapes import Pair, Shapes, choose_pairs, deal, pad, round_up
from pipejax.data.tokenizer import Tokenizer
from pipejax.model.backbone import Backbone
from pipejax.system import strict_json
from pipejax.system.errors import UserError
from pipejax.system.extras import extra

SAMPLE, CHARACTERS = 4000, 4_000_000  # the largest sample that `choose_shapes` takes: examples and characters


class Batch(NamedTuple):
    """A batch of padded arrays, and the facts about its examples for the log."""

    arrays: dict[str, np.ndarray]
    ids: list[str]
    lengths: np.ndarray  # i64 [B, 2], source tokens and target slots of each example without padding
    cut_sources: int
    cut_targets: int


def pack_size(config: TrainConfig) -> int:
    """Returns the number of targets packed into a sequence: `train.pack`, or 1 to 4 if that is 0.

    The choice depends on the batch size and not on the mesh, so that a run has the same batches and the same dropout on
    any number of devices. It leaves a whole number of sequences for each of gcd(batch size, 8) devices.
    """
    if config.pack:
        return config.pack
    share = config.batch_size // math.gcd(config.batch_size, 8)
    return next(size for size in (4, 3, 2, 1) if share % size == 0)


def longest(config: Config) -> Pair:
    """Returns the longest shape that the config allows: (source tokens, slots of a sequence)."""
    slots = methods.trained(config).most_slots(config.data.max_target)
    return round_up(config.data.max_source), round_up(slots * pack_size(config.train))


def abstract_batch(config: TrainConfig, shape: Pair, choices: int = 0) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a batch's arrays, by name.

    Args:
      config: batch size and packing.
      shape: the padded lengths (L, N).
      choices: `Method.choices`, the extra axis of targets and weights; 0: none.
    """
    size, rows = config.batch_size, config.batch_size // pack_size(config)
    slots: dict[str, tuple[int, ...]] = dict.fromkeys((*grid.Flat._fields, "example"), (rows, shape[1]))
    if choices:
        slots |= dict.fromkeys(("targets", "weights"), (rows, shape[1], choices))
    return {"source": (size, shape[0]), "source_length": (size,), "number": (size,), "slots": (rows,), **slots}


def collate(
    examples: Sequence[Encoded],
    pack: int = 1,
    fit: Callable[[Pair], Pair] = lambda need: (round_up(need[0]), round_up(need[1])),
) -> Batch:
    """Pads examples to one batch, with the targets of `pack` examples in each sequence; packing reorders the examples.

    Args:
      examples: the B encoded examples.
      pack: examples per sequence; it divides B.
      fit: a function from the length of the longest source and of the longest sequence to the lengths (L, N) to which
        the batch is padded.

    Returns:
      The batch with the arrays source i32 [B, L]; source_length i32 [B]; number i32 [B], the index in `examples`; slots
      i32 [G], the used slots of each sequence; inputs, targets, row, time, and example (0 to pack - 1, the example to
      which a slot belongs) i32 [G, N]; weights f32 [G, N].
    """
    order = _packing_order(examples, pack)
    return _make_batch([examples[i] for i in order], order, pack, fit)


def _packing_order(examples: Sequence[Encoded], pack: int) -> list[int]:
    """Returns the indices of a batch's examples in the order in which they fill the sequences."""
    return deal([len(e.target.inputs) for e in examples], pack)


def _make_batch(examples: Sequence[Encoded], numbers: Sequence[int], pack: int, fit: Callable[[Pair], Pair]) -> Batch:
    """Makes a batch of examples in the order in which they fill the sequences; `numbers` are their indices."""
    sources = [e.source for e in examples]
    lengths = np.asarray([len(s) for s in sources], np.int32)
    groups = [examples[i : i + pack] for i in range(0, len(examples), pack)]
    slots = np.asarray([sum(len(e.target.inputs) for e in group) for group in groups], np.int32)
    length, width = fit((int(lengths.max()), int(slots.max())))
    arrays = {"source": pad(sources, length), "source_length": lengths, "number": np.asarray(numbers, np.int32)}
    for name in grid.Flat._fields:
        arrays[name] = pad([np.concatenate([getattr(e.target, name) for e in group]) for group in groups], width)
    owners = [np.repeat(np.arange(len(g), dtype=np.int32), [len(e.target.inputs) for e in g]) for g in groups]
    arrays |= {"example": pad(owners, width), "slots": slots}
    cut = sum(e.source_was_cut for e in examples), sum(e.target_was_cut for e in examples)
    return Batch(arrays, [e.id for e in examples], _lengths(examples), *cut)


def _lengths(examples: Sequence[Encoded]) -> np.ndarray:
    """Returns the numbers of source tokens and of target slots of each example, i64 [n, 2]."""
    return np.asarray([(len(e.source), len(e.target.inputs)) for e in examples], np.int64).reshape(-1, 2)


def choose_shapes(examples: Sequence[Example], tokenizer: Tokenizer, config: Config, model: Backbone) -> Shapes:
    """Chooses the padded shapes from the lengths of a random sample of the examples.

    The sample is drawn with a fixed seed, so it is the same on every machine.
    """
    sample, characters = list[Encoded](), 0
    for i in np.random.default_rng(0).permutation(len(examples))[:SAMPLE]:
        example = examples[int(i)]
        sample.append(encode_example(example, tokenizer, config, model))
        characters += len(example.source)
        if characters > CHARACTERS:
            break
    train = config.train
    sizes = {"size": train.batch_size, "group": train.length_group, "pack": pack_size(train), "steps": train.steps}
    return choose_pairs(_lengths(sample), **sizes, most=train.shapes, limit=longest(config))


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of every batch that this process encodes; the defaults are for a single process."""

    index: int = 0
    count: int = 1
    # The numbers of the sequences on this process's devices; several processes may hold the same sequence.
    rows: frozenset[int] = frozenset()
    # Sends this process's message to all processes; returns the messages of all, by process index.
    tell: Callable[[bytes], list[bytes]] = lambda mine: [mine]


class TrainingBatches(Sequence[Batch]):
    """An endless sequence of batches. Batch i is the same on every machine, so a run's data position is its step.

    The examples are shuffled anew for each epoch; a stream is shuffled one buffer at a time. The examples of
    `train.length_group` batches are drawn together and sorted by length into batches, to keep padding small; then the
    order of the batches is shuffled.

    With n processes, each process encodes every n-th drawn example and sends its length to all processes. Then each
    process encodes the examples of its own sequences that it has not encoded yet. In total it encodes at most 2 / n of
    the examples, unless several processes hold the same sequences. Zeros of the same lengths stand for all other
    examples. All processes must request the same batches in the same order.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Tokenizer,
        config: Config,
        model: Backbone,
        shapes: Shapes | None = None,
        share: Share | None = None,
    ) -> None:
        """Prepares the order of the examples.

        Args:
          examples: the training examples, in memory or a stream.
          tokenizer: the model's tokenizer.
          config: the experiment.
          model: the architecture, for the special ids.
          shapes: the padded shapes; None: each batch is padded by `round_up`.
          share: the part of this process; None: all.
        """
        self.share = share or Share()
        self.group, self.size, self.seed = config.train.length_group, config.train.batch_size, config.train.seed
        self.pack = pack_size(config.train)
        self.shapes = shapes or choose_shapes(examples, tokenizer, config, model)
        with extra("train", "training"):
            import grain

        if isinstance(examples, Stream):
            if examples.size < self.group * self.size:
                raise UserError(
                    "data.stream",
                    found=f"{examples.size}",
                    expected=f"at least {self.group * self.size}, the number of examples drawn together",
                    hint="train.batch_size x train.length_group",
                )
            shuffled = grain.MapDataset.source(Shuffled(examples, self.seed))
            self._encoded = shuffled.map(lambda example: encode_example(example, tokenizer, config, model))
        else:

            def encoded(index: int) -> Encoded:
                return encode_example(examples[index], tokenizer, config, model)

            if len(examples) < self.group * self.size:  # a draw would contain some of them more than once
                encoded = functools.cache(encoded)
            self._encoded = grain.MapDataset.range(len(examples)).seed(self.seed).shuffle().repeat(None).map(encoded)
        self._drawn = functools.lru_cache(maxsize=2)(self._draw)

    def __len__(self) -> int:
        return len(self._encoded) // self.size

    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]  # slices are not supported
        drawn, place = divmod(index, self.group)
        return self._drawn(drawn)[place]

    def _draw(self, number: int) -> list[Batch]:
        """Returns the batches of one draw: `length_group` batches, sorted by length, then shuffled."""
        count = self.group * self.size
        numbers = range(number * count, (number + 1) * count)
        drawn = self._encode_share(numbers)
        batches = self.shapes.order(_lengths(drawn)).reshape(self.group, self.size)
        order = np.random.default_rng([self.seed, number]).permutation(self.group)
        found = []
        for place, batch in enumerate(order):
            own = batches[batch]
            own = own[_packing_order([drawn[i] for i in own], self.pack)]
            fit = functools.partial(self.shapes.fit, step=number * self.group + place)
            found.append(_make_batch(self._encode_missing(numbers, drawn, own), own.tolist(), self.pack, fit))
        return found

    def _encode_share(self, numbers: range) -> list[Encoded]:
        """Returns the examples with these numbers; outside this process's share, zeros of the same lengths."""
        index, count = self.share.index, self.share.count
        own = [self._encoded[i] for i in numbers[index::count]]
        known = [(e.id, len(e.source), len(e.target.inputs), *e[3:]) for e in own]  # everything but the tokens
        told = self.share.tell(json.dumps(known).encode())
        shares = [
            own if i == index else [_zeros_for(*e) for e in strict_json.loads(text)] for i, text in enumerate(told)
        ]
        return [shares[i % count][i // count] for i in range(len(numbers))]

    def _encode_missing(self, numbers: range, drawn: Sequence[Encoded], places: np.ndarray) -> list[Encoded]:
        """Returns the examples of a batch at these places of a draw.

        An example is encoded if this process holds its sequence.
        """
        share = self.share
        lacks = [
            i % share.count != share.index and place // self.pack in share.rows
            for place, i in enumerate(places.tolist())
        ]
        return [self._encoded[numbers[i]] if lack else drawn[i] for i, lack in zip(places, lacks, strict=True)]


def _zeros_for(name: str, source: int, slots: int, *facts: bool) -> Encoded:
    """Returns an example of zeros with these lengths, in place of an example that another process encodes."""
    target = grid.Flat(*(np.zeros(slots, np.float32 if x == "weights" else np.int32) for x in grid.Flat._fields))
    return Encoded(name, np.zeros(source, np.int32), target, *facts)


def prefetch(batches: Sequence[Batch], start: int) -> Iterator[Batch]:
    """Yields the batches from number `start` on; a thread prepares a few batches ahead."""
    with extra("train", "training"):
        import grain
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    iterator = iter(grain.MapDataset.source(batches).to_iter_dataset(reading))
    iterator.set_state({"next_index": start})
    made: Iterator[Batch] = iterator
    return made


def fixed_batches(examples: Sequence[Encoded], config: TrainConfig, shapes: Shapes) -> Iterator[Batch]:
    """Yields batches with every example once, sorted by length; copies with weight 0 fill up the last batch."""
    ordered, size = [examples[i] for i in shapes.order(_lengths(examples))], config.batch_size
    for first in range(0, len(ordered), size):
        part = ordered[first : first + size]
        filler = part[-1]._replace(target=part[-1].target._replace(weights=np.zeros_like(part[-1].target.weights)))
        yield collate([*part, *[filler] * (size - len(part))], pack_size(config), shapes.fit)
