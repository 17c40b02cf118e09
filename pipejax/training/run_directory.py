"""A training run on disk, apart from its checkpoints: lock, config, tokenizer, log; and what may change on resume.

Where a run has several processes, only the first one writes here.
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
from typing import IO, Any, Self

from pipejax import config as config_lib
from pipejax.checkpoint import Damaged, Restored, Store, check_place
from pipejax.checkpoint.fingerprint import digest
from pipejax.config import Config
from pipejax.data.tokenizer import Tokenizer, digests
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

# Everything else decides what is learned or which step counts as best: with another value it is another run. The mesh
# says where a run is computed: neither the data order nor the saved state depends on it. A name is a label, and
# copies of the log are copies. Nobody trains on `data.test`, and drafts change no token of an evaluation.
CHANGEABLE = (
    *("name", "data.test", "mesh.data", "mesh.fsdp", "mesh.tensor"),
    "train.shapes",  # those that a run began with are in its checkpoints
    *("train.steps", "train.log_every", "train.checkpoint_every", "train.evaluate_every", "train.evaluate_examples"),
    "train.new_dropout",
    *("train.patience", "train.keep_checkpoints", "train.keep_every"),
    *("train.tensorboard", "train.wandb", "train.mlflow"),
    *("decode.draft", "decode.draft_tokens", "decode.draft_checkpoint"),
)
# Of a place, and of how its files are read, the content counts, by these fingerprints in a checkpoint's metadata. Where
# a former version left them out, another spelling of the same path is all that is known to be the same.
EXAMPLES = {
    "data.train": ("data",),
    "data.dev": ("dev",),
    **dict.fromkeys(
        ("data.data_dir", "data.split", "data.split_seed", "data.csv_delimiter", "data.csv_quotes", "data.skip_bad"),
        ("data", "dev"),
    ),
}
PLACES = (*EXAMPLES, "data.tokenizer", "train.init_from", "train.init_best")


class RunDirectory:
    """WORKDIR, held by one trainer at a time. Use it as a context manager."""

    def __init__(self, path: str | Path) -> None:
        self.path, self.writes = absolute(path), distributed.first()
        self._waiting: list[str] = []  # lines of the log that the disk did not take
        self._made: list[Path] | None = None  # directories of a run that is new; None once it has begun
        self._lock: IO[str] | None = None
        with distributed.fail_together(UserError):
            if self.writes:
                self._check(path)

    def _check(self, path: str | Path) -> None:
        check_place(self.path)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{path}: found a file; expected a directory to work in")
        if self.path.is_dir() and any(self.path.iterdir()) and not self.is_run:
            raise UserError(
                f"{path}: found a directory with other things in it; expected a new, an empty or a run directory"
            )

    @property
    def is_run(self) -> bool:
        return (self.path / ".lock").is_file()

    def __enter__(self) -> Self:
        """Creates the directory and locks it; the lock goes with the process, however that ends."""
        with distributed.fail_together(UserError):
            if self.writes:
                self._take()
        return self

    def _take(self) -> None:
        with writing(self.path):
            made, new = make_directories(self.path), not self.is_run
            self._lock = (self.path / ".lock").open("a")
        if not lock(self._lock.fileno()):
            self._lock.close()
            raise UserError(f"{self.path}: another trainer is at work here; expected a directory of one's own")
        self._made = made if new else None
        with writing(self.path):  # what killed ones have left
            for name in ("config.json", "metrics.jsonl"):
                sweep_text(self.path / name)
            sweep_partial(self.path / "tokenizer")
            sweep(self.path, ".gone-*")

    def __exit__(self, *_: object) -> None:
        if self._lock is None:
            return
        if self._made is not None:
            remove_empty([self.path / "checkpoints"])
            if [path.name for path in self.path.iterdir()] == [".lock"]:
                (self.path / ".lock").unlink()
            remove_empty(self._made)
        self._lock.close()

    def begin(self, config: Config, tokenizer: Tokenizer, step: int, data: Mapping[str, str]) -> None:
        """Brings config.json, the tokenizer and the log to where training goes on from `step`, with this data.

        From step 0 it is another run, whatever stood here: the tokenizer is replaced, and best/ is kept aside.
        """
        with distributed.fail_together(UserError):
            if self.writes:
                self._made = None
                with writing(self.path):
                    # For people; the one that counts is in each checkpoint's manifest.
                    write_text(self.path / "config.json", config_lib.to_json(config))
                    if step == 0:
                        self._remove(self.path / "tokenizer")
                    self._keep_tokenizer(tokenizer)
                    if step == 0:
                        self._set_aside_best(config, data)
                    self._cut_metrics(step)

    def _set_aside_best(self, config: Config, data: Mapping[str, str]) -> None:
        """Unless it is of this very run, which then was killed before its first checkpoint and passes there again."""
        best = self.path / "best"
        if _same_run(best, config, data):
            return
        target = free_name(self.path / "best-before")
        best.rename(target)
        logger.warning(f"{best}: of a run that is lost; kept aside as {target.name}")

    def _remove(self, directory: Path) -> None:
        if directory.is_dir():  # renamed first: a kill leaves no half of it
            gone = free_name(directory.with_name(f".gone-{directory.name}"))
            directory.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _keep_tokenizer(self, tokenizer: Tokenizer) -> None:
        target = self.path / "tokenizer"
        if target.is_dir():
            return
        with new_directory(target) as partial:
            try:
                tokenizer.save(partial)
            except Exception as error:  # what tokenizers raises when the disk is full is no OSError
                raise UserError(f"{target}: cannot be written ({error})") from error

    def _cut_metrics(self, step: int) -> None:
        """Drops lines of later steps than the one that training resumes at, those of ends, and one torn by a crash."""
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
        """The lines of that event; in processes that do not write none."""
        return [values for _, values in self._log() if values["event"] == event] if self.writes else []

    def has(self, event: str, step: int) -> bool:
        """Whether the log has such a line of that step; all processes are told what the first one finds."""
        return distributed.same(any(values["step"] == step for values in self.logged(event)))

    def finish(self, last: Line) -> None:
        """Sees to it that the log of a finished run has its last line: a kill may have come before it was written."""
        if not self.has(last["event"], last["step"]) and self.writes:
            self._cut_metrics(last["step"])
            self.log_metrics(last)

    def log_metrics(self, values: Line) -> None:
        """Appends one object to metrics.jsonl, now or, if the disk does not take it, before the next one."""
        if not self.writes:
            return
        self._waiting.append(json.dumps(values) + "\n")  # ASCII: an id may hold what is no UTF-8
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
                        sync(self.path)  # its name
                except OSError:
                    file.truncate(end)  # no half line
                    raise
        except OSError as error:
            if len(self._waiting) == 1:
                logger.warning(f"{path}: cannot be written ({error.strerror}); its lines wait for room")
            return
        self._waiting.clear()


def _same_run(best: Path, config: Config, data: Mapping[str, str]) -> bool:
    """Whether each step there can be read and is of a run of this config (but for what may change), tokenizer and data.

    Steps of former versions do not tell their data.
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
    """Raises a UserError with `old -> new` for the first key that must not change on resume, but for PLACES."""
    before, after = config_lib.flat(old), config_lib.flat(new)
    for key in [*before, *(k for k in after if k not in before)]:
        was, now = before.get(key), after.get(key)
        if was != now and key not in (*CHANGEABLE, *PLACES):
            raise UserError(
                f"{where}: {key}: {was!r} -> {now!r}; expected no change on resume "
                f"(to go on from its weights, begin another run, with train.init_from={where})"
            )


def check_places(saved: Restored, new: Config, data: Mapping[str, str], where: Path) -> None:
    """Raises a UserError for the first of PLACES with other content than the run began with."""
    before, after = config_lib.flat(saved.config), config_lib.flat(new)
    for key in PLACES:
        was, now = before.get(key), after[key]
        if was != now and not _same_content(key, was, now, saved, new, data):
            raise UserError(
                f"{where}: {key}: {was!r} -> {now!r}; expected the same on resume, or a place with the same content "
                f"(to go on from its weights, begin another run, with train.init_from={where})"
            )


def _same_content(key: str, was: object, now: object, saved: Restored, new: Config, data: Mapping[str, str]) -> bool:
    if key in EXAMPLES and all(saved.metadata.get(name) == data[name] for name in EXAMPLES[key]):
        return True
    if key.startswith("train.init") and (init := saved.metadata.get("init")):
        return init == _params_fp(new.train.init_from, best=new.train.init_best)
    if not (isinstance(was, str) and isinstance(now, str) and was and now):
        return False
    if key == "data.tokenizer" and (files := saved.metadata.get("tokenizer")):
        with tempfile.TemporaryDirectory() as scratch:
            Tokenizer.load(now).save(scratch)
            return digests(Path(scratch)) == files
    return os.path.realpath(was) == os.path.realpath(now)


def _params_fp(directory: str, *, best: bool) -> str:
    store = Store(Path(directory) / ("best" if best else "checkpoints"))
    for step in sorted(store.steps(), reverse=True) if directory else ():
        with contextlib.suppress(Damaged):
            return digest(store.describe(step).arrays["params"])
    return ""


def resolve_model(config: Config, other: Config) -> Config:
    begun = choose_end(dataclasses.replace(config, model=other.model))
    if config.model is not None and config.model != begun.model:
        a, b = (config_lib.flat(Config(model=model)) for model in (config.model, begun.model))
        key = next(key for key in a if key.startswith("model") and a[key] != b.get(key))
        raise UserError(
            f"{key}: found {a[key]!r}; expected {b.get(key)!r} as in the checkpoint it starts from "
            "(leave `model` out to take its architecture)"
        )
    config_lib.check(begun, where=config.train.init_from)
    return begun


def choose_end(config: Config) -> Config:
    """The config with `train.eos_token_id`, if set, as the first end token of the model."""
    model, eos = config.model, config.train.eos_token_id
    if model is None or eos in (-1, model.eos_token_id):
        return config
    if eos not in (ends := model.end_token_ids):
        raise UserError(
            f"train.eos_token_id: found {eos}; expected an end token of the model, {' or '.join(map(str, ends))}"
        )
    others = tuple(end for end in ends if end != eos)
    changed: Any = dataclasses.replace(model, eos_token_id=eos, other_eos_token_ids=others)  # type: ignore[type-var]
    return dataclasses.replace(config, model=changed)
