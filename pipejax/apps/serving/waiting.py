"""The requests that wait for a place in a batch."""

import threading
from collections import deque
from collections.abc import Callable, Hashable

from pipejax.apps.serving.answer import Answer, Kind


class Waiting:
    """Answers that wait for a place, in the order in which the places are given. Thread-safe.

    Attributes:
      lock: a reentrant lock that all methods take; the holder may call several methods in one turn.
    """

    def __init__(self) -> None:
        """Creates an empty queue."""
        self.lock = threading.RLock()
        self._answers: deque[Answer] = deque()

    def __len__(self) -> int:
        """Returns the number of waiting answers."""
        return len(self._answers)

    def append(self, answer: Answer) -> None:
        """Adds an answer behind all other answers."""
        with self.lock:
            self._answers.append(answer)

    def put_first(self, answer: Answer) -> None:
        """Adds an answer before all other answers."""
        with self.lock:
            self._answers.appendleft(answer)

    def remove(self, answer: Answer) -> None:
        """Removes an answer, if the answer waits."""
        with self.lock:
            if answer in self._answers:
                self._answers.remove(answer)

    def first(self, is_due: Callable[[Answer], bool]) -> Answer | None:
        """Returns the first answer for which `is_due` holds, or None."""
        with self.lock:
            return next((answer for answer in self._answers if is_due(answer)), None)

    def has_others(self, answer: Answer, kind: Kind) -> bool:
        """Returns whether other answers of a kind wait and are not cancelled."""
        with self.lock:
            return any(one.kind == kind and not one.cancelled for one in self._answers if one is not answer)

    def settle(self, key: Hashable, *, failed: bool) -> list[Answer]:
        """Marks a program as no longer awaited.

        Args:
          key: the key of the program.
          failed: whether the compilation failed; the answers that awaited the program are then removed.

        Returns:
          The answers that awaited the program.
        """
        with self.lock:
            found = [answer for answer in self._answers if key in answer.awaits]
            for answer in found:
                answer.awaits.discard(key)
                if failed:
                    self._answers.remove(answer)
            return found

    def clear(self) -> list[Answer]:
        """Removes all answers, and returns them."""
        with self.lock:
            found = [*self._answers]
            self._answers.clear()
            return found
