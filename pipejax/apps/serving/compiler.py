"""A background thread that compiles programs: first programs that a request waits for, then the planned programs."""

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Hashable

from pipejax.system import cli
from pipejax.system.compiled import CompiledPrograms, Needs

logger = logging.getLogger(__name__)

Told = Callable[[Hashable, Exception | None], None]
END, WANTED, PLANNED, LATER, LAST = range(5)  # priorities, in this order; a request waits for WANTED programs


class Compiler:
    """Compiles one program after the other in a background thread."""

    def __init__(self, tell: Told) -> None:
        """Starts the thread.

        `tell` is called by that thread with the key of each need, and with the exception if its compilation failed.
        """
        # The table of compiled programs and of the keys of needs that are met. Any thread may read the table.
        self.compiled = CompiledPrograms()
        self.planned = self.prepared = 0  # number of needs requested as PLANNED, and number of these that are met
        self._tell, self._numbers = tell, itertools.count()
        self._asked = queue.PriorityQueue[tuple[int, int, Hashable, Callable[[], object]]]()
        self.thread = threading.Thread(target=self._run, name="compiler", daemon=True)
        self.thread.start()

    def ask(self, needs: Needs, order: int = WANTED) -> None:
        """Queues the needs, and returns at once; a need that is met already is reported again, but not compiled."""
        if order == PLANNED:
            self.planned += len(needs)
        for key, make in needs.items():
            self._asked.put((order, next(self._numbers), key, make))

    def close(self) -> None:
        """Stops compiling; does not wait for a compilation in progress."""
        self._asked.put((END, next(self._numbers), None, lambda: None))

    def _run(self) -> None:
        while (asked := self._asked.get())[0] != END:
            self._compile(*asked)
            del asked  # frees the request and the objects that it refers to

    def _compile(self, order: int, _: int, key: Hashable, make: Callable[[], object]) -> None:
        """Compiles one need, and reports its key and the exception, if any, to `tell`."""
        error = None
        try:
            with cli.unneeded():
                self.compiled.find(key, make)
        except Exception as failed:  # the waiting requests get the error, such as a lack of memory
            logger.error(f"compiling failed: {failed}")
            error = failed
            # The frames of the traceback would keep intermediate results alive.
            error.__traceback__ = error.__context__ = error.__cause__ = None
        self._tell(key, error)
        self.prepared += order == PLANNED and error is None
