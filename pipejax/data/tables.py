"""Reads the rows of tables of text, which are CSV or the like, as records."""

import csv
import logging
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from pipejax.data.lines import LONGEST, Placed, Refusal, bounded, decoded, refuse
from pipejax.data.packed import SUFFIXES as PACKED
from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)

SUFFIXES = (".csv", ".tsv")
DELIMITERS = (",", ";", "\t", "|")  # that are found by themselves


class _NeverClosed(UserError):
    """A quote that no other closes, so that no row can be found after it."""


def suffix_of(path: str | Path) -> str:
    """The suffix of a name, in lower case, without that of a packed file: ".csv" of "a.CSV.gz"."""
    path = Path(path)
    return (Path(path.stem) if path.suffix.lower() in PACKED else path).suffix.lower()


def is_table(path: str | Path) -> bool:
    """Whether the file is a table of text, by its name."""
    return suffix_of(path) in SUFFIXES


def lines_of(content: Iterable[bytes], where: str) -> Iterator[bytes]:
    """The lines of a table with their ends, which may be those of old Macs."""
    for line in bounded(content, where):
        if b"\r" in line:
            yield from filter(None, re.split(rb"(?<=\r)(?!\n)", line))
        else:
            yield line


class Table:
    """A table whose first row has been read: it has the names of the columns."""

    def __init__(self, lines: Iterator[bytes], where: str, *, delimiter: str = "", tell: bool = True) -> None:
        """Reads the first row.

        Args:
          delimiter: between the columns; "": a tab where the name ends in .tsv, else the one of DELIMITERS that parts
            the names into the most.
        """
        self.where = where
        first = next(lines, b"")
        named = "\t" if suffix_of(where) == ".tsv" else ""
        self.delimiter = delimiter or named or _likeliest(decoded(first, where, 1))
        if tell and self.delimiter not in (",", delimiter, named):
            logger.info(f"{where}: columns are parted by {self.delimiter!r}, as the line of their names shows")
        self.rest = self.rows(chain([first], lines)) if first else iter(())  # as `rows`: those after the names
        number, self.lines, cells = next(self.rest, (1, 0, list[str]()))
        if isinstance(cells, UserError):
            raise cells
        self.names = [name.strip() for name in cells]
        if first and (len({*self.names}) < len(self.names) or not any(self.names)):
            raise UserError(f"{where}:{number}: found the column names {', '.join(self.names)}; expected each once")

    def rows(self, lines: Iterable[bytes], first: int = 1) -> Iterator[tuple[int, int, list[str] | UserError]]:
        """Yields for each row its first line, how many lines it has, and its cells or why it has none."""
        csv.field_size_limit(LONGEST)  # articles are longer than csv's default of 128 KiB
        broken: list[UserError] = []

        def texts() -> Iterator[str]:
            for number, line in enumerate(lines, start=first):
                try:
                    yield decoded(line, self.where, number)
                except UserError as error:
                    broken.append(error)
                    yield line.decode("utf-8", "replace")  # the row goes on

        reader = csv.reader(texts(), delimiter=self.delimiter, strict=True)
        while True:
            broken.clear()
            begun = first + reader.line_num
            cells: list[str] | UserError
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if str(error) == "unexpected end of data":
                    cells = _NeverClosed(f"{self.where}:{begun}: not CSV (a quote is never closed)")
                else:
                    cells = UserError(f"{self.where}:{begun}: not CSV ({error}){_span(begun, reader.line_num + first)}")
            count = first + reader.line_num - begun
            if broken and not isinstance(cells, _NeverClosed):  # after that quote nothing is a row any more
                cells = UserError(f"{broken[0]}{_span(begun, begun + count)}")
            yield begun, count, cells

    def records(self, lines: Iterable[bytes] | None = None, first: int = 1, bad: Refusal = refuse) -> Iterator[Placed]:
        """Yields ("FILE:LINE", {column name: text}) for each row that is not blank; LINE is the row's first.

        A row of another length goes to `bad`, and one that is no CSV in UTF-8; but for a quote that is never closed: no
        row is found after it.

        Args:
          lines: of this table; None: those after the names.
        """
        for number, count, cells in self.rest if lines is None else self.rows(lines, first):
            place = f"{self.where}:{number}"
            if isinstance(cells, UserError):
                (refuse if isinstance(cells, _NeverClosed) else bad)(cells)
            elif len(cells) == len(self.names):
                record = dict(zip(self.names, cells, strict=True))
                if not record.get("id", "id").strip():
                    del record["id"]  # else all such rows would have the same
                yield place, record
            elif cells:
                found = f"found {len(cells)} columns{_span(number, number + count)}"
                bad(UserError(f"{place}: {found}; expected {len(self.names)} ({', '.join(self.names)})"))


def _span(first: int, end: int) -> str:
    """The lines from `first` to the one before `end`, if these are several."""
    return f" in lines {first} to {end - 1}" if end - first > 1 else ""


def _likeliest(line: str) -> str:
    """The delimiter that parts a line of names into the most."""
    return max(DELIMITERS, key=lambda one: len(next(csv.reader([line], delimiter=one), [])))
