"""Tests batches that make the loss NaN: no bit of a parameter or a moment may change, and none may be saved."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lab.faults import runs
from lab.faults.runs import Commands
from pipejax import config as config_lib
from pipejax.checkpoint import Store
from pipejax.config import TrainConfig
from pipejax.data import make_task
from pipejax.data.batches import TrainingBatches
from pipejax.data.tokenizer import Tokenizer
from pipejax.model import sharding
from pipejax.training.step import Trainer

GUARD = "max_bad_steps"  # the setting of the guard against such batches


def many(commands: Commands, scratch: Path, *, trials: int, seed: int) -> dict[str, Any]:
    """Makes a step in each trial on a batch with a NaN or an infinity in its weights, between good steps."""
    if GUARD not in {field.name for field in dataclasses.fields(TrainConfig)}:
        return {"skipped": f"there is no train.{GUARD}", "ok": None}
    config = config_lib.load(runs.prepare(scratch / "tiny"))
    assert config.model is not None
    trainer = Trainer(config)
    examples, tokenizer = make_task(config.data).examples("train"), Tokenizer.load(config.data.tokenizer)
    batches = TrainingBatches(examples, tokenizer, config, config.model)
    state, unchanged, finite = trainer.fresh(), 0, 0
    for number in range(trials):
        chance = random.Random(seed + number)
        arrays = {name: np.array(value) for name, value in batches[number].arrays.items()}
        arrays["weights"][chance.randrange(arrays["weights"].shape[0]), 0] = (np.nan, np.inf)[number % 2]
        before = _bits(state)
        placed = sharding.put_batch(arrays, trainer.mesh)
        state, _ = trainer.step(state, placed, trainer.dropout_key(2 * number + 1))
        unchanged += _bits(state) == before
        good = sharding.put_batch(batches[number].arrays, trainer.mesh)
        state, values = trainer.step(state, good, trainer.dropout_key(2 * number + 2))
        finite += bool(np.isfinite(float(values["loss"]))) and _bits(state) != before
    store = Store(scratch / "checkpoints", writable=True)
    assert store.save(2 * trials, {"params": state.params, "state": state.optimizer}, config=config, wait=True)
    store.close()
    restored = Store(scratch / "checkpoints").restore(2 * trials, lambda _: trainer.templates())
    sound = all(bool(np.isfinite(np.asarray(x)).all()) for x in jax.tree.leaves(restored.items))
    return {
        "trials": trials,
        "no_bit_changed": unchanged,
        "good_steps_after_them": finite,
        "nothing_but_finite_numbers_saved": sound,
        "ok": unchanged == finite == trials and sound,
    }


def _bits(state: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves((state.params, state.optimizer))]
