"""Rows as they are written: events for programs, and lines on a terminal that grow."""

import dataclasses
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TextIO

import jax
import numpy as np

from pipejax.decoding import Drafted, Pipelined, Sequential
from pipejax.inference.report import Report
from pipejax.inference.running_batch import Choice, RunningBatch
from pipejax.inference.wishes import seed_of
from pipejax.system.errors import UserError

if TYPE_CHECKING:
    from pipejax.inference.generator import Generator, Record
    from pipejax.inference.sources import Source


class RowEvent(NamedTuple):
    """A token was written, or a row ended."""

    row: int
    token: int
    text: str | None  # of the row so far; None without a tokenizer
    done: bool  # whether the row has ended; then the token is its eos


def stream(
    generator: "Generator", source: "Source", strategy: str, batches: dict[str, RunningBatch]
) -> "Iterator[RowEvent | Record]":
    """Yields what becomes of a source as steps end, and its record in the end.

    Args:
      generator: with the weights.
      source: as `Generator.source` gives it.
      strategy: by name.
      batches: by strategy, kept from one source to the next.

    Raises:
      UserError: beams, drafts, a limit or prefixes are asked for.
    """
    config, made = generator.config.decode, generator.make_strategy(strategy)
    if not isinstance(made, Pipelined | Sequential) or config.limit != "none":
        key = "draft" if isinstance(made, Drafted) else "limit" if config.limit != "none" else "beams"
        raise UserError(f"decode.{key}: found {getattr(config, key)}; a stream of rows expects none")
    if source.prefixes or source.max_rows is not None:
        raise UserError(f"source {source.id}: found row_prefixes or max_rows; a stream of rows expects neither")
    batch = batches.setdefault(strategy, RunningBatch(generator.programs, made, 1))
    seed = seed_of(source, config.seed)
    place = batch.add(generator.ids_of(source), Choice(config.temperature, config.top_k, config.top_p, seed))
    known, ended, over = np.zeros(made.rows, np.int64), np.zeros(made.rows, bool), False
    try:
        while not over:
            decoded, done = batch.advance()
            over = bool(done[place])
            written = np.asarray(decoded.tokens[place])
            for _, row, j in batch.news(decoded, place, known):
                known[row] = j + 1
                yield RowEvent(row, int(written[row, j]), _text(generator, written[row, : j + 1]), False)
            # Of an open row every step up to now has written a token.
            now = int(decoded.steps[place]) - np.arange(made.rows) * batch.delay
            for row in np.flatnonzero((decoded.lengths[place] < now) & ~ended & (known > 0)).tolist():
                ended[row] = True
                yield RowEvent(row, made.eos, _text(generator, written[row, : known[row]]), True)
    finally:
        batch.drop(place)
    only = jax.tree.map(lambda x: x[place : place + 1], decoded)
    scores = only.log_probs if config.scores else None
    only = dataclasses.replace(only, calls=made.calls(only), log_probs=scores)
    yield generator.record(source, strategy, only, 0)


def _text(generator: "Generator", ids: np.ndarray) -> str | None:
    return None if generator.tokenizer is None else generator.tokenizer.decode(ids.tolist())


class Screen:
    """The rows of an answer on a terminal, each a line that grows; elsewhere a line for each row that has ended."""

    def __init__(self, title: str, out: TextIO | None = None) -> None:
        """Writes the title; `out`: None is standard error."""
        self.out = out or sys.stderr
        self.is_terminal = self.out.isatty()
        self.rows: list[str] = []
        self._line(title)

    def show(self, event: RowEvent) -> None:
        """Brings the rows up to date."""
        text = event.text if event.text is not None else f"... {event.token}"
        if not self.is_terminal:
            if event.done:
                self._line(f"  {event.row}: {text}")
            return
        while len(self.rows) <= event.row:
            self.rows.append("")
            self._line("")
        self.rows[event.row] = text
        width = shutil.get_terminal_size().columns - 1
        mark = "" if event.done else " _"
        line = f"  {event.row}: {text}{mark}"
        line = line if len(line) <= width else "..." + line[3 - width :]
        up = len(self.rows) - event.row
        self.out.write(f"\x1b[{up}A\r\x1b[2K{line}\x1b[{up}B\r")
        self.out.flush()

    def _line(self, text: str) -> None:
        self.out.write(text + "\n")
        self.out.flush()


def shown(generator: "Generator", sources: "Iterable[Source]", strategy: str, report: Report) -> "Iterator[Record]":
    """Decodes one source after the other, shows its rows as they are written, and yields its record."""
    batches: dict[str, RunningBatch] = {}
    for source in sources:
        begun, screen = time.perf_counter(), Screen(f"{source.id}:")
        for event in stream(generator, source, strategy, batches):
            if isinstance(event, RowEvent):
                screen.show(event)
            else:
                report.seconds += time.perf_counter() - begun
                generator.count(event, strategy, report)
                yield event
