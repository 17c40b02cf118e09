"""The user's data: files of records or CSV, one for each split or one for all.

A record is `{"id", "source", "targets": [row, ...]}`, unless the config names other fields.
"""

import dataclasses
import datetime
import decimal
import difflib
import functools
import hashlib
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from pipejax.config import DataConfig
from pipejax.config.row_names import field_of, names_of, quoted
from pipejax.data.examples import Example, Stream, Task
from pipejax.data.formats import read_records
from pipejax.data.lines import BadLines, Object, Placed, check_text, id_of, is_blank, kind, text_of, texts_of, value_of
from pipejax.data.storage import files_of
from pipejax.data.tables import Dialect
from pipejax.data.text import Template, normalized, sentences, split_rows
from pipejax.metrics import HEADLINES
from pipejax.system.errors import UserError, join_hints
from pipejax.system.fields import listed, shown_value

logger = logging.getLogger(__name__)

SPLITS = ("train", "dev", "test")
COMPARED = 1000  # the most keys that are compared when a similar name is searched
MANY = 20  # the least number of examples for which a message is logged if no target has several rows


class FilesTask(Task):
    """The task of the files `data.train`, `data.dev` and `data.test`."""

    def __init__(self, config: DataConfig, row_names: Sequence[str] = ()) -> None:
        """Checks the settings. A file is opened only when its split is read.

        Args:
          config: the data settings.
          row_names: the beginnings of the rows if `data.targets` are columns; empty: the columns' names and a colon.

        Raises:
          UserError: settings contradict each other.
        """
        self.config, self.metric = config, config.metric or "exact"
        self._targets = config.columns or (field_of(str(config.targets)),)
        self.template = config.source_template or "{source}"
        self._template = Template(self.template, key="data.source_template")
        fields = " ".join(f"{{{field}}}" for field in self.fields)
        judges_presence = HEADLINES[self.metric] == "present_f1@M" and fields != self.template
        self._document = Template(fields, key="data.source_template") if judges_presence else None
        self._rows = _rows_reader(config, row_names)
        self._shares = _shares(config) if config.split else ()
        self._examples_by_split: dict[str, list[Example]] | None = None

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the source template."""
        return self._template.fields

    def examples(self, split: str) -> Sequence[Example]:
        """Returns the examples of a split, from its file or as its share of `data.train`."""
        if not self.has(split):
            return []
        if not self._has_share(split):
            return self._read(getattr(self.config, split))
        if self._examples_by_split is None:
            self._examples_by_split = self._split_examples(self._read(self.config.train))
        return self._examples_by_split[split]

    def has(self, split: str) -> bool:
        """Returns whether the config names the examples of the split."""
        if self._shares and (split == "train" or self._has_share(split)):
            return self._has_share(split) and bool(self.config.train)
        return bool(getattr(self.config, split))

    def _has_share(self, split: str) -> bool:
        """Returns whether `data.split` gives this split a share of `data.train`."""
        return bool(self._shares and self._shares[SPLITS.index(split)])

    def source(self, value: Object, place: str) -> str:
        """Returns the filled template, or "source" unchanged if the record has it and none of the template's fields.

        A field that is absent, null or blank counts as "".
        """
        if "source" in value and not any(field in value for field in self.fields):
            return text_of(value, "source", place)
        return self._fill(value, place, learned=True)

    def _fill(self, value: Object, place: str, template: Template | None = None, *, learned: bool = False) -> str:
        """Fills the template with the fields of a record.

        With `learned`, a model was trained with the template, so messages do not suggest another one.
        """
        if not any(field in value for field in self.fields):
            hint = "" if learned else _other_key(self.fields[0], map(str, value))
            value_of(value, self.fields[0], place, hint=hint)
        cells = {field: _found_cell(value, field, place, {*self.fields, *self._targets}) for field in self.fields}
        texts = {field: "" if cell is None else check_text(cell, field, place) for field, cell in cells.items()}
        if not any(texts.values()):
            names = ", ".join(f'"{field}"' for field in self.fields)
            raise UserError(f"{place}: {names}", found="an empty text", expected="text that is not blank")
        return (template or self._template).fill(texts)

    def _read(self, path: str) -> list[Example]:
        bad, files = BadLines(path, skip=self.config.skip_bad), files_of(path)
        examples = self.examples_of(self._records(files, bad), path, bad, several=len(files) > 1)
        bad.end(len(examples))
        if not examples:
            raise UserError(path, found="no lines", expected="at least one example")
        return examples

    def _records(self, files: Iterable[str], bad: BadLines) -> Iterator[Placed]:
        table, dialect = self.config.task == "csv", Dialect.of(self.config)
        for file in files:
            yield from read_records(file, table=table, dialect=dialect, bad=bad)

    def stream(self) -> Stream:
        """Returns the training examples as a stream, which reads `data.stream` examples at a time.

        Raises:
          UserError: a setting excludes streams, or no record has a required field.
        """
        config, path = self.config, self.config.train
        if config.split:
            raise UserError(
                "data.split", found=f"{config.split!r} and data.stream", expected="separate files for the splits"
            )
        if config.empty_targets != "keep":
            raise UserError(
                "data.empty_targets", found=f"{config.empty_targets!r}", expected="keep, because data.stream is set"
            )
        bad, files, size = BadLines(path, skip=config.skip_bad), files_of(path), config.stream
        require_fields((*self.fields, *self._targets), (value for _, value in self._records(files, bad)), path)

        def read(files: Sequence[str]) -> Iterator[list[Example]]:
            records = self._records(files, bad)
            while part := list(itertools.islice(records, size)):
                yield self.examples_of(part, path, bad, several=len(files) > 1, whole=False)

        return Stream(files, read, size)

    def examples_of(
        self,
        placed: Iterable[Placed],
        where: str = "data.train",
        bad: BadLines | None = None,
        *,
        several: bool = False,
        whole: bool = True,
    ) -> list[Example]:
        """Returns the examples of records. A record without an id gets its line number as id.

        Args:
          placed: the records, each with its "FILE:LINE".
          where: the files' name, for messages.
          bad: the collection that gets the errors of records; None: the first one is raised.
          several: whether the records come from several files; ids of unnamed records then include the file.
          whole: whether these are all records, so that ids are checked for duplicates and fields for existence.
        """
        examples, seen, fields = list[Example](), dict[str, str](), dict[str, None]()
        numbered = dict[str, int]()  # line number to index, for examples without an id
        bad = bad or BadLines(where, skip=False)
        for place, value in placed:
            fields |= dict.fromkeys(value)
            try:
                has_id = not is_blank(value.get("id"))
                name = str(id_of(value, place)) if has_id or not several else place
                source, rows = self._fill(value, place), tuple(self._rows(value, place))
                if whole and name in numbered:
                    i = numbered.pop(name)
                    examples[i] = dataclasses.replace(examples[i], id=examples[i].place)
                elif whole and name in seen and not has_id:
                    name = place
                elif whole and name in seen:
                    line = seen[name] if several else f"line {seen[name].rpartition(':')[2]}"
                    raise UserError(f'{place}: "id"', found=f"{name!r} again; it was used in {line}")
            except UserError as error:
                bad(error)
                continue
            seen[name] = place
            if not has_id:
                numbered[name] = len(examples)
            document = self._fill(value, place, self._document) if self._document else ""
            examples.append(Example(name, source, rows, place, document))
        if examples and whole:
            require_fields((*self.fields, *self._targets), [fields], where)
        between = self.config.delimiter
        if self.config.rows == "delimiter" and len(examples) >= MANY and not any(len(e.targets) > 1 for e in examples):
            logger.info(f"{where}: data.delimiter {between!r} splits none of {len(examples)} targets: each is one row")
        return examples

    def _split_examples(self, examples: Sequence[Example]) -> dict[str, list[Example]]:
        """Splits the examples by a hash of the normalised source.

        Examples with the same source are in the same split, and adding lines moves no example to another split.
        """
        parts: dict[str, list[Example]] = {name: [] for name in SPLITS}
        ends = list(itertools.accumulate(self._shares))
        for example in examples:
            digest = hashlib.sha256(f"{self.config.split_seed}:{normalized(example.source)}".encode()).digest()
            lot = int.from_bytes(digest[:6], "big") / 2**48 * ends[-1]
            parts[next(name for name, end in zip(SPLITS, ends, strict=True) if lot < end)].append(example)
        counts = ", ".join(
            f"{len(parts[name])} {name}" for name, share in zip(SPLITS, self._shares, strict=True) if share
        )
        twice = sum(count for count in Counter(normalized(e.source) for e in examples).values() if count > 1)
        shared = f"; {twice} have the same source as another example, and are in the same part" if twice else ""
        logger.info(f"{self.config.train}: {len(examples)} examples, divided by data.split: {counts}{shared}")
        return parts


def require_fields(fields: Iterable[str], values: Iterable[Object], where: str, *, learned: bool = False) -> None:
    """Raises a UserError unless each field is in some record; stops reading when all are found.

    With `learned`, a model was trained with these fields, so messages do not suggest settings for other fields.
    """
    lacking, keys = list(fields), dict[str, None]()
    for value in values:
        keys |= dict.fromkeys(value)
        lacking = [field for field in lacking if field not in value]
        if not lacking:
            return
    if keys:
        guess = _misspelt(lacking[0], frozenset(keys))
        rename = f'rename the field that has this text to "{lacking[0]}"'
        hint = f'did you mean "{guess}"?' if guess else rename if learned else _other_key(lacking[0], keys)
        raise UserError(
            where,
            found=f'no "{lacking[0]}" in any record',
            expected="the field in some records",
            hint=join_hints(f"keys: {listed(keys)}", hint),
        )


def _other_key(field: str, keys: Iterable[str]) -> str:
    """Returns a hint for a message: the setting that selects other fields, with a value that works."""
    given = [key for key in keys if key not in ("id", "source", "targets")]
    if field == "source" and (names := [key for key in given if Template.can_name(key)]):
        return f'data.source_template makes the source of other fields, such as "{{{names[0]}}}"'
    if field == "targets" and given:
        return f"data.targets names another field, or several columns, such as {quoted(given[-1])}"
    return ""


@functools.lru_cache(maxsize=1024)  # the records of a file have few different sets of keys
def _misspelt(field: str, keys: frozenset[str]) -> str:
    wanted, folded = field.casefold(), {str(key).casefold(): str(key) for key in keys}
    close = difflib.get_close_matches(wanted, folded, n=1, cutoff=0.8) if len(folded) <= COMPARED else []
    other = [key for key in close if key == wanted or re.sub(r"\d", "", key) != re.sub(r"\d", "", wanted)]
    return folded[other[0]] if other else ""


def _found_cell(value: Object, field: str, place: str, known: Collection[str]) -> object:
    """Returns the value of a record's field; None if it is absent, null or blank."""
    if field not in value and (guess := _misspelt(field, frozenset(value.keys() - known))):
        raise UserError(place, found=f'no "{field}"', expected="one, or null", hint=f'did you mean "{guess}"?')
    found = value.get(field)
    return None if is_blank(found) else found


def _rows_reader(config: DataConfig, row_names: Sequence[str]) -> Callable[[Object, str], list[str]]:
    """Returns the function (record, place) -> target rows for the settings `data.targets` and `data.rows`."""
    if config.columns:
        return functools.partial(
            _named_rows, dict(zip(config.columns, row_names or names_of(config.columns), strict=True))
        )
    key = field_of(str(config.targets))
    if config.rows == "list":
        if config.task == "csv":
            raise UserError(
                "data.rows", found="'list'", expected="delimiter or sentences, because a CSV column contains text"
            )
        return functools.partial(_listed_rows, key)
    part = sentences if config.rows == "sentences" else lambda text: split_rows(text, config.delimiter)

    def rows(value: Object, place: str) -> list[str]:
        text = _found_cell(value, key, place, {key})
        return [] if text is None else part(check_text(text, key, place))

    return rows


def _listed_rows(key: str, value: Object, place: str) -> list[str]:
    """Returns the rows of a field that is a list of texts. The error for a text names the setting that splits it."""
    if isinstance(text := value.get(key), str):
        raise UserError(
            f'{place}: "{key}"',
            found=kind(text),
            expected="a list of texts",
            hint="data.rows=delimiter splits a text into rows at data.delimiter",
        )
    return texts_of(value, key, place, hint=_other_key(key, map(str, value)))


def _named_rows(names: Mapping[str, str], value: Object, place: str) -> list[str]:
    """Returns a row for each column: its name and the text of the cell, or the name alone for a blank cell."""
    if not any(column in value for column in names):
        value_of(value, next(iter(names)), place)  # the message lists the keys
    texts = {column: _text_of_cell(_found_cell(value, column, place, names), column, place) for column in names}
    return [f"{names[column].rstrip()} {text}" if text else names[column] for column, text in texts.items()]


def _text_of_cell(value: object, key: str, place: str) -> str:
    """Returns the text of a cell.

    Numbers are written as in JSON, whole ones without a decimal point; the items of a list are joined by commas.
    """
    if is_blank(value):
        return ""
    if isinstance(value, list | tuple):
        items = [_text_of_cell(item, f"{key}[{i}]", place) for i, item in enumerate(value)]
        if any(not item or "," in item for item in items):
            found = shown_value(list(value))
            raise UserError(f'{place}: "{key}"', found=found, expected="items that are not blank and have no comma")
        return ", ".join(items)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):  # pandas stores whole numbers as floats in a column with gaps
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    if isinstance(value, datetime.datetime) and value.time() == datetime.time() and value.tzinfo is None:
        return value.date().isoformat()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return check_text(str(value) if isinstance(value, int) else value, key, place).strip()


def _shares(config: DataConfig) -> tuple[float, ...]:
    """Returns the shares of train, dev and test in `data.split`.

    Raises:
      UserError: the shares are invalid, or another setting names a file for a split that has a share.
    """
    try:
        shares = tuple(map(float, config.split.split(",")))
    except ValueError:
        shares = ()
    shares += (0.0,) * (len(SPLITS) - len(shares)) if len(shares) > 1 else ()
    if len(shares) != len(SPLITS) or not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-6:
        raise UserError(
            "data.split",
            found=f"{config.split!r}",
            expected="the shares of train, dev and test, which sum to 1, such as 0.8,0.1,0.1",
        )
    for name, share in zip(SPLITS, shares, strict=True):
        if name != "train" and share and getattr(config, name):
            raise UserError(
                "data.split",
                found=f"{config.split!r} and a file as data.{name}",
                expected="one of them",
                hint="--set data.split= turns the splitting off",
            )
    return shares
