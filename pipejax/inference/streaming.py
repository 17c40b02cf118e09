"""Rows as they are written: events for programs, and lines on a terminal that grow."""

import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TextIO

import jax
import numpy as np

from pipejax.data.tokenizer import Growing, Tokenizer
from pipejax.decoding import Decoded, Sampling, Strategy, ends_of
from pipejax.inference.running_batch import RunningBatch


class RowEvent(NamedTuple):
    """A token was written, or a row ended."""

    row: int
    token: int
    text: str | None  # of the row so far, as far as no later token changes it; None without a tokenizer
    done: bool  # whether the row has ended; then the token is the one that ended it


def events(
    batch: RunningBatch,
    ids: Sequence[int],
    sampling: Sampling,
    tokenizer: Tokenizer | None,
    *,
    log_probs: bool = True,
    unique: bool = False,
    adapter: int | None = None,
) -> Iterator[RowEvent | Decoded]:
    """Gives what becomes of a source as steps end, and in the end what it was decoded to, as a batch of one."""
    found = _all_events(batch, tokenizer, lambda: batch.add(ids, sampling, log_probs=log_probs, adapter=adapter))
    return _of_unique_rows(found) if unique else found


def _all_events(
    batch: RunningBatch, tokenizer: Tokenizer | None, add: Callable[[], int]
) -> Iterator[RowEvent | Decoded]:
    rows, place = len(batch.starts), add()
    known, ended, over = np.zeros(rows, np.int64), np.zeros(rows, bool), False
    growing, text = defaultdict[int, Growing](lambda: Growing(tokenizer)), defaultdict[int, str](str)  # by row
    try:
        while not over:
            decoded, done = batch.advance()
            over, news = bool(done[place]), batch.news(decoded, place, known)
            for _, row, j in news:
                known[row] = j + 1
            # Of an open row every step up to now has written a token. One that has no room for its end was cut off.
            end = np.minimum(int(decoded.steps[place]) - batch.starts, decoded.tokens.shape[2])
            closed = np.flatnonzero((known < end) & ~ended & (known > 0)).tolist()
            ended[closed] = True
            written = decoded.tokens[place].tolist()
            found = [(step, False, row, written[row][j]) for step, row, j in news]
            found += [
                (int(batch.starts[row] + known[row]), True, row, end_of(batch.strategy, written[row], known[row]))
                for row in closed
            ]
            found.sort()  # the same order however many steps were taken at once
            cut = {row for row in range(rows) if not ended[row] and (over or known[row] == decoded.tokens.shape[2])}
            last = {row: i for i, (*_, row, _) in enumerate(found) if row in cut}  # the last events of cut rows
            for i, (_, ended_now, row, token) in enumerate(found):
                text[row] += growing[row].rest() if ended_now else growing[row].add(token)
                if last.get(row) == i:
                    text[row] += growing[row].rest()
                yield RowEvent(row, token, text[row] if tokenizer else None, ended_now)
    finally:
        batch.drop(place)
    only: Decoded = jax.tree.map(lambda x: x[place : place + 1], decoded)
    yield only


def end_of(strategy: Strategy, written: Sequence[int], length: int) -> int:
    """The token that ended a row of that length; the strategy's `eos` if it keeps none of them behind the row."""
    kept = written[length] if length < len(written) else strategy.eos
    return kept if kept in ends_of(strategy) else strategy.eos


class Repeats:
    """Which rows of an answer, as far as it is written, may turn out to repeat one above them."""

    def __init__(self) -> None:
        """No row is written."""
        self._rows: dict[int, list[int]] = {}

    def add(self, row: int, token: int) -> None:
        """A token was written; those of the same step come row by row."""
        self._rows.setdefault(row, []).append(token)

    def may_repeat(self, row: int, *, over: bool) -> bool:
        """Whether the row is the beginning of one above it; if it is `over`, whether it is all of one."""
        written = self._rows.get(row, [])
        above = (self._rows.get(i, []) for i in range(row))
        return any(other[: None if over else len(written)] == written for other in above)


def _of_unique_rows(found: Iterable[RowEvent | Decoded]) -> Iterator[RowEvent | Decoded]:
    """Events without those of rows that repeat one above them: while a row may yet do so, its events wait."""
    repeats, waiting = Repeats(), defaultdict[int, list[RowEvent]](list)
    for event in found:
        if isinstance(event, RowEvent):
            waiting[event.row].append(event)
            if not event.done:
                repeats.add(event.row, event.token)
            if not repeats.may_repeat(event.row, over=event.done):
                yield from waiting.pop(event.row)
            continue
        for row in sorted(waiting):  # of an answer that was cut off
            if not repeats.may_repeat(row, over=True):
                yield from waiting[row]
        yield event


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
