"""A save in the background."""

import threading
from collections.abc import Callable, Iterable

from pipejax.checkpoint.arrays import Writes
from pipejax.system import distributed


class Saving(threading.Thread):
    """A thread that waits for a save. It is a daemon, so the process can end without it; Orbax ends its writes."""

    def __init__(self, step: int, writes: list[Writes], commit: Callable[[], None]) -> None:
        """Starts the thread, which waits for the writes and then calls `commit`."""
        super().__init__(name=f"save-{step}", daemon=True)
        self.step, self.commit, self._writes = step, commit, writes
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Waits for the writes, and commits if this process is the only one; else `Store.settle` commits."""
        self.error = wait_for(self._writes)
        if not (self.error or distributed.several()):
            try:
                self.commit()
            except Exception as error:
                self.error = error


def wait_for(writes: Iterable[Writes]) -> Exception | None:
    """Waits for the end of all writes; returns the first error, or None."""
    problem: Exception | None = None
    for write in writes:
        try:
            write.result()
        except Exception as error:
            problem = problem or error
    return problem
