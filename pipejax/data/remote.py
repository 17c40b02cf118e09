"""Files that are elsewhere: at a URL that fsspec knows (s3, gs, https, ...), or in a data set of Hugging Face's hub."""

import glob
import re
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from pipejax.system.errors import UserError, first_line
from pipejax.system.extras import module

HUB = "hub:"
_DATA_SET = re.compile(r"hub:([\w.-]+/[\w.-]+)(?:/([\w.-]+))?\[([\w.-]+)\]")


def is_remote(path: str | Path) -> bool:
    """Whether a path of the config is a URL or names a split of the hub."""
    return isinstance(path, str) and ("://" in path or path.startswith(HUB))


def files_of(path: str) -> list[str]:
    """The files that a path of the config stands for, in the order of their names.

    A split of the hub has several, a pattern (* and ?) names several, here or at a URL, and any other path is one.
    """
    pattern = _pattern_of(path) if path.startswith(HUB) else path
    if not re.search(r"[*?]", pattern) or ("://" not in pattern and Path(pattern).exists()):
        return [path]
    found = _list(pattern, path) if "://" in pattern else sorted(glob.glob(pattern))
    if not found:
        raise UserError(f"{path}: found no files; expected some of that name")
    return found


def open_remote(url: str, expected: str) -> BinaryIO:
    """Opens a file at a URL to read bytes; raises a UserError, which says `expected`, if that is impossible."""
    system, name = _system_of(url)
    try:
        return cast(BinaryIO, BufferedReader(system.open(name, "rb")))
    except Exception as error:  # each protocol has its own
        raise UserError(f"{url}: cannot be read ({_words(error)}); expected {expected}") from error


def _pattern_of(path: str) -> str:
    """The URL of the Parquet files that the hub makes of every public data set, for one split."""
    named = _DATA_SET.fullmatch(path)
    if named is None:
        raise UserError(f"{path}: found no data set of the hub; expected hub:OWNER/NAME[SPLIT]")
    root = f"hf://datasets/{named[1]}@refs/convert/parquet"
    parts = [found.rpartition("/")[2] for found in _list(f"{root}/*", path)]
    if (part := named[2] or (parts[0] if len(parts) == 1 else "default")) not in parts:
        kinds = ", ".join(parts) or "none"
        raise UserError(f"{path}: found the parts {kinds}; expected one of them, as hub:{named[1]}/PART[{named[3]}]")
    return f"{root}/{part}/{named[3]}/*.parquet"


def _list(pattern: str, path: str) -> list[str]:
    system, name = _system_of(pattern)
    try:
        return [system.unstrip_protocol(file) for file in sorted(system.glob(name))]
    except Exception as error:  # as in `open_remote`
        raise UserError(f"{path}: cannot be listed ({_words(error)}); expected files at a URL") from error


def _system_of(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the name in it; fsspec has no types."""
    fsspec = module("fsspec", "remote", url)
    try:
        system, name = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a protocol that needs a library, or that nobody knows
        raise UserError(f"{url}: {_words(error)}; expected a URL that fsspec can open") from error
    return system, name


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:200]
