"""Trains a small T5 on the answers of a large one, for the drafter `model`: `pipejax teach --student`.

The small T5 learns the large one's greedy answers (sequence-level distillation, Kim and Rush 2016, arXiv 1606.07947).
If both have encoders of the same sizes, the small T5 shares the large one's encoder, which is frozen, and its decoder
begins with layers of the large one's decoder at even distances (Shleifer and Rush 2020, arXiv 2010.13002). The drafter
then computes the small T5's memory from the outputs of the large one's encoder.
"""

import dataclasses
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax import checkpoint, methods, metrics
from pipejax import config as config_lib
from pipejax.apps.teach.labels import (
    DIRECTORY,
    GREEDILY,
    Answered,
    check_labels_directory,
    label,
    of_checkpoint,
    refuse_untaught,
)
from pipejax.apps.teach.lessons import FULL
from pipejax.checkpoint import Restored
from pipejax.checkpoint.fingerprint import digest, encoder_digest
from pipejax.checkpoint.student import STUDENT
from pipejax.config import Config, TrainConfig
from pipejax.data import TASKS, make_task
from pipejax.data.examples import Example
from pipejax.inference.answers import texts
from pipejax.inference.drafter_parameters import check_vocabulary
from pipejax.inference.loading import load
from pipejax.model import sharding
from pipejax.model.backbone import Backbone
from pipejax.model.t5_config import T5Config
from pipejax.offline.evaluation import decode_examples, require_tokenizer
from pipejax.system import Tree, strict_json
from pipejax.system.errors import UserError
from pipejax.system.files import absolute, look, make_directories, write_text
from pipejax.system.progress import Progress
from pipejax.training.loop import fit
from pipejax.training.run_directory import RunDirectory
from pipejax.training.step import check_batch

logger = logging.getLogger(__name__)

LAYER = re.compile(r"decoder/layers_(\d+)/")
INITIAL = "initial"  # in the run directory: the initial weights of a small T5 that shares the large one's encoder
FIGURES = "drafting.json"


class Student(NamedTuple):
    """A small T5 before its training."""

    model: Backbone | None  # the architecture; None: as in `train.init_from`
    train: TrainConfig
    # The decoder layers of the large T5 with which the small T5 begins; empty: the small T5 has its own encoder.
    layers: tuple[int, ...] = ()


class Labels(NamedTuple):
    """The large T5's answers as examples."""

    train: list[Example]
    held_out: list[Example]
    counts: dict[str, int]


def teach_student(
    directory: str,
    student: str,
    source: str,
    workdir: str | Path,
    *,
    best: bool = False,
    held_out: int | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Answers the sources with the large T5, trains the small T5 and measures its drafts; continues an interrupted run.

    Args:
      directory: the checkpoint of the large T5.
      student: the value of --student: see `student_of`.
      source: the file of sources; "": the training examples of the large T5.
      workdir: the directory of the new run.
      best: use the step of the best evaluation instead of the newest one.
      held_out: the number of sources that are not trained on; None: see `choose_held_out`.
      overrides: settings KEY=VALUE.

    Returns:
      The exit code of `loop.fit`.

    Raises:
      UserError: a setting, the sources or a checkpoint cannot be used.
    """
    with RunDirectory(workdir) as run:
        check_labels_directory(run.path, workdir)
        # The parameters are dropped here, because `load` reads them again.
        large = dataclasses.replace(checkpoint.open_run(directory, best=best, packed=True), items={})
        own = of_checkpoint(overrides)
        generator = load(directory, best=best, overrides=[*GREEDILY, *own])
        require_tokenizer(generator, directory)
        method = generator.method(None)
        method.require("draft", directory, "a checkpoint", "a checkpoint of another method")
        made = student_of(student, large)
        config = student_config(generator.config, made, large, run.path, overrides)
        place = run.path / DIRECTORY
        path = source or write_sources(place / "sources.jsonl", large.config, config.train, held_out)
        logger.info(f"learning from {directory}, {'best ' if best else ''}step {large.step}")
        seed = config.train.seed
        labels = labels_of(label(place, generator, path, method=method.name, held_out=held_out, seed=seed))
        del generator  # frees memory for training
        write_statement(run.path, directory, large, made)
        if made.layers and not (run.path / INITIAL).is_dir():
            save_initial(run.path / INITIAL, config, checkpoint.open_run(directory, best=best), made.layers)
    counts = labels.counts
    logger.info(f"{counts['sources']} answers: {counts['train']} to learn from; {counts['held_out']} held out")
    logger.info(f"left out: {counts['truncated']} truncated answers")
    if code := fit(config, workdir, given={"train": labels.train, "dev": labels.held_out}):
        return code
    found = measure(directory, Path(workdir), labels, best=best, overrides=own)
    calls = ", ".join(f"{value:.2f} with {name}" for name, value in found["calls"].items())
    logger.info(
        f"{found['examples']} held-out sources: decoder calls of an answer by drafter: {calls}; "
        f"{found['accepted']['model']:.1f} % of the drafts of model accepted; all figures in {Path(workdir) / FIGURES}"
    )
    return 0


# The small T5.


def student_of(value: str, large: Restored) -> Student:
    """Returns the small T5 that --student describes.

    Args:
      value: a number of decoder layers, the directory of a checkpoint, or the path of a config.
      large: the large T5.

    Raises:
      UserError: the value does not describe a small T5 that can draft for the large one.
    """
    saved, model = large.config, large.config.model
    assert model is not None, "checked by open_run"
    given = saved.train if saved.train.method != "none" else dataclasses.replace(saved.train, steps=FULL)
    train = dataclasses.replace(given, init_from="", init_best=False, freeze="none", lora_rank=0)
    where = f"--student {value}"
    if value.isdigit():
        most = model.num_decoder_layers
        if not isinstance(model, T5Config):
            name, expected = type(model).__name__, "a T5 or UMT5, or a config as --student"
            raise UserError(where, found=f"a checkpoint of {name}, whose encoder cannot be shared", expected=expected)
        if not 1 <= int(value) < most:
            expected = f"1 to {most - 1}, fewer than the large T5 has"
            raise UserError(where, found=f"{value} decoder layers", expected=expected)
        return _sharing(dataclasses.replace(model, num_decoder_layers=int(value)), train, model)
    if look(value) == "directory":
        other = checkpoint.open_run(value, packed=True).config.model
        assert other is not None, "checked by open_run"
        check_vocabulary(where, other, model)
        return Student(other, dataclasses.replace(train, init_from=str(absolute(value))))
    if look(value) != "file":
        expected = "a number of decoder layers, the directory of a checkpoint, or a config"
        raise UserError("--student", found=value, expected=expected)
    config = config_lib.load(value)
    own = dataclasses.replace(config.train, lora_rank=0)
    if config.model is None:
        if not own.init_from:
            raise UserError(f"{where}: model", found="none", expected="`model=T5Config(...)` or train.init_from")
        other = checkpoint.open_run(own.init_from, best=own.init_best, packed=True).config.model
        assert other is not None, "checked by open_run"
        check_vocabulary(where, other, model)
        return Student(None, own)
    check_vocabulary(where, config.model, model)
    depth = config.model.num_decoder_layers
    same = isinstance(model, T5Config) and config.model == dataclasses.replace(model, num_decoder_layers=depth)
    if same and depth <= model.num_decoder_layers and not own.init_from:
        return _sharing(config.model, own, model)
    return Student(config.model, own)


def _sharing(small: Backbone, train: TrainConfig, large: Backbone) -> Student:
    """Returns a small T5 that shares the encoder of a large one."""
    layers = spaced_layers(small.num_decoder_layers, large.num_decoder_layers)
    return Student(small, dataclasses.replace(train, freeze="encoder"), layers)


def spaced_layers(count: int, of: int) -> tuple[int, ...]:
    """Returns the indices of `count` of `of` layers at even distances, from the first to the last one."""
    return tuple(round(i * (of - 1) / max(count - 1, 1)) for i in range(count))


def initial_params(params: Tree, layers: Sequence[int]) -> Tree:
    """Returns the parameters of a T5 that has only some of the decoder layers of another one.

    Args:
      params: the parameters of the other T5.
      layers: the indices of the other T5's decoder layers, in their order in the new T5.
    """
    kept = {name: tree for name, tree in params["decoder"].items() if not re.fullmatch(r"layers_\d+", name)}
    chosen = {f"layers_{i}": params["decoder"][f"layers_{layer}"] for i, layer in enumerate(layers)}
    return {**params, "decoder": {**kept, **chosen}}


def save_initial(directory: Path, config: Config, large: Restored, layers: Sequence[int]) -> None:
    """Writes the initial weights of a small T5 that shares the encoder of a large one, as a checkpoint."""
    saved = dataclasses.replace(large.config, model=config.model, auxiliary=None)
    checkpoint.save_params(
        directory,
        saved,
        initial_params(large.items["params"], layers),
        tokenizer_source=large.tokenizer_files(),
        conversion=large.metadata.get("conversion"),
    )


def write_statement(run: Path, directory: str, large: Restored, student: Student) -> None:
    """Writes student.json: the checkpoint for which the small T5 drafts, and the fingerprint of a shared encoder.

    Raises:
      UserError: the run directory has another small T5.
    """
    prints = large.arrays["params"]
    known: dict[str, object] = {
        "checkpoint": str(absolute(directory)),
        "step": large.step,
        "params_fp": digest(prints),
        "encoder_fp": encoder_digest(prints) if student.layers else "",
        "decoder_layers": list(student.layers),
    }
    path = run / STUDENT
    if look(path) == "file":
        before = strict_json.loads(path.read_text(encoding="utf-8"))
        if any(before.get(key) != known[key] for key in ("encoder_fp", "decoder_layers")):
            hint = "choose another --workdir"
            raise UserError("--student", found="another small T5", expected=f"the one that {path} describes", hint=hint)
    write_text(path, json.dumps(known, indent=2) + "\n")


def student_config(saved: Config, student: Student, large: Restored, run: Path, overrides: Sequence[str]) -> Config:
    """Returns the config of the run: the large T5's method, data and decoding, with the small T5 and its training.

    Args:
      saved: the config with which the large T5 answers.
      student: the small T5.
      large: the large T5.
      run: the run directory.
      overrides: settings KEY=VALUE.

    Raises:
      UserError: an override is not allowed, or the config cannot be trained.
    """
    train = student.train
    if student.layers:
        train = dataclasses.replace(train, init_from=str(run / INITIAL), init_best=False)
    method = saved.train.method
    if method == "none" and saved.method is None:
        method = methods.default(saved)
    train = dataclasses.replace(train, method=method)
    task = saved.data.task if saved.data.task in TASKS else "jsonl"
    tokenizer = large.tokenizer_files()
    data = dataclasses.replace(saved.data, task=task, train="", dev="", stream=0, split="", tokenizer=str(tokenizer))
    decode = dataclasses.replace(saved.decode, beams=1, draft="none", draft_checkpoint="", trace=False)
    base = dataclasses.replace(saved, model=student.model, auxiliary=None, data=data, train=train, decode=decode)
    config = config_lib.override(base, overrides)
    refuse_untaught(base, config)
    if student.layers and config.train.freeze != "encoder":
        expected = "encoder, since the small T5 shares the encoder of the large one"
        raise UserError("train.freeze", found=config.train.freeze, expected=expected)
    check_batch(config, sharding.make_mesh(**vars(config.mesh)))
    methods.check_training(config)
    metrics.require(config.data.metric or make_task(config.data).metric)
    return config


# The labels.


def write_sources(path: Path, saved: Config, train: TrainConfig, held_out: int | None) -> str:
    """Writes the sources of the large T5's training examples as JSON lines, at most as many as the run reads.

    An existing file is kept.

    Args:
      path: the file.
      saved: the config of the large T5.
      train: the training of the small T5.
      held_out: the number of sources that are not trained on; None: see `choose_held_out`.

    Returns:
      The path.

    Raises:
      UserError: the large T5 has no training examples, or reads them as a stream.
    """
    if path.is_file():
        return str(path)
    known = saved.data.task in TASKS and not saved.data.stream
    examples = make_task(saved.data, saved.grid.row_names).examples("train") if known else []
    if not len(examples):
        found = "none, and the checkpoint has no training examples that can be read again"
        raise UserError("--input", found=found, expected="a file of sources")
    most = min(train.steps * train.batch_size + (held_out or 512), len(examples))
    chosen = np.sort(np.random.default_rng(train.seed).choice(len(examples), most, replace=False)).tolist()
    lines = [json.dumps({"id": examples[i].id, "source": examples[i].source}) + "\n" for i in chosen]
    make_directories(path.parent)
    write_text(path, "".join(lines))
    logger.info(f"the sources are {most} of the {len(examples)} training examples of the large T5")
    return str(path)


def labels_of(answered: Answered) -> Labels:
    """Returns the answers as examples, without truncated answers, whose last row has no end.

    Raises:
      UserError: all answers to learn from, or all held-out answers, are truncated.
    """
    kept: dict[bool, list[Example]] = {False: [], True: []}
    for i, (source, record) in enumerate(zip(answered.sources, answered.records, strict=True)):
        if record["truncated"] is None:
            kept[i in answered.held_out].append(Example(str(source.id), str(source.content), tuple(texts(record))))
    for part, which in ((kept[False], "to learn from"), (kept[True], "that are held out")):
        if not part:
            found, expected = f"only truncated answers {which}", "a checkpoint whose answers end"
            raise UserError("--checkpoint", found=found, expected=expected)
    train, held = kept[False], kept[True]
    count = len(answered.sources)
    counts = {"sources": count, "truncated": count - len(train) - len(held), "train": len(train), "held_out": len(held)}
    return Labels(train, held, counts)


# The measurement.


def measure(directory: str, run: Path, labels: Labels, *, best: bool, overrides: Sequence[str]) -> dict[str, Any]:
    """Decodes the held-out sources without drafts, with the drafter `source`, and with the small T5.

    Returns:
      The content of drafting.json: by drafter, the mean "calls" of an answer and the percentage of drafted tokens that
      were "accepted"; "steps", the mean number of time-steps; "equal_answers", the percentage of answers with the
      same tokens by all drafters; and "labels", the counts.
    """
    calls, accepted, rows = dict[str, float](), dict[str, float](), list[list[Any]]()
    examples = labels.held_out
    progress = Progress("decoding with and without drafts", 3 * len(examples), unit="example")
    steps, step = 0.0, max(checkpoint.Store(run / "checkpoints").steps())
    for name in ("none", "source", "model"):
        more = [f"decode.draft={name}", f"decode.trace={str(name != 'none').lower()}"]
        more += [f"decode.draft_checkpoint={run}"] if name == "model" else []
        generator = load(directory, best=best, overrides=[*GREEDILY, *overrides, *more])
        size = generator.batch_size_for(min(generator.config.decode.batch_size, len(examples)))
        method = generator.default_method
        records, _ = decode_examples(
            generator, examples, method=method, metric="exact", batch_size=size, tick=progress.add
        )
        calls[name] = float(np.mean([record["calls"] for record in records]))
        steps = float(np.mean([record["steps"] for record in records]))
        rows.append([record["row_ids"] for record in records])
        if name != "none":
            asked = [one for record in records for call in record["trace"] for one in call]
            drafted = sum(len(one.drafted) for one in asked)
            accepted[name] = 100 * sum(one.accepted for one in asked) / max(drafted, 1)
    progress.close()
    equal = sum(all(one == same[0] for one in same) for same in zip(*rows, strict=True))
    found = {
        "step": step,
        "examples": len(examples),
        "steps": steps,
        "calls": calls,
        "accepted": accepted,
        "equal_answers": 100 * equal / len(examples),
        "labels": labels.counts,
    }
    write_text(run / FIGURES, json.dumps(found, indent=2) + "\n")
    return found
