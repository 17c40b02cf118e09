"""Many requests at a time, each answered as if it were alone: continuous batching for a server.

A thread of the engine's own decodes. It goes on with all requests that have a place, a few steps at a time, and in
between gives places that became free to those that wait. Another thread compiles: a request waits for its programs, and
the others go on.
"""

import dataclasses
import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, cast

import jax
import numpy as np

from pipejax.data.shapes import bucket, memory_length
from pipejax.decoding import MOST_LIKELY, Decoded, Refillable, Sampling
from pipejax.inference import schema as schema_lib
from pipejax.inference import wishes
from pipejax.inference.answers import Record, record_of
from pipejax.inference.compiler import LAST, LATER, PLANNED, Compiler, Needs
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import NO_END, Encodings, RunningBatch, Steps, Switch
from pipejax.inference.schema import Schema
from pipejax.inference.sources import Source
from pipejax.methods import Method
from pipejax.system.errors import UserError, out_of_memory

logger = logging.getLogger(__name__)


WEIGHTS = "weights"  # the key of the first need: that they are laid out


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
        self.awaits: set[Hashable] = set()  # the needs that have to be compiled before it can have a place
        self.earlier: _Running | None = None  # as far as it was told when it lost its place
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
    """Answers requests with one T5 on one device, each strategy and its settings in batches of their own."""

    def __init__(self, generator: Generator, *, places: int, queue: int, encodings: int = 0) -> None:
        """Starts the thread."""
        self.generator, self.places, self._most_waiting = generator, places, queue
        self.answered = self.tokens = self.failed = 0  # requests, tokens written, requests that an own error ended
        self.encodings = Encodings(encodings)
        self._waiting: deque[Answer] = deque()
        self._batches: dict[_Lane, RunningBatch] = {}
        self._running: dict[_Lane, dict[int, _Running]] = {}
        self._beside = False  # whether somebody was there when the last request got its place: so it may be again
        self._change, self._switch = threading.Condition(), Switch()
        self._open, self._stops, self._lacks = True, False, False
        self._told_of = set[Hashable]()  # needs that the log knows of
        self.compiler = Compiler(self._met)
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
        kind = self._kind(generator, request.strategy, drafts=request.source.schema is None)
        if temperature := request.sampling.temperature:
            kind.method.require("sample", f"temperature: found {temperature}", 0)
        if request.log_probs:
            kind.method.require("score", "logprobs: found some")
        wishes.rows_of(request.source, kind.method, self.generator.tokenizer, self.generator.ids.ends)
        answer = Answer(request, generator, kind, self._wake)
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

    def _wake(self) -> None:
        with self._change:
            self._change.notify()
        self._switch.throw()

    def warm_up(self, length: int, *, schemas: bool = False) -> None:
        """Plans to compile what prompts of up to so many tokens need with the default strategy; returns at once.

        `schemas`: also what usual schemas need, as the last of all.
        """
        self.compiler.ask({WEIGHTS: self._lay_out, "plan": lambda: self._plan(length, schemas)}, PLANNED)

    def _lay_out(self) -> None:
        _ = self.generator.programs

    def _plan(self, length: int, schemas: bool) -> None:
        lengths = sorted({bucket(n) for n in range(1, length + 1)})
        sizes = [*dict.fromkeys((self.places, 1))]
        for (kind, generator), places in itertools.product(self._kinds.items(), sizes):
            batch = self._give(self._new_batch(kind, places), kind, Source("", [1]))
            logits = {False, bool(kind.method.can & {"sample", "score"})}
            for i, slots in enumerate(batch.cache_sizes):
                order = LAST if i else PLANNED if places == self.places else LATER  # the first of them takes any prompt
                for one, n in itertools.product(sorted(logits), lengths):  # plain answers of all lengths first
                    own = None if one else n  # whose encoder the plain answers have asked for
                    self.compiler.ask(batch.needs_of(own, memory_length(n), slots, {one}, generator.adapter), order)
        if not (schemas and self.generator.tokenizer):
            return
        source = Source("", [1], schema=schema_lib.usual(self.generator.architecture.vocab_size))
        for generator, places in itertools.product(self._kinds.values(), sizes):
            try:
                kind = self._kind(generator, generator.default_strategy, drafts=False)
                schema_lib.check(kind.method, generator.config)
                batch = self._give(self._new_batch(kind, places), kind, source)
            except UserError:  # answers of this model follow no schema
                continue
            for one, n in itertools.product((False, True), lengths):
                needs = batch.needs_of(n, memory_length(n), batch.cache_sizes[0], {one}, generator.adapter)
                self.compiler.ask(needs, LAST)

    def _met(self, key: Hashable, error: Exception | None) -> None:
        """Called by the compiler's thread."""
        with self._change:
            waiting = [answer for answer in self._waiting if key in answer.awaits]
            for answer in waiting:
                answer.awaits.discard(key)
                if error:
                    self._waiting.remove(answer)
        if error:
            self._lacks |= out_of_memory(error)
            self.failed += len(waiting)
            for answer in waiting:
                answer.give(error)
        self._wake()

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
        self._wake()
        self._thread.join()
        self.compiler.close()

    def _run(self) -> None:
        while True:
            with self._change:
                while not (self._stops or self.running or self._next()) and (self._open or self._waiting):
                    self._change.wait()
                self._switch.reset()  # before it looks who came or what is over: what comes later throws it again
                if self._stops or not (self._open or self._waiting or self.running):
                    break
            try:
                if self._lacks:
                    self._free()
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

    def _free(self) -> None:
        """Gives up what nobody uses now: it may be the memory that a compilation lacked."""
        self._lacks = False
        self.encodings.clear()
        for lane in [lane for lane, running in self._running.items() if not running]:
            del self._batches[lane], self._running[lane]

    def _admit(self) -> None:
        """Gives free places to those who wait longest."""
        for lane in self._running:
            for place, one in [*self._running[lane].items()]:
                if one.answer.cancelled:
                    self._leave(lane, place)
        while (answer := self._next()) is not None:  # others may come while one is encoded
            request, source = answer.request, answer.request.source
            if answer.cancelled:
                self._take(answer)
                answer.give(Closed("the request was cancelled"))
                continue
            try:
                lane, needs = self._choose(answer)
                if needs:
                    self._await(answer, needs)
                    continue
                self._take(answer)
                place = self._batches[lane].add(
                    answer.generator.ids_of(source),
                    request.sampling,
                    log_probs=request.log_probs,
                    row_tokens=request.row_tokens,
                    adapter=answer.generator.adapter,
                )
            except Exception as error:
                self._take(answer)
                answer.give(error)  # the others are told where this is caught
                raise
            one = answer.earlier or _Running(answer, np.zeros(len(self._batches[lane].starts), np.int64))
            self._running[lane][place] = one

    def _choose(self, answer: Answer) -> tuple[_Lane, Needs]:
        """The lane for an answer that may begin, and what has to be compiled first."""
        kind, schema = answer.kind, answer.request.source.schema
        if WEIGHTS not in self.compiler.compiled:
            return _Lane(kind, self.places, None), {WEIGHTS: self._lay_out}
        with self._change:
            others = any(one.kind == kind and not one.cancelled for one in self._waiting if one is not answer)
        beside = others or self._running_with(kind) > 0
        sizes = [self.places] if beside or self._beside else [1, self.places]
        lanes = [_Lane(kind, places, schema) for places in dict.fromkeys(sizes)]
        needs = dict[_Lane, Needs]()
        for lane in lanes:
            needs[lane] = self._needs(lane, answer)
            if not needs[lane]:
                self._beside = beside
                return lane, {}
        nearest = min(lanes, key=lambda lane: len(needs[lane]))  # of which more is compiled, else that for one alone
        return nearest, needs[nearest]

    def _needs(self, lane: _Lane, answer: Answer) -> Needs:
        """The programs that an answer lacks to begin there."""
        request, length = answer.request, len(answer.generator.ids_of(answer.request.source))
        logits = request.log_probs or request.sampling.temperature > 0
        return self._batch(lane, request.source).needs(length, logits=logits, adapter=answer.generator.adapter)

    def _await(self, answer: Answer, needs: Needs) -> None:
        """Lets an answer wait, and others go on, until all that it needs is compiled."""
        with self._change:
            answer.awaits = {key for key in needs if key not in self.compiler.compiled}
        self.compiler.ask(needs)
        if not needs.keys() <= self._told_of | {WEIGHTS}:
            why = self._causes(answer, needs)
            self._told_of |= needs.keys()
            logger.info(f"compiling because of {' and '.join(why)}: a request waits for it, others go on")

    def _causes(self, answer: Answer, needs: Needs) -> list[str]:
        """What is new about an answer that needs these programs."""
        known = [key for key in [*self._told_of, *self.compiler.compiled] if isinstance(key, Steps)]
        prompt = f"a prompt of {len(answer.generator.ids_of(answer.request.source))} tokens"
        causes = dict[str, None]()
        for key in needs:
            if not isinstance(key, Steps):
                continue
            before = [one for one in known if one.strategy == key.strategy]
            features = {
                "length": prompt,
                "slots": f"an answer that needs a larger cache ({key.slots} tokens)",
                "logits": "sampling or scores" if key.logits else "answers without sampling and scores",
                "table": "answers without a schema"
                if key.table is None
                else f"a schema of a new shape ({key.table[0]} kinds of tokens, {key.table[1]} states)",
                "places": "a request that comes alone" if key.places == 1 else "requests side by side",
            }
            if not before:
                causes |= dict.fromkeys([f"the first request for {answer.kind.method.label}", prompt])
                shown = [name for name in ("logits", "table") if getattr(key, name)]
            else:
                shown = [name for name in features if getattr(key, name) not in {getattr(x, name) for x in before}]
                # Each is known, but not together.
                shown = shown or ["length", *(name for name in ("logits", "table") if getattr(key, name))]
            causes |= dict.fromkeys(features[name] for name in shown)
        return [*causes] or [prompt]

    def _next(self) -> Answer | None:
        """The first of those that wait who may begin, or was cancelled."""
        with self._change:
            for answer in self._waiting:
                if answer.cancelled or not (answer.awaits or self._running_with(answer.kind) >= self.places):
                    return answer
        return None

    def _take(self, answer: Answer) -> None:
        with self._change:
            if answer in self._waiting:
                self._waiting.remove(answer)

    def _running_with(self, kind: Kind) -> int:
        """Requests of the kind that have a place."""
        running = [*self._running.items()]  # at once: the engine's thread may add a lane
        return sum(len(places) for lane, places in running if lane.kind == kind)

    def _batch(self, lane: _Lane, source: Source) -> RunningBatch:
        """That of the lane; `source`: one of its requests, as the rows of all begin alike."""
        if lane not in self._batches:
            kin = [one for one in self._batches if one[:2] == lane[:2]]
            if idle := next((one for one in kin if not self._running[one]), None):  # it has all memory it needs
                batch = self._batches.pop(idle)
                del self._running[idle]
            elif kin:
                batch = self._batches[kin[0]].twin()
            else:
                batch = self._new_batch(*lane[:2])
            self._batches[lane], self._running[lane] = self._give(batch, lane.kind, source), {}
        return self._batches[lane]

    def _new_batch(self, kind: Kind, places: int) -> RunningBatch:
        programs, compiled = self.generator.programs, self.compiler.compiled
        return RunningBatch(programs, kind.strategy, places, self._switch, self.encodings, compiled)

    def _give(self, batch: RunningBatch, kind: Kind, source: Source) -> RunningBatch:
        rows = wishes.rows_of(source, kind.method, self.generator.tokenizer, self.generator.ids.ends)
        batch.give(wishes.forced_of(rows, kind.strategy), source.schema)
        return batch

    def _kind(self, generator: Generator, name: str, *, drafts: bool = True) -> Kind:
        """The kind of requests to a method; `drafts`: whether drafts are verified if the config says so."""
        method = generator.method(name)
        method.require("serve")
        method.check()
        if generator.config.decode.limit != "none":
            raise UserError(f"decode.limit: found {generator.config.decode.limit}; expected none, to be served")
        return Kind(cast(Refillable, generator.make_strategy(name, drafts=drafts)), method)

    def _advance(self, lane: _Lane) -> None:
        """Some steps of all requests of a lane: no pause but for those who wait for something."""
        batch, alone = self._batches[lane], sum(map(bool, self._running.values())) == 1
        running = self._running[lane].values()
        often = not alone or any(one.answer.request.at_once for one in running)
        bounds = [(one, one.answer.request.max_tokens) for one in running]
        most = min((batch.steps_for(n - one.count, one.steps) for one, n in bounds if n is not None), default=NO_END)
        decoded, done = batch.advance(most, often=often)
        if batch.lacks:
            self._put_off(lane, batch.fullest, batch.lacks)
            return
        for place, one in [*self._running[lane].items()]:
            self._tell(one, batch, decoded, place)
            full = one.answer.request.max_tokens is not None and one.count >= one.answer.request.max_tokens
            if full or done[place]:
                try:
                    one.answer.give(self._record(one, lane, decoded, place, full=full, done=bool(done[place])))
                    self.answered += 1
                except UserError as error:  # of a tokenizer that cannot decode these tokens
                    one.answer.give(error)
                    self.failed += 1
                self._leave(lane, place)

    def _put_off(self, lane: _Lane, place: int, needs: Needs) -> None:
        """Takes the place from an answer that has outgrown what is compiled: it begins anew, and others go on."""
        one = self._running[lane].pop(place)
        self._batches[lane].drop(place)
        one.steps, one.answer.earlier = 0, one  # of its tokens none is told twice
        with self._change:
            self._waiting.appendleft(one.answer)
        self._await(one.answer, needs)

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

    def _record(self, one: _Running, lane: _Lane, decoded: Decoded, place: int, *, full: bool, done: bool) -> Record:
        """The record of an answer; `full`: it has as many tokens as were asked for; `done`: decoding is over."""
        only = jax.tree.map(lambda x: x[place : place + 1], decoded)
        kept = np.minimum(only.lengths, one.lengths)
        strategy, method = lane.kind
        batch = self._batches[lane]
        steps = int(np.where(one.lengths > 0, batch.starts + one.lengths, 0).max())  # up to its last token
        # With drafts the call that generates this token may generate the ends of rows at later time-steps as well.
        done &= not batch.has_drafts or steps >= int(only.steps[0])
        cut = bool((kept < only.lengths).any()) or (full and not done)
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
            record["steps"] = steps
        return record

    def _leave(self, lane: _Lane, place: int) -> None:
        one = self._running[lane].pop(place)
        self._batches[lane].drop(place)
        if one.answer.cancelled:
            one.answer.give(Closed("the request was cancelled"))
