"""Makes the standard streams of a command safe: a closed stream leads to /dev/null, a failed write ends no work.

Standard error has lines for the user: if it can no longer be written, they are dropped and the work goes on. Standard
output has the result: the first failure to write it is an error.
"""

import io
import os
import select
import sys
from typing import Any

from pipejax.system.errors import UserError

STANDARD = "-"  # input or output, where a flag names a file


class ReaderGone(BrokenPipeError):
    """The reader of standard output has ended, as `head` does."""


class _Stream(io.RawIOBase):
    """Writes to a file descriptor until a write fails; drops everything after that."""

    def __init__(self, descriptor: int, name: str = "") -> None:
        """With a name, the first failure raises a UserError or ReaderGone; without one, it is ignored."""
        self._descriptor, self._name, self._dead = descriptor, name, False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        while not self._dead:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # another user of the terminal made it non-blocking
                select.select([], [self._descriptor], [])
            except OSError as error:
                self._dead = True
                if isinstance(error, BrokenPipeError) and self._name:
                    raise ReaderGone(*error.args) from error
                if self._name:
                    raise UserError(f"{self._name}: cannot be written ({error.strerror})") from error
        return len(data)


def make_safe() -> None:
    """Replaces the interpreter's standard streams, but not streams that other code put in their place."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:  # closed: the next file opened would get its number, and its output
            handle = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(handle, handle == number)
            setattr(sys, f"__{name}__", os.fdopen(handle, mode, closefd=False))
            setattr(sys, name, getattr(sys, f"__{name}__"))
            if name == "stdout":
                _closed.append(name)
    for name, told in (("stdout", "standard output"), ("stderr", "")):
        own = getattr(sys, f"__{name}__")
        if getattr(sys, name) is own:
            raw = _Stream(own.fileno(), told)
            text = io.TextIOWrapper(
                io.BufferedWriter(raw), own.encoding, "backslashreplace", line_buffering=not told or raw.isatty()
            )
            setattr(sys, name, text)


_closed: list[str] = []  # "stdout" if it was closed at the start


def check_standard_output(flag: str) -> None:
    """Raises a UserError if standard output, to which `flag` sends the result, was closed at the start."""
    if _closed:
        raise UserError(f"{flag} -: found standard output closed; expected it open")
