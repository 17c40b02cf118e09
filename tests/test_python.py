"""The interface from Python: settings of a call, overrides as values, tables in memory, training, and its refusals."""

import dataclasses
import math
import signal
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

import pipejax
from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.config import Config, DecodeConfig, GridConfig
from pipejax.data import demo
from pipejax.data.formats import rows_in
from pipejax.inference import programs, settings
from pipejax.system.errors import UserError
from pipejax.training import loop
from support import oracle
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
    "strategy, values",
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
def test_a_call_with_settings_is_a_checkpoint_opened_with_them(
    run: Path, t5: pipejax.Generator, strategy: str, values: dict[str, Any]
) -> None:
    before = t5.decode(TEXTS, strategy=strategy, max_length=8)
    opened = pipejax.load(run, overrides={settings.NAMES[name]: value for name, value in values.items()})
    found = t5.decode(TEXTS, strategy=strategy, **values)
    assert found == opened.decode(TEXTS, strategy=strategy) != before
    assert t5.decode(TEXTS, strategy=strategy, max_length=8) == before, "it is for that call alone"
    assert t5.config == CONFIG


def test_a_call_lays_out_no_weights_and_compiles_nothing_that_does_not_change(
    t5: pipejax.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    t5.warm_up([64], batch_sizes=(2,), temperature=0.5, scores=True)
    known = dict(t5.programs._compiled)
    monkeypatch.setattr(programs.Programs, "set_params", None)
    monkeypatch.setattr(programs, "decode_batch", None)  # whatever compiles now, fails
    monkeypatch.setattr(programs, "encode_batch", None)
    ids = [[5] * 50, [6] * 64]
    drawn = [t5.decode(ids, temperature=x, seed=seed, scores=True) for x, seed in ((0.5, 0), (9.0, 0), (9.0, 1))]
    assert drawn[0] != drawn[1] != drawn[2] and t5.programs._compiled == known
    monkeypatch.undo()
    t5.decode(ids, time_max=6)
    assert len(t5.programs._compiled) > len(known)


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
    "call, values, line",
    [
        ("decode", {"temprature": 1}, r"decode\(\): found the setting 'temprature'; .*did you mean temperature\?\)"),
        ("decode", {"grid_delay": 1}, r"found the setting 'grid_delay'; expected a key of decode or grid"),
        ("decode", {"max_source": 9}, r"found the setting 'max_source'; expected a key of decode or grid"),
        ("decode", {"temperature": -1}, r"decode\(\): decode\.temperature: found -1; expected at least 0\.0"),
        ("decode", {"temperature": "0.7"}, r"decode\.temperature: found '0\.7'; expected a number"),
        ("decode", {"temperature": math.nan}, r"decode\.temperature: found nan; expected a number"),
        ("decode", {"scores": 1}, r"decode\.scores: found 1; expected true or false"),
        ("decode", {"batch_size": 0}, r"decode\.batch_size: found 0; expected at least 1"),
        ("decode", {"batch_size": 2.0}, r"decode\.batch_size: found 2\.0; expected a whole number"),
        ("decode", {"limit": "sauce"}, r"decode\.limit: found 'sauce'; expected one of none, source \(did you mean so"),
        ("decode", {"delay": 10**9}, r"grid\.delay: found 1000000000; expected at most 32768"),
        ("decode", {"row_names": "date:"}, r"grid\.row_names: found 'date:'; expected a list of texts"),
        ("decode", {"samples": 2}, r"decode\.samples: found 2 with decode\.temperature = 0"),
        ("decode", {"weights": "int8"}, r'weights: found \'int8\', which no call can change; .*"decode.weights": \'in'),
        ("decode", {"dtype": "bfloat16"}, r"decode\(\): dtype: found 'bfloat16', which no call can change"),
        ("decode", {"draft_checkpoint": "x"}, r"decode\(\): draft_checkpoint: found 'x', which no call can change"),
        ("decode", {"draft": "model"}, r'draft: found \'model\', .*overrides={.*, "decode\.draft_checkpoint": DIREC'),
        ("decode", {"strategy": "seqential"}, r"strategy: found 'seqential'; .*\(did you mean sequential\?\)"),
        ("stream_rows", {"batch_size": 4}, r"stream_rows\(\): batch_size: found 4; expected none: one source"),
        ("stream_rows", {"samples": 4}, r"stream_rows\(\): samples: found 4; expected none: one answer"),
        ("stream_rows", {"top_p": 0}, r"stream_rows\(\): decode\.top_p: found 0; expected more than 0"),
        ("warm_up", {"batch_size": 4}, r"warm_up\(\): batch_size: found 4; expected batch_sizes, a list"),
        ("warm_up", {"time_max": 0}, r"warm_up\(\): grid\.time_max: found 0; expected at least 1"),
    ],
)
def test_settings_are_refused_in_pythons_words(
    t5: pipejax.Generator, call: str, values: dict[str, Any], line: str
) -> None:
    given = {"decode": TEXTS, "stream_rows": TEXTS[0], "warm_up": [16]}[call]
    with pytest.raises(pipejax.UserError, match=line) as refused:
        getattr(t5, call)(given, **values)
    assert "--" not in str(refused.value) and "\n" not in str(refused.value)


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
    "overrides, line",
    [
        ("grid.delay=2", r"overrides: found 'grid\.delay=2'; expected a dict of values, or a list of \"key=value\""),
        (3, r"overrides: found 3; expected a dict of values"),
        (["grid.delay", 2], r"overrides grid\.delay: found no '='"),
        ([("grid.delay", 2)], r"overrides: found \('grid\.delay', 2\) in the list; expected a text \"key=value\""),
        (["grid.delay=x"], r"grid\.delay: found 'x'; expected a whole number"),
        ({"grid.delay": "2"}, r"overrides: grid\.delay: found '2'; expected a whole number"),
        ({"grid.delay": None}, r"overrides: grid\.delay: found None; expected a whole number"),
        ({"grid.delay": True}, r"overrides: grid\.delay: found True; expected a whole number"),
        ({"grid.delay": [*range(99)]}, r"overrides: grid\.delay: found \[0, 1, .*\.\.\.; expected a whole number"),
        ({1: 2}, r"overrides: found the key 1; expected a text such as \"grid\.delay\""),
        ({"grid.dely": 2}, r"grid\.dely: unknown key \(did you mean grid\.delay\?\)"),
        ({"grid": 2}, r"grid: found a section; expected one of its keys, such as grid\.delay"),
        ({"train": {"steps": 3}}, r"overrides: train\.steps cannot change when a checkpoint is decoded"),
        ({"decode.beams": 99}, r"overrides: decode\.beams: found 99; expected at most half of model\.vocab_size"),
    ],
)
def test_refused_overrides(run: Path, overrides: Any, line: str) -> None:
    with pytest.raises(UserError, match=line) as refused:
        pipejax.load(run, overrides=overrides)
    assert "--set" not in str(refused.value)


# What there is.


def test_dir_and_repr(run: Path, t5: pipejax.Generator) -> None:
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
    """The part of a pandas DataFrame that is asked for."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.columns = rows, list(rows[0])

    def to_dict(self, orient: str = "dict") -> Any:
        assert orient == "records", "else columns come"
        return self.rows


class Polars(Pandas):
    """The part of a Polars DataFrame that is asked for; its `to_dict` gives columns."""

    def to_dict(self, orient: str = "columns") -> Any:
        raise AssertionError

    def iter_rows(self, *, named: bool = False) -> Any:
        return iter(self.rows) if named else (tuple(row.values()) for row in self.rows)


class Datasets:
    """The part of a datasets.Dataset with a format that is asked for."""

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
def test_a_table_is_decoded(t5: pipejax.Generator, kind: str) -> None:
    rows = [{"source": text, "id": f"n{i}"} for i, text in enumerate(TEXTS)]
    assert t5.decode(TABLES[kind](rows)) == t5.decode(rows)


def test_cells_are_as_json_has_them() -> None:
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
    """What is given besides the examples, and the fingerprints of a training on files."""
    import json

    here = tmp_path_factory.mktemp("files")
    config = change(CONFIG, data={"tokenizer": str(tokenizer_files)})
    for split, rows in (("train", records(24)), ("dev", records(3, 24))):
        (here / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = pipejax.fit(config, here / "run", train=here / "train.jsonl", dev=str(here / "dev.jsonl"))
    assert done == here / "run" and (done / "best").is_dir()
    assert pipejax.load(done).decode(TEXTS[:1])[0]["steps"] > 0
    return {"config": config, "run": done}, fingerprints(done)


@pytest.mark.parametrize("kind", ["pandas", "datasets", "arrow"])
def test_a_table_trains_as_its_file_does(tmp_path: Path, trained: tuple[dict[str, Any], list[Any]], kind: str) -> None:
    found, expected = trained
    dev = [demo.examples("train")[24 + i] for i in range(3)]  # examples, whose ids are none of the scores' business
    done = pipejax.fit(found["config"], tmp_path / "run", train=TABLES[kind](records(24)), dev=dev)
    assert fingerprints(done) == expected


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
    "given, line",
    [
        ({"config": 3}, r"config: found 3; expected a Config, the path of one, or a dict of settings"),
        ({"config": {"train.step": 3}}, r"train\.step: unknown key \(did you mean train\.steps\?\)"),
        ({"config": {"train.steps": "3"}}, r"config: train\.steps: found '3'; expected a whole number"),
        ({"config": "absent.py"}, r"absent\.py: no such file; expected a config file"),
        ({"overrides": {"train.steps": 0}}, r"overrides: train\.steps: found 0; expected at least 1"),
        ({"overrides": {"data.task": "msqa"}}, r"train: found records in memory with data\.task = msqa; expected jso"),
        ({"overrides": {"data.split": "0.8,0.2"}}, r"data\.split: found '0\.8,0\.2' with records in memory"),
        ({"overrides": {"data.stream": 9}}, r"data\.stream: found 9 with records in memory; expected 0"),
        ({"train": []}, r"train: found no records; expected at least one"),
        ({"train": ["a", "b"]}, r"train:1: found 'a'; expected a record"),
        ({"train": [*records(3), {"source": "x"}]}, r'train:4: found no "targets"'),
        ({"train": {"train": records(3)}}, r"train: found {'train': .*\.\.\.; expected a list, a data frame or anothe"),
        ({"dev": [{"text": "x", "targets": []}]}, r'dev:1: found no "source"'),
        ({"train": None}, r"data\.train: found nothing; expected the examples to train on"),
        ({"train": Path("absent.jsonl")}, r"absent\.jsonl: no such file"),
        (
            {"train": "a.jsonl", "overrides": {"data.task": "demo"}},
            r"train: found a file with data\.task = demo; expected",
        ),
    ],
)
def test_refused_trainings(tmp_path: Path, given: dict[str, Any], line: str) -> None:
    given = {"config": CONFIG, "train": records(3), **given}
    with pytest.raises(UserError, match=line) as refused:
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
