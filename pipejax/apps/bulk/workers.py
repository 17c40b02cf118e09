"""Decoding of many files in blocks of lines: the work of each process, and the coordination by the main process."""

import contextlib
import dataclasses
import glob
import json
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

from pipejax import methods
from pipejax.apps.bulk.blocks import EXPECTED, Block, Reader, cut
from pipejax.apps.bulk.shards import Input, Output, Plan, Shard, Shards, name_shards
from pipejax.data.lines import BadLines
from pipejax.data.tables import Dialect
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.inference.report import Report
from pipejax.inference.sources import check_fields, fields_of
from pipejax.offline import records
from pipejax.offline.resume import settings_of
from pipejax.system import strict_json
from pipejax.system.cli import REFUSALS
from pipejax.system.errors import UserError, first_line, out_of_memory
from pipejax.system.files import digest_of
from pipejax.system.progress import Progress
from pipejax.system.strict_json import JsonMapping, JsonObject

Said = JsonObject  # JSON that a worker returns: settings, counts, or an "error"
logger = logging.getLogger(__name__)

BLOCK = 1000  # lines per shard


@dataclasses.dataclass(frozen=True)
class BulkWork:
    """The settings that every process gets once.

    Paths are absolute, except the paths of blocks, which are relative to `root`.
    """

    checkpoint: str
    output: str
    root: str
    best: bool = False
    overrides: tuple[str, ...] = ()
    method: str | None = None  # the name of the method; None: the checkpoint's default
    skip_bad: bool = False  # whether to skip lines that are not valid sources
    settings: JsonMapping | None = None  # the settings that the records depend on; None: not known yet
    run: str = ""  # see `Shards`


class Pool(Protocol):
    """A set of processes that decode."""

    def ask(self, work: BulkWork) -> Said:
        """Returns the result of `describe`, computed by one of the processes."""

    def map(self, work: BulkWork, blocks: Sequence[tuple[str, Block]]) -> Iterator[Said]:
        """Yields the result of `Worker` for each block, each once, in any order."""


def result_or_error(call: Callable[..., Said], *arguments: object) -> Said:
    """Returns the result of the call, or {"error", "kind"} for an exception: the fields of a UserError, or a text.

    The main process reports the error as one line.
    """
    try:
        return call(*arguments)
    except UserError as error:
        return {"error": error.fields(), "kind": "user"}
    except Exception as error:
        if isinstance(error, OSError) and error.errno in REFUSALS:
            return {"error": UserError(error.filename or "output", error.strerror).fields(), "kind": "user"}
        if out_of_memory(error):
            return {"error": first_line(error), "kind": "memory"}
        return {"error": traceback.format_exc(), "kind": "mistake"}


def result_of(said: Said) -> Said:
    """Returns a worker's result, or raises the exception that `result_or_error` described."""
    if "error" not in said:
        return said
    if said["kind"] == "user":
        raise UserError(**said["error"])
    raise {"memory": MemoryError, "mistake": RuntimeError}[said["kind"]](said["error"])


def describe(work: BulkWork) -> Said:
    """Opens the checkpoint and describes it for the main process.

    Returns:
      "settings", the settings that the records depend on; "doubts", warnings about the method and the settings of the
      training; and "fields", the fields of the source template.
    """
    generator = _open(work)
    config = generator.config
    doubts = methods.training_mismatches(work.method or generator.default_method, config, generator.trained or config)
    return {"settings": _settings(work, generator), "doubts": doubts, "fields": fields_of(config)}


def _open(work: BulkWork) -> Generator:
    # The module of a method's class is searched in the directory where the command was started.
    with contextlib.chdir(work.root):
        return load(work.checkpoint, best=work.best, overrides=work.overrides)


def _settings(work: BulkWork, generator: Generator) -> Said:
    """Returns the settings in the form that JSON gives back, without the input, which block digests identify."""
    settings = settings_of(generator, work.method or generator.default_method, [])
    more = {**Dialect.of(generator.config.data).as_settings(), "--skip-bad": work.skip_bad}
    return {key: strict_json.loads(json.dumps(value)) for key, value in (settings | more).items() if key != "input"}


class Worker:
    """Decodes block after block in one process; the checkpoint is loaded for the first block."""

    def __init__(self, work: BulkWork) -> None:
        self.work, self.shards, known = work, Shards(Path(work.output), work.run), work.settings or {}
        self.reader = Reader(Path(work.root), Dialect.noted(known))
        self.generator: Generator | None = None

    def __call__(self, name: str, block: Block) -> Said:
        """Writes a shard and returns its facts.

        Returns:
          The facts; {"error", "kind"} after an error, which stops all workers; {} if the work was already stopped.
        """
        if self.shards.stopped:
            return {}
        said = result_or_error(self._shard, name, block)
        if "error" in said:
            with contextlib.suppress(OSError):  # such as a full disk
                self.shards.stop()
        return said

    def _shard(self, name: str, block: Block) -> Shard:
        """Decodes the lines of a block and writes the shard.

        Raises:
          UserError: this process has other settings than the first one, or a line is invalid.
        """
        if found := self.shards.look(name):  # written by a process that died before it could report it
            return found
        self.shards.begin(name)
        if self.generator is None:
            generator = _open(self.work)
            if (settings := _settings(self.work, generator)) != self.work.settings:
                raise UserError(
                    "a worker",
                    found=f"the settings {settings}",
                    expected=f"{self.work.settings}, as in the first process",
                )
            self.generator = generator
        method, size = self.work.method or self.generator.default_method, self.generator.config.decode.batch_size
        bad = BadLines(block.path, skip=self.work.skip_bad, most=block.lines, tell=False)
        sources = list(records.read_sources(self.generator, self.reader.read(block, bad), method, bad))
        decoded = self.generator.stream(sources, method=method, batch_size=size, report=Report())
        return self.shards.write(name, "".join(map(records.as_line, decoded)), bad.messages)


def match_files(patterns: Sequence[str]) -> list[str]:
    """Returns the files that match the patterns, each once.

    Raises:
      UserError: a pattern matches nothing, or something other than files.
    """
    found = dict[str, None]()
    for pattern in patterns:
        paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise UserError(f"--input {pattern}", found="no file", expected=EXPECTED)
        for path in paths:
            if not records.check_input(path).is_file():
                raise UserError(f"--input {path}", found="no regular file", expected=EXPECTED)
            found[path] = None
    return list(found)


def decode_files(work: BulkWork, files: Sequence[str], output: Output, pool: Pool, *, block: int = BLOCK) -> None:
    """Decodes the files into the shards that do not exist yet, and writes a complete manifest.

    Args:
      work: the settings of the processes.
      files: the paths of the inputs.
      output: the output directory.
      pool: the processes.
      block: lines per shard.

    Raises:
      UserError: an input is invalid, the output belongs to other work, or a worker failed.
    """
    described = result_of(pool.ask(work))
    work = dataclasses.replace(work, settings=described["settings"], run=output.run)
    for doubt in described["doubts"]:
        logger.warning(doubt)
    inputs, blocks = _cut_inputs(files, block, described)
    wanted = name_shards(blocks)
    if not wanted:
        raise UserError(files[0], found="no lines", expected="at least one source")
    plan: Plan = {"settings": described["settings"], "block": block, "inputs": inputs}
    with output:
        known = output.take_up(plan)
        done = output.written(wanted, known)
        if done:
            logger.info(f"{output.path}: {len(done)} of {len(wanted)} shards were already written")
        begun, before = time.monotonic(), sum(shard["records"] for shard in done.values())
        try:
            problem = _decode_missing(work, wanted, done, pool)
        finally:
            for name in wanted.keys() - done.keys():  # shards that workers have written but not reported
                if shard := output.shards.look(name):
                    done[name] = shard
            output.note(plan, [done[name] for name in wanted if name in done], complete=len(done) == len(wanted))
            if len(done) < len(wanted):
                logger.info(
                    f"{output.path}: {len(done)} of {len(wanted)} shards are written; the same command resumes the work"
                )
        result_of(problem)
        if len(done) < len(wanted):
            raise UserError(
                output.path, "a worker process died without reporting an error; the same command resumes the work"
            )
        total = sum(shard["records"] for shard in done.values())
        _log_skipped(output, {name: done[name] for name in wanted}, wanted)
        rate = f"; {(total - before) / (time.monotonic() - begun):.2f} records/s" if total > before else ""
        logger.info(f"{output.path}: {total} records in {len(done)} shards{rate}")


def _log_skipped(output: Output, done: Mapping[str, Shard], wanted: Mapping[str, Block]) -> None:
    """Logs which lines were skipped.

    Raises:
      UserError: all lines of a file were skipped.
    """
    bad, kept, left = BadLines(str(output.path), skip=True), Counter[str](), dict[str, str]()
    for name, shard in done.items():
        kept[wanted[name].path] += shard["records"]
        for error in shard.get("skipped", ()):
            bad(UserError(error))
            left.setdefault(wanted[name].path, error)
    bad.end(kept.total())
    for path, error in left.items():
        if not kept[path]:
            raise UserError(path, found=f"only bad lines, the first is {error}")


def _cut_inputs(files: Sequence[str], block: int, described: Said) -> tuple[list[Input], list[list[Block]]]:
    """Returns the manifest's entry and the blocks of each input.

    Raises:
      UserError: an input lacks a field of the template in all records.
    """
    inputs, blocks, dialect = list[Input](), list[list[Block]](), Dialect.noted(described["settings"])
    reader = Reader(Path(), dialect)
    with contextlib.closing(Progress("reading", len(files), unit="file")) as progress:
        for path in files:
            blocks.append(cut(path, block, dialect=dialect))
            ignored = BadLines(path, skip=True, tell=False)  # the workers report them
            placed = chain.from_iterable(reader.read(part, ignored) for part in blocks[-1])
            check_fields(described["fields"], (value for _, value in placed), path)
            lines = sum(part.lines for part in blocks[-1])
            size = Path(path).stat().st_size
            inputs.append({"path": path, "lines": lines, "bytes": size, "sha256": digest_of(Path(path))})
            progress.add(1)
    return inputs, blocks


def _decode_missing(work: BulkWork, wanted: Mapping[str, Block], done: dict[str, Shard], pool: Pool) -> Said:
    """Adds the missing shards to `done`; returns the first error, or {}."""
    problem: Said = {}
    lacking = [(name, part) for name, part in wanted.items() if name not in done]
    total, start = (sum(wanted[name].lines for name in some) for some in (wanted, done))
    with contextlib.closing(Progress("decoding", total, unit="line", start=start)) as progress:
        for said in pool.map(work, lacking) if lacking else ():
            if "error" in said:
                if not problem:
                    progress.line("stopping after the blocks in progress are decoded")
                problem = problem or said
            elif said:
                name = Path(said["shard"]).name
                done[name] = said
                progress.add(wanted[name].lines)
    return problem
