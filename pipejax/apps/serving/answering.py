"""The answers of a request: transfers results from the engine's thread to the event loop, as pieces of text."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable

from pipejax.apps.serving.answer import Answer, Closed, Event, Found, Full, Request
from pipejax.apps.serving.counters import Counters
from pipejax.apps.serving.engine import Engine
from pipejax.apps.serving.refusals import Refused
from pipejax.apps.serving.requests import ClientRequest
from pipejax.apps.serving.row_text import FormatWriting, Piece, Writing
from pipejax.inference import decoding_options
from pipejax.inference.answers import Record
from pipejax.inference.generator import Generator
from pipejax.system.errors import UserError, out_of_memory

RETRY = 1  # seconds until a full queue may have room


@dataclasses.dataclass
class Choice:
    """One answer of a request, an element of "choices" in the response."""

    index: int
    writing: Writing | FormatWriting
    answer: Answer  # the engine's answer
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    tokens: int = 0
    record: Record | None = None
    reason: str | None = None  # the reason of its end: "stop" or "length"


class Completion:
    """All answers of a request."""

    def __init__(self, asked: ClientRequest, generator: Generator, engine: Engine, counters: Counters) -> None:
        """Submits all answers of the request to the engine; after an error no answer stays submitted.

        Raises:
          UserError: the model does not support the request.
          Full: the queue has no room.
          Closed: the engine is closed.
        """
        self.asked, self._counters = asked, counters
        self._has_log_probs = asked.logprobs is not None or generator.config.decode.scores
        self._has_records = generator.tokenizer is None or asked.rows  # whether responses contain records
        self._begun = time.perf_counter()
        self.choices = list[Choice]()
        self._has_begun = False  # whether a result has arrived
        start = generator.make_strategy(asked.method, drafts=False).start
        write: Callable[[], Writing | FormatWriting] = functools.partial(
            Writing,
            generator.tokenizer,
            start=start,
            separator=generator.config.data.separator,
            stop=asked.stop,
            as_written=asked.rows and asked.stream,
            unique=generator.config.decode.unique_rows,
        )
        if asked.answer_format:
            write = functools.partial(FormatWriting, asked.answer_format, start=start)
        try:
            for source in (source._replace(sample=k) for source in asked.sources for k in range(asked.n)):
                request = Request(
                    source,
                    asked.method,
                    dataclasses.replace(asked.sampling, seed=decoding_options.seed_of(source, asked.sampling.seed)),
                    max_tokens=asked.max_tokens,
                    row_tokens=asked.row_tokens,
                    log_probs=self._has_log_probs,
                    at_once=asked.stream or bool(asked.stop),
                    adapter=asked.model if generator.adapter else "",
                )
                self.choices.append(Choice(len(self.choices), write(), engine.submit(request)))
        except BaseException:
            self.close()
            raise
        counters.prompt_tokens.inc(asked.prompt_tokens)

    async def run(self, silence: float) -> AsyncIterator[list[tuple[Choice, list[Piece]]]]:
        """Yields the new pieces of each choice, until all choices are complete.

        After `silence` seconds without a result, the method yields an empty list.

        Raises:
          BaseException: the error of an answer.
        """
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[list[_Item]]()

        def send(items: list[_Item]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, so there is no reader
                loop.call_soon_threadsafe(inbox.put_nowait, items)

        for choice in self.choices:
            choice.answer.listen(functools.partial(self._hear, send, choice.index))
        while any(choice.reason is None for choice in self.choices):
            added, items = dict[int, list[Piece]](), list[_Item]()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(silence):
                    items += await inbox.get()
            while not inbox.empty():
                items += inbox.get_nowait()
            for i, item in items:
                if self.choices[i].reason is None:
                    if isinstance(item, BaseException):
                        raise item
                    added.setdefault(i, []).extend(self._add(self.choices[i], item))
            for i, pieces in added.items():
                self.choices[i].pieces += pieces
            yield [(self.choices[i], pieces) for i, pieces in added.items()]

    def _hear(self, send: Callable[[list["_Item"]], None], i: int, found: Found) -> None:
        """Sends results of a choice to the event loop. Called by the engine's thread."""
        if i == 0 and not self._has_begun and found and not isinstance(found[0], BaseException):
            self._has_begun = True
            self._counters.first.observe(time.perf_counter() - self._begun)
        each = self.asked.stream or bool(self.asked.stop) or self.asked.logprobs is not None
        if items := [(i, item) for item in found if each or not isinstance(item, Event)]:
            send(items)

    def _add(self, choice: Choice, item: Event | Record) -> list[Piece]:
        """Adds a result to a choice, and returns the new pieces of its text."""
        if isinstance(item, Event):
            choice.tokens += 1
            pieces = list(choice.writing.add(*item))
            if choice.writing.stopped:
                choice.answer.cancel()
                self._end(choice, "stop")
            return pieces
        choice.record = item
        pieces = list(choice.writing.end())
        choice.tokens = sum(map(len, item["row_ids"]))  # without the tokens of rows that the record leaves out
        is_cut = item["truncated"] and not choice.writing.stopped
        self._end(choice, "length" if is_cut else "stop")
        return pieces

    async def finish(self, silence: float) -> None:
        """Waits until all choices are complete."""
        async for _ in self.run(silence):
            pass

    def _end(self, choice: Choice, reason: str) -> None:
        choice.reason = reason
        self._counters.answers.labels(reason).inc()
        self._counters.tokens.inc(choice.tokens)

    def close(self, reason: str = "cancelled") -> None:
        """Cancels the choices that are not complete; `reason` is for the counters."""
        for choice in self.choices:
            if choice.reason is None:
                choice.answer.cancel()
                self._end(choice, reason)

    def usage(self) -> dict[str, int]:
        """Returns the counts of tokens, as in OpenAI's "usage"."""
        written = sum(choice.tokens for choice in self.choices)
        found = {"prompt_tokens": self.asked.prompt_tokens, "completion_tokens": written}
        found["total_tokens"] = sum(found.values())
        return found | ({"cut_tokens": self.asked.cut_tokens} if self.asked.cut_tokens else {})

    def text_of(self, choice: Choice) -> str:
        """Returns the text of a choice."""
        if choice.record is not None and not self.asked.stop:
            return choice.record["text"] or ""
        return "".join(piece.text for piece in choice.pieces)

    def record_of(self, choice: Choice) -> dict[str, object]:
        """Returns {"record": record} if the response contains records, else {}."""
        if not self._has_records or choice.record is None:
            return {}
        record: dict[str, object] = {**choice.record}
        if not self._has_log_probs:
            record = {name: value for name, value in record.items() if name not in ("log_prob", "log_probs")}
        return {"record": record | ({"sample": choice.index % self.asked.n} if self.asked.n > 1 else {})}


_Item = tuple[int, Event | Record | BaseException]  # a result and the index of its choice


def refusal_for(error: BaseException) -> Refused:
    """Returns the response for an exception. An exception that the client did not cause is an error of the server."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, Full):
        return Refused(429, "the queue is full; try again", code="queue_full", headers={"Retry-After": str(RETRY)})
    if isinstance(error, Closed):
        return Refused(503, "the server is shutting down", code="draining", headers={"Retry-After": "5"})
    if isinstance(error, UserError):
        return Refused(400, error)
    if out_of_memory(error):
        return Refused(503, "too little memory for this request", code="out_of_memory")
    return Refused(500, "internal error of the server; its log has the details", code="internal_error")
