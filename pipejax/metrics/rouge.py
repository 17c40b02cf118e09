"""ROUGE F1 of generated texts (Lin 2004), by the rouge_score library with its Porter stemmer."""

import functools
from collections.abc import Callable, Mapping, Sequence

from pipejax.system.extras import extra

with extra("metrics", "metrics"):
    from nltk.stem.porter import PorterStemmer
    from rouge_score import rouge_scorer, tokenize

TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class _Words:
    """The library's own words and stems, each stem computed once: most of the time would go there."""

    def __init__(self) -> None:
        self.stem = functools.lru_cache(maxsize=1 << 20)(PorterStemmer().stem)

    def tokenize(self, text: str) -> list[str]:
        """Lower-case letters and digits of ASCII; words of more than three characters are stemmed."""
        words: list[str] = tokenize.tokenize(text, self)
        return words


def per_document(
    gold: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    *,
    tick: Callable[[int], None] = lambda count: None,
) -> list[dict[str, float]]:
    """F1 of ROUGE-1, -2, -L and -Lsum of each document, from 0 to 1."""
    scorer = rouge_scorer.RougeScorer(TYPES, tokenizer=_Words())
    documents = []
    for sentences, guesses in zip(gold, predicted, strict=True):
        found = scorer.score("\n".join(sentences), "\n".join(guesses))
        documents.append({name: score.fmeasure for name, score in found.items()})
        tick(1)
    return documents


def combine(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """The mean scores of `count` documents in percent from the sums over them."""
    return {name: 100 * sums[name] / count if count else 0.0 for name in TYPES}
