"""Converts tokens to the pieces of text that a client gets: the text of each token, in order, up to a stop text."""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable

from pipejax.data.tokenizer import Growing, Tokenizer
from pipejax.inference.answer_format import AnswerFormat
from pipejax.inference.streaming import Repeats


@dataclasses.dataclass(frozen=True)
class Piece:
    """The text that a token adds or, if `token` is None, remaining text of a row that belongs to no single token."""

    row: int
    token: int | None
    text: str
    log_prob: float = 0.0


class Writing:
    """The text of one answer during decoding, as pieces to be sent.

    Rows are decoded in parallel, but clients concatenate the pieces. So the pieces of the first unfinished row are sent
    at once, and the pieces of later rows wait until this row has ended; with `as_written` all pieces are sent at once.
    With `unique`, a row that repeats an earlier row has no pieces, so the pieces of a row wait as long as the row may
    still turn out to repeat an earlier row.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        start: Callable[[int], int],
        separator: str,
        stop: tuple[str, ...] = (),
        as_written: bool = False,
        unique: bool = False,
    ) -> None:
        """Begins an empty answer.

        Args:
          tokenizer: makes the texts; None: pieces have no text.
          start: the time-step at which each row starts.
          separator: the text between rows.
          stop: texts that end the answer.
          as_written: send pieces of all rows at once.
          unique: leave out rows that repeat earlier rows.
        """
        self._start, self._separator, self._as_written = start, separator, as_written
        self._rows: dict[int, Growing] = defaultdict(lambda: Growing(tokenizer))
        self._waiting: dict[int, deque[Piece]] = defaultdict(deque)  # pieces of later rows
        self._due: dict[int, int] = {}  # the time of the next token of each unfinished row
        self._row = self._latest = 0  # the first unfinished row, and the last row that has begun
        self._last: int | None = None  # the row of the last piece with text
        self._cut = _StopTexts(stop)
        self._repeats = Repeats() if unique else None

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found."""
        return self._cut.reached

    def add(self, row: int, token: int, log_prob: float) -> list[Piece]:
        """Adds a token; returns the pieces that can be sent.

        Tokens arrive in the order of steps, and within a step in the order of rows. So a row whose next token is
        overdue has ended.
        """
        time = self._due.pop(row, self._start(row))
        for other in [other for other, due in self._due.items() if (due, other) < (time, row)]:
            self._finish(other)
        self._due[row] = time + 1
        self._latest = max(self._latest, row)
        self._waiting[row].append(Piece(row, token, self._rows[row].add(token), log_prob))
        if self._repeats:
            self._repeats.add(row, token)
        return self._release()

    def end(self) -> list[Piece]:
        """Ends the answer; returns the remaining pieces."""
        for row in [*self._due]:
            self._finish(row)
        return [*self._release(), *self._cut.rest()]

    def _finish(self, row: int) -> None:
        del self._due[row]
        if self._repeats and self._repeats.may_repeat(row, over=True):
            self._waiting[row].clear()
        elif rest := self._rows[row].rest():
            self._waiting[row].append(Piece(row, None, rest))

    def _release(self) -> list[Piece]:
        """Returns the waiting pieces that can be sent now, and advances the first unfinished row."""
        pieces: list[Piece] = []
        if self._as_written:
            for row, waiting in self._waiting.items():
                if not self._is_held_back(row):
                    pieces += waiting
                    waiting.clear()
            return pieces
        while True:
            waiting = self._waiting[self._row]
            while waiting and not self._is_held_back(self._row):
                pieces.append(self._with_separator(waiting.popleft()))
            if self._row in self._due or self._row >= self._latest:
                return self._cut.take(pieces)
            del self._waiting[self._row]
            self._row += 1

    def _is_held_back(self, row: int) -> bool:
        return row in self._due and self._repeats is not None and self._repeats.may_repeat(row, over=False)

    def _with_separator(self, piece: Piece) -> Piece:
        """Puts the separator before the first text of a later row. Rows without text do not count."""
        if not piece.text or piece.row == self._last:
            return piece
        is_first, self._last = self._last is None, piece.row
        return piece if is_first else dataclasses.replace(piece, text=self._separator + piece.text)


class FormatWriting:
    """The text of an answer that has a format: one piece for each part of the text, in the order of the text."""

    stopped = False  # stop texts are not supported

    def __init__(self, answer_format: AnswerFormat, *, start: Callable[[int], int]) -> None:
        """Creates the text of an answer without tokens.

        Args:
          answer_format: the format.
          start: the time of the query that generates a row's first token.
        """
        self._format = answer_format
        rows = range(len(answer_format.rows))
        self._tokens: list[list[int]] = [[] for _ in rows]
        self._due = {row: start(row) for row in rows}  # the time of the next token of each unfinished row
        self._waiting = deque(enumerate(answer_format.order))  # the parts that have no piece yet, and their rows

    def add(self, row: int, token: int, log_prob: float) -> list[Piece]:
        """Adds a token; returns the pieces of the parts that became complete. Tokens arrive in the order of steps."""
        time = self._due.pop(row)
        for other in [other for other, due in self._due.items() if (due, other) < (time, row)]:
            del self._due[other]
        self._due[row] = time + 1
        self._tokens[row].append(token)
        return self._release()

    def end(self) -> list[Piece]:
        """Ends the answer; returns the remaining pieces."""
        self._due.clear()
        # If the client waits for the complete answer, no tokens were added.
        return self._release() if any(self._tokens) else []

    def _release(self) -> list[Piece]:
        pieces = list[Piece]()
        while self._waiting and self._waiting[0][1] not in self._due:
            place, row = self._waiting.popleft()
            pieces.append(Piece(row, None, self._format.part(place, self._tokens[row])))
        return pieces


class _StopTexts:
    """Holds back text that may be the beginning of a stop text; drops everything from a stop text on."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop, self._held, self.reached = stop, list[Piece](), False

    def take(self, pieces: list[Piece]) -> list[Piece]:
        """Adds pieces; returns the pieces that cannot belong to a stop text."""
        if not self._stop:
            return pieces
        if self.reached:
            return []
        self._held += pieces
        text = "".join(piece.text for piece in self._held)
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        self.reached = bool(ends)
        sure = min(ends) if ends else len(text) - max(_overlap(text, stop) for stop in self._stop)
        return self._give(sure)

    def rest(self) -> list[Piece]:
        """Returns the held pieces at the end of an answer without a stop text."""
        held, self._held = self._held, []
        return [] if self.reached else held

    def _give(self, length: int) -> list[Piece]:
        """Releases the held pieces within the first `length` characters; a stop text may cut the last piece."""
        given = []
        while self._held and len(self._held[0].text) <= length:
            piece = self._held.pop(0)
            if self.reached and not length and not piece.text:
                break
            length -= len(piece.text)
            given.append(piece)
        if self.reached and self._held and length:
            given.append(dataclasses.replace(self._held[0], text=self._held[0].text[:length]))
        return given


def _overlap(text: str, stop: str) -> int:
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
