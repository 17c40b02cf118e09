"""A thread that compiles beside those that work: first for whoever waits, then what was planned."""

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from pipejax.system import cli

logger = logging.getLogger(__name__)

Needs = Mapping[Hashable, Callable[[], object]]  # what has to be compiled, by key, with what does it
Told = Callable[[Hashable, Exception | None], None]
END, WANTED, PLANNED, LATER, LAST = range(5)  # in this order; a request waits for what is wanted


class Compiler:
    """Compiles one program after the other."""

    def __init__(self, tell: Told) -> None:
        """Starts the thread, which calls `tell` with each need that is met, or whose compilation failed."""
        self.compiled: dict[Hashable, Any] = {}  # programs, and keys of needs that are met; for all threads
        self.planned = self.prepared = 0  # needs asked for as PLANNED, and those of them that are met
        self._tell, self._numbers = tell, itertools.count()
        self._asked = queue.PriorityQueue[tuple[int, int, Hashable, Callable[[], object]]]()
        self.thread = threading.Thread(target=self._run, name="compiler", daemon=True)
        self.thread.start()

    def ask(self, needs: Needs, order: int = WANTED) -> None:
        """Has them met, unless they are; returns at once."""
        if order == PLANNED:
            self.planned += len(needs)
        for key, make in needs.items():
            self._asked.put((order, next(self._numbers), key, make))

    def close(self) -> None:
        """Compiles no more; what is under way is not waited for."""
        self._asked.put((END, next(self._numbers), None, lambda: None))

    def _run(self) -> None:
        while (asked := self._asked.get())[0] != END:
            self._meet(*asked)
            del asked  # and what it would make

    def _meet(self, order: int, _: int, key: Hashable, make: Callable[[], object]) -> None:
        error = None
        if key not in self.compiled:
            try:
                with cli.unneeded():
                    make()
                self.compiled[key] = True
            except Exception as failed:  # of memory, of a device: whoever waits must hear of it
                logger.error(f"compiling failed: {failed}")
                error = failed
                error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames hold what was made
        self._tell(key, error)
        self.prepared += order == PLANNED and error is None
