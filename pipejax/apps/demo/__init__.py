"""The demo tasks: synthetic delivery notes, and as targets the things that each note asks to deliver.

A note is a sequence of clauses. Each clause with "deliver" gives one target row.

In the task "demo" a row is the 1-3 words after "deliver": 0-2 adjectives (size, age, colour) and a noun. These words
occur nowhere else, and no word occurs in two rows of one note, so that a small model learns the task from scratch in
minutes. A note has 1-6 rows, in the order of the note; the task is small enough for tests.

In the task "demo_long" a note asks for 5-7 of the baskets in `BASKETS`, and a row is a basket's name and contents: 6-9
words, always the same for the same basket. With rows this long the pipelined decoder takes a quarter of the steps of
the sequential decoder. The rows are in the alphabetical order of the names, which a small model learns. A small model
does not learn the order of the note in minutes, because cross-attention knows no positions: the model would guess an
order, and the least rounding would change the guess.
"""

import functools
import hashlib
import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from pipejax.config import DataConfig
from pipejax.data.examples import Example, PreparedExamples
from pipejax.data.lines import Object, text_of
from pipejax.data.tokenizer import Tokenizer, import_transformers

T = TypeVar("T")

SIZES = {"train": 20_000, "dev": 256, "test": 512}
MAX_ROWS = 6  # target rows of a note
MAX_ROW_WORDS = 3
MAX_SOURCE_WORDS = 30  # including full stops
LONG_ROWS = (5, 7)  # "demo_long": the fewest and the most target rows of a note
LONG_ROW_WORDS = (6, 9)  # "demo_long": the fewest and the most words of a row
SEPARATOR = ";"

_LEAST_WORDS, _LEAST_LONG_WORDS = 24, 36  # the fewest words of a note; shorter notes get clauses without "deliver"
CUE = "deliver"
ADJECTIVES = (("small", "large", "heavy", "tiny"), ("old", "new", "fine", "plain"), ("red", "green", "blue", "white"))
NOUNS = (
    *("apples", "pears", "bread", "cheese", "honey", "candles", "lamps", "roses", "books", "maps", "coins"),
    *("boxes", "ropes", "tiles", "shoes", "bells"),
)
PEOPLE = ("baker", "driver", "clerk", "captain", "gardener", "teacher")
PLACES = ("river", "station", "market", "garden", "harbour", "bridge")
VERBS = ("waited", "rested", "sang", "smiled", "slept", "walked")
PREPOSITIONS = ("near", "behind", "past", "beside", "by")
# The kinds of adjective (indices of ADJECTIVES) before a noun; 1, 2 and 3 words in all are equally likely.
_KINDS: tuple[tuple[int, ...], ...] = ((), (), (), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2))
WORDS = (".", "the", CUE, *itertools.chain(*ADJECTIVES), *NOUNS, *PEOPLE, *PLACES, *VERBS, *PREPOSITIONS)
PLURALS = tuple(noun for noun in NOUNS if noun.endswith("s"))
NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
BASKET_NAMES = (
    *("picnic", "winter", "summer", "autumn", "school", "beach", "birthday", "holiday", "sunday", "family"),
    *("wedding", "office", "party", "breakfast", "supper", "travel", "sports", "kitchen", "camping"),
    *("farewell", "welcome", "village", "island", "forest"),
)
LONG_WORDS = (*WORDS, *NUMBERS, *BASKET_NAMES, "basket")

# The hash of a note's text decides its split, so no two splits share a note, whatever the seeds.
_SHARES = {"train": (2, 3, 4, 5, 6, 7), "dev": (0,), "test": (1,)}


def examples(split: str, seed: int = 0, *, long: bool = False) -> Sequence[Example]:
    """Returns the examples of a split.

    Each example is generated on first access and depends only on split, index, seed and `long`.
    """
    if split not in SIZES:
        raise ValueError(f"split: expected one of {', '.join(SIZES)}; got {split!r}")
    if seed < 0:
        raise ValueError(f"seed: expected at least 0; got {seed}")
    return PreparedExamples(range(SIZES[split]), functools.partial(_example, split, seed=seed, long=long))


def build_tokenizer(directory: Path, words: Sequence[str] = WORDS) -> None:
    """Writes a word-level tokenizer of these words; the ids are pad 0, eos 1, unk 2, ";" 3, then the words."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    specials = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {word: i for i, word in enumerate([*specials.values(), SEPARATOR, *words])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=specials["unk_token"]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # As for T5's tokenizer: transformers appends eos if the caller asks for special tokens.
    eos = specials["eos_token"]
    inner.post_processor = processors.TemplateProcessing(single=f"$A {eos}", special_tokens=[(eos, vocabulary[eos])])
    tokenizer = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **specials
    )
    tokenizer.save_pretrained(str(directory))


class DemoTask:
    """A demo task for the trainer: the examples of seed 0, and a word-level tokenizer."""

    metric, template = "exact", "{source}"

    def __init__(self, *, long: bool = False) -> None:
        self._long = long

    def examples(self, split: str) -> Sequence[Example]:
        """Returns the examples of a split, generated with seed 0."""
        return examples(split, long=self._long)

    def source(self, value: Object, place: str) -> str:
        """Returns the record's "source"."""
        return text_of(value, "source", place)

    def tokenizer(self) -> Tokenizer:
        """Returns the demo's word-level tokenizer."""
        with tempfile.TemporaryDirectory() as directory:
            build_tokenizer(Path(directory), LONG_WORDS if self._long else WORDS)
            return Tokenizer.load(directory)


@functools.cache
def _example(split: str, index: int, _: int, *, seed: int, long: bool) -> Example:
    """Draws example number `index` of a split.

    Notes are drawn until the hash of a note belongs to the split, so that splits are disjoint.
    """
    share = _SHARES[split]
    entropy = np.random.SeedSequence([seed, list(SIZES).index(split), index])
    chance = _uniform_numbers(np.random.default_rng(entropy))
    while True:
        if long:
            least, most = LONG_ROWS
            names = _shuffle(BASKET_NAMES, chance)[: least + int(next(chance) * (most - least + 1))]
            targets = tuple(BASKETS[name] for name in sorted(names))
            source = _delivery_note(chance, [f"the {name} basket" for name in names], least_words=_LEAST_LONG_WORDS)
        else:
            targets = _things(chance)
            source = _delivery_note(chance, targets, least_words=_LEAST_WORDS)
        # The hash is BLAKE2b of the note's text. Python's `hash` is not used, because it differs between processes.
        if hashlib.blake2b(source.encode(), digest_size=1).digest()[0] % 8 in share:
            return Example(id=f"{split}-{index}", source=source, targets=targets)


def _delivery_note(chance: Iterator[float], things: Sequence[str], *, least_words: int) -> str:
    """Returns the text of a note that asks for `things`, with at least `least_words` words."""
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
    """Draws 1 to MAX_ROWS things that share no word."""
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
    """Returns the contents of each basket, by its name."""
    chance = _uniform_numbers(np.random.default_rng(0))
    shortest, longest = LONG_ROW_WORDS
    baskets = {}
    for i, name in enumerate(BASKET_NAMES):
        words = shortest - 1 + i % (longest - shortest + 1)  # the number of words of the contents
        count = -(-words // 3)
        coloured = words - 2 * count
        things = zip(
            _shuffle(NUMBERS, chance), _shuffle(ADJECTIVES[2], chance), _shuffle(PLURALS, chance), strict=False
        )
        parts = [
            (number, colour, noun) if place < coloured else (number, noun)
            for place, (number, colour, noun) in enumerate(itertools.islice(things, count))
        ]
        baskets[name] = " ".join([name, *itertools.chain(*_shuffle(parts, chance))])
    return baskets


def _shuffle(choices: Sequence[T], chance: Iterator[float]) -> list[T]:
    return sorted(choices, key=lambda _: next(chance))


def _pick(choices: Sequence[T], chance: Iterator[float]) -> T:
    return choices[int(next(chance) * len(choices))]


def _uniform_numbers(rng: np.random.Generator) -> Iterator[float]:
    """Yields uniform numbers in [0, 1), drawn a hundred at a time: one call costs as much as drawing fifty numbers."""
    while True:
        yield from rng.random(100).tolist()


BASKETS = _baskets()


def demo_task(config: DataConfig, row_names: Sequence[str] = ()) -> DemoTask:
    """Returns the task "demo" or "demo_long", as `config.task` says; its rows have no names."""
    return DemoTask(long=config.task == "demo_long")
