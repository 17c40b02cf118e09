"""Names of rows: the text with which a row begins (`grid.row_names`), its bare name, and names of columns."""

import csv
import re
from collections.abc import Callable, Iterable, Sequence

MARKS = " :=-"  # characters that may end the name of a row: "price:" names the property "price"
# A mark between a bare name and a value. A sign that belongs to the value, as in "-1" and ":)", is not a mark.
_MARK = re.compile(r"[:=]|\s+[:=](?=[\s\d]|$)|\s+-(?=\s)")


def read_columns(targets: str | Sequence[str]) -> str | tuple[str, ...]:
    """Parses `data.targets`: a name, or the names of several columns.

    Names are separated by commas. A name that contains a comma must be in double quotes or in a list.
    """
    if not isinstance(targets, str):
        return tuple(targets)
    cells = next(csv.reader([targets], skipinitialspace=True), [])
    return tuple(cell.strip() for cell in cells) if len(cells) > 1 else targets


def quoted(name: str) -> str:
    """Quotes a name so that `read_columns` reads it as one name; a text that is already in quotes is not changed."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"' if isinstance(read_columns(name), tuple) else name


def field_of(targets: str) -> str:
    """Returns the name of the field in a `data.targets` with a single name."""
    return next(csv.reader([targets], skipinitialspace=True))[0] if "," in targets else targets


def names_of(columns: Sequence[str]) -> tuple[str, ...]:
    """Returns the row names for columns, one for each."""
    return tuple(f"{column}:" for column in columns)


def columns_of(columns: Sequence[str], row_names: Sequence[str]) -> dict[str, str]:
    """Maps columns to the names of rows; without columns, maps bare names to them.

    Args:
      columns: `data.columns`.
      row_names: `grid.row_names`.
    """
    properties = columns if len(columns) == len(row_names) else [*map(bare_name, row_names)]
    return dict(zip(properties, row_names, strict=True))


def bare_name(name: str) -> str:
    """Returns the name of a row without the marks at its end."""
    return name.rstrip(MARKS) or name


def split_row(row: str, names: Iterable[str], spell: Callable[[str], str] = str) -> tuple[str, str] | None:
    """Splits a row into its name and the text of its value; returns None if the row begins with none of the names.

    If the row begins with several of the names, the longest one is its name.

    Args:
      row: the text of the row.
      names: as in `grid.row_names`. After a name that does not end with a mark, the row may have a mark, which is not
        part of the value.
      spell: normalises texts before they are compared.
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
