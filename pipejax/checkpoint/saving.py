"""A save under way."""

import threading
from collections.abc import Callable, Iterable

from pipejax.checkpoint.arrays import Writes
from pipejax.system import distributed


class Saving(threading.Thread):
    """A save under way. It is a daemon: at the end nothing of ours waits for it, though Orbax does while it writes."""

    def __init__(self, step: int, writes: list[Writes], commit: Callable[[], None]) -> None:
        """Begins to wait for the writes."""
        super().__init__(name=f"save-{step}", daemon=True)
        self.step, self.commit, self._writes = step, commit, writes
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Commits where all that is written is this process's; of several the first one does when all are through."""
        self.error = wait_for(self._writes)
        if not (self.error or distributed.several()):
            try:
                self.commit()
            except Exception as error:
                self.error = error


def wait_for(writes: Iterable[Writes]) -> Exception | None:
    """Waits for all, so that nothing is written any more; what went wrong first."""
    problem: Exception | None = None
    for write in writes:
        try:
            write.result()
        except Exception as error:
            problem = problem or error
    return problem
