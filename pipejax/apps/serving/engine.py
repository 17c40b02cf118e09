"""Continuous batching for a server: answers many requests at a time, each of them as if it were alone.

The engine decodes in a thread of its own. The thread repeats two phases: it admits waiting requests to free places
(`_admit`), and advances the batch of each lane by some steps (`_advance`). A lane is a running batch for requests that
can be decoded together: the same method, strategy, number of places and schema. Programs are compiled in another
thread: a request whose programs are not compiled keeps waiting, while the others continue. A running request whose
answer outgrows the compiled cache sizes gives up its place and begins again later (`_requeue`).
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

from pipejax.apps.schemas import row_schema as schema_lib
from pipejax.apps.schemas.row_schema import Schema
from pipejax.data.shapes import bucket, memory_length
from pipejax.decoding import MOST_LIKELY, Decoded, Refillable, Sampling
from pipejax.inference import decoding_options
from pipejax.inference.answers import Record, record_of
from pipejax.inference.compiler import LAST, LATER, PLANNED, Compiler, Needs
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import NO_END, Encodings, RunningBatch, Steps, Switch
from pipejax.inference.sources import Source
from pipejax.methods import Method
from pipejax.system.errors import UserError, out_of_memory

logger = logging.getLogger(__name__)


WEIGHTS = "weights"  # the key of the first need, laying out the weights


class Full(Exception):
    """The queue of waiting requests is full."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A source to decode, with its options."""

    source: Source  # from `Generator.source`
    strategy: str  # the name of the method
    sampling: Sampling = MOST_LIKELY
    max_tokens: int | None = None  # the most tokens of all rows together; None: the bounds of the grid
    log_probs: bool = True  # whether events and the record have log-probabilities; else events have 0
    at_once: bool = True  # whether events are needed as tokens are generated; else they may all come at the end
    row_tokens: int | None = None  # the most tokens of a row, if the source has a schema; None: the bounds of the grid
    adapter: str = ""  # the name of an adapter of the generator, whose settings apply; "": the base


class Event(NamedTuple):
    """A generated token."""

    row: int
    token: int
    log_prob: float


Found = Sequence[Event | Record | BaseException]  # results of an answer; the very last one is the record or an error


class Answer:
    """The results of a request as they arrive. One thread may read them or listen; any thread may cancel."""

    def __init__(self, request: Request, generator: Generator, kind: "Kind", wake: Callable[[], None]) -> None:
        """Creates an answer without results.

        Args:
          request: the request.
          generator: the generator, or the one of the request's adapter.
          kind: the kind of the request.
          wake: wakes the engine's thread.
        """
        self.request, self.generator, self.kind = request, generator, kind
        self.cancelled = False
        self.awaits: set[Hashable] = set()  # keys of the programs to compile before the request can be admitted
        self.earlier: _Running | None = None  # the tokens sent before the request lost its place, if it did
        self._wake = wake
        self._found: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self._hear: Callable[[Found], None] = self._found.put
        self._telling = threading.Lock()

    def events(self) -> Iterator[Event | Record]:
        """Yields each token as it is generated, and finally the record, with `log_prob` and `log_probs`.

        The tokens of a step are in the order of rows. They include the tokens of rows that the record leaves out
        (`decode.unique_rows`).

        Raises:
          Closed: the request was cancelled, or the engine was closed.
        """
        while True:
            for found in self._found.get():
                if isinstance(found, BaseException):
                    raise found
                yield found
                if isinstance(found, dict):
                    return

    def listen(self, hear: Callable[[Found], None]) -> None:
        """Passes all results, earlier ones included, to `hear` instead of `events`. The engine waits for each call."""
        with self._telling:
            self._hear = hear
            while not self._found.empty():
                hear(self._found.get())

    def cancel(self) -> None:
        """Cancels the request; its place becomes free."""
        self.cancelled = True
        self._wake()

    def give(self, *found: "Event | Record | BaseException") -> None:
        """Delivers results, which wakes the reader once. Called by the engine."""
        with self._telling:
            self._hear(found)


class Closed(Exception):
    """The engine is closed, or the request was cancelled, before the request was answered."""


@dataclasses.dataclass
class _Running:
    """A request that has a place in a batch."""

    answer: Answer
    lengths: np.ndarray  # i32 [R], number of tokens of each row that were sent
    count: int = 0  # number of tokens sent, of all rows
    steps: int = 0  # steps taken


class Kind(NamedTuple):
    """Requests that can be decoded in the same batch. Their adapters may differ."""

    strategy: Refillable
    method: Method  # may have prefixes of rows, so methods must be equal


class _Lane(NamedTuple):
    """The key of a running batch. A request that comes alone gets a lane with one place, whose steps are faster."""

    kind: Kind
    places: int
    schema: Schema | None  # the schema of all its requests


class Engine:
    """Answers requests with one model on one device. Thread-safe."""

    def __init__(self, generator: Generator, *, places: int, queue: int, encodings: int = 0) -> None:
        """Starts the engine's thread.

        Args:
          generator: the model and its settings.
          places: the most requests of a kind that are decoded at the same time.
          queue: the most requests that may wait.
          encodings: the number of sources whose encodings are kept.
        """
        self.generator, self.places, self._most_waiting = generator, places, queue
        self.answered = self.tokens = self.failed = 0  # answered requests, tokens sent, requests that failed
        self.encodings = Encodings(encodings)
        self._waiting: deque[Answer] = deque()
        self._batches: dict[_Lane, RunningBatch] = {}
        self._running: dict[_Lane, dict[int, _Running]] = {}
        self._had_company = False  # whether other requests were present at the last admission; a hint for the next one
        self._change, self._switch = threading.Condition(), Switch()
        self._open, self._stops, self._lacks = True, False, False
        self._told_of = set[Hashable]()  # needs that were logged
        self.compiler = Compiler(self._met)
        self._kinds = {self._kind(one, one.default_strategy): one for one in (generator, *generator.adapters.values())}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of requests without a place."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of requests with a place."""
        return sum(map(len, self._running.values()))

    def submit(self, request: Request) -> Answer:
        """Queues a request, and returns at once.

        Raises:
          UserError: the method or the settings do not support the request.
          Full: too many requests wait.
          Closed: the engine was closed.
        """
        if request.source.prefixes or request.source.max_rows is not None:
            raise UserError("row_prefixes, max_rows: found in a request to the engine; expected a plain source")
        generator = self.generator.adapted(request.adapter) if request.adapter else self.generator
        kind = self._kind(generator, request.strategy, drafts=request.source.schema is None)
        if temperature := request.sampling.temperature:
            kind.method.require("sample", f"temperature: found {temperature}", 0)
        if request.log_probs:
            kind.method.require("score", "logprobs: found some")
        decoding_options.rows_of(request.source, kind.method, self.generator.tokenizer, self.generator.ids.ends)
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
        """Schedules compiling the default strategy's programs for prompts of up to `length` tokens; does not wait.

        `schemas`: also the programs for usual schemas, as the last of all.
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
        """Marks a need as compiled, or fails the requests that wait for it. Called by the compiler's thread."""
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
        """Closes the engine: it accepts no more requests, and its thread ends.

        Args:
          drain: whether present requests are answered first; if not, they fail at once.
          seconds: the most seconds to wait for their answers.
        """
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
                self._switch.reset()  # before checking for changes, as later changes set the switch again
                if self._stops or not (self._open or self._waiting or self.running):
                    break
            try:
                if self._lacks:
                    self._free()
                self._admit()
                for lane in [lane for lane, running in self._running.items() if running]:
                    self._advance(lane)
            except Exception as error:  # such as device errors and lack of memory: pass it to the waiting readers
                logger.exception("decoding failed")
                self._fail(error)
        self._fail(Closed("the engine was closed"))

    def _fail(self, error: BaseException) -> None:
        """Fails the running requests, and if the engine is closed also the waiting ones; drops all batches."""
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
        self.encodings.clear()  # memory may have run out because of them

    def _free(self) -> None:
        """Frees unused batches and encodings, after a compilation ran out of memory."""
        self._lacks = False
        self.encodings.clear()
        for lane in [lane for lane, running in self._running.items() if not running]:
            del self._batches[lane], self._running[lane]

    def _admit(self) -> None:
        """Removes cancelled requests, and gives free places to the requests that have waited longest."""
        for lane in self._running:
            for place, one in [*self._running[lane].items()]:
                if one.answer.cancelled:
                    self._leave(lane, place)
        while (answer := self._next()) is not None:  # more may arrive while one is encoded
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
                answer.give(error)  # `_run` passes it to the others
                raise
            one = answer.earlier or _Running(answer, np.zeros(len(self._batches[lane].starts), np.int64))
            self._running[lane][place] = one

    def _choose(self, answer: Answer) -> tuple[_Lane, Needs]:
        """The lane for an answer, and the programs to compile before it can be admitted there."""
        kind, schema = answer.kind, answer.request.source.schema
        if WEIGHTS not in self.compiler.compiled:
            return _Lane(kind, self.places, None), {WEIGHTS: self._lay_out}
        with self._change:
            others = any(one.kind == kind and not one.cancelled for one in self._waiting if one is not answer)
        beside = others or self._running_with(kind) > 0
        sizes = [self.places] if beside or self._had_company else [1, self.places]
        lanes = [_Lane(kind, places, schema) for places in dict.fromkeys(sizes)]
        needs = dict[_Lane, Needs]()
        for lane in lanes:
            needs[lane] = self._needs(lane, answer)
            if not needs[lane]:
                self._had_company = beside
                return lane, {}
        nearest = min(
            lanes, key=lambda lane: len(needs[lane])
        )  # the lane with fewer missing programs; at equal numbers the first
        return nearest, needs[nearest]

    def _needs(self, lane: _Lane, answer: Answer) -> Needs:
        """The programs to compile before an answer can be added to a lane."""
        request, length = answer.request, len(answer.generator.ids_of(answer.request.source))
        logits = request.log_probs or request.sampling.temperature > 0
        return self._batch(lane, request.source).needs(length, logits=logits, adapter=answer.generator.adapter)

    def _await(self, answer: Answer, needs: Needs) -> None:
        """Requests compilation of what an answer needs; the answer keeps waiting until it is done."""
        with self._change:
            answer.awaits = {key for key in needs if key not in self.compiler.compiled}
        self.compiler.ask(needs)
        if not needs.keys() <= self._told_of | {WEIGHTS}:
            why = self._causes(answer, needs)
            self._told_of |= needs.keys()
            logger.info(f"compiling because of {' and '.join(why)}: a request waits for it, others go on")

    def _causes(self, answer: Answer, needs: Needs) -> list[str]:
        """The reasons why an answer needs programs that are not compiled, in words for the log."""
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
        """The first waiting answer that can be admitted or was cancelled."""
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
        """The number of running requests of a kind."""
        running = [*self._running.items()]  # a copy, as the engine's thread may add a lane
        return sum(len(places) for lane, places in running if lane.kind == kind)

    def _batch(self, lane: _Lane, source: Source) -> RunningBatch:
        """The batch of a lane, created if necessary.

        `source`: the source of any request of the lane, since all requests of a lane have the same row prefixes.
        """
        if lane not in self._batches:
            kin = [one for one in self._batches if one[:2] == lane[:2]]
            if idle := next((one for one in kin if not self._running[one]), None):  # reuse its memory
                batch = self._batches.pop(idle)
                del self._running[idle]
            elif kin:
                batch = self._batches[kin[0]].empty_copy()
            else:
                batch = self._new_batch(*lane[:2])
            self._batches[lane], self._running[lane] = self._give(batch, lane.kind, source), {}
        return self._batches[lane]

    def _new_batch(self, kind: Kind, places: int) -> RunningBatch:
        programs, compiled = self.generator.programs, self.compiler.compiled
        return RunningBatch(programs, kind.strategy, places, self._switch, self.encodings, compiled)

    def _give(self, batch: RunningBatch, kind: Kind, source: Source) -> RunningBatch:
        rows = decoding_options.rows_of(source, kind.method, self.generator.tokenizer, self.generator.ids.ends)
        batch.give(decoding_options.forced_of(rows, kind.strategy), source.schema)
        return batch

    def _kind(self, generator: Generator, name: str, *, drafts: bool = True) -> Kind:
        """The kind of requests to a method; `drafts`: whether the drafts of the config are used."""
        method = generator.method(name)
        method.require("serve")
        method.check()
        if generator.config.decode.limit != "none":
            raise UserError(f"decode.limit: found {generator.config.decode.limit}; expected none, to be served")
        return Kind(cast(Refillable, generator.make_strategy(name, drafts=drafts)), method)

    def _advance(self, lane: _Lane) -> None:
        """Takes steps with all requests of a lane, and delivers their tokens and records.

        The batch returns early only if a request of the lane needs its tokens at once or there are other lanes.
        """
        batch, alone = self._batches[lane], sum(map(bool, self._running.values())) == 1
        running = self._running[lane].values()
        often = not alone or any(one.answer.request.at_once for one in running)
        bounds = [(one, one.answer.request.max_tokens) for one in running]
        most = min((batch.steps_for(n - one.count, one.steps) for one, n in bounds if n is not None), default=NO_END)
        decoded, done = batch.advance(most, often=often)
        if batch.lacks:
            self._requeue(lane, batch.fullest, batch.lacks)
            return
        for place, one in [*self._running[lane].items()]:
            self._tell(one, batch, decoded, place)
            full = one.answer.request.max_tokens is not None and one.count >= one.answer.request.max_tokens
            if full or done[place]:
                try:
                    one.answer.give(self._record(one, lane, decoded, place, full=full, done=bool(done[place])))
                    self.answered += 1
                except UserError as error:  # the tokenizer cannot decode these tokens
                    one.answer.give(error)
                    self.failed += 1
                self._leave(lane, place)

    def _requeue(self, lane: _Lane, place: int, needs: Needs) -> None:
        """Requeues an answer that has outgrown the compiled cache sizes: it begins again once `needs` are compiled."""
        one = self._running[lane].pop(place)
        self._batches[lane].drop(place)
        one.steps, one.answer.earlier = 0, one  # tokens that were sent are not sent again
        with self._change:
            self._waiting.appendleft(one.answer)
        self._await(one.answer, needs)

    def _tell(self, one: _Running, batch: RunningBatch, decoded: Decoded, place: int) -> None:
        """Delivers the new tokens of a request, up to its `max_tokens`."""
        assert decoded.log_probs is not None, "a `RunningBatch` has log-probabilities"
        most, one.steps = one.answer.request.max_tokens, int(decoded.steps[place])
        new, events = batch.new_tokens(decoded, place, one.lengths), []
        for time, row, j in new[: None if most is None else max(most - one.count, 0)]:
            log_prob = float(decoded.log_probs[place, row, time])
            events.append(Event(row, int(decoded.tokens[place, row, j]), log_prob))
            one.lengths[row] = j + 1
            one.count += 1
        self.tokens += len(events)
        one.answer.give(*events)

    def _record(self, one: _Running, lane: _Lane, decoded: Decoded, place: int, *, full: bool, done: bool) -> Record:
        """The record of an answer; `full`: it has `max_tokens` tokens; `done`: decoding is over."""
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
