"""Sources to decode, from Python or from lines: texts, token ids, or records from which a task builds its source."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipejax.config import Config
from pipejax.data import OWN_FILES, TASKS, make_task, own_files
from pipejax.data.lines import id_of, is_blank, kind, text_of
from pipejax.data.own_files import FilesTask
from pipejax.data.text import Template
from pipejax.data.tokenizer import Tokenizer
from pipejax.inference.answer_format import AnswerFormat
from pipejax.methods import prefix_ids
from pipejax.model.backbone import Backbone
from pipejax.system.errors import UserError
from pipejax.system.strict_json import JsonMapping


class Source(NamedTuple):
    """A source to decode: a text, or token ids that include special tokens."""

    id: str | int
    content: str | Sequence[int] | np.ndarray
    prefixes: tuple[str | Sequence[int], ...] = ()  # the beginnings of the rows, in order
    max_rows: int | None = None  # the number of rows after which the answer ends
    sample: int = 0  # the number of the sample, if there are several
    answer_format: AnswerFormat | None = None  # the format of the answer; None: free rows


def of_record(value: JsonMapping, place: str, name: str | int, config: Config) -> Source:
    """Returns the source of a record, made with the template of the model's training.

    Args:
      value: the record.
      place: its place, for messages.
      name: the id of a record that has none.
      config: the model's config.

    Raises:
      UserError: the record has neither a source nor the template's fields.
    """
    value = dict(value)
    if "source" in value and "source_ids" in value:
        raise UserError(place, found='"source" and "source_ids"', expected="only one of them")
    own = value.get("id")
    name = name if own != "" and is_blank(own) else id_of(value, place)
    prefixes, max_rows = value.get("row_prefixes") or (), value.get("max_rows")
    if not isinstance(prefixes, list | tuple) or not all(isinstance(x, str | list) for x in prefixes):
        raise UserError(
            f'{place}: "row_prefixes"', found=f"{kind(prefixes)}", expected="a list of texts, or of lists of ids"
        )
    if max_rows is not None and (isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1):
        raise UserError(f'{place}: "max_rows"', found=f"{max_rows!r}", expected="a whole number of at least 1")
    if max_rows is not None and len(prefixes) > max_rows:
        raise UserError(
            f'{place}: "row_prefixes"', found=f"{len(prefixes)}", expected=f'at most "max_rows" = {max_rows}'
        )
    if "source_ids" in value:
        content = value["source_ids"]
        if not isinstance(content, list | np.ndarray):
            raise UserError(f'{place}: "source_ids"', found=f"{kind(content)}", expected="a list of whole numbers")
    elif config.data.task in TASKS:
        content = _task(config.data).source(value, place)
    else:
        content = text_of(value, "source", place)
    return Source(name, content, tuple(prefixes), max_rows)


def template_of(config: Config) -> Template:
    """Returns the template that `of_record` fills; "{source}": a record's source is used unchanged."""
    known = config.data.task in TASKS
    return Template(_task(config.data).template if known else "{source}", key="data.source_template")


_task = functools.lru_cache(maxsize=8)(make_task)  # cached, because it is needed for every record


def fields_of(config: Config) -> tuple[str, ...]:
    """Returns the fields of the template that the model was trained with; empty without a template."""
    task = _task(config.data) if config.data.task in OWN_FILES else None
    return task.fields if isinstance(task, FilesTask) else ()


def check_fields(fields: Sequence[str], values: Iterable[Any], where: str) -> None:
    """Raises a UserError unless each field is in some record; reads no more records than necessary.

    A single record may lack a field. If all records lack a field, they probably use another name for it than the
    training data.
    """

    def has(value: Any) -> JsonMapping:
        whole = not isinstance(value, Mapping) or "source_ids" in value
        whole = whole or ("source" in value and not any(field in value for field in fields))
        return dict.fromkeys(fields) if whole else value

    own_files.require_fields(fields, map(has, values), where, learned=True)


def check(source: Source, place: str, *, architecture: Backbone, tokenizer: Tokenizer | None) -> Source:
    """Returns the source if it can be decoded.

    Raises:
      UserError: the source is a text without a tokenizer, is empty, or has an id outside of the vocabulary.
    """
    vocabulary, ends = architecture.vocab_size, architecture.end_token_ids
    for i, prefix in enumerate(source.prefixes):
        where = f'{place}: "row_prefixes"'
        if isinstance(prefix, str) and tokenizer is None:
            raise UserError(where, found="text, but the checkpoint has no tokenizer", expected="ids")
        if not prefix:
            raise UserError(where, found=f"an empty prefix at {i}", expected="at least one token")
        if isinstance(prefix, str):
            assert tokenizer is not None
            prefix_ids(tokenizer, prefix, where, ends)
            continue
        _check_ids(prefix, where, vocabulary)
        if early := [i for i in prefix if i in ends]:
            found = f"{list(prefix)}, in which {early[0]} ends the row"
            raise UserError(where, found=found, expected="ids that do not end a row")
    content = source.content
    if isinstance(content, str):
        if tokenizer is None:
            raise UserError(place, found="text, but the checkpoint has no tokenizer", expected="source_ids")
        if not content.strip():
            raise UserError(place, found="an empty text", expected="a text that is not blank")
        return source
    if isinstance(content, bytes) or not isinstance(content, Sequence | np.ndarray):
        raise UserError(place, found=type(content).__name__, expected="text, a list of ids or a record")
    if not len(content):
        raise UserError(place, found="no ids", expected="at least one")
    _check_ids(content, place, vocabulary)
    return source


def _check_ids(ids: Iterable[Any], place: str, vocabulary: int) -> None:
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int | np.integer):
            raise UserError(place, found=f"{i!r} among the ids", expected="whole numbers")
        if not 0 <= i < vocabulary:
            raise UserError(place, found=f"id {i}", expected=f"0 to {vocabulary - 1}")
