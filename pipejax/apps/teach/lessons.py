"""Teaches rows from unlabelled sources: a sequential checkpoint answers them, and its weights learn the rows."""

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from pipejax import config as config_lib
from pipejax import methods, metrics
from pipejax.apps.teach.labels import (
    DIRECTORY,
    GREEDILY,
    Answered,
    check_labels_directory,
    label,
    of_checkpoint,
    refuse_untaught,
)
from pipejax.config import Config
from pipejax.data import TASKS, make_task
from pipejax.data.batches import pack_size
from pipejax.data.examples import Example
from pipejax.data.text import sentences
from pipejax.inference.answers import texts
from pipejax.inference.loading import load
from pipejax.methods import split_rows, tells_rows_apart
from pipejax.model import sharding
from pipejax.offline.evaluation import evaluate, require_tokenizer
from pipejax.system.errors import UserError
from pipejax.system.files import absolute, write_text
from pipejax.system.progress import Progress
from pipejax.training.loop import fit
from pipejax.training.run_directory import RunDirectory
from pipejax.training.step import check_batch

logger = logging.getLogger(__name__)

FULL = 2000  # updates of a full fine-tuning as in configs/jsonl.py, assumed for a checkpoint that was not trained here
PART = 4  # teaching takes 1 / PART of the updates, with PART times as many examples per update
METHOD = "sequential"  # the method with which the checkpoint answers


@dataclasses.dataclass(frozen=True)
class Labels:
    """The examples for training, and the held-out examples for the comparison with the result."""

    train: list[Example]
    held_out: list[Example]
    steps: list[int]  # decoder steps of each held-out answer
    counts: dict[str, int]  # numbers of sources and answers

    def lines(self) -> list[str]:
        """Returns the counts as lines for the log."""
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
    """Labels the sources, trains on these labels and measures the agreement; continues an interrupted run in `workdir`.

    Args:
      checkpoint: the directory of the sequential run.
      source: the file of sources.
      workdir: the directory of the new run.
      best: use the step of the best evaluation instead of the newest one.
      held_out: the number of sources that are not trained on, for evaluations and the measurement; None: see
        `choose_held_out`.
      overrides: settings KEY=VALUE.

    Returns:
      The exit code of `loop.fit`.

    Raises:
      UserError: a setting, the sources or the checkpoint cannot be used.
    """
    with RunDirectory(workdir) as directory:
        check_labels_directory(directory.path, workdir)
        generator = load(checkpoint, best=best, overrides=[*GREEDILY, *of_checkpoint(overrides)])
        config = lesson(generator.config, checkpoint, overrides, best=best)
        require_tokenizer(generator, checkpoint)
        decode, step = generator.config.decode, f"{'best ' if best else ''}step {generator.origin['step']}"
        way = (
            f"with {decode.beams} beams"
            if decode.beams > 1
            else (f"with temperature {decode.temperature:g}" if decode.temperature else "greedily")
        )
        logger.info(f"learning from {checkpoint}, {step}, whose answers are generated {way}")
        place, seed = directory.path / DIRECTORY, config.train.seed
        made = part(label(place, generator, source, method=METHOD, held_out=held_out, seed=seed), config)
        del generator  # frees memory for training
    for line in made.lines():
        logger.info(line)
    if code := fit(config, workdir, given={"train": made.train, "dev": made.held_out}):
        return code
    found = measure_agreement(directory.path, made)
    logger.info(
        f"{found['examples']} held-out sources: exact-match F1 {found['em_f1']:.2f} with the "
        f"checkpoint's rows, {found['equal_answers']:.1f} % of the answers equal"
    )
    logger.info(
        f"decoder steps: {found['checkpoint_steps']:.1f} before, {found['steps']:.1f} now, "
        f"{found['steps_saved']:.1f} % saved; all figures in {Path(workdir) / 'agreement.json'}"
    )
    return 0


def lesson(saved: Config, checkpoint: str, overrides: Sequence[str], *, best: bool = False) -> Config:
    """Returns the config of the run: the checkpoint's, with the pipelined method and a quarter of the updates.

    Each update has four times as many examples, computed in four times as many parts of the same size and packing. The
    learning rate of AdamW is doubled, because the rate should grow with the square root of the batch size (Malladi
    et al. 2022, arXiv 2205.10287).

    Raises:
      UserError: an override is not allowed, or the config cannot be trained.
    """
    full = saved.train if saved.train.method != "none" else dataclasses.replace(saved.train, steps=FULL)
    if saved.auxiliary is not None:  # the run trained these parameters alone; the lesson is for the model
        full = dataclasses.replace(full, freeze="none")
    if not methods.trained(saved).parts_text:
        raise UserError(checkpoint, found="a checkpoint that already writes rows", expected="a sequential one")
    counted = [field.name for field in dataclasses.fields(full) if field.metadata.get("per_update")]
    counts = {key: -(-getattr(full, key) // PART) for key in counted}
    train = dataclasses.replace(
        full,
        method="pipelined",
        init_from=str(absolute(checkpoint)),
        init_best=best,
        batch_size=PART * full.batch_size,
        accumulate=PART * full.accumulate,
        learning_rate=math.sqrt(PART if full.optimizer == "adamw" else 1) * full.learning_rate,
        **counts,
    )
    task = saved.data.task if saved.data.task in TASKS else "jsonl"
    data = dataclasses.replace(saved.data, task=task, train="", dev="", tokenizer="")
    base = dataclasses.replace(saved, data=data, train=train, auxiliary=None)
    config = config_lib.override(base, overrides)
    refuse_untaught(base, config)
    chosen = config.train
    if all(getattr(chosen, key) == getattr(train, key) for key in ("batch_size", "accumulate", "pack")):
        chosen = dataclasses.replace(chosen, pack=pack_size(full))
    # Pipelined decoding does not support beams.
    config = dataclasses.replace(config, train=chosen, decode=dataclasses.replace(config.decode, beams=1))
    # Errors that would end the work later are raised here.
    check_batch(config, sharding.make_mesh(**vars(config.mesh)))
    methods.check_training(config)
    metrics.require(config.data.metric or make_task(config.data).metric)
    if not tells_rows_apart(config.data.separator):
        sentences("")
    return config


def measure_agreement(run: Path, made: Labels) -> dict[str, object]:
    """Measures the agreement of the run's newest step with the checkpoint on the held-out sources.

    Returns:
      The content of agreement.json: exact scores, with the checkpoint's rows as gold; "equal_answers", the percentage
      of answers with the same rows in any order (the scores ignore the order as well); the means "steps" and
      "checkpoint_steps"; "steps_saved" in percent; and "labels", the counts.
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


def part(answered: Answered, config: Config) -> Labels:
    """Splits the answers into rows: at `data.separator`, or into sentences if this separator is blank.

    Truncated answers are left out, because their last row is incomplete. Of equal rows only the first is kept, so that
    repetitions are not learned. An answer without rows is kept, because it is a valid answer.
    """
    sources, records, held_out = answered
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
            "decode.max_length",
            found=f"{most}, which truncates all answers {which}",
            expected="a larger value, with another --workdir, or a checkpoint whose answers end",
        )
    if all(len(example.targets) < 2 for example in labels.train):
        shown = next((text for record in records if (text := record["text"] or "").strip()), "")[:80]
        raise UserError(
            "data.separator",
            found=f"{separator!r}, which splits no answer into rows (the first answer: {shown!r})",
            expected="the separator that the checkpoint writes between rows",
        )
    labels.counts["train"], labels.counts["held_out"] = len(labels.train), len(labels.held_out)
    labels.counts["rows"] = sum(len(example.targets) for example in labels.train)
    return labels
