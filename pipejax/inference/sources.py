"""What is given to be decoded, from Python or in lines: texts, token ids, or records as a task makes its source of."""

from collections.abc import Mapping, Sequence
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


def of_record(value: Mapping[str, Any], place: str, name: str | int, config: Config) -> Source:
    """The source of a record, with the template that the model was trained with; `name`: its id, if it has none.

    Raises:
      UserError: a field is absent or of another kind; `place` names the record.
    """
    value = dict(value)
    if "source" in value and "source_ids" in value:
        raise UserError(f'{place}: found "source" and "source_ids"; expected one of them')
    name = name if value.get("id") is None else id_of(value, place)
    if "source_ids" in value:
        ids = value["source_ids"]
        if not isinstance(ids, list | np.ndarray):
            raise UserError(f'{place}: "source_ids": found {kind(ids)}; expected a list of whole numbers')
        return Source(name, ids)
    if config.data.task in TASKS:
        return Source(name, make_task(config.data).source(value, place))
    return Source(name, text_of(value, "source", place))


def check(source: Source, place: str, *, vocabulary: int, has_tokenizer: bool) -> Source:
    """The source if it can be decoded; `place` names it in the UserError otherwise."""
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
    for i in content:
        if isinstance(i, bool) or not isinstance(i, int | np.integer):
            raise UserError(f"{place}: found {i!r} among the ids; expected whole numbers")
        if not 0 <= i < vocabulary:
            raise UserError(f"{place}: found id {i}; expected 0 to {vocabulary - 1}")
    return source
