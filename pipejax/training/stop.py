"""Stops a training run in an orderly way when it receives a signal."""

import logging
import signal
import threading
from types import FrameType

from pipejax.system import distributed

logger = logging.getLogger(__name__)


class Stop:
    """Handles SIGTERM and SIGINT: the first asks for a checkpoint at the next step, the second ends the process.

    A signal to any process of a run stops all processes at the same step. Python delivers signals to the main thread
    only, so no handler is installed when the object is created in another thread.
    """

    def __init__(self) -> None:
        numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        self.signal: int | None = None  # the signal that this process received
        self.agreed = 0  # the signal that all processes agreed on; 0: none
        self._vote = distributed.Vote()
        self._before = {number: signal.signal(number, self._ask) for number in numbers}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.close()
            if number == signal.SIGINT:
                raise KeyboardInterrupt("again: ended without a checkpoint; the same command resumes from the last one")
            signal.raise_signal(number)
        self.signal = number

    def asked(self) -> bool:
        """Returns whether the run has to stop here.

        All processes must call it at the same points: each step, and each batch of an evaluation.
        """
        if not self.agreed and (found := self._vote(self.signal or 0)):
            self.agreed = found
            logger.info(
                f"{signal.Signals(found).name}: stopping here, after a checkpoint if there are new steps; "
                "a second signal ends the run at once"
            )
        return self.agreed > 0

    def close(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
