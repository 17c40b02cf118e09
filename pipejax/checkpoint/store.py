"""The steps in one directory: saved in the background, committed whole, verified before they are used.

How a step is committed is in `steps.py`, how its arrays are written in `arrays.py`. A save that fails leaves every
earlier step as it was.
"""

import dataclasses
import errno
import functools
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pipejax.checkpoint import arrays as arrays_lib
from pipejax.checkpoint import manifest as manifest_lib
from pipejax.checkpoint.arrays import Writes
from pipejax.checkpoint.fingerprint import Fingerprints, difference, fingerprints, shapes_of
from pipejax.checkpoint.manifest import Damaged, Manifest
from pipejax.checkpoint.saving import Saving, wait_for
from pipejax.checkpoint.steps import Steps
from pipejax.checkpoint.trouble import hush_stragglers, metadata_digests, reading, reason_of
from pipejax.config import Config
from pipejax.data.tokenizer import check_digests, digests
from pipejax.system import distributed, environment
from pipejax.system.errors import UserError
from pipejax.system.files import look, make_directories

logger = logging.getLogger(__name__)

LOOKS = 20  # at steps that are replaced while they are read

T = TypeVar("T")
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

    def tokenizer_files(self) -> Path | None:
        """The directory of the tokenizer that lies with the run; None if it carries none.

        Raises:
          UserError: its files are not those that the step was saved with. Older checkpoints do not say.
        """
        directory = self.path.parents[1] / "tokenizer"
        if look(directory) != "directory":
            return None  # there are ids alone, and those are right
        if expected := self.metadata.get("tokenizer"):
            check_digests(directory, expected)
        return directory


class Replaced(Exception):
    """A step was replaced or deleted by its run while it was read: what was found says nothing."""


class Store:
    """The steps in one directory. In a run of several processes all of them make the same calls."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int | None = None,
        keep_every: int = 0,
        writable: bool = False,
    ) -> None:
        """Of the committed steps the last `keep` stay, and every multiple of `keep_every`.

        A writable one must be the only one: it sweeps up what killed ones have left.

        Raises:
          UserError: the directory cannot be written, has a name that Orbax takes for another, or too few files
            may be open.
        """
        environment.check()
        self.directory = directory.absolute()
        self._steps = Steps(self.directory, keep, keep_every)
        self._writable, self._proven = writable, False
        self._saving: Saving | None = None
        self.why_not = ""  # why the last failed save failed
        arrays_lib.check_place(self.directory)
        environment.allow_files()
        if not writable:
            return
        with distributed.together(UserError):
            try:
                if distributed.first():
                    make_directories(self.directory)
                    if not os.access(self.directory, os.W_OK | os.X_OK):
                        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                    self._steps.sweep()
            except OSError as error:
                raise UserError(f"{self.directory}: cannot be written ({error.strerror})") from error
        hush_stragglers()

    def place(self, step: int) -> Path:
        """Where a committed step is."""
        return self._steps.place(step)

    def steps(self) -> list[int]:
        """Committed steps, newest first. An entry that only has a step's name counts: it must not be passed over."""
        return self._steps.all()

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
        assert self._writable, "not writable"
        self.settle()
        arrays = {name: fingerprints(tree) for name, tree in items.items()}
        about = dict(metadata or {})
        seal = functools.partial(manifest_lib.make, step, arrays, config, about)
        staging, writes = self._steps.staging(step), list[Writes]()
        try:
            with distributed.together(Exception):
                if distributed.first():
                    about |= self._tokenizer
                    self._steps.sweep()
                    for name in items:
                        arrays_lib.make_place(staging / name)
            with distributed.together(Exception):
                for name, tree in items.items():
                    writes += arrays_lib.begin(staging / name, tree)
        except Exception as error:  # what Orbax may raise is not documented; all of it means: not saved
            wait_for(writes)
            self._failed(step, error)
            return False

        self._saving = Saving(step, writes, lambda: self._commit(step, list(items), seal))
        return self.settle() if wait else True

    @functools.cached_property
    def _tokenizer(self) -> dict[str, Any]:
        """Digests of the tokenizer beside this directory, of the first save: what changes later is not what is used."""
        found = digests(self.directory.parent / "tokenizer")
        return {"tokenizer": found} if found else {}

    def settle(self) -> bool:
        """Waits for the save under way. False if it failed; the log then has a line about it.

        Raises:
          UserError: the first step that was saved cannot be read back: nothing that is saved here could.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return True
        saving.join()
        try:
            with distributed.together(Exception):
                if saving.error:
                    raise saving.error
            with distributed.together(Exception):
                if distributed.several() and distributed.first():
                    saving.commit()
        except Exception as error:
            self._failed(saving.step, error)
            return False
        self._tell()
        self._prove(saving.step)
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
        with distributed.together(UserError, Damaged):
            place = self.place(step)
            manifest = self._manifest(step)
            config = manifest_lib.config_of(manifest, place)
            arrays = manifest["arrays"]
            templates = expect(config) if expect else {"params": manifest_lib.template(arrays["params"])}
            for name, template in templates.items():
                manifest_lib.check_template(name, template, manifest, place)
            items = {name: self._read(manifest, name, template) for name, template in templates.items()}
        for name, tree in items.items():
            if problem := difference(fingerprints(tree), arrays[name]):
                raise Damaged(f"{name}: {problem}")
        return Restored(step, items, config, manifest["metadata"], arrays, place)

    def verify(self, step: int) -> dict[str, int]:
        """Reads everything that a step holds, an item at a time; the number of arrays of each item.

        Raises:
          Damaged, UserError: as `restore`.
        """
        manifest = self._manifest(step)
        arrays = manifest["arrays"]
        for name, expected in arrays.items():
            found = self._read(manifest, name, self._shapes(manifest, name))
            if problem := difference(fingerprints(found), expected):
                raise Damaged(f"{name}: {problem}")
        return {name: len(expected) for name, expected in arrays.items()}

    def describe(self, step: int) -> Restored:
        """A step's manifest without its arrays: what it says is verified, `items` is empty."""
        manifest, place = self._manifest(step), self.place(step)
        return Restored(
            step, {}, manifest_lib.config_of(manifest, place), manifest["metadata"], manifest["arrays"], place
        )

    def newest(self, expect: Expect | None, *, set_aside: bool = False) -> Restored | None:
        """The newest step that verifies, or None. With `set_aside` damaged ones are renamed to corrupt-STEP."""
        return self._newest(lambda step: self.restore(step, expect), set_aside=set_aside)

    def newest_metadata(self) -> dict[str, Any] | None:
        """The metadata of the newest step that verifies, or None; damaged ones are renamed, superfluous ones go."""

        def read(step: int) -> Restored:
            try:
                if distributed.first():
                    self.verify(step)
            except UserError as trouble:  # no damage; these arrays are not needed to go on
                logger.warning("%s", trouble)
            return self.describe(step)

        found = self._newest(read, set_aside=True)
        if found and self._writable:
            self.retire(found.step)
        return found.metadata if found else None

    def retire(self, newest: int) -> None:
        """Removes what is not to be kept beside the newest step: a kill may have come between its save and that."""
        with distributed.together(UserError):  # nobody lists the steps before they are gone
            if distributed.first():
                self._steps.retire(newest)
        self._tell()

    def close(self) -> bool:
        """Waits for the save under way. False if it failed."""
        done = self.settle()
        if self._writable and distributed.first():
            if self.why_not:
                self._steps.sweep_until_still()
            else:
                self._steps.sweep()
        return done

    def look(self, step: int, read: Callable[[int], T]) -> T:
        """What `read` makes of a step.

        Raises:
          Replaced: it fails, and the step is not the one any more that it was.
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
                return self._first_good(read, set_aside=set_aside)
            except Replaced:  # by the run that goes on in there: what it has saved since is newer
                continue
        raise UserError(f"{self.directory}: found each step replaced while it was read; expected fewer saves a minute")

    def _first_good(self, read: Callable[[int], Restored], *, set_aside: bool) -> Restored | None:
        damaged = 0
        for step in distributed.same(self.steps()[:100]):
            path = self.place(step)
            try:
                with distributed.together(UserError, Damaged, Replaced):
                    found = self.look(step, read)
            except Damaged as damage:
                damaged += 1
                logger.warning(f"{path}: damaged, {damage}; {self._set_aside(step) if set_aside else 'passed over'}")
                continue
            if damaged and not set_aside:
                logger.info(f"{path}: the newest good step, used instead")
            return found
        return None

    def _set_aside(self, step: int) -> str:
        name = ""
        with distributed.together(UserError):
            try:
                if distributed.first():
                    name = self._steps.set_aside(step)
            except OSError as error:
                raise UserError(f"{self.place(step)}: damaged, and cannot be renamed ({error.strerror})") from error
        return f"kept aside as {name}"

    def _manifest(self, step: int) -> Manifest:
        place = self.place(step)
        with reading(place / "manifest"):
            manifest = json.loads((place / "manifest" / "metadata").read_text(encoding="utf-8"))
        return manifest_lib.check(manifest, step, place)

    def _read(self, manifest: Manifest, name: str, template: Any) -> Any:
        return arrays_lib.read(self.place(manifest["step"]) / name, template, _files(manifest, name))

    def _shapes(self, manifest: Manifest, name: str) -> Any:
        """The tree of an item as it was saved, shapes alone, if those are what the manifest says."""
        found = arrays_lib.shapes(self.place(manifest["step"]) / name, _files(manifest, name))
        if problem := difference(shapes_of(found), {path: x[:2] for path, x in manifest["arrays"][name].items()}):
            raise Damaged(f"{name}: {problem}")
        return found

    def _commit(self, step: int, items: Iterable[str], seal: Callable[[dict[str, str]], Manifest]) -> None:
        staging, files = self._steps.staging(step), dict[str, str]()
        for name in items:
            arrays_lib.finish(staging / name)
            files |= {f"{name}/{file}": digest for file, digest in metadata_digests(staging / name).items()}
        (staging / "manifest").mkdir()
        (staging / "manifest" / "metadata").write_text(json.dumps(seal(files)), encoding="utf-8")
        self._steps.commit(step)

    def _prove(self, step: int) -> None:
        """Reads the first step that was saved back, but for the content of the arrays."""
        if self._proven:
            return
        self._proven = True
        with distributed.together(UserError):
            if distributed.first():
                try:
                    manifest = self._manifest(step)
                    for name in manifest["arrays"]:
                        self._shapes(manifest, name)
                except Damaged as damage:
                    raise UserError(
                        f"{self.directory / str(step)}: was saved, but cannot be read back ({damage}); expected a "
                        "place that gives back what is written there"
                    ) from damage

    def _tell(self) -> None:
        for line in self._steps.troubles():
            logger.warning(line)

    def _failed(self, step: int, error: Exception) -> None:
        self.why_not = reason_of(error)
        logger.warning(
            f"{self.directory / str(step)}: not saved ({self.why_not}); earlier checkpoints are as they were"
        )
        if distributed.first():
            self._steps.sweep()


def _files(manifest: Manifest, item: str) -> dict[str, str]:
    """The digests of an item's files, as far as the manifest has them: older ones have none."""
    files = manifest.get("files") or {}
    return {name.removeprefix(f"{item}/"): word for name, word in files.items() if name.startswith(f"{item}/")}
