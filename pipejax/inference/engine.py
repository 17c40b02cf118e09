"""Many requests at a time, each answered as if it were alone: continuous batching for a server.

A thread of the engine's own decodes. It goes on with all requests that have a place, a few steps at a time, and in
between gives places that became free to those that wait.
"""

import dataclasses
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np

from pipejax.decoding import MOST_LIKELY, Decoded, Refillable, Sampling
from pipejax.inference import wishes
from pipejax.inference.answers import Record, record_of
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import NO_END, Encodings, RunningBatch, Switch
from pipejax.inference.schema import Schema
from pipejax.inference.sources import Source
from pipejax.methods import Method
from pipejax.system.errors import UserError

logger = logging.getLogger(__name__)


class Full(Exception):
    """As many requests wait as may."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A source to decode, and the way to do it."""

    source: Source  # as `Generator.source` gives it
    strategy: str
    sampling: Sampling = MOST_LIKELY
    max_tokens: int | None = None  # of all rows together; None: as many as the grid holds
    log_probs: bool = True  # whether events and record have them; else they are 0, or lack
    at_once: bool = True  # whether events come as tokens are written; else they may all come in the end
    row_tokens: int | None = None  # of each row, if the source has a schema; None: as many as the grid holds
    adapter: str = ""  # one of the generator's, whose settings count; "": the base


class Event(NamedTuple):
    """A token was written."""

    row: int
    token: int
    log_prob: float


Found = Sequence[Event | Record | BaseException]  # of one answer; its last is the record or an error


class Answer:
    """The result of a request as it comes. May be read or listened to by one thread, and cancelled by any."""

    def __init__(self, request: Request, generator: Generator, kind: "Kind", wake: Callable[[], None]) -> None:
        """Nothing has come yet."""
        self.request, self.generator, self.kind = request, generator, kind
        self.cancelled = False
        self._wake = wake
        self._found: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self._hear: Callable[[Found], None] = self._found.put
        self._telling = threading.Lock()

    def events(self) -> Iterator[Event | Record]:
        """Yields each token as it is written, and the record in the end, with `log_prob` and `log_probs`.

        The tokens of a step come row by row, those of rows that the record leaves out as well (`decode.unique_rows`).
        If the request was cancelled, what was not yet written does not come.
        """
        while True:
            for found in self._found.get():
                if isinstance(found, BaseException):
                    raise found
                yield found
                if isinstance(found, dict):
                    return

    def listen(self, hear: Callable[[Found], None]) -> None:
        """Has all that comes told to `hear`, which the engine waits for, and not to `events`; all that came as well."""
        with self._telling:
            self._hear = hear
            while not self._found.empty():
                hear(self._found.get())

    def cancel(self) -> None:
        """Frees its place."""
        self.cancelled = True
        self._wake()

    def give(self, *found: "Event | Record | BaseException") -> None:
        """Called by the engine; who waits is woken once."""
        with self._telling:
            self._hear(found)


class Closed(Exception):
    """The engine takes no more requests, or ended before this one was answered."""


@dataclasses.dataclass
class _Running:
    """A request that has a place."""

    answer: Answer
    lengths: np.ndarray  # i32 [R], tokens of each row that were given
    count: int = 0  # of all rows
    steps: int = 0  # taken


class Kind(NamedTuple):
    """Requests that can be decoded together, whatever adapters they have."""

    strategy: Refillable
    method: Method  # its rows may begin as told


class _Lane(NamedTuple):
    """Requests that are decoded together. One that comes alone has a lane to itself, in which a step is faster."""

    kind: Kind
    places: int
    schema: Schema | None  # that all follow


class Engine:
    """Answers requests with one T5 on one device, each strategy and its settings in batches of their own.

    Attributes:
      answered: requests that were.
      tokens: that were written for them.
      failed: requests that an error of the engine ended.
      encodings: of the latest sources.
    """

    def __init__(self, generator: Generator, *, places: int, queue: int, encodings: int = 0) -> None:
        """Starts the thread."""
        self.generator, self.places, self._most_waiting = generator, places, queue
        self.answered = self.tokens = self.failed = 0
        self.encodings = Encodings(encodings)
        self._waiting: deque[Answer] = deque()
        self._batches: dict[_Lane, RunningBatch] = {}
        self._running: dict[_Lane, dict[int, _Running]] = {}
        self._beside = False  # whether somebody was there when the last request got its place: so it may be again
        self._change, self._switch = threading.Condition(), Switch()
        self._open, self._stops = True, False
        self._kinds = {self._kind(one, one.default_strategy): one for one in (generator, *generator.adapters.values())}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests without a place."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests with one."""
        return sum(map(len, self._running.values()))

    def submit(self, request: Request) -> Answer:
        """Takes a request; returns at once."""
        if request.source.prefixes or request.source.max_rows is not None:
            raise UserError("row_prefixes, max_rows: found in a request to the engine; expected a plain source")
        generator = self.generator.adapted(request.adapter) if request.adapter else self.generator
        kind = self._kind(generator, request.strategy)
        if temperature := request.sampling.temperature:
            kind.method.require("sample", f"temperature: found {temperature}", 0)
        if request.log_probs:
            kind.method.require("score", "logprobs: found some")
        wishes.rows_of(request.source, kind.method, self.generator.tokenizer)
        answer = Answer(request, generator, kind, self._switch.throw)
        with self._change:
            if not self._open:
                raise Closed("the engine takes no more requests")
            if len(self._waiting) >= self._most_waiting + max(self.places - self.running, 0):
                raise Full(f"{len(self._waiting)} requests wait")
            self._waiting.append(answer)
            self._change.notify()
            if self._running_with(kind) < self.places:
                self._switch.throw()
        return answer

    def warm_up(self, length: int) -> None:
        """Compiles what prompts of so many tokens need with the default strategy; before there are requests."""
        source = Source("", [self.generator.architecture.eos_token_id] * length)
        for kind, places in itertools.product(self._kinds, {1, self.places}):
            batch, generator = self._batch(_Lane(kind, places, None), source), self._kinds[kind]
            for log_probs in (False, True):
                place = batch.add(generator.ids_of(source), log_probs=log_probs, adapter=generator.adapter)
                batch.advance(1)
                batch.drop(place)
            self.encodings.clear()  # each lane compiles an encoder of its own

    def close(self, *, drain: bool, seconds: float) -> None:
        """Takes no more requests and ends the thread; with `drain` after at most so many seconds of answering."""
        with self._change:
            self._open, self._stops = False, not drain
            self._change.notify()
            if self._stops:
                self._switch.throw()
        self._thread.join(seconds)
        with self._change:
            self._stops = True
        self._switch.throw()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                while self._open and not self._waiting and not self.running:
                    self._change.wait()
                self._switch.reset()  # before it looks who came or what is over: what comes later throws it again
                if self._stops or not (self._open or self._waiting or self.running):
                    break
            try:
                self._admit()
                for lane in [lane for lane, running in self._running.items() if running]:
                    self._advance(lane)
            except Exception as error:  # of the device, of memory: whoever waits for an answer must hear of it
                logger.exception("decoding failed")
                self._fail(error)
        self._fail(Closed("the engine was closed"))

    def _fail(self, error: BaseException) -> None:
        """Tells those who have a place; who waits has another try, unless it is the end."""
        lost = [one.answer for places in self._running.values() for one in places.values()]
        if isinstance(error, Closed):
            with self._change:
                lost += self._waiting
                self._waiting.clear()
        for answer in lost:
            answer.give(error)
        self.failed += len(lost)
        self._batches.clear()
        self._running.clear()
        self.encodings.clear()  # which may have taken the memory that lacked

    def _admit(self) -> None:
        """Gives free places to those who wait longest."""
        for lane in self._running:
            for place, one in [*self._running[lane].items()]:
                if one.answer.cancelled:
                    self._leave(lane, place)
        while (answer := self._next()) is not None:  # others may come while one is encoded
            request, kind = answer.request, answer.kind
            if answer.cancelled:
                answer.give(Closed("the request was cancelled"))
                continue
            with self._change:
                others = any(one.kind == kind and not one.cancelled for one in self._waiting)
            beside = others or self._running_with(kind) > 0
            places, self._beside = self.places if beside or self._beside else 1, beside
            lane = _Lane(kind, places, request.source.schema)
            try:
                batch = self._batch(lane, request.source)
                place = batch.add(
                    answer.generator.ids_of(request.source),
                    request.sampling,
                    log_probs=request.log_probs,
                    row_tokens=request.row_tokens,
                    adapter=answer.generator.adapter,
                )
            except Exception as error:
                answer.give(error)  # the others are told where this is caught
                raise
            self._running[lane][place] = _Running(answer, np.zeros(len(batch.starts), np.int64))

    def _next(self) -> Answer | None:
        """Takes the first of those that wait who may have a place, or was cancelled."""
        with self._change:
            for answer in self._waiting:
                if answer.cancelled or self._running_with(answer.kind) < self.places:
                    self._waiting.remove(answer)
                    return answer
        return None

    def _running_with(self, kind: Kind) -> int:
        """Requests of the kind that have a place."""
        running = [*self._running.items()]  # at once: the engine's thread may add a lane
        return sum(len(places) for lane, places in running if lane.kind == kind)

    def _batch(self, lane: _Lane, source: Source) -> RunningBatch:
        """That of the lane; `source`: one of its requests, as the rows of all begin alike."""
        if lane not in self._batches:
            made, method = lane.kind
            kin = [one for one in self._batches if one[:2] == lane[:2]]
            if idle := next((one for one in kin if not self._running[one]), None):  # it has all memory it needs
                batch = self._batches.pop(idle)
                del self._running[idle]
            elif kin:
                batch = self._batches[kin[0]].twin()
            else:
                programs = self.generator.programs
                batch = RunningBatch(programs, made, lane.places, self._switch, self.encodings)
            batch.give(wishes.forced_of(wishes.rows_of(source, method, self.generator.tokenizer), made), source.schema)
            self._batches[lane], self._running[lane] = batch, {}
        return self._batches[lane]

    def _kind(self, generator: Generator, name: str) -> Kind:
        """Without drafts, whose states hold a whole batch."""
        method = generator.method(name)
        method.require("serve")
        method.check()
        if generator.config.decode.limit != "none":
            raise UserError(f"decode.limit: found {generator.config.decode.limit}; expected none, to be served")
        return Kind(cast(Refillable, generator.make_strategy(name, drafts=False)), method)

    def _advance(self, lane: _Lane) -> None:
        """Some steps of all requests of a lane: no pause but for those who wait for something."""
        batch, alone = self._batches[lane], sum(map(bool, self._running.values())) == 1
        running = self._running[lane].values()
        often = not alone or any(one.answer.request.at_once for one in running)
        bounds = [(one, one.answer.request.max_tokens) for one in running]
        most = min((batch.steps_for(n - one.count, one.steps) for one, n in bounds if n is not None), default=NO_END)
        decoded, done = batch.advance(most, often=often)
        for place, one in [*self._running[lane].items()]:
            self._tell(one, batch, decoded, place)
            over = one.answer.request.max_tokens is not None and one.count >= one.answer.request.max_tokens
            if over or done[place]:
                one.answer.give(self._record(one, lane, decoded, place, cut=over and not done[place]))
                self.answered += 1
                self._leave(lane, place)

    def _tell(self, one: _Running, batch: RunningBatch, decoded: Decoded, place: int) -> None:
        """Gives the tokens that are new, up to as many as are asked for."""
        assert decoded.log_probs is not None, "a `RunningBatch` asks for them"
        most, one.steps = one.answer.request.max_tokens, int(decoded.steps[place])
        new, events = batch.news(decoded, place, one.lengths), []
        for time, row, j in new[: None if most is None else max(most - one.count, 0)]:
            log_prob = float(decoded.log_probs[place, row, time])
            events.append(Event(row, int(decoded.tokens[place, row, j]), log_prob))
            one.lengths[row] = j + 1
            one.count += 1
        self.tokens += len(events)
        one.answer.give(*events)

    def _record(self, one: _Running, lane: _Lane, decoded: Decoded, place: int, *, cut: bool) -> Record:
        """The record of an answer; `cut`: it has as many tokens as were asked for, and would go on."""
        only = jax.tree.map(lambda x: x[place : place + 1], decoded)
        kept = np.minimum(only.lengths, one.lengths)
        cut |= bool((kept < only.lengths).any())
        strategy, method = lane.kind
        only = dataclasses.replace(only, lengths=kept, calls=strategy.calls(only))
        if not one.answer.request.log_probs:
            only = dataclasses.replace(only, log_probs=None)
        record = record_of(
            one.answer.request.source,
            method,
            only,
            0,
            start=strategy.start,
            config=one.answer.generator.config,
            tokenizer=self.generator.tokenizer,
            ends=not cut,
        )
        if cut:
            record["truncated"] = "max_tokens"
        return record

    def _leave(self, lane: _Lane, place: int) -> None:
        one = self._running[lane].pop(place)
        self._batches[lane].drop(place)
        if one.answer.cancelled:
            one.answer.give(Closed("the request was cancelled"))
