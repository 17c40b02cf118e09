"""Classifies errors of Orbax and TensorStore: damaged files, temporary conditions such as lack of memory, noise."""

import contextlib
import errno
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType

from pipejax.checkpoint.manifest import Damaged
from pipejax.system.errors import UserError, out_of_memory
from pipejax.system.files import digest_of

# These exceptions mean that files of a step are missing, so the step is damaged.
MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
# TensorStore's messages about a file's content. Other messages are about the call, such as the path.
CONTENT = re.compile("NOT_FOUND|Error (reading|decoding)")
PASSING = re.compile(  # in messages of TensorStore and XLA about temporary conditions: the file may be good
    "RESOURCE_EXHAUSTED|PERMISSION_DENIED|UNAVAILABLE|UNKNOWN|INTERNAL|ABORTED|DEADLINE_EXCEEDED|CANCELLED|UNIMPLEMENTED"
    "|OS error (?!2:|20:|21:)"
)
LOOP_CLOSED = "Event loop is closed"
# Orbax logs every save, and also the traceback of every exception that it raises.
logging.getLogger("absl").setLevel(logging.CRITICAL)


@contextlib.contextmanager
def reading(path: Path, files: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Returns a context manager for reading an item, which converts exceptions to Damaged or UserError.

    Args:
      path: the item's directory.
      files: digests of the item's small files by name, checked first.

    Raises:
      Damaged: a file is missing, differs from its digest, or has invalid content.
      UserError: the files cannot be read at the moment, as after a lack of memory or of rights.
    """
    try:
        for name, word in files.items():
            if digest_of(path / name) != word:
                raise Damaged(f"{path.name}: {name} differs from what was saved")
        yield
    except Damaged:
        raise
    except Exception as error:
        what, causes = f"{type(error).__name__}: {_short_message(error)}", _chain(error)
        is_damage = any(isinstance(cause, MISSING) or _is_about_content(cause) for cause in causes)
        if not is_damage or any(_is_temporary(cause, path) for cause in causes):
            raise UserError(path, f"cannot be read at the moment ({what})") from error
        _read_all(path)
        raise Damaged(f"{path.name}: unreadable ({what})") from error


def _is_temporary(error: BaseException, path: Path) -> bool:
    """Returns whether an exception reports a temporary condition, so that the files may be good."""
    other_os_error = isinstance(error, OSError) and not isinstance(error, MISSING)
    return bool(PASSING.search(str(error).replace(str(path), ""))) or out_of_memory(error) or other_os_error


def _read_all(path: Path) -> None:
    """Raises a UserError if a file below `path` cannot be read."""
    try:  # the disk may have failed in a way that TensorStore's message does not show
        for file in path.rglob("*"):
            if file.is_file():
                with file.open("rb") as content:
                    while content.read(1 << 24):
                        pass
    except OSError as trouble:
        raise UserError(path, f"cannot be read at the moment ({trouble.strerror or trouble})") from trouble


def _is_about_content(error: BaseException) -> bool:
    """Returns whether an exception is about the content of a file.

    Invalid JSON and invalid UTF-8 raise subclasses of ValueError; for a plain ValueError the message decides.
    """
    return isinstance(error, ValueError) and (type(error) is not ValueError or bool(CONTENT.search(str(error))))


def metadata_digests(item: Path) -> dict[str, str]:
    """Returns the digests, by name, of the small files of an item that hold Orbax's tree and shapes."""
    names = ["_METADATA", *(f"array_metadatas/{file.name}" for file in item.glob("array_metadatas/*"))]
    return {name: digest_of(item / name) for name in names}


def _chain(error: BaseException) -> list[BaseException]:
    """Returns an exception and its causes, the exception first."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def reason_of(error: BaseException) -> str:
    """Returns the reason of a failed save: the operating system's message, if one of the causes has an errno."""
    if isinstance(error, UserError):
        return str(error)
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
    # TensorStore quotes the texts of these error numbers in its messages.
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO):
        if any(os.strerror(number) in str(cause) for cause in _chain(error)):
            return os.strerror(number)
    return f"{type(error).__name__}: {_short_message(error)}"


def hush_stragglers() -> None:
    """Silences the tracebacks of arrays that Orbax abandons after another array could not be read or written."""
    # Python warns of each coroutine that Orbax abandoned before it began. The pattern has the coroutines' names.
    names = "coroutine '.*(array|serialize|metadata|param_info).*' was never awaited"
    warnings.filterwarnings("ignore", names, RuntimeWarning)
    before, before_main = sys.unraisablehook, sys.excepthook
    if getattr(before, "hushes", False):
        return

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        told = f"{unraisable.object!r} {unraisable.exc_value!r} {unraisable.err_msg}"
        if LOOP_CLOSED not in told and "_read_array_index" not in told and "TensorStore" not in told:
            before(unraisable)

    def main_hook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not (kind is RuntimeError and str(value) == LOOP_CLOSED):
            before_main(kind, value, trace)

    hook.hushes = True  # type: ignore[attr-defined]
    sys.unraisablehook, sys.excepthook = hook, main_hook
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _short_message(error: BaseException) -> str:
    """Returns the message as one line of at most 160 characters, without TensorStore's details."""
    return " ".join(re.split(r" See full TensorStore| \[tensorstore_spec=", str(error))[0].split())[:160]
