"""Makes the standard streams of a command safe: a closed stream is replaced, and a failed write does not end the work.

Standard error carries lines for the user: if it can no longer be written, they are dropped and the work continues.
Standard output carries the result: the first failure to write it is an error. A stream that is closed at the start is
replaced by /dev/null.
"""

import io
import os
import select
import sys
from typing import Any

from pipejax.system.errors import UserError

STANDARD = "-"  # a flag's value for standard input or output


class ReaderGone(BrokenPipeError):
    """Raised if the reader of standard output has ended, as `head` does."""


class _Stream(io.RawIOBase):
    """Writes to a file descriptor until a write fails; drops everything after that."""

    def __init__(self, descriptor: int, name: str = "") -> None:
        """Creates a stream for a file descriptor.

        The first failure of a stream with a name raises a UserError or ReaderGone. Without a name, it is ignored.
        """
        self._descriptor, self._name, self._dead = descriptor, name, False

    def writable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def fileno(self) -> int:
        """See io.RawIOBase."""
        return self._descriptor

    def isatty(self) -> bool:
        """See io.RawIOBase."""
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Writes bytes; waits if the descriptor is non-blocking and full. After a failure, bytes are dropped.

        Raises:
          UserError: the first failure of a stream with a name.
          ReaderGone: the reader of a stream with a name has closed the pipe.
        """
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
                    raise UserError(self._name, f"cannot be written ({error.strerror})") from error
        return len(data)


def make_safe() -> None:
    """Replaces the interpreter's standard streams, but not streams that other code put in their place."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:  # else the next opened file would get its number, and receive its output
            handle = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(handle, handle == number)
            setattr(sys, f"__{name}__", os.fdopen(handle, mode, closefd=False))
            setattr(sys, name, getattr(sys, f"__{name}__"))
            if name == "stdout":
                _closed_at_start.append(name)
    for name, told in (("stdout", "standard output"), ("stderr", "")):
        own = getattr(sys, f"__{name}__")
        if getattr(sys, name) is own:
            raw = _Stream(own.fileno(), told)
            text = io.TextIOWrapper(
                io.BufferedWriter(raw), own.encoding, "backslashreplace", line_buffering=not told or raw.isatty()
            )
            setattr(sys, name, text)


_closed_at_start: list[str] = []  # contains "stdout" if it was closed at the start


def check_standard_output(flag: str) -> None:
    """Raises a UserError if standard output was closed at the start and `flag` sends the result to it."""
    if _closed_at_start:
        raise UserError(f"{flag} -", found="standard output closed", expected="it open")
