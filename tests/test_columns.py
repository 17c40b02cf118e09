"""Columns as rows: `data.targets=vendor,date,amount,tags`, from a table through training to a table again."""

import csv
import datetime
import decimal
import json
import math
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, normalizers

import pipejax
from pipejax import config as config_lib
from pipejax.apps.serving.requests import apply_format
from pipejax.apps.statistics.data_command import main as data_command
from pipejax.config import Config, DataConfig, GridConfig
from pipejax.config.row_names import read_columns, split_row
from pipejax.convert import description
from pipejax.data import make_task
from pipejax.inference import answers
from pipejax.inference.generator import Generator
from pipejax.offline import evaluation, records
from pipejax.offline.records import decode_file
from pipejax.system.errors import UserError
from pipejax.training.loop import fit
from support import oracle, schemas
from support.tiny import IN_BLOCKS, RUN_ON_ONE, change

COLUMNS = ("vendor", "date", "amount", "tags")
NAMES = tuple(f"{column}:" for column in COLUMNS)
ROWS = [
    ["1", "an invoice of Acme", "Acme", "2024-05-03", "12.50", "red, ab"],
    ["2", "an invoice of Bo, Inc.", "Bo, Inc.", "", "7", ""],
    ["3", "a letter", "", "", "", ""],
]
TABLE: dict[str, Any] = {"task": "csv", "source_template": "{text}", "targets": "vendor,date,amount,tags"}


def write(path: Path, rows: Any = ROWS, names: Any = ("id", "text", *COLUMNS)) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path


def tokenizer_in(directory: Path) -> Path:
    directory.mkdir()
    schemas.save(directory)
    return directory


def targets(records: Any, **settings: Any) -> list[tuple[str, ...]]:
    """The rows of records in memory."""
    task: Any = make_task(DataConfig(**{**TABLE, "task": "jsonl", **settings}))
    return [e.targets for e in task.examples_of((f"x:{i}", value) for i, value in enumerate(records, 1))]


# Which columns.


@pytest.mark.parametrize(
    "given, expected",
    [
        *[("a", "a"), ("a,b", ("a", "b")), (" a , b ", ("a", "b")), ('a, "b, c"', ("a", "b, c")), ("", "")],
        *[(["a"], ("a",)), (["a, b", "c"], ("a, b", "c")), (("a", "b"), ("a", "b")), ('"a, b"', '"a, b"')],
        *[("a:b", "a:b"), (np.asarray(["a", "b"]), ("a", "b")), ('say "x"', 'say "x"')],
    ],
)
def test_columns_are_separated_by_commas_or_listed(given: Any, expected: Any) -> None:
    """Names with commas are quoted or in a list, also after a config is written and read again."""
    config = Config(data=DataConfig(targets=given))
    assert config.data.targets == expected
    assert config_lib.from_json(config_lib.to_json(config), where="x") == config
    plain = given.tolist() if isinstance(given, np.ndarray) else given
    assert config_lib.override(Config(), {"data.targets": given}).data.targets == expected
    if expected:
        text = plain if isinstance(plain, str) else json.dumps(plain)
        assert config_lib.override(Config(), [f"data.targets={text}"]).data.targets == expected


def test_the_grid_is_named_by_columns_unless_it_has_names() -> None:
    found = config_lib.override(Config(), ["data.targets=vendor,date"])
    assert found.grid.row_names == ("vendor:", "date:")
    assert config_lib.override(found, ["grid.delay=0"]) == change(found, grid={"delay": 0})
    own = config_lib.override(Config(), ["data.targets=vendor,date", 'grid.row_names=["V =", "D ="]'])
    assert own.grid.row_names == ("V =", "D =")
    task: Any = make_task(change(own, data={"source_template": "{text}"}).data, own.grid.row_names)
    (example,) = task.examples_of([("x:1", {"text": "x", "vendor": "a", "date": None})])
    assert example.targets == ("V = a", "D =")


def test_config_of_earlier_run_keeps_name_with_comma() -> None:
    values = json.loads(config_lib.to_json(Config()))
    values["data"]["targets"] = "last, first"
    config = config_lib.from_json(json.dumps(values), where="x")
    assert config.data.columns == () and config.grid.row_names == ()
    assert config_lib.override(config, {}) == config  # like opening a run
    assert targets([{"text": "x", "last, first": ["a"]}], targets=config.data.targets) == [("a",)]


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["data.targets=a,,b"], r"data\.targets: found an empty name in \['a', '', 'b'\]"),
        (["data.targets=a,b,a"], r"data\.targets: found \['a', 'b', 'a'\]"),
        (["data.targets=id,b"], r"data\.targets: found \['id', 'b'\]"),
        (["data.targets=a,b", "data.rows=delimiter"], r"data\.rows: found delimiter with several columns as data"),
        (
            ["data.targets=a,b", 'grid.row_names=["a:"]'],
            r"grid\.row_names: found 1 with 2 columns",
        ),
        (
            ["data.targets=a,b", 'grid.row_names=["b:", "a:"]'],
            r"grid\.row_names: found another order than data\.targets",
        ),
        (["data.targets=a,b,c", "grid.sub_max=2"], r"grid\.row_names: found 3; expected at most grid\.sub_max = 2"),
    ],
)
def test_columns_that_contradict_other_settings_are_refused(overrides: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        config_lib.override(Config(), overrides)


# Cells.


def test_cells_become_rows_and_blank_cells_become_names_alone(tmp_path: Path) -> None:
    expected = [
        ("vendor: Acme", "date: 2024-05-03", "amount: 12.50", "tags: red, ab"),
        ("vendor: Bo, Inc.", "date:", "amount: 7", "tags:"),
        NAMES,
    ]
    task = make_task(DataConfig(**{**TABLE, "train": str(write(tmp_path / "a.csv"))}))
    assert [e.targets for e in task.examples("train")] == expected
    records = [dict(zip(("id", "text", *COLUMNS), row, strict=True)) for row in ROWS]
    assert targets(records) == expected


@pytest.mark.parametrize(
    "cell, text",
    [
        *[(12.5, "12.5"), (7.0, "7"), (7, "7"), (True, "true"), (None, ""), (math.nan, ""), (" ", ""), ([], "")],
        *[(["red", "ab"], "red, ab"), ([1, 2.5], "1, 2.5"), ("red|ab", "red|ab"), (1e300, "1e+300")],
        *[(datetime.date(2024, 5, 3), "2024-05-03"), (datetime.datetime(2024, 5, 3), "2024-05-03")],
        *[(datetime.datetime(2024, 5, 3, 7), "2024-05-03T07:00:00"), (decimal.Decimal("1.50"), "1.50"), (" x ", "x")],
        (decimal.Decimal("NaN"), ""),
    ],
)
def test_cells_of_other_types_are_written_as_text(cell: object, text: str) -> None:
    (rows,) = targets([{"text": "x", "vendor": cell, "date": "d", "amount": None, "tags": None}])
    assert rows[0] == f"vendor: {text}".strip()


@pytest.mark.parametrize(
    "record, line",
    [
        ({"tags": ["a, b"]}, r"x:1: \"tags\": found \['a, b'\]"),
        ({"tags": ["a", None]}, r"x:1: \"tags\": found \['a', None\]; expected items that are not blank"),
        ({"vendor": {"name": "a"}}, r"x:1: \"vendor\": found an object; expected text"),
        ({"vendors": "a", "date": "b"}, r'x:1: found no "vendor"; expected one, or null \(did you mean "vendors"\?\)'),
        ({"other": "a"}, r'x:1: found no "vendor"; expected one \(keys: text, other\)'),
        ({"vendor": "a", "date": "b", "amount": 1}, r'data\.train: found no "tags" in any record'),
    ],
)
def test_record_without_columns_is_refused(record: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        targets([{"text": "x", **record}])


# From a table to a table.


@pytest.fixture(scope="module", params=["pipelined", "sequential"])
def run(request: Any, tmp_path_factory: pytest.TempPathFactory, compiled_once: None) -> Path:
    """A run on a table, with either decoder."""
    directory = tmp_path_factory.mktemp("columns")
    table, tokenizer = write(directory / "a.csv"), tokenizer_in(directory / "tokenizer")
    config = change(
        RUN_ON_ONE,
        model={"vocab_size": len(schemas.PIECES)},
        grid={"delay": 1, "time_max": 24},
        data={**TABLE, "train": str(table), "dev": str(table), "tokenizer": str(tokenizer)},
        train={"steps": 2, "batch_size": 2, "evaluate_every": 2, "method": request.param},
    )
    assert fit(config_lib.override(config, {}), directory / "run") == 0
    return directory / "run"


@pytest.mark.slow
def test_table_is_decoded_into_a_table(run: Path, tmp_path: Path) -> None:
    """The table has the columns of the training data, also from Parquet; JSON lines have all other fields, too."""
    import pyarrow.parquet

    t5 = pipejax.load(run)
    assert t5.config.grid.row_names == NAMES and t5.config.data.columns == COLUMNS
    source = write(tmp_path / "in.csv", [row[:2] for row in ROWS], ("id", "text"))
    for name in ("out.csv", "out.parquet", "out.jsonl"):
        decode_file(t5, str(source), str(tmp_path / name), method=None, batch_size=None)
    with (tmp_path / "out.csv").open(newline="") as file:
        names, *rows = csv.reader(file)
    assert names == ["id", *COLUMNS, "truncated"] and [row[0] for row in rows] == ["1", "2", "3"]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, line in zip(rows, lines, strict=True):
        assert [*line["columns"]] == [*COLUMNS]
        assert row[1:5] == [text or "" for text in line["columns"].values()]
        found = {name: text for part in line["rows"] if (parts := split_row(part, NAMES)) for name, text in [parts]}
        assert {f"{key}:": text for key, text in line["columns"].items() if text is not None} == found
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [[*row.values()][1:5] for row in table] == [[*line["columns"].values()] for line in lines]


@pytest.mark.parametrize(
    "rows, expected",
    [
        (["vendor: Acme", "date:", "amount: 7", "tags: a, b"], ["Acme", "", "7", "a, b"]),
        (["tags: x", "vendor: y"], ["y", None, None, "x"]),  # in any order, as in sequential answers
        (["vendor: a", "vendor: b", "other"], ["a", None, None, None]),
        (["vendors: a", "date : 3"], [None, "3", None, None]),
        ([], [None] * 4),
    ],
)
def test_a_column_is_the_text_after_its_name(rows: list[str], expected: list[str | None]) -> None:
    made = generator()
    assert made.tokenizer is not None
    assert answers._columns_in(rows, made.config, made.tokenizer) == dict(zip(COLUMNS, expected, strict=True))


def test_name_changed_by_tokenizer_is_found_in_decoded_row() -> None:
    tokenizer = schemas.tokenizer(normalizers.Replace("ß", "ss"))
    config = config_lib.override(Config(), ["data.targets=ma\u00df,b"])
    assert config.grid.row_names == ("maß:", "b:")
    assert answers._columns_in(["mass: 3", "b: x"], config, tokenizer) == {"maß": "3", "b": "x"}


@pytest.mark.parametrize("names", ["\u732b,\u72ac", "a\u732b,a"])
def test_columns_with_indistinguishable_names_follow_row_order(names: str) -> None:
    config = config_lib.override(Config(), [f"data.targets={names}"])
    tokenizer = schemas.tokenizer(normalizers.Replace("\u732b", ""))
    if names == "\u732b,\u72ac":
        tokenizer = schemas.tokenizer(normalizers.Replace(Regex("\u732b|\u72ac|:"), ""))
    first, second = names.split(",")
    assert answers._columns_in(["x", "y"], config, tokenizer) == {first: "x", second: "y"}
    assert answers._columns_in(["x"], config, tokenizer) == {first: None, second: None}


@pytest.mark.parametrize("name", ["steps", "text", "truncated", "sample", "columns"])
def test_a_column_may_have_the_name_of_a_field_of_records(name: str, tmp_path: Path) -> None:
    """In a table the name is the column; JSON lines have both."""
    import pyarrow.parquet

    record = {"id": 1, "text": "t", "rows": [], "columns": {name: "x", "b": None}, "steps": 3, "truncated": "time_max"}
    for target in ("out.csv", "out.parquet"):
        lines = tmp_path / "lines"
        lines.write_text(json.dumps(record) + "\n")
        records.write_table(lines, str(tmp_path / target))
    beside = {} if name == "truncated" else {"truncated": "time_max"}
    expected = {"id": 1, name: "x", "b": None, **beside}
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist() == [expected]
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [*csv.DictReader(file)] == [{key: "" if x is None else str(x) for key, x in expected.items()}]


def test_each_column_has_a_score(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--checkpoint", str(run), "--split", "test", "--json", str(out), "--batch-size", "3"]
    assert evaluation.main([*flags, "--set", f"data.test={write(tmp_path / 'test.csv')}"]) == 0
    assert [*json.loads(out.read_text())["by_column"]] == [*COLUMNS]


def answered(*rows: str, **data: Any) -> tuple[Any, Any]:
    config = config_lib.override(Config(data=DataConfig(**{**TABLE, **data})), {})
    return types.SimpleNamespace(config=config), {"rows": [*rows], "text": ""}


def test_score_of_a_column_is_the_share_of_correct_cells() -> None:
    generator, first = answered("vendor: Acme", "date:", "amount: 12.5", "tags: red")
    _, second = answered("vendor: Bo", "amount: 7.0")
    examples: Any = [
        types.SimpleNamespace(targets=("vendor: Acme", "date: 2024", "amount: 12.50", "tags: red")),
        types.SimpleNamespace(targets=("vendor: Bo", "date:", "amount: 7", "tags:")),
    ]
    found = evaluation.by_column(generator, examples, [first, second])
    assert found == {"vendor": 100, "date": 0, "amount": 100, "tags": 50}


def test_a_column_whose_name_begins_another_name_has_its_own_cells() -> None:
    columns = {"targets": ("total", "total - net", "price", "price max")}
    generator, record = answered("total: 1", "total - net: 6", "price: 2", "price max: 3", **columns)
    gold: Any = [types.SimpleNamespace(targets=("total: 1", "total - net: 5", "price: 2", "price max: 4"))]
    found = evaluation.by_column(generator, gold, [record])
    assert found == {"total": 100, "total - net": 0, "price": 100, "price max": 0}


def generator(**data: Any) -> Generator:
    tokenizer = schemas.tokenizer()
    config = Config(model=IN_BLOCKS, data=DataConfig(**{**TABLE, **data}), grid=GridConfig(delay=0, time_max=40))
    made = change(config, model={"vocab_size": len(schemas.PIECES)}, train={"method": "pipelined"})
    made = config_lib.override(made, {})
    return Generator(made, oracle.random_params(made.model, np.random.default_rng(0)), tokenizer)


@pytest.mark.parametrize("names, row_names", [(COLUMNS, NAMES), (COLUMNS[:2], ("V =", "D =")), (("a -", "b"), ())])
def test_the_schema_of_a_json_object_has_the_columns(names: Any, row_names: Any, monkeypatch: Any) -> None:
    """`response_format` of the server uses it; each property is the trained row of its column."""
    made = generator(targets=names)
    if row_names:
        made.config = change(made.config, grid={"row_names": row_names})
    given: dict[str, Any] = {"response_format": {"type": "json_object"}}
    under = apply_format(given, made, "pipelined", lambda schema, generator, name: generator.under(schema, name))
    assert under.answer_format is not None and under.answer_format.names == tuple(names)
    tokenizer = schemas.tokenizer()
    expected = row_names or tuple(f"{name}:" for name in names)
    assert [row.beginning for row in under.answer_format.rows] == [tuple(tokenizer.encode(name)) for name in expected]
    own = made.under({"type": "object", "properties": {name: {"type": "null"} for name in reversed(names)}})
    assert own.answer_format is not None and [row.name for row in own.answer_format.rows] == [*names]


@pytest.mark.slow
def test_records_in_memory_train_as_their_table_does(tmp_path: Path, compiled_once: None) -> None:
    """The records are a list, or a data frame with cells as pandas reads them from the table."""
    tokenizer = tokenizer_in(tmp_path / "tokenizer")
    settings: dict[str, Any] = {
        "model": None,
        "grid": {"time_max": 24, "sub_max": 4},
        "data": {"source_template": "{text}", "targets": [*COLUMNS], "tokenizer": str(tokenizer)},
        "train": {"steps": 1, "batch_size": 2},
    }
    config = change(RUN_ON_ONE, model={"vocab_size": len(schemas.PIECES)}, train=settings["train"])
    rows = [dict(zip(("id", "text", *COLUMNS), row, strict=True)) for row in ROWS[:2]]
    rows[1]["date"], rows[1]["amount"] = math.nan, 7.0  # type: ignore[assignment]
    frame = types.SimpleNamespace(columns=[*rows[0]], to_dict=lambda orient: rows)
    values = {"data": settings["data"], "grid": settings["grid"], "data.task": "jsonl"}
    found = []
    for name, train in (("file", write(tmp_path / "a.csv", ROWS[:2])), ("list", rows), ("frame", frame)):
        done = pipejax.fit(config, tmp_path / name, train=train, overrides=values)
        found.append([json.loads(line)["params_fp"] for line in (done / "metrics.jsonl").read_text().splitlines()[-1:]])
        assert pipejax.load(done).config.grid.row_names == NAMES
    assert found[0] == found[1] == found[2]


def test_statistics_count_the_rows_of_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag leaves bad lines out."""
    table = write(tmp_path / "a.csv", [*ROWS, ["4", "x"]])
    flags = [f"--set=data.{key}={value}" for key, value in {**TABLE, "train": str(table)}.items() if key != "task"]
    with pytest.raises(UserError, match=r"a\.csv:5: found 2 columns; expected 6"):
        data_command(["stats", "csv", *flags])
    assert data_command(["stats", "csv", *flags, "--skip-bad", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["splits"]["train"]
    assert (found["examples"], found["rows_per_target"]) == (3, 4)


def test_a_name_that_is_quoted_is_one_column() -> None:
    assert read_columns('"a, b"') == '"a, b"'
    assert targets([{"text": "x", "a, b": "c;d"}], targets='"a, b"', rows="delimiter", delimiter=";") == [("c", "d")]


def test_converted_model_keeps_its_columns() -> None:
    """`to-hf` writes the columns with the weights, and `from-hf` reads them."""
    config = generator().config
    found = config_lib.from_json(config_lib.to_json(description.kept(config)), where="x")
    assert (found.data.columns, found.grid.row_names) == (COLUMNS, NAMES)


def test_stream_of_a_table_has_its_columns(tmp_path: Path) -> None:
    data = DataConfig(**{**TABLE, "train": str(write(tmp_path / "a.csv")), "stream": 2})
    task: Any = make_task(data)
    first, second = (batch for batch in task.stream().read([data.train]))
    assert [e.targets[0] for e in (*first, *second)] == ["vendor: Acme", "vendor: Bo, Inc.", "vendor:"]
