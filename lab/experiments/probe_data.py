"""Generated tasks that differ in how their rows depend on one another.

A source has two or three items in random order. An item has a letter and four digits, one for each column: "b1w b0x b2y
b2z a2w a2x a0y a1z". A row has an item's letter and the running totals of its digits, modulo 3: "b 1 1 0 2". So each
token is one easy step away from the source and from earlier tokens; the kinds below define from which tokens.

If the order of rows is given, a model that adds many digits at once can compute all rows from the source alone. Tokens
of the rows above that a row cannot see are then no missing information: they are the results of work done there.
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
TEST_SHARE = 8  # one source in 8 is kept for the test, independent of its place
# The trainer tests the separator between two words "the".
WORDS = (
    *("the", *LETTERS, *map(str, range(BASE))),
    *(f"{letter}{digit}{column}" for letter in LETTERS for column in COLUMNS for digit in range(BASE)),
)

Item = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of dependence of a row on the rows above it."""

    name: str
    description: str  # the tokens of the rows above that a row needs
    # The order of rows. "fixed": the letters are always a, b and perhaps c, in this order. "sorted": any letters, and
    # the rows are sorted by them. "random": any letters, and every order of rows is correct.
    order: str = "fixed"
    carry: int = 0  # number of the total above with which a row's totals continue, from 1; 0: they start at zero
    adds: bool = True  # False: the first total is a copy of the total above, and the item's first digit does not count
    training: int = 1  # length of the training, as a multiple of the easiest kind's

    @property
    def delay(self) -> int:
        """The least Δt at which every token sees all tokens that it needs.

        The first total is the second token of its row, and it needs token `carry` + 1 of the row above. Token j of a
        row sees the first Δt + j - 1 tokens of the row above, hence 2 + Δt - 1 >= `carry` + 1.
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

    Kinds of fixed order share their sources, and so do the other kinds: only the targets differ between them.
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
    """The target for these items."""
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
    """Whether the predicted row in the place of each gold row is correct.

    In "random" order, any gold row that was not written before is correct. Only `whole` counts superfluous rows.
    """
    if kind.order == "random":
        right = [row in gold and row not in predicted[:i] for i, row in enumerate(predicted[: len(gold)])]
    else:
        right = [row == wanted for row, wanted in zip(predicted, gold, strict=False)]
    return right + [False] * (len(gold) - len(right))


def whole(kind: Kind, gold: Sequence[str], predicted: Sequence[str]) -> bool:
    """Whether the whole answer is correct."""
    return len(predicted) == len(gold) and all(marks(kind, gold, predicted))
