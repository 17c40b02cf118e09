"""Saves steps in the background, commits each step completely or not at all, and verifies a step before its use.

`steps.py` commits the files of a step, `arrays.py` writes its arrays. A failed save leaves all earlier steps unchanged.
`Best` keeps the best step of a run: on disk, or in memory as long as the disk cannot be written.
"""

import dataclasses
import errno
import functools
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import jax
import numpy as np

from pipejax import config as config_lib
from pipejax.checkpoint import arrays as arrays_lib
from pipejax.checkpoint import manifest as manifest_lib
from pipejax.checkpoint.arrays import Saving, Writes, wait_for
from pipejax.checkpoint.fingerprint import Fingerprints, fingerprints, first_difference
from pipejax.checkpoint.manifest import Damaged, Manifest, Metadata, on_host
from pipejax.checkpoint.steps import Steps
from pipejax.checkpoint.trouble import hush_stragglers, metadata_digests, reading, reason_of
from pipejax.config import Config
from pipejax.data.tokenizer import check_digests, digests
from pipejax.model import auxiliary
from pipejax.model.auxiliary import ITEM
from pipejax.system import Tree, distributed, environment, strict_json
from pipejax.system.errors import UserError
from pipejax.system.files import absolute, look, make_directories, read_small, writing

logger = logging.getLogger(__name__)

LOOKS = 20  # attempts to read the newest step before giving up, when a training run keeps replacing steps

T = TypeVar("T")
Expect = Callable[[Config], Mapping[str, Tree]]  # maps a step's config to templates of the wanted items


@dataclasses.dataclass(frozen=True)
class Restored:
    """A verified step."""

    step: int
    items: dict[str, Tree]  # trees of arrays by name, such as "params"
    config: Config
    metadata: Metadata
    arrays: dict[str, Fingerprints]  # fingerprints by item and path
    path: Path  # the step's directory
    is_former: bool = False  # whether a release without `data.special_tokens` saved the step

    def tokenizer_files(self) -> Path | None:
        """Returns the directory of the run's tokenizer, or None if the run has no tokenizer.

        Raises:
          UserError: the files have changed since the step was saved. Steps of older releases have no digests, so their
            files are not compared.
        """
        directory = self.path.parents[1] / "tokenizer"
        if look(directory) != "directory":
            return None  # the run was trained on token ids
        if expected := self.metadata.get("tokenizer"):
            check_digests(directory, expected)
        return directory


class Replaced(Exception):
    """Raised if a training run replaced or deleted a step while it was read.

    The error that interrupted the reading then says nothing about the step.
    """


class Store:
    """The steps in one directory. In a run with several processes, all processes must make the same calls."""

    def __init__(
        self, directory: Path, *, keep: int | None = None, keep_every: int = 0, writable: bool = False
    ) -> None:
        """Opens the directory. A writable store creates the directory and removes the files of interrupted saves.

        Args:
          directory: checkpoints/ or best/ of a run directory.
          keep: the number of newest steps to keep; None: all.
          keep_every: multiples of this number are kept as well; 0: none.
          writable: whether `save` may be called.

        Raises:
          UserError: the path is misread by Orbax, or the directory cannot be written.
        """
        environment.check_environment()
        self.directory = absolute(directory)
        self._steps = Steps(self.directory, keep, keep_every)
        self._writable, self._first_save_checked = writable, False
        self._saving: Saving | None = None
        self.why_not = ""  # the reason of the last failed save
        arrays_lib.check_place(self.directory)
        environment.allow_files()
        if not writable:
            return
        with distributed.fail_together(UserError), writing(self.directory):
            if distributed.first():
                make_directories(self.directory)
                if not os.access(self.directory, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                self._steps.sweep()
        hush_stragglers()

    def place(self, step: int) -> Path:
        """Returns the directory of a step."""
        return self._steps.place(step)

    def steps(self) -> list[int]:
        """Returns the committed steps, newest first."""
        return self._steps.all()

    def save(
        self,
        step: int,
        items: Mapping[str, Tree],
        *,
        config: Config,
        metadata: Mapping[str, object] | None = None,
        wait: bool = False,
    ) -> bool:
        """Begins to save a step in the background; replaces a step of the same number.

        The method first waits for the previous save. The arrays may be donated once the method returns.

        Args:
          step: the number of the step.
          items: trees of arrays by name, such as "params".
          config: the resolved config.
          metadata: see `manifest.Metadata`.
          wait: whether to wait for the commit.

        Returns:
          False if the save has already failed; the log then has the reason.
        """
        assert self._writable, "not writable"
        self.settle()
        arrays = {name: fingerprints(tree) for name, tree in items.items()}
        about = dict(metadata or {})
        seal = functools.partial(manifest_lib.make_manifest, step, arrays, config, about)
        staging, writes = self._steps.staging(step), list[Writes]()
        try:
            with distributed.fail_together(Exception):
                if distributed.first():
                    about |= self._tokenizer
                    self._steps.sweep()
                    # These directories are created first: without them the other processes wait in Orbax, for ten
                    # minutes if this process fails.
                    for name in items:
                        (staging / name / "array_metadatas").mkdir(parents=True)
            with distributed.fail_together(Exception):
                for name, tree in items.items():
                    writes += arrays_lib.begin_item(staging / name, tree)
        except Exception as error:  # Orbax does not document its exceptions; any exception means that the save failed
            wait_for(writes)
            self._log_failure(step, error)
            return False

        self._saving = Saving(step, writes, lambda: self._commit(step, list(items), seal))
        return self.settle() if wait else True

    @functools.cached_property
    def _tokenizer(self) -> dict[str, dict[str, str]]:
        """The digests of the tokenizer's files at the first save, as metadata.

        The digests are computed once, because the run does not use files that change later.
        """
        found = digests(self.directory.parent / "tokenizer")
        return {"tokenizer": found} if found else {}

    def settle(self) -> bool:
        """Waits for the current save. Returns False if the save failed; the log then has the reason.

        With several processes, the first process commits the step here, after all processes have written their parts.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return True
        saving.join()
        try:
            with distributed.fail_together(Exception):
                if saving.error:
                    raise saving.error
            with distributed.fail_together(Exception):
                if distributed.several() and distributed.first():
                    saving.commit()
        except Exception as error:
            self._log_failure(saving.step, error)
            return False
        self._check_first_save(saving.step)
        return True

    def restore(self, step: int, expect: Expect | None = None) -> Restored:
        """Reads and verifies a step.

        Args:
          step: the number of the step.
          expect: returns the templates of the wanted items; None: only the parameters, and the auxiliary parameters
            if there are some, on the host.

        Raises:
          Damaged: the step does not match its manifest.
          UserError: the step cannot be read at the moment, or does not fit the templates.
        """
        with distributed.fail_together(UserError, Damaged):
            place = self.place(step)
            manifest = self._manifest(step)
            config = manifest_lib.config_of(manifest, place)
            arrays = manifest["arrays"]
            kept = [name for name in ("params", ITEM) if name in arrays]
            templates = expect(config) if expect else {name: manifest_lib.template(arrays[name]) for name in kept}
            for name, template in templates.items():
                manifest_lib.check_template(name, template, manifest, place)
            items = {name: self._read(manifest, name, template) for name, template in templates.items()}
        for name, tree in items.items():
            if problem := first_difference(fingerprints(tree), arrays[name]):
                raise Damaged(f"{name}: {problem}")
        return self._restored(manifest, items, config, place)

    def verify(self, step: int) -> dict[str, int]:
        """Reads and verifies all items of a step, one at a time; returns the number of arrays of each item.

        Raises:
          Damaged: the step does not match its manifest.
          UserError: the step cannot be read at the moment.
        """
        manifest = self._manifest(step)
        arrays = manifest["arrays"]
        for name, expected in arrays.items():
            found = self._read(manifest, name, manifest_lib.template(expected))
            if problem := first_difference(fingerprints(found), expected):
                raise Damaged(f"{name}: {problem}")
        return {name: len(expected) for name, expected in arrays.items()}

    def describe(self, step: int) -> Restored:
        """Reads the manifest of a step, without its arrays: the result's `items` is empty."""
        manifest, place = self._manifest(step), self.place(step)
        return self._restored(manifest, {}, manifest_lib.config_of(manifest, place), place)

    @staticmethod
    def _restored(manifest: Manifest, items: dict[str, Tree], config: Config, place: Path) -> Restored:
        is_former = config_lib.lacks_special_tokens(manifest["config"])
        return Restored(manifest["step"], items, config, manifest["metadata"], manifest["arrays"], place, is_former)

    def newest(self, expect: Expect | None, *, set_aside: bool = False) -> Restored | None:
        """Returns the newest step that passes verification, or None; skips damaged steps.

        Args:
          expect: as for `restore`.
          set_aside: whether damaged steps are renamed to corrupt-STEP.
        """
        return self._newest(lambda step: self.restore(step, expect), set_aside=set_aside)

    def newest_metadata(self) -> Metadata | None:
        """Returns the metadata of the newest intact step, or None; removes steps that need not be kept."""

        def read(step: int) -> Restored:
            try:
                if distributed.first():
                    self.verify(step)
            except UserError as trouble:
                # The step cannot be read at the moment, but is not damaged, and the caller does not need its arrays.
                logger.warning("%s", trouble)
            return self.describe(step)

        found = self._newest(read, set_aside=True)
        if found and self._writable:
            self.retire(found.step)
        return found.metadata if found else None

    def retire(self, newest: int) -> None:
        """Removes the steps that are not kept beside `newest`.

        `Steps.commit` removes these steps as well, but a kill may have come between the commit and the removal.
        """
        # The other processes wait, so that no process lists the steps before the removal.
        with distributed.fail_together(UserError):
            if distributed.first():
                self._steps.retire(newest)

    def close(self) -> bool:
        """Waits for the current save and removes leftover files. Returns False if the save failed."""
        done = self.settle()
        if self._writable and distributed.first():
            if self.why_not:
                self._steps.sweep_until_still()
            else:
                self._steps.sweep()
        return done

    def read_unless_replaced(self, step: int, read: Callable[[int], T]) -> T:
        """Calls `read(step)`.

        Raises:
          Replaced: the call failed, and the step was replaced or deleted meanwhile.
        """
        before = self._steps.identity(step)
        try:
            return read(step)
        except (Damaged, UserError, OSError) as error:
            if before is None or self._steps.identity(step) != before:
                raise Replaced(f"{self.place(step)}: replaced while it was read") from error
            raise

    def _newest(self, read: Callable[[int], Restored], *, set_aside: bool) -> Restored | None:
        for _ in range(LOOKS):
            try:
                return self._first_intact(read, set_aside=set_aside)
            except Replaced:  # a training run has committed a newer step meanwhile
                continue
        raise UserError(
            self.directory, "each step was replaced while it was read", expected="a run that saves less often"
        )

    def _first_intact(self, read: Callable[[int], Restored], *, set_aside: bool) -> Restored | None:
        """Returns the newest step for which `read` does not raise Damaged; logs each damaged step."""
        damaged = 0
        for step in distributed.same(self.steps()[:100]):
            path = self.place(step)
            try:
                with distributed.fail_together(UserError, Damaged, Replaced):
                    found = self.read_unless_replaced(step, read)
            except Damaged as damage:
                damaged += 1
                logger.warning(f"{path}: damaged, {damage}; {self._set_aside(step) if set_aside else 'skipped'}")
                continue
            if damaged and not set_aside:
                logger.info(f"{path}: used instead, as the newest intact step")
            return found
        return None

    def _set_aside(self, step: int) -> str:
        name = ""
        with distributed.fail_together(UserError):
            try:
                if distributed.first():
                    name = self._steps.set_aside(step)
            except OSError as error:
                raise UserError(self.place(step), f"damaged, and cannot be renamed ({error.strerror})") from error
        return f"renamed to {name}"

    def _manifest(self, step: int) -> Manifest:
        place = self.place(step)
        with reading(place / "manifest"):
            manifest = strict_json.loads(read_small(place / "manifest" / "metadata"))
        return manifest_lib.check_manifest(manifest, step, place)

    def _read(self, manifest: Manifest, name: str, template: Tree) -> Tree:
        return arrays_lib.read_item(self.place(manifest["step"]) / name, template, _files(manifest, name))

    def _commit(self, step: int, items: Iterable[str], seal: Callable[[dict[str, str]], Manifest]) -> None:
        """Completes the items, writes the manifest and commits the step; see `Steps.commit`."""
        staging, files = self._steps.staging(step), dict[str, str]()
        for name in items:
            arrays_lib.finish_item(staging / name)
            files |= {f"{name}/{file}": digest for file, digest in metadata_digests(staging / name).items()}
        (staging / "manifest").mkdir()
        (staging / "manifest" / "metadata").write_text(json.dumps(seal(files)), encoding="utf-8")
        self._steps.commit(step)

    def _check_first_save(self, step: int) -> None:
        """Reads back the first step that this store saved, except for the content of the arrays.

        Raises:
          UserError: the file system does not return what was written.
        """
        if self._first_save_checked:
            return
        self._first_save_checked = True
        with distributed.fail_together(UserError):
            if distributed.first():
                try:
                    manifest = self._manifest(step)
                    for name, arrays in manifest["arrays"].items():
                        place = self.place(step) / name
                        arrays_lib.check_item(place, manifest_lib.template(arrays), _files(manifest, name))
                except Damaged as damage:
                    raise UserError(
                        self.directory / str(step),
                        f"was saved, but cannot be read back ({damage})",
                        expected="a file system that returns the written data",
                    ) from damage

    def _log_failure(self, step: int, error: Exception) -> None:
        """Logs the reason of a failed save and removes its files."""
        self.why_not = reason_of(error)
        logger.warning(f"{self.directory / str(step)}: not saved ({self.why_not}); earlier checkpoints are unchanged")
        if distributed.first():
            self._steps.sweep()


def _files(manifest: Manifest, item: str) -> dict[str, str]:
    files = manifest.get("files") or {}
    return {name.removeprefix(f"{item}/"): word for name, word in files.items() if name.startswith(f"{item}/")}


class Best:
    """Saves the parameters with the highest score. All processes must make the same calls."""

    def __init__(self, directory: Path, config: Config, about: Mapping[str, str] = MappingProxyType({})) -> None:
        """Reads the score of the step that an earlier part of the run saved, if there is one.

        Args:
          directory: best/ of the run directory.
          config: the resolved config.
          about: metadata saved with each step.
        """
        self.config, self.about = config, dict(about)
        self.store = Store(directory, keep=1, writable=True)
        found = self.store.newest_metadata()
        # Score of the step on disk; () without a step.
        self.score: tuple[float, ...] = tuple((found or {}).get("score", ()))
        self._waiting: tuple[int, tuple[float, ...], Tree] | None = None

    def offer(self, step: int, score: tuple[float, ...], params: Tree) -> None:
        """Saves the parameters if their score is the highest so far. A NaN in a score counts as the lowest number.

        If the save fails, a copy on the host waits, and the next `offer` or `settle` tries again.
        """
        waiting = self._waiting
        if _comparable(score) > max(_comparable(self.score), _comparable(waiting[1] if waiting else ())):
            self._waiting = None  # dropped first, because two copies would take twice the memory
            if self._save(step, score, params):
                return
            if not distributed.several():  # with several processes, no process holds all parameters
                self._waiting = (step, score, jax.tree.map(np.array, params))  # a copy, as training reuses the buffers
        else:
            self.settle()

    def settle(self) -> bool:
        """Saves the waiting parameters, if there are any. Returns False if the save fails; the log has the reason."""
        if self._waiting is None:
            return True
        step, score, params = self._waiting
        if self._save(step, score, jax.device_put(params, on_host())):
            self._waiting = None
        return self._waiting is None

    def close(self) -> bool:
        """Saves waiting parameters and closes the store. Returns False if the best step is not on disk."""
        done = self.settle()
        return self.store.close() and done

    def _save(self, step: int, score: tuple[float, ...], params: Tree) -> bool:
        metadata = {**self.about, "score": list(score)}
        whole, own = auxiliary.split(params)
        items = {"params": whole} | ({} if own is None else {auxiliary.ITEM: own})
        done = self.store.save(step, items, config=self.config, metadata=metadata, wait=True)
        if done:
            self.score = score
        return done


def _comparable(score: tuple[float, ...]) -> tuple[float, ...]:
    """Returns the score with -inf in place of NaN, because no number is greater or less than NaN."""
    return tuple(-math.inf if math.isnan(x) else x for x in score)
