"""The steps of a directory as files: lists steps, commits new steps and removes old steps.

A save fills STEP.orbax-checkpoint-tmp. A commit syncs these files, renames the directory to STEP, and syncs the rename;
only then are older steps removed. A step is renamed before it is deleted, so that no half-deleted directory has the
name of a step.
"""

import contextlib
import logging
import os
import re
import time
from pathlib import Path

from pipejax.system.files import free_name, sweep, sync, sync_tree

logger = logging.getLogger(__name__)

STEP = re.compile(r"0|[1-9][0-9]{0,14}")
STAGING = ".orbax-checkpoint-tmp"  # suffix of a step that is not committed yet
# Prefixes of a step that is to be deleted, and of a step that is being replaced.
GONE, REPLACED = ".gone-", ".replaced-"


class Steps:
    """The steps of one directory. Only one process at a time may write to the directory."""

    def __init__(self, directory: Path, keep: int | None, keep_every: int) -> None:
        """Keeps the last `keep` committed steps (None: all), and all multiples of `keep_every` (0: none)."""
        self.directory, self.keep, self.keep_every = directory, keep, keep_every
        self._stuck = set[int]()  # steps whose removal failed, each reported once

    def all(self) -> list[int]:
        """Returns the committed steps, newest first.

        Every entry named like a step counts, so that damaged steps are noticed.
        """
        if not self.directory.is_dir():
            return []
        names = {path.name.removeprefix(REPLACED) for path in self.directory.iterdir()}
        return sorted((int(name) for name in names if STEP.fullmatch(name)), reverse=True)

    def place(self, step: int) -> Path:
        """Returns the directory of a step, also while the step is being replaced."""
        named, replaced = self.directory / str(step), self.directory / f"{REPLACED}{step}"
        return replaced if os.path.lexists(replaced) and not os.path.lexists(named) else named

    def staging(self, step: int) -> Path:
        """Returns the directory in which a save collects the files of a step before the commit."""
        return self.directory / f"{step}{STAGING}"

    def identity(self, step: int) -> tuple[int, int] | None:
        """Returns the device and the inode of a step, or None if there is no such step.

        The numbers change when the step is replaced.
        """
        try:
            status = os.lstat(self.place(step))
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def commit(self, step: int) -> None:
        """Turns the staged files into a step that survives a loss of power, then removes older steps.

        If the rename cannot be synced, a loss of power may undo the rename. The older steps then stay, and a warning is
        logged.
        """
        sync_tree(self.staging(step))
        named = self.directory / str(step)
        if named.exists():
            # `place` still finds the old step if the process is killed before the next rename.
            named.rename(self.directory / f"{REPLACED}{step}")
        self.staging(step).rename(named)
        try:
            sync(self.directory)
        except OSError as error:
            logger.warning(
                f"{named}: saved, but possibly lost if the power fails ({error.strerror}); older steps are kept"
            )
        else:
            self.retire(step)

    def retire(self, newest: int) -> None:
        """Removes the steps that are not kept beside the newest one.

        A step that cannot be removed is logged once.
        """
        try:
            others = [step for step in self.all() if step != newest] if self.keep else []
        except OSError as error:
            logger.warning(f"{self.directory}: cannot be listed ({error.strerror}); older steps are kept")
            return
        for step in others[(self.keep or 1) - 1 :]:
            if self.keep_every and step % self.keep_every == 0:
                continue
            place = self.place(step)
            try:
                place.rename(free_name(self.directory / f"{GONE}{step}"))
            except OSError as error:
                if step not in self._stuck:
                    logger.warning(f"{place}: no longer needed, but cannot be removed ({error.strerror})")
                self._stuck.add(step)
        self._sweep_gone()

    def sweep(self) -> None:
        """Removes the files of saves and removals that were interrupted."""
        self._sweep_gone()
        sweep(self.directory, f"*{STAGING}*")

    def sweep_until_still(self, seconds: float = 2.0) -> None:
        """Repeats `sweep` until no new files appear, at most for `seconds`.

        After a failed write, Orbax's other writes continue for a while and create new files.
        """
        until, still = time.monotonic() + seconds, 0
        # If the directory cannot be listed, `sweep` runs again when the store is opened the next time.
        with contextlib.suppress(OSError):
            while still < 4 and time.monotonic() < until:
                self.sweep()
                time.sleep(0.05)
                still = 0 if any(self.directory.glob(f"*{STAGING}*")) else still + 1

    def set_aside(self, step: int) -> str:
        """Renames a damaged step to corrupt-STEP, which is not the name of a step; returns the new name."""
        target = free_name(self.directory / f"corrupt-{step}")
        self.place(step).rename(target)
        sync(self.directory)
        return target.name

    def _sweep_gone(self) -> None:
        """Deletes steps that are no longer needed.

        A step that was being replaced when the process was killed gets its name back, unless the new step already has
        this name.
        """
        with contextlib.suppress(OSError):  # on failure the directories stay until the next save
            for path in self.directory.glob(f"{REPLACED}*"):
                step = path.name.removeprefix(REPLACED)
                named = self.directory / step
                if named.exists():
                    sync(self.directory)
                    named = free_name(self.directory / f"{GONE}{step}")
                path.rename(named)
        sweep(self.directory, f"{GONE}*")
