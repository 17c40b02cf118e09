"""ROUGE F1 of generated texts (Lin 2004) by the rouge_score library, with its own words or with words of any script."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

from pipejax.metrics.keyphrases import stem, words
from pipejax.system.extras import extra

with extra("metrics", "metrics"):
    from rouge_score import rouge_scorer, tokenize

TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def per_document(
    gold: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    *,
    ascii_only: bool = False,
    tick: Callable[[int], None] = lambda count: None,
) -> list[dict[str, float]]:
    """Returns the F1 of ROUGE-1, -2, -L and -Lsum of each document, 0 to 1.

    `ascii_only`: whether to use the library's own words, which are ASCII.
    """

    def stems_of(text: str) -> list[str]:
        found = tokenize.tokenize(text, None) if ascii_only else words(text)
        return [stem(word) if len(word) > 3 and word.isascii() else word for word in found]

    scorer = rouge_scorer.RougeScorer(TYPES, tokenizer=SimpleNamespace(tokenize=stems_of))
    documents = []
    for sentences, guesses in zip(gold, predicted, strict=True):
        found = scorer.score("\n".join(sentences), "\n".join(guesses))
        documents.append({name: score.fmeasure for name, score in found.items()})
        tick(1)
    return documents


def combine(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """Returns the mean F1 scores of `count` documents in percent, from the sums over them."""
    return {name: 100 * sums[name] / count if count else 0.0 for name in TYPES}
