"""What is given to be decoded, from Python or in lines: texts, token ids, or records as a task makes its source of."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.config import Config
from pipejax.data import TASKS, make_task
from pipejax.data.lines import id_of, kind, text_of
from pipejax.system.errors import UserError


class Source(NamedTuple):
    """One thing to decode: text or token ids (eos included)."""

    id: str | int
    content: str | Sequence[int] | np.ndarray
    prefixes: tuple[str | Sequence[int], ...] = ()  # with which the rows begin, in turn
    max_rows: int | None = None  # after so many rows the answer ends
    sample: int = 0  # the number of the answer, if there are several


def of_record(value: Mapping[str, Any], place: str, name: str | int, config: Config) -> Source:
    """The source of a record, with the template that the model was trained with; `name`: its id, if it has none.

    Raises:
      UserError: a field is absent or of another kind; `place` names the record.
    """
    value = dict(value)
    if "source" in value and "source_ids" in value:
        raise UserError(f'{place}: found "source" and "source_ids"; expected one of them')
    name = name if value.get("id") is None else id_of(value, place)
    prefixes, max_rows = value.get("row_prefixes") or (), value.get("max_rows")
    if not isinstance(prefixes, list | tuple) or not all(isinstance(x, str | list) for x in prefixes):
        raise UserError(
            f'{place}: "row_prefixes": found {kind(prefixes)}; expected a list of texts, or of lists of ids'
        )
    if max_rows is not None and (isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1):
        raise UserError(f'{place}: "max_rows": found {max_rows!r}; expected a whole number from 1 on')
    if max_rows is not None and len(prefixes) > max_rows:
        raise UserError(f'{place}: "row_prefixes": found {len(prefixes)}; expected at most "max_rows" = {max_rows}')
    if "source_ids" in value:
        content = value["source_ids"]
        if not isinstance(content, list | np.ndarray):
            raise UserError(f'{place}: "source_ids": found {kind(content)}; expected a list of whole numbers')
    elif config.data.task in TASKS:
        content = make_task(config.data).source(value, place)
    else:
        content = text_of(value, "source", place)
    return Source(name, content, tuple(prefixes), max_rows)


def check(source: Source, place: str, *, vocabulary: int, has_tokenizer: bool) -> Source:
    """The source if it can be decoded; `place` names it in the UserError otherwise."""
    for i, prefix in enumerate(source.prefixes):
        if isinstance(prefix, str) and not has_tokenizer:
            raise UserError(f'{place}: "row_prefixes": found text, but the checkpoint has no tokenizer; expected ids')
        if not prefix:
            raise UserError(f'{place}: "row_prefixes": found an empty one at {i}; expected at least one token')
        if not isinstance(prefix, str):
            _check_ids(prefix, f'{place}: "row_prefixes"', vocabulary)
    content = source.content
    if isinstance(content, str):
        if not has_tokenizer:
            raise UserError(f"{place}: found text, but the checkpoint has no tokenizer; expected source_ids")
        if not content.strip():
            raise UserError(f"{place}: found an empty text; expected some")
        return source
    if isinstance(content, bytes) or not isinstance(content, Sequence | np.ndarray):
        raise UserError(f"{place}: found {type(content).__name__}; expected text, a list of ids or a record")
    if not len(content):
        raise UserError(f"{place}: found no ids; expected at least one")
    _check_ids(content, place, vocabulary)
    return source


def _check_ids(ids: Iterable[Any], place: str, vocabulary: int) -> None:
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int | np.integer):
            raise UserError(f"{place}: found {i!r} among the ids; expected whole numbers")
        if not 0 <= i < vocabulary:
            raise UserError(f"{place}: found id {i}; expected 0 to {vocabulary - 1}")
