"""What all commands share: flags, exit codes, and errors as one line."""

import argparse
import contextlib
import errno
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipejax.system import environment, streams
from pipejax.system.errors import UserError, out_of_memory
from pipejax.system.extras import extra
from pipejax.system.fields import WHOLE
from pipejax.system.files import look, write_text
from pipejax.system.progress import say

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_OUR_MISTAKE = 70  # EX_SOFTWARE; a traceback shows it
# What the operating system refuses for reasons that people can mend; any other of its errors is a mistake of ours.
REFUSALS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ENODEV, errno.ENXIO),
)
COMPLETING = "_ARGCOMPLETE"  # the variable by which a shell asks what could come next on its line
LINE = 1000  # characters of a line that is said; what is longer loses its middle


class Parser(argparse.ArgumentParser):
    """argparse without its usage block: a wrong flag is a UserError like any other bad input."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)  # type: ignore[arg-type]
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add_overrides(self, text: str) -> None:
        """The repeatable flag --set KEY=VALUE, as `overrides`."""
        self.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=text)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does; where a shell asks what could come next, it is told, and the process ends."""
        if COMPLETING in os.environ:
            with extra("completion", "completion"):
                import argcomplete
            argcomplete.autocomplete(self)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Called by argparse for anything that it cannot parse."""
        raise UserError(message)


def whole(least: int, most: int = WHOLE) -> Callable[[str], int]:
    """The type of a flag that is a whole number in that range."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"found {text!r}; expected a whole number") from error
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"found {value}; expected {bound}")
        return value

    return read


def note(line: str) -> None:
    """One line for the person at the keyboard, on standard error: standard output belongs to results."""
    if len(line) > LINE:
        line = f"{line[: LINE // 2]} ... {line[-LINE // 2 :]}"
    say(line)


LEVELS = {logging.WARNING: "warning: ", logging.ERROR: "error: "}  # what a line begins with


def line_of(record: logging.LogRecord) -> str:
    """What is logged, as a line for the person at the keyboard."""
    return LEVELS.get(record.levelno, "") + record.getMessage()


class _Lines(logging.Handler):
    """Says what the package logs."""

    def emit(self, record: logging.LogRecord) -> None:
        note(line_of(record))


_lines = _Lines()


def mute() -> None:
    """What is logged stays unsaid from now on: another process says it."""
    logging.getLogger("pipejax").removeHandler(_lines)


def check_output(flag: str, target: str | None) -> None:
    """Raises a UserError if a file is asked for that cannot be written: before the work, not after it."""
    if target is None:
        return
    wanted = Path(target)
    found = look(wanted, flag)
    if found == "directory":
        raise UserError(f"{flag} {target}: found a directory; expected a file")
    directory = Path(os.path.realpath(wanted)).parent  # where a link leads to
    if look(directory, flag) != "directory":
        raise UserError(f"{flag} {target}: found no directory {directory}; expected one that exists")
    if not os.access(wanted if found else directory, os.W_OK):
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
    streams.make_safe()
    logger = logging.getLogger("pipejax")
    logger.addHandler(_lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # absl gives the root logger a handler as it logs; that one would say each line again
    try:
        environment.allow_files()
        environment.check_flags()
        for setting in environment.IGNORED:
            note(f"{setting}: not followed, as what is computed depends on it")
        try:
            code = main(arguments)
        except SystemExit as ended:  # --help
            code = int(ended.code or 0)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code = explain(error, debug="--debug" in arguments)
        if code == EXIT_OUR_MISTAKE:
            traceback.print_exception(error)
    mute()
    logger.propagate = True
    if _unneeded:  # sys.exit would wait for it; and a daemon thread that is in XLA aborts the process as it ends
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


_unneeded: list[int] = []  # threads


@contextlib.contextmanager
def unneeded() -> Iterator[None]:
    """Work of a thread that no command waits for once it is through, such as compiling ahead."""
    _unneeded.append(threading.get_ident())
    try:
        yield
    finally:
        _unneeded.remove(threading.get_ident())


def explain(error: BaseException, *, debug: bool) -> int:
    """One line about an error that people can do something about; the exit code, EXIT_OUR_MISTAKE for any other."""
    if isinstance(error, KeyboardInterrupt):
        note("interrupted")
        return EXIT_INTERRUPTED
    if isinstance(error, streams.ReaderGone):
        return 1
    exhausted = out_of_memory(error)
    refused = isinstance(error, OSError) and error.errno in REFUSALS
    if not (exhausted or refused or isinstance(error, UserError)):
        return EXIT_OUR_MISTAKE
    if debug:
        traceback.print_exception(error)
    if exhausted:
        said = str(error) or "out of memory"
        note(f"error: {said.splitlines()[0]} (a smaller batch size or shorter lengths may fit)")
        return 1
    if refused:
        assert isinstance(error, OSError)
        note(f"error: {f'{error.filename}: ' if error.filename else ''}{error.strerror}")
    else:
        note("error: " + " ".join(str(error).splitlines()))
    return EXIT_BAD_INPUT
