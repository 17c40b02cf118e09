"""Cuts files of JSON lines or Parquet into blocks of lines, and reads a block without what comes before it."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipejax.data.formats import count_parquet, is_parquet, read_parquet
from pipejax.data.lines import Placed, bounded, read_objects
from pipejax.data.packed import open_file, unpacked
from pipejax.system.errors import UserError

EXPECTED = "JSON lines or Parquet"
DIGITS = 12  # of a block's digest, hexadecimal: enough to tell apart what people change


class Block(NamedTuple):
    """Consecutive lines of a file; of a Parquet file: rows."""

    path: str
    first: int  # line, from 1
    lines: int
    offset: int  # bytes before the first line, unpacked; 0 in a Parquet file
    digest: str  # of the lines; of a Parquet file: of all of it


def cut(path: str, size: int) -> list[Block]:
    """The blocks of a file, `size` lines each; the last one may be smaller.

    Raises:
      UserError: the file cannot be read, is damaged, or has a line that is too long.
    """
    if is_parquet(path):
        total, digest = count_parquet(Path(path)), digest_of(Path(path))
        starts = range(0, total, size)
        return [Block(path, start + 1, min(size, total - start), 0, digest[:DIGITS]) for start in starts]
    blocks, first, offset = [], 1, 0
    with open_file(path, EXPECTED) as file, unpacked(file, path) as content:
        lines = bounded(content, path)
        while part := list(islice(lines, size)):
            blocks.append(Block(path, first, len(part), offset, _digest(part)))
            first, offset = first + len(part), offset + sum(map(len, part))
    return blocks


def digest_of(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(lines: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()[:DIGITS]


class Reader:
    """Reads blocks. A packed file stays open, so that its beginning is not unpacked again for the next block."""

    def __init__(self, root: Path) -> None:
        """`root`: the directory that paths are relative to."""
        self.root, self._path, self._stack = root, "", contextlib.ExitStack()
        self._file: BinaryIO

    def __del__(self) -> None:
        """Closes the file that is still open."""
        self._stack.close()

    def read(self, block: Block) -> Iterator[Placed]:
        """Yields ("FILE:LINE", object) for each line that is not blank.

        Raises:
          UserError: a line is no JSON object, or the lines are not those that were cut.
        """
        if is_parquet(block.path):
            for place, value in read_parquet(self.root / block.path, block.first, block.lines):
                yield f"{block.path}:{place.rpartition(':')[2]}", value
            return
        if self._path != block.path:
            self._stack.close()
            self._path = ""
            file = self._stack.enter_context(open_file(self.root / block.path, EXPECTED))
            self._file = self._stack.enter_context(unpacked(file, block.path))
            self._path = block.path
        self._file.seek(block.offset)
        lines = list(islice(bounded(self._file, block.path), block.lines))
        if _digest(lines) != block.digest:
            raise UserError(f"{block.path}:{block.first}: found other lines than at first; expected them unchanged")
        yield from read_objects(lines, block.path, block.first)
