"""Compiled programs that several runs share: tests start many runs of the same few models."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from pipejax.config import Config, TrainConfig
from pipejax.inference import programs
from pipejax.inference.batch_programs import BatchPrograms
from pipejax.inference.programs import Call, Programs, shapes_of
from pipejax.inference.report import Report
from pipejax.training import start
from pipejax.training.step import Trainer

# Settings on which no compiled step depends; at a constant rate it does not depend on the number of steps, either.
OUTSIDE = (
    *("method", "length_group", "shapes", "max_bad_steps", "init_from", "tensorboard", "wandb", "patience"),
    *("log_every", "evaluate_every", "evaluate_examples", "checkpoint_every", "keep_checkpoints", "keep_every"),
)
_trainers: dict[Any, Trainer] = {}
_programs: dict[Any, Any] = {}


def free_programs() -> None:
    """Frees the shared programs of decoding; tests that need them compile them again."""
    _programs.clear()


class _Trainer(Trainer):
    def close(self) -> None:
        """Does nothing: other runs still use the trainer."""


def shared_trainer(config: Config) -> Trainer:
    """Returns one trainer for all configs that compile the same step."""
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
    """A context in which runs and generators share compiled programs, as if each were the first; yields trainers.

    Functions of a backbone or a loop that a test replaces must not be shared.
    """
    whole, steps = Programs._program, BatchPrograms.program
    decode, encode = programs.decode_batch, programs.encode_batch

    def whole_once(self: Programs, call: Call, report: Report) -> Any:
        # Functions of a test, such as failing ones, are not shared.
        if (programs.decode_batch, programs.encode_batch) != (decode, encode):
            return whole(self, call, report)
        made_for = self.model, self.backend, tuple(self.devices), programs.SLOTS
        shared = *made_for, *call._replace(arguments=()), *shapes_of(call.arguments)
        if shared in _programs:
            if call.key not in self._compiled:
                self._compiled[call.key] = _programs[shared]
                report.shapes, report.compile_seconds = report.shapes + 1, report.compile_seconds + 0.01
            return self._compiled[call.key]
        return _programs.setdefault(shared, whole(self, call, report))

    def steps_once(self: BatchPrograms, name: str, *given: Any, **static: int) -> Any:
        shared = self.functions, name, *static.items(), *shapes_of(given)
        if shared not in _programs:
            _programs[shared] = steps(self, name, *given, **static)
        return _programs[shared]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "Trainer", shared_trainer)
        patch.setattr(Programs, "_program", whole_once)
        patch.setattr(BatchPrograms, "program", steps_once)
        yield _trainers
