"""Texts as token ids, as far as an answer is to contain them."""

import functools
import logging
import unicodedata
from collections.abc import Collection, Hashable, Sequence
from typing import Protocol

from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)

Ends = int | Collection[int] | None  # the ids of the tokens that end a row


class Spells(Hashable, Protocol):
    """A tokenizer (`pipejax.data.tokenizer.Tokenizer`)."""

    @property
    def eos(self) -> int | None:
        """The id that ends a text, if it has one."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids."""

    def vanishes(self, text: str, ends: Collection[int] = ()) -> bool:
        """Whether a text has no tokens except `eos` and the end tokens `ends`."""

    def change(self, text: str, ids: Sequence[int] | None = None) -> tuple[str, str] | None:
        """The words of a text that do not come back from its ids, and those that come instead."""


def ids_of_ends(ends: Ends) -> frozenset[int]:
    """The ids as a set."""
    return frozenset((ends,) if isinstance(ends, int) else ends or ())


def spell(targets: Sequence[str], tokenizer: Spells, ends: Ends) -> list[list[int]]:
    """The ids of each row of a target. Rows without ids are left out, as in answers.

    End tokens in the text, such as "</s>", are left out, since they would end the row.
    """
    left_out = ids_of_ends(ends)
    return [[i for i in tokenizer.encode(row) if i not in left_out] for row in targets]


def prefix_ids(tokenizer: Spells, text: str, where: str, ends: Ends = None) -> tuple[int, ...]:
    """The ids of a row's prefix; raises a UserError if one of them is an end token."""
    ids = _prefix_ids(tokenizer, text)
    if not ids or tokenizer.eos in ids or not ids_of_ends(ends).isdisjoint(ids):
        found = "ends the row" if ids else "has no token"
        raise UserError(f"{where}: found {text!r}, which {found} for this tokenizer; expected text that begins one")
    return ids


def separator_ids(tokenizer: Spells, separator: str) -> list[int]:
    """The ids between two rows that a separator joins in a text; none where it leaves no token."""
    word, words = tokenizer.encode("a"), tokenizer.encode(f"a{separator}a")
    size = len(word)
    return words[size:-size] if words[:size] == words[-size:] == word else tokenizer.encode(separator)


@functools.lru_cache(maxsize=1024)
def _prefix_ids(tokenizer: Spells, text: str) -> tuple[int, ...]:
    """The same few come again with every example."""
    ids = tuple(tokenizer.encode(text))
    if ids and (change := tokenizer.change(text, ids)):
        logger.warning(f"a row that begins with {text!r}: {shown(change)} from the tokenizer")
    return ids


def shown(change: tuple[str, str]) -> str:
    """The result of `Tokenizer.change`, in words."""
    composed = (unicodedata.normalize("NFC", text) for text in change)
    show = ascii if len({*composed}) == 1 else repr  # else both may look alike
    was, now = (show(text if len(text) <= 40 else f"{text[:40]}...") for text in change)
    return f"{was} comes back as {now}"
