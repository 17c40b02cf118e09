"""Padded lengths, and the choice of a few padded shapes for training batches from the lengths of the examples.

Every length costs a compilation, and every padding token costs time. Training, encoding and decoding weigh these costs
differently, so each has its own rounding function. A shape of a run is a pair of lengths: the source tokens of an
example, and the slots of a sequence, in which one or more targets are packed. Source lengths are rounded up to a few
levels; within a level, examples are sorted by their number of slots, so that both the sources and the targets of a
batch have little padding. Batches drawn from a sample of the lengths show which pairs are needed. `_select` takes the
pairs that save the most padding, and stops when another pair would save less time in the run's steps than its
compilation costs. A run begins with the most useful pairs and adds one every few steps.

Shapes: B batch, G sequences.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Pair = tuple[int, int]  # the source tokens of an example, the slots of a sequence
TRIED, EXAMPLES = 640, 2**17  # the most batches that `choose_pairs` draws, and the most examples in them
FIRST, EVERY = 4, 8  # pairs that a run begins with; steps until it adds one
SOURCE = 2.0  # weight of source padding against slot padding, because sources have ten times the tokens
# Padding tokens that a pair has to save in a run to be worth its compilation, for small models on few cores.
COMPILING = 2**15
LONGEST = 2**31 - 1  # no length is larger: arrays count in 32 bits


def pad(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Returns the rows as one array [B, length, ...], with zeros at the end.

    Lengths and weights mark the padding; an id of 0 does not.
    """
    padded = np.zeros((len(rows), length, *rows[0].shape[1:]), rows[0].dtype)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def round_up(length: int) -> int:
    """Returns the padded length in training: a multiple of 8; above 128, one of 16 steps between powers of two.

    `choose_pairs` takes a few of these lengths.
    """
    step = max(8, 1 << max(math.ceil(math.log2(max(length, 1))) - 5, 0))
    return max(math.ceil(length / step), 1) * step


def bucket(length: int) -> int:
    """Returns the padded length of a source in inference: 16, 24, 32, 48, 64, 96, ...

    These are few lengths, so that few encoders are compiled.
    """
    power = 1 << max(math.ceil(math.log2(max(length, 1))), 4)
    return power * 3 // 4 if 16 < length <= power * 3 // 4 else power


def memory_length(length: int) -> int:
    """Returns the padded length of an encoded source: a power of two from 64 on.

    These are fewer lengths than `bucket` has, because decoders take longer to compile than encoders.
    """
    return max(1 << (length - 1).bit_length(), 64)


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The padded shapes of a run: pairs in order of use. The first pair is at least as long as all others."""

    levels: tuple[int, ...]  # increasing source lengths, the first sort key of examples
    pairs: tuple[Pair, ...]
    limit: Pair  # the longest shape that a batch can need
    means: tuple[float, float]  # mean source tokens, and mean slots of a sequence, without padding

    def order(self, lengths: np.ndarray) -> np.ndarray:
        """Returns indices that sort examples so that neighbours have similar lengths.

        The lengths are i64 [n, 2]: source tokens and slots.
        """
        # Slots increase in even levels and decrease in odd ones, so they stay similar at the boundary of two levels.
        level = np.searchsorted(self.levels, lengths[:, 0])
        return np.lexsort((np.where(level % 2, -1, 1) * lengths[:, 1], level))

    def in_use(self, step: int) -> tuple[Pair, ...]:
        """Returns the padded sizes (source length, slots) in use at an update; updates are counted from 0."""
        return self.pairs[: FIRST + step // EVERY]

    def fit(self, need: Pair, step: int = 0) -> Pair:
        """Returns the cheapest pair in use at a step that is at least as long as `need`.

        If there is none, the first pair's lengths are doubled as often as necessary. A doubled length is at most that
        of `limit`, or the rounded length of `need` if this is greater.
        """
        fitting = [p for p in self.in_use(step) if p[0] >= need[0] and p[1] >= need[1]]
        if fitting:
            return fitting[int(self.cost(np.asarray(fitting)).argmin())]
        source, slots = (
            min(length << max(math.ceil(math.log2(n / length)), 0), max(limit, round_up(n)))
            for n, length, limit in zip(need, self.pairs[0], self.limit, strict=True)
        )
        return source, slots

    def cost(self, pairs: np.ndarray) -> np.ndarray:
        """Returns the cost [...] of padded shapes [..., 2] relative to the mean lengths."""
        return np.asarray(SOURCE * pairs[..., 0] / self.means[0] + pairs[..., 1] / self.means[1])

    def to_json(self) -> dict[str, object]:
        """Returns the fields as JSON values, which `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "Shapes":
        """Returns the shapes that `to_json` described."""
        try:
            pairs = tuple((source, slots) for source, slots in values["pairs"])
            rising, (source, slots), means = tuple(values["levels"]), values["limit"], tuple(values["means"])
        except (TypeError, LookupError, ValueError) as error:
            raise ValueError(f"shapes: {error}; expected the fields of Shapes") from error
        lengths = [*rising, source, slots, *(length for pair in pairs for length in pair)]
        kinds = all(type(x) is int for x in lengths) and all(type(x) in (int, float) for x in means)
        if not (rising and pairs and len(means) == 2 and kinds and all(0 < x <= LONGEST for x in (*lengths, *means))):
            raise ValueError("shapes: expected positive lengths and two positive means")
        if list(rising) != sorted(rising) or any(a > b for pair in pairs for a, b in zip(pair, pairs[0], strict=True)):
            raise ValueError("shapes: expected rising levels, and a first pair as long as all others")
        return cls(rising, pairs, (source, slots), means)


def choose_pairs(
    lengths: np.ndarray, *, size: int, group: int, pack: int, most: int, limit: Pair, steps: int = LONGEST
) -> Shapes:
    """Chooses at most `most` pairs for a run.

    Args:
      lengths: source tokens and slots of a sample of examples, i64 [n, 2].
      size: examples per batch, B.
      group: batches that are drawn and sorted together.
      pack: examples per sequence.
      most: the most pairs.
      limit: the longest shape that a batch can need.
      steps: the number of steps of the run.
    """
    rng, together = np.random.default_rng(0), group * size
    draws = max(min(TRIED // group, EXAMPLES // together), 1)
    epochs = [rng.permutation(len(lengths)) for _ in range(-(-draws * together // len(lengths)))]
    drawn = lengths[np.concatenate(epochs)[: draws * together]].reshape(draws, together, 2)
    # The longest source of each batch if batches were sorted by source length alone.
    longest = np.sort(drawn[..., 0], axis=1)[:, size - 1 :: size].ravel()
    means = float(lengths[:, 0].mean()), float(pack * lengths[:, 1].mean())
    rounded = [round_up(int(n)) for n in (*longest, lengths[:, 0].max())]
    price = (
        (SOURCE + 1) * COMPILING / (steps * size * lengths.mean(0).sum())
    )  # the cost of a batch without padding is SOURCE + 1
    best, least = None, math.inf
    for count in sorted({max(most * n // 12, 1) for n in (3, 4, 6, 8, 12)}):
        shapes = Shapes(tuple(levels(rounded, count)), (), limit, means)
        needs, counts = np.unique(_needed_shapes(drawn, shapes, size, pack), axis=0, return_counts=True)
        pairs, cost = _select(needs, counts / counts.sum(), most, shapes, price)
        if cost < least:
            best, least = dataclasses.replace(shapes, pairs=tuple(pairs)), cost
    assert best is not None
    return best


def _needed_shapes(drawn: np.ndarray, shapes: Shapes, size: int, pack: int) -> np.ndarray:
    """Returns the shape that each batch needs (level and slots), i64 [n, 2].

    The drawn examples' lengths are [draws, group * B, 2].
    """
    batches = np.concatenate([draw[shapes.order(draw)] for draw in drawn]).reshape(-1, size, 2)
    packed = np.stack([batch[deal(batch[:, 1].tolist(), pack), 1] for batch in batches])
    widths = packed.reshape(len(batches), -1, pack).sum(2).max(1)
    source = np.asarray(shapes.levels)[np.searchsorted(shapes.levels, batches[..., 0].max(1))]
    return np.stack([source, [round_up(int(width)) for width in widths]], axis=1)


def deal(lengths: Sequence[int], size: int) -> list[int]:
    """Orders the indices of `lengths` so that each run of `size` neighbours has nearly the same total length.

    The assignment is greedy: examples are taken from the longest to the shortest, and each goes to the run with the
    smallest sum that still has room.
    """
    runs: list[list[int]] = [[] for _ in range(len(lengths) // size)]
    open_runs = [(0, run) for run in range(len(runs))]  # a heap of sums
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        total, run = open_runs[0]
        runs[run].append(i)
        if len(runs[run]) < size:
            heapq.heapreplace(open_runs, (total + lengths[i], run))
        else:
            heapq.heappop(open_runs)
    return [i for run in runs for i in run]


def levels(lengths: Sequence[int], most: int) -> list[int]:
    """Chooses at most `most` of the lengths, so that rounding all lengths up to the chosen ones adds the least padding.

    The function uses dynamic programming over the sorted lengths. The chosen lengths are in increasing order.
    """
    values, counts = np.unique(lengths, return_counts=True)
    before = np.concatenate([[0], counts.cumsum()])
    # cost[i, j]: the total length after rounding the values i to j - 1 up to value j - 1.
    cost = np.concatenate([[0], values]) * (before[None] - before[:, None]).astype(float)
    cost[np.tril_indices(len(before))] = np.inf
    best, choices = np.where(np.arange(len(before)), np.inf, 0.0), []
    for _ in range(min(most, len(values))):
        sums = best[:, None] + cost
        choices.append(sums.argmin(0))
        best = sums.min(0)
    found, end = [], len(values)
    for choice in reversed(choices):
        found.append(int(values[end - 1]))
        end = int(choice[end])
    return found[::-1]


def _select(needs: np.ndarray, weight: np.ndarray, most: int, shapes: Shapes, price: float) -> tuple[list[Pair], float]:
    """Chooses pairs such that each needed shape has a pair that is at least as long.

    Returns:
      The pairs, the longest first, and the mean cost of a batch including the compilation of the pairs.
    """
    every = np.stack(np.meshgrid(*(np.unique(axis) for axis in needs.T)), -1).reshape(-1, 2)
    holds = (every >= needs[:, None]).all(2)
    cost = np.where(holds, shapes.cost(every), np.inf)

    def totals(others: list[int]) -> np.ndarray:
        """Returns the total cost if a candidate is used in addition to `others`, for each candidate."""
        return np.asarray(weight @ np.minimum(cost, cost[:, others].min(1)[:, None]))

    chosen = [int((every == every.max(0)).all(1).argmax())]
    best, again = float(weight @ cost[:, chosen[0]]), True
    # Pairs are added greedily while another pair saves more than its price. Then pairs are exchanged, because the early
    # choices did not take the later ones into account.
    while len(chosen) < most and (found := totals(chosen)).min() < best - price:
        chosen.append(int(found.argmin()))
        best = float(found.min())
    while again:
        again = False
        for place in range(1, len(chosen)):
            found = totals(chosen[:place] + chosen[place + 1 :])
            if found.min() < best * (1 - 1e-9):
                best, again = float(found.min()), True
                chosen[place] = int(found.argmin())
    return [(int(every[i, 0]), int(every[i, 1])) for i in chosen], best + price * len(chosen)
