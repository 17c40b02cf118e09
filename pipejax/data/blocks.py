"""Cuts files of JSON lines or Parquet into blocks of lines, and reads a block without what comes before it."""

import contextlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipejax.data.formats import count_parquet, is_parquet, read_parquet
from pipejax.data.lines import Placed, bounded, open_file, read_objects, unpacked
from pipejax.system.errors import UserError

EXPECTED = "JSON lines or Parquet"


class Block(NamedTuple):
    """Consecutive lines of a file; of a Parquet file: rows."""

    path: str
    first: int  # line, from 1
    lines: int
    offset: int  # bytes before the first line, unpacked; 0 in a Parquet file


def cut(path: str, size: int) -> list[Block]:
    """The blocks of a file, `size` lines each; the last one may be smaller.

    Raises:
      UserError: the file cannot be read, is damaged, or has a line that is too long.
    """
    total, offsets = 0, list[int]()
    if is_parquet(path):
        total = count_parquet(Path(path))
        offsets = [0] * -(-total // size)
    else:
        offset = 0
        with open_file(path, EXPECTED) as file, unpacked(file, path) as content:
            for line in bounded(content, path):
                if total % size == 0:
                    offsets.append(offset)
                total, offset = total + 1, offset + len(line)
    starts = range(0, total, size)
    return [
        Block(path, start + 1, min(size, total - start), offset) for start, offset in zip(starts, offsets, strict=True)
    ]


class Reader:
    """Reads blocks. A packed file stays open, so that its beginning is not unpacked again for the next block."""

    def __init__(self, root: Path) -> None:
        """`root`: the directory that paths are relative to."""
        self.root, self._path, self._stack = root, "", contextlib.ExitStack()
        self._file: BinaryIO

    def read(self, block: Block) -> Iterator[Placed]:
        """Yields ("FILE:LINE", object) for each line that is not blank.

        Raises:
          UserError: a line is no JSON object, or the file has become shorter.
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
        if len(lines) < block.lines:
            raise UserError(
                f"{block.path}: found {block.first - 1 + len(lines)} lines; expected at least "
                f"{block.first - 1 + block.lines}, as when the work began"
            )
        yield from read_objects(lines, block.path, block.first)
