"""Ending a run in good order when a signal asks for it."""

import logging
import signal
import threading
from types import FrameType

from pipejax.system import distributed

logger = logging.getLogger(__name__)


class Stop:
    """SIGTERM and SIGINT ask for a checkpoint at the next step boundary; a second one ends the process at once.

    A signal to any one of several processes stops all of them, at the same step. Only a main thread gets signals.
    """

    def __init__(self) -> None:
        numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        self.signal: int | None = None  # that this process got
        self.agreed = 0  # that all know of
        self._vote = distributed.Vote()
        self._before = {number: signal.signal(number, self._ask) for number in numbers}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.close()
            if number == signal.SIGINT:
                raise KeyboardInterrupt("again: ended without a checkpoint; the same command goes on from the last one")
            signal.raise_signal(number)
        self.signal = number

    def asked(self) -> bool:
        """Whether to stop here. All processes must call it alike: at each step, and in evaluations at each batch."""
        if not self.agreed and (found := self._vote(self.signal or 0)):
            self.agreed = found
            logger.info(f"{signal.Signals(found).name}: stopping here, with a checkpoint; a second one ends it at once")
        return self.agreed > 0

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
