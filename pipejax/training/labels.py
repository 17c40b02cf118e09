"""Rows for sources that nobody has labelled: a sequential checkpoint answers them, and its answers are parted."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pipejax.apps.records import decode_file
from pipejax.apps.unfinished import HASHED, Unfinished, flattened, settings_of
from pipejax.config import Config
from pipejax.data.examples import Example
from pipejax.data.formats import read_records
from pipejax.data.lines import read_file
from pipejax.data.tables import Dialect
from pipejax.data.text import normalized, sentences
from pipejax.inference.answers import Record
from pipejax.inference.generator import Generator
from pipejax.inference.sources import Source
from pipejax.methods import split_rows, tells_rows_apart
from pipejax.system.errors import UserError
from pipejax.system.files import make_directories, write_text

STRATEGY = "sequential"  # by which the checkpoint answers
ANSWERS = "answers.jsonl"  # records as `pipejax decode` writes them
SETTINGS = "settings.json"  # the settings that the answers depend on, and the share that is held out
# Of what a record depends on: the grid is the student's business, and answers are parted anew at every start.
LATER = ("grid", "data.separator")
FLAGS = {"input": "--input", "weights": "--checkpoint", "held_out": "--held-out"}


@dataclasses.dataclass(frozen=True)
class Labels:
    """The examples to learn from, and those that the result is compared with."""

    train: list[Example]
    held_out: list[Example]
    steps: list[int]  # of the decoder, for each answer that is held out
    counts: dict[str, int]  # of sources and answers

    def lines(self) -> list[str]:
        c = self.counts
        return [
            f"{c['sources']} answers: {c['train']} to learn from, with {c['rows']} rows; {c['held_out']} held out",
            f"left out: {c['truncated']} answers cut off at decode.max_length, {c['repeated']} rows that repeat one",
            f"kept: {c['empty']} answers without a row, {c['single']} with one",
        ]


def read_unlabelled(generator: Generator, path: str) -> list[Source]:
    """The sources of a file, in the form that `pipejax decode` reads."""
    sources = []
    for place, value in read_records(path, dialect=Dialect.of(generator.config.data)):
        if "source_ids" in value:
            raise UserError(f'{place}: found "source_ids"; expected text, which training reads')
        sources.append(generator.source(value, place, place.rpartition(":")[2]))
    if not sources:
        raise UserError(f"{path}: found no lines; expected at least two sources")
    return sources


def choose_held_out(sources: Sequence[Source], count: int | None, seed: int) -> frozenset[int]:
    """The indices of the sources held out: `count` texts (None: a tenth, 512 at the most), with all that read alike."""
    texts = [normalized(str(source.content)) for source in sources]
    lot = {text: hashlib.sha256(f"{seed}:{text}".encode()).digest() for text in texts}
    count = count or max(min(len(lot) // 10, 512), 1)
    if count >= len(lot):
        raise UserError(f"--held-out: found {count}; expected fewer than the {len(lot)} different sources")
    chosen = set(sorted(lot, key=lambda text: lot[text])[:count])
    return frozenset(i for i, text in enumerate(texts) if text in chosen)


def note_settings(directory: Path, generator: Generator, sources: Sequence[Source], *, held_out: int) -> None:
    """Notes what the answers will depend on, or compares it with the note of a run that is continued."""
    known = settings_of(generator, STRATEGY, sources) | {"held_out": held_out}
    settings = flattened({key: value for key, value in known.items() if key not in LATER})
    path = directory / SETTINGS
    if not path.is_file():
        make_directories(directory)
        write_text(path, json.dumps(settings, indent=2) + "\n")
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path}: found no settings; expected those of the answers beside it; take another --workdir")
    for key, value in settings.items():
        if key in found and found[key] != value:
            change = "found another one than before" if key in HASHED else f"{found[key]!r} -> {value!r}"
            raise UserError(
                f"{directory}: {FLAGS.get(key, key)}: {change}; expected no change, as the labels "
                "there were made with it; take another --workdir"
            )


def answer(directory: Path, generator: Generator, path: str, sources: Sequence[Source]) -> list[Record]:
    """The checkpoint's greedy answers to all sources of the file at `path`; those that are there are kept."""
    target = directory / ANSWERS
    if not target.is_file() or Unfinished(str(target), {}).path.exists():
        decode_file(
            generator,
            path,
            str(target),
            strategy=STRATEGY,
            batch_size=None,
            resume=True,
            continued_by="the same command",
        )
    records = []
    for (place, record), source in zip(read_file(target), sources, strict=False):
        if record.get("id") != source.id or not isinstance(record.get("text"), str) or "truncated" not in record:
            raise UserError(f"{place}: found no answer to the source {source.id!r}; expected the lines in their order")
        records.append(cast(Record, record))
    if len(records) < len(sources):
        raise UserError(
            f"{target}: found {len(records)} answers; expected {len(sources)}; without that file all are written anew"
        )
    return records


def part(sources: Sequence[Source], records: Sequence[Record], held_out: frozenset[int], config: Config) -> Labels:
    """Parts the answers into rows: at `data.separator`, or into sentences if it is blank.

    A truncated answer is left out, as its last row has no end. Of equal rows the first is kept: a decoder that repeats
    itself would teach that, too. An answer without rows is kept: that there is nothing to say is an answer.
    """
    separator, most = config.data.separator, config.decode.max_length
    labels = Labels([], [], [], {"sources": len(sources), "truncated": 0, "repeated": 0, "empty": 0, "single": 0})
    for i, (source, record) in enumerate(zip(sources, records, strict=True)):
        if record["truncated"]:
            labels.counts["truncated"] += 1
            continue
        text = record["text"] or ""
        parted = split_rows(text, separator) if tells_rows_apart(separator) else sentences(text)
        rows = [*dict.fromkeys(parted)]
        labels.counts["repeated"] += len(parted) - len(rows)
        labels.counts["empty"] += not rows
        labels.counts["single"] += len(rows) == 1
        example = Example(str(source.id), str(source.content), tuple(rows))
        if i in held_out:
            labels.held_out.append(example)
            labels.steps.append(record["steps"])
        else:
            labels.train.append(example)
    if not labels.train or not labels.held_out:
        which = "to learn from" if not labels.train else "that are held out"
        raise UserError(
            f"decode.max_length: found {most}, which cuts off all answers {which}; expected more, with another "
            "--workdir, or a checkpoint whose answers end"
        )
    if all(len(example.targets) < 2 for example in labels.train):
        shown = next((text for record in records if (text := record["text"] or "").strip()), "")[:80]
        raise UserError(
            f"data.separator: found {separator!r}, at which no answer parts into rows (the first one: {shown!r}); "
            "expected what the checkpoint writes between rows"
        )
    labels.counts["train"], labels.counts["held_out"] = len(labels.train), len(labels.held_out)
    labels.counts["rows"] = sum(len(example.targets) for example in labels.train)
    return labels
