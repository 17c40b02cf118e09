"""A training run on disk, apart from its checkpoints: lock, config, tokenizer and log; and the checks on resume.

In a run with several processes, only the first process writes here.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

from pipejax import config as config_lib
from pipejax.checkpoint import Damaged, Restored, Store, check_place
from pipejax.checkpoint.fingerprint import digest
from pipejax.config import SETTINGS, Config
from pipejax.data.tokenizer import Tokenizer, digests
from pipejax.model.backbone import Backbone
from pipejax.system import distributed
from pipejax.system.errors import UserError
from pipejax.system.files import (
    absolute,
    free_name,
    lock,
    make_directories,
    new_directory,
    remove_empty,
    sweep,
    sweep_partial,
    sweep_text,
    sync,
    write_text,
    writing,
)
from pipejax.training import run_log
from pipejax.training.run_log import Line

logger = logging.getLogger(__name__)

# Settings that name a place, or say how its files are read. On resume their content is compared, and not their value:
# `Facts.resume` names the fingerprints of the content in a checkpoint's metadata. Checkpoints of older releases may
# lack the fingerprints; then only another spelling of the same path counts as the same.
PLACES = [key for key, facts in SETTINGS.items() if isinstance(facts.get("resume"), tuple)]


class RunDirectory:
    """The directory of a run (--workdir), locked by one training process at a time. Use it as a context manager."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.writes = absolute(path), distributed.first()
        self._waiting: list[str] = []  # lines of the log that could not be written yet
        # Directories created for a new run, removed if it does not begin; None once it has begun.
        self._made: list[Path] | None = None
        self._lock: IO[str] | None = None
        with distributed.fail_together(UserError):
            if self.writes:
                self._check(path)

    def _check(self, path: str | Path) -> None:
        check_place(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(path, found="a file", expected="a directory")
        if self.path.is_dir() and any(self.path.iterdir()) and not self.is_run:
            raise UserError(
                path, found="a directory with other files", expected="a new directory, an empty one or a run directory"
            )

    @property
    def is_run(self) -> bool:
        """Whether the directory already holds a run."""
        return (self.path / ".lock").is_file()

    def __enter__(self) -> Self:
        """Creates the directory and locks it. The lock ends with the process, even if the process is killed.

        Raises:
          UserError: another process holds the lock, or the directory cannot be written.
        """
        with distributed.fail_together(UserError):
            if self.writes:
                self._create_and_lock()
        return self

    def _create_and_lock(self) -> None:
        """Creates and locks the directory in the first process, and removes temporary files of killed processes."""
        with writing(self.path):
            made, new = make_directories(self.path), not self.is_run
            self._lock = (self.path / ".lock").open("a")
        if not lock(self._lock.fileno()):
            self._lock.close()
            raise UserError(self.path, "in use by another training process", expected="another --workdir")
        self._made = made if new else None
        with writing(self.path):  # remove temporary files of killed processes
            for name in ("config.json", "metrics.jsonl"):
                sweep_text(self.path / name)
            sweep_partial(self.path / "tokenizer")
            sweep(self.path, ".gone-*")

    def __exit__(self, *_: object) -> None:
        """Releases the lock. If the run has not begun, removes the directories that `__enter__` created."""
        if self._lock is None:
            return
        if self._made is not None:
            remove_empty([self.path / "checkpoints"])
            if [path.name for path in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
            remove_empty(self._made)
        self._lock.close()

    def begin(self, config: Config, tokenizer: Tokenizer, step: int, data: Mapping[str, str]) -> None:
        """Sets config.json, the tokenizer and the log to the state from which training continues.

        From step 0 a new run begins, even if the directory holds an older one: the tokenizer is replaced, and best/ is
        renamed to keep it.

        Args:
          config: the resolved config.
          tokenizer: the tokenizer, which is written if the run has none yet.
          step: the step to continue from; later lines of the log are removed.
          data: the fingerprints of the examples, by name.
        """
        with distributed.fail_together(UserError):
            if self.writes:
                self._made = None
                with writing(self.path):
                    # For people to read; on resume the config in each checkpoint's manifest counts.
                    write_text(self.path / "config.json", config_lib.to_json(config))
                    if step == 0:
                        self._remove(self.path / "tokenizer")
                    self._keep_tokenizer(tokenizer)
                    if step == 0:
                        self._set_aside_best(config, data)
                    self._cut_metrics(step)

    def _set_aside_best(self, config: Config, data: Mapping[str, str]) -> None:
        """Renames best/ unless it belongs to this run.

        The directory best/ belongs to this run if the run was killed before its first checkpoint: the run then starts
        from step 0 again and passes the same steps.
        """
        best = self.path / "best"
        if _same_run(best, config, data):
            return
        target = free_name(self.path / "best-before")
        best.rename(target)
        logger.warning(f"{best}: belongs to a lost run; renamed to {target.name}")

    def _remove(self, directory: Path) -> None:
        """Removes a directory in two steps, so that an interruption never leaves a partial one under its name."""
        if directory.is_dir():  # renamed first, so that a kill during the removal leaves no partial directory
            gone = free_name(directory.with_name(f".gone-{directory.name}"))
            directory.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _keep_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Writes the tokenizer's files, completely or not at all, if the run has none yet."""
        target = self.path / "tokenizer"
        if target.is_dir():
            return
        with new_directory(target) as partial:
            try:
                tokenizer.save(partial)
            except Exception as error:
                # The tokenizers library raises other exceptions than OSError when the disk is full.
                raise UserError(target, f"cannot be written ({error})") from error

    def _cut_metrics(self, step: int) -> None:
        """Removes from the log the lines after step `step`, the lines of earlier ends, and a line torn by a crash."""
        if (self.path / "metrics.jsonl").is_file():
            kept = (
                line
                for line, values in self._log()
                if values["step"] <= step and values["event"] not in ("stopped", "end")
            )
            write_text(self.path / "metrics.jsonl", "".join(line + "\n" for line in kept))

    def _log(self) -> list[tuple[str, Line]]:
        path = self.path / "metrics.jsonl"
        return run_log.read_log(path) if path.is_file() else []

    def logged(self, event: str) -> list[Line]:
        """Returns the lines of an event; an empty list in processes that do not write."""
        return [values for _, values in self._log() if values["event"] == event] if self.writes else []

    def has(self, event: str, step: int) -> bool:
        """Returns whether the log has a line of this event and step. All processes get the answer of the first one."""
        return distributed.same(any(values["step"] == step for values in self.logged(event)))

    def finish(self, last: Line) -> None:
        """Adds the last line to the log of a finished run if it is missing, as after a kill before it was written."""
        if not self.has(last["event"], last["step"]) and self.writes:
            self._cut_metrics(last["step"])
            self.log_metrics(last)

    def log_metrics(self, values: Line) -> None:
        """Appends a line to metrics.jsonl and syncs it to the disk.

        If the disk refuses the line, it is kept in memory, written before the next line, and a warning is logged once.
        """
        if not self.writes:
            return
        self._waiting.append(json.dumps(values) + "\n")  # ASCII, because an id may hold text that is not valid UTF-8
        path = self.path / "metrics.jsonl"
        text = "".join(self._waiting).encode()
        try:
            with path.open("ab", buffering=0) as file:
                end = file.seek(0, os.SEEK_END)
                try:
                    if file.write(text) < len(text):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    os.fsync(file.fileno())
                    if end == 0:
                        sync(self.path)  # the directory entry of a new file
                except OSError:
                    file.truncate(end)  # removes a partially written line
                    raise
        except OSError as error:
            if len(self._waiting) == 1:
                logger.warning(f"{path}: cannot be written ({error.strerror}); its lines are kept until there is space")
            return
        self._waiting.clear()


def _same_run(best: Path, config: Config, data: Mapping[str, str]) -> bool:
    """Returns whether every step in `best` can be read and belongs to a run with this config, tokenizer and data.

    Settings that may change on resume are not compared. Steps of older releases carry no fingerprints of the data; a
    missing fingerprint counts as equal.
    """
    store = Store(best)
    try:
        for step in store.steps():
            found = store.describe(step)
            check_resume(found.config, config, best)
            check_places(found, config, data, best)
            found.tokenizer_files()
            if any(found.metadata.get(name, known) != known for name, known in data.items()):
                return False
    except (Damaged, UserError):
        return False
    return True


def check_resume(old: Config, new: Config, where: Path) -> None:
    """Raises a UserError with `old -> new` for the first setting that must not change on resume.

    The settings in PLACES are left to `check_places`, which compares the content. `Facts.resume` is True for settings
    that may change. Every other setting affects what the model learns or which step is the best, so changing it makes
    another run. The mesh affects neither the order of the data nor the saved state. `name` is only a label, trackers
    hold only copies of the log, `data.test` is not used in training, the checkpoints keep the shapes that the run began
    with, and drafts do not change the tokens of an evaluation.
    """
    before, after = config_lib.flat(old), config_lib.flat(new)
    for key in [*before, *(k for k in after if k not in before)]:
        was, now = before.get(key), after.get(key)
        if was != now and not SETTINGS.get(key, {}).get("resume"):
            raise UserError(
                f"{where}: {key}",
                f"{was!r} -> {now!r}",
                expected="no change on resume",
                hint=f"to continue from its weights, start another run with train.init_from={where}",
            )


def check_places(saved: Restored, new: Config, data: Mapping[str, str], where: Path) -> None:
    """Raises a UserError for the first setting in PLACES whose content differs from the one the run began with."""
    before, after = config_lib.flat(saved.config), config_lib.flat(new)
    for key in PLACES:
        was, now = before.get(key), after[key]
        if was != now and not _same_content(key, was, now, saved, new, data):
            raise UserError(
                f"{where}: {key}",
                f"{was!r} -> {now!r}",
                expected="the same on resume, or a path with the same content",
                hint=f"to continue from its weights, start another run with train.init_from={where}",
            )


def _same_content(key: str, was: object, now: object, saved: Restored, new: Config, data: Mapping[str, str]) -> bool:
    """Returns whether two values of a setting in PLACES have the same content, by fingerprints or else by path."""
    names = SETTINGS[key]["resume"]
    assert isinstance(names, tuple)
    if data.keys() >= {*names} and all(saved.metadata.get(name) == data[name] for name in names):
        return True
    if names == ("init",) and (init := saved.metadata.get("init")):
        return init == _params_fp(new.train.init_from, best=new.train.init_best)
    if not (isinstance(was, str) and isinstance(now, str) and was and now):
        return False
    if names == ("tokenizer",) and (files := saved.metadata.get("tokenizer")):
        with tempfile.TemporaryDirectory() as scratch:
            Tokenizer.load(now).save(scratch)
            return digests(Path(scratch)) == files
    return os.path.realpath(was) == os.path.realpath(now)


def _params_fp(directory: str, *, best: bool) -> str:
    """Returns the fingerprint of the parameters in the newest readable step, or "" if there is none."""
    store = Store(Path(directory) / ("best" if best else "checkpoints"))
    for step in sorted(store.steps(), reverse=True) if directory else ():
        with contextlib.suppress(Damaged):
            return digest(store.describe(step).arrays["params"])
    return ""


def resolve_model(config: Config, other: Config) -> Config:
    """Returns the config with the architecture of the checkpoint that training starts from.

    Raises:
      UserError: the config has another architecture.
    """
    begun = choose_end(dataclasses.replace(config, model=other.model))
    if config.model is not None and config.model != begun.model:
        a, b = (config_lib.flat(Config(model=model)) for model in (config.model, begun.model))
        key = next(key for key in {**a, **b} if key.startswith("model") and a.get(key) != b.get(key))
        found, expected = (repr(x[key]) if key in x else "T5Config" for x in (a, b))  # the only class without a name
        raise UserError(
            key,
            found=found,
            expected=f"{expected} as in the checkpoint that the run starts from",
            hint="leave `model` out to take its architecture",
        )
    config_lib.check(begun, where=config.train.init_from)
    return begun


def choose_end(config: Config) -> Config:
    """Returns the config with `train.eos_token_id`, if set, as the first end token of the model.

    Raises:
      UserError: the id is not an end token of the model.
    """
    model, eos = config.model, config.train.eos_token_id
    if model is None or eos in (-1, model.eos_token_id):
        return config
    if eos not in (ends := model.end_token_ids):
        raise UserError(
            "train.eos_token_id", found=f"{eos}", expected=f"an end token of the model, {' or '.join(map(str, ends))}"
        )
    others = tuple(end for end in ends if end != eos)
    changed: Backbone = dataclasses.replace(model, eos_token_id=eos, other_eos_token_ids=others)  # type: ignore[type-var]
    return dataclasses.replace(config, model=changed)
