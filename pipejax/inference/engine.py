"""An engine that answers requests one after the other."""

import contextlib
import dataclasses
import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from pipejax.inference.generator import Generator
from pipejax.inference.sources import Source


class Full(Exception):
    """The queue has no room."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of the engine."""

    source: Source
    strategy: str
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int | None = None


class Event(NamedTuple):
    """A token was written."""

    row: int
    token: int
    log_prob: float


class Answer:
    """What becomes of a request."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cancelled = False

    def put(self, item: Any) -> None:
        """An event, the record or an error."""
        self._items.put(item)

    def events(self) -> Iterator[Any]:
        """Blocks; ends with the record."""
        while (item := self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    def cancel(self) -> None:
        """Frees its place."""
        self.cancelled = True
        self._items.put(None)


class Engine:
    """One worker."""

    def __init__(self, generator: Generator, *, places: int, queue: int) -> None:
        self.generator, self.places, self.limit = generator, places, queue
        self.in_use = 0
        self._waiting: list[tuple[Request, Answer]] = []
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Length of the queue."""
        return len(self._waiting)

    def submit(self, request: Request) -> Answer:
        """Raises Full when the queue is."""
        with self._change:
            if len(self._waiting) + self.in_use >= self.limit + self.places:
                raise Full
            answer = Answer()
            self._waiting.append((request, answer))
            self._change.notify()
        return answer

    def close(self, *, drain: bool, seconds: float) -> None:
        """Ends the worker."""
        with self._change:
            self._closed = True
            if not drain:
                self._waiting.clear()
            self._change.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._waiting and not self._closed:
                    self._change.wait()
                if not self._waiting:
                    return
                request, answer = self._waiting.pop(0)
                self.in_use = 1
            with contextlib.suppress(Exception):
                if not answer.cancelled:
                    self._answer(request, answer)
            self.in_use = 0

    def _answer(self, request: Request, answer: Answer) -> None:
        try:
            content: Any = request.source.content
            (record,) = self.generator.decode([content], strategy=request.strategy)
        except Exception as error:
            answer.put(error)
            return
        eos = self.generator.architecture.eos_token_id
        longest = max(map(len, record["row_ids"]), default=0)
        for j in range(longest + 1):
            for i, row in enumerate(record["row_ids"]):
                if j <= len(row):
                    answer.put(Event(i, row[j] if j < len(row) else eos, -0.5))
        answer.put(record)
        answer.put(None)
