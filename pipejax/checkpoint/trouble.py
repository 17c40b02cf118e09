"""What goes wrong when Orbax reads and writes, told apart: damage, trouble that passes, and noise."""

import contextlib
import errno
import hashlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from pipejax.checkpoint.manifest import Damaged
from pipejax.system.errors import UserError, out_of_memory

# What reading damaged files ends in: files that are missing or are none, bytes that are not what they should be; and,
# in the code that parses them, JSON that is another than was written.
GONE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
WRECKS = (ValueError, *GONE)
SLIPS = (LookupError, TypeError, AttributeError)
TROUBLE = re.compile(  # of TensorStore's and of XLA's errors
    "RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAVAILABLE|UNKNOWN|INTERNAL|ABORTED|DEADLINE_EXCEEDED|CANCELLED|UNIMPLEMENTED"
    "|OS error (?!2:|20:|21:)"
)
LOOP_CLOSED = "Event loop is closed"
# Orbax narrates every save and shows a traceback of every error that it also raises.
logging.getLogger("absl").setLevel(logging.CRITICAL)


@contextlib.contextmanager
def reading(path: Path, files: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Tells damage to an item that is read from everything else, after which it may be good.

    `files` are digests of its small files, which Orbax parses; older steps have none. As they hold, a slip of the code
    that parses them is no damage.

    Raises:
      Damaged: files are missing, torn or altered.
      UserError: memory, file handles, permission, the device that holds the files, or a program failed.
    """
    hush_stragglers()
    try:
        for name, word in files.items():
            if _digest(path / name) != word:
                raise Damaged(f"{path.name}: {name} is not what was saved")
        yield
    except Damaged:
        raise
    except Exception as error:
        _refuse_trouble(error, path, WRECKS if files else (*WRECKS, *SLIPS))
        raise Damaged(f"{path.name}: unreadable ({type(error).__name__}: {_brief(error)})") from error


def _refuse_trouble(error: Exception, path: Path, damage: tuple[type[Exception], ...]) -> None:
    said = f"{path}: cannot be read now ({type(error).__name__}: {_brief(error)})"
    if not any(isinstance(cause, damage) for cause in _chain(error)):  # Orbax wraps some in a bare Exception
        raise UserError(said) from error
    for cause in _chain(error):
        if TROUBLE.search(str(cause).replace(str(path), "")) or out_of_memory(cause) or _refused(cause):
            raise UserError(said) from error
    try:  # in whatever words TensorStore may have told it
        for file in path.rglob("*"):
            if file.is_file():
                with file.open("rb") as content:
                    while content.read(1 << 24):
                        pass
    except OSError as trouble:
        raise UserError(f"{path}: cannot be read now ({trouble.strerror or trouble})") from error


def metadata_digests(item: Path) -> dict[str, str]:
    """By name, digests of the files of an item in which Orbax keeps the tree and the shapes."""
    names = ["_METADATA", *(f"array_metadatas/{file.name}" for file in item.glob("array_metadatas/*"))]
    return {name: _digest(item / name) for name in names}


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _refused(error: BaseException) -> bool:
    return isinstance(error, OSError) and not isinstance(error, GONE)


def _chain(error: BaseException) -> list[BaseException]:
    """The error and its causes."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def reason_of(error: BaseException) -> str:
    """Why a save failed, in the operating system's words where those are at the bottom of it."""
    if isinstance(error, UserError):
        return str(error)
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO):  # of TensorStore's words
        if any(os.strerror(number) in str(cause) for cause in _chain(error)):
            return os.strerror(number)
    return f"{type(error).__name__}: {_brief(error)}"


def hush_stragglers() -> None:
    """When one array cannot be read or written, Orbax abandons the others, and each dies with a traceback of its own.

    They say nothing that the one line about the step does not. Everything else is passed on as before.
    """
    # Those that were abandoned before they began, by what Orbax calls them.
    names = "coroutine '.*(array|serialize|metadata|param_info).*' was never awaited"
    warnings.filterwarnings("ignore", names, RuntimeWarning)
    before, before_main = sys.unraisablehook, sys.excepthook
    if getattr(before, "hushes", False):
        return

    def hook(unraisable: Any) -> None:
        told = f"{unraisable.object!r} {unraisable.exc_value!r} {unraisable.err_msg}"
        if LOOP_CLOSED not in told and "_read_array_index" not in told and "TensorStore" not in told:
            before(unraisable)

    def main_hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not (kind is RuntimeError and str(value) == LOOP_CLOSED):
            before_main(kind, value, trace)

    hook.hushes = True  # type: ignore[attr-defined]
    sys.unraisablehook, sys.excepthook = hook, main_hook
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _brief(error: BaseException) -> str:
    return " ".join(str(error).partition(" See full TensorStore")[0].split())[:160]
