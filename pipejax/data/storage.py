"""Opens data files, local or remote, compressed or not.

Remote files are at a URL that fsspec supports (s3, gs, https, ...), or in a data set on the Hugging Face hub. The first
bytes of a file determine the compression, not its name.
"""

import bz2
import contextlib
import glob
import gzip
import importlib
import io
import lzma
import re
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from pipejax.system.errors import UserError, described_error
from pipejax.system.extras import module
from pipejax.system.files import look

HUB = "hub:"
_DATA_SET = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?:\[([\w.-]+)\])?")


def is_remote(path: str | Path) -> bool:
    """Returns whether a path is a URL or names a data set on the hub."""
    return isinstance(path, str) and ("://" in path or path.startswith(HUB))


def inner_name(path: str | Path) -> str:
    """Returns the first part of a chained URL: "zip://a.csv" of "zip://a.csv::s3://bucket/b.zip"."""
    parts = str(path).split("::") if is_remote(path) else []
    return next((part for part in parts if part.partition("://")[2]), str(path))


def files_of(path: str) -> list[str]:
    """Returns the files of a path, sorted by name.

    A split on the hub may have several files, and a pattern (* and ?), local or at a URL, may match several files.

    Raises:
      UserError: there are no such files.
    """
    pattern = _pattern_of(path) if path.startswith(HUB) else path
    if not re.search(r"[*?]", pattern) or ("://" not in pattern and Path(pattern).exists()):
        return [path]
    found = _list(pattern, path) if "://" in pattern else sorted(glob.glob(pattern))
    if not found:
        raise UserError(path, found="no files", expected="matching files")
    return found


def open_remote(url: str, expected: str) -> BinaryIO:
    """Opens a URL for reading bytes.

    Raises:
      UserError: the URL cannot be opened. Reading from the file also raises a UserError if the connection breaks.
    """
    system, name = _system_of(url)

    def broken(error: Exception) -> UserError:
        return UserError(url, f"cannot be read further ({described_error(error)})")

    try:
        return cast(BinaryIO, io.BufferedReader(Guarded(system.open(name, "rb"), broken, system)))
    except Exception as error:  # each protocol has its own exceptions
        raise UserError(url, f"cannot be read ({described_error(error)})", expected=expected) from error


class Guarded(io.RawIOBase):
    """A file object of a library; exceptions while the file is read become UserErrors."""

    def __init__(self, file: Any, refusal: Callable[[Exception], UserError], holder: object = None) -> None:
        """Wraps a file.

        Args:
          file: the library's file object.
          refusal: a function that makes a UserError from an exception.
          holder: an object to keep alive, such as a file system: an archive is closed when its file system is
            garbage-collected.
        """
        self.file, self.refusal, self.holder = file, refusal, holder

    def readable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def seekable(self) -> bool:
        """See io.RawIOBase."""
        return bool(self.file.seekable())

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase; raises a UserError for an exception of the library."""
        try:
            return int(self.file.readinto(buffer))
        except Exception as error:  # a broken connection or a damaged archive may raise any exception
            raise self.refusal(error) from error

    def seek(self, offset: int, whence: int = 0) -> int:
        """See io.RawIOBase."""
        return int(self.file.seek(offset, whence))

    def close(self) -> None:
        """Closes the library's file as well."""
        super().close()
        self.file.close()


def _pattern_of(path: str) -> str:
    """Returns the URL pattern of the Parquet files that the hub makes of every public data set, for one split."""
    named = _DATA_SET.fullmatch(path)
    if named is None:
        raise UserError(path, found="no name of a data set on the hub", expected="hub:OWNER/NAME[SPLIT]")
    owner, split = named[1], named[3] or ""
    root = f"hf://datasets/{owner}@refs/convert/parquet"
    parts = [found.rpartition("/")[2] for found in _list(f"{root}/*", path)]
    if (part := named[2] or (parts[0] if len(parts) == 1 else "default")) not in parts:
        kinds = ", ".join(parts) or "none"
        raise UserError(
            path, found=f"the parts {kinds}", expected=f"one of them, as hub:{owner}/PART[{split or 'SPLIT'}]"
        )
    splits = [found.rpartition("/")[2] for found in _list(f"{root}/{part}/*", path)]
    if split not in splits:
        kinds = ", ".join(splits) or "none"
        raise UserError(path, found=f"the splits {kinds}", expected=f"one of them, as {path.partition('[')[0]}[SPLIT]")
    return f"{root}/{part}/{split}/*.parquet"


def _list(pattern: str, path: str) -> list[str]:
    system, name = _system_of(pattern)
    try:
        found, parts = sorted(system.glob(name)), pattern.split("::")
        caches = [part for part in parts[:1] if "://" not in part]  # a caching protocol without a path
        after = parts[len(caches) + 1 :]
        return ["::".join([*caches, system.unstrip_protocol(file), *after]) for file in found]
    except Exception as error:  # as in `open_remote`
        raise UserError(path, f"cannot be listed ({described_error(error)})", expected="files at a URL") from error


def _system_of(url: str) -> tuple[Any, str]:
    fsspec = module("fsspec", "remote", url)
    try:
        system, name = fsspec.core.url_to_fs(url)
    except Exception as error:  # the protocol is unknown or needs a library, or the archive is not one
        raise UserError(url, described_error(error), expected="a URL that fsspec can open") from error
    return system, name


SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_ZSTD = b"\x28\xb5\x2f\xfd"
_DAMAGE: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError, OSError)
# Files that are not text, by their first bytes: a description, and how to convert them.
_OTHERS = {
    _ZSTD: ("data packed with zstd", "`zstd -d` unpacks it, and so does Python 3.14"),
    b"PK\x03\x04": ("a zip archive or a workbook", "unpack it, or save its sheet as CSV in UTF-8"),
    b"\xd0\xcf\x11\xe0": ("a workbook", "save its sheet as CSV in UTF-8"),
    b"PAR1": ("Parquet", "its name has to end in .parquet"),
    b"ARROW1": ("Arrow's own format", "write it as Parquet"),
    b"version https://git-lfs": ("a pointer of Git LFS", "`git lfs pull` fetches the file itself"),
}


def open_file(path: str | Path, expected: str) -> BinaryIO:
    """Opens a local file or a URL for reading bytes.

    Raises:
      UserError: the file cannot be opened; the message says that `expected` was expected.
    """
    if is_remote(path):
        return open_remote(str(path), expected)
    path = Path(path)
    if (found := look(path)) != "file":  # `look` also counts pipes as files
        raise UserError(path, "found a directory" if found else "no such file", expected=expected)
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror})", expected=expected) from error


@contextlib.contextmanager
def unpacked(file: BinaryIO, where: str) -> Iterator[BinaryIO]:
    """Returns a context manager that yields the content of an open file.

    The content is decompressed if its first bytes identify gzip, bzip2, xz or zstd.

    Raises:
      UserError: the compressed data are damaged, or the file has another binary format.
    """
    start = file.peek(24)[:24] if isinstance(file, io.BufferedReader) else b""
    name, content, damage = "", file, _DAMAGE
    if start.startswith(b"\x1f\x8b"):
        name, content = "gzip", cast(BinaryIO, gzip.GzipFile(fileobj=file))
    elif start.startswith(b"BZh"):
        name, content = "bzip2", cast(BinaryIO, bz2.BZ2File(file))
    elif start.startswith(b"\xfd7zXZ\x00"):
        name, content = "xz", cast(BinaryIO, lzma.LZMAFile(file))  # noqa: SIM115
    elif start.startswith(_ZSTD) and (library := _zstd()):
        name, content, damage = "zstd", library.ZstdFile(file), (*_DAMAGE, library.ZstdError)
    elif other := next((said for magic, said in _OTHERS.items() if start.startswith(magic)), None):
        raise UserError(where, found=f"{other[0]}", expected="text", hint=f"{other[1]}")
    try:
        yield content
    except damage as error:
        # This is an error of the disk, not of the data.
        if not name or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise UserError(where, f"damaged {name} data ({error})", expected="a complete file") from error


def _zstd() -> types.ModuleType | None:
    try:
        return importlib.import_module("compression.zstd")
    except ImportError:
        return None
