"""The interface from Python: settings of a call, overrides as values, tables in memory, training, and its refusals."""

import dataclasses
import datetime
import math
import signal
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import pipejax
from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.apps import demo
from pipejax.config import Config, DecodeConfig, GridConfig
from pipejax.data.formats import read_records, rows_in
from pipejax.inference import programs, settings
from pipejax.system.errors import UserError
from pipejax.training import loop
from support import oracle
from support.refusals import refuses
from support.tiny import MODEL, RUN_ON_ONE, change, metrics

pytestmark = pytest.mark.usefixtures("compiled_once")
TEXTS = [example.source for example in demo.examples("test")[:3]]
CONFIG = change(
    RUN_ON_ONE,
    grid={"delay": 1},
    data={"task": "jsonl"},
    train={"steps": 2, "evaluate_every": 2, "evaluate_examples": 3, "checkpoint_every": 2},
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: Path) -> Path:
    """A run with random weights."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    params = oracle.random_params(MODEL, np.random.default_rng(11))
    checkpoint.save_params(directory, CONFIG, params, tokenizer_source=tokenizer_files)
    return directory


@pytest.fixture(scope="module")
def t5(run: Path) -> pipejax.Generator:
    return pipejax.load(run)


# Settings of a call.


@pytest.mark.parametrize(
    "method, values",
    [
        ("pipelined", {"temperature": 0.7, "seed": 3, "batch_size": 2}),
        pytest.param("pipelined", {"sub_max": 2, "time_max": 5, "scores": True}, marks=pytest.mark.slow),
        ("pipelined", {"row_names": ["one", "two"], "delay": 2}),
        pytest.param("sequential", {"max_length": 5, "limit": "source"}, marks=pytest.mark.slow),
        ("sequential", {"temperature": 1, "top_k": np.int64(3), "min_p": 0.2, "samples": 2, "max_length": 6}),
        pytest.param(
            "sequential", {"beams": 2, "length_penalty": np.float32(0.5), "max_length": 6}, marks=pytest.mark.slow
        ),
    ],
)
def test_call_with_settings_equals_a_checkpoint_opened_with_them(
    run: Path, t5: pipejax.Generator, method: str, values: dict[str, Any]
) -> None:
    before = t5.decode(TEXTS, method=method, max_length=8)
    opened = pipejax.load(run, overrides={settings.NAMES[name]: value for name, value in values.items()})
    found = t5.decode(TEXTS, method=method, **values)
    assert found == opened.decode(TEXTS, method=method) != before
    assert t5.decode(TEXTS, method=method, max_length=8) == before, "it is for that call alone"
    assert t5.config == CONFIG


def test_a_call_lays_out_no_weights_and_compiles_nothing_that_does_not_change(
    t5: pipejax.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    t5.warm_up([64], batch_sizes=(2,), temperature=0.5, scores=True)
    known = dict(t5.programs._compiled)
    monkeypatch.setattr(programs.Programs, "set_params", None)
    monkeypatch.setattr(programs, "decode_batch", None)  # any further compilation fails
    monkeypatch.setattr(programs, "encode_batch", None)
    ids = [[5] * 50, [6] * 64]
    drawn = [t5.decode(ids, temperature=x, seed=seed, scores=True) for x, seed in ((0.5, 0), (9.0, 0), (9.0, 1))]
    assert drawn[0] != drawn[1] != drawn[2] and t5.programs._compiled == known
    monkeypatch.undo()
    t5.decode(ids, time_max=6)
    assert len(t5.programs._compiled) > len(known)


def test_the_default_method_is_chosen_by_name(
    run: Path, t5: pipejax.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = pipejax.load(run, method="sequential")
    assert (t5.default_method, other.default_method) == ("pipelined", "sequential")
    assert other.decode(TEXTS) == t5.decode(TEXTS, method="sequential") != t5.decode(TEXTS)
    assert other.decode(TEXTS, method="pipelined") == t5.decode(TEXTS)
    with refuses("method", "'seqential'", "(did you mean sequential?)"):
        pipejax.load(run, method="seqential")
    trained = list[str]()

    def fit(config: Config, *_: object, **__: object) -> int:
        trained.append(config.train.method)
        return 0

    monkeypatch.setattr(loop, "fit", fit)
    for method in ("sequential", None):
        pipejax.fit(CONFIG, tmp_path, train=records(3), method=method)
    assert trained == ["sequential", "pipelined"]


@pytest.mark.slow
def test_settings_of_a_stream_apply_to_that_stream_only(t5: pipejax.Generator) -> None:
    plain = list(t5.stream_rows(TEXTS[0]))
    for values in ({"temperature": 2.0, "seed": 5}, {"sub_max": 1}, {"row_names": ("x",)}):
        found = list(t5.stream_rows(TEXTS[0], **values))
        assert found[-1] == t5.decode(TEXTS[:1], **values)[0] != plain[-1]
    *_, scored = t5.stream_rows(TEXTS[0], scores=True)
    assert isinstance(scored, dict) and np.isfinite(scored["log_prob"])
    assert list(t5.stream_rows(TEXTS[0])) == plain


@pytest.mark.parametrize(
    "call, values, place, texts",
    [
        ("decode", {"temprature": 1}, "decode()", ["'temprature'", "(did you mean temperature?)"]),
        ("decode", {"grid_delay": 1}, "decode()", ["'grid_delay'", "decode or grid"]),
        ("decode", {"max_source": 9}, "decode()", ["'max_source'", "decode or grid"]),
        ("decode", {"temperature": -1}, "decode(): decode.temperature", ["-1", "0.0"]),
        ("decode", {"temperature": "0.7"}, "decode.temperature", ["'0.7'", "a number"]),
        ("decode", {"temperature": math.nan}, "decode.temperature", ["nan", "a number"]),
        ("decode", {"scores": 1}, "decode.scores", ["1", "true or false"]),
        ("decode", {"batch_size": 0}, "decode.batch_size", ["0", "at least 1"]),
        ("decode", {"batch_size": 2.0}, "decode.batch_size", ["2.0", "a whole number"]),
        ("decode", {"limit": "sauce"}, "decode.limit", ["'sauce'", "none, source (did you mean source?)"]),
        ("decode", {"delay": 10**9}, "grid.delay", ["1000000000", "32768"]),
        ("decode", {"row_names": "date:"}, "grid.row_names", ["'date:'", "a list of texts"]),
        ("decode", {"samples": 2}, "decode.samples", ["2", "decode.temperature = 0"]),
        ("decode", {"weights": "int8"}, "decode(): weights", ["'int8'", "\"decode.weights\": 'int8'"]),
        ("decode", {"dtype": "bfloat16"}, "decode(): dtype", ["'bfloat16'", '"decode.dtype"']),
        ("decode", {"draft_checkpoint": "x"}, "decode(): draft_checkpoint", ["'x'", '"decode.draft_checkpoint"']),
        ("decode", {"draft": "model"}, "decode(): draft", ["'model'", '"decode.draft_checkpoint": DIRECTORY']),
        ("decode", {"method": "seqential"}, "method", ["'seqential'", "(did you mean sequential?)"]),
        ("stream_rows", {"batch_size": 4}, "stream_rows(): batch_size", ["4"]),
        ("stream_rows", {"samples": 4}, "stream_rows(): samples", ["4"]),
        ("stream_rows", {"top_p": 0}, "stream_rows(): decode.top_p", ["0", "more than 0"]),
        ("warm_up", {"batch_size": 4}, "warm_up(): batch_size", ["4", "batch_sizes"]),
        ("warm_up", {"time_max": 0}, "warm_up(): grid.time_max", ["0", "at least 1"]),
    ],
)
def test_refused_settings_have_pythons_names(
    t5: pipejax.Generator, call: str, values: dict[str, Any], place: str, texts: list[str]
) -> None:
    given = {"decode": TEXTS, "stream_rows": TEXTS[0], "warm_up": [16]}[call]
    with refuses(place, *texts) as refused:
        getattr(t5, call)(given, **values)
    assert "--" not in str(refused.value)


def test_each_setting_has_one_plain_name() -> None:
    assert len(settings.NAMES) == len(dataclasses.fields(GridConfig)) + len(dataclasses.fields(DecodeConfig))
    assert {*settings.WITH_WEIGHTS} < {*settings.NAMES}


def test_changed_grid_is_logged_once(t5: pipejax.Generator, caplog: pytest.LogCaptureFixture) -> None:
    for delay in (3, 3, 1):
        t5.decode(TEXTS[:1], delay=delay)
    assert [r.getMessage()[:20] for r in caplog.records] == ["grid.delay: found 3,"]


# Overrides.


def test_overrides_are_texts_or_values(run: Path) -> None:
    written = pipejax.load(run, overrides=["grid.delay=2", "decode.temperature=0.5", 'grid.row_names=["a"]']).config
    for values in (
        {"grid.delay": 2, "decode.temperature": 0.5, "grid.row_names": ["a"]},
        {"grid": {"delay": 2, "row_names": ("a",)}, "decode": {"temperature": 0.5}},
        {"grid.delay": np.int32(2), "decode.temperature": np.float32(0.5), "grid.row_names": np.asarray(["a"])},
    ):
        assert pipejax.load(run, overrides=values).config == written
    assert config_lib.override(Config(), {"data.train": Path("a") / "b"}).data.train == "a/b"


@pytest.mark.parametrize(
    "overrides, place, texts",
    [
        ("grid.delay=2", "overrides", ["'grid.delay=2'", '"key=value"']),
        (3, "overrides", ["3", "a dict"]),
        (["grid.delay", 2], "overrides grid.delay", ["'='"]),
        ([("grid.delay", 2)], "overrides", ["('grid.delay', 2)", '"key=value"']),
        (["grid.delay=x"], "grid.delay", ["'x'", "a whole number"]),
        ({"grid.delay": "2"}, "overrides: grid.delay", ["'2'", "a whole number"]),
        ({"grid.delay": None}, "overrides: grid.delay", ["None", "a whole number"]),
        ({"grid.delay": True}, "overrides: grid.delay", ["True", "a whole number"]),
        ({"grid.delay": [*range(99)]}, "overrides: grid.delay", ["[0, 1, ", "...", "a whole number"]),
        ({1: 2}, "overrides", ["the key 1", '"grid.delay"']),
        ({"grid.dely": 2}, "grid.dely", ["(did you mean grid.delay?)"]),
        ({"grid": 2}, "grid", ["grid.delay"]),
        ({"train": {"steps": 3}}, "overrides", ["train.steps"]),
        ({"decode.beams": 99}, "overrides: decode.beams", ["99", "model.vocab_size"]),
    ],
)
def test_invalid_overrides_are_refused(run: Path, overrides: Any, place: str, texts: list[str]) -> None:
    with refuses(place, *texts) as refused:
        pipejax.load(run, overrides=overrides)
    assert "--set" not in str(refused.value)


# Public names.


def test_dir_and_repr_show_the_public_names(run: Path, t5: pipejax.Generator) -> None:
    names = {name for name in dir(pipejax) if not name.startswith("_")}
    assert (
        names
        == {*pipejax.__all__}
        == {"Backbone", "Config", "Generator", "Method", "Record", "RowEvent", "UserError", "fit", "load", "testing"}
    )
    assert all(getattr(pipejax, name) for name in names)
    size = sum(x.size for x in _leaves(oracle.random_params(MODEL, np.random.default_rng(0))))
    assert repr(t5) == (
        f"<Generator of {run} at step 0: T5 of {size / 1e6:.1f} M parameters, 1 + 1 layers, vocabulary 64; "
        "pipelined; float32 on 1 x cpu>"
    )
    assert "int8 on" in repr(pipejax.load(run, overrides={"decode.weights": "int8"}))


def _leaves(tree: Any) -> list[Any]:
    return [x for value in tree.values() for x in _leaves(value)] if isinstance(tree, dict) else [tree]


# Tables in memory.


class Pandas:
    """The required part of a pandas DataFrame."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.columns = rows, list(rows[0])

    def to_dict(self, orient: str = "dict") -> Any:
        assert orient == "records", "else columns come"
        return self.rows


class Polars(Pandas):
    """The required part of a Polars DataFrame; its `to_dict` returns columns."""

    def to_dict(self, orient: str = "columns") -> Any:
        raise AssertionError

    def iter_rows(self, *, named: bool = False) -> Any:
        return iter(self.rows) if named else (tuple(row.values()) for row in self.rows)


class Datasets:
    """The required part of a datasets.Dataset with a format."""

    column_names = ("source", "targets")

    def __init__(self, rows: list[dict[str, Any]], form: str | None = "numpy") -> None:
        self.rows, self.form = rows, form

    def with_format(self, form: str | None) -> "Datasets":
        return Datasets(self.rows, form)

    def __iter__(self) -> Any:
        return (row if self.form is None else {key: np.asarray(x) for key, x in row.items()} for row in self.rows)


TABLES: dict[str, Any] = {
    "pandas": Pandas,
    "polars": Polars,
    "arrow": pyarrow.Table.from_pylist,
    "datasets": Datasets,
    "a list": list,
    "a generator": iter,
    "tuples and mappings": lambda rows: tuple(map(types.MappingProxyType, rows)),
}


@pytest.mark.parametrize("kind", TABLES)
def test_table_in_memory_is_decoded(t5: pipejax.Generator, kind: str) -> None:
    rows = [{"source": text, "id": f"n{i}"} for i, text in enumerate(TEXTS)]
    assert t5.decode(TABLES[kind](rows)) == t5.decode(rows)


PRICES = (19.99, 0.1, 3.0, 1e-7)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "structs", "scalars", "arrays"])
def test_float32_cells_have_their_shortest_decimal_text(kind: str, tmp_path: Path) -> None:
    column: Any = pyarrow.array(PRICES, pyarrow.float32())
    lists: Any = pyarrow.array([[x, None] for x in PRICES], pyarrow.list_(pyarrow.float32()))
    table: Any = pyarrow.table({"price": column, "all": lists, "whole": pyarrow.array(PRICES)})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
        rows = [row for _, row in read_records(tmp_path / "x.parquet")]
    elif kind == "arrow":
        rows = list(rows_in(table, "sources"))
    elif kind == "structs":
        rows = list(rows_in(table.to_struct_array(), "sources"))
    elif kind == "scalars":
        given = [{"price": np.float32(x), "all": [np.float32(x), None], "whole": x} for x in PRICES]
        rows = list(rows_in(given, "sources"))
    else:
        given = [{"price": np.float32(x), "all": np.asarray([x, np.nan], np.float32), "whole": x} for x in PRICES]
        rows = list(rows_in(given, "sources"))
    assert rows == [{"price": x, "all": [x, None], "whole": x} for x in PRICES]


WIDE = [float(np.float32(x)) for x in PRICES]  # 19.989999771118164, ...
FLOAT32 = pyarrow.float32()


@pytest.mark.parametrize(
    "of_lists", [pyarrow.large_list(FLOAT32), pyarrow.list_(FLOAT32, 2), pyarrow.list_view(FLOAT32)], ids=str
)
def test_float32_numbers_in_all_lists_of_arrow_have_their_shortest_decimal_text(of_lists: Any, tmp_path: Path) -> None:
    """Polars writes large lists to Parquet; numbers of other types are unchanged."""
    lists: Any = pyarrow.array([[x, None] for x in PRICES], of_lists)
    structs: Any = pyarrow.array([{"x": one} for one in lists.to_pylist()], pyarrow.struct({"x": of_lists}))
    table: Any = pyarrow.table({"all": lists, "inner": structs, "whole": pyarrow.array(WIDE)})
    expected = [{"all": [x, None], "inner": {"x": [x, None]}, "whole": y} for x, y in zip(PRICES, WIDE, strict=True)]
    assert list(rows_in(table, "sources")) == expected
    if "view" not in str(of_lists):  # Parquet has no views
        pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
        assert [row for _, row in read_records(tmp_path / "x.parquet")] == expected


@pytest.mark.parametrize(
    ("kind", "where", "types"),
    [
        ("polars", "dtypes", ("Float32", "List(Float32)", "Float64")),
        ("pandas", "dtypes", ("float[pyarrow]", "list<item: float>[pyarrow]", "double[pyarrow]")),
        ("datasets", "features", ("Value('float32')", "List(Value('float32'))", "Value('float64')")),
    ],
)
def test_float32_numbers_that_a_table_widens_have_their_shortest_decimal_text(
    kind: str, where: str, types: tuple[str, ...]
) -> None:
    """These libraries return float32 numbers as Python's floats."""
    table = TABLES[kind]([{"price": x, "all": [x, None], "whole": x} for x in WIDE])
    setattr(table, where, [*types] if kind == "polars" else dict(zip(("price", "all", "whole"), types, strict=True)))
    if kind == "datasets":
        table.form = None
    expected = [{"price": x, "all": [x, None], "whole": y} for x, y in zip(PRICES, WIDE, strict=True)]
    assert list(rows_in(table, "sources")) == expected


@pytest.mark.parametrize("unit", ["s", "us", "ns"])
def test_numpy_dates_of_every_unit_are_dates_of_python(unit: str) -> None:
    """pandas reads lists of timestamps as arrays of nanoseconds, which NumPy returns as integers."""
    first, second = datetime.datetime(1999, 1, 2), datetime.datetime(2001, 3, 4, 5, 6, 7)
    days = np.asarray([first, second, None], f"datetime64[{unit}]")
    span = np.timedelta64(3, "s").astype(f"timedelta64[{unit}]")
    rows = list(rows_in(Pandas([{"days": days, "day": days[1], "none": days[2], "span": span}]), "train"))
    assert rows == [{"days": [first, second, None], "day": second, "none": None, "span": datetime.timedelta(seconds=3)}]


def test_cells_equal_values_of_json() -> None:
    missing = type("NAType", (), {})()
    row: dict[Any, Any] = {
        "a": math.nan,
        1: missing,
        "b": np.asarray(["x", "y"]),
        "c": np.int64(3),
        "d": ("z", math.nan),
    }
    assert list(rows_in(Pandas([row]), "train")) == [{"a": None, "1": None, "b": ["x", "y"], "c": 3, "d": ["z", None]}]


@pytest.mark.parametrize("given", [{"source": ["a"]}, "a text", b"a", 7, types.SimpleNamespace(columns=["a"])])
def test_value_that_is_no_table_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match=r"train: found .*; expected a list, a data frame or another table"):
        list(rows_in(given, "train"))


# Training.


def records(count: int, first: int = 0) -> list[dict[str, Any]]:
    found = demo.examples("train")
    return [{"source": found[i].source, "targets": list(found[i].targets)} for i in range(first, first + count)]


def fingerprints(workdir: Path) -> list[Any]:
    return [line["params_fp"] for line in metrics(workdir) if line["event"] != "train"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: Path) -> tuple[dict[str, Any], list[Any]]:
    """The arguments of a training on files, without the examples, and its fingerprints."""
    import json

    here = tmp_path_factory.mktemp("files")
    config = change(CONFIG, data={"tokenizer": str(tokenizer_files)})
    for split, rows in (("train", records(24)), ("dev", records(3, 24))):
        (here / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = pipejax.fit(config, here / "run", train=here / "train.jsonl", dev=str(here / "dev.jsonl"))
    assert done == here / "run" and (done / "best").is_dir()
    assert pipejax.load(done).decode(TEXTS[:1])[0]["steps"] > 0
    return {"config": config, "run": done}, fingerprints(done)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pandas", "datasets", "arrow"])
def test_training_on_a_table_equals_training_on_its_file(
    tmp_path: Path, trained: tuple[dict[str, Any], list[Any]], kind: str
) -> None:
    found, expected = trained
    dev = [demo.examples("train")[24 + i] for i in range(3)]  # examples, whose ids do not affect scores
    done = pipejax.fit(found["config"], tmp_path / "run", train=TABLES[kind](records(24)), dev=dev)
    assert fingerprints(done) == expected


def test_a_dict_may_have_the_architecture() -> None:
    config = config_lib.override(Config(), {"model": MODEL, "train.steps": 3})
    assert config.model == MODEL and config.train.steps == 3


def test_run_with_config_from_a_dict_resumes(
    tmp_path: Path, trained: tuple[dict[str, Any], list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    found, expected = trained
    values = config_lib.flat(found["config"])
    nested = {key: value for key, value in values.items() if not key.startswith("model.")}
    path = tmp_path / "config.json"
    path.write_text(config_lib.to_json(found["config"]))
    more = {"train.steps": 1, "train.checkpoint_every": 1, "train.evaluate_every": 1}
    pipejax.fit(path, tmp_path / "run", train=records(24), dev=records(3, 24), overrides=more)
    with pytest.raises(UserError, match=r"data\.train: found examples that differ"):
        pipejax.fit(path, tmp_path / "run", train=records(24, 1), dev=records(3, 24))
    pipejax.fit(path, tmp_path / "run", train=found["run"].parent / "train.jsonl", dev=records(3, 24))
    assert fingerprints(tmp_path / "run")[-2:] == expected[-2:], "from a table to the file of its rows"
    with pytest.raises(UserError, match=r"^model: found none; expected"):
        pipejax.fit(nested, tmp_path / "other", train=records(3))


@pytest.mark.parametrize(
    "given, place, texts",
    [
        ({"config": 3}, "config", ["3", "a Config"]),
        ({"config": {"train.step": 3}}, "train.step", ["(did you mean train.steps?)"]),
        ({"config": {"train.steps": "3"}}, "config: train.steps", ["'3'", "a whole number"]),
        ({"config": "absent.py"}, "absent.py", ["a config file"]),
        ({"overrides": {"train.steps": 0}}, "overrides: train.steps", ["0", "at least 1"]),
        ({"overrides": {"data.task": "msqa"}}, "train", ["data.task = msqa", "jsonl"]),
        ({"overrides": {"data.split": "0.8,0.2"}}, "data.split", ["'0.8,0.2'"]),
        ({"overrides": {"data.stream": 9}}, "data.stream", ["9", "0"]),
        ({"train": []}, "train", ["at least one"]),
        ({"train": ["a", "b"]}, "train:1", ["'a'", "a record"]),
        ({"train": [*records(3), {"source": "x"}]}, "train:4", ['"targets"']),
        ({"train": {"train": records(3)}}, "train", ["{'train': ", "...", "a list, a data frame"]),
        ({"dev": [{"text": "x", "targets": []}]}, "dev:1", ['"source"']),
        ({"train": None}, "data.train", ["nothing"]),
        ({"train": Path("absent.jsonl")}, "absent.jsonl", ["no such file"]),
        ({"train": "a.jsonl", "overrides": {"data.task": "demo"}}, "train", ["data.task = demo"]),
    ],
)
def test_invalid_trainings_are_refused(tmp_path: Path, given: dict[str, Any], place: str, texts: list[str]) -> None:
    given = {"config": CONFIG, "train": records(3), **given}
    with refuses(place, *texts) as refused:
        pipejax.fit(workdir=tmp_path / "run", **given)
    assert "--" not in str(refused.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "code, error", [(128 + signal.SIGINT, KeyboardInterrupt), (128 + signal.SIGTERM, SystemExit), (1, UserError)]
)
def test_end_of_training_raises_python_exceptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[BaseException]
) -> None:
    monkeypatch.setattr(loop, "fit", lambda *_, **__: code)
    with pytest.raises(error):
        pipejax.fit(CONFIG, tmp_path / "run", train=records(3))


def test_unsupported_system_raises_user_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(pipejax.UserError, match=r"lacks fcntl; expected Linux"):
        pipejax.load(run)
    with pytest.raises(pipejax.UserError, match=r"lacks fcntl; expected Linux"):
        pipejax.fit(CONFIG, run.parent / "no")
