"""Reads the rows of text tables (CSV and similar formats) as records."""

import csv
import functools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from pipejax.config import DataConfig
from pipejax.data.lines import LONGEST, Placed, Refusal, bounded_lines, decoded, refuse_line
from pipejax.data.storage import SUFFIXES as PACKED
from pipejax.data.storage import inner_name
from pipejax.system.errors import UserError
from pipejax.system.fields import listed
from pipejax.system.strict_json import JsonMapping

logger = logging.getLogger(__name__)

SUFFIXES = (".csv", ".tsv")
DELIMITERS = (",", ";", "\t", "|")  # the delimiters that are detected


class Dialect(NamedTuple):
    """The delimiter of a text table, and the meaning of its quotes."""

    # between columns; "": a tab in .tsv, else the one of DELIMITERS with which the first line has the most columns
    delimiter: str = ""
    # "quote": quotes enclose cells; "letters": quotes are text; "auto": "letters" in .tsv, else "quote" with checks
    quotes: str = "auto"

    @classmethod
    def of(cls, config: DataConfig) -> "Dialect":
        """Returns the dialect in the config."""
        return cls(config.csv_delimiter, config.csv_quotes)

    @classmethod
    def noted(cls, settings: JsonMapping) -> "Dialect":
        """Returns the dialect in settings by dotted key, the result of `as_settings`; absent settings have defaults."""
        keys = zip(cls._fields, FOUND.as_settings(), strict=True)
        return cls(**{name: settings[key] for name, key in keys if key in settings})

    def as_settings(self) -> dict[str, str]:
        """Returns the settings of the config that describe the dialect, by dotted key."""
        return {f"data.csv_{name}": value for name, value in self._asdict().items()}


_ENDS, _QUOTED, _WHOLE = re.compile(r"[\r\n]"), re.compile(r'"(?:[^"]|"")*"'), re.compile(r"-?\d+\.0")
FOUND = Dialect()  # detected by the file's name and its first line
csv.field_size_limit(LONGEST)  # articles exceed csv's default of 128 KiB; the limit is global


class _Lost(UserError):
    """Raised for a quote that is never closed, or that is closed only in a later row.

    The line cannot be skipped, because the cell may contain other rows.
    """


class LostRows(_Lost):
    """Raised for a cell in quotes that seems to contain rows, judging by the quotes and delimiters of the table."""


class _Quoting:
    """Decides whether a cell of several lines is one cell, or rows between two stray quotes, which are text.

    A stray quote at the beginning of a cell encloses all text up to the next quote. If that quote ends a cell, both
    readings are valid CSV, and the quotes of the other rows decide: a writer that produces stray quotes also leaves
    quotes inside cells, and does not enclose cells that require it.
    """

    def __init__(self, delimiter: str, *, is_spaced: bool) -> None:
        """Begins without rows. `is_spaced`: whether rows have a space after a delimiter."""
        self.delimiter, self.is_spaced = delimiter, is_spaced
        between = re.escape(delimiter)
        self._cell = re.compile(rf'(?:^|(?<={between}))"([^"]*(?:""[^"]*)*)"(?={between}|[\r\n]*$)')
        self._needed = re.compile(rf'{between}|["\r\n]')
        self._is_kept = False  # whether a cell in quotes needs them: it contains a delimiter, a quote or a line break
        self._is_broken = False  # whether a cell without quotes around it contains a quote
        # The first cell that may contain rows: its first line, and the line after its last one.
        self.doubtful: tuple[int, int] | None = None

    def lost(
        self, lines: Sequence[str], first: int, columns: int, cells: Sequence[str] | None
    ) -> tuple[int, int] | None:
        """Adds the next row; returns the span of lines in which rows would be lost, or None.

        Args:
          lines: the lines of the row.
          first: the number of the first line.
          columns: the number of columns of the table.
          cells: the cells; None if the lines are not valid CSV.
        """
        span, looks_like_rows = (first, first + len(lines)), len(lines) > 1 and self._look_like_rows(lines, columns)
        if looks_like_rows and cells is None:
            return span
        if looks_like_rows and all(line.count(self.delimiter) == columns - 1 for line in (lines[0], lines[-1])):
            self.doubtful = self.doubtful or span
            if columns > 2 and not self._is_kept:
                return span  # prose and code do not have this many delimiters in each line by chance
        elif not self._is_broken:
            self._read("".join(lines), cells)
        return self.doubtful if self._is_broken else None

    def _look_like_rows(self, lines: Sequence[str], columns: int) -> bool:
        """Returns whether nearly all lines have the number of delimiters of a row.

        A line with a space after a delimiter does not count, because prose has such spaces, unless the rows of the
        table have such spaces too.
        """
        parts, most, prose = [x for x in lines if x.strip()], columns - 1, f"{self.delimiter} "
        alike = sum(x.count(self.delimiter) == most and (self.is_spaced or prose not in x) for x in parts)
        return len(parts) > 1 and most > 0 and 10 * alike >= 9 * len(parts)

    def _read(self, row: str, cells: Sequence[str] | None) -> None:
        if cells is None or any('"' in cell for cell in cells):  # else all quotes of the row enclose cells
            self._is_broken = '"' in self._cell.sub("", row)
        if cells is not None and not self._is_kept and not self._is_broken:
            self._is_kept = any(map(self._needed.search, cells))


def suffix_of(path: str | Path) -> str:
    """Returns the suffix of a name in lower case, without the suffix of a compressed file: ".csv" of "a.CSV.gz"."""
    path = Path(inner_name(path))
    return (Path(path.stem) if path.suffix.lower() in PACKED else path).suffix.lower()


def is_table(path: str | Path) -> bool:
    """Returns whether a path has the name of a text table."""
    return suffix_of(path) in SUFFIXES


def lines_of(content: Iterable[bytes], where: str) -> Iterator[bytes]:
    """Yields the lines of a table with their line ends, which may also be a single carriage return."""
    for line in bounded_lines(content, where):
        if b"\r" in line:
            yield from filter(None, re.split(rb"(?<=\r)(?!\n)", line))
        else:
            yield line


def _count_columns(line: str, delimiter: str) -> int:
    try:
        return len(next(csv.reader([line], delimiter=delimiter), []))
    except csv.Error:  # the line is not a row with this delimiter
        return 0


class TextTable:
    """A table whose first row, the names of the columns, has been read."""

    def __init__(self, lines: Iterator[bytes], where: str, dialect: Dialect = FOUND, *, tell: bool = True) -> None:
        """Reads the first row and detects the delimiter.

        Args:
          lines: the lines of the file.
          where: the file's name; .tsv selects tabs.
          dialect: the delimiter and the meaning of quotes.
          tell: whether quotes are checked and doubts logged, as for a table that is read as a whole.

        Raises:
          UserError: the first row is invalid, or names a column twice.
        """
        self.where, self.tell, self.quotes = where, tell, dialect.quotes
        first, is_tsv = next(lines, b""), suffix_of(where) == ".tsv"
        self.letters = self.quotes == "letters" or (self.quotes == "auto" and is_tsv)
        named, line = "\t" if is_tsv else "", decoded(first, where, 1)
        # The default is the delimiter that splits the line of names into the most columns.
        columns = {one: _count_columns(line, one) for one in DELIMITERS}
        self.delimiter = dialect.delimiter or named or max(DELIMITERS, key=columns.__getitem__)
        self._spaced = self.delimiter == "\t" or f"{self.delimiter} " in line
        if tell and self.delimiter not in (",", dialect.delimiter, named):
            _say_once(
                f"{where}: columns are separated by {self.delimiter!r}, as detected from the line of column names"
            )
        self.names = list[str]()
        # The rows after the names, in the form of `rows`.
        self.rest = self.rows(chain([first], lines)) if first else iter(())
        number, self.lines, cells = next(self.rest, (1, 0, list[str]()))
        if isinstance(cells, UserError):
            raise cells
        self.names = [name.strip() for name in cells]
        if first and (len({*self.names}) < len(self.names) or not any(self.names)):
            raise UserError(f"{where}:{number}", found=f"the column names {listed(self.names)}", expected="each once")

    @property
    def key(self) -> bytes:
        """Identifies how the lines are parsed, for digests of the lines."""
        return self.delimiter.encode() + b"letters" * self.letters

    def rows(self, lines: Iterable[bytes], first: int = 1) -> Iterator[tuple[int, int, list[str] | UserError]]:
        """Yields the number of the first line, the number of lines, and the cells or the error of each row."""
        broken, own = list[UserError](), list[str]()  # the errors and the lines of the current row

        def texts() -> Iterator[str]:
            for number, line in enumerate(lines, start=first):
                try:
                    own.append(decoded(line, self.where, number))
                except UserError as error:
                    broken.append(error)
                    own.append(line.decode("utf-8", "replace"))  # the row continues after the bad line
                yield own[-1]

        kind: Literal[0, 3] = csv.QUOTE_NONE if self.letters else csv.QUOTE_MINIMAL
        reader = csv.reader(texts(), delimiter=self.delimiter, strict=True, quoting=kind)
        quoting = _Quoting(self.delimiter, is_spaced=self._spaced)
        is_judged = self.tell and self.quotes == "auto" and not self.letters
        told, long, longest = set[str](), 0, (0, 0)
        while True:
            broken.clear()
            own.clear()
            begun = first + reader.line_num
            cells: list[str] | UserError
            try:
                cells = next(reader)
            except StopIteration:
                break
            except csv.Error as error:
                if str(error) == "unexpected end of data":
                    cells = _Lost(f"{self.where}:{begun}", "not CSV (a quote is never closed)")
                else:
                    cells = UserError(
                        f"{self.where}:{begun}", f"not CSV ({error}){_span(begun, reader.line_num + first)}"
                    )
            count = first + reader.line_num - begun
            lost = None
            if is_judged and not isinstance(cells, _Lost):
                lost = quoting.lost(own, begun, len(self.names), cells if isinstance(cells, list) else None)
            if lost:
                cells = LostRows(
                    f"{self.where}:{lost[0]}",
                    found=f"a quoted cell that seems to contain rows{_span(*lost)}",
                    expected="a cell that ends in its row",
                    hint="data.csv_quotes=letters reads quotes as text; data.csv_quotes=quote accepts the cell",
                )
            elif broken and not isinstance(cells, _Lost):
                # After an unclosed quote, the following lines are not rows any more.
                cells = UserError(f"{broken[0]}{_span(begun, begun + count)}")
            elif self.tell and isinstance(cells, list):
                is_long = count > 1 and any(_ENDS.search(x) and (self.delimiter in x or len(cells) < 2) for x in cells)
                long, longest = long + is_long, max(longest, (is_long * count, begun))
                for doubt in self._doubts(cells, is_long, quoting.doubtful == (begun, begun + count)):
                    if doubt not in told:
                        told.add(doubt)
                        _say_once(f"{self.where}:{begun}: found {doubt}{_span(begun, begun + count)}")
            yield begun, count, cells
        if long > 1:
            _say_once(
                f"{self.where}: {long} rows have a cell that contains line ends, "
                f"the longest{_span(longest[1], sum(longest))}"
            )

    def _doubts(self, cells: Sequence[str], is_long: bool, is_doubtful: bool) -> Iterator[str]:
        if is_long:
            also = " (with data.csv_quotes = letters its lines are rows)" if is_doubtful else ""
            yield f"a cell that contains line ends{f' and {self.delimiter!r}' * (len(cells) > 1)}{also}"
        if self.letters and self.quotes == "auto" and any(map(_QUOTED.fullmatch, cells)):
            yield "a cell in quotes, which are read as text, unless data.csv_quotes = quote"
        if "id" in self.names and _WHOLE.fullmatch(dict(zip(self.names, cells, strict=False)).get("id", "")):
            yield "an id that ends in .0, as whole numbers do in a column with a gap; it is not changed"

    def records(
        self, lines: Iterable[bytes] | None = None, first: int = 1, bad: Refusal = refuse_line
    ) -> Iterator[Placed]:
        """Yields ("FILE:LINE", {column: text}) for each row of `lines` (None: all); `bad` gets the errors."""
        for number, count, cells in self.rest if lines is None else self.rows(lines, first):
            place = f"{self.where}:{number}"
            if isinstance(cells, UserError):
                (refuse_line if isinstance(cells, _Lost) else bad)(cells)
            elif len(cells) == len(self.names):
                record = dict(zip(self.names, cells, strict=True))
                if not record.get("id", "id").strip():
                    del record["id"]  # else all rows without an id would have the same one
                yield place, record
            elif cells:
                found = f"{count_columns(cells)}{_span(number, number + count)}"
                is_quoted = self.letters and any(cell.startswith('"') for cell in cells)
                more = "; quotes are read as text, unless data.csv_quotes = quote" if is_quoted else ""
                bad(UserError(place, found=found, expected=f"{len(self.names)} ({listed(self.names)}){more}"))


@functools.lru_cache(maxsize=1024)  # the files of a stream are read repeatedly
def _say_once(line: str) -> None:
    logger.info(line)


def count_columns(cells: Sequence[str]) -> str:
    """Returns the number of cells of a line in words, such as "2 columns"."""
    return "1 column" if len(cells) == 1 else f"{len(cells)} columns"


def _span(first: int, end: int) -> str:
    return f" in lines {first} to {end - 1}" if end - first > 1 else ""
