"""Resuming interrupted work.

Until an output is complete, a file beside it, the note, has the settings on which the records of the output depend. An
output can be resumed if the note matches the current settings.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pipejax import config as config_lib
from pipejax.config import SETTINGS, Config
from pipejax.data.tokenizer import source_affixes
from pipejax.inference.generator import Generator
from pipejax.inference.sources import Source
from pipejax.model.precision import compute_dtype
from pipejax.system import streams, strict_json
from pipejax.system.errors import UserError
from pipejax.system.files import sync, sync_output, write_text, writing

logger = logging.getLogger(__name__)

Settings = dict[str, object]  # the settings that the records depend on, as JSON
DEFAULTS = {**config_lib.flat(Config()), "--skip-bad": False}  # for settings that an older release's note lacks


class Unfinished:
    """An output that is written line by line, with a note of its settings in TARGET.unfinished until it is complete.

    The note is deleted by `end`. If the process is interrupted before that, the note stays, and `resume` reads it.
    """

    def __init__(self, target: str, settings: Settings | None = None, *, place: str = "") -> None:
        """Opens no file yet, so that invalid input does not destroy an older result.

        Args:
          target: the path of the output, or "-" for standard output.
          settings: the settings that the records depend on; None: no note is written, and the output cannot be resumed.
          place: the name of the output in messages.
        """
        self.target, self.settings, self.place = target, settings, place or target
        self.path = Path(f"{os.path.realpath(target)}.unfinished")
        self.records = self.size = 0  # records kept from an interrupted run, and their bytes
        self.has_note = False  # whether the note describes the records in the output
        self._out: BinaryIO | None = sys.stdout.buffer if target == streams.STANDARD else None

    def resume(self, ids: Sequence[str | int]) -> None:
        """Keeps the whole records in the output, which must answer the first of `ids` in order.

        Raises:
          UserError: the output is complete, or belongs to other settings or other sources.
        """
        output = Path(self.target)
        if not output.exists() or not output.stat().st_size:
            return
        try:
            found = strict_json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(
                f"--resume: {self.target}",
                found=f"no {self.path.name} in its directory: the output is complete, or was not "
                "written by pipejax decode",
                expected="the output of an interrupted decode",
                hint="without --resume the output is replaced",
            ) from error
        found = found if isinstance(found, dict) else {}
        if other := first_difference(self.settings or {}, flattened(found)):
            raise UserError(f"--resume: {self.target}", found=f"{other}")
        with output.open("rb") as lines:
            for number, line in enumerate(lines):
                if not line.endswith(b"\n"):  # cut off by a kill
                    break
                try:
                    name = strict_json.loads(line)["id"]
                except (ValueError, TypeError, KeyError):
                    name = None
                if number >= len(ids) or name != ids[number]:
                    raise UserError(
                        f"--resume: {self.target}:{number + 1}",
                        found="a line that is not the record of this source",
                        expected=f"the id {ids[number]!r}" if number < len(ids) else "no further line",
                    )
                self.records, self.size = self.records + 1, self.size + len(line)
        self.has_note = self.records > 0

    def write(self, line: bytes) -> None:
        """Appends one line; the first call opens the output and writes the note.

        The output is truncated to the kept records when it is opened. Until then the note is empty, so that older lines
        cannot be resumed with the new settings.

        Raises:
          UserError: the output cannot be written.
          streams.ReaderGone: the reader of a pipe has closed it.
        """
        if self._out is None:
            begins = self.settings is not None and not self.has_note
            # The note is empty while the file may still hold lines of other work.
            cleared = begins and self._write_note({})
            with writing(self.place):
                if self.size:
                    os.truncate(self.target, self.size)
                self._out = open(self.target, "ab" if self.size else "wb", buffering=0)  # noqa: SIM115
            self.has_note = self.has_note or (cleared and self._write_note(self.settings or {}))
        try:
            write_whole(self._out, line)
        except BrokenPipeError as error:  # also for a named pipe
            raise streams.ReaderGone(*error.args) from error
        except OSError as error:
            raise UserError(self.place, f"cannot be written ({error.strerror})") from error

    def _write_note(self, settings: Settings) -> bool:
        """Writes the note; returns False and warns if that fails, because the output itself is more important."""
        try:
            write_text(self.path, json.dumps(settings, indent=2) + "\n")
        except OSError as error:
            logger.warning(f"{self.path}: cannot be written ({error.strerror}); --resume will not be possible")
            return False
        return True

    def say_how_far(self, total: int | None, continued_by: str) -> None:
        """Logs how many records the output has, and that `continued_by` continues after them."""
        if self._out is not None and Path(self.target).is_file():
            with open(self.target, "rb") as file:
                lines = f"{sum(1 for _ in file)}{f' of {total}' if total else ''} lines"
            more = f"; {continued_by} continues after them" if self.has_note else ""
            logger.info(f"{self.target}: contains the records of the first {lines}{more}")

    def close(self) -> None:
        """Closes the output file."""
        if self._out is not None and self.target != streams.STANDARD:
            self._out.close()

    def end(self) -> None:
        """Syncs the complete output, then deletes the note.

        The output is synced first, because lines lost by a crash after the deletion could not be recovered.
        """
        sync_output(Path(self.target))
        if self.settings is not None:
            self.path.unlink(missing_ok=True)
            sync(self.path.parent)


def write_whole(out: BinaryIO, line: bytes) -> None:
    """Writes all bytes of a line; one write to an unbuffered file may take only a part."""
    written = out.write(line)
    while written is not None and written < len(line):
        line = line[written:]
        written = out.write(line)
    out.flush()


# Settings whose values are hashes, and the message if one differs.
HASHED = {
    "input": "answers to another --input; expected answers to the given one",
    "weights": "answers of other weights; expected answers of the given checkpoint",
    "--schema": "answers with another schema; expected answers with the given one",
    "--adapt": "measurements of weights adapted to other examples; expected the same --adapt",
}


FORMER = {"strategy": "--method"}  # maps keys in notes of older releases to the present keys


def settings_of(generator: Generator, method: str, sources: Sequence[Source]) -> Settings:
    """Returns the settings that the records depend on, by dotted key.

    Batch sizes are not among these settings. Settings of drafts are included only if records contain the trace of the
    calls (`decode.trace`).
    """
    digest, config = hashlib.sha256(), generator.config
    for source in sources:
        content = source.content if isinstance(source.content, str) else list(map(int, source.content))
        told = [source.prefixes, source.max_rows] if source.prefixes or source.max_rows is not None else []
        digest.update(json.dumps([source.id, content, *told]).encode())
    effects = {"tokens", "text", "trace"} if config.decode.trace else {"tokens", "text"}
    noted = {key: x for key, x in config_lib.flat(config).items() if SETTINGS.get(key, {}).get("records") in effects}
    noted["decode.dtype"] = compute_dtype(config.decode.dtype).name  # resolved, because "auto" differs between devices
    own: Settings = {} if config.method is None else flattened({"method": config_lib.described(config.method)})
    if sources and (answer_format := sources[0].answer_format) is not None:  # all sources have the same schema
        own["--schema"] = answer_format.text
    known, rules = (generator.tokenizer, generator.architecture), (config.data.special_tokens, "eos")
    affixes, former = (source_affixes(*known, rule) for rule in rules)
    if affixes != former:  # absent otherwise, as in notes of older releases
        own["special tokens of sources"] = str(affixes)
    return {
        "input": digest.hexdigest(),
        "weights": generator.origin.get("params_fp"),
        "--method": method,
        **own,
        **noted,
    }


def first_difference(now: Settings, then: Settings) -> str:
    """Describes the first setting whose value differs from the note, or returns "" if none does."""
    for key in dict.fromkeys([*now, *then]):
        value, was = now.get(key), then.get(key, DEFAULTS.get(key))  # notes of older releases lack some keys
        if was != value:
            return HASHED.get(key, f"{key} = {was!r}; expected {value!r}, as asked for now")
    return ""


def flattened(settings: Mapping[str, object]) -> Settings:
    """Returns settings by their current dotted keys.

    Notes of older releases have sections, "outer": {"inner": ...}, as the settings of a custom method may have.
    """
    return dict(_leaves({FORMER.get(key, key): value for key, value in settings.items()}))


def _leaves(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yields the dotted key and the value of each setting that is not a section."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
