"""Checks the parts of a record that a picture needs; an inconsistent record is refused with a UserError."""

import reprlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeGuard

from pipejax.apps.picture.grid_svg import fill
from pipejax.apps.picture.trace_svg import RowCall
from pipejax.config import GRID, Config
from pipejax.config.row_names import columns_of, names_of, split_row
from pipejax.data.formats import read_records
from pipejax.data.lines import Object, id_of
from pipejax.metrics.exact import fold
from pipejax.system.errors import UserError


def find_record(path: str, name: str | None) -> tuple[str, Object]:
    """Returns the record with this id (or this line number, without ids), or the first record; and its "FILE:LINE"."""
    for place, record in read_records(path):
        if name is None or str(id_of(record, place)) == name:
            return place, record
    raise UserError(path, found=f"no record{('' if name is None else f' with the id {name}')}", expected="one")


def with_pieces(record: Object, piece: Callable[[int], str], place: str) -> Object:
    """Returns the record with the pieces of its token ids, by id; existing pieces are kept."""
    ids = record.get("row_ids")
    if not _is_table(ids):
        return record  # `tokens` reports the error
    named = {str(i): piece(i) for row in ids for i in row if type(i) is int}
    return {**record, "pieces": {**named, **_pieces(record, place)}}


def tokens(record: Object, place: str) -> tuple[list[list[str]], list[str]]:
    """Returns the token texts and the whole text of each row.

    The token texts come from `row_tokens`, from `pieces`, or from splitting the row into words; without any text they
    are numbered.
    """
    ids = record.get("row_ids")
    texts = record.get("rows")
    found = record.get("row_tokens")
    if not _is_table(ids):
        raise UserError(
            f"{place}: row_ids", found="no list of lists", expected="a record that pipejax decode wrote as JSON lines"
        )
    if found is None and (texts is None or "pieces" in record):  # None: decoded without a tokenizer
        pieces = _pieces(record, place)
        found = [[_piece(i, pieces) for i in row] for row in ids]
    if texts is None:
        texts = [" ".join(map(str, row)) for row in ids]
    if not isinstance(texts, list) or len(texts) != len(ids):
        raise UserError(
            f"{place}: rows",
            found=f"{len(texts)} texts" if isinstance(texts, list) else "no list",
            expected=f"{len(ids)}, one for each row of row_ids, as in a record of the pipelined method",
        )
    texts = [str(text) for text in texts]
    if found is None:
        words = [text.split() for text in texts]
        found = [
            row if len(row) == len(numbers) else [f"piece {j + 1}" for j in range(len(numbers))]
            for row, numbers in zip(words, ids, strict=True)
        ]
    elif not _is_table(found) or list(map(len, found)) != list(map(len, ids)):
        raise UserError(f"{place}: row_tokens", found="a shape that differs from row_ids", expected="one token per id")
    return [[str(token) for token in row] for row in found], texts


def names(record: Object, texts: Sequence[str], config: Config | None) -> list[str | None]:
    """Returns the names of the rows with these texts; None for a row without one.

    Rows are named by `data.columns` or `grid.row_names` of the config, else by the columns in the record.
    """
    columns = record.get("columns")
    known = [*map(str, columns)] if isinstance(columns, dict) else []
    named = dict(zip(known, names_of(known), strict=True))
    if config is not None and config.grid.row_names:
        named = columns_of(config.data.columns, config.grid.row_names)
    of_text = {text: name for name, text in named.items()}
    found = [of_text[parts[0]] if (parts := split_row(text, of_text, fold)) else None for text in texts]
    # The tokenizer does not reproduce the names, so positions determine them.
    if not any(found) and len(texts) == len(named):
        return [*named]
    return found


def steps(record: Object, rows: list[list[str]], delay: int, place: str) -> int:
    """Returns the record's steps.

    Raises:
      UserError: the steps do not agree with the rows; the picture would be wrong with another delay.
    """
    found, truncated = end_of(record, place)
    if not _agree(rows, delay, found, truncated):
        needed = fill(rows, delay=delay, truncated=truncated).steps
        others = " or ".join(map(str, delays(record, rows, place)[:3]))
        fit = f" (they fit --delay {others})" if others else ""
        raise UserError(
            f"{place}: steps", found=f"{found}", expected=f"{needed} for these rows at --delay {delay}{fit}"
        )
    return found


def delays(record: Object, rows: list[list[str]], place: str) -> list[int]:
    """Returns the delays that agree with the record's rows and steps, in increasing order.

    A record does not contain its delay.
    """
    found, truncated = end_of(record, place)
    most = min(found // max(len(rows) - 1, 1), GRID) if rows else 1  # with a longer delay the last row would not begin
    return [delay for delay in range(most + 1) if _agree(rows, delay, found, truncated, literal=False)]


def end_of(record: Object, place: str) -> tuple[int, str | None]:
    """Returns the record's steps, and the limit that cut its answer, or None.

    Raises:
      UserError: the values are invalid, or a picture of such an answer is not possible.
    """
    found, truncated = record.get("steps"), record.get("truncated")
    if truncated == "max_tokens":
        raise UserError(
            f"{place}: truncated",
            found="max_tokens, and the record does not say which rows had ended when the server stopped",
            expected="the record of a complete answer",
        )
    if not (truncated is None or truncated in ("sub_max", "time_max")):
        raise UserError(
            f"{place}: truncated",
            found=f"{truncated!r}",
            expected="null, sub_max or time_max, as in a record of the pipelined method",
        )
    if (left_out := record.get("repeated")) not in (None, []):
        raise UserError(
            f"{place}: repeated",
            found=f"{reprlib.repr(left_out)}, rows that decode.unique_rows left out",
            expected="no such rows, because a picture needs the place of each row (decode without decode.unique_rows)",
        )
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise UserError(f"{place}: steps", found=f"{found!r}", expected="a whole number")
    return found, truncated


def _agree(rows: list[list[str]], delay: int, steps: int, truncated: str | None, *, literal: bool = True) -> bool:
    """Returns whether these rows take this many steps.

    With `literal`, the steps may also follow the literal stopping rule, which needs no empty row.
    """
    ends, next_start = max((i * delay + len(row) + 1 for i, row in enumerate(rows)), default=1), len(rows) * delay
    if truncated == "time_max":  # a row was open, or all had ended and no other could begin in time
        return steps == ends - 1 or ends <= steps <= next_start
    needed = max(ends, next_start + 1) if truncated is None and delay else ends
    return steps == needed or (literal and steps == ends)


def trace_of(record: Object, delay: int, place: str) -> list[list[RowCall]] | None:
    """Returns the trace of a record (`decode.trace`), its calls, or None if it has none.

    Raises:
      UserError: the trace does not agree with the rows.
    """
    if (trace := record.get("trace")) is None:
        return None
    if not _is_table(trace):
        raise UserError(
            f"{place}: trace", found=f"{reprlib.repr(trace)}", expected="a list of calls, each a list of rows"
        )
    if len(trace) != record.get("calls"):
        wanted = f"{reprlib.repr(record.get('calls'))}, as in calls"
        raise UserError(f"{place}: trace", found=f"{len(trace)} calls", expected=f"{wanted}")
    ids, pieces = record["row_ids"], _pieces(record, place)
    assert _is_table(ids), "`tokens` has looked"
    taken, truncated = end_of(record, place)
    grid = fill([[*map(str, row)] for row in ids], delay=delay, truncated=truncated, steps=taken)
    wanted_of = Counter(cell.row for cell in grid.cells if cell.kind != "bos")
    # The last row that a call has covered so far, and the number of tokens by row.
    known, written_of = -1, Counter[int]()
    found = []
    for number, call in enumerate(trace, start=1):
        asked, last = [], -1
        for entry in call:
            at, found_entry = f"{place}: trace: call {number}", reprlib.repr(entry)
            if not _is_entry(entry):
                raise UserError(at, found=found_entry, expected="[row, written, accepted, [drafted ids]]")
            row, written, accepted, drafted = entry
            if not last < row <= known + 1:
                raise UserError(
                    at,
                    found=found_entry,
                    expected=f"a row number from {last + 1} to {known + 1}",
                    hint="the rows of a call are listed in ascending order",
                )
            known, last, before = max(known, row), row, written_of[row]
            written_of[row] += written
            line = [*ids[row], None] if row < len(ids) else [None]  # None stands for eos, whatever its id
            ends = written_of[row] == len(line)
            if not (
                written_of[row] <= wanted_of[row]
                and accepted <= len(drafted)
                and (written == accepted + 1 or (written == accepted and (ends if written else not before)))
            ):
                left = f"the {wanted_of[row] - before} remaining tokens of row_ids"
                raise UserError(at, found=found_entry, expected=f"the accepted drafts and one more token, of {left}")
            right = [here in (i, None) for i, here in zip(drafted, line[before:], strict=False)]
            if not all(right[:accepted]):
                raise UserError(at, found=found_entry, expected="accepted drafts that are in row_ids")
            asked.append(RowCall(row, written, accepted, tuple(_piece(i, pieces) for i in drafted)))
        found.append(asked)
    if truncated == "time_max" and not written_of[len(ids)]:  # all rows that may exist have begun
        del wanted_of[len(ids)]
    for row, wanted_tokens in wanted_of.items():
        if written_of[row] != wanted_tokens:
            raise UserError(
                f"{place}: trace",
                found=f"{written_of[row]} tokens of row {row}",
                expected=f"{wanted_tokens}, as in row_ids",
            )
    return found


def _is_entry(entry: object) -> TypeGuard[tuple[int, int, int, list[int]]]:
    return (
        isinstance(entry, list)
        and len(entry) == 4
        and all(type(x) is int and x >= 0 for x in entry[:3])
        and isinstance(entry[3], list)
        and all(type(x) is int for x in entry[3])
    )


def _pieces(record: Object, place: str) -> dict[str, str]:
    pieces = record.get("pieces", {})
    if not isinstance(pieces, dict) or not all(isinstance(text, str) for text in pieces.values()):
        raise UserError(
            f"{place}: pieces", found=f"{reprlib.repr(pieces)}", expected="an object with a text for each id"
        )
    return pieces


def _piece(number: object, pieces: dict[str, str]) -> str:
    return pieces.get(str(number)) or str(number)


def _is_table(value: object) -> TypeGuard[list[list[object]]]:
    return isinstance(value, list) and all(isinstance(row, list) for row in value)
