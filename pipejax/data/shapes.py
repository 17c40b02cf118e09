"""The padded shapes of training batches: few, since each one compiles, and chosen once, from the examples' lengths.

A shape is a pair: padded source tokens and padded slots of a row. Sources come in a few levels; within a level
examples are ordered by their slots, so that a batch pads little of either. What pairs the batches then need is tried
out on draws from a sample of the lengths, and the pairs are merged, those first that cost the least padding, until few
are left. A run begins with the most useful ones and takes another every few steps: a short one compiles few.

Shapes: B batch, G rows of slots.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipejax.data.padding import round_up

Pair = tuple[int, int]
TRIED = 640  # batches that the choice is made on
FIRST, EVERY = 4, 8  # pairs that a run begins with; steps until there is another
SOURCE = 2.0  # what padding a source counts against padding slots: there are ten times as many of its tokens
LONGEST = 2**31 - 1  # no length is: arrays count in 32 bits


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Pairs of padded lengths, the most useful first; the first one holds all others."""

    levels: tuple[int, ...]  # lengths that sources are sorted by
    pairs: tuple[Pair, ...]
    limit: Pair  # that no batch exceeds
    means: tuple[float, float]  # real source tokens, and real slots of a row: what padding is measured by

    def order(self, lengths: np.ndarray) -> np.ndarray:
        """An order of examples [n, 2] in which neighbours have like lengths: by level, then there and back by slots."""
        level = np.searchsorted(self.levels, lengths[:, 0])
        return np.lexsort((np.where(level % 2, -1, 1) * lengths[:, 1], level))

    def in_use(self, step: int) -> tuple[Pair, ...]:
        """The pairs that batches are padded to at that step, from 0."""
        return self.pairs[: FIRST + step // EVERY]

    def fit(self, need: Pair, step: int = 0) -> Pair:
        """The cheapest pair, of those in use at that step, that holds so much.

        What exceeds them all gets one of the doublings of the first pair.
        """
        fitting = [p for p in self.in_use(step) if p[0] >= need[0] and p[1] >= need[1]]
        if fitting:
            return min(fitting, key=self.cost)
        source, slots = (
            min(length << max(math.ceil(math.log2(n / length)), 0), max(limit, round_up(n)))
            for n, length, limit in zip(need, self.pairs[0], self.limit, strict=True)
        )
        return source, slots

    def cost(self, pair: Any) -> Any:
        """Of a batch of that shape, or of each of an array [..., 2]: padded against real."""
        pairs = np.asarray(pair)
        return SOURCE * pairs[..., 0] / self.means[0] + pairs[..., 1] / self.means[1]

    def to_json(self) -> dict[str, Any]:
        """What `Shapes.from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "Shapes":
        """What `to_json` made, also after it went through JSON.

        Raises:
          ValueError: it made no such thing.
        """
        try:
            pairs = tuple((source, slots) for source, slots in values["pairs"])
            rising, (source, slots), means = tuple(values["levels"]), values["limit"], tuple(values["means"])
        except (TypeError, LookupError, ValueError) as error:
            raise ValueError(f"no shapes: {error}") from error
        lengths = [*rising, source, slots, *(length for pair in pairs for length in pair)]
        kinds = all(type(x) is int for x in lengths) and all(type(x) in (int, float) for x in means)
        if not (rising and pairs and len(means) == 2 and kinds and all(0 < x <= LONGEST for x in (*lengths, *means))):
            raise ValueError("no shapes: expected lengths, and two means")
        if list(rising) != sorted(rising) or any(a > b for pair in pairs for a, b in zip(pair, pairs[0], strict=True)):
            raise ValueError("no shapes: expected levels that grow, and a first pair that holds all others")
        return cls(rising, pairs, (source, slots), means)


def choose(lengths: np.ndarray, *, size: int, group: int, pack: int, most: int, limit: Pair) -> Shapes:
    """At most that many pairs for batches of such examples.

    Args:
      lengths: i64 [n, 2], source tokens and slots of a sample of the examples.
      size: B.
      group: batches that are drawn together and ordered by length.
      pack: B / G, examples that share a row of slots.
      most: pairs.
      limit: what no source and no row of slots exceeds.
    """
    rng, together = np.random.default_rng(0), group * size
    draws = max(TRIED // group, 1)
    epochs = [rng.permutation(len(lengths)) for _ in range(-(-draws * together // len(lengths)))]
    drawn = lengths[np.concatenate(epochs)[: draws * together]].reshape(draws, together, 2)
    longest = np.sort(drawn[..., 0], axis=1)[:, size - 1 :: size].ravel()  # source of each batch in order of sources
    means = float(lengths[:, 0].mean()), float(pack * lengths[:, 1].mean())
    rounded = [round_up(int(n)) for n in (*longest, lengths[:, 0].max())]
    best, least = None, math.inf
    for count in sorted({max(most * n // 12, 1) for n in (3, 4, 6, 8, 12)}):
        shapes = Shapes(tuple(levels(rounded, count)), (), limit, means)
        needs, counts = np.unique(_needs(drawn, shapes, size, pack), axis=0, return_counts=True)
        pairs, cost = _select(needs, counts, most, shapes)
        if cost < least:
            best, least = dataclasses.replace(shapes, pairs=tuple(pairs)), cost
    assert best is not None
    return best


def _needs(drawn: np.ndarray, shapes: Shapes, size: int, pack: int) -> np.ndarray:
    """[n, 2]: the level of the longest source, and the slots of the longest row, of each batch of draws [.., .., 2]."""
    batches = np.concatenate([draw[shapes.order(draw)] for draw in drawn]).reshape(-1, size, 2)
    # As `data.batches.deal` shares slots out over rows, in all batches at once.
    n, sums = np.arange(len(batches)), np.zeros((len(batches), size // pack))
    room = np.full(sums.shape, pack)
    for slots in -np.sort(-batches[..., 1]).T:
        row = np.where(room > 0, sums, np.inf).argmin(1)
        sums[n, row] += slots
        room[n, row] -= 1
    source = np.asarray(shapes.levels)[np.searchsorted(shapes.levels, batches[..., 0].max(1))]
    return np.stack([source, [round_up(int(width)) for width in sums.max(1)]], axis=1)


def levels(lengths: Sequence[int], most: int) -> list[int]:
    """At most that many of the lengths, to round all of them up to with the least padding: dynamic programming."""
    values, counts = np.unique(lengths, return_counts=True)
    before = np.concatenate([[0], counts.cumsum()])
    # cost[i, j]: of rounding the values i to j - 1 up to the last of them.
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


def _select(needs: np.ndarray, counts: np.ndarray, most: int, shapes: Shapes) -> tuple[list[Pair], float]:
    """Pairs that hold all needs, made of their lengths, and what they cost; what saves the most is taken first.

    In the end each one is given up for another as long as that saves padding: the first choices knew of no others.
    """
    every = np.stack(np.meshgrid(*(np.unique(axis) for axis in needs.T)), -1).reshape(-1, 2)
    holds = (every >= needs[:, None]).all(2)
    cost = np.where(holds, shapes.cost(every), np.inf)
    weight = counts.astype(float)

    def totals(others: list[int]) -> np.ndarray:
        """Of each pair beside those."""
        return weight @ np.minimum(cost, cost[:, others].min(1)[:, None])

    chosen = [int((every == every.max(0)).all(1).argmax())]
    while len(chosen) < min(most, len(every)):
        chosen.append(int(totals(chosen).argmin()))
    best, again = float(weight @ cost[:, chosen].min(1)), True
    while again:
        again = False
        for place in range(1, len(chosen)):
            found = totals(chosen[:place] + chosen[place + 1 :])
            if found.min() < best * (1 - 1e-9):
                best, again = float(found.min()), True
                chosen[place] = int(found.argmin())
    return [(int(every[i, 0]), int(every[i, 1])) for i in dict.fromkeys(chosen)], best
