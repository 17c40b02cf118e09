"""Requests to the engine, and the answers of the engine: events, one for each token, and finally a record."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np

from pipejax.decoding import MOST_LIKELY, Refillable, Sampling
from pipejax.inference.answers import Record
from pipejax.inference.decoding_options import RuleSettings, rule_settings
from pipejax.inference.generator import Generator
from pipejax.inference.sources import Source
from pipejax.methods import Method
from pipejax.system.errors import UserError


class Full(Exception):
    """Raised if the queue of waiting requests is full."""


class Closed(Exception):
    """Raised if the engine is closed, or the request is cancelled, before the request is answered."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A source to decode, with its options."""

    source: Source  # the result of `Generator.source`
    method: str  # the name of the method
    sampling: Sampling = MOST_LIKELY
    max_tokens: int | None = None  # the most tokens of all rows together; None: the bounds of the grid
    log_probs: bool = True  # whether events and the record have log-probabilities; if not, those of events are 0
    at_once: bool = True  # whether events are needed while tokens are generated; if not, all may be sent at the end
    # The most tokens of a row, if there is an answer format; None: the limits of the grid.
    row_tokens: int | None = None
    adapter: str = ""  # the name of an adapter of the generator, whose settings apply; "": the base


class Kind(NamedTuple):
    """Requests that can be decoded in the same batch. Their adapters may differ."""

    strategy: Refillable
    method: Method  # may have prefixes of rows, so methods must be equal
    rules: RuleSettings = RuleSettings()


def kind_of(generator: Generator, name: str, *, drafts: bool = True) -> Kind:
    """Returns the kind of requests to a method.

    Args:
      generator: the generator, or the one of an adapter.
      name: the name of the method.
      drafts: whether the drafts of the config are used.

    Raises:
      UserError: the engine does not support the method or the settings of the generator.
    """
    method = generator.method(name)
    method.require("serve")
    method.check()
    if generator.config.decode.limit != "none":
        raise UserError("decode.limit", found=f"{generator.config.decode.limit}", expected="none, to be served")
    rules = rule_settings(generator.config, method, generator.tokenizer)
    return Kind(cast(Refillable, generator.make_strategy(name, drafts=drafts)), method, rules)


class Event(NamedTuple):
    """A generated token."""

    row: int
    token: int
    log_prob: float


Found = Sequence[Event | Record | BaseException]  # results of an answer; the very last one is the record or an error


class Answer:
    """The results of a request as they arrive. One thread may read the results or listen; any thread may cancel."""

    def __init__(self, request: Request, generator: Generator, kind: Kind, wake: Callable[[], None]) -> None:
        """Creates an answer without results.

        Args:
          request: the request.
          generator: the generator, or the one of the request's adapter.
          kind: the kind of the request.
          wake: called when the request is cancelled; wakes the engine's thread.
        """
        self.request, self.generator, self.kind = request, generator, kind
        self.cancelled = False
        self.awaits: set[Hashable] = set()  # keys of the programs to compile before the request can be admitted
        self.earlier: Running | None = None  # the counts of sent tokens, if the request has lost its place
        self._wake = wake
        self._found: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self._hear: Callable[[Found], None] = self._found.put
        self._telling = threading.Lock()

    def events(self) -> Iterator[Event | Record]:
        """Yields each token when it is generated, and finally the record, with `log_prob` and `log_probs`.

        The tokens of a step are in the order of rows. The events include the tokens of rows that the record leaves out
        (`decode.unique_rows`).

        Raises:
          Closed: the request was cancelled, or the engine was closed.
          Exception: the error with which decoding failed.
        """
        while True:
            for found in self._found.get():
                if isinstance(found, BaseException):
                    raise found
                yield found
                if isinstance(found, dict):
                    return

    def listen(self, hear: Callable[[Found], None]) -> None:
        """Passes all results, also earlier results, to `hear` instead of `events`. The engine waits for each call."""
        with self._telling:
            self._hear = hear
            while not self._found.empty():
                hear(self._found.get())

    def cancel(self) -> None:
        """Cancels the request; its place becomes free."""
        self.cancelled = True
        self._wake()

    def give(self, *found: "Event | Record | BaseException") -> None:
        """Delivers results, and wakes the reader once for all of these results. Called by the engine."""
        with self._telling:
            self._hear(found)


@dataclasses.dataclass
class Running:
    """A request that has a place in a batch."""

    answer: Answer
    lengths: np.ndarray  # i32 [R], number of tokens of each row that were sent
    count: int = 0  # number of tokens sent, of all rows
    steps: int = 0  # steps taken

    @property
    def is_full(self) -> bool:
        """Whether `max_tokens` tokens were sent."""
        most = self.answer.request.max_tokens
        return most is not None and self.count >= most
