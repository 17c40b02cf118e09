"""Converts the texts of rows, prefixes and separators to the token ids that an answer contains."""

import functools
import logging
import unicodedata
from collections.abc import Collection, Hashable, Sequence
from typing import Protocol

from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)

Ends = int | Collection[int] | None  # the ids of the tokens that end a row


class Spells(Hashable, Protocol):
    """The interface of a tokenizer, such as `pipejax.data.tokenizer.Tokenizer`."""

    @property
    def eos(self) -> int | None:
        """The id of the tokenizer's eos token; None if it has none."""

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids."""

    def vanishes(self, text: str, ends: Collection[int] = ()) -> bool:
        """Returns whether a text has no tokens except `eos` and the end tokens `ends`."""

    def change(self, text: str, ids: Sequence[int] | None = None) -> tuple[str, str] | None:
        """Returns the part of a text that encoding and decoding change, before and after; None if nothing changes.

        Args:
          text: the text.
          ids: its token ids, if the caller has them.
        """


def ids_of_ends(ends: Ends) -> frozenset[int]:
    """Returns the ids of end tokens as a set."""
    return frozenset((ends,) if isinstance(ends, int) else ends or ())


def spell(targets: Sequence[str], tokenizer: Spells, ends: Ends) -> list[list[int]]:
    """Returns the token ids of each row of a target.

    End tokens in the text, such as "</s>", are dropped, since they would end the row.

    Args:
      targets: the texts of the rows.
      tokenizer: the tokenizer.
      ends: the ids of the tokens that end a row.

    Returns:
      One list for each row; it is empty for a row without tokens.
    """
    left_out = ids_of_ends(ends)
    return [[i for i in tokenizer.encode(row) if i not in left_out] for row in targets]


def prefix_ids(tokenizer: Spells, text: str, where: str, ends: Ends = None) -> tuple[int, ...]:
    """Returns the token ids of a row's prefix.

    Args:
      tokenizer: the tokenizer.
      text: the prefix.
      where: the setting or field of the prefix, for messages.
      ends: the ids of the tokens that end a row.

    Raises:
      UserError: the prefix has no token, or contains an end token.
    """
    ids = _prefix_ids(tokenizer, text)
    if not ids or tokenizer.eos in ids or not ids_of_ends(ends).isdisjoint(ids):
        found = "ends the row" if ids else "has no token"
        raise UserError(
            where, found=f"{text!r}, which {found} for this tokenizer", expected="a text that can begin a row"
        )
    return ids


def separator_ids(tokenizer: Spells, separator: str) -> list[int]:
    """Returns the token ids between two rows that a separator joins; [] if the separator has no token of its own."""
    word, words = tokenizer.encode("a"), tokenizer.encode(f"a{separator}a")
    size = len(word)
    return words[size:-size] if words[:size] == words[-size:] == word else tokenizer.encode(separator)


@functools.lru_cache(maxsize=1024)
def _prefix_ids(tokenizer: Spells, text: str) -> tuple[int, ...]:
    """Returns the ids of a prefix. They are cached, because the same few prefixes occur in every example.

    Logs a warning if the tokenizer changes the text.
    """
    ids = tuple(tokenizer.encode(text))
    if ids and (change := tokenizer.change(text, ids)):
        logger.warning(f"a row that begins with {text!r}: {shown(change)} from the tokenizer")
    return ids


def shown(change: tuple[str, str]) -> str:
    """Describes the result of `Spells.change` in words, with each text cut to 40 characters."""
    composed = (unicodedata.normalize("NFC", text) for text in change)
    show = ascii if len({*composed}) == 1 else repr  # texts that differ only in composition look alike as `repr`
    was, now = (show(text if len(text) <= 40 else f"{text[:40]}...") for text in change)
    return f"{was} comes back as {now}"
