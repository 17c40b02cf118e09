"""The steps of one directory as files: which there are, how one is committed, which stay. Knows nothing of arrays.

A save fills STEP.orbax-checkpoint-tmp. All of it is synced, one rename commits it, and that is synced as well; only
then do older steps go. Whatever goes is renamed first, so that nothing half-deleted has a step's name.
"""

import contextlib
import os
import re
import time
from pathlib import Path

from pipejax.system.files import free_name, sweep, sync, sync_tree

STEP = re.compile(r"0|[1-9][0-9]{0,14}")
STAGING = ".orbax-checkpoint-tmp"  # after a step's number: a save that is not committed
GONE, REPLACED = ".gone-", ".replaced-"  # before it: no longer needed, or about to be replaced


class Steps:
    """The steps of one directory. Only one process at a time may write there."""

    def __init__(self, directory: Path, keep: int | None, keep_every: int) -> None:
        """Of the committed steps the last `keep` stay, and every multiple of `keep_every`."""
        self.directory, self.keep, self.keep_every = directory, keep, keep_every
        self._stuck = set[int]()  # steps that cannot be removed
        self._troubles: list[str] = []  # what is still to be said

    def all(self) -> list[int]:
        """Committed steps, newest first. An entry that only has a step's name counts: it must not be passed over."""
        if not self.directory.is_dir():
            return []
        names = {path.name.removeprefix(REPLACED) for path in self.directory.iterdir()}
        return sorted((int(name) for name in names if STEP.fullmatch(name)), reverse=True)

    def place(self, step: int) -> Path:
        """Where a committed step is: one that was about to be replaced counts until its successor has the name."""
        named, replaced = self.directory / str(step), self.directory / f"{REPLACED}{step}"
        return replaced if os.path.lexists(replaced) and not os.path.lexists(named) else named

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
        """Makes a step of what is staged. Once that outlives a loss of power others may go; else `troubles` says so.

        Raises:
          OSError: it could not be; the steps that there were are as before.
        """
        sync_tree(self.staging(step))
        named = self.directory / str(step)
        if named.exists():
            named.rename(self.directory / f"{REPLACED}{step}")  # it comes back if we are killed now
        self.staging(step).rename(named)
        try:
            sync(self.directory)
        except OSError as error:
            said = f"{named}: saved, but a loss of power may undo that ({error.strerror}); older steps stay"
            self._troubles.append(said)
        else:
            self.retire(step)

    def retire(self, newest: int) -> None:
        """Removes what is not to be kept beside the newest step, which is on the disk; `troubles` says what stays."""
        try:
            others = [step for step in self.all() if step != newest] if self.keep else []
        except OSError as error:
            self._troubles.append(f"{self.directory}: cannot be listed ({error.strerror}); older steps stay")
            return
        for step in others[(self.keep or 1) - 1 :]:
            if self.keep_every and step % self.keep_every == 0:
                continue
            place = self.place(step)
            try:
                place.rename(free_name(self.directory / f"{GONE}{step}"))
            except OSError as error:
                if step not in self._stuck:
                    said = f"{place}: no longer needed, but cannot be removed ({error.strerror})"
                    self._troubles.append(said)
                self._stuck.add(step)
        self._sweep_gone()

    def troubles(self) -> list[str]:
        """What went wrong beside saving, each line once: about a step that cannot be removed, too."""
        lines, self._troubles = self._troubles, []
        return lines

    def sweep(self) -> None:
        """Removes what failed and killed saves have left, which may be what fills the disk."""
        self._sweep_gone()
        sweep(self.directory, f"*{STAGING}*")

    def sweep_until_still(self, seconds: float = 2.0) -> None:
        """As `sweep`, until nothing new appears: when one write fails, Orbax's others go on for a while."""
        until, still = time.monotonic() + seconds, 0
        with contextlib.suppress(OSError):  # what cannot be listed now is swept at the next start
            while still < 4 and time.monotonic() < until:
                self.sweep()
                time.sleep(0.05)
                still = 0 if any(self.directory.glob(f"*{STAGING}*")) else still + 1

    def set_aside(self, step: int) -> str:
        """Renames a step to a name that is none; returns it."""
        target = free_name(self.directory / f"corrupt-{step}")
        self.place(step).rename(target)
        sync(self.directory)
        return target.name

    def _sweep_gone(self) -> None:
        """A step that was about to be replaced goes once its successor is on the disk; without one it comes back."""
        with contextlib.suppress(OSError):  # it stays, and the next save tries again
            for path in self.directory.glob(f"{REPLACED}*"):
                step = path.name.removeprefix(REPLACED)
                named = self.directory / step
                if named.exists():
                    sync(self.directory)
                    named = free_name(self.directory / f"{GONE}{step}")
                path.rename(named)
        sweep(self.directory, f"{GONE}*")
