"""The parts shared by all commands: the parser of flags, exit codes, and errors as one line."""

import argparse
import contextlib
import datetime
import difflib
import errno
import gc
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pipejax import moved
from pipejax.system import environment, streams
from pipejax.system.errors import UserError, did_you_mean, out_of_memory
from pipejax.system.extras import absent, extra, requirements_of
from pipejax.system.fields import WHOLE
from pipejax.system.files import look, write_text
from pipejax.system.progress import say

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_OUR_MISTAKE = 70  # EX_SOFTWARE of sysexits.h; comes with a traceback
# Errors of the operating system that the user can fix, such as a full disk; all others are mistakes of pipejax.
REFUSALS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ENODEV, errno.ENXIO),
)
COMPLETING = "_ARGCOMPLETE"  # the variable that a shell sets to request completions
LINE = 1000  # characters; the middle of a longer line is left out


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises a UserError for a wrong flag instead of printing a usage block."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)  # type: ignore[arg-type]
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def add_checkpoint(self) -> None:
        """Adds --checkpoint and --best."""
        self.add_argument(
            "--checkpoint", required=True, metavar="DIR", help="a converted checkpoint or a WORKDIR of pipejax train"
        )
        self.add_argument("--best", action="store_true", help="use the best evaluated step instead of the newest")

    def add_number(
        self, flag: str, text: str, *, least: int = 1, most: int = WHOLE, default: int | None = None
    ) -> None:
        """Adds a flag for a whole number from `least` to `most`."""
        self.add_argument(flag, type=whole_number(least, most), default=default, metavar="N", help=text)

    def add_method(self, choices: Sequence[str], *, repeatable: bool = False) -> None:
        """Adds --method, the name of a decoding method from `choices`, and its former name --strategy."""
        kept: dict[str, Any] = {"choices": choices, "dest": "method"}
        kept |= {"action": "append", "default": []} if repeatable else {}
        text = f"decoding method ({'repeatable; ' if repeatable else ''}default: the one used in training)"
        either = self.add_mutually_exclusive_group()
        either.add_argument("--method", help=text, **kept)
        either.add_argument("--strategy", type=_former("--strategy", "--method"), help=argparse.SUPPRESS, **kept)

    def add_overrides(self, text: str = "only model=MODULE:CLASS, for a custom backbone") -> None:
        """Adds the repeatable --set KEY=VALUE, and --backbone MODULE:CLASS, which spells --set model=MODULE:CLASS."""
        kept: dict[str, Any] = {"action": "append", "default": [], "dest": "overrides"}
        self.add_argument("--set", type=_assignment, metavar="KEY=VALUE", help=text, **kept)
        self.add_argument("--backbone", type="model={}".format, help=argparse.SUPPRESS, **kept)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parses the arguments like argparse. If a shell requests completions, prints them and ends the process."""
        if COMPLETING in os.environ:
            with extra("completion", "completion"):
                import argcomplete
            argcomplete.autocomplete(self)
        return super().parse_args(args, namespace)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Keeps the arguments for `error`, which names misspelt flags."""
        self._arguments = [*(sys.argv[1:] if args is None else args)]
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Refuses a value that is not among an argument's choices; argparse calls this for each value."""
        # With --set method=MODULE:CLASS, --method may name that method.
        brought = action.dest == "method" and any(
            word.removeprefix("--set=").startswith("method=") for word in self._arguments
        )
        if action.choices is not None and value not in action.choices and not brought:
            is_command = isinstance(action, argparse._SubParsersAction)
            name = self.prog if is_command else "/".join(action.option_strings) or action.metavar or action.dest
            told = [str(choice) for choice in action.choices]
            hint = did_you_mean(value, told)
            self.error(UserError(name, found=f"{str(value)!r}", expected=f"one of {', '.join(told)}", hint=hint))

    def error(self, message: str | UserError) -> NoReturn:
        """Raises a UserError; argparse calls this with a message for anything that it cannot parse."""
        known = dict(self._option_string_actions)
        for action in self._actions:  # a subcommand has its own flags
            if isinstance(action, argparse._SubParsersAction):
                for name in {*action.choices} & {*self._arguments}:
                    known |= action.choices[name]._option_string_actions
        # Without this check, argparse would first report missing flags.
        for flag in (word.partition("=")[0] for word in self._arguments):
            if re.match(r"--?[A-Za-z]", flag) and flag not in known:
                guess = difflib.get_close_matches("--" + flag.lstrip("-").casefold(), known, n=1, cutoff=0.8)
                hint = "a setting is given as --set SECTION.KEY=VALUE" if "--set" in known else ""
                raise UserError(flag, "no such option", hint=f"did you mean {guess[0]}?" if guess else hint)
        if isinstance(message, UserError):
            raise message
        if pair := re.fullmatch(r"argument ([^:]+): not allowed with argument (.+)", message):
            flag, other = pair.groups()
            raise UserError(flag, found=f"{flag} and {other}", expected="one of the two")
        if parts := re.fullmatch(r"argument ([^:]+): found (.*); expected (.*)", message):  # an ArgumentTypeError
            raise UserError(parts[1], found=parts[2], expected=parts[3])
        raise UserError(message)


def whole_number(least: int, most: int = WHOLE) -> Callable[[str], int]:
    """Returns an argparse type for whole numbers in a range."""

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


def _former(flag: str, present: str) -> Callable[[str], str]:
    """Returns an argparse type for text, which logs the present name of a flag that is given by its former name."""

    def read(text: str) -> str:
        moved.note(flag, present)
        return text

    return read


def _assignment(text: str) -> str:
    """Checks that a text has the form KEY=VALUE, and returns the text; the type of --set for argparse.

    Without this check, argparse would report the VALUE of "--set KEY VALUE" as an unexpected argument.

    Raises:
      UserError: the text has no "=".
    """
    if "=" not in text:
        raise UserError(f"--set {text}", found="no '='", expected="key=value")
    return text


def note(line: str, level: str = "info", **fields: object) -> None:
    """Writes a line for the user to standard error, because standard output is for results.

    `fields` are added to the JSON form of the line (`write_json`).
    """
    if len(line) > LINE:
        line = f"{line[: LINE // 2]} ... {line[-LINE // 2 :]}"
    if _lines.as_json:
        moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": moment, "level": level, "message": line, **fields}, default=str)
    say(line)


def write_json() -> None:
    """Makes `note` write its lines as JSON objects."""
    _lines.as_json = True


LEVELS = {logging.WARNING: "warning: ", logging.ERROR: "error: "}  # prefixes of logged lines


def line_of(record: logging.LogRecord) -> str:
    """Returns a log record as one line for the user; invisible characters are escaped, as text may come from others."""
    text = LEVELS.get(record.levelno, "") + record.getMessage()
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _LineHandler(logging.Handler):
    """A log handler that writes records as lines for the user, or as JSON objects."""

    as_json = False

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record as a line or a JSON object, with the traceback of its exception, if any."""
        line, fields = record.getMessage() if self.as_json else line_of(record), getattr(record, "fields", {})
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        if self.as_json and trace:
            fields = {**fields, "traceback": trace}
        note(line, record.levelname.lower(), **fields)
        if trace and not self.as_json:
            say(trace.rstrip())


_lines = _LineHandler()


@contextlib.contextmanager
def adopted(*names: str) -> Iterator[None]:
    """Returns a context manager in which records of libraries' loggers are written like the command's lines."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(_lines)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagates in zip(loggers, before, strict=True):
            logger.removeHandler(_lines)
            logger.propagate = propagates


def mute() -> None:
    """Stops writing log records to standard error: the command ends, or another process writes the same records."""
    logging.getLogger("pipejax").removeHandler(_lines)


def check_output_file(flag: str, target: str | None) -> None:
    """Raises a UserError if the file that a flag names cannot be written; called before the work begins."""
    if target is None:
        return
    wanted = Path(target)
    found = look(wanted, flag)
    if found == "directory":
        raise UserError(f"{flag} {target}", found="a directory", expected="a file")
    directory = Path(os.path.realpath(wanted)).parent  # a link's target counts
    # The system resolves the part before a "..", which is not in the real path.
    for place in (wanted.parent, directory):
        if look(place, flag) != "directory":
            raise UserError(f"{flag} {target}", found=f"no directory {place}", expected="an existing directory")
    place = wanted if found else directory
    if not os.access(place, os.W_OK):
        number = errno.EROFS if os.statvfs(place).f_flag & os.ST_RDONLY else errno.EACCES
        raise UserError(f"{flag} {target}", f"cannot be written ({os.strerror(number)})")


def write_output(flag: str, target: str, text: str) -> None:
    """Writes a file completely or not at all. On failure, prints the text, which may be the result of hours of work."""
    path = Path(os.path.realpath(target))  # a link is kept, and its target is written
    try:
        if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)):  # such as a device or a pipe
            path.write_text(text, encoding="utf-8")
        else:
            write_text(path, text)
    except OSError as error:
        with contextlib.suppress(OSError):
            print(text, end="", flush=True)
        raise UserError(f"{flag} {target}", f"cannot be written ({error.strerror})") from error


def run(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and exits with its code. Bad input gives one line on standard error and exit code 2."""
    # Imports and tracing create a million long-lived objects. By default the garbage collector would scan objects after
    # each 700 new ones, which takes a second in total.
    gc.set_threshold(50_000, *gc.get_threshold()[1:])
    arguments = list(sys.argv[1:] if argv is None else argv)
    streams.make_safe()
    logger = logging.getLogger("pipejax")
    logger.addHandler(_lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # absl adds a handler to the root logger, which would write each line again
    at_once = False
    try:
        environment.check_platform()
        environment.allow_files()
        environment.check_memory()
        environment.check_flags()
        for setting in environment.IGNORED:
            note(f"{setting}: ignored, because it would change results")
        try:
            code = main(arguments)
        except SystemExit as ended:  # --help
            code = int(ended.code or 0)
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        code, at_once = explain(error, debug="--debug" in arguments), isinstance(error, KeyboardInterrupt)
        if code == EXIT_OUR_MISTAKE:
            traceback.print_exception(error)
    mute()
    logger.propagate = True
    # sys.exit would wait for these threads. It would also free memory, and a daemon thread or work inside XLA that is
    # still running would then crash the process.
    if _unneeded or at_once:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, UserError):
                stream.flush()
        os._exit(code)
    gc.freeze()  # otherwise the interpreter would collect garbage among all objects at exit, which takes half a second
    sys.exit(code)


_unneeded: list[int] = []  # ids of threads in `unneeded`


@contextlib.contextmanager
def unneeded() -> Iterator[None]:
    """Returns a context manager for work that a command may leave unfinished when the command ends.

    An example is compiling ahead. The work is done in a thread of its own, which enters the context manager.
    """
    _unneeded.append(threading.get_ident())
    try:
        yield
    finally:
        _unneeded.remove(threading.get_ident())


def explain(error: BaseException, *, debug: bool) -> int:
    """Writes one line about an error that the user can fix, except for a `streams.ReaderGone`.

    Returns:
      The exit code of the error; EXIT_OUR_MISTAKE for any other error, about which nothing is written.
    """
    if isinstance(error, KeyboardInterrupt):
        note(f"interrupted{f' {error}' if str(error) else ''}")
        return EXIT_INTERRUPTED
    if isinstance(error, streams.ReaderGone):
        return 1
    if isinstance(error, ModuleNotFoundError) and (library := absent(error)):
        file = requirements_of(library)
        error = UserError(
            found=f"no {library} for {sys.executable}",
            expected=f"what {file} installs",
            hint=f"activate the environment that has it, or pip install -r {file}",
        )
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
        fields = error.fields() if isinstance(error, UserError) else {}
        note("error: " + " ".join(str(error).splitlines()), "error", **fields)
    return EXIT_BAD_INPUT
