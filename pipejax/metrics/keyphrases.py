"""F1 of predicted keyphrases, present in their document and absent from it (Meng et al. 2017, Chan et al. 2019).

The text is split into words of any script, as for ROUGE.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from pipejax.metrics.exact import fold
from pipejax.system.extras import extra

_MARKS = "".join(c for c in map(chr, range(0x300, 0x1F000)) if unicodedata.category(c).startswith("M"))
# Scripts without spaces, in which each letter counts as a word: Thai, Lao, Burmese, Khmer, Han, kana.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3021-\u3029\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
_UNSPACED += "\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_LETTER = rf"(?:[^\W_{_UNSPACED}]|[{_MARKS}])"
_ALONE = rf"(?![\W_])[{_UNSPACED}][{_MARKS}]*"
_WORD = re.compile(rf"{_ALONE}|{_LETTER}+")
# A number keeps its points, like 1.5 and 1/12, and a name its signs, like C++ and C#; any other sign is a term.
_TERM = re.compile(rf"{_ALONE}|(?:{_LETTER}|(?<=\d)[.,:/](?=\d))+(?:[+#]+(?!\w))?|\S")


def words(text: str) -> list[str]:
    """Returns letters, digits and their marks as words, in lower case; all other characters are dropped."""
    return _WORD.findall(fold(text).casefold())


def terms(text: str) -> list[str]:
    """Returns words, numbers and each other sign as terms, in lower case; only white space is dropped."""
    return _TERM.findall(fold(text).casefold())


with extra("metrics", "metrics"):
    from nltk.stem.porter import PorterStemmer

CUTS = {"@5": 5, "@M": None}  # the number of predictions per kind that count; None: all
KINDS = ("present", "absent")

_SEPARATOR = "<peos>"  # separates present from absent phrases in some data; not a phrase
_INVALID = {"<unk>", ",", "."}  # a prediction with one of these words does not count

Phrase = tuple[str, ...]  # a sequence of stems
stem: Callable[[str], str] = functools.lru_cache(maxsize=1 << 20)(PorterStemmer().stem)


class _Scores(NamedTuple):
    """Scores of one document, 0 to 1."""

    precision: float
    recall: float
    f1: float


def per_document(
    sources: Sequence[str],
    gold: Sequence[Sequence[str]],
    predicted: Sequence[Sequence[str]],
    *,
    by_spaces: bool = False,
    tick: Callable[[int], None] = lambda count: None,
) -> list[dict[str, float]]:
    """Returns precision, recall and F1 of each document, for each kind at each cut, 0 to 1.

    The arguments are as for `metrics.score`. An empty gold phrase counts as absent; an empty prediction is ignored.
    `by_spaces`: whether to use the tokenisation of KP20k and KPTimes.
    """
    documents, split = [], stems_of if by_spaces else _stemmed_terms
    separator, invalid = (_SEPARATOR, _INVALID) if by_spaces else ("", set[str]())
    for source, golds, guesses in zip(sources, gold, predicted, strict=True):
        text = " ".join(split(source))
        wished, guessed = (_distinct(map(split, phrases), separator) for phrases in (golds, guesses))
        # A phrase without words is ignored, not counted as wrong.
        valid = [phrase for phrase in guessed if phrase and not invalid & {*phrase}]
        wanted, offered = _by_kind(wished, text), _by_kind(valid, text)
        found: dict[str, float] = {}
        for kind in KINDS:
            for cut, most in CUTS.items():
                for name, value in _scores_at(wanted[kind], offered[kind], most)._asdict().items():
                    found[f"{kind}_{name}{cut}"] = value
        documents.append(found)
        tick(1)
    return documents


def combine(sums: Mapping[str, float], count: int) -> dict[str, float]:
    """Returns F1@5 and F1@M in percent for present and absent keyphrases, from the sums over `count` documents.

    Scores are macro-averaged, in two ways. Names such as "present_f1@M" are the F1 of the mean precision and the mean
    recall; with the suffix "_mean_doc" they are the mean of the documents' F1. Documents without a gold phrase of a
    kind count as 0.
    """
    result: dict[str, float] = {}
    for kind in KINDS:
        for cut in CUTS:
            mean = [sums[f"{kind}_{name}{cut}"] / count if count else 0.0 for name in _Scores._fields]
            result[f"{kind}_f1{cut}"] = 100 * _harmonic_mean(mean[0], mean[1])
            result[f"{kind}_f1{cut}_mean_doc"] = 100 * mean[2]
    return result


def stems_of(text: str) -> Phrase:
    """Returns a text's words in lower case, stemmed (Porter); punctuation stays attached to its word."""
    return tuple(map(stem, text.lower().split()))


def _stemmed_terms(text: str) -> Phrase:
    """Returns the words and signs of any script as separate terms; ASCII words are stemmed."""
    return tuple(stem(term) if term.isascii() else term for term in terms(text))


def _distinct(phrases: Iterable[Phrase], separator: str) -> list[Phrase]:
    """Returns the phrases without duplicates, in order. A phrase without words is kept, the separator is not."""
    every: dict[Phrase, None] = {}
    for phrase in phrases:
        kept = tuple(word for word in phrase if word != separator)
        if kept or not phrase:
            every[kept] = None
    return list(every)


def _by_kind(phrases: list[Phrase], text: str) -> dict[str, list[Phrase]]:
    """Groups the phrases by kind: present are those whose stems occur consecutively in the document."""
    parts: dict[str, list[Phrase]] = {kind: [] for kind in KINDS}
    for phrase in phrases:
        present = bool(phrase) and f" {' '.join(phrase)} " in f" {text} "
        parts["present" if present else "absent"].append(phrase)
    return parts


def _scores_at(wanted: list[Phrase], offered: list[Phrase], cut: int | None) -> _Scores:
    """Returns the scores at a cut. Precision at 5 divides by 5 even if fewer phrases were predicted."""
    most = len(offered) if cut is None else cut
    right = len({*wanted} & {*offered[:most]})
    precision = right / most if most else 0.0
    recall = right / len(wanted) if wanted else 0.0
    return _Scores(precision, recall, _harmonic_mean(precision, recall))


def _harmonic_mean(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
