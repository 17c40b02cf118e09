"""Generated tasks that differ in how their rows depend on one another.

A source is two or three items in random order, each a letter with four digits, one to a column: "b1w b0x b2y b2z a2w
a2x a0y a1z". A row is an item's letter and the running totals of its digits, modulo 3: "b 1 1 0 2". So each token is
one easy step away from the source and from tokens before it; the kinds below say from which.

Where the order of rows is given, all can be told from the source alone, by those who add up many digits at once. What a
row cannot see of the rows above is not knowledge, but work that was done there.
"""

import dataclasses
import random
import zlib
from collections.abc import Iterator, Sequence

from pipejax.data.examples import Example

LETTERS = "abcd"
BASE = 3  # digits are 0 to 2
COLUMNS = "wxyz"
ROWS = (2, 3)  # items of a source
TEST_SHARE = 8  # a source of so many is kept for the test, whatever its place
# The trainer tries the separator between two "the".
WORDS = (
    *("the", *LETTERS, *map(str, range(BASE))),
    *(f"{letter}{digit}{column}" for letter in LETTERS for column in COLUMNS for digit in range(BASE)),
)

Item = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a row depends on those above it."""

    name: str
    says: str
    # Of the rows. "fixed": the letters are always a, b and perhaps c, in this order. Else they are any, and the rows
    # "sorted" by them, or in "random" order, in which case any will do.
    order: str = "fixed"
    carry: int = 0  # the total above with which a row's totals go on, counted from 1; 0: they begin anew
    adds: bool = True  # False: the first total is a copy of that one, and the item's own first digit does not count
    training: int = 1  # so many times as long as the easiest

    @property
    def delay(self) -> int:
        """The least Δt at which every token sees all that it is one step away from.

        The first total is the second token of its row, and the total above that it needs is token `carry` + 1 of the
        other. That token j of a row sees the first Δt + j - 1 tokens of the row above: 2 + Δt - 1 >= `carry` + 1.
        """
        return max(self.carry, 1)


KINDS = (
    Kind("independent", "nothing"),
    Kind("sorted", "the letter, to take the next in the alphabet", order="sorted"),
    Kind("no_repeats", "all letters, to take another", order="random", training=3),
    Kind("running_total", "the first total, to add to it", carry=1, training=3),
    Kind("copy_second", "the second total, as its first", carry=2, adds=False, training=3),
    Kind("copy_end", "the last total, as its first", carry=len(COLUMNS), adds=False, training=3),
)


def examples(kind: Kind, split: str, count: int) -> Iterator[Example]:
    """The first `count` examples of "train" or "test", which share no source.

    Kinds of fixed order share their sources, and so do the others: then only the targets differ.
    """
    sources, order = random.Random(split), random.Random(f"{split} order")
    number = 0
    while number < count:
        size = sources.choice(ROWS)
        letters = sources.sample(LETTERS[:size] if kind.order == "fixed" else LETTERS, size)
        items = [(letter, tuple(sources.randrange(BASE) for _ in COLUMNS)) for letter in letters]
        words = [f"{letter}{d}{c}" for letter, digits in items for d, c in zip(digits, COLUMNS, strict=True)]
        source = " ".join(words)
        if (zlib.crc32(source.encode()) % TEST_SHARE == 0) == (split == "test"):
            yield Example(f"{split}-{number}", source, tuple(rows(kind, items, order)))
            number += 1


def rows(kind: Kind, items: Sequence[Item], order: random.Random) -> list[str]:
    """The target of these items."""
    ordered = sorted(items)
    if kind.order == "random":
        order.shuffle(ordered)
    texts: list[str] = []
    totals: list[int] = []
    for letter, digits in ordered:
        above, totals, total = totals, [], 0
        for place, digit in enumerate(digits):
            if place == 0 and above and kind.carry:
                carried = above[kind.carry - 1]
                total = (carried + digit) % BASE if kind.adds else carried
            else:
                total = (total + digit) % BASE
            totals.append(total)
        texts.append(" ".join([letter, *map(str, totals)]))
    return texts


def marks(kind: Kind, gold: Sequence[str], predicted: Sequence[str]) -> list[bool]:
    """Of each gold row whether the predicted row in its place is right.

    In "random" order that is any gold row that was not written before. A predicted row too many counts in `whole`.
    """
    if kind.order == "random":
        right = [row in gold and row not in predicted[:i] for i, row in enumerate(predicted[: len(gold)])]
    else:
        right = [row == wanted for row, wanted in zip(predicted, gold, strict=False)]
    return right + [False] * (len(gold) - len(right))


def whole(kind: Kind, gold: Sequence[str], predicted: Sequence[str]) -> bool:
    """Whether the whole answer is right."""
    return len(predicted) == len(gold) and all(marks(kind, gold, predicted))
