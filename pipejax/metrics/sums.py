"""Scores of a collection are functions of sums over its documents; so they can be taken again of samples of them."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Document = Mapping[str, float]


def total(documents: Sequence[Document]) -> dict[str, float]:
    """The sum of each entry, in order; empty where there are no documents."""
    return {key: sum(document[key] for document in documents) for key in (documents[0] if documents else ())}


def bootstrap(
    first: Sequence[Document],
    second: Sequence[Document],
    combine: Callable[[Mapping[str, float], int], dict[str, float]],
    *,
    samples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, tuple[float, float, float]]:
    """The gain in score of the second system over the first on the same documents, and its confidence interval.

    Args:
      first, second: what each document adds to the sums, in the same order.
      combine: makes scores of sums and the number of documents.
      samples: of as many documents, drawn with replacement; both systems have the same ones (Koehn 2004).
      confidence: of the interval of percentiles.
      seed: of the draws.

    Returns:
      of each score (difference, low, high).

    Raises:
      ValueError: no documents, or not the same number.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"expected the same documents twice; got {len(first)} and {len(second)}")
    rng, count = np.random.default_rng(seed), len(first)
    keys = list(first[0])
    values = np.array([[[d[key] for key in keys] for d in system] for system in (first, second)])  # [2, D, K]

    def difference(weights: np.ndarray) -> dict[str, float]:
        before, after = (combine(dict(zip(keys, weights @ system, strict=True)), count) for system in values)
        return {name: after[name] - before[name] for name in after}

    drawn = [difference(np.bincount(rng.integers(count, size=count), minlength=count)) for _ in range(samples)]
    tails = 100 * np.array([(1 - confidence) / 2, (1 + confidence) / 2])
    result = {}
    for name, value in difference(np.ones(count)).items():
        low, high = np.percentile([d[name] for d in drawn], tails)
        result[name] = float(value), float(low), float(high)
    return result
