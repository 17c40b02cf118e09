"""Bootstrap intervals of scores: of one system, and of the gain of a second system over the first."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from pipejax import metrics
from pipejax.metrics import Document, Rows

# The number of samples, the confidence level and the seed of a bootstrap.
SAMPLES, CONFIDENCE, SEED = 2000, 0.95, 0


def gap(
    name: str, sources: Sequence[str], gold: Sequence[Rows], first: Sequence[Rows], second: Sequence[Rows]
) -> dict[str, tuple[float, float, float]]:
    """Returns the gain of the second predictions over the first in each score: (difference, low, high).

    The interval is from a paired bootstrap. `first` and `second` are like `predicted` in `metrics.score`; see
    `metrics.score` for all other arguments.
    """
    before, after = (metrics.per_document(name, sources, gold, predicted) for predicted in (first, second))
    return bootstrap(before, after, functools.partial(metrics.combine, name))


def bootstrap(
    first: Sequence[Document],
    second: Sequence[Document],
    combine: Callable[[Mapping[str, float], int], dict[str, float]],
) -> dict[str, tuple[float, float, float]]:
    """Returns, for each score, the gain of the second system over the first: (difference, low, high).

    The low and high values are percentiles over samples of as many documents, drawn with replacement; both systems use
    the same samples (Koehn 2004).
    """
    if not first or len(first) != len(second):
        raise ValueError(f"expected the same documents twice; got {len(first)} and {len(second)}")

    def differences(sums: Sequence[Mapping[str, float]], count: int) -> dict[str, float]:
        before, after = (combine(of_system, count) for of_system in sums)
        return {name: after[name] - before[name] for name in after}

    return intervals([first, second], differences)


def intervals(
    systems: Sequence[Sequence[Document]],
    statistics: Callable[[Sequence[Mapping[str, float]], int], dict[str, float]],
) -> dict[str, tuple[float, float, float]]:
    """Returns statistics of systems with percentile intervals of a bootstrap: (value, low, high).

    Args:
      systems: for each system, the terms of the same documents.
      statistics: a function of the sums over the documents, one mapping for each system, and of the number of
        documents.
    """
    rng, count = np.random.default_rng(SEED), len(systems[0])
    keys = [list(system[0]) for system in systems]
    values = [np.array([[d[key] for key in own] for d in system]) for own, system in zip(keys, systems, strict=True)]

    def of_sample(weights: np.ndarray) -> dict[str, float]:
        sums = [dict(zip(own, weights @ system, strict=True)) for own, system in zip(keys, values, strict=True)]
        return statistics(sums, count)

    drawn = [of_sample(np.bincount(rng.integers(count, size=count), minlength=count)) for _ in range(SAMPLES)]
    tails = 100 * np.array([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    result = {}
    for name, value in of_sample(np.ones(count)).items():
        low, high = np.percentile([d[name] for d in drawn], tails)
        result[name] = float(value), float(low), float(high)
    return result
