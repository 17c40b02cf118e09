"""What all commands share: flags, exit codes, and errors as one line."""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from pipejax.errors import UserError
from pipejax.files import write_text

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_OUR_MISTAKE = 70  # EX_SOFTWARE; a traceback shows it
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how XLA's RuntimeError begins


class Parser(argparse.ArgumentParser):
    """argparse without its usage block: a wrong flag is a UserError like any other bad input."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)  # type: ignore[arg-type]
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add_overrides(self, text: str) -> None:
        """The repeatable flag --set KEY=VALUE, as `overrides`."""
        self.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=text)

    def error(self, message: str) -> NoReturn:
        """Called by argparse for anything that it cannot parse."""
        raise UserError(message)


def note(line: str) -> None:
    """One line for the person at the keyboard, on standard error: standard output belongs to results."""
    print(line, file=sys.stderr, flush=True)


def check_output(flag: str, target: str | None) -> None:
    """Raises a UserError if a file is asked for that cannot be written: before the work, not after it."""
    if target is None:
        return
    wanted = Path(target)
    if wanted.is_dir():
        raise UserError(f"{flag} {target}: found a directory; expected a file")
    directory = Path(os.path.realpath(wanted)).parent  # where a link leads to
    if not directory.is_dir():
        raise UserError(f"{flag} {target}: found no directory {directory}; expected one that exists")
    if not os.access(wanted if wanted.exists() else directory, os.W_OK):
        raise UserError(f"{flag} {target}: cannot be written (permission denied)")


def write_output(flag: str, target: str, text: str) -> None:
    """Writes a file whole; if the disk does not take it, the text goes to standard output: it may be hours of work.

    Raises:
      UserError: it cannot be written; a file that was there is as it was.
    """
    path = Path(os.path.realpath(target))  # where a link leads to
    try:
        if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)):  # a device, a pipe
            path.write_text(text, encoding="utf-8")
        else:
            write_text(path, text)
    except OSError as error:
        with contextlib.suppress(OSError):
            print(text, end="", flush=True)
        raise UserError(f"{flag} {target}: cannot be written ({error.strerror})") from error


def run(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and leaves with its exit code; bad input is one last line on standard error and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = main(arguments)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code = explain(error, debug="--debug" in arguments)
        if code == EXIT_OUR_MISTAKE:
            traceback.print_exception(error)
    sys.exit(code)


def explain(error: BaseException, *, debug: bool) -> int:
    """One line about an error that people can do something about; the exit code, EXIT_OUR_MISTAKE for any other."""
    if isinstance(error, KeyboardInterrupt):
        note("interrupted")
        return EXIT_INTERRUPTED
    if isinstance(error, BrokenPipeError):  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    out_of_memory = isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and str(error).startswith(OUT_OF_MEMORY)
    )
    if not (out_of_memory or isinstance(error, UserError)):
        return EXIT_OUR_MISTAKE
    if debug:
        traceback.print_exception(error)
    if out_of_memory:
        said = str(error) or "out of memory"
        note(f"error: {said.splitlines()[0]} (a smaller batch size or shorter lengths may fit)")
        return 1
    note("error: " + " ".join(str(error).splitlines()))
    return EXIT_BAD_INPUT
