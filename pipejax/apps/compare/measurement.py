"""Decodes the same examples by several entries in turns, and computes scores and times with paired intervals."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from pipejax import metrics
from pipejax.apps.compare import bootstrap
from pipejax.apps.compare.entries import Entry
from pipejax.data.examples import Example
from pipejax.inference.generator import Generator
from pipejax.inference.programs import peak_bytes
from pipejax.offline.evaluation import decode_examples, score_documents

BLOCKS = 20  # the most blocks of examples
FEW = 5  # intervals of times from fewer blocks say little
Interval = tuple[float, float, float]  # a value, and the low and high end of its interval


class Results(NamedTuple):
    """The results of one entry. `gains` and `speed_ratio` compare it with the first entry."""

    entry: Entry
    method: str
    scores: dict[str, Interval]  # percent
    gains: dict[str, Interval]  # differences of scores, of steps and of calls, paired by example
    steps: Interval  # mean of an example
    calls: Interval
    truncated: dict[str, int]  # number of cut answers for each value of the record's `truncated`
    seconds: float  # mean of an example, without compilation and tokenisation
    encoder_seconds: float  # the part of `seconds` that the encoder takes
    speed_ratio: Interval  # seconds of the first entry divided by seconds of this entry, paired by block
    decoder_speed_ratio: Interval  # like `speed_ratio`, without the encoder
    peak_bytes: int | None  # the bytes of a device that the entry's largest program needs; None: unknown


class _Measured:
    """The measurements of one entry so far."""

    def __init__(self) -> None:
        self.documents: list[metrics.Document] = []  # the terms of the scores, one for each example
        self.counts: list[metrics.Document] = []  # steps and calls of each example
        self.times: list[metrics.Document] = []  # seconds of each block
        self.truncated: dict[str, int] = {}


def blocks_of(count: int, batch_size: int) -> list[range]:
    """Divides the examples 0 to count - 1 into at most `BLOCKS` blocks of whole batches; the last may be shorter."""
    batches = -(-count // batch_size)
    size = -(-batches // BLOCKS) * batch_size
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def measure(
    entries: Sequence[Entry],
    generators: Sequence[Generator],
    examples: Sequence[Sequence[Example]],
    *,
    metric: str,
    batch_size: int,
    seed: int,
    tick: Callable[[int], None] = lambda count: None,
) -> list[Results]:
    """Decodes the examples by each entry, block by block.

    In each block the entries take turns in a random order, so that a change of the machine's speed affects all of them.
    Before the measurement, each entry decodes the first block once, which compiles its programs and is not measured.

    Args:
      entries: the entries.
      generators: the opened run of each entry.
      examples: for each entry the examples with the sources that it reads, in the same order; not empty.
      metric: one of `metrics.HEADLINES`.
      batch_size: examples per batch.
      seed: the seed of the order of the entries.
      tick: called with the number of answers after each batch.
    """
    count = len(examples[0])
    order, blocks = random.Random(seed), blocks_of(count, batch_size)
    measured = [_Measured() for _ in entries]
    methods = [entry.method or own.default_method for entry, own in zip(entries, generators, strict=True)]
    decode = partial(decode_examples, metric=metric, batch_size=batch_size, tick=tick, times_encoder=True)
    for own, method, given in zip(generators, methods, examples, strict=True):
        decode(own, [given[i] for i in blocks[0]], method=method)
    for block in blocks:
        for i in order.sample(range(len(entries)), len(entries)):
            part = [examples[i][number] for number in block]
            records, report = decode(generators[i], part, method=methods[i])
            found = measured[i]
            found.documents += score_documents(generators[i], part, records, metric)
            found.counts += [{"steps": record["steps"], "calls": record["calls"]} for record in records]
            found.times.append({"seconds": report.seconds, "encoder_seconds": report.encoder_seconds})
            for name, answers in report.truncated.items():
                found.truncated[name] = found.truncated.get(name, 0) + answers
    combine = partial(metrics.combine, metric)
    results = []
    for entry, own, method, found in zip(entries, generators, methods, measured, strict=True):
        first = measured[0]
        means = bootstrap.intervals([found.counts], lambda sums, number: _means(sums[0], number))
        ratios = bootstrap.intervals([first.times, found.times], _speed_ratios)
        total = metrics.total(found.times)
        results.append(
            Results(
                entry=entry,
                method=method,
                scores=bootstrap.intervals([found.documents], lambda sums, number: combine(sums[0], number)),
                gains={
                    **bootstrap.bootstrap(first.documents, found.documents, combine),
                    **bootstrap.bootstrap(first.counts, found.counts, _means),
                },
                steps=means["steps"],
                calls=means["calls"],
                truncated=found.truncated,
                seconds=total["seconds"] / count,
                encoder_seconds=total["encoder_seconds"] / count,
                speed_ratio=ratios["whole"],
                decoder_speed_ratio=ratios["decoder"],
                peak_bytes=peak_bytes(own.programs, own.make_strategy(method)),
            )
        )
    return results


def _means(sums: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: value / count for name, value in sums.items()}


def _speed_ratios(sums: Sequence[Mapping[str, float]], _: int) -> dict[str, float]:
    """Returns the time of the first of two systems divided by the time of the second.

    "whole" is the ratio of the whole times, and "decoder" the ratio of the times without the encoder.
    """
    first, second = sums
    decoders = [own["seconds"] - own["encoder_seconds"] for own in sums]
    return {"whole": first["seconds"] / second["seconds"], "decoder": decoders[0] / decoders[1]}
