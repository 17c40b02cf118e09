"""Trains the tagger of the drafter `spans` on a checkpoint's own answers, with the checkpoint's weights frozen."""

import collections
import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipejax import config as config_lib
from pipejax import methods
from pipejax.apps.teach.labels import (
    DIRECTORY,
    GREEDILY,
    Answered,
    check_labels_directory,
    label,
    of_checkpoint,
    refuse_untaught,
)
from pipejax.apps.teach.tags import STOP, SpanTags
from pipejax.config import Config
from pipejax.data import TASKS
from pipejax.data.encoding import encode_source
from pipejax.data.examples import Example
from pipejax.data.tokenizer import Tokenizer
from pipejax.inference.answers import Record
from pipejax.inference.loading import load
from pipejax.methods import PipelinedMethod, prefix_ids, spell
from pipejax.offline.evaluation import decode_examples, require_tokenizer
from pipejax.system.errors import UserError
from pipejax.system.files import absolute, write_text
from pipejax.system.progress import Progress
from pipejax.training.loop import fit
from pipejax.training.run_directory import RunDirectory

logger = logging.getLogger(__name__)

STEPS, RATE = 1000, 0.03  # updates, and AdamW's rate, which falls to 0
MOST_ROWS, LONGEST = 64, 64  # the most rows of an answer, and the most tokens of a row, that a tagger drafts
ENTRIES, REPEATED = 128, 0.005  # the most entries of the table, and the least share of answers that have an entry
PAIRS = 1000  # the most pairs of `SpanTags.initial`


@dataclasses.dataclass(frozen=True)
class Lessons:
    """The examples of a training, the held-out examples, and the description of the tagger."""

    train: list[Example]
    held_out: list[Example]
    records: list[Record]  # the answers of the held-out examples
    tags: SpanTags
    counts: dict[str, int]  # numbers of sources, answers and rows

    def lines(self) -> list[str]:
        """Returns the counts as lines for the log."""
        c = self.counts
        return [
            f"{c['sources']} answers: {c['train']} to learn from, with {c['rows']} rows; {c['held_out']} held out",
            f"left out: {c['truncated']} truncated answers, {c['other']} that training would read as other tokens",
            f"rows: {c['spans']} are in their source, {c['entries']} are among {len(self.tags.table)} repeated rows, "
            f"{c['rows'] - c['spans'] - c['entries']} are neither and are not drafted",
        ]


def teach_tagger(
    checkpoint: str,
    source: str,
    workdir: str | Path,
    *,
    best: bool = False,
    held_out: int | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Answers the sources, trains the tagger and counts the decoder calls; continues an interrupted run in `workdir`.

    Args:
      checkpoint: the directory of the run that writes rows.
      source: the file of sources.
      workdir: the directory of the new run.
      best: use the step of the best evaluation instead of the newest one.
      held_out: the number of sources that are not trained on; None: see `choose_held_out`.
      overrides: settings KEY=VALUE.

    Returns:
      The exit code of `loop.fit`.

    Raises:
      UserError: a setting, the sources or the checkpoint cannot be used.
    """
    with RunDirectory(workdir) as directory:
        check_labels_directory(directory.path, workdir)
        own = of_checkpoint(overrides)
        generator = load(checkpoint, best=best, overrides=[*GREEDILY, "decode.draft=none", *own])
        config = training_config(generator.config, checkpoint, overrides, best=best)
        tokenizer = require_tokenizer(generator, checkpoint)
        logger.info(f"learning from {checkpoint}, {'best ' if best else ''}step {generator.origin['step']}")
        place, seed, method = directory.path / DIRECTORY, config.train.seed, PipelinedMethod.name
        answered = label(place, generator, source, method=method, held_out=held_out, seed=seed)
        made = collect(answered, config, tokenizer)
        del generator  # frees memory for training
    for line in made.lines():
        logger.info(line)
    config = dataclasses.replace(config, auxiliary=made.tags)
    if code := fit(config, workdir, given={"train": made.train, "dev": made.held_out}):
        return code
    result = measure_calls(directory.path, made)
    logger.info(
        f"{result['examples']} held-out sources: {result['calls']:.2f} decoder calls before, "
        f"{result['drafted_calls']:.2f} with decode.draft=spans; all figures in {Path(workdir) / 'tagger.json'}"
    )
    return 0


def training_config(saved: Config, checkpoint: str, overrides: Sequence[str], *, best: bool = False) -> Config:
    """Returns the config of the run; the fields of its tagger are not set yet.

    Raises:
      UserError: an override is not allowed, or the checkpoint does not write rows.
    """
    if saved.method is not None or methods.default(saved) != PipelinedMethod.name:
        found = f"a checkpoint trained for {methods.trained(saved).name} decoding"
        raise UserError(checkpoint, found=found, expected="a pipelined one, whose answers have rows")
    assert saved.model is not None
    train = dataclasses.replace(
        saved.train,
        init_from=str(absolute(checkpoint)),
        init_best=best,
        freeze="backbone",
        lora_rank=0,
        steps=STEPS,
        optimizer="adamw",
        learning_rate=RATE,
        schedule="linear",
        warmup_steps=STEPS // 20,
        warmup_share=0.0,
        weight_decay=0.0,
        evaluate_every=STEPS,
        checkpoint_every=STEPS,
        patience=0,
    )
    task = saved.data.task if saved.data.task in TASKS else "jsonl"
    data = dataclasses.replace(saved.data, task=task, train="", dev="", tokenizer="")
    decode = dataclasses.replace(saved.decode, draft="none", draft_checkpoint="", trace=False)
    base = dataclasses.replace(saved, data=data, train=train, decode=decode, auxiliary=SpanTags())
    config = config_lib.override(base, overrides)
    refuse_untaught(base, config)
    return config


def collect(answered: Answered, config: Config, tokenizer: Tokenizer) -> Lessons:
    """Returns the complete answers as examples, and the tagger whose fields describe these answers.

    Args:
      answered: the sources with the checkpoint's answers.
      config: the config of the run.
      tokenizer: the tokenizer of the run.

    Raises:
      UserError: no answer is left to learn from, or no answer is held out.
    """
    assert config.model is not None
    sources, answers, chosen = answered
    ends, counts = config.model.end_token_ids, collections.Counter[str](sources=len(sources))
    train, held_out, records = list[Example](), list[Example](), list[Record]()
    names = [prefix_ids(tokenizer, name, "grid.row_names", ends) for name in config.grid.row_names]
    finder = SpanFinder(tokenizer)
    spans, others = list[list[int]](), collections.Counter[tuple[int, ...]]()
    initial = collections.defaultdict[int, collections.Counter[int]](collections.Counter)
    most_rows = 0
    for i, (source, record) in enumerate(zip(sources, answers, strict=True)):
        rows, ids = [row for row in record["rows"] or () if row.strip()], record["row_ids"]
        if record["truncated"]:
            counts["truncated"] += 1
            continue
        size = sum(map(len, ids)) + len(ids) + 1
        fits = size <= config.data.max_target and all(
            (*row[: len(name)],) == name for row, name in zip(ids, names, strict=False)
        )
        if not fits or (names and len(ids) != len(names)) or spell(rows, tokenizer, ends) != ids:
            counts["other"] += 1
            continue
        example = Example(str(source.id), str(source.content), tuple(rows))
        if i in chosen:
            held_out.append(example)
            records.append(record)
            continue
        train.append(example)
        counts["rows"] += len(ids)
        most_rows = max(most_rows, len(ids))
        of_source = np.asarray(encode_source(source.content, config.data, tokenizer, config.model).ids)
        for number, row in enumerate(ids):
            value = row[len(names[number]) :] if names else row
            if not 0 < len(value) < LONGEST:
                continue
            place = finder.find(value, of_source)
            if place is None:
                others[number if names else 0, *value] += 1
                continue
            counts["spans"] += 1
            spans.append(value)
            initial[int(of_source[place])][value[0]] += 1
    if not train or not held_out:
        which = "to learn from" if not train else "that are held out"
        expected = "answers that end, and rows whose texts have the same tokens in training"
        raise UserError("--input", found=f"no complete answers {which}", expected=expected)
    least = max(2, REPEATED * len(train))
    table = [(ids, count) for ids, count in others.most_common(ENTRIES) if count >= least]
    counts["entries"] = sum(count for _, count in table)
    longest = max([2, *(len(ids) + 1 for ids in spans), *(len(ids) for ids, _ in table)])
    changed = collections.Counter[tuple[int, int]]()
    for token, begins in initial.items():
        ((first, count),) = begins.most_common(1)
        if first != token:
            changed[token, first] = count
    tags = SpanTags(
        rows=min(max(most_rows, 1), MOST_ROWS),
        longest=longest,
        names=_joined(names),
        entries=_joined([ids for ids, _ in table]),
        initial=tuple(token for pair, _ in changed.most_common(PAIRS) for token in pair),
    )
    counts["train"], counts["held_out"] = len(train), len(held_out)
    keys = ("sources", "train", "held_out", "truncated", "other", "rows", "spans", "entries")
    return Lessons(train, held_out, records, tags, {key: counts[key] for key in keys})


def _joined(lists: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Joins lists of ids to one tuple, with STOP after each list."""
    return tuple(token for ids in lists for token in (*ids, STOP))


class SpanFinder:
    """Finds rows in sources. The first tokens of a row and of its span may differ, if these tokens have the same text.

    For example, the word "red" is another token after a bracket than at the beginning of a row.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.known = tokenizer, dict[int, str]()

    def text(self, token: int) -> str:
        """Returns the text of a token without spaces around it; if this text is blank, a text unique to the token."""
        if token not in self.known:
            self.known[token] = self.tokenizer.decode([token]).strip() or f" {token}"
        return self.known[token]

    def find(self, row: Sequence[int], source: np.ndarray) -> int | None:
        """Returns the first place of a row in a source, preferably with the same first token; None if it has none."""
        last = len(source) - len(row) + 1
        if last <= 0:
            return None
        same = np.ones(last, bool)
        for offset, token in enumerate(row[1:], 1):
            same &= source[offset : offset + last] == token
        places = np.flatnonzero(same)
        equal = places[source[places] == row[0]]
        if len(equal):
            return int(equal[0])
        text = self.text(row[0])
        return next((int(place) for place in places if self.text(int(source[place])) == text), None)


def measure_calls(run: Path, made: Lessons) -> dict[str, object]:
    """Counts the decoder calls of the held-out answers with and without the tagger.

    Returns:
      The content of tagger.json: "calls" and "drafted_calls", means without and with drafts; "equal_answers", the
      percentage of answers with the same tokens; and "labels", the counts.
    """
    generator = load(run, overrides=["decode.draft=spans"])
    progress = Progress("counting decoder calls", len(made.held_out), unit="example")
    size = generator.batch_size_for(min(generator.config.decode.batch_size, len(made.held_out)))
    records, _ = decode_examples(
        generator, made.held_out, method=generator.default_method, metric="exact", batch_size=size, tick=progress.add
    )
    progress.close()
    count = len(records)
    found = {
        **generator.origin,
        "examples": count,
        "calls": sum(record["calls"] for record in made.records) / count,
        "drafted_calls": sum(record["calls"] for record in records) / count,
        "equal_answers": 100
        * sum(a["row_ids"] == b["row_ids"] for a, b in zip(records, made.records, strict=True))
        / count,
        "labels": made.counts,
    }
    write_text(run / "tagger.json", json.dumps(found, indent=2) + "\n")
    return found
