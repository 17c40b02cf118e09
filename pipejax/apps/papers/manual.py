"""Finds a publisher's files in the directory to which the user downloaded them, in its folders and zip files."""

import functools
import io
import logging
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, NoReturn

from pipejax.data.lines import Placed, decode_lines, read_objects
from pipejax.data.storage import Guarded, open_file
from pipejax.system.errors import UserError
from pipejax.system.files import look

logger = logging.getLogger(__name__)

WHOLE = 2**31  # bytes; every known file that is read as a whole is smaller
# zipfile raises these for a member that is damaged, encrypted, or compressed by an unknown method.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, NotImplementedError, OSError)


class File(NamedTuple):
    """A file, or a member of a zip file, opened only when it is read."""

    path: Path
    member: str = ""

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    @property
    def name(self) -> str:
        """The file's name without its directory."""
        return PurePosixPath(self.member).name if self.member else self.path.name

    @property
    def folder(self) -> str:
        """The name of the directory that contains the file."""
        return PurePosixPath(self.member).parent.name if self.member else self.path.parent.name

    def open(self) -> BinaryIO:
        """Opens the file for reading bytes.

        Raises:
          UserError: the file cannot be opened.
        """
        if not self.member:
            return open_file(self.path, "a publisher's file")
        try:
            return io.BufferedReader(Guarded(_archive(self.path).open(self.member), self._refusal), 2**20)
        except _UNREADABLE as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> UserError:
        said = str(error) or type(error).__name__
        return UserError(self, f"cannot be read ({said})", expected="a complete zip file without a password")

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yields ("FILE:LINE", text) for each line."""
        with self.open() as lines:
            yield from decode_lines(lines, str(self))

    def objects(self) -> Iterator[Placed]:
        """Yields ("FILE:LINE", object) for each line of JSON."""
        with self.open() as lines:
            yield from read_objects(lines, str(self))

    def read(self) -> bytes:
        """Returns the whole content.

        Raises:
          UserError: the file is longer than WHOLE, or cannot be read.
        """
        with self.open() as file:
            # zipfile reads no more of a member than its header declares.
            size = _archive(self.path).getinfo(self.member).file_size if self.member else self.path.stat().st_size
            if size > WHOLE:
                raise UserError(
                    self, found=f"{size >> 30} GiB", expected=f"a publisher's file of at most {WHOLE >> 30}"
                )
            return file.read()


class Manual:
    """The directory of --manual-dir, with all files in its folders and zips."""

    def __init__(self, directory: str | Path, *, expected: str) -> None:
        """Lists the directory and its zip files.

        `expected` describes the files that the directory should contain, for messages.
        """
        self.directory, self.expected = Path(directory), expected
        if (found := look(self.directory, "--manual-dir")) != "directory":
            raise UserError(
                f"--manual-dir {directory}", "found a file" if found else "no such directory", expected=expected
            )
        self.files = sorted(self._list(), key=lambda file: (len(Path(str(file)).parts), str(file)))

    def _list(self) -> Iterator[File]:
        for path in self.directory.rglob("*"):
            if path.suffix == ".zip" and path.is_file():
                names = (name for name in _archive(path).namelist() if not name.endswith("/"))
                yield from (File(path, name) for name in names if not name.startswith("__MACOSX/"))
            elif path.is_file():
                yield File(path)

    def find(self, *names: str) -> File | None:
        """Returns the file with one of these names, or None.

        Raises:
          UserError: two files with the same name are in directories of the same depth.
        """
        for name in names:
            found = [file for file in self.files if file.name == name]
            depth = [len(Path(str(file)).parts) for file in found]
            if len(found) > 1 and depth[0] == depth[1]:
                raise UserError(
                    f"--manual-dir {self.directory}", found=f"{found[0]} and {found[1]}", expected=f"one {name}"
                )
            if found:
                return found[0]
        return None

    def need(self, *names: str) -> File:
        """Returns the file with one of these names.

        Raises:
          UserError: there is no such file.
        """
        return self.find(*names) or self.missing(names[0])

    def splits(self, names: Mapping[str, Sequence[str]]) -> dict[str, File]:
        """Returns the file of each split that has one, given the possible names by split; logs the other splits.

        Raises:
          UserError: no split has a file.
        """
        found = {split: file for split, options in names.items() if (file := self.find(*options))}
        if not found:
            self.missing(" or ".join(name for options in names.values() for name in options))
        for split in [split for split in names if split not in found]:
            logger.info(f"no {' or '.join(names[split])} in {self.directory}, so there is no split {split!r}")
        return found

    def inside(self, folder: str) -> dict[str, File]:
        """Returns the files in all folders of this name, by file name.

        Raises:
          UserError: there are no such files.
        """
        found = {file.name: file for file in reversed(self.files) if file.folder == folder}
        return found or self.missing(f"{folder}/")

    def missing(self, what: str) -> NoReturn:
        """Raises a UserError that names the missing files, and the files that were expected."""
        raise UserError(f"--manual-dir {self.directory}", found=f"no {what}", expected=f"{self.expected}")


@functools.lru_cache(maxsize=4)  # opening a zip of 60,000 files takes longer than reading one of them
def _archive(path: Path) -> zipfile.ZipFile:
    """Opens a zip file, and keeps the latest ones open.

    Raises:
      UserError: the zip file cannot be read.
    """
    try:
        return zipfile.ZipFile(path)
    except (*_UNREADABLE, ValueError) as error:  # ValueError: member names that cannot be decoded
        raise UserError(path, f"cannot be read ({error})", expected="a zip") from error
