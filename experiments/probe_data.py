"""Generated tasks that differ in nothing but how their rows depend on one another.

A source is a few items in random order, each a letter and four digits, which bear the names of their columns: "g 3w 4x
1y 2z b 0w 2x 3y 3z". A row is an item's letter and the running totals of its digits, modulo 5: "g 3 2 3 0". So each token
is one easy step away from the source and from tokens before it; the kinds below say from which. Nothing else differs
between them, not even the sources.

Where the order of rows is given, all can be told from the source alone, by those who add up many digits at once. What a
row cannot see of the rows above is not knowledge, but work that was done there.
"""

import dataclasses
import random
from collections.abc import Iterator, Sequence

from pipejax.data.core import Example

LETTERS = tuple("abcdefgh")
BASE = 5  # digits are 0 to 4
COLUMNS = "wxyz"
ROWS = (2, 3)  # items of a source
# The trainer tries the separator between two "the".
WORDS = (
    *("the", *LETTERS, *map(str, range(BASE))),
    *(f"{digit}{column}" for column in COLUMNS for digit in range(BASE)),
)

Item = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a row depends on those above it."""

    name: str
    says: str
    order: str = "source"  # of the rows: as in the source, "sorted" by letter, or "random", in which case any will do
    carry: int = 0  # the total above with which a row's totals go on, counted from 1; 0: they begin anew
    adds: bool = True  # False: the first total is a copy of that one, and the item's own first digit does not count

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
    Kind("no_repeats", "all letters, to take another", order="random"),
    Kind("running_total", "the first total, to add to it", carry=1),
    Kind("copy_second", "the second total, as its first", carry=2, adds=False),
    Kind("copy_end", "the last total, as its first", carry=len(COLUMNS), adds=False),
)


def examples(kind: Kind, split: str, count: int) -> Iterator[Example]:
    """The first `count` examples of "train" or "test"; only their targets differ between kinds."""
    sources, order = random.Random(split), random.Random(f"{split} order")
    for number in range(count):
        letters = sources.sample(LETTERS, sources.choice(ROWS))
        items = [(letter, tuple(sources.randrange(BASE) for _ in COLUMNS)) for letter in letters]
        words = [[f"{d}{c}" for d, c in zip(digits, COLUMNS, strict=True)] for _, digits in items]
        for (letter, _), named in zip(items, words, strict=True):
            named.insert(len(COLUMNS) // 2, letter)
        yield Example(f"{split}-{number}", " ".join(map(" ".join, words)), tuple(rows(kind, items, order)))


def rows(kind: Kind, items: Sequence[Item], order: random.Random) -> list[str]:
    """The target of these items."""
    ordered = sorted(items) if kind.order == "sorted" else list(items)
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
