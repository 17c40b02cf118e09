"""The steps of one directory as files: which there are, how one is committed, which stay. Knows nothing of arrays.

A save fills STEP.orbax-checkpoint-tmp. All of it is synced, one rename commits it, and that is synced as well; only
then do older steps go. Whatever goes is renamed first, so that nothing half-deleted has a step's name.
"""

import os
import re
import shutil
from pathlib import Path

from pipejax.files import sweep, sync, sync_tree

STEP = re.compile(r"0|[1-9][0-9]{0,14}")
STAGING = ".orbax-checkpoint-tmp"  # after a step's number: a save that is not committed
GONE, REPLACED = ".gone-", ".replaced-"  # before it: no longer needed, or about to be replaced


class Steps:
    """The steps of one directory. Only one process at a time may write there."""

    def __init__(self, directory: Path, keep: int | None, keep_every: int) -> None:
        """Of the committed steps the last `keep` stay, and every multiple of `keep_every`."""
        self.directory, self.keep, self.keep_every = directory, keep, keep_every
        self._stuck: dict[int, str] = {}  # steps that cannot be removed, and what is still to be said about them

    def all(self) -> list[int]:
        """Committed steps, newest first. An entry that only has a step's name counts: it must not be passed over."""
        if not self.directory.is_dir():
            return []
        return sorted((int(p.name) for p in self.directory.iterdir() if STEP.fullmatch(p.name)), reverse=True)

    def place(self, step: int) -> Path:
        """Where a committed step is."""
        return self.directory / str(step)

    def staging(self, step: int) -> Path:
        """Where a step is written before it is committed."""
        return self.directory / f"{step}{STAGING}"

    def identity(self, step: int) -> tuple[int, int] | None:
        """Another one once the step was replaced; None if there is none."""
        try:
            status = os.lstat(self.place(step))
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def commit(self, step: int) -> None:
        """Makes a step of what is staged; once this returns, it outlives a loss of power. Then others may go.

        Raises:
          OSError: it could not be; the steps that there were are as before.
        """
        sync_tree(self.staging(step))
        if self.place(step).exists():
            self.place(step).rename(self.directory / f"{REPLACED}{step}")  # it comes back if we are killed now
        self.staging(step).rename(self.place(step))
        sync(self.directory)
        self.retire(step)

    def retire(self, newest: int) -> None:
        """Removes what is not to be kept beside the newest step, which is on the disk."""
        others = [step for step in self.all() if step != newest]
        for step in others[self.keep - 1 :] if self.keep else ():
            if self.keep_every and step % self.keep_every == 0:
                continue
            gone = self.directory / f"{GONE}{step}"
            try:
                self.place(step).rename(gone)
                shutil.rmtree(gone)
            except OSError as error:
                said = f"warning: {self.place(step)}: no longer needed, but cannot be removed ({error.strerror})"
                self._stuck.setdefault(step, said)
        self._sweep_gone()

    def troubles(self) -> list[str]:
        """A line about each step that could not be removed, once."""
        lines = [line for line in self._stuck.values() if line]
        self._stuck = dict.fromkeys(self._stuck, "")
        return lines

    def sweep(self) -> None:
        """Removes what failed and killed saves have left, which may be what fills the disk."""
        self._sweep_gone()
        sweep(self.directory, f"*{STAGING}*")

    def set_aside(self, step: int) -> str:
        """Renames a step to a name that is none; returns it."""
        target, count = self.directory / f"corrupt-{step}", 1
        while target.exists():
            count += 1
            target = self.directory / f"corrupt-{step}-{count}"
        self.place(step).rename(target)
        sync(self.directory)
        return target.name

    def _sweep_gone(self) -> None:
        for path in self.directory.glob(f"{REPLACED}*"):
            step = path.name.removeprefix(REPLACED)
            target = self.directory / step
            path.rename(self.directory / f"{GONE}{step}" if target.exists() else target)
        sweep(self.directory, f"{GONE}*")
