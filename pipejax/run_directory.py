"""A training run on disk, apart from its checkpoints: lock, config, tokenizer, log; and what may change on resume."""

import dataclasses
import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pipejax import config as config_lib
from pipejax.checkpoint import write_text
from pipejax.config import Config
from pipejax.errors import UserError
from pipejax.tokenizer import Tokenizer

# Everything else decides what is learned or which step counts as best: with another value it is another run.
CHANGEABLE = (
    "train.steps",
    "train.log_every",
    "train.checkpoint_every",
    "train.evaluate_every",
    "train.keep_checkpoints",
)


class RunDirectory:
    """WORKDIR, held by one trainer at a time. Use it as a context manager."""

    def __init__(self, path: str | Path) -> None:
        """Nothing is created or touched yet.

        Raises:
          UserError: the path is taken by a file, cannot be used, or holds something that is no run.
        """
        self.path = Path(path).absolute()
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{path}: found a file; expected a directory to work in")
        if self.path.is_dir() and any(self.path.iterdir()) and not self.is_run:
            raise UserError(
                f"{path}: found a directory with other things in it; expected a new, an empty or a run directory"
            )

    @property
    def is_run(self) -> bool:
        """Whether a trainer has been here."""
        return (self.path / ".lock").is_file()

    def __enter__(self) -> Self:
        """Creates the directory and locks it; the lock goes with the process, however that ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise UserError(
                f"{self.path}: another trainer is at work here; expected a directory of one's own"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets go."""
        self._lock.close()

    def write_config(self, config: Config) -> None:
        """config.json, for people; the one that counts is in each checkpoint's manifest."""
        write_text(self.path / "config.json", config_lib.to_json(config))

    def keep_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Saves the tokenizer with the run, once, whole or not at all."""
        target, partial = self.path / "tokenizer", self.path / ".tokenizer-partial"
        if target.is_dir():
            return
        shutil.rmtree(partial, ignore_errors=True)
        tokenizer.save(partial)
        partial.rename(target)

    def cut_metrics(self, step: int) -> None:
        """Drops lines of later steps than the one that training resumes at, those of stops, and one torn by a crash."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                values = json.loads(line)
                if values["step"] <= step and values.get("event") != "stopped":
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):
                continue
        write_text(path, "".join(kept))

    def log_metrics(self, values: dict[str, Any]) -> None:
        """Appends one object to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(values, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def check_resume(old: Config, new: Config, where: Path) -> None:
    """Raises a UserError with `old -> new` for the first key that must not change when a run is resumed."""
    before, after = config_lib.flat(old), config_lib.flat(new)
    for key in [*before, *(k for k in after if k not in before)]:
        was, now = before.get(key), after.get(key)
        if was != now and key not in CHANGEABLE:
            raise UserError(
                f"{where}: {key}: {was!r} -> {now!r}; expected no change on resume (may change: "
                f"{', '.join(CHANGEABLE)}); take another --workdir for another experiment"
            )


def resolve_model(config: Config, other: Config) -> Config:
    """The config with the architecture of the checkpoint it starts from.

    Raises:
      UserError: the config sets another one itself.
    """
    if config.model is not None and config.model != other.model:
        a, b = config_lib.flat(config.model), config_lib.flat(other.model) if other.model else {}
        key = next(key for key in a if a[key] != b.get(key))
        raise UserError(
            f"model.{key}: found {a[key]!r}; expected {b.get(key)!r} as in the checkpoint it starts from "
            "(leave `model` out to take its architecture)"
        )
    return dataclasses.replace(config, model=other.model)
