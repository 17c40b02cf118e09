"""A table of compiled programs, each of which is compiled once."""

import threading
from collections.abc import Callable, Hashable
from typing import Any


class CompiledPrograms(dict[Hashable, Any]):
    """Compiled programs by key. Thread-safe: a program that several threads ask for is compiled by one of them.

    A key has all that a program depends on. A key may also stand for several programs that are compiled together; its
    value is then what the function that compiled them returned.
    """

    def __init__(self) -> None:
        """Creates a table without programs."""
        super().__init__()
        self._lock, self._locks = threading.Lock(), dict[Hashable, threading.Lock]()

    def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the program of a key, compiled by `make` if the table does not have it.

        A call waits while another thread compiles the program, and compiles it itself if the other thread failed: a
        compilation that lacked memory may succeed later. `make` may look for other keys.

        Args:
          key: the key.
          make: compiles the program. If it raises an error, the table stays as it was.
        """
        try:
            return self[key]
        except KeyError:
            with self._lock:
                own = self._locks.setdefault(key, threading.Lock())
        with own:
            if key not in self:
                self[key] = make()
                self._locks.pop(key, None)
            return self[key]
