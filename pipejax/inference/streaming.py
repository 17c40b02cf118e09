"""Streams rows while they are generated: events for programs, and growing lines on a terminal."""

import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple, TextIO

import jax
import numpy as np

from pipejax.data.tokenizer import Growing, Tokenizer
from pipejax.decoding import Decoded, Sampling, Strategy, ends_of
from pipejax.inference.running_batch import RunningBatch


class RowEvent(NamedTuple):
    """A generated token, or the end of a row."""

    row: int
    token: int
    text: str | None  # the row's text so far, without parts that a later token may change; None without a tokenizer
    done: bool  # whether the row has ended; `token` is then its end token


def events(
    batch: RunningBatch,
    ids: Sequence[int],
    sampling: Sampling,
    tokenizer: Tokenizer | None,
    *,
    log_probs: bool = True,
    unique: bool = False,
    adapter: int | None = None,
) -> Generator[RowEvent | Decoded, None, None]:
    """Decodes a source in a running batch. Yields events as tokens are generated, and finally the result (B = 1).

    Args:
      batch: the batch; no other example may be added until the iterator ends.
      ids: the token ids of the source.
      sampling: how tokens are drawn.
      tokenizer: the tokenizer for the texts of events; None: events have no texts.
      log_probs: whether the result has log-probabilities.
      unique: whether events of rows that repeat an earlier row are left out.
      adapter: the number of the adapter, if there are adapters.
    """
    found = _all_events(batch, tokenizer, lambda: batch.add(ids, sampling, log_probs=log_probs, adapter=adapter))
    return _of_unique_rows(found) if unique else found


def _all_events(
    batch: RunningBatch, tokenizer: Tokenizer | None, add: Callable[[], int]
) -> Generator[RowEvent | Decoded, None, None]:
    """Yields the events of all rows, and finally the result; frees the place of the batch at the end."""
    rows, place = len(batch.starts), add()
    known, ended, over = np.zeros(rows, np.int64), np.zeros(rows, bool), False
    growing, text = defaultdict[int, Growing](lambda: Growing(tokenizer)), defaultdict[int, str](str)  # by row
    try:
        while not over:
            decoded, done = batch.advance()
            over, new_tokens = bool(done[place]), batch.new_tokens(decoded, place, known)
            for _, row, j in new_tokens:
                known[row] = j + 1
            # An open row has gained a token in every step so far, so a row with fewer tokens has ended. A row without
            # room for its end token was cut off.
            end = np.minimum(int(decoded.steps[place]) - batch.starts, decoded.tokens.shape[2])
            closed = np.flatnonzero((known < end) & ~ended & (known > 0)).tolist()
            ended[closed] = True
            written = decoded.tokens[place].tolist()
            found = [(step, False, row, written[row][j]) for step, row, j in new_tokens]
            found += [
                (int(batch.starts[row] + known[row]), True, row, end_of(batch.strategy, written[row], known[row]))
                for row in closed
            ]
            found.sort()  # by step, so that the order does not depend on how many steps an `advance` takes
            cut = {row for row in range(rows) if not ended[row] and (over or known[row] == decoded.tokens.shape[2])}
            last = {row: i for i, (*_, row, _) in enumerate(found) if row in cut}  # indices of the last events
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
    """Returns the end token of a row.

    Args:
      strategy: the strategy.
      written: the row's tokens; strategies may keep the end token after the row.
      length: the row's length without its end token.

    Returns:
      The kept end token, or `strategy.eos`.
    """
    kept = written[length] if length < len(written) else strategy.eos
    return kept if kept in ends_of(strategy) else strategy.eos


class Repeats:
    """Determines which rows of an unfinished answer repeat, or may still come to repeat, an earlier row."""

    def __init__(self) -> None:
        """Creates an answer without rows."""
        self._rows: dict[int, list[int]] = {}

    def add(self, row: int, token: int) -> None:
        """Appends a token to a row. Tokens of the same step must be added in the order of rows."""
        self._rows.setdefault(row, []).append(token)

    def may_repeat(self, row: int, *, over: bool) -> bool:
        """Returns whether the row is a prefix of an earlier row or, if it is `over`, equal to one."""
        written = self._rows.get(row, [])
        above = (self._rows.get(i, []) for i in range(row))
        return any(other[: None if over else len(written)] == written for other in above)


def _of_unique_rows(found: Iterable[RowEvent | Decoded]) -> Generator[RowEvent | Decoded, None, None]:
    """Drops the events of rows that repeat an earlier row; delays the events of a row that may still repeat one."""
    repeats, waiting = Repeats(), defaultdict[int, list[RowEvent]](list)
    for event in found:
        if isinstance(event, RowEvent):
            waiting[event.row].append(event)
            if not event.done:
                repeats.add(event.row, event.token)
            if not repeats.may_repeat(event.row, over=event.done):
                yield from waiting.pop(event.row)
            continue
        for row in sorted(waiting):  # rows that were cut off
            if not repeats.may_repeat(row, over=True):
                yield from waiting[row]
        yield event


class Screen:
    """Shows rows as growing lines on a terminal; on other outputs, writes a line for each row that has ended."""

    def __init__(self, title: str, out: TextIO | None = None) -> None:
        """Writes the title to `out` (None: standard error)."""
        self.out = out or sys.stderr
        self.is_terminal = self.out.isatty()
        self.rows: list[str] = []
        self._line(title)

    def show(self, event: RowEvent) -> None:
        """Updates the rows with an event."""
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
