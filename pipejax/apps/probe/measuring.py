"""Computes the likelihoods of labelled examples' tokens from a checkpoint, and writes one line for each example."""

import dataclasses
import hashlib
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipejax import checkpoint as checkpoints
from pipejax import config as config_lib
from pipejax import methods
from pipejax.apps.probe.likelihoods import HIDDEN, WHOLE, Condition, Meter, Parted, fit_shapes, of_rows
from pipejax.apps.probe.summary import DELAYS, NAMES, ROWS, Summary, chance_of, summary
from pipejax.checkpoint.fingerprint import digest
from pipejax.config import Config
from pipejax.data import OWN_FILES, make_task
from pipejax.data.encoding import encode_example
from pipejax.data.examples import Example
from pipejax.data.text import normalized
from pipejax.data.tokenizer import Tokenizer
from pipejax.inference.loading import override
from pipejax.methods import Ids, Method
from pipejax.model.precision import compute_dtype
from pipejax.offline.resume import Settings, Unfinished
from pipejax.system import Tree, compile_cache, strict_json
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress

logger = logging.getLogger(__name__)

WINDOW = 16  # batches that are sorted by length and written together
DECIMALS = 5  # decimals of nats in the output


class Found(Summary):
    """The content of probe.json: the summary, and facts about the measurement."""

    checkpoint: str
    step: int
    params_fp: str
    input: str
    adapt: str | None
    updates: int


@dataclasses.dataclass(frozen=True)
class ProbeWork:
    """A checkpoint, the examples to measure, and optional examples to adapt to first."""

    config: Config
    params: Tree
    step: int
    params_fp: str
    examples: Sequence[Example]
    targets: Sequence[Parted]  # the targets of the examples
    lessons: Sequence[Parted]


def prepare(
    checkpoint: str,
    source: str,
    learned: str | None,
    *,
    best: bool,
    limit: int | None,
    most: int,
    overrides: Sequence[str],
) -> ProbeWork:
    """Opens the checkpoint, and reads and encodes the examples; writes nothing.

    Args:
      checkpoint: the run directory.
      source: the file of examples to measure.
      learned: the file of examples to adapt to; None: no adaptation.
      best: use the step of the best evaluation instead of the newest one.
      limit: the most examples to measure; None: all.
      most: the most examples to adapt to.
      overrides: settings KEY=VALUE.

    Raises:
      UserError: the checkpoint, a setting or an example cannot be used.
    """
    config_lib.check_taken(overrides, "probe")
    compile_cache.use_cache()
    restored = checkpoints.open_run(checkpoint, best=best, packed=not learned)
    config = override(restored.config, overrides, where="--set")
    method = methods.make(methods.default(config), config)
    method.require("probe", f"--checkpoint {checkpoint}", "a checkpoint", "another checkpoint")
    if method.choices:
        raise UserError(
            checkpoint,
            found=f"{method.choices} correct tokens per slot",
            expected="one correct token, whose likelihood is measured",
        )
    tokenizer = checkpoints.tokenizer_of(restored)
    if tokenizer is None:
        raise UserError(checkpoint, found="no tokenizer", expected="a checkpoint with a tokenizer, to read text")
    method.check_text(tokenizer)
    examples = _examples(source, config)[:limit]
    targets = _encode(source, examples, config, method, tokenizer)
    if not any(target.row.any() for target in targets):
        raise UserError(
            source, found=f"only one row in each of {len(targets)} answers", expected="answers with several rows"
        )
    lessons = list[Parted]()
    if learned:
        found = _examples(learned, config)
        if len(found) > most:
            logger.info(f"{learned}: {most} of {len(found)} examples are drawn at random for --adapt")
            found = [found[i] for i in sorted(random.Random(config.train.seed).sample(range(len(found)), most))]
        measured = {normalized(example.source) for example in examples}
        if both := sum(normalized(example.source) in measured for example in found):
            logger.warning(f"{learned}: {both} of {len(found)} sources are measured as well, so costs may be too low")
        lessons = _encode(learned, found, config, method, tokenizer)
    params_fp = digest(restored.arrays["params"])
    return ProbeWork(config, restored.items["params"], restored.step, params_fp, examples, targets, lessons)


def _examples(source: str, config: Config) -> Sequence[Example]:
    task = config.data.task if config.data.task in OWN_FILES else "jsonl"
    data = dataclasses.replace(config.data, task=task, test=source, split="")
    return make_task(data, config.grid.row_names).examples("test")


def _encode(
    source: str, examples: Sequence[Example], config: Config, method: Method, tokenizer: Tokenizer
) -> list[Parted]:
    """Encodes the examples, with the row of each slot; warns about truncated ones."""
    model, targets = config.model, list[Parted]()
    assert model is not None
    ids = Ids.of(model)
    for example in examples:
        encoded = encode_example(example, tokenizer, config, model)
        targets.append(of_rows(encoded, method.rows_of(encoded.target, example.targets, tokenizer, ids)))
    for what, key, cut in (
        ("answers", "max_target", sum(target.encoded.target_was_cut for target in targets)),
        ("sources", "max_source", sum(target.encoded.source_was_cut for target in targets)),
    ):
        if cut:
            logger.warning(
                f"{source}: {cut} of {len(targets)} {what} are truncated to data.{key} = {getattr(config.data, key)}"
            )
    return targets


def conditions(targets: Sequence[Parted]) -> list[Condition]:
    """Returns the conditions of a measurement.

    The conditions are WHOLE, each Δt of DELAYS, HIDDEN, and WHOLE without each single row that later rows could see.
    """
    height = min(max(int(target.row.max()) for target in targets), ROWS - 1)
    seen = [Condition(WHOLE), *map(Condition, DELAYS), Condition(HIDDEN)]
    return seen + [Condition(WHOLE, row) for row in range(height)]


def measure(work: ProbeWork, unfinished: Unfinished, *, batch_size: int) -> Summary:
    """Measures all examples, writes their lines, and returns the summary."""
    size, output, begin = min(batch_size, len(work.targets)), Path(unfinished.target), unfinished.records
    model, asked = work.config.model, conditions(work.targets)
    assert model is not None
    module = model.module(dtype=compute_dtype(work.config.decode.dtype))
    meter = Meter(module, work.params, asked, fit_shapes(work.targets, size, WINDOW), size)
    progress = Progress("measuring", len(work.targets), unit="example", start=begin)
    try:
        for first in range(begin, len(work.targets), size * WINDOW):
            part = range(first, min(first + size * WINDOW, len(work.targets)))
            found = dict[int, np.ndarray]()
            for batch in meter.batches([work.targets[i] for i in part]):
                places = [part[i] for i in batch]
                found |= zip(places, meter.measure([work.targets[i] for i in places]), strict=True)
                progress.add(len(places))
            for i in part:
                unfinished.write(_line(work.examples[i], work.targets[i], found[i]))
    except KeyboardInterrupt:
        logger.info(f"{output}: --resume continues after the measured examples")
        raise
    finally:
        progress.close()
        unfinished.close()
    unfinished.end()
    with output.open(encoding="utf-8") as lines:
        return summary(map(strict_json.loads, lines), chance_of(_tokens(work.targets), model.vocab_size))


def _tokens(targets: Sequence[Parted]) -> list[int]:
    """Returns all tokens that are measured."""
    flat = [target.encoded.target for target in targets]
    return np.concatenate([one.targets[one.weights > 0] for one in flat]).tolist()


def probe_settings(work: ProbeWork) -> Settings:
    """Returns the settings that the lines depend on, except the number of updates."""
    return {
        "input": _digest_of(work.targets, [example.id for example in work.examples]),
        "--adapt": _digest_of(work.lessons),
        "weights": work.params_fp,
        "decode.dtype": compute_dtype(work.config.decode.dtype).name,
        "train.learning_rate": work.config.train.learning_rate,
        "conditions": [*NAMES, len(conditions(work.targets)) - len(NAMES)],
    }


def _digest_of(targets: Sequence[Parted], ids: Sequence[str] = ()) -> str:
    found = hashlib.sha256(json.dumps([*ids]).encode())
    for target in targets:
        for array in (target.encoded.source, *target.encoded.target, target.row):
            found.update(array.tobytes())
    return found.hexdigest()


def _line(example: Example, target: Parted, found: np.ndarray) -> bytes:
    """Returns the JSON line of an example, from its likelihoods f32 [C, N].

    The line has the likelihoods by condition, row and token, and the cost of hiding each row.
    """
    counts = target.encoded.target.weights > 0
    rows = [np.flatnonzero(counts & (target.row == row)) for row in range(int(target.row.max()) + 1)]
    nll = {name: [_rounded(found[c, row]) for row in rows] for c, name in enumerate(NAMES)}
    missing = found[len(NAMES) :] - found[0]
    without = [_rounded(missing[:i, row].sum(axis=1)) for i, row in enumerate(rows[:ROWS])]
    return (json.dumps({"id": example.id, "nll": nll, "without": without}, ensure_ascii=False) + "\n").encode()


def _rounded(numbers: np.ndarray) -> list[float]:
    return [round(float(number), DECIMALS) for number in numbers]
