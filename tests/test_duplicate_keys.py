"""Duplicate keys of JSON objects are refused in every input, because JSON does not define which value counts."""

import json
import types
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipejax import config
from pipejax.apps.papers.texts import read_array
from pipejax.apps.schemas import row_schema
from pipejax.apps.scoring.metrics_command import read_documents
from pipejax.apps.serving.refusals import Refused
from pipejax.apps.serving.requests import parse_body
from pipejax.config import Config
from pipejax.convert.tensor_files import read_json
from pipejax.data.formats import read_records, rows_in
from pipejax.data.lines import BadLines
from pipejax.data.tokenizer import Tokenizer
from pipejax.system import strict_json
from pipejax.system.errors import UserError


def written(tmp_path: Path, text: str, name: str = "x.json") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def tokenizer_with(tmp_path: Path, text: str) -> Any:
    written(tmp_path, "{}", "tokenizer.json")
    return Tokenizer.load(str(written(tmp_path, text, "tokenizer_config.json").parent))


CONFIG = config.to_json(Config())
# By input: the function that reads it, the text of an object that has "a" twice, and the place in the message.
READERS: dict[str, tuple[Any, str, str]] = {
    "a data line": (lambda p, t: list(read_records(written(p, t, "x.jsonl"))), '\n{"a": 1, "a": 2}\n', "x.jsonl:2"),
    "within a field": (
        lambda p, t: list(read_records(written(p, t, "x.jsonl"))),
        '{"b": [{"c": 1}, {"a": 1, "c": 2, "a": 1}]}',
        "x.jsonl:1",
    ),
    "an array": (lambda p, t: list(read_array(t.encode(), "x")), '[{"b": 1},\n {"a": 1, "a": 1}]', "x:2: record 2"),
    "the config of a run": (
        lambda p, t: config.load(written(p, t)),
        CONFIG.replace('"grid": {', '"grid": {"a": 1, "a": 2,'),
        "x.json",
    ),
    "a schema": (
        lambda p, t: row_schema.read(str(written(p, t)), "x.json"),
        '{"properties": {"a": {"type": "string"}, "a": {"type": "null"}}}',
        "x.json",
    ),
    "a request": (lambda p, t: parse_body(t.encode()), '{"a": 1, "b": {}, "a": 1}', "body"),
    "a request with a byte-order mark": (lambda p, t: parse_body(t.encode()), '\ufeff{"a": 1, "a": 1}', "body"),
    "a Hugging Face directory": (lambda p, t: read_json(written(p, t)), '{"a": null, "a": null}', "x.json"),
    "the settings of a tokenizer": (tokenizer_with, '{"a": 1, "a": 2}', "tokenizer_config.json"),
    "predictions": (
        lambda p, t: read_documents(str(written(p, t)), "exact"),
        '{"gold": {"a": 1, "a": 2}, "pred": []}',
        "x.json:1",
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_duplicate_key_is_refused_with_its_place(name: str, tmp_path: Path) -> None:
    read, text, place = READERS[name]
    with pytest.raises((UserError, Refused)) as caught:
        read(tmp_path, text)
    line = str(caught.value)
    assert line.endswith(f'{place}: found the key "a" twice in one object; expected it once')
    assert len(line.splitlines()) == 1


def test_lines_with_duplicate_keys_are_bad_lines(tmp_path: Path) -> None:
    bad = BadLines("x.jsonl", skip=True)
    lines = '{"source": "a"}\n{"source": "a", "source": "b"}\n{"source": "c"}\n'
    found = list(read_records(written(tmp_path, lines, "x.jsonl"), bad=bad))
    assert [value for _, value in found] == [{"source": "a"}, {"source": "c"}] and bad.count == 1


def test_python_schema_with_keys_of_equal_spelling_is_refused() -> None:
    with pytest.raises(UserError, match='schema: found the key "1" twice'):
        row_schema.read({"properties": {1: {}, "1": {}}}, "schema")


def test_duplicate_column_is_refused(tmp_path: Path) -> None:
    table = pyarrow.table([["x"], ["y"]], names=["source", "source"])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    frame = types.SimpleNamespace(columns=["id", "source", "source"], to_dict=lambda orient: [{"source": "y"}])
    for read in (
        lambda: list(read_records(tmp_path / "x.parquet")),
        lambda: list(rows_in(table, "train")),
        lambda: list(rows_in(frame, "train")),
    ):
        with pytest.raises(UserError, match='found the column "source" twice; expected each name once'):
            read()


@pytest.mark.parametrize(
    "text", ["1", '"a"', "[]", "{}", '{"a": {"a": {"a": 1}}}', '[{"a": 1}, {"a": 2}]', '{"A": 1, "a": 2, "á": NaN}']
)
def test_other_texts_are_read_as_the_standard_library_does(text: str) -> None:
    for given in (text, text.encode(), text.encode("utf-16")):
        assert repr(strict_json.loads(given)) == repr(json.loads(text))


@pytest.mark.parametrize("text", ["", "{", '{"a": 1,}', "\ufeff1", b"\xff\xff", '{"a": 1} x'])
def test_other_errors_equal_standard_library(text: str | bytes) -> None:
    with pytest.raises(ValueError) as expected:
        json.loads(text)
    with pytest.raises(ValueError) as caught:
        strict_json.loads(text)
    assert (type(caught.value), str(caught.value)) == (type(expected.value), str(expected.value))


@pytest.mark.parametrize("key", ["\ud800", "a\nb", "k" * 10_000])
def test_duplicate_key_message_is_one_short_line(key: str) -> None:
    with pytest.raises(strict_json.DuplicateKey) as caught:
        strict_json.loads(f"{{{json.dumps(key)}: 1, {json.dumps(key)}: 1}}")
    assert len(str(caught.value).encode().splitlines()) == 1 and len(str(caught.value)) < 120
