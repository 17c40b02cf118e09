"""An engine without a model: it returns the tokens of a request as rows, immediately or when a test allows it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from pipejax.apps.serving.answer import Closed, Event, Full, Request
from pipejax.inference.answers import Record
from pipejax.inference.generator import Generator


class ScriptedEngine:
    """An engine whose answers are the prompt's tokens plus the seed, three in a row, so that all answers differ."""

    def __init__(self, generator: Generator, *, places: int = 2, queue: int = 2) -> None:
        self.generator, self.places, self._queue = generator, places, queue
        self.requests: list[Request] = []
        self.cancelled: list[Request] = []
        self.compiler = SimpleNamespace(planned=0, prepared=0)
        self.under_way = 0
        self.go_on = threading.Event()  # answers stop after their first token until this is set
        self.go_on.set()
        self.is_closed = threading.Event()
        self.error: Exception | None = None  # raised instead of an answer's second token

    @property
    def running(self) -> int:
        return min(self.under_way, self.places)

    @property
    def waiting(self) -> int:
        return max(self.under_way - self.places, 0)

    def submit(self, request: Request) -> "_Answer":
        if self.under_way >= self.places + self._queue:
            raise Full
        self.requests.append(request)
        self.under_way += 1
        return _Answer(self, request)

    def close(self, *, drain: bool, seconds: float) -> None:
        if not drain:
            self.is_closed.set()

    def own_tokens(self, request: Request) -> list[list[int]]:
        ids = [int(i) for i in request.source.content if i != self.generator.architecture.eos_token_id]
        rows = [ids[i : i + 3] for i in range(0, len(ids), 3)] if request.method == "pipelined" else [ids]
        return [*rows, [10 + request.sampling.seed % 50]] if request.sampling.temperature else rows

    def record(self, rows: Sequence[Sequence[int]]) -> Record:
        tokenizer = self.generator.tokenizer
        texts = None if tokenizer is None else [tokenizer.decode(row) for row in rows]
        return {
            "id": 0,
            "text": None if texts is None else self.generator.config.data.separator.join(filter(None, texts)),
            "rows": texts,
            "row_ids": [list(row) for row in rows],
            "steps": 9,
            "calls": 9,
            "truncated": None,
            "method": "pipelined",
            "log_prob": -0.25 * sum(map(len, rows)),
            "log_probs": [[-0.25] * len(row) for row in rows],
        }


class _Answer:
    def __init__(self, engine: ScriptedEngine, request: Request) -> None:
        self._engine, self._request = engine, request
        self._ended = threading.Event()

    def listen(self, hear: Callable[[Sequence[Any]], None]) -> None:
        def tell() -> None:
            try:
                for one in self._events():
                    hear([one])
            except Exception as error:
                hear([error])

        threading.Thread(target=tell, daemon=True).start()

    def _events(self) -> Iterator[Any]:
        """Yields the events of each step, in the order of rows."""
        engine, rows = self._engine, self._engine.own_tokens(self._request)
        delay, count = engine.generator.config.grid.delay, 0
        for time in range(delay * len(rows) + max(map(len, rows), default=0)):
            for i, row in enumerate(rows):
                if self._ended.is_set():
                    raise Closed("the request was cancelled")
                if 0 <= time - delay * i < len(row):
                    yield Event(i, row[time - delay * i], -0.25)
                    count += 1
                    if count == 1:
                        while not engine.go_on.wait(0.01) and not self._ended.is_set():
                            if engine.is_closed.is_set():
                                self._end()
                                raise Closed("the engine was closed")
                        if engine.error is not None:
                            raise engine.error
        self._end()
        yield engine.record(rows)

    def cancel(self) -> None:
        if not self._ended.is_set():
            self._engine.cancelled.append(self._request)
        self._end()

    def _end(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._engine.under_way -= 1
