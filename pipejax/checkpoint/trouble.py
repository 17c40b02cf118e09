"""What goes wrong when Orbax reads and writes, told apart: damage, trouble that passes, and noise."""

import contextlib
import errno
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from pipejax.checkpoint.manifest import Damaged
from pipejax.errors import UserError, out_of_memory

PASSING = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ESTALE, errno.EINTR)
LOOP_CLOSED = "Event loop is closed"
# Orbax narrates every save and shows a traceback of every error that it also raises.
logging.getLogger("absl").setLevel(logging.CRITICAL)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong when an item is read is damage to it, unless it may pass."""
    hush_stragglers()
    try:
        yield
    except Exception as error:
        _refuse_passing_trouble(error, path)
        raise Damaged(f"{path.name}: unreadable ({type(error).__name__}: {_brief(error)})") from error


def _chain(error: BaseException) -> list[BaseException]:
    """The error and its causes."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def _refuse_passing_trouble(error: BaseException, path: Path) -> None:
    """A step that cannot be read just now is not damaged: no older one may take its place.

    Raises:
      UserError: memory, file handles, permission or the device that holds the files failed, not their content.
    """
    for cause in _chain(error):
        passing = out_of_memory(cause) or (isinstance(cause, OSError) and cause.errno in PASSING)
        if passing or "RESOURCE_EXHAUSTED" in str(cause) or "PERMISSION_DENIED" in str(cause):
            raise UserError(f"{path}: cannot be read now ({type(cause).__name__}: {_brief(cause)})") from error


def reason_of(error: BaseException) -> str:
    """Why a save failed, in the operating system's words where those are at the bottom of it."""
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO):
        words = os.strerror(number)
        if any((isinstance(e, OSError) and e.errno == number) or words in str(e) for e in _chain(error)):
            return words
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
