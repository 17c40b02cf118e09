"""Makes records from decoded ids. Records are returned in Python and written by `pipejax decode`."""

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NotRequired, TypedDict

import jax

from pipejax import decoding
from pipejax.config import Config
from pipejax.config.row_names import columns_of, split_row
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import TRUNCATIONS, Decoded
from pipejax.grid import Numbers
from pipejax.inference import decoding_options
from pipejax.inference.report import Report
from pipejax.inference.sources import Source
from pipejax.methods import Method, tells_rows_apart
from pipejax.metrics.exact import fold


class Record(TypedDict):
    """The answer to a source; a line of the output of `pipejax decode`."""

    id: str | int  # the source's id, or its position
    text: str | None  # the rows, joined by `data.separator`; None without a tokenizer
    rows: list[str] | None  # None without a tokenizer
    row_ids: list[list[int]]  # token ids
    steps: int  # time-steps of Algorithm 1
    calls: int  # decoder calls; fewer than steps if drafts or prefixes were accepted, or if no row was open for a while
    columns: NotRequired[dict[str, str | None]]  # the cell of each column in `data.targets`; "": blank, None: no row
    truncated: str | None  # the limit that truncated the answer, one of `decoding.TRUNCATIONS`
    method: str  # the name of the method
    repeated: NotRequired[list[int]]  # the numbers of the rows that were left out (`decode.unique_rows`)
    sample: NotRequired[int]  # the number of the answer, from 0 (`decode.samples` above 1)
    log_prob: NotRequired[float]  # the sum over the answer, with end tokens of rows (`decode.scores`)
    log_probs: NotRequired[list[list[float]]]  # the log-probability of each token of `row_ids`
    trace: NotRequired[list[list[decoding.Asked]]]  # the drafted and accepted tokens of each call
    # The text of each token id in `row_ids` and `trace` (`decode.trace`, with a tokenizer).
    pieces: NotRequired[dict[str, str]]
    seconds: NotRequired[float]  # the seconds that `evaluation` measured, at batch size 1


def texts(record: Record) -> list[str]:
    """Returns the texts of the rows that are not blank. The record must have been decoded with a tokenizer."""
    assert record["rows"] is not None, "decoded without a tokenizer"
    return [row for row in record["rows"] if row.strip()]


def record_of(
    source: Source,
    method: Method,
    found: Decoded,
    place: int,
    *,
    start: Callable[[int], Numbers],
    config: Config,
    tokenizer: Tokenizer | None,
    ends: bool = True,
) -> Record:
    """Returns the record of a decoded example.

    Args:
      source: the source.
      method: its method.
      found: a decoded batch.
      place: the index of the example in the batch.
      start: the strategy's `start`.
      config: the config.
      tokenizer: the tokenizer for the texts; None: the record has no texts.
      ends: whether the log-probabilities of end tokens count; False for an answer that was cut off.
    """
    rows = [tokens[:n].tolist() for tokens, n in zip(found.tokens[place], found.lengths[place].tolist(), strict=True)]
    numbers, repeated = _kept_rows(rows, method, unique=config.decode.unique_rows)
    kept = [rows[i] for i in numbers]
    text, row_texts = None, None
    if tokenizer is not None:
        text, row_texts, repeated = _texts_of(kept, repeated, method, config, tokenizer)
    if source.answer_format is not None:
        text = source.answer_format.dump(rows)
    assert found.calls is not None, "`Programs.decode` sets them"
    record: Record = {
        "id": source.id,
        "text": text,
        "rows": row_texts,
        "row_ids": kept,
        "steps": int(found.steps[place]),
        "calls": int(found.calls[place]),
        "truncated": TRUNCATIONS[int(found.truncated[place])] if source.answer_format is None else None,
        "method": method.name,
    }
    if row_texts is not None and config.data.columns:
        assert tokenizer is not None
        record["columns"] = _columns_in(row_texts, config, tokenizer)
    if config.decode.unique_rows:
        record["repeated"] = repeated
    if config.decode.samples > 1:
        record["sample"] = source.sample
    if found.log_probs is None and found.trace is None:
        return record
    exist = method.count_rows(len(rows), decoding_options.row_prefixes(source, method).most)
    if found.log_probs is not None:
        first = [int(start(i)) for i in range(len(rows))]
        record["log_probs"], record["log_prob"] = _scores_of(found.log_probs[place], rows, numbers, first, exist, ends)
    if found.trace is not None:
        record["trace"] = _trace_of(decoding.list_calls(found.trace, place, record["calls"]), numbers, repeated, exist)
        if tokenizer is not None:
            seen = {*chain(*kept), *chain(*(one.drafted for call in record["trace"] for one in call))}
            record["pieces"] = {str(i): tokenizer.piece(i) for i in sorted(seen)}
    return record


def _kept_rows(rows: Sequence[list[int]], method: Method, *, unique: bool) -> tuple[list[int], list[int]]:
    """Returns the numbers of the rows that a record contains, in the method's order, and the numbers left out.

    Args:
      rows: the token ids of all rows of the grid.
      method: the method.
      unique: whether rows that repeat an earlier row of the grid are left out (`decode.unique_rows`).
    """
    order = list(method.order([len(row) for row in rows]))
    if not unique:
        return order, []
    repeated = [i for i in order if any(rows[i] == rows[above] for above in order if above < i)]
    return [i for i in order if i not in repeated], repeated


def _texts_of(
    kept: Sequence[list[int]], repeated: list[int], method: Method, config: Config, tokenizer: Tokenizer
) -> tuple[str, list[str], list[int]]:
    """Returns the text of an answer, the texts of its rows, and the numbers of the rows that repeat an earlier row.

    Args:
      kept: the token ids of the rows that the record contains.
      repeated: the numbers of the rows that were left out as repetitions, by token ids. A method that parts a text into
        rows generates a single row of tokens, so its repetitions are found by text.
      method: the method.
      config: the config.
      tokenizer: the tokenizer.
    """
    text, row_texts = method.read([tokenizer.decode(row) for row in kept], config.data.separator)
    if config.decode.unique_rows and method.parts_text:
        repeated = [k for k, row in enumerate(row_texts) if row in row_texts[:k]]
        row_texts = [*dict.fromkeys(row_texts)]
    return text, row_texts, repeated


def _scores_of(
    by_time: jax.Array, rows: Sequence[list[int]], kept: Sequence[int], first: Sequence[int], exist: int, ends: bool
) -> tuple[list[list[float]], float]:
    """Returns the log-probabilities of the tokens of each row that a record contains, and of the whole answer.

    Args:
      by_time: f32 [R, W], the log-probability of the token generated at each row and time.
      rows: the token ids of all rows of the grid.
      kept: the numbers of the rows that the record contains.
      first: the time of the first token of each row.
      exist: the number of rows that the answer can have.
      ends: whether the end tokens of rows count for the whole answer.
    """
    spans = [slice(first[i], first[i] + len(row) + ends) for i, row in enumerate(rows[:exist])]
    whole = sum(float(by_time[i, span].sum()) for i, span in enumerate(spans))
    return [by_time[i, first[i] : first[i] + len(rows[i])].tolist() for i in kept], whole


def _trace_of(
    trace: Sequence[Sequence[decoding.Asked]], kept: Sequence[int], repeated: Sequence[int], exist: int
) -> list[list[decoding.Asked]]:
    """Returns the trace of an answer with rows numbered as in `row_ids`.

    An empty row may precede others (grid.stop=literal), so these numbers may differ from the grid's.

    Args:
      trace: the trace with the row numbers of the grid.
      kept: the numbers of the rows that the record contains.
      repeated: the numbers of the rows that were left out as repetitions.
      exist: the number of rows that the answer can have.
    """
    later = [row for row in range(max(kept, default=-1) + 1, exist) if row not in repeated]
    numbers = {row: k for k, row in enumerate([*kept, *later])}
    return [[one._replace(row=numbers[one.row]) for one in call if one.row in numbers] for call in trace]


def _columns_in(rows: Sequence[str], config: Config, tokenizer: Tokenizer) -> dict[str, str | None]:
    """Returns the text of each column, from the first row that begins with its name.

    If two names are the same text after decoding, the columns are assigned to the rows in order instead, provided that
    their numbers agree.
    """
    names = columns_of(config.data.columns, config.grid.row_names)
    by_text = {_as_decoded(tokenizer, name): column for column, name in names.items()}
    found: dict[str, str | None] = dict.fromkeys(names)
    if len(by_text) < len(names) or not all(text.strip() for text in by_text):
        return dict(zip(names, rows, strict=True)) if len(rows) == len(names) else found
    for row in rows:
        if (parts := split_row(row, by_text, fold)) and found[by_text[parts[0]]] is None:
            found[by_text[parts[0]]] = parts[1]
    return found


@functools.lru_cache(maxsize=1024)
def _as_decoded(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode(text))


def count(record: Record, method: Method, report: Report, *, config: Config, tokenizer: Tokenizer | None) -> None:
    """Adds a record to the report."""
    report.examples += 1
    report.steps += record["steps"]
    report.calls += record["calls"]
    report.repeated += len(record.get("repeated", ()))
    if record["truncated"]:
        report.truncated[record["truncated"]] += 1
    if report.other_steps is None:
        return
    parted = tells_rows_apart(config.data.separator)
    if not method.parts_text:
        lengths = [len(row) for row in record["row_ids"]]
        report.other_steps += method.baseline_steps(lengths, separator=parted)
    elif tokenizer is None or not parted:  # the rows cannot be told apart
        report.other_steps = None
    else:
        lengths = [len(tokenizer.encode(row)) for row in texts(record)]
        report.other_steps += method.baseline_steps(lengths, separator=parted)
