"""Opens data files, compressed or not; the first bytes determine the compression, not the name."""

import bz2
import contextlib
import gzip
import importlib
import io
import lzma
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from pipejax.data.remote import is_remote, open_remote
from pipejax.system.errors import UserError
from pipejax.system.files import look

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
      UserError: it cannot be opened; the message says that `expected` was expected.
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
    """Gives the content of an open file, decompressed if its first bytes identify gzip, bzip2, xz or zstd."""
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
        # An error of the disk, not of the data.
        if not name or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise UserError(where, f"damaged {name} data ({error})", expected="a complete file") from error


def _zstd() -> types.ModuleType | None:
    try:
        return importlib.import_module("compression.zstd")
    except ImportError:
        return None
