"""Continuous batching for a server, without threads.

The scheduler decodes many requests at a time; the answer to a request is the same as if the request were decoded alone.
The scheduler repeats two phases: it admits waiting requests to free places (`admit`), and advances the batch of each
lane by some steps (`advance`). A lane is a running batch for requests that can be decoded together, because they have
the same method, strategy, number of places and schema. Another thread compiles programs: a request whose programs are
not compiled keeps waiting, while the other requests continue. A running request whose answer outgrows the compiled
cache sizes gives up its place and begins again later (`_requeue`).
"""

import logging
from collections.abc import Callable, Hashable
from typing import Protocol

import numpy as np

from pipejax.apps.serving import warm_up
from pipejax.apps.serving.answer import Answer, Closed, Full, Kind, Request, Running, kind_of
from pipejax.apps.serving.compile_log import CompileLog
from pipejax.apps.serving.compiler import PLANNED, WANTED
from pipejax.apps.serving.delivery import deliver_tokens, record_after
from pipejax.apps.serving.lanes import Lane, Lanes
from pipejax.apps.serving.waiting import Waiting
from pipejax.inference import decoding_options
from pipejax.inference.encodings import Encodings
from pipejax.inference.generator import Generator
from pipejax.inference.running_batch import NO_END, StepKind, Switch
from pipejax.system.compiled import CompiledPrograms, Needs
from pipejax.system.errors import UserError, out_of_memory

logger = logging.getLogger(__name__)

WEIGHTS = "weights"  # the key of the first need, which lays out the weights


class ProgramCompiler(Protocol):
    """Compiles programs on demand and reports each program to `Scheduler.met`; see `Compiler`."""

    compiled: CompiledPrograms

    def ask(self, needs: Needs, order: int = WANTED) -> None:
        """Schedules the compilation of programs; returns at once."""


class Scheduler:
    """Decides when each request is decoded, with one model on one device.

    One thread calls `step`, which does all work. Any thread may call `answer`, `add`, `met`, `warm_up` and `has_room`,
    set the switch, and read the counters.

    Attributes:
      switch: while it is set, the decoding of `step` pauses after the present time-step.
      answered: the number of answered requests.
      tokens: the number of tokens sent.
      failed: the number of requests that failed.
      encodings: the cache of encoded sources.
    """

    def __init__(
        self, generator: Generator, compiler: ProgramCompiler, *, places: int, queue: int, encodings: int = 0
    ) -> None:
        """Creates a scheduler without requests.

        Args:
          generator: the model and its settings.
          compiler: compiles programs beside `step`.
          places: the most requests of a kind that are decoded at the same time.
          queue: the most requests that may wait.
          encodings: the number of sources whose encodings are kept.

        Raises:
          UserError: the default method of the generator or of an adapter cannot be served.
        """
        self.generator, self.compiler, self.places, self._most_waiting = generator, compiler, places, queue
        self.switch, self.encodings = Switch(), Encodings(encodings)
        self.answered = self.tokens = self.failed = 0
        self.waiting = Waiting()
        self.lanes = Lanes(generator, self.switch, self.encodings, compiler.compiled)
        self._had_company = False  # whether other requests were present at the last admission; a hint for the next one
        self._lacks_memory = False  # whether a compilation ran out of memory since the last step
        self._log = CompileLog()
        self._weights: dict[Hashable, Callable[[], object]] = {WEIGHTS: lambda: generator.programs}
        generators = (generator, *generator.adapters.values())
        self._kinds = {kind_of(one, one.default_method): one for one in generators}

    # Methods that any thread may call.

    def answer(self, request: Request, wake: Callable[[], None] = lambda: None) -> Answer:
        """Checks a request, and returns its answer, which does not wait for a place yet; see `add`.

        Args:
          request: the request.
          wake: called when the request is cancelled.

        Raises:
          UserError: the method or the settings do not support the request.
        """
        if request.source.prefixes or request.source.max_rows is not None:
            raise UserError("row_prefixes, max_rows", found="in a request to the engine", expected="a plain source")
        generator = self.generator.adapted(request.adapter) if request.adapter else self.generator
        kind = kind_of(generator, request.method, drafts=request.source.answer_format is None)
        if temperature := request.sampling.temperature:
            kind.method.require("sample", "temperature", f"{temperature}", 0)
        if request.sampling.limits_repetition:
            given = request.sampling.repetition_penalty, request.sampling.no_repeat_ngram_size
            kind.method.require("rules", "repetition_penalty, no_repeat_ngram_size", f"{given[0]}, {given[1]}", "1, 0")
        if request.log_probs:
            kind.method.require("score", "logprobs", "some")
        decoding_options.row_prefix_ids(request.source, kind.method, self.generator.tokenizer, self.generator.ids.ends)
        return Answer(request, generator, kind, wake)

    def add(self, answer: Answer) -> None:
        """Queues an answer.

        Raises:
          Full: too many requests wait.
        """
        with self.waiting.lock:
            if len(self.waiting) >= self._most_waiting + max(self.places - self.lanes.running, 0):
                raise Full(f"{len(self.waiting)} requests wait")
            self.waiting.append(answer)

    def has_room(self, kind: Kind) -> bool:
        """Returns whether another request of a kind can have a place."""
        return self.lanes.running_with(kind) < self.places

    def warm_up(self, length: int, *, schemas: bool = False) -> None:
        """Schedules compiling the default method's programs for prompts of up to `length` tokens; does not wait.

        With `schemas`, the programs for usual schemas are compiled as well, after all other programs.
        """
        self.compiler.ask(self._weights | {"plan": lambda: self.plan(length, schemas=schemas)}, PLANNED)

    def plan(self, length: int, *, schemas: bool = False) -> None:
        """Asks the compiler for the programs of a warm-up; the weights must be laid out. See `warm_up`."""
        ask, kinds, lanes = self.compiler.ask, self._kinds, self.lanes
        warm_up.plan(ask, self.generator, kinds, lanes, places=self.places, length=length, schemas=schemas)

    def met(self, key: Hashable, error: Exception | None) -> None:
        """Marks a need as compiled or, with an error, fails the requests that wait for this need."""
        answers = self.waiting.settle(key, failed=error is not None)
        if error is not None:
            self._lacks_memory |= out_of_memory(error)
            self.failed += len(answers)
            for answer in answers:
                answer.give(error)

    # Methods for the thread that decodes.

    @property
    def has_work(self) -> bool:
        """Whether a request runs, can be admitted, or was cancelled."""
        return self.lanes.running > 0 or self._next() is not None

    def step(self) -> None:
        """Admits requests, and takes some steps with all running requests.

        If one of these operations fails, the error is passed to the readers of the running requests.
        """
        try:
            if self._lacks_memory:  # a compilation ran out of memory: free unused batches and encodings
                self._lacks_memory = False
                self.encodings.clear()
                self.lanes.free_unused()
            self.admit()
            for lane in self.lanes.in_use():
                self.advance(lane)
        except Exception as error:  # the waiting readers get the error, such as a lack of memory
            logger.exception("decoding failed")
            self._fail([one.answer for one in self.lanes.clear()], error)

    def close(self) -> None:
        """Fails all requests that are not answered yet."""
        running = [one.answer for one in self.lanes.clear()]
        self._fail([*running, *self.waiting.clear()], Closed("the engine was closed"))

    def _fail(self, answers: list[Answer], error: BaseException) -> None:
        for answer in answers:
            answer.give(error)
        self.failed += len(answers)
        self.encodings.clear()  # memory may have run out because of the encodings

    def admit(self) -> None:
        """Removes cancelled requests, and gives free places to the requests that have waited longest."""
        for lane, places in self.lanes.requests.items():
            for place, one in [*places.items()]:
                if one.answer.cancelled:
                    self._leave(lane, place)
        while (answer := self._next()) is not None:  # more requests may arrive while a source is encoded
            if answer.cancelled:
                self.waiting.remove(answer)
                answer.give(Closed("the request was cancelled"))
                continue
            try:
                lane, needs = self.choose(answer)
                if needs:
                    self._await(answer, needs)
                else:
                    self.waiting.remove(answer)
                    self._begin(answer, lane)
            except Exception as error:
                self.waiting.remove(answer)
                answer.give(error)  # `step` passes the error to the running requests
                raise

    def _next(self) -> Answer | None:
        """Returns the first waiting answer that can be admitted or was cancelled."""
        return self.waiting.first(
            lambda answer: answer.cancelled or not (answer.awaits or not self.has_room(answer.kind))
        )

    def _begin(self, answer: Answer, lane: Lane) -> None:
        """Gives an answer a free place in a lane."""
        request, batch = answer.request, self.lanes.batches[lane]
        place = batch.add(
            answer.generator.ids_of(request.source),
            request.sampling,
            log_probs=request.log_probs,
            row_tokens=request.row_tokens,
            adapter=answer.generator.adapter,
        )
        one = answer.earlier or Running(answer, np.zeros(len(batch.starts), np.int64))
        self.lanes.requests[lane][place] = one

    def choose(self, answer: Answer) -> tuple[Lane, Needs]:
        """Returns the lane for an answer, and the programs to compile before the answer can be admitted there."""
        kind, answer_format = answer.kind, answer.request.source.answer_format
        if WEIGHTS not in self.compiler.compiled:
            return Lane(kind, self.places, None), self._weights
        beside = self.waiting.has_others(answer, kind) or self.lanes.running_with(kind) > 0
        sizes = [self.places] if beside or self._had_company else [1, self.places]
        lanes = [Lane(kind, places, answer_format) for places in dict.fromkeys(sizes)]
        needs = dict[Lane, Needs]()
        for lane in lanes:
            needs[lane] = self._needs(lane, answer)
            if not needs[lane]:
                self._had_company = beside
                return lane, {}
        # Chooses the lane with fewer missing programs; at equal numbers the first lane.
        nearest = min(lanes, key=lambda lane: len(needs[lane]))
        return nearest, needs[nearest]

    def _needs(self, lane: Lane, answer: Answer) -> Needs:
        """Returns the programs to compile before an answer can be added to a lane."""
        request, length = answer.request, len(answer.generator.ids_of(answer.request.source))
        kind = StepKind.of(request.sampling, request.log_probs)
        batch = self.lanes.batch(lane, request.source)
        return batch.needs(length, kind=kind, adapter=answer.generator.adapter)

    def _await(self, answer: Answer, needs: Needs) -> None:
        """Requests compilation of the programs that an answer needs; the answer keeps waiting until then."""
        with self.waiting.lock:
            answer.awaits = {key for key in needs if key not in self.compiler.compiled}
        self.compiler.ask(needs)
        if WEIGHTS not in needs:
            self._log.note(answer, needs, self.compiler.compiled)

    def advance(self, lane: Lane) -> None:
        """Takes steps with all requests of a lane, and delivers their tokens and records.

        The batch returns early only if a request of the lane needs its tokens at once or there are other lanes.
        """
        batch, running = self.lanes.batches[lane], self.lanes.requests[lane]
        often = len(self.lanes.in_use()) > 1 or any(one.answer.request.at_once for one in running.values())
        bounds = [(one, one.answer.request.max_tokens) for one in running.values()]
        most = min((batch.steps_for(n - one.count, one.steps) for one, n in bounds if n is not None), default=NO_END)
        decoded, done = batch.advance(most, often=often)
        if batch.lacks:
            self._requeue(lane, batch.fullest, batch.lacks)
            return
        for place, one in [*running.items()]:
            self.tokens += deliver_tokens(one, batch, decoded, place)
            if one.is_full or done[place]:
                try:
                    tokenizer = self.generator.tokenizer
                    record = record_after(one, batch, decoded, place, done=bool(done[place]), tokenizer=tokenizer)
                    one.answer.give(record)
                    self.answered += 1
                except UserError as error:  # the tokenizer cannot decode these tokens
                    one.answer.give(error)
                    self.failed += 1
                self._leave(lane, place)

    def _requeue(self, lane: Lane, place: int, needs: Needs) -> None:
        """Requeues an answer that has outgrown the compiled cache sizes: it begins again once `needs` are compiled."""
        one = self.lanes.remove(lane, place)
        one.steps, one.answer.earlier = 0, one  # tokens that were sent are not sent again
        self.waiting.put_first(one.answer)
        self._await(one.answer, needs)

    def _leave(self, lane: Lane, place: int) -> None:
        """Frees the place of a request, because its answer is complete or was cancelled."""
        one = self.lanes.remove(lane, place)
        if one.answer.cancelled:
            one.answer.give(Closed("the request was cancelled"))
