"""Keyphrase F1: cases worked out by hand, and agreement with a second implementation."""

import functools
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
from nltk.stem.porter import PorterStemmer

from pipejax import metrics

score = functools.partial(metrics.score, "keyphrases_kp20k")

BASE = ("present_f1@5", "present_f1@M", "absent_f1@5", "absent_f1@M")
KEYS = {*BASE, *(f"{key}_mean_doc" for key in BASE)}


@pytest.mark.parametrize(
    "source, gold, predicted, present, absent",
    [
        # present and absent: F1@5 and F1@M of one document, by hand
        # P@5 divides by 5 although one was predicted: P 1/5, R 1, F1 1/3
        ("deep learning of graphs", ["deep learning"], ["deep learning"], (100 / 3, 100), (0, 0)),
        # stems and case: "Graphs" equals "graph" and the document's "graphs"
        ("deep learning of graphs", ["graph"], ["GRAPHS"], (100 / 3, 100), (0, 0)),
        # duplicates after stemming count once, among golds as among predictions
        ("graphs", ["graph", "graphs"], ["graph", "graphs", "Graph"], (100 / 3, 100), (0, 0)),
        # words must be adjacent and whole
        ("deep learning graph", ["deep graph", "ear"], ["deep graph", "ear"], (0, 0), (200 * 0.4 / 1.4, 100)),
        # nltk's Porter: "dying" is "die"; the original algorithm leaves "dy"
        ("dies", ["dying"], ["die"], (100 / 3, 100), (0, 0)),
        # punctuation stays attached: "graphs" and "deep nets" are absent, "deep nets." is not; absent P 1/5 or 1, R 1/2
        ("deep graphs, deep nets.", ["graphs", "deep nets"], ["graphs", "deep nets."], (0, 0), (200 / 7, 200 / 3)),
        # predictions with such a word do not count; a gold with one does
        ("a , b", ["a", "x , y"], ["a", ",", "a , b", "x , y", "x .", "<unk> b", "<UNK>"], (100 / 3, 100), (0, 0)),
        # the word "a." is none of these
        ("a. b", ["a. b"], ["a. b"], (100 / 3, 100), (0, 0)),
        # <digit> is a word like any other
        ("top <digit> lists", ["top <digit>"], ["<digit>", "top <digit>"], (100 * 0.4 / 1.2, 200 / 3), (0, 0)),
        # the separator is no phrase; P@5 of absent 1/5
        ("graphs", ["graph", "<peos>", "vision"], ["graph", "<peos>", "vision"], (100 / 3, 100), (100 / 3, 100)),
        # a gold '' is absent, a predicted one is no prediction: P@M of absent stays 1
        ("graphs", ["", "graph"], ["graph", " "], (100 / 3, 100), (0, 0)),
        ("graphs", ["x"], ["x", "", " "], (0, 0), (100 / 3, 100)),
        # no prediction, no gold phrase, neither
        ("graphs", ["graph", "vision"], [], (0, 0), (0, 0)),
        ("graphs", [], ["graph", "vision"], (0, 0), (0, 0)),
        ("graphs", [], [], (0, 0), (0, 0)),
        # the sixth prediction is not in @5: P 0, but in @M: P 1/6, R 1, F1 2/7
        ("a b c d e f", ["f"], ["a", "b", "c", "d", "e", "f"], (0, 200 / 7), (0, 0)),
        # kinds are cut separately: after five absent predictions the present one is still in its first five
        ("f", ["f"], ["a", "b", "c", "d", "e", "f"], (100 / 3, 100), (0, 0)),
        # all predictions count
        ("f", ["f"], [*["x", "."] * 100, "f"], (100 / 3, 100), (0, 0)),
        ("f", ["f", "z"], [*(f"x{i}" for i in range(300)), "z", "f"], (100 / 3, 100), (0, 200 / 302)),
    ],
)
def test_scores_of_one_document_equal_hand_computed_scores(
    source: str, gold: list[str], predicted: list[str], present: tuple[float, float], absent: tuple[float, float]
) -> None:
    result = score([source], [gold], [predicted])
    assert set(result) == KEYS
    assert [result[key] for key in BASE] == pytest.approx([*present, *absent])
    for key in BASE:  # both averages of one document are equal
        assert result[f"{key}_mean_doc"] == pytest.approx(result[key])


def test_the_two_averages_differ() -> None:
    # Document 1: P 1, R 1/2. Document 2: P 1/2, R 1. Document 3: no gold, so 0 though it counts.
    result = score(["a b", "a b", "a"], [["a", "b"], ["a"], []], [["a"], ["a", "b"], ["a"]])
    assert result["present_f1@M"] == pytest.approx(50)  # the F1 of P = R = (1 + 1/2 + 0) / 3
    assert result["present_f1@M_mean_doc"] == pytest.approx(100 * (2 / 3 + 2 / 3 + 0) / 3)


def test_unequal_lengths_are_refused_and_no_documents_score_zero() -> None:
    with pytest.raises(ValueError, match="got 2, 2 and 1"):
        score(["a", "b"], [["x"], ["y"]], [["x"]])
    with pytest.raises(ValueError, match="got 1, 2 and 2"):
        score(["a"], [["x"], ["y"]], [["x"], ["y"]])
    assert score([], [], []) == dict.fromkeys(KEYS, 0.0)


def test_tick_counts_the_documents() -> None:
    done: list[int] = []
    score(["a", "b"], [["a"], []], [[], []], tick=done.append)
    assert sum(done) == 2


WORDS = [
    "graph",
    "graphs",
    "Graphing",
    "learning",
    "learned",
    "dying",
    "dies",
    "a",
    ",",
    ".",
    "<unk>",
    "<digit>",
    "nets,",
]


def test_scores_equal_a_second_implementation() -> None:
    rng = random.Random(0)

    def phrases(most: int) -> list[str]:
        found = [" ".join(rng.choices(WORDS, k=rng.choice([0, 1, 1, 1, 2, 2, 3]))) for _ in range(rng.randint(0, most))]
        return [rng.choice(["<peos>", " " + phrase, phrase]) if rng.random() < 0.2 else phrase for phrase in found]

    for case in range(400):
        documents = rng.randint(1, 4)
        sources = [" ".join(rng.choices(WORDS, k=rng.randint(0, 12))) for _ in range(documents)]
        gold = [phrases(7) for _ in range(documents)]
        predicted = [phrases(260 if case % 20 == 0 else 14) for _ in range(documents)]
        assert score(sources, gold, predicted) == pytest.approx(naive_score(sources, gold, predicted))


def naive_score(
    sources: Sequence[str], gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, float]:
    """A second implementation of the definition, in fractions and with lists for sets."""
    stemmer = PorterStemmer(mode=PorterStemmer.NLTK_EXTENSIONS)

    def stemmed(text: str) -> list[str]:
        return [stemmer.stem(word.lower()) for word in text.split()]

    def follows(document: list[str], phrase: list[str]) -> bool:
        pieces = [document[start : start + len(phrase)] for start in range(len(document))]
        return phrase != [] and phrase in pieces

    def tidy(texts: Sequence[str], *, check: bool) -> list[list[str]]:
        kept: list[list[str]] = []
        for text in texts:
            if text.strip() == "<peos>":
                continue
            phrase = stemmed(text)
            if phrase in kept or (check and (not phrase or "," in phrase or "." in phrase or "<unk>" in phrase)):
                continue
            kept.append(phrase)
        return kept

    def harmonic(p: Fraction, r: Fraction) -> Fraction:
        return 2 * p * r / (p + r) if p or r else Fraction(0)

    result: dict[str, float] = {}
    for kind in ("present", "absent"):
        for cut in (5, None):
            ps, rs, fs = [], [], []
            for source, golds, guesses in zip(sources, gold, predicted, strict=True):
                document = stemmed(source)
                wanted = [g for g in tidy(golds, check=False) if follows(document, g) == (kind == "present")]
                offered = [g for g in tidy(guesses, check=True) if follows(document, g) == (kind == "present")]
                right = sum(guess in wanted for guess in offered[:cut])
                out_of = cut or len(offered)
                ps.append(Fraction(right, out_of) if out_of else Fraction(0))
                rs.append(Fraction(right, len(wanted)) if wanted else Fraction(0))
                fs.append(harmonic(ps[-1], rs[-1]))
            count = len(sources)
            name = f"{kind}_f1@{cut or 'M'}"
            result[name] = float(100 * harmonic(sum(ps, Fraction(0)) / count, sum(rs, Fraction(0)) / count))
            result[f"{name}_mean_doc"] = float(100 * sum(fs, Fraction(0)) / count)
    return result


# The rule for any data.


@pytest.mark.parametrize(
    "source, phrase, present",
    [
        *[("deep graphs, deep nets.", "graphs", True), ("deep graphs, deep nets.", "deep net", True)],
        *[("(graphs)", "graph", True), ("“graphs”", "graph", True), ("a graph.", "a. graph", False)],
        *[
            ("我们研究深度学习。", "深度学习", True),
            ("我们研究深度学习。", "学深", False),
            ("การเรียนรู้เชิงลึก", "เชิงลึก", True),
        ],
        *[
            ("深層学習を使う", "深層学習", True),
            ("uses GPT模型", "模型", True),
            ("हिन्दी, भाषा।", "भाषा", True),
            ("किताब", "कित", False),
        ],
        *[("C++, and C.", "C++", True), ("C++ alone", "C#", False), ("C++ alone", "C", False), ("in C#.", "C#", True)],
        *[("at 1.5 V.", "1.5", True), ("at 1.5 V.", "5", False), ("at 1.5 V.", "15", False), ("1/12", "12", False)],
        *[("pear", "ear", False), ("state-of-the-art nets", "art", True), ("Ελλάδα.", "ΕΛΛΆΔΑ", True)],
    ],
)
def test_presence_in_any_text(source: str, phrase: str, present: bool) -> None:
    found = metrics.score("keyphrases", [source], [[phrase]], [[phrase]])
    assert (found["present_f1@M"], found["absent_f1@M"]) == ((100, 0) if present else (0, 100))


def test_phrases_differ_by_their_signs() -> None:
    for left, right in (("C++", "C#"), ("1.5", "15"), ("-5", "5"), ("x, y", "x y"), ("<unk>", "unk"), ("café", "cafe")):
        found = metrics.score("keyphrases", ["nothing"], [[left]], [[right]])
        assert found["absent_f1@M"] == 0
        assert metrics.score("keyphrases", ["nothing"], [[left]], [[left]])["absent_f1@M"] == 100
        both = metrics.score("keyphrases", ["nothing"], [[left, right]], [[left, right]])
        assert both["absent_f1@5"] == pytest.approx(100 * 2 * 0.4 / 1.4)  # two of five, not one
    assert metrics.score("keyphrases", ["nothing"], [["Graphs"]], [["graph", "GRAPH "]])["absent_f1@M"] == 100
