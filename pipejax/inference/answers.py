"""Makes records from decoded ids. Records are returned in Python and written by `pipejax decode`."""

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NotRequired, TypedDict

from pipejax import decoding
from pipejax.config import Config
from pipejax.config.row_names import columns_of, split_row
from pipejax.data.tokenizer import Tokenizer
from pipejax.decoding import TRUNCATIONS, Decoded
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
    calls: int  # decoder calls; fewer than steps if no row was open for a while, or if drafts were accepted
    columns: NotRequired[dict[str, str | None]]  # by column in `data.targets`: "" for a blank cell, None without a row
    truncated: str | None  # the limit that truncated the answer, one of `decoding.TRUNCATIONS`
    method: str  # the name of the method
    repeated: NotRequired[list[int]]  # with `decode.unique_rows`: the numbers of the rows that were left out
    sample: NotRequired[int]  # with `decode.samples` above 1: the number of the answer, from 0
    log_prob: NotRequired[float]  # with `decode.scores`: of the whole answer, including the end tokens of its rows
    log_probs: NotRequired[list[list[float]]]  # with `decode.scores`: of each token of `row_ids`
    trace: NotRequired[list[list[decoding.Asked]]]  # with `decode.trace`: the drafted and accepted tokens of each call
    # With `decode.trace` and a tokenizer: the texts of the tokens in `row_ids` and `trace`, by id.
    pieces: NotRequired[dict[str, str]]
    seconds: NotRequired[float]  # from `evaluation`, at batch size 1


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
    start: Callable[[int], Any],
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
      tokenizer: makes the texts; None: the record has none.
      ends: whether the log-probabilities of end tokens count; False for an answer that was cut off.
    """
    rows = list(zip(found.tokens[place], found.lengths[place].tolist(), strict=True))
    exist, told = len(rows), found.log_probs is not None or found.trace is not None
    if told:
        exist = method.exist(exist, decoding_options.given(source, method).most)
    kept = [(i, rows[i][0][: rows[i][1]].tolist()) for i in method.order([n for _, n in rows])]
    unique = config.decode.unique_rows
    repeated = [i for k, (i, row) in enumerate(kept) if unique and row in (above for _, above in kept[:k])]
    kept = [(i, row) for i, row in kept if i not in repeated]
    text: str | None = None
    said: list[str] | None = None
    if tokenizer is not None:
        text, said = method.read([tokenizer.decode(row) for _, row in kept], config.data.separator)
        if unique and method.parts_text:
            repeated = [k for k, row in enumerate(said) if row in said[:k]]
            said = [*dict.fromkeys(said)]
    if source.schema is not None:
        text = source.schema.dump([row[:length].tolist() for row, length in rows])
    assert found.calls is not None, "`Programs.decode` sets them"
    record: Record = {
        "id": source.id,
        "text": text,
        "rows": said,
        "row_ids": [row for _, row in kept],
        "steps": int(found.steps[place]),
        "calls": int(found.calls[place]),
        "truncated": TRUNCATIONS[int(found.truncated[place])],
        "method": method.name,
    }
    if said is not None and config.data.columns:
        assert tokenizer is not None
        record["columns"] = _columns_in(said, config, tokenizer)
    if source.schema is not None:  # a schema's rows are complete
        record["truncated"] = None
    if unique:
        record["repeated"] = repeated
    if config.decode.samples > 1:
        record["sample"] = source.sample
    if found.log_probs is not None:
        by_time, first = found.log_probs[place], [int(start(i)) for i in range(len(rows))]
        record["log_probs"] = [by_time[i, first[i] : first[i] + len(row)].tolist() for i, row in kept]
        spans = [slice(first[i], first[i] + n + ends) for i, (_, n) in enumerate(rows[:exist])]
        record["log_prob"] = sum(float(by_time[i, span].sum()) for i, span in enumerate(spans))
    if found.trace is not None:
        calls = decoding.list_calls(found.trace, place, record["calls"])
        # Rows are numbered as in `row_ids`, where an empty row may precede others (grid.stop=literal).
        last = kept[-1][0] if kept else -1
        later = [row for row in range(last + 1, exist) if row not in repeated]
        numbers = {row: k for k, row in enumerate([*(row for row, _ in kept), *later])}
        record["trace"] = [[x._replace(row=numbers[x.row]) for x in call if x.row in numbers] for call in calls]
        if tokenizer is not None:
            seen = {*chain(*record["row_ids"]), *chain(*(one.drafted for call in record["trace"] for one in call))}
            record["pieces"] = {str(i): tokenizer.piece(i) for i in sorted(seen)}
    return record


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
        report.other_steps += method.rival_steps(lengths, separator=parted)
    elif tokenizer is None or not parted:  # the rows cannot be told apart
        report.other_steps = None
    else:
        lengths = [len(tokenizer.encode(row)) for row in texts(record)]
        report.other_steps += method.rival_steps(lengths, separator=parted)
