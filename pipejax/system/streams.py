"""The standard streams of a command, made safe: closed ones are opened on nothing, and writing to them never kills.

What is said on standard error is for people: if nobody can read it any more it is dropped, and the work goes on. What
goes to standard output is the result: if that cannot be written, it is an error, told once.
"""

import io
import os
import select
import sys
from typing import Any

from pipejax.system.errors import UserError


class ReaderGone(BrokenPipeError):
    """Whoever read standard output went away, as `head` does."""


class _Stream(io.RawIOBase):
    """A descriptor that is written to until it fails; from then on everything is dropped."""

    def __init__(self, descriptor: int, name: str = "") -> None:
        """With a name the first failure is a UserError, or ReaderGone."""
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
            except BlockingIOError:  # somebody who shares the terminal made it so
                select.select([], [self._descriptor], [])
            except OSError as error:
                self._dead = True
                if isinstance(error, BrokenPipeError) and self._name:
                    raise ReaderGone(*error.args) from error
                if self._name:
                    raise UserError(f"{self._name}: cannot be written ({error.strerror})") from error
        return len(data)


def make_safe() -> None:
    """Replaces the interpreter's own streams; those that somebody else put in their place stay."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:  # closed: the next file to be opened would get its number, and what is said
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


_closed: list[str] = []  # what was closed at the start


def check_standard_output(flag: str) -> None:
    """Raises a UserError if what is written to standard output would reach nobody."""
    if _closed:
        raise UserError(f"{flag} -: found standard output closed; expected it open")
