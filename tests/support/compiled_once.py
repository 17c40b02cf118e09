"""Compiled programs that outlive the run which made them: tests start many runs of the same few models."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from pipejax.config import Config, TrainConfig
from pipejax.inference.programs import Programs
from pipejax.training import start
from pipejax.training.step import Trainer

# What no compiled step knows of; at a constant rate it does not know how many there are, either.
OUTSIDE = (
    *("objective", "length_group", "shapes", "max_bad_steps", "init_from", "tensorboard", "wandb", "patience"),
    *("log_every", "evaluate_every", "evaluate_examples", "checkpoint_every", "keep_checkpoints", "keep_every"),
)
_trainers: dict[Any, Trainer] = {}
_decoders: dict[Any, dict[Any, Any]] = {}


class _Trainer(Trainer):
    def close(self) -> None:
        """Other runs still compile with it."""


def shared_trainer(config: Config) -> Trainer:
    """One for all configs that compile the same step."""
    outside = (*OUTSIDE, "steps") if config.train.schedule == "constant" else OUTSIDE
    default = TrainConfig()
    train = dataclasses.replace(config.train, **{name: getattr(default, name) for name in outside})
    key = config.model, config.method, config.mesh, train
    if key not in _trainers:
        _trainers[key] = _Trainer(config)
    _trainers[key].config = config
    return _trainers[key]


@contextlib.contextmanager
def compiled_once() -> Iterator[dict[Any, Trainer]]:
    """Runs that begin inside share trainers, and decoders of the same T5 their programs; gives the trainers."""
    make = Programs.__init__

    def share(self: Programs, config: Any, dtype: Any, **options: Any) -> None:
        make(self, config, dtype, **options)
        self._compiled = _decoders.setdefault((config, dtype, tuple(self.devices), self.backend), {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "Trainer", shared_trainer)
        patch.setattr(Programs, "__init__", share)
        yield _trainers
