"""Scores of generated rows against the rows of the data, in percent; one file for each family of tasks.

The scores of a collection are functions of sums over its documents, so that a bootstrap (`apps/compare/bootstrap.py`)
can recompute them for samples of the documents.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipejax import moved
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

__getattr__ = moved.renamed("pipejax.metrics", {})


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
      gold: the rows of each document in the data, as texts. For "exact" a row may also be a (name, value) pair, and
        the rows of a document may be given as one JSON object. If only one of `gold` and `predicted` has an object for
        a document, the texts in the other that begin with a key of the object are parsed as the type of its value, and
        values are compared by type.
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


def total(documents: Sequence[Document]) -> dict[str, float]:
    """Returns the sum of each entry; an empty dict if there are no documents."""
    return {key: sum(document[key] for document in documents) for key in (documents[0] if documents else ())}
