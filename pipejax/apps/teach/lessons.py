"""Rows for sources that nobody has labelled: a sequential checkpoint answers them, and its weights learn its rows."""

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from pipejax import config as config_lib
from pipejax import methods, metrics
from pipejax.config import Config
from pipejax.data import TASKS, make_task
from pipejax.data.batches import pack_size
from pipejax.data.examples import Example
from pipejax.data.formats import read_records
from pipejax.data.lines import read_file
from pipejax.data.tables import Dialect
from pipejax.data.text import normalized, sentences
from pipejax.inference.answers import Record, texts
from pipejax.inference.generator import Generator
from pipejax.inference.loading import DECODING_KEYS, load
from pipejax.inference.sources import Source
from pipejax.methods import split_rows, tells_rows_apart
from pipejax.model import sharding
from pipejax.offline.evaluation import evaluate
from pipejax.offline.records import decode_file
from pipejax.offline.resume import HASHED, Unfinished, flattened, settings_of
from pipejax.system import strict_json
from pipejax.system.errors import UserError
from pipejax.system.files import absolute, make_directories, write_text
from pipejax.system.progress import Progress
from pipejax.training.loop import fit
from pipejax.training.run_directory import RunDirectory
from pipejax.training.step import check_batch

logger = logging.getLogger(__name__)

FULL = 2000  # updates of a full fine-tuning where the checkpoint was never trained here, as in configs/jsonl.py
PART = 4  # teaching takes one update for so many of them, of so many times the examples
COUNTED = ("steps", "warmup_steps", "log_every", "evaluate_every", "checkpoint_every")  # in updates: all are divided
# What overrides may change: sections and keys. All else is as the checkpoint has it.
FREE = (
    *("name", "grid", "decode", "train", "mesh"),
    *("data.max_source", "data.max_target", "data.separator", "data.csv_delimiter", "data.csv_quotes", "data.metric"),
)
# Labels are not drawn, whatever the checkpoint does.
GREEDILY = ("decode.beams=1", "decode.temperature=0", "decode.top_k=0", "decode.top_p=1", "decode.samples=1")
SET_HERE = ("train.objective", "train.init_from", "train.init_best")
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


def teach(
    checkpoint: str,
    source: str,
    workdir: str | Path,
    *,
    best: bool = False,
    held_out: int | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Labels, trains and measures, from wherever the run in `workdir` stands; returns what `loop.fit` does.

    `held_out`: sources that are only measured on; None: as `choose_held_out` says.
    """
    with RunDirectory(workdir) as directory:
        place = directory.path / "labels"
        if (directory.path / "config.json").is_file() and not place.is_dir():
            raise UserError(
                f"{workdir}: found a run without labels/; expected a new or an empty directory, or one of teach"
            )
        ours = {*DECODING_KEYS, "model"} - {"method"}  # which `lesson` refuses
        own = [a for a in overrides if {a.partition(".")[0].strip(), a.partition("=")[0].strip()} & ours]
        generator = load(checkpoint, best=best, overrides=[*GREEDILY, *own])
        config = lesson(generator.config, checkpoint, overrides, best=best)
        if generator.tokenizer is None:
            raise UserError(f"{checkpoint}: found no tokenizer in it; expected one, to read and write text")
        decode, step = generator.config.decode, f"{'best ' if best else ''}step {generator.origin['step']}"
        way = f"{decode.beams} beams" if decode.beams > 1 else f"temperature {decode.temperature:g}"
        logger.info(f"learning from {checkpoint}, {step}, whose answers are written with {way}")
        sources = read_unlabelled(generator, source)
        chosen = choose_held_out(sources, held_out, config.train.seed)
        note_settings(place, generator, sources, held_out=len({sources[i].content for i in chosen}))
        records = answer(place, generator, source, sources)
        made = part(sources, records, chosen, config)
        del generator  # training needs the room
    for line in made.lines():
        logger.info(line)
    if code := fit(config, workdir, given={"train": made.train, "dev": made.held_out}):
        return code
    found = measure_agreement(directory.path, made)
    logger.info(
        f"{found['examples']} sources that were held out: exact-match F1 {found['em_f1']:.2f} with the checkpoint's "
        f"rows, {found['equal_answers']:.1f} % of the answers equal"
    )
    logger.info(
        f"decoder steps: {found['checkpoint_steps']:.1f} before, {found['steps']:.1f} now, "
        f"{found['steps_saved']:.1f} % saved; all figures in {Path(workdir) / 'agreement.json'}"
    )
    return 0


def lesson(saved: Config, checkpoint: str, overrides: Sequence[str], *, best: bool = False) -> Config:
    """The config of the run: the checkpoint's own, with the pipelined objective and a quarter of the updates.

    Each has four times the examples, computed in as many parts, each as large and packed as before. The rate of AdamW
    is doubled: it grows with the square root of the batch (Malladi et al. 2022, arXiv 2205.10287).
    """
    full = saved.train if saved.train.objective != "none" else dataclasses.replace(saved.train, steps=FULL)
    if not methods.trained(saved).parts_text:
        raise UserError(f"{checkpoint}: found a checkpoint that writes rows already; expected a sequential one")
    counts = {key: -(-getattr(full, key) // PART) for key in COUNTED}
    train = dataclasses.replace(
        full,
        objective="pipelined",
        init_from=str(absolute(checkpoint)),
        init_best=best,
        batch_size=PART * full.batch_size,
        accumulate=PART * full.accumulate,
        learning_rate=math.sqrt(PART if full.optimizer == "adamw" else 1) * full.learning_rate,
        **counts,
    )
    task = saved.data.task if saved.data.task in TASKS else "jsonl"
    data = dataclasses.replace(saved.data, task=task, train="", dev="", tokenizer="")
    base = dataclasses.replace(saved, data=data, train=train)
    config = config_lib.override(base, overrides)
    before, after = config_lib.flat(base), config_lib.flat(config)
    for key, value in after.items():
        free = key not in SET_HERE and {key, key.partition(".")[0]} & {*FREE}
        if value != before.get(key) and not free:
            raise UserError(
                f"--set {key}={value}: cannot change when rows are taught; expected one of {', '.join(FREE)}"
            )
    chosen = config.train
    if all(getattr(chosen, key) == getattr(train, key) for key in ("batch_size", "accumulate", "pack")):
        chosen = dataclasses.replace(chosen, pack=pack_size(full))
    config = dataclasses.replace(config, train=chosen, decode=dataclasses.replace(config.decode, beams=1))  # rows: none
    # What would end the work later ends it here.
    check_batch(config, sharding.make_mesh(**vars(config.mesh)))
    methods.check_training(config)
    metrics.require(config.data.metric or make_task(config.data).metric)
    if not tells_rows_apart(config.data.separator):
        sentences("")
    return config


def measure_agreement(run: Path, made: Labels) -> dict[str, object]:
    """The agreement of the run's newest step with the checkpoint on the sources that were held out.

    Returns:
      what is also written to agreement.json: exact scores, with the checkpoint's rows as gold; "equal_answers", the
      percentage that has the same rows, in whatever order, as the scores ignore it, too; the mean "steps", and
      "checkpoint_steps" of the checkpoint; "steps_saved" in percent; "labels", the counts.
    """
    generator, examples = load(run), made.held_out
    progress = Progress("comparing with the checkpoint", len(examples), unit="example")
    size = generator.batch_size_for(min(generator.config.decode.batch_size, len(examples)))
    scores, records = evaluate(generator, examples, metric="exact", batch_size=size, tick=progress.add)
    progress.close()
    pairs = zip(examples, records, strict=True)
    equal = sum(sorted(e.targets) == sorted(row.strip() for row in texts(r)) for e, r in pairs)
    before, after = sum(made.steps) / len(made.steps), scores["steps"]
    found = {
        **generator.origin,
        **{key: scores[key] for key in ("examples", "em_precision", "em_recall", "em_f1", "pm_f1", "truncated")},
        "equal_answers": 100 * equal / len(examples),
        "checkpoint_steps": before,
        "steps": after,
        "steps_saved": 100 * (1 - after / before),
        "labels": made.counts,
    }
    write_text(run / "agreement.json", json.dumps(found, indent=2) + "\n")
    return found


# Labels: answers of the checkpoint, parted into rows.


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
        found = strict_json.loads(path.read_text(encoding="utf-8"))
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
