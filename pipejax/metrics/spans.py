"""Exact and partial match of sets of answer spans (MultiSpanQA; Li et al. 2022).

The module needs only the standard library.
"""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Spell = Callable[[Any], list[str]]  # returns the texts of rows that are compared
_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII only: curly quotes and long dashes stay
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def distinct(spans: Iterable[str]) -> list[str]:
    """Returns the normalised spans without duplicates; '' is a member like any other.

    The result is a list, because the order of a set, and with it a sum of floats, would vary with hashes.
    """
    return list(dict.fromkeys(normalise(span) for span in spans))


def per_document(gold: Sequence[Any], predicted: Sequence[Any], spell: Spell = distinct) -> list[dict[str, float]]:
    """Returns the terms that each document adds to the sums for `combine`."""
    documents = []
    for gold_spans, predicted_spans in zip(gold, predicted, strict=True):
        golds, guesses = spell(gold_spans), spell(predicted_spans)
        precision, recall = _best_overlaps(golds, guesses)
        documents.append(
            {
                "gold": max(len(golds), 1),
                "predicted": max(len(guesses), 1),
                "exact": (Counter(golds) & Counter(guesses)).total() if golds or guesses else 1,
                "partial_precision": precision,
                "partial_recall": recall,
            }
        )
    return documents


def combine(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """Returns precision, recall and F1 of EM and PM in percent, micro-averaged, from sums over `count` documents."""
    if not count:
        sums = dict.fromkeys(("gold", "predicted", "exact", "partial_precision", "partial_recall"), 0)
    matches = {"em": ("exact", "exact"), "pm": ("partial_precision", "partial_recall")}
    return {
        f"{name}_{key}": value
        for name, (right, found) in matches.items()
        for key, value in _percentages(sums[right], sums["predicted"], sums[found], sums["gold"]).items()
    }


def normalise(text: str) -> str:
    """Returns the text in lower case, without punctuation and articles, with single spaces.

    Punctuation is deleted first and leaves no space; then articles are deleted.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _best_overlaps(golds: list[str], guesses: list[str]) -> tuple[float, float]:
    """Returns the sum over predictions of the best precision, and the sum over golds of the best recall."""
    nothing_predicted = guesses in ([], [""])
    if not golds or nothing_predicted:
        return (1.0, 1.0) if not golds and nothing_predicted else (0.0, 0.0)
    # Matches are in characters, as in the published scores: difflib's autojunk shortens them from 200 characters on.
    shared = [[difflib.SequenceMatcher(None, g, p).find_longest_match().size for p in guesses] for g in golds]
    precision = sum(max(row[j] for row in shared) / len(p) for j, p in enumerate(guesses) if p)
    recall = sum(max(row) / len(g) for g, row in zip(golds, shared, strict=True) if g)
    return precision, recall


def _percentages(right: float, predicted: float, found: float, gold: float) -> dict[str, float]:
    precision = 100 * right / predicted if predicted else 0.0
    recall = 100 * found / gold if gold else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}
