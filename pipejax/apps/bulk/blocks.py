"""Divides files of JSON lines, CSV or Parquet into blocks of lines, and reads a block without the lines before it."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipejax.data.formats import is_parquet, read_parquet
from pipejax.data.lines import Placed, Refusal, bounded_lines, read_objects, refuse_line
from pipejax.data.storage import open_file, unpacked
from pipejax.data.tables import FOUND, Dialect, LostRows, TextTable, is_table, lines_of
from pipejax.system.errors import UserError

EXPECTED = "JSON lines, CSV or Parquet"
DIGITS = 12  # hexadecimal digits of a block's digest; enough to detect edits


class Block(NamedTuple):
    """Consecutive lines of a file.

    A block of a CSV file has whole rows without the line of names; a block of a Parquet file has rows.
    """

    path: str
    first: int  # the number of the first line, from 1
    lines: int
    offset: int  # uncompressed bytes before the first line; 0 in a Parquet file
    digest: str  # digest of the lines; for CSV also of the names and of `TextTable.key`; for Parquet of the rows


def cut(path: str, size: int, *, dialect: Dialect = FOUND) -> list[Block]:
    """Returns the blocks of a file, `size` lines or rows each; the last one may be smaller."""
    if is_parquet(path):
        rows, blocks = read_parquet(Path(path)), list[Block]()
        while part := [_row(value) for value in islice(rows, size)]:
            blocks.append(Block(path, 1 + size * len(blocks), len(part), 0, _digest_of_lines(part)))
        return blocks
    with open_file(path, EXPECTED) as file, unpacked(file, path) as content:
        if is_table(path):
            return list(_cut_table(content, path, size, dialect))
        return list(_blocks(path, ([line] for line in bounded_lines(content, path)), size))


def _cut_table(content: BinaryIO, path: str, size: int, dialect: Dialect) -> Iterator[Block]:
    """Yields the blocks of a text table. All digests include the line of names."""
    read: list[bytes] = []  # the lines since the last row

    def lines() -> Iterator[bytes]:
        for line in lines_of(content, path):
            read.append(line)
            yield line

    def taken() -> list[bytes]:
        part = read.copy()
        read.clear()
        return part

    table = TextTable(lines(), path, dialect)
    names = taken()
    offset = sum(map(len, names))

    def rows() -> Iterator[list[bytes]]:
        for _, _, cells in table.rest:
            if isinstance(cells, LostRows):  # a block by itself does not show the error
                raise cells
            yield taken()

    yield from _blocks(path, rows(), size, 1 + len(names), offset, [*names, table.key])


def _blocks(
    path: str, rows: Iterator[list[bytes]], size: int, first: int = 1, offset: int = 0, key: Iterable[bytes] = ()
) -> Iterator[Block]:
    """Yields blocks of `size` rows.

    Args:
      path: the file's path.
      rows: the lines of each row.
      size: rows per block.
      first: the number of the first line.
      offset: the bytes before the first line.
      key: part of all digests.
    """
    while part := [line for row in islice(rows, size) for line in row]:
        yield Block(path, first, len(part), offset, _digest_of_lines([*key, *part]))
        first, offset = first + len(part), offset + sum(map(len, part))


def _row(placed: Placed) -> bytes:
    """Returns a row of Parquet as bytes, which depend only on its values, not on how the file was written."""
    return repr(placed[1]).encode("utf-8", "surrogatepass")


def _digest_of_lines(lines: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()[:DIGITS]


class Reader:
    """Reads blocks. A compressed file stays open, so that the next block does not decompress its beginning again."""

    def __init__(self, root: Path, dialect: Dialect = FOUND) -> None:
        """Opens no file yet. `root`: the directory that paths of blocks are relative to."""
        self.root, self.dialect, self._path, self._stack = root, dialect, "", contextlib.ExitStack()
        self._file: BinaryIO
        self._table: TextTable | None
        self._names: list[bytes]

    def __del__(self) -> None:
        self._stack.close()

    def read(self, block: Block, bad: Refusal = refuse_line) -> Iterator[Placed]:
        """Yields ("FILE:LINE", object) for each line that is not blank; an invalid line goes to `bad`.

        Raises:
          UserError: the lines changed since the file was divided into blocks.
        """
        if is_parquet(block.path):
            rows = list(read_parquet(self.root / block.path, block.first, block.lines))
            self._check(block, map(_row, rows))
            for place, value in rows:
                yield f"{block.path}:{place.rpartition(':')[2]}", value
            return
        if self._path != block.path:
            self._open(block.path)
        self._file.seek(block.offset)
        split = lines_of if self._table else bounded_lines
        lines = list(islice(split(self._file, block.path), block.lines))
        if self._table:
            self._check(block, [*self._names, self._table.key, *lines])
            yield from self._table.records(lines, block.first, bad)
        else:
            self._check(block, lines)
            yield from read_objects(lines, block.path, block.first, bad)

    def _open(self, path: str) -> None:
        """Opens a file in place of the previous one, and reads a table's line of names."""
        self._stack.close()
        self._path = ""
        file = self._stack.enter_context(open_file(self.root / path, EXPECTED))
        self._file = self._stack.enter_context(unpacked(file, path))
        self._table = None
        if is_table(path):
            lines = lines_of(self._file, path)
            self._table = TextTable(lines, path, self.dialect, tell=False)
            self._file.seek(0)
            self._names = list(islice(lines_of(self._file, path), self._table.lines))
        self._path = path

    def _check(self, block: Block, lines: Iterable[bytes]) -> None:
        if _digest_of_lines(lines) != block.digest:
            raise UserError(
                f"{block.path}:{block.first}",
                found="lines that changed after the first reading",
                expected="an unchanged file",
            )
