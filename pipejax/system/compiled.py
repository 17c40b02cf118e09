"""A table of compiled programs in which each program is compiled once."""

import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

Needs = Mapping[Hashable, Callable[[], object]]  # programs to compile: by key, the function that compiles one


class CompiledPrograms(dict[Hashable, Any]):
    """Compiled programs by key. Thread-safe: if several threads need a program, one of them compiles it.

    A key contains everything that a program depends on. A key may also represent several programs that are compiled
    together; its value is then the result of the function that compiled them.
    """

    def __init__(self) -> None:
        """Creates a table without programs."""
        super().__init__()
        self._lock, self._locks = threading.Lock(), dict[Hashable, threading.Lock]()

    def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns the program of a key, compiled by `make` if the table does not have it.

        A call waits while another thread compiles the program. If the other thread fails, the waiting call
        compiles the program, because a compilation that lacked memory may succeed later. `make` may call `find` with
        other keys.

        Args:
          key: the key.
          make: compiles the program. If it raises an exception, the table does not change.
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
