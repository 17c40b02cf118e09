"""The vocabulary of a benchmark's model: the word of id i is "t<i>", except for the first ids."""

from collections.abc import Iterable

SPECIAL = ("<pad>", "</s>", "<unk>")  # words of the first ids


def words_of(ids: Iterable[int]) -> list[str]:
    """The words of these ids."""
    return [SPECIAL[i] if i < len(SPECIAL) else f"t{i}" for i in ids]


def ids_of(words: Iterable[str]) -> list[int]:
    """The ids of these words."""
    return [SPECIAL.index(word) if word in SPECIAL else int(word[1:]) for word in words]
