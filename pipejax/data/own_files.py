"""The user's own data: one file of records or of CSV for each split.

A record is `{"id", "source", "targets": [row, ...]}`, unless the config names other fields.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pipejax.config import DataConfig
from pipejax.data.examples import Example
from pipejax.data.formats import read_records
from pipejax.data.lines import Placed, check_text, id_of, open_file, read_table, text_of, texts_of, unpacked, value_of
from pipejax.data.text import Template, sentences, split
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.errors import UserError


class FilesTask:
    """The task of the files `data.train`, `data.dev` and `data.test`."""

    def __init__(self, config: DataConfig) -> None:
        """Checks the settings; a file is opened when its split is asked for.

        Raises:
          UserError: the source template names no fields, or `data.rows` does not fit the kind of file.
        """
        self.paths = {"train": config.train, "dev": config.dev, "test": config.test}
        self.metric = config.metric or "spans"
        self._read = read_csv if config.task == "csv" else read_records
        self._template = Template(config.source_template or "{source}", key="data.source_template")
        self._rows = _rows_reader(config)

    def examples(self, split: str) -> Sequence[Example]:
        """All examples of a split, read and checked; empty if the config names no file for it."""
        if not (path := self.paths[split]):
            return []
        examples = self.examples_of(self._read(path))
        if not examples:
            raise UserError(f"{path}: found no lines; expected at least one example")
        return examples

    def source(self, value: dict[str, Any], place: str) -> str:
        """The record's "source" unchanged, if it has one that is no field of the template; else the filled template."""
        whole = "source" in value and "source" not in self._template.fields
        return text_of(value, "source", place) if whole else self._filled(value, place)

    def _filled(self, value: dict[str, Any], place: str) -> str:
        return self._template.fill({field: text_of(value, field, place) for field in self._template.fields})

    def tokenizer(self) -> Tokenizer | None:
        """None: `data.tokenizer` or the starting checkpoint has the tokenizer."""
        return None

    def examples_of(self, placed: Iterable[Placed]) -> list[Example]:
        """The examples that records make; a record without an id has what follows the last colon of its place.

        Raises:
          UserError: a record is no example, or its id is another's; the message names the place.
        """
        examples, seen = [], dict[str, str]()
        for place, value in placed:
            name = str(id_of(value, place))
            source = self._filled(value, place)
            if name in seen:
                line = seen[name].rpartition(":")[2]
                raise UserError(f'{place}: "id": found {name!r} again; it was used in line {line}')
            seen[name] = place
            examples.append(Example(name, source, tuple(self._rows(value, place)), place))
        return examples


def read_csv(path: str) -> Iterator[Placed]:
    """Yields ("FILE:LINE", row as an object) for each row of a CSV file, which may be packed with gzip."""
    with open_file(path, "a CSV file") as file, unpacked(file, path) as table:
        yield from read_table(table, path)


def _rows_reader(config: DataConfig) -> Callable[[dict[str, Any], str], list[str]]:
    """The function (record, place) -> target rows that `data.rows` asks for."""
    key = config.targets
    if config.rows == "list":
        if config.task == "csv":
            raise UserError("data.rows: found 'list'; expected delimiter or sentences, as a column of CSV holds text")
        return lambda value, place: texts_of(value, key, place)
    part = sentences if config.rows == "sentences" else lambda text: split(text, config.delimiter)

    def rows(value: dict[str, Any], place: str) -> list[str]:
        text = value_of(value, key, place)
        return part(check_text(text, key, place)) if text != "" else []

    return rows
