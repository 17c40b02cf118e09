"""The implementation of `pipejax decode`: reads a file of sources and writes a file of records."""

import csv
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from pipejax.data.formats import EXPECTED, is_dataset, is_parquet, read_records
from pipejax.data.lines import BadLines, Object, Placed, Refusal, read_file, read_objects, refuse_line
from pipejax.data.storage import SUFFIXES as PACKED
from pipejax.data.tables import Dialect
from pipejax.inference.answers import Record, count
from pipejax.inference.generator import WINDOW, Generator
from pipejax.inference.report import Report
from pipejax.inference.sources import Source, check_fields, fields_of
from pipejax.inference.streaming import RowEvent, Screen
from pipejax.offline.resume import Unfinished, settings_of
from pipejax.system import cli, streams
from pipejax.system.errors import UserError
from pipejax.system.extras import module
from pipejax.system.files import look, new_file
from pipejax.system.progress import Progress

logger = logging.getLogger(__name__)

STANDARD = streams.STANDARD

WORKBOOKS = (".xlsx", ".xls", ".ods")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
GROUP = 1000  # rows per row group in Parquet
# The Parquet type of a column, and the number of lists around it; other columns hold JSON.
_TYPES = {
    "text": ("string", 0),
    "rows": ("string", 1),
    "row_ids": ("int32", 2),
    "repeated": ("int64", 1),
    "steps": ("int64", 0),
    "calls": ("int64", 0),
    "truncated": ("string", 0),
    "method": ("string", 0),
    "sample": ("int64", 0),
    "log_prob": ("float64", 0),
    "log_probs": ("float64", 2),
}


def check_input(source: str, flag: str = "--input") -> Path:
    """Returns the path of the input.

    Raises:
      UserError: the input is absent or cannot be read.
    """
    given = Path("/dev/stdin" if source == STANDARD else source)
    if source != STANDARD and (not given.exists() or (given.is_dir() and not is_dataset(given))):
        problem = "found a directory" if given.is_dir() else "no such file"
        raise UserError(f"{flag} {source}", problem, expected=EXPECTED)
    return given


def check_paths(source: str, target: str, *, resume: bool = False) -> None:
    """Raises a UserError if the input is absent, or if the output is the input or cannot be written."""
    given, wanted = check_input(source), Path(target)
    if resume and (STANDARD in (source, target) or (wanted.exists() and not wanted.is_file())):
        raise UserError(
            "--resume", found=f"--input {source} --output {target}", expected="regular files, which can be read again"
        )
    if target == STANDARD:
        streams.check_standard_output("--output")
        return
    if wanted.is_file() and given.exists() and os.path.samefile(given, wanted):
        raise UserError(f"--output {target}", found="the input file", expected="a different file")
    if wanted.suffix.lower() in WORKBOOKS:
        raise UserError(f"--output {target}", found="the name of a workbook", expected=".csv, .tsv, .parquet or .jsonl")
    if wanted.suffix.lower() in PACKED:
        raise UserError(
            f"--output {target}",
            found="the name of a compressed file",
            expected="a name without a compression suffix, because the output is not compressed",
        )
    cli.check_output_file("--output", target)
    if (lines := lines_for(target)) == target:
        return
    if (found := look(target)) and not wanted.is_file():
        raise UserError(
            f"--output {target}", found=f"no regular {found}", expected="a regular file or a new one, for a table"
        )
    if resume and found and not look(lines):
        raise UserError(f"--resume: {target}", "complete", expected=f"{lines}, the file of an interrupted decode")
    if is_parquet(target):
        module("pyarrow", "parquet", f"--output {target}")


def decode_file(
    generator: Generator,
    source: str,
    target: str,
    *,
    method: str | None,
    batch_size: int | None,
    resume: bool = False,
    live: bool = False,
    continued_by: str = "--resume",
    skip_bad: bool = False,
) -> Report:
    """Decodes a file of records into JSON lines or a table, in order.

    A file is checked as a whole before anything compiles. Standard input is read line by line, and lines are answered
    as soon as a batch is full. Records are written as they are decoded, in whole lines, so an interrupted run leaves a
    valid file. For a table, the lines are written to a separate file first and converted at the end.

    Args:
      generator: the model.
      source: the path of the input, or "-" for standard input.
      target: the path of the output, or "-" for standard output.
      method: the name of the method; None: the generator's default.
      batch_size: sources per batch; None: the config's, and 1 for standard input.
      resume: continue after the records that the output already has.
      live: decode one source at a time, and show its rows on standard error as they are written.
      continued_by: the flag that continues this work, for the message after an interruption.
      skip_bad: skip bad lines instead of stopping at the first one.

    Returns:
      The report on all decoded batches.

    Raises:
      UserError: the input is invalid or empty, the output cannot be written, or it cannot be resumed.
    """
    name, config = method or generator.default_method, generator.config
    chosen, report = generator.method(name), Report()
    table, target = target, lines_for(target)
    bad = BadLines("standard input" if source == STANDARD else source, skip=skip_bad)
    total: int | None = None
    if source == STANDARD:
        placed = read_objects(sys.stdin.buffer, "standard input", bad=bad)
        sources, window, size = read_sources(generator, placed, name, bad, at_once=True), 1, batch_size or 1
        output = Unfinished(target, place=f"--output {target}")
    else:
        checked = _check_whole(generator, source, name, bad)
        total, window = len(checked), WINDOW
        size = min(batch_size or config.decode.batch_size, total)
        is_plain = target != STANDARD and (not Path(target).exists() or Path(target).is_file())
        settings = settings_of(generator, name, checked) if is_plain else None
        output = Unfinished(target, settings, place=f"--output {target}")
        if is_plain and resume:
            output.resume([source.id for source in checked])
        sources = iter(checked[output.records :])
        if output.records == total:
            logger.info(f"{target}: contains the records of all {total} lines")
    progress = Progress("decoding", total and total - output.records, unit="example", shown=not live)
    if live:
        records = _show(generator, sources, name, report)
    else:
        records = generator.stream(
            sources, method=name, batch_size=size, report=report, window=window, tick=progress.add
        )
    with closing(progress), closing(output):
        try:
            for record in records:
                output.write(as_line(record).encode())
        except KeyboardInterrupt:
            output.say_how_far(total, continued_by)
            raise
    if total is None:
        bad.end(report.examples // config.decode.samples)
        if not report.examples:
            raise UserError("standard input", found="no lines", expected="at least one source")
    if target != table:
        write_table(Path(target), table)
    output.end()
    for line in report.lines(chosen):
        logger.info(f"{name}: {line}")
    return report


def _check_whole(generator: Generator, source: str, method: str, bad: BadLines) -> list[Source]:
    """Reads and checks all sources of a file; warns about duplicate ids.

    Raises:
      UserError: a field of the template is in no record, a line is invalid, or the file has no sources.
    """
    given = list(read_records(source, dialect=Dialect.of(generator.config.data), bad=bad))
    check_fields(fields_of(generator.config), (value for _, value in given), source)
    checked = list(read_sources(generator, given, method, bad))
    bad.end(sum(s.sample == 0 for s in checked))
    if not checked:
        raise UserError(source, found="no lines", expected="at least one source")
    twice, times = Counter(str(s.id) for s in checked if s.sample == 0).most_common(1)[0]
    if times > 1:
        logger.warning(f"{source}: some ids are not unique, such as {twice}; records have the order of the lines")
    return checked


def read_sources(
    generator: Generator, placed: Iterable[Placed], method: str, bad: Refusal = refuse_line, *, at_once: bool = False
) -> Iterator[Source]:
    """Yields the sources of records, `decode.samples` times each; a record without an id gets its line's number.

    Args:
      generator: checks the sources.
      placed: the records, each with its place for messages.
      method: the name of the method.
      bad: called with the error of a bad line.
      at_once: check the fields by the first record only, because the others are not there yet.
    """
    for place, value in placed:
        try:
            if at_once:
                check_fields(fields_of(generator.config), [value], place)
            source = generator.source(value, place, place.rpartition(":")[2])
            found = list(generator.samples_of([source], method))
        except UserError as error:  # the message of an unsupported request names the id, not the line
            if str(error).startswith("grid."):  # an error in the settings, not in this line
                raise
            bad(error if str(error).startswith(place) else error.within(place))
            continue
        at_once = False
        yield from found


def as_line(record: Record) -> str:
    """Returns a record as one line of JSON."""
    return _json(record) + "\n"


def _show(generator: Generator, sources: Iterable[Source], method: str, report: Report) -> Iterator[Record]:
    """Decodes one source after the other, shows its rows while they are decoded, and yields its record."""
    report.compiles_within = True
    for source in sources:
        begun, events = time.perf_counter(), generator.stream_source(source, method)
        several = generator.config.decode.samples > 1
        screen = Screen(f"{source.id}, sample {source.sample}:" if several else f"{source.id}:")
        for event in events:
            if isinstance(event, RowEvent):
                screen.show(event)
            else:
                report.seconds += time.perf_counter() - begun
                config, tokenizer = generator.config, generator.tokenizer
                count(event, generator.method(method), report, config=config, tokenizer=tokenizer)
                yield event


# Records as a table: CSV, TSV or Parquet, converted from the JSON lines after decoding.


def lines_for(target: str) -> str:
    """Returns the path for the JSON lines that `target` is made from; `target` itself if it is not a table."""
    made = is_parquet(target) or Path(target).suffix.lower() in DELIMITERS
    return f"{os.path.realpath(target)}.records" if made else target


def write_table(lines: Path, target: str) -> None:
    """Converts the records in `lines` to a table with one column per field, and removes `lines`.

    The table is written completely or not at all.
    """
    try:
        with new_file(Path(os.path.realpath(target))) as partial:
            (_write_parquet if is_parquet(target) else _write_text)(lines, partial, target)
    except OSError as error:
        raise UserError(
            f"--output {target}",
            f"cannot be written ({error.strerror or error}); {lines} has the records, and --resume "
            "writes the table from them",
        ) from error
    lines.unlink()


BESIDE = ("sample", "truncated", "log_prob")  # fields that a table contains in addition to the id and the columns


def _read(lines: Path) -> Iterator[Object]:
    """Yields the rows of the table: whole records or, if records have columns, the id, columns and fields in BESIDE."""
    for _, record in read_file(lines):
        if isinstance(columns := record.get("columns"), dict):
            beside = {name: record[name] for name in BESIDE if name in record and name not in columns}
            yield {"id": record["id"], **columns, **beside}
        else:
            yield record


def _write_text(lines: Path, partial: Path, target: str) -> None:
    """Writes CSV or TSV with a line of names; lists and objects become JSON."""
    with partial.open("w", encoding="utf-8", newline="") as file:
        delimiter = DELIMITERS[Path(target).suffix.lower()]
        rows = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        # Older Python versions quote a carriage return only if lines end with one, so everything is quoted.
        quoted = csv.writer(file, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
        for number, record in enumerate(_read(lines)):
            if number == 0:
                rows.writerow(record)
            cells = [
                json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
                for value in record.values()
            ]
            (quoted if any("\r" in x for x in cells if isinstance(x, str)) else rows).writerow(cells)


def _write_parquet(lines: Path, partial: Path, target: str) -> None:
    """Writes Parquet. Ids are int64 if all are whole numbers, else strings."""
    arrow, parquet = (module(name, "parquet", f"--output {target}") for name in ("pyarrow", "pyarrow.parquet"))
    whole = all(isinstance(record["id"], int) and abs(record["id"]) < 2**63 for record in _read(lines))
    first, fields = next((record for _, record in read_file(lines)), {}), []
    columns: Object = first.get("columns") or {}  # type: ignore[assignment]
    types = {name: kind for name, kind in _TYPES.items() if name not in columns} | dict.fromkeys(columns, ("string", 0))
    for name in next(_read(lines), {}):
        kind, depth = ("int64" if whole else "string", 0) if name == "id" else types.get(name, ("string", 0))
        type_ = getattr(arrow, kind)()
        for _ in range(depth):
            type_ = arrow.list_(type_)
        fields.append(arrow.field(name, type_))

    def cell(name: str, value: object) -> object:
        if name == "id":
            return value if whole else str(value)
        return value if name in types else _json(value)

    records = _read(lines)
    with parquet.ParquetWriter(partial, arrow.schema(fields)) as writer:
        while group := [{name: cell(name, x) for name, x in r.items()} for r in islice(records, GROUP)]:
            writer.write_table(arrow.Table.from_pylist(group, schema=writer.schema))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
