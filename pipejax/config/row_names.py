"""Names of rows: the text with which a row begins (`grid.row_names`), and the bare name in it."""

import re
from collections.abc import Callable, Iterable

MARKS = " :=-"  # characters that may end the name of a row: "price:" names the property "price"
# A mark between a bare name and a value. A sign that belongs to the value, as in "-1" and ":)", is not one.
_MARK = re.compile(r"[:=]|\s+[:=](?=[\s\d]|$)|\s+-(?=\s)")


def bare_name(name: str) -> str:
    """The name of a row without the marks at its end."""
    return name.rstrip(MARKS) or name


def split_row(row: str, names: Iterable[str], spell: Callable[[str], str] = str) -> tuple[str, str] | None:
    """Returns the longest name that a row begins with, and the text of its value; None if it begins with no name.

    Args:
      row: the text of the row.
      names: as in `grid.row_names`; a name without a mark at its end may have one in the row.
      spell: makes texts that count as equal the same.
    """
    for name in sorted(names, key=len, reverse=True):
        bare = bare_name(name)
        for text, whole, begin in ((row, name, bare), (spell(row), spell(name), spell(bare))):
            rest = text[len(whole) :]
            in_word = whole[-1:].isalpha() and rest[:1].islower()  # "price" is not the name of "prices: 3"
            if text.startswith(whole) and not in_word:
                mark = _MARK.match(rest) if name == bare else None
                return name, rest[mark.end() if mark else 0 :].strip()
            if text.startswith(begin) and name != bare and (mark := _MARK.match(text, len(begin))):
                return name, text[mark.end() :].strip()
    return None
