"""The thread in which a server decodes. The thread runs a scheduler while there are requests, and sleeps otherwise."""

import threading
from collections.abc import Hashable

from pipejax.apps.serving.answer import Answer, Closed, Request
from pipejax.apps.serving.compiler import Compiler
from pipejax.apps.serving.scheduler import Scheduler
from pipejax.inference.generator import Generator


class Engine:
    """Answers requests with one model on one device. Thread-safe.

    Attributes:
      generator: the model and its settings.
      scheduler: decides when each request is decoded, and counts requests and tokens.
      compiler: compiles programs in another thread.
    """

    def __init__(self, generator: Generator, *, places: int, queue: int, encodings: int = 0) -> None:
        """Starts the engine's thread.

        Args:
          generator: the model and its settings.
          places: the most requests of a kind that are decoded at the same time.
          queue: the most requests that may wait.
          encodings: the number of sources whose encodings are kept.

        Raises:
          UserError: the default method of the generator or of an adapter cannot be served.
        """
        self.generator, self.compiler = generator, Compiler(self._met)
        self.scheduler = Scheduler(generator, self.compiler, places=places, queue=queue, encodings=encodings)
        self._change = threading.Condition(self.scheduler.waiting.lock)
        self._open, self._stops = True, False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def places(self) -> int:
        """The most requests of a kind that are decoded at the same time."""
        return self.scheduler.places

    @property
    def waiting(self) -> int:
        """The number of requests without a place."""
        return len(self.scheduler.waiting)

    @property
    def running(self) -> int:
        """The number of requests with a place."""
        return self.scheduler.lanes.running

    def submit(self, request: Request) -> Answer:
        """Queues a request, and returns at once.

        Raises:
          UserError: the method or the settings do not support the request.
          Full: too many requests wait.
          Closed: the engine was closed.
        """
        answer = self.scheduler.answer(request, self._wake)
        with self._change:
            if not self._open:
                raise Closed("the engine takes no more requests")
            self.scheduler.add(answer)
            self._change.notify()
            if self.scheduler.has_room(answer.kind):
                self.scheduler.switch.throw()
        return answer

    def warm_up(self, length: int, *, schemas: bool = False) -> None:
        """Schedules compiling the default method's programs for prompts of up to `length` tokens; does not wait.

        With `schemas`, the programs for usual schemas are compiled as well, after all other programs.
        """
        self.scheduler.warm_up(length, schemas=schemas)

    def close(self, *, drain: bool, seconds: float) -> None:
        """Closes the engine: the engine accepts no more requests, and its thread ends.

        Args:
          drain: whether present requests are answered first; if not, these requests fail at once.
          seconds: the most seconds to wait for their answers.
        """
        with self._change:
            self._open, self._stops = False, not drain
            self._change.notify()
            if self._stops:
                self.scheduler.switch.throw()
        self._thread.join(seconds)
        with self._change:
            self._stops = True
        self._wake()
        self._thread.join()
        self.compiler.close()

    def _wake(self) -> None:
        with self._change:
            self._change.notify()
        self.scheduler.switch.throw()

    def _met(self, key: Hashable, error: Exception | None) -> None:
        """Reports a compiled program to the scheduler. Called by the compiler's thread."""
        self.scheduler.met(key, error)
        self._wake()

    def _run(self) -> None:
        """Runs the scheduler while there is work, and waits for requests otherwise; the target of the thread."""
        scheduler = self.scheduler
        while True:
            with self._change:
                while not (self._stops or scheduler.has_work) and (self._open or scheduler.waiting):
                    self._change.wait()
                scheduler.switch.reset()  # before checking for changes, as later changes set the switch again
                if self._stops or not (self._open or scheduler.waiting or self.running):
                    break
            scheduler.step()
        scheduler.close()
