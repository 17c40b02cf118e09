"""MSQA's EM and PM: cases worked out by hand, and agreement with a second implementation."""

import random
import re
import string
from collections.abc import Sequence

import pytest

from pipejax import metrics
from pipejax.metrics.spans import normalise

KEYS = {"em_precision", "em_recall", "em_f1", "pm_precision", "pm_recall", "pm_f1"}


def score(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    return metrics.score("spans", [""] * len(gold), gold, predicted)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The  Red-Apple!", "redapple"),  # a hyphen leaves no space behind
        ("d'or", "dor"),
        ("a.n apple", "apple"),  # punctuation goes first, so "a.n" becomes the article "an"
        ("an-apple", "anapple"),  # and "an-" does not
        ("theatre a day", "theatre day"),
        ("“quoted”", "“quoted”"),  # not in string.punctuation
        ("A—b, cathedral", "—b cathedral"),  # a word boundary, not a space, delimits an article
        ("\tA\n the ", ""),
        ("!?", ""),
    ],
)
def test_texts_are_normalised(text: str, expected: str) -> None:
    assert normalise(text) == expected


@pytest.mark.parametrize(
    "gold, predicted, em, pm",
    [
        # em and pm: precision, recall, f1 of one document, by hand
        (["red apple"], ["The red apple."], (100, 100, 100), (100, 100, 100)),
        (["x", "y"], ["y", "x"], (100, 100, 100), (100, 100, 100)),  # the order does not count
        (["x", "X", "the x"], ["x", "x"], (100, 100, 100), (100, 100, 100)),  # sets, after normalising
        ([], [], (100, 100, 100), (100, 100, 100)),
        ([], [""], (0, 0, 0), (100, 100, 100)),  # {''} is no empty set for EM, and counts as one for PM
        (["the"], ["a"], (100, 100, 100), (0, 0, 0)),  # {''} on both sides: equal for EM, one side empty for PM
        ([], ["x"], (0, 0, 0), (0, 0, 0)),
        (["x"], [], (0, 0, 0), (0, 0, 0)),
        (["x"], [""], (0, 0, 0), (0, 0, 0)),
        # '' and "ab": EM 1 of 2 predictions; PM precision (1 + 0) / 2
        (["ab"], ["ab", "the"], (50, 100, 200 / 3), (50, 100, 200 / 3)),
        # "abcd" and "bcx" share "bc": 2 of 3 characters, 2 of 4; F1 = 2 * 2/3 * 1/2 / (7/6) = 4/7
        (["abcd"], ["bcx"], (0, 0, 0), (200 / 3, 50, 400 / 7)),
        # each takes its best partner: P = (max(4/4, 0) + max(0, 1/2)) / 2, R = (max(4/4, 0) + max(0, 1/2)) / 2
        (["abcd", "ez"], ["abcd", "ey"], (50, 50, 50), (75, 75, 75)),
        # one prediction may serve two golds: P = (2/4) / 1, R = (2/2 + 2/2) / 2
        (["ab", "cd"], ["abcd"], (0, 0, 0), (50, 100, 200 / 3)),
    ],
)
def test_scores_of_one_document_equal_hand_computed_scores(
    gold: list[str], predicted: list[str], em: tuple[float, ...], pm: tuple[float, ...]
) -> None:
    result = score([gold], [predicted])
    assert set(result) == KEYS
    assert [result[f"em_{key}"] for key in ("precision", "recall", "f1")] == pytest.approx(em)
    assert [result[f"pm_{key}"] for key in ("precision", "recall", "f1")] == pytest.approx(pm)


def test_micro_average_equals_hand_computed_scores() -> None:
    # Document 1: 1 correct of 1 guess, 3 golds. Document 2: no gold, one guess. Document 3: both empty, correct.
    result = score([["x", "y", "z"], [], []], [["x"], ["w"], []])
    assert result["em_precision"] == pytest.approx(100 * 2 / 3)  # 1 + 0 + 1 of 1 + 1 + 1
    assert result["em_recall"] == pytest.approx(100 * 2 / 5)  # 1 + 0 + 1 of 3 + 1 + 1
    assert result["em_f1"] == pytest.approx(50)  # 2 * 2/3 * 2/5 / (16/15)


def test_autojunk_is_enabled() -> None:
    # In texts of 200 or more characters, a character with a share above one per cent starts no match: here none does.
    # An empty match at the two beginnings remains, which difflib extends: "xy" is found, "yx" is not.
    guess = "xy" * 100
    assert score([["yx"]], [[guess]])["pm_recall"] == 0
    assert score([["xy"]], [[guess]])["pm_recall"] == 100
    assert score([["yx"]], [[guess[:198]]])["pm_recall"] == 100


def test_unequal_lengths_are_refused_and_no_documents_score_zero() -> None:
    with pytest.raises(ValueError, match="got 2, 2 and 1"):
        score([["x"], ["y"]], [["x"]])
    assert score([], []) == dict.fromkeys(KEYS, 0.0)


def test_scores_equal_a_second_implementation() -> None:
    rng = random.Random(0)
    words = ["a", "the", "an", "red", "apple", "apples", "d'or", "!", "x", "", "No-one", "seven of nine"]

    def spans() -> list[str]:
        count = rng.choice([0, 1, 1, 2, 3, 4])
        return [" ".join(rng.choices(words, k=rng.randint(0, 4))) for _ in range(count)]

    for _ in range(300):
        documents = rng.randint(1, 4)
        gold, predicted = [spans() for _ in range(documents)], [spans() for _ in range(documents)]
        assert score(gold, predicted) == pytest.approx(naive_score(gold, predicted))


def naive_score(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """A second implementation of the definition; no text here is long enough for autojunk."""

    def clean(text: str) -> str:
        kept = "".join(c for c in text.lower() if c not in string.punctuation)
        return " ".join(word for word in re.split(r"\s+", kept) if word and word not in ("a", "an", "the"))

    def common(left: str, right: str) -> int:
        starts = range(len(left))
        return max((k for i in starts for k in range(len(left) - i + 1) if left[i : i + k] in right), default=0)

    totals = dict.fromkeys(("gold", "predicted", "em", "p", "r"), 0.0)
    for golds, guesses in zip(gold, predicted, strict=True):
        g, p = {clean(s) for s in golds}, {clean(s) for s in guesses}
        totals["gold"] += len(g) or 1
        totals["predicted"] += len(p) or 1
        totals["em"] += len(g & p) if g or p else 1
        blank = not p or p == {""}
        if not g and blank:
            totals["p"] += 1
            totals["r"] += 1
        elif g and not blank:
            totals["p"] += sum(max(common(a, b) for a in g) / max(len(b), 1) for b in p)
            totals["r"] += sum(max(common(a, b) for b in p) / max(len(a), 1) for a in g)
    result: dict[str, float] = {}
    for name, right, found in (("em", "em", "em"), ("pm", "p", "r")):
        precision, recall = 100 * totals[right] / totals["predicted"], 100 * totals[found] / totals["gold"]
        f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
        result |= {f"{name}_precision": precision, f"{name}_recall": recall, f"{name}_f1": f1}
    return result
