"""Files of sources in, files of records out: what decode.py does."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from pipejax import cli, streams
from pipejax.data import TASKS, make_task
from pipejax.data.lines import id_of, kind, read_file, read_objects, text_of
from pipejax.errors import UserError
from pipejax.generate import WINDOW, Generator, Record, Source
from pipejax.progress import Progress
from pipejax.report import Report

STANDARD = "-"


def check_paths(source: str, target: str) -> None:
    """Raises a UserError if the input is absent, or the output is the input or cannot be written."""
    given = Path("/dev/stdin" if source == STANDARD else source)
    if source != STANDARD and (given.is_dir() or not given.exists()):
        found = "found a directory" if given.is_dir() else "no such file"
        raise UserError(f"--input {source}: {found}; expected a file of JSON lines")
    if given.suffix.lower() in (".csv", ".tsv"):
        raise UserError(
            f"--input {source}: found a table; expected JSON lines, such as an object for each row with its columns"
        )
    if target == STANDARD:
        streams.check_standard_output("--output")
        return
    wanted = Path(target)
    if wanted.is_file() and given.exists() and os.path.samefile(given, wanted):
        raise UserError(f"--output {target}: found the input itself; expected another file")
    cli.check_output("--output", target)


def decode_file(
    generator: Generator,
    source: str,
    target: str,
    *,
    strategy: str | None,
    batch_size: int | None,
    log: Callable[[str], None],
) -> Report:
    """Decodes JSON lines into JSON lines, in order.

    A file is checked whole before anything compiles; standard input line by line, each answered as soon as its batch is
    full. Records are written as they come, whole lines at a time, so an interrupted run leaves a valid file.

    Raises:
      UserError: a line that is not a source; the message names file and line.
    """
    name = strategy or generator.default_strategy
    trained = generator.config.train.objective
    if name != trained and not (trained == "none" and name == "sequential"):
        what = "never trained for any objective here" if trained == "none" else f"trained with the {trained} objective"
        log(f"warning: these weights were {what}; {name} decoding runs, but its output means little")
    if source == STANDARD:
        sources, total, window = read_sources(generator, read_objects(sys.stdin.buffer, "standard input")), None, 1
        size = batch_size or 1
    else:
        checked = list(read_sources(generator, read_file(source)))
        if not checked:
            raise UserError(f"{source}: found no lines; expected at least one source")
        twice, times = Counter(str(s.id) for s in checked).most_common(1)[0]
        if times > 1:
            log(f"warning: {source}: some ids are not unique, such as {twice}; records come in the order of the lines")
        sources, total, window = iter(checked), len(checked), WINDOW
        size = min(batch_size or generator.config.decode.batch_size, total)
    report, progress = Report(), Progress("decoding", total, unit="example")
    generator.log = progress.line
    with ExitStack() as stack:
        stack.callback(progress.close)
        out: BinaryIO | None = sys.stdout.buffer if target == STANDARD else None
        try:
            for record in generator.stream(
                sources, strategy=name, batch_size=size, report=report, window=window, tick=progress.add
            ):
                if out is None:  # only now: bad input must not cost anyone an older result
                    out = stack.enter_context(_open(target))
                _write(out, record, target)
        except KeyboardInterrupt:
            if out is not None and Path(target).is_file():
                with open(target, "rb") as file:
                    written = sum(1 for _ in file)
                log(f"{target}: holds the records of the first {written}{f' of {total}' if total else ''} lines")
            raise
    if not report.examples:
        raise UserError("standard input: found no lines; expected at least one source")
    for line in report.lines(name):
        log(f"{name}: {line}")
    return report


def read_sources(generator: Generator, lines: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[Source]:
    """Sources that the generator can decode, from ("FILE:LINE", object): with the template that it was trained with."""
    data = generator.config.data
    read = make_task(data).source if data.task in TASKS else lambda value, place: text_of(value, "source", place)
    for place, value in lines:
        if "source" in value and "source_ids" in value:
            raise UserError(f'{place}: found "source" and "source_ids"; expected one of them')
        if "source_ids" not in value:
            yield generator.check(Source(id_of(value, place), read(value, place)), place)
            continue
        ids = value["source_ids"]
        if not isinstance(ids, list):
            raise UserError(f'{place}: "source_ids": found {kind(ids)}; expected a list of whole numbers')
        yield generator.check(Source(id_of(value, place), ids), f'{place}: "source_ids"')


def _open(target: str) -> BinaryIO:
    try:
        return open(target, "wb", buffering=0)
    except OSError as error:
        raise UserError(f"--output {target}: cannot be written ({error.strerror})") from error


def _write(out: BinaryIO, record: Record, target: str) -> None:
    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    try:
        written = out.write(line)
        while written is not None and written < len(line):  # an unbuffered file may take a part
            line = line[written:]
            written = out.write(line)
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"--output {target}: cannot be written ({error.strerror})") from error
