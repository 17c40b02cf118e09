"""The steps in one directory: committed whole, verified before they are used. The only module that knows Orbax.

Saves run in the background: before `save` returns, Orbax has copied each array to the host, or holds it so that a step
that takes it over as a donation has to copy. A save that fails leaves every earlier step as it was. Reading goes around
Orbax's manager, whose barriers would leave the other processes waiting when a step is unreadable for one of them.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from pipejax import config as config_lib
from pipejax import processes
from pipejax.checkpoint import manifest as manifest_lib
from pipejax.checkpoint.manifest import Damaged, Manifest
from pipejax.checkpoint.trouble import hush_stragglers, reading, reason_of
from pipejax.config import Config
from pipejax.errors import UserError
from pipejax.fingerprint import Fingerprints, difference, fingerprints

STEP = re.compile(r"0|[1-9][0-9]{0,14}")

Expect = Callable[[Config], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Restored:
    """A verified step."""

    step: int
    items: dict[str, Any]
    config: Config
    metadata: dict[str, Any]
    arrays: dict[str, Fingerprints]
    path: Path


class Store:
    """The steps in one directory. In a run of several processes all of them make the same calls."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int | None = None,
        keep_every: int = 0,
        writable: bool = False,
        log: Callable[[str], None] = print,
    ) -> None:
        """Of the committed steps the last `keep` stay, and every multiple of `keep_every`; `log` hears of failed saves.

        Raises:
          UserError: the directory cannot be written.
        """
        self.directory, self.log, self.keep, self.keep_every = directory.absolute(), log, keep, keep_every
        self._saving: int | None = None  # the step whose save is under way
        self._littered = False  # a failed save may go on writing for a moment: its rests are swept up again later
        self._manager: ocp.CheckpointManager | None = None
        if not writable:
            return
        with processes.together(UserError):
            try:
                if processes.first():
                    self.directory.mkdir(parents=True, exist_ok=True)
                    if not os.access(self.directory, os.W_OK | os.X_OK):
                        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            except OSError as error:
                raise UserError(f"{self.directory}: cannot be written ({error.strerror})") from error
        hush_stragglers()
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        handlers: dict[str, ocp.CheckpointHandler] = {
            "params": ocp.StandardCheckpointHandler(),
            "state": ocp.StandardCheckpointHandler(),
            "manifest": ocp.JsonCheckpointHandler(),
        }
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self.keep,
            keep_period=self.keep_every or None,
            create=True,
            cleanup_tmp_directories=True,
            should_save_fn=lambda step, latest: True,
            enable_async_checkpointing=True,
            multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=self.directory.name),
        )
        return ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    def _close_manager(self) -> None:
        for _ in range(4):  # each of its parts raises once more what a failed save has raised
            with contextlib.suppress(Exception):
                if self._manager is not None:
                    self._manager.close()
                    self._manager = None

    def steps(self) -> list[int]:
        """Committed steps, newest first. An entry that only has a step's name counts: it must not be passed over."""
        if not self.directory.is_dir():
            return []
        return sorted((int(p.name) for p in self.directory.iterdir() if STEP.fullmatch(p.name)), reverse=True)

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        *,
        config: Config,
        metadata: Mapping[str, Any] | None = None,
        wait: bool = False,
    ) -> bool:
        """Begins to commit arrays and manifest as one; a step of that number from a lost stretch is replaced.

        Args:
          step: updates made.
          items: trees of arrays, "params" and perhaps "state"; their buffers may be donated once this returns.
          config: the run's.
          metadata: what else the manifest shall hold.
          wait: come back only when the step is on disk.

        Returns:
          False if it failed by now; the log then has a line about it.
        """
        assert self._manager is not None, "not writable"
        self.settle()
        self._sweep()
        arrays = {name: fingerprints(tree) for name, tree in items.items()}
        manifest = manifest_lib.make(step, arrays, config, metadata or {})
        saves = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        arguments = ocp.args.Composite(**saves, manifest=ocp.args.JsonSave(manifest))
        try:
            if step in self._manager.all_steps():
                self._manager.delete(step)
            self._saving = step
            self._manager.save(step, args=arguments, force=True)
        except Exception as error:  # what it may raise is not documented; all of it means: not saved
            if processes.several():
                raise  # the others wait for this one in the middle of the save: the run ends, and starts again
            self._failed(step, error)
            return False
        return self.settle() if wait else True

    def settle(self) -> bool:
        """Waits for the save under way. False if it failed; the log then has a line about it."""
        if self._saving is None:
            return True
        assert self._manager is not None
        step, self._saving = self._saving, None
        problem: Exception | None = None
        try:
            self._manager.wait_until_finished()
            if processes.first():
                _sync_directory(self.directory)  # the rename that committed the step survives a loss of power
        except Exception as error:  # as above
            problem = error
        if any(processes.gather("failed" if problem else "")):
            self._failed(step, problem)
            return False
        return True

    def restore(self, step: int, expect: Expect | None = None) -> Restored:
        """Reads one step and verifies it.

        Args:
          step: a committed step.
          expect: gives, for the step's config, trees of jax.ShapeDtypeStruct with shardings for each item wanted; None:
            the parameters alone, on the host.

        Raises:
          Damaged: anything is absent, unreadable or does not match the manifest.
          UserError: it cannot be read just now, or holds something else than what is expected.
        """
        place = self.directory / str(step)
        with processes.together(UserError, Damaged):
            manifest = self._manifest(step)
            config = _config(manifest, place)
            arrays = manifest["arrays"]
            templates = expect(config) if expect else {"params": manifest_lib.template(arrays["params"])}
            for name, template in templates.items():
                manifest_lib.check_template(name, template, manifest, place)
            items = {name: _read(place / name, template) for name, template in templates.items()}
        for name, tree in items.items():
            if problem := difference(fingerprints(tree), arrays[name]):
                raise Damaged(f"{name}: {problem}")
        return Restored(step, items, config, manifest["metadata"], arrays, place)

    def verify(self, step: int) -> dict[str, int]:
        """Reads everything that a step holds, an item at a time; the number of arrays of each item.

        Raises:
          Damaged, UserError: as `restore`.
        """
        place, arrays = self.directory / str(step), self._manifest(step)["arrays"]
        for name, expected in arrays.items():
            if problem := difference(fingerprints(_read_as_saved(place / name)), expected):
                raise Damaged(f"{name}: {problem}")
        return {name: len(expected) for name, expected in arrays.items()}

    def describe(self, step: int) -> Restored:
        """A step's manifest without its arrays: what it says is verified, `items` is empty."""
        manifest, place = self._manifest(step), self.directory / str(step)
        return Restored(step, {}, _config(manifest, place), manifest["metadata"], manifest["arrays"], place)

    def newest(self, expect: Expect | None, *, log: Callable[[str], None], set_aside: bool = False) -> Restored | None:
        """The newest step that verifies, or None. With `set_aside` damaged ones are renamed to corrupt-STEP."""
        return self._newest(lambda step: self.restore(step, expect), log, set_aside=set_aside)

    def newest_metadata(self, *, log: Callable[[str], None]) -> dict[str, Any] | None:
        """The metadata of the newest step that verifies, or None.

        Damaged ones are renamed to corrupt-STEP. With `keep`, older ones than that go: a kill may have come between the
        save of a step and the end of the one that it replaces.
        """

        def read(step: int) -> Restored:
            try:
                if processes.first():
                    self.verify(step)
            except UserError as trouble:  # that passes; these arrays are not needed to go on
                log(f"warning: {trouble}")
            return self.describe(step)

        found = self._newest(read, log, set_aside=True)
        if found and self.keep and self._manager:
            with processes.together(UserError):  # nobody lists the steps before they are gone
                for step in self.steps()[self.keep :] if processes.first() else ():
                    if not self.keep_every or step % self.keep_every:
                        shutil.rmtree(self.directory / str(step), ignore_errors=True)
            self._manager.reload()
        return found.metadata if found else None

    def close(self) -> bool:
        """Waits for the save under way and frees the manager's threads. False if that save failed."""
        done = self.settle()
        if self._manager is not None:
            self._close_manager()
            self._sweep()
        return done

    def _newest(
        self, read: Callable[[int], Restored], log: Callable[[str], None], *, set_aside: bool
    ) -> Restored | None:
        damaged = 0
        for step in processes.same(self.steps()[:100]):
            path = self.directory / str(step)
            try:
                with processes.together(UserError, Damaged):
                    found = read(step)
            except Damaged as damage:
                damaged += 1
                log(f"warning: {path}: damaged, {damage}; {self._set_aside(path) if set_aside else 'passed over'}")
                continue
            if damaged and not set_aside:
                log(f"{path}: the newest good step, used instead")
            return found
        return None

    def _set_aside(self, path: Path) -> str:
        target, count = path.with_name(f"corrupt-{path.name}"), 1
        while target.exists():
            count += 1
            target = path.with_name(f"corrupt-{path.name}-{count}")
        with processes.together(UserError):
            try:
                if processes.first():
                    path.rename(target)
            except OSError as error:
                raise UserError(f"{path}: damaged, and cannot be renamed ({error.strerror})") from error
        if self._manager is not None:
            self._manager.reload()
        return f"kept aside as {target.name}"

    def _manifest(self, step: int) -> Manifest:
        place = self.directory / str(step)
        with reading(place / "manifest"):
            manifest = ocp.JsonCheckpointHandler().restore(place / "manifest")
        return manifest_lib.check(manifest, step, place)

    def _failed(self, step: int, error: Exception | None) -> None:
        """Says so, and makes room for the next."""
        self._saving = None
        reason = reason_of(error) if error else "another process failed"
        self.log(f"{self.directory / str(step)}: not saved ({reason}); earlier checkpoints are as they were")
        self._littered = True
        self._close_manager()
        self._sweep()
        self._manager = self._open()  # the old one would tell of the error again, as if the next save had failed

    def _sweep(self) -> None:
        """Removes what failed saves have left, which may be what fills the disk."""
        if not (self._littered and processes.first()):
            return
        for _ in range(10):
            rests = list(self.directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"))
            for rest in rests:
                shutil.rmtree(rest, ignore_errors=True)
            if not rests:
                break
            time.sleep(0.1)  # writes that were under way may make it anew


def _config(manifest: Manifest, place: Path) -> Config:
    return config_lib.from_json(json.dumps(manifest["config"]), where=f"{place} (manifest)")


def _read(path: Path, template: Any) -> Any:
    with reading(path):
        return ocp.StandardCheckpointHandler().restore(path, args=ocp.args.StandardRestore(template))


def _read_as_saved(path: Path) -> Any:
    """An item in the structure that it has on disk, on the host."""
    sharding = manifest_lib.on_host()
    with reading(path):
        saved = ocp.StandardCheckpointHandler().metadata(path).tree
        template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), saved)
    return _read(path, template)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
