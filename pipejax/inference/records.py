"""Files of sources in, files of records out: what `pipejax decode` does."""

import dataclasses
import hashlib
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pipejax import config as config_lib
from pipejax.config import DecodeConfig, GridConfig
from pipejax.data.formats import EXPECTED, is_dataset, read_records
from pipejax.data.lines import read_objects
from pipejax.inference.answers import Record, count
from pipejax.inference.generator import WINDOW, Generator
from pipejax.inference.report import Report
from pipejax.inference.sources import Source
from pipejax.inference.streaming import RowEvent, Screen
from pipejax.model.precision import compute_dtype
from pipejax.system import cli, streams
from pipejax.system.errors import UserError
from pipejax.system.files import sync, sync_output, write_text
from pipejax.system.progress import Progress

logger = logging.getLogger(__name__)

STANDARD = "-"
_DEFAULTS = config_lib.flat(GridConfig(), "grid.") | config_lib.flat(DecodeConfig(), "decode.")


def check_input(source: str) -> Path:
    """Where the input is; raises a UserError if it is absent."""
    given = Path("/dev/stdin" if source == STANDARD else source)
    if source != STANDARD and (not given.exists() or (given.is_dir() and not is_dataset(given))):
        found = "found a directory" if given.is_dir() else "no such file"
        raise UserError(f"--input {source}: {found}; expected {EXPECTED}")
    if given.suffix.lower() in (".csv", ".tsv"):
        raise UserError(
            f"--input {source}: found a table; expected JSON lines, such as an object for each row with its columns"
        )
    return given


def check_paths(source: str, target: str, *, resume: bool = False) -> None:
    """Raises a UserError if the input is absent, or the output is the input or cannot be written."""
    given = check_input(source)
    if resume and (STANDARD in (source, target) or (Path(target).exists() and not Path(target).is_file())):
        raise UserError(f"--resume: found --input {source} --output {target}; expected files, which can be read again")
    if target == STANDARD:
        streams.check_standard_output("--output")
        return
    wanted = Path(target)
    if wanted.is_file() and given.exists() and os.path.samefile(given, wanted):
        raise UserError(f"--output {target}: found the input itself; expected another file")
    cli.check_output("--output", target)


def warn_of_objective(strategy: str, trained: str) -> None:
    """Logs a warning unless weights that were trained with that objective can be decoded so."""
    if strategy != trained and not (trained == "none" and strategy == "sequential"):
        what = "never trained for any objective here" if trained == "none" else f"trained with the {trained} objective"
        logger.warning(f"these weights were {what}; {strategy} decoding runs, but its output means little")


def decode_file(
    generator: Generator,
    source: str,
    target: str,
    *,
    strategy: str | None,
    batch_size: int | None,
    resume: bool = False,
    live: bool = False,
    continued_by: str = "--resume",
) -> Report:
    """Decodes a file of records into JSON lines, in order.

    A file is checked whole before anything compiles; standard input line by line, each answered as soon as its batch is
    full. Records are written as they come, whole lines at a time, so an interrupted run leaves a valid file; `resume`
    goes on after the records that are there, and `continued_by` says to people what will. With `live`, rows are shown
    on standard error as they are written, one source after the other.

    Raises:
      UserError: a line that is not a source (the message names file and line), or an output that is of other work.
    """
    name = strategy or generator.default_strategy
    warn_of_objective(name, generator.config.train.objective)
    total: int | None = None
    kept, unfinished = Kept(0, 0), None
    if source == STANDARD:
        read = read_sources(generator, read_objects(sys.stdin.buffer, "standard input"))
        sources, window, size = generator.samples_of(read, name), 1, batch_size or 1
    else:
        checked = list(read_sources(generator, read_records(source)))
        if not checked:
            raise UserError(f"{source}: found no lines; expected at least one source")
        twice, times = Counter(str(s.id) for s in checked).most_common(1)[0]
        if times > 1:
            logger.warning(
                f"{source}: some ids are not unique, such as {twice}; records come in the order of the lines"
            )
        window = WINDOW
        checked = list(generator.samples_of(checked, name))
        total = len(checked)
        size = min(batch_size or generator.config.decode.batch_size, total)
        if target != STANDARD and not (Path(target).exists() and not Path(target).is_file()):
            unfinished = Unfinished(target, settings_of(generator, name, checked))
            kept = unfinished.kept(checked) if resume else kept
        sources = iter(checked[kept.records :])
    report, resumable = Report(), False
    if kept.records == total:
        logger.info(f"{target}: holds the records of all {total} lines already")
    progress = Progress("decoding", total and total - kept.records, unit="example", shown=not live)
    with ExitStack() as stack:
        stack.callback(progress.close)
        out: BinaryIO | None = sys.stdout.buffer if target == STANDARD else None
        if live:
            records = _shown(generator, sources, name, report)
        else:
            records = generator.stream(
                sources, strategy=name, batch_size=size, report=report, window=window, tick=progress.add
            )
        try:
            for record in records:
                if out is None:  # only now: bad input must not cost anyone an older result
                    resumable = kept.records > 0  # then the note is there, and stays whatever happens
                    begins = unfinished if not resumable else None
                    cleared = begins is not None and begins.note({})
                    out = stack.enter_context(_open(target, kept.size))
                    if begins and cleared:  # what an output of other work held is gone by now
                        resumable = begins.note(begins.settings)
                _write(out, record, target)
        except KeyboardInterrupt:
            if out is not None and Path(target).is_file():
                with open(target, "rb") as file:
                    written = sum(1 for _ in file)
                more = f"; {continued_by} goes on after them" if resumable else ""
                logger.info(
                    f"{target}: holds the records of the first {written}{f' of {total}' if total else ''} lines{more}"
                )
            raise
    if not report.examples and total is None:
        raise UserError("standard input: found no lines; expected at least one source")
    if target != STANDARD:
        sync_output(Path(target))
    if unfinished:  # only now: what is lost of an output that says it is complete is lost for good
        unfinished.end()
    for line in report.lines(name):
        logger.info(f"{name}: {line}")
    return report


class Kept(NamedTuple):
    """What is there of an output."""

    records: int
    size: int  # bytes


class Unfinished:
    """A file beside an output that is not complete: it says what is being decoded, and how."""

    def __init__(self, target: str, settings: dict[str, Any]) -> None:
        """Nothing is written yet."""
        self.target, self.settings = target, settings
        self.path = Path(f"{os.path.realpath(target)}.unfinished")

    def note(self, settings: dict[str, Any]) -> bool:
        """Writes it, if that can be: a decode does not fail for it."""
        try:
            write_text(self.path, json.dumps(settings, indent=2) + "\n")
        except OSError as error:
            logger.warning(f"{self.path}: cannot be written ({error.strerror}); --resume will not be possible")
            return False
        return True

    def end(self) -> None:
        """The output is complete."""
        self.path.unlink(missing_ok=True)
        sync(self.path.parent)

    def kept(self, sources: Sequence[Source]) -> Kept:
        """The whole records in the output, which are those of the first sources.

        Raises:
          UserError: they are of other sources or settings, or nobody knows of which.
        """
        output = Path(self.target)
        if not output.exists() or not output.stat().st_size:
            return Kept(0, 0)
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"--resume: {self.target}: found no {self.path.name} beside it: it is complete, or of other work; "
                "expected an output that was interrupted (without --resume it is replaced)"
            ) from error
        found = found if isinstance(found, dict) else {}
        now, then = flattened(self.settings), flattened(found)
        for key in dict.fromkeys([*now, *then]):
            value, was = now.get(key), then.get(key, _DEFAULTS.get(key))  # an older version had not all keys
            if was != value:
                asked = f"{key} = {was!r}; expected {value!r}, as asked for now"
                raise UserError(f"--resume: {self.target}: found {HASHED.get(key, asked)}")
        records = size = 0
        with output.open("rb") as lines:
            for number, line in enumerate(lines):
                if not line.endswith(b"\n"):  # what a kill cut off
                    break
                try:
                    name = json.loads(line)["id"]
                except (ValueError, TypeError, KeyError):
                    name = None
                if number >= len(sources) or name != sources[number].id:
                    raise UserError(
                        f"--resume: {self.target}:{number + 1}: found no record of that line; expected the id "
                        f"{sources[number].id if number < len(sources) else 'of no further line'!r}"
                    )
                records, size = records + 1, size + len(line)
        return Kept(records, size)


# Settings that are hashes, and what is said if one is another.
HASHED = {
    "input": "answers to another input; expected those to the one that is given now",
    "weights": "answers of other weights; expected those of the checkpoint that is given now",
}


def settings_of(generator: Generator, strategy: str, sources: Sequence[Source]) -> dict[str, Any]:
    """What the records depend on; batches are no part of it, and drafts only if records hold their trace."""
    digest, config = hashlib.sha256(), generator.config
    for source in sources:
        content = source.content if isinstance(source.content, str) else list(map(int, source.content))
        told = [source.prefixes, source.max_rows] if source.prefixes or source.max_rows is not None else []
        digest.update(json.dumps([source.id, content, *told]).encode())
    drafts = () if config.decode.trace else ("draft", "draft_tokens", "draft_checkpoint")
    speed = ("batch_size", *drafts)
    decode = {key: value for key, value in dataclasses.asdict(config.decode).items() if key not in speed}
    decode["dtype"] = compute_dtype(config.decode.dtype).name  # "auto" is another one on another device
    return {
        "input": digest.hexdigest(),
        "weights": generator.origin.get("params_fp"),
        "strategy": strategy,
        "grid": config_lib.flat(config.grid),
        "decode": decode,
        "data.max_source": config.data.max_source,
        "data.separator": config.data.separator,
    }


def flattened(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sections as "section.key"."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def read_sources(generator: Generator, lines: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[Source]:
    """Sources that the generator can decode, from ("FILE:LINE", object); a line without an id has its number."""
    for place, value in lines:
        yield generator.source(value, place, place.rpartition(":")[2])


def as_line(record: Record) -> str:
    """A record as a line of what is written."""
    return json.dumps(record, ensure_ascii=False) + "\n"


def _shown(generator: Generator, sources: Iterable[Source], strategy: str, report: Report) -> Iterator[Record]:
    """Decodes one source after the other, shows its rows as they are written, and yields its record."""
    report.compiles_within = True
    for source in sources:
        begun, events = time.perf_counter(), generator.stream_source(source, strategy)
        several = generator.config.decode.samples > 1
        screen = Screen(f"{source.id}, sample {source.sample}:" if several else f"{source.id}:")
        for event in events:
            if isinstance(event, RowEvent):
                screen.show(event)
            else:
                report.seconds += time.perf_counter() - begun
                count(event, strategy, report, config=generator.config, tokenizer=generator.tokenizer)
                yield event


def _open(target: str, kept: int) -> BinaryIO:
    """The output, to be written after so many bytes of it."""
    try:
        if kept:
            os.truncate(target, kept)
        return open(target, "ab" if kept else "wb", buffering=0)
    except OSError as error:
        raise UserError(f"--output {target}: cannot be written ({error.strerror})") from error


def _write(out: BinaryIO, record: Record, target: str) -> None:
    line = as_line(record).encode()
    try:
        written = out.write(line)
        while written is not None and written < len(line):  # an unbuffered file may take a part
            line = line[written:]
            written = out.write(line)
        out.flush()
    except BrokenPipeError as error:  # of a named pipe, too
        raise streams.ReaderGone(*error.args) from error
    except OSError as error:
        raise UserError(f"--output {target}: cannot be written ({error.strerror})") from error
