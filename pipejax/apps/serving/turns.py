"""Runs work of requests in threads outside the event loop, one piece at a time, with clients taking turns."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from pipejax.apps.serving.answer import Full
from pipejax.system import cli

Result = TypeVar("Result")

TURN = 0.002  # seconds of work without a pause


class Turns:
    """A thread that runs one piece of work at a time. Clients with waiting work take turns."""

    def __init__(self, name: str, most: int) -> None:
        """Starts the thread. `most` is the limit of waiting pieces per client."""
        self._most = most
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}
        self._change = threading.Condition()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, client: Hashable, work: Callable[[], Result]) -> Future[Result]:
        """Queues a piece of work.

        Raises:
          Full: too many pieces of the client's work wait.
        """
        future = Future[Result]()
        with self._change:
            if len(self._waiting.get(client, ())) >= self._most:
                raise Full(f"{self._most} pieces of work of a client wait")
            self._waiting.setdefault(client, deque()).append(partial(_complete, future, work))
            self._change.notify()
        return future

    def _run(self) -> None:
        """Runs the waiting work, one piece of each client in turn."""
        while True:
            with self._change:
                while not self._waiting:
                    self._change.wait()
                client = next(iter(self._waiting))
                waiting = self._waiting.pop(client)
                complete = waiting.popleft()
                if waiting:
                    self._waiting[client] = waiting  # the client goes behind the other clients
            with cli.unneeded():
                complete()
            del complete


def _complete(future: Future[Result], work: Callable[[], Result]) -> None:
    """Runs a piece of work, unless its future was cancelled, and gives the result or the exception to the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        found = work()
    except BaseException as error:  # any exception is passed to the waiting request
        future.set_exception(error)
    else:
        future.set_result(found)


class Share:
    """Limits a thread to a share of the interpreter's time: the thread often calls this object, which may sleep."""

    def __init__(self, share: float) -> None:
        self._rest = TURN * (1 / share - 1)
        self._begun = time.perf_counter()

    def __call__(self) -> None:
        if time.perf_counter() - self._begun >= TURN:
            time.sleep(self._rest)
            self._begun = time.perf_counter()
