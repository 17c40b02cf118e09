"""ROUGE: cases worked out by hand, and agreement with a second implementation."""

import functools
import random
import re
from collections import Counter
from collections.abc import Sequence

import pytest
from nltk.stem.porter import PorterStemmer

from pipejax import metrics
from pipejax.metrics.rouge import TYPES


def score(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    return metrics.score("rouge_score", [""] * len(gold), gold, predicted)


@pytest.mark.parametrize(
    "gold, predicted, expected",
    [
        # rouge1, rouge2, rougeL, rougeLsum of one document, by hand
        (["the cat sat"], ["the cat sat"], (100, 100, 100, 100)),
        (["the cat sat"], ["The CAT, sat!"], (100, 100, 100, 100)),  # ASCII letters and digits, in lower case
        # 3 of 3 words shared, no pair of them; "the sat" or "cat" ... the longest common subsequence has one word
        (["the cat sat"], ["sat cat the"], (100, 0, 100 / 3, 100 / 3)),
        # stems of words of more than three letters: "cats" is "cat", but "its" stays "its"
        (["cats running"], ["cat runs"], (100, 100, 100, 100)),
        (["it does"], ["its does"], (50, 0, 50, 50)),
        # a repeated word counts as many times as in the other text: P 1/3, R 1/1
        (["cat"], ["cat cat cat"], (50, 0, 50, 50)),
        # other letters separate words like any sign: "naïve" is "na" and "ve"
        (["naïve"], ["na ve"], (100, 100, 100, 100)),
        # the order of sentences matters to L, not to Lsum: R-L finds "c d" or "a b" in 4 words
        (["a b", "c d"], ["c d", "a b"], (100, 200 / 3, 50, 100)),
        # Lin's example: w1..w5 against "w1 w2 w6 w7 w8" and "w1 w3 w8 w9 w5"; the union holds w1 w2 w3 w5:
        # R 4/5, P 4/10, F1 8/15; L over the joined text "w1 w2 w3 w5" too; shared pairs: w1 w2 of 4 and 9
        (["w1 w2 w3 w4 w5"], ["w1 w2 w6 w7 w8", "w1 w3 w8 w9 w5"], (800 / 15, 200 / 13, 800 / 15, 800 / 15)),
        # nothing on one side, or on both, is 0
        ([], ["cat"], (0, 0, 0, 0)),
        (["cat"], [], (0, 0, 0, 0)),
        ([], [], (0, 0, 0, 0)),
        ([""], [""], (0, 0, 0, 0)),
        (["…"], ["…"], (0, 0, 0, 0)),
        # an empty sentence does not count
        (["", "cat"], ["cat", ""], (100, 0, 100, 100)),
    ],
)
def test_scores_of_one_document_equal_hand_computed_scores(
    gold: list[str], predicted: list[str], expected: tuple[float, ...]
) -> None:
    result = score([gold], [predicted])
    assert tuple(result) == TYPES
    assert list(result.values()) == pytest.approx(list(expected))


def test_scores_are_means_over_documents() -> None:
    result = score([["cat"], ["dog", "cow"], []], [["cat"], ["dog"], []])
    assert result["rouge1"] == pytest.approx(100 * (1 + 2 / 3 + 0) / 3)


def test_unequal_lengths_are_refused_and_no_documents_score_zero() -> None:
    with pytest.raises(ValueError, match="got 1, 1 and 0"):
        score([["x"]], [])
    assert score([], []) == dict.fromkeys(TYPES, 0.0)


WORDS = [
    "the",
    "cat",
    "cats",
    "sat",
    "sitting",
    "mats'",
    "on",
    "ON",
    "An",
    "3",
    "3rd",
    "d'or",
    "naïve",
    "—",
    "being",
    "x",
]


def test_scores_equal_a_second_implementation() -> None:
    rng = random.Random(0)

    def sentences() -> list[str]:
        return [" ".join(rng.choices(WORDS, k=rng.randint(0, 9))) for _ in range(rng.choice([0, 1, 1, 2, 3, 4]))]

    for _ in range(300):
        documents = rng.randint(1, 3)
        gold, predicted = [sentences() for _ in range(documents)], [sentences() for _ in range(documents)]
        assert score(gold, predicted) == pytest.approx(naive_score(gold, predicted))


def naive_score(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """A second implementation of the definition, with subsequences found by recursion."""
    totals = dict.fromkeys(("rouge1", "rouge2", "rougeL", "rougeLsum"), 0.0)
    for golds, guesses in zip(gold, predicted, strict=True):
        whole, guess = words(" ".join(golds)), words(" ".join(guesses))
        for n in (1, 2):
            left, right = grams(whole, n), grams(guess, n)
            totals[f"rouge{n}"] += f1(sum((left & right).values()), sum(right.values()), sum(left.values()))
        totals["rougeL"] += f1(len(common(tuple(whole), tuple(guess))), len(guess), len(whole))
        hits = 0
        left_over = Counter(whole), Counter(guess)
        for sentence in golds:
            mine = tuple(words(sentence))
            found = set[int]().union(*(common(mine, tuple(words(other))) for other in guesses))
            for place in found:  # a word counts as many times as both sides have it
                if all(counts[mine[place]] > 0 for counts in left_over):
                    hits += 1
                    for counts in left_over:
                        counts[mine[place]] -= 1
        totals["rougeLsum"] += f1(hits, len(guess), len(whole))
    return {name: 100 * total / len(gold) for name, total in totals.items()}


def words(text: str) -> list[str]:
    stemmer = PorterStemmer(mode=PorterStemmer.NLTK_EXTENSIONS)
    return [stemmer.stem(word) if len(word) > 3 else word for word in re.findall("[a-z0-9]+", text.lower())]


def grams(every: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(every[i : i + n]) for i in range(len(every)) if i + n <= len(every))


@functools.cache
def common(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[int, ...]:
    """Places in `left` of one longest common subsequence; of two, the one without the end of `left`."""
    if not left or not right:
        return ()
    if left[-1] == right[-1]:
        return (*common(left[:-1], right[:-1]), len(left) - 1)
    shorter_left, shorter_right = common(left[:-1], right), common(left, right[:-1])
    return shorter_right if len(shorter_right) > len(shorter_left) else shorter_left


def f1(hits: int, predicted: int, gold: int) -> float:
    return 2 * hits / (predicted + gold) if hits else 0.0


# Other scripts.

SCRIPTS = {
    "Chinese": ("我喜欢猫。", "狗在睡觉。"),
    "Hindi": ("मुझे बिल्ली पसंद है", "कुत्ता सोता हूँ"),
    "Arabic": ("أنا أحب القطط", "الكلب نائم"),
    "Greek": ("Μου αρέσουν οι γάτες", "Ο σκύλος κοιμάται"),
    "Thai": ("ฉันชอบแมว", "หมู่บ้านนี้"),
    "Japanese": ("猫が好きです", "いぬはねむる"),
    "Korean": ("고양이를 좋아해요", "개가 잔다"),
    "Hebrew": ("אני אוהב חתולים", "הכלב ישן"),
    "Tamil": ("எனக்கு பூனை பிடிக்கும்", "நாய் தூங்குகிறது"),
    "Russian": ("Я люблю кошек", "Собака спит"),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_equal_texts_of_any_script_score_100(script: str) -> None:
    text, other = SCRIPTS[script]
    for name, value in metrics.score("rouge", [""], [[text, other]], [[text, other]]).items():
        assert value == pytest.approx(100), name
    assert all(value < 50 for value in metrics.score("rouge", [""], [[text]], [[other]]).values())
    assert set(score([[text]], [[text]]).values()) == {0}  # rouge_score's own tokenizer finds no words in them


@pytest.mark.parametrize(
    "gold, predicted, one, two",
    [
        ("我喜欢猫", "我喜欢狗", 75, 200 / 3),  # three signs of four, two pairs of three
        ("GPT模型", "gpt 模型！", 100, 100),
        ("naïve", "na ve", 0, 0),  # one word, not two
        ("naïve", "nai\u0308ve", 100, 0),
        ("हिन्दी है", "हिन्दी हूँ", 50, 0),  # vowel signs belong to their letters
        ("ΣΑΣ", "σας", 100, 0),
        ("ﬁrst １２", "first 12", 100, 100),
        ("กำ", "ก", 0, 0),
    ],
)
def test_words_of_other_scripts_are_split(gold: str, predicted: str, one: float, two: float) -> None:
    found = metrics.score("rouge", [""], [[gold]], [[predicted]])
    assert (found["rouge1"], found["rouge2"]) == pytest.approx((one, two))


def test_english_scores_equal_in_both_metrics() -> None:
    rng, signs = random.Random(1), "abcXYZ019 _-.,'\"$+#(/\n"
    texts = [["".join(rng.choices([*signs, "running ", "cats "], k=30)) for _ in range(3)] for _ in range(200)]
    gold, predicted = texts[:100], texts[100:]
    assert metrics.score("rouge", [""] * 100, gold, predicted) == score(gold, predicted)
    assert score(gold, predicted)["rouge1"] > 5
