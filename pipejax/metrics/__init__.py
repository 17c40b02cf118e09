"""Scores of generated rows against the rows of the data, in percent; one file for each family of tasks.

The scores of a collection are functions of sums over its documents, so that a bootstrap can recompute them for samples
of the documents.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipejax.metrics import exact, spans
from pipejax.system.strict_json import JsonMapping

Document = Mapping[str, float]  # the terms that one document adds to the sums
Rows = Sequence[Any] | JsonMapping  # texts; for "exact", also (name, value) pairs or an object of values by name
# The headline score of each metric, which selects the best step of a run. The last metric of a line is the paper's.
HEADLINES = {
    **dict.fromkeys(("exact", "exact_caseless", "spans"), "em_f1"),
    **dict.fromkeys(("keyphrases", "keyphrases_kp20k"), "present_f1@M"),
    **dict.fromkeys(("rouge", "rouge_score"), "rougeLsum"),
}
# The number of samples, the confidence level and the seed of a bootstrap.
SAMPLES, CONFIDENCE, SEED = 2000, 0.95, 0


def require(name: str) -> None:
    """Imports the libraries of a metric, so that a missing one is reported before the work to be scored.

    Raises:
      UserError: a library is not installed.
    """
    if HEADLINES[name] != "em_f1":
        from pipejax.metrics import keyphrases, rouge  # noqa: F401  # one extra installs the libraries of both


def score(
    name: str,
    sources: Sequence[str],
    gold: Sequence[Rows],
    predicted: Sequence[Rows],
    *,
    tick: Callable[[int], None] = lambda count: None,
) -> dict[str, float]:
    """Returns the scores of a metric over documents, not rounded; `HEADLINES` names the headline score.

    Args:
      name: one of `HEADLINES`.
      sources: the document texts; only "keyphrases" and "keyphrases_kp20k" read them.
      gold: the rows of each document in the data, as texts. For "exact" a row may also be a (name, value) pair, and all
        rows of a document may be one object: then values are compared by type, and texts in the other argument are
        parsed by the object's keys.
      predicted: the generated rows of each document, in the same order.
      tick: called with the number of documents done since the last call.

    Raises:
      ValueError: the name is unknown, or the numbers of documents differ.
    """
    documents = per_document(name, sources, gold, predicted, tick=tick)
    return combine(name, total(documents), len(documents))


def per_document(
    name: str,
    sources: Sequence[str],
    gold: Sequence[Rows],
    predicted: Sequence[Rows],
    *,
    tick: Callable[[int], None] = lambda count: None,
) -> list[dict[str, float]]:
    """Returns the terms that each document adds to the sums for `combine`.

    The arguments and errors are as for `score`.
    """
    if not len(sources) == len(gold) == len(predicted):
        raise ValueError(
            f"expected a source, gold and predicted rows for each document; "
            f"got {len(sources)}, {len(gold)} and {len(predicted)}"
        )
    headline, texts = HEADLINES.get(name), tuple[Any, Any]((gold, predicted))
    if headline == "em_f1":
        tick(len(gold))
        if name == "spans":
            return spans.per_document(gold, predicted, spans.distinct)
        match = functools.partial(exact.match_object, fold_case=name != "exact")
        golds, guesses = ([*map(match, one, other)] for one, other in ((gold, predicted), (predicted, gold)))
        return spans.per_document(golds, guesses, functools.partial(exact.spell_rows, fold_case=name != "exact"))
    if headline == "present_f1@M":
        from pipejax.metrics import keyphrases  # importing nltk takes a second

        return keyphrases.per_document(sources, *texts, by_spaces=name == "keyphrases_kp20k", tick=tick)
    if headline == "rougeLsum":
        from pipejax.metrics import rouge

        return rouge.per_document(*texts, ascii_only=name == "rouge_score", tick=tick)
    raise ValueError(f"metric: expected one of {', '.join(HEADLINES)}; got {name!r}")


def combine(name: str, sums: Mapping[str, float], count: int) -> dict[str, float]:
    """Returns the scores of `count` documents from the sums of their terms."""
    if HEADLINES[name] == "em_f1":
        return spans.combine(sums, count)
    from pipejax.metrics import keyphrases, rouge

    return {"present_f1@M": keyphrases.combine, "rougeLsum": rouge.combine}[HEADLINES[name]](sums, count)


def gap(
    name: str, sources: Sequence[str], gold: Sequence[Rows], first: Sequence[Rows], second: Sequence[Rows]
) -> dict[str, tuple[float, float, float]]:
    """Returns the gain of the second predictions over the first in each score: (difference, low, high).

    The interval is from a paired bootstrap. `first` and `second` are like `predicted` in `score`; the other arguments
    are the same as in `score`.
    """
    before, after = (per_document(name, sources, gold, predicted) for predicted in (first, second))
    return bootstrap(before, after, functools.partial(combine, name))


def total(documents: Sequence[Document]) -> dict[str, float]:
    """Returns the sum of each entry; an empty dict if there are no documents."""
    return {key: sum(document[key] for document in documents) for key in (documents[0] if documents else ())}


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
