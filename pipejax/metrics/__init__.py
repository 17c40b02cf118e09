"""Scores of generated rows against the rows of the data, in percent, a file for each family of tasks."""

from collections.abc import Callable, Sequence

from pipejax.metrics import spans

# Of each metric the score that stands for it, and that picks the best checkpoint of a run.
HEADLINES = {"spans": "em_f1", "keyphrases": "present_f1@M", "rouge": "rougeLsum"}


def score(
    name: str,
    sources: Sequence[str],
    gold: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    *,
    tick: Callable[[int], None] = lambda count: None,
) -> dict[str, float]:
    """The scores of a metric over documents, not rounded; `HEADLINES` names its chief one.

    Args:
      name: one of `HEADLINES`.
      sources: the document texts; read by "keyphrases" alone.
      gold: the rows of each document in the data.
      predicted: the generated rows of each, in the same order.
      tick: called with the number of documents done since the last call.

    Raises:
      ValueError: the name is unknown, or the numbers of documents differ.
    """
    if name not in HEADLINES:
        raise ValueError(f"metric: expected one of {', '.join(HEADLINES)}; got {name!r}")
    if name == "spans":
        scores = spans.score(gold, predicted)
        tick(len(gold))
        return scores
    if name == "keyphrases":
        from pipejax.metrics import keyphrases  # nltk takes a second to import

        return keyphrases.score(sources, gold, predicted, tick=tick)
    from pipejax.metrics import rouge

    return rouge.score(gold, predicted, tick=tick)
