"""Labels for training without labelled data: the answers of a checkpoint to the sources of a file, kept in a run."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from pipejax import config as config_lib
from pipejax.config import Config, DecodeConfig
from pipejax.data.formats import read_records
from pipejax.data.lines import read_file
from pipejax.data.tables import Dialect
from pipejax.data.text import normalized
from pipejax.inference.answers import Record
from pipejax.inference.generator import Generator
from pipejax.inference.sources import Source
from pipejax.offline.records import decode_file
from pipejax.offline.resume import HASHED, Unfinished, settings_of
from pipejax.system import strict_json
from pipejax.system.errors import UserError
from pipejax.system.files import make_directories, write_text

# Labels are decoded greedily, regardless of the checkpoint's settings.
GREEDILY = (
    *("decode.beams=1", "decode.samples=1"),
    *(
        f"decode.{field.name}={field.default}"
        for field in dataclasses.fields(DecodeConfig)
        if field.metadata.get("ability") == "sample" and field.name != "seed"
    ),
)
DIRECTORY = "labels"  # the directory of the answers, in the directory of the run
ANSWERS = "answers.jsonl"  # records in the format of `pipejax decode`
SETTINGS = "settings.json"  # the settings that the answers depend on, and the number of held-out sources
FLAGS = {"input": "--input", "weights": "--checkpoint", "held_out": "--held-out"}


class Answered(NamedTuple):
    """Sources, and the checkpoint's answers to these sources."""

    sources: list[Source]
    records: list[Record]  # the answers, in the order of the sources
    held_out: frozenset[int]  # the indices of the sources that are not trained on


def check_labels_directory(path: Path, workdir: str | Path) -> None:
    """Raises a UserError if a directory holds a run of another command; `workdir` is its name in the message."""
    if (path / "config.json").is_file() and not (path / DIRECTORY).is_dir():
        raise UserError(
            workdir,
            found=f"a run directory without {DIRECTORY}/",
            expected="a new or empty directory, or one of pipejax teach",
        )


def refuse_untaught(base: Config, config: Config) -> None:
    """Raises a UserError if a config differs from `base` in a setting that pipejax teach does not accept."""
    before, after = config_lib.flat(base), config_lib.flat(config)
    for key, value in after.items():
        if value != before.get(key) and not config_lib.takes("teach", key):
            raise config_lib.not_taken("teach", key, "--set")


def of_checkpoint(overrides: Sequence[str]) -> list[str]:
    """Returns the settings KEY=VALUE that apply to the checkpoint that answers, and that `load` accepts.

    The settings of a method are left out: the config of the training refuses such a setting.
    """
    return [override for override in overrides if _is_of_checkpoint(override.partition("=")[0].strip())]


def _is_of_checkpoint(key: str) -> bool:
    section = key.partition(".")[0]
    return section == "model" or (
        section in config_lib.SECTIONS and section != "method" and config_lib.takes("decode", key)
    )


def label(
    directory: Path, generator: Generator, path: str, *, method: str, held_out: int | None, seed: int
) -> Answered:
    """Answers the sources of a file greedily; answers of an interrupted command are kept.

    Args:
      directory: the directory of the answers.
      generator: the model that answers.
      path: the file of sources.
      method: the name of the method with which the model answers.
      held_out: the number of sources that are not trained on; None: see `choose_held_out`.
      seed: the seed by which the held-out sources are chosen.

    Raises:
      UserError: a source cannot be used, or a setting of the answers has changed.
    """
    sources = read_unlabelled(generator, path)
    chosen = choose_held_out(sources, held_out, seed)
    note_settings(directory, generator, sources, method=method, held_out=len({sources[i].content for i in chosen}))
    return Answered(sources, answer(directory, generator, path, sources, method), chosen)


def read_unlabelled(generator: Generator, path: str) -> list[Source]:
    """Reads the sources of a file in the format of `pipejax decode`."""
    sources = []
    for place, value in read_records(path, dialect=Dialect.of(generator.config.data)):
        if "source_ids" in value:
            raise UserError(place, found='"source_ids"', expected="a text source, since training reads text")
        source = generator.source(value, place, place.rpartition(":")[2])
        if source.prefixes or source.max_rows is not None:
            expected = "neither of them, since training does not support given beginnings of rows"
            raise UserError(place, found="row_prefixes or max_rows", expected=expected)
        sources.append(source)
    if not sources:
        raise UserError(path, found="no lines", expected="at least two sources")
    return sources


def choose_held_out(sources: Sequence[Source], count: int | None, seed: int) -> frozenset[int]:
    """Returns the indices of the held-out sources.

    `count` distinct texts are chosen (None: a tenth, at most 512); all sources with one of these texts are held out.
    """
    texts = [normalized(str(source.content)) for source in sources]
    lot = {text: hashlib.sha256(f"{seed}:{text}".encode()).digest() for text in texts}
    count = count or max(min(len(lot) // 10, 512), 1)
    if count >= len(lot):
        raise UserError("--held-out", found=f"{count}", expected=f"fewer than the {len(lot)} different sources")
    chosen = set(sorted(lot, key=lambda text: lot[text])[:count])
    return frozenset(i for i, text in enumerate(texts) if text in chosen)


def note_settings(
    directory: Path, generator: Generator, sources: Sequence[Source], *, method: str, held_out: int
) -> None:
    """Writes the settings that the answers depend on, or compares the settings with the file of an earlier run.

    Args:
      directory: the directory of the answers.
      generator: the model that answers.
      sources: the sources.
      method: the name of the method with which the model answers.
      held_out: the number of held-out sources.

    Raises:
      UserError: a setting has changed.
    """
    known = settings_of(generator, method, sources) | {"held_out": held_out}
    settings = {key: value for key, value in known.items() if _changes_label(key, method)}
    path = directory / SETTINGS
    if not path.is_file():
        make_directories(directory)
        write_text(path, json.dumps(settings, indent=2) + "\n")
        return
    try:
        found = strict_json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(
            path,
            found="no settings",
            expected="the settings of the answers in this directory; choose another --workdir",
        )
    for key, value in settings.items():
        if key in found and found[key] != value:
            change = "found a different value than before" if key in HASHED else f"{found[key]!r} -> {value!r}"
            raise UserError(
                f"{directory}: {FLAGS.get(key, key)}",
                f"{change}",
                expected="no change, since the labels in the directory were made with it; choose another --workdir",
            )


def _changes_label(key: str, method: str) -> bool:
    """Returns whether a label depends on a setting.

    Settings of texts, such as `data.separator`, do not count: every start of the command splits the answers anew.
    """
    facts = config_lib.SETTINGS.get(key, {})
    return facts.get("records") != "text" and facts.get("read_by", method) == method


def answer(directory: Path, generator: Generator, path: str, sources: Sequence[Source], method: str) -> list[Record]:
    """Returns the checkpoint's greedy answers to all sources of the file at `path`; existing answers are kept.

    `method` is the name of the method with which the checkpoint answers.
    """
    target = directory / ANSWERS
    if not target.is_file() or Unfinished(str(target), {}).path.exists():
        decode_file(
            generator,
            path,
            str(target),
            method=method,
            batch_size=None,
            resume=True,
            continued_by="the same command",
        )
    records = []
    for (place, record), source in zip(read_file(target), sources, strict=False):
        if record.get("id") != source.id or not isinstance(record.get("text"), str) or "truncated" not in record:
            raise UserError(place, found=f"no answer to the source {source.id!r}", expected="the lines in their order")
        records.append(cast(Record, record))
    if len(records) < len(sources):
        raise UserError(
            target,
            found=f"{len(records)} answers",
            expected=f"{len(sources)}; delete the file to write all answers again",
        )
    return records
