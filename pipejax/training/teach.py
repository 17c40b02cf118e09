"""Rows without labels: a sequential checkpoint answers texts, and its weights learn to write its answers in rows."""

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from pipejax import config as config_lib
from pipejax import methods, metrics
from pipejax.apps.evaluation import evaluate
from pipejax.config import Config
from pipejax.data import TASKS, make_task
from pipejax.data.batches import pack_size
from pipejax.data.text import sentences
from pipejax.inference.answers import texts
from pipejax.inference.loading import DECODING_KEYS, load
from pipejax.methods import tells_rows_apart
from pipejax.model import sharding
from pipejax.system.errors import UserError
from pipejax.system.files import absolute, write_text
from pipejax.system.progress import Progress
from pipejax.training import labels
from pipejax.training.labels import Labels
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

    `held_out`: sources that are only measured on; None: as `labels.choose_held_out` says.
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
        sources = labels.read_unlabelled(generator, source)
        chosen = labels.choose_held_out(sources, held_out, config.train.seed)
        labels.note_settings(place, generator, sources, held_out=len({sources[i].content for i in chosen}))
        records = labels.answer(place, generator, source, sources)
        made = labels.part(sources, records, chosen, config)
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
