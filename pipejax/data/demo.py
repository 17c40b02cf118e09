"""The embedded tasks: delivery notes, made up from a seed, and what they ask to deliver.

A note is a shuffled run of clauses. Each "deliver" in it has one answer, and the answers have the order of the note.

In the task "demo" an answer is the 1-3 words after the "deliver": 0-2 adjectives (size, age, colour) and a noun. These
words occur in answers alone, and none in two answers of one note, so that a small model learns the task from scratch in
minutes. There are 1-6 answers; the task is small enough for tests.

In the task "demo_long" a note asks for 5-7 of the baskets in `BASKETS`, and an answer is a basket's name and contents:
6-9 words, the same ones whenever that basket is asked for. For so many words the pipelined decoder takes a quarter of
the steps of the sequential one.
"""

import functools
import hashlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from pipejax.data.examples import Example
from pipejax.data.lines import text_of
from pipejax.data.tokenizer import Tokenizer, import_transformers

T = TypeVar("T")

SIZES = {"train": 20_000, "dev": 256, "test": 512}
MAX_ROWS = 6  # answers of a note
MAX_ROW_WORDS = 3
MAX_SOURCE_WORDS = 30  # full stops included
LONG_ROWS = (5, 7)  # of the task "demo_long": the fewest and the most answers of a note
LONG_ROW_WORDS = (6, 9)
SEPARATOR = ";"

_LEAST_WORDS, _LEAST_LONG_WORDS = 24, 36
CUE = "deliver"
ADJECTIVES = (("small", "large", "heavy", "tiny"), ("old", "new", "fine", "plain"), ("red", "green", "blue", "white"))
NOUNS = (
    "apples",
    "pears",
    "bread",
    "cheese",
    "honey",
    "candles",
    "lamps",
    "roses",
    "books",
    "maps",
    "coins",
    "boxes",
    "ropes",
    "tiles",
    "shoes",
    "bells",
)
PEOPLE = ("baker", "driver", "clerk", "captain", "gardener", "teacher")
PLACES = ("river", "station", "market", "garden", "harbour", "bridge")
VERBS = ("waited", "rested", "sang", "smiled", "slept", "walked")
PREPOSITIONS = ("near", "behind", "past", "beside", "by")
# The kinds of adjective that a thing has, so chosen that it has 1, 2 or 3 words equally often.
_KINDS: tuple[tuple[int, ...], ...] = ((), (), (), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2))
WORDS = (".", "the", CUE, *itertools.chain(*ADJECTIVES), *NOUNS, *PEOPLE, *PLACES, *VERBS, *PREPOSITIONS)
PLURALS = tuple(noun for noun in NOUNS if noun.endswith("s"))
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
BASKET_NAMES = (
    "picnic",
    "winter",
    "summer",
    "autumn",
    "school",
    "beach",
    "birthday",
    "holiday",
    "sunday",
    "family",
    "wedding",
    "office",
    "party",
    "breakfast",
    "supper",
    "travel",
    "sports",
    "kitchen",
    "camping",
    "farewell",
    "welcome",
    "village",
    "island",
    "forest",
)
LONG_WORDS = (*WORDS, *NUMBERS, *BASKET_NAMES, "basket")

# A note belongs to one split for ever, by its own words: no split has a note of another, whatever the seeds.
_SHARES = {"train": (2, 3, 4, 5, 6, 7), "dev": (0,), "test": (1,)}


def examples(split: str, seed: int = 0, *, long: bool = False) -> Sequence[Example]:
    """The examples of a split, each made when first asked for, from the split, its index and the seed alone.

    Args:
      split: "train", "dev" or "test".
      seed: other notes for another seed.
      long: those of "demo_long".

    Raises:
      ValueError: the split is not "train", "dev" or "test", or the seed is negative.
    """
    if split not in SIZES:
        raise ValueError(f"split: expected one of {', '.join(SIZES)}; got {split!r}")
    if seed < 0:
        raise ValueError(f"seed: expected at least 0; got {seed}")
    return _Split(split, seed, long)


def build_tokenizer(directory: Path, words: Sequence[str] = WORDS) -> None:
    """Writes a word-level tokenizer of the task's words, or of others: pad 0, eos 1, unk 2, then ";" and the words."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    specials = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {word: i for i, word in enumerate([*specials.values(), SEPARATOR, *words])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=specials["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # As T5's: transformers appends eos where special tokens are asked for.
    eos = specials["eos_token"]
    inner.post_processor = processors.TemplateProcessing(single=f"$A {eos}", special_tokens=[(eos, vocabulary[eos])])
    tokenizer = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **specials
    )
    tokenizer.save_pretrained(str(directory))


class DemoTask:
    """An embedded task as the trainer sees it: always the same notes, and a tokenizer of its own."""

    metric = "spans"

    def __init__(self, *, long: bool = False) -> None:
        """`long`: "demo_long"."""
        self._long = long

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of "train", "dev" or "test"."""
        return examples(split, long=self._long)

    def source(self, value: dict[str, Any], place: str) -> str:
        """The note itself."""
        return text_of(value, "source", place)

    def tokenizer(self) -> Tokenizer:
        """The word-level tokenizer that `build_tokenizer` writes."""
        with tempfile.TemporaryDirectory() as directory:
            build_tokenizer(Path(directory), LONG_WORDS if self._long else WORDS)
            return Tokenizer.load(directory)


class _Split(Sequence[Example]):
    def __init__(self, split: str, seed: int, long: bool) -> None:
        self._make = functools.partial(_example, split, seed=seed, long=long)
        self._indices = range(SIZES[split])

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...

    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self._make(index=i) for i in self._indices[index]]
        return self._make(index=self._indices[index])


@functools.cache
def _example(split: str, *, index: int, seed: int, long: bool) -> Example:
    share = _SHARES[split]
    entropy = np.random.SeedSequence([seed, list(SIZES).index(split), index])
    chance = _chances(np.random.default_rng(entropy))
    while True:
        if long:
            least, most = LONG_ROWS
            names = _shuffled(BASKET_NAMES, chance)[: least + int(next(chance) * (most - least + 1))]
            targets = tuple(BASKETS[name] for name in names)
            source = _note(chance, [f"the {name} basket" for name in names], least_words=_LEAST_LONG_WORDS)
        else:
            targets = _things(chance)
            source = _note(chance, targets, least_words=_LEAST_WORDS)
        if _share(source) in share:
            return Example(id=f"{split}-{index}", source=source, targets=targets)


def _share(source: str) -> int:
    """0-7, by the note's text; Python's own hash differs from process to process."""
    return hashlib.blake2b(source.encode(), digest_size=1).digest()[0] % 8


def _note(chance: Iterator[float], things: Sequence[str], *, least_words: int) -> str:
    clauses = [f"{CUE} {thing} ." for thing in things]
    words = sum(len(clause.split()) for clause in clauses)
    while words < least_words:
        clause = (
            f"the {_pick(PEOPLE, chance)} {_pick(VERBS, chance)} {_pick(PREPOSITIONS, chance)} "
            f"the {_pick(PLACES, chance)} ."
        )
        clauses.insert(int(next(chance) * (len(clauses) + 1)), clause)
        words += len(clause.split())
    return " ".join(clauses)


def _things(chance: Iterator[float]) -> tuple[str, ...]:
    things: list[str] = []
    for _ in range(1 + int(next(chance) * MAX_ROWS)):
        thing = _thing(chance)
        while set(thing.split()) & set(" ".join(things).split()):
            thing = _thing(chance)
        things.append(thing)
    return tuple(things)


def _thing(chance: Iterator[float]) -> str:
    adjectives = [_pick(ADJECTIVES[kind], chance) for kind in _pick(_KINDS, chance)]
    return " ".join([*adjectives, _pick(NOUNS, chance)])


def _baskets() -> dict[str, str]:
    """By name, the words of an answer: the name, and two or three things with their numbers, some with a colour."""
    chance = _chances(np.random.default_rng(0))
    shortest, longest = LONG_ROW_WORDS
    baskets = {}
    for i, name in enumerate(BASKET_NAMES):
        words = shortest - 1 + i % (longest - shortest + 1)  # of the contents
        count = -(-words // 3)
        coloured = words - 2 * count
        things = zip(
            _shuffled(NUMBERS, chance), _shuffled(ADJECTIVES[2], chance), _shuffled(PLURALS, chance), strict=False
        )
        parts = [
            (number, colour, noun) if place < coloured else (number, noun)
            for place, (number, colour, noun) in enumerate(itertools.islice(things, count))
        ]
        baskets[name] = " ".join([name, *itertools.chain(*_shuffled(parts, chance))])
    return baskets


def _shuffled(choices: Sequence[T], chance: Iterator[float]) -> list[T]:
    return sorted(choices, key=lambda _: next(chance))


def _pick(choices: Sequence[T], chance: Iterator[float]) -> T:
    return choices[int(next(chance) * len(choices))]


def _chances(rng: np.random.Generator) -> Iterator[float]:
    """Uniform numbers below 1, drawn a hundred at a time because a call costs as much as fifty of them."""
    while True:
        yield from rng.random(100).tolist()


BASKETS = _baskets()
