"""Configs: each file in configs/ round-trips through text, and an error is one line with its place."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipejax.config import (
    Config,
    DataConfig,
    DecodeConfig,
    GridConfig,
    MeshConfig,
    T5Config,
    TrainConfig,
    check,
    flat,
    from_json,
    load,
    override,
    to_json,
)
from pipejax.system.errors import UserError
from support.tiny import MODEL

FILES = sorted(path for path in (Path(__file__).parents[1] / "configs").glob("*.py") if path.stem != "paper")
CONFIG = Config(model=MODEL)
IMPORTS = "from pipejax.config import *\n"


def refusal(function, *arguments, **options) -> str:
    """The message of the UserError, in one line."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def written(value: Any) -> str:
    return json.dumps(value) if isinstance(value, list) else f'"{value}"' if isinstance(value, str) else str(value)


# The configs of the repository.


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_config_survives_json_and_assignments(path):
    config = load(path)
    assert from_json(to_json(config), where="config.json") == config
    leaves = {key: value for key, value in flat(config).items() if value is not None}
    blank = Config(model=MODEL if config.model else None)
    assert override(blank, [f"{key}={written(value)}" for key, value in leaves.items()]) == config
    assert load(path, ["name=other", "name=last"]).name == "last"
    sections = {field.name for field in dataclasses.fields(Config)}
    # Keys that former versions do not know.
    assert json.loads(to_json(config)).keys() == sections - {"method", "auxiliary"}


def test_loading_leaves_no_trace(tmp_path, capfd):
    path = tmp_path / "mine.py"
    path.write_text(f"{IMPORTS}config = Config(name='ü', grid=GridConfig(delay=3))\n")
    assert load(str(path), ["grid.time_max=7"]) == Config(name="ü", grid=GridConfig(delay=3, time_max=7))
    assert os.listdir(tmp_path) == ["mine.py"]
    assert capfd.readouterr() == ("", "")


def test_leaves_are_in_order_and_without_sections():
    keys = list(flat(CONFIG))
    assert keys[:2] == ["name", "model.vocab_size"] and keys[-1] == "mesh.tensor"
    assert {key.partition(".")[0] for key in keys} == {field.name for field in dataclasses.fields(Config)}
    assert flat(Config())["model"] is None


# Assignments.


@pytest.mark.parametrize(
    "assignment, value",
    [
        ("grid.delay=3", 3),
        ("  grid.delay = 3 ", 3),
        ("mesh.data=-1", -1),
        ("train.learning_rate=1", 1.0),
        ("train.learning_rate=3e-4", 3e-4),
        ("model.tied_head=False", False),
        ("model.tied_head=true", True),
        ("grid.stop=literal", "literal"),
        ("data.train=", ""),
        ("data.train=a=b.jsonl", "a=b.jsonl"),
        ("data.train='my file.jsonl'", "my file.jsonl"),
        ('data.separator=" # "', " # "),
        ("data.separator=' # '", " # "),
        ("data.separator= # ", " # "),
        ("train.remat= dots ", "dots"),  # one of several choices, and no free text
        ("data.delimiter=\t", "\t"),
        ("data.separator='", "'"),
        ('data.separator="\'"', "'"),
        ("data.separator=''", ""),
        ("name='a\"", "'a\""),
        ("name=true", "true"),
        ('grid.row_names=["date:", "party:"]', ["date:", "party:"]),
        ("grid.row_names=[]", []),
        ("name=Grüße 👋", "Grüße 👋"),
    ],
)
def test_assignment_sets_a_value_of_the_type_of_the_key(assignment, value):
    key = assignment.partition("=")[0].strip()
    changed = flat(override(CONFIG, [assignment]))
    assert changed[key] == value and type(changed[key]) is type(value)
    assert {k for k in changed if changed[k] != flat(CONFIG)[k]} <= {key}


def test_the_last_assignment_counts_and_the_result_is_checked():
    assert override(CONFIG, ["grid.delay=9", "grid.delay=2"]).grid.delay == 2
    assert override(CONFIG, ["model.vocab_size=1", "model.vocab_size=70"]) == override(
        CONFIG, ["model.vocab_size=70"]
    )  # intermediate values need not be valid


@pytest.mark.parametrize(
    "assignment, message",
    [
        # no such key
        ("nmae=x", "nmae: unknown key (did you mean name?)"),
        ("modle=x", "modle: unknown key (did you mean model?)"),
        ("delay=2", "delay: unknown key (did you mean grid.delay?)"),
        ("grid.dealy=2", "grid.dealy: unknown key (did you mean grid.delay?)"),
        ("gird.delay=2", "gird.delay: unknown key (did you mean grid.delay?)"),
        ("gird.dealy=2", "gird.dealy: unknown key (did you mean grid.delay?)"),
        ("train.max_source=9", "train.max_source: unknown key (did you mean data.max_source?)"),
        ("decod.batch_size=2", "decod.batch_size: unknown key (did you mean decode.batch_size?)"),
        ("trian.batch_size=2", "trian.batch_size: unknown key (did you mean train.batch_size?)"),
        ("model.dmodel=8", "model.dmodel: unknown key (did you mean model.d_model?)"),
        ("Grid.Delay=2", "Grid.Delay: unknown key (did you mean grid.delay?)"),
        ("grid.bound=2", "grid.bound: unknown key (the keys of grid are delay, time_max, sub_max, stop"),
        (
            "qqq=2",
            "qqq: unknown key (the sections are name, model, method, auxiliary, grid, data, train, decode, mesh)",
        ),
        ("grid..delay=2", "grid..delay: unknown key (did you mean grid.delay?)"),
        ("grid.delay.x=2", "grid.delay.x: delay is not a section (did you mean grid.delay?)"),
        ("name.x.y=2", "name.x.y: name is not a section (did you mean name?)"),
        # no assignment
        ("grid.delay", "--set grid.delay: found no '='; expected key=value"),
        ("", "--set : found no '='; expected key=value"),
        (
            r"data.delimiter=\n",
            r"--set data.delimiter=\n: found two characters; expected one character; $'\t' is a tab in bash",
        ),
        ("=2", "--set =2: found no key; expected key=value"),
        ("grid=2", "grid: found a section; expected one of its keys, such as grid.delay"),
        ("model=none", "model: found a section; expected one of its keys, such as model.vocab_size"),
        # not the type
        ("grid.delay=true", "grid.delay: found 'true'; expected a whole number"),
        ("grid.delay=two", "grid.delay: found 'two'; expected a whole number"),
        ("grid.delay=1.5", "grid.delay: found '1.5'; expected a whole number"),
        ("grid.delay=", "grid.delay: found ''; expected a whole number"),
        ("grid.delay='2'", "grid.delay: found \"'2'\"; expected a whole number"),
        ("train.learning_rate=fast", "train.learning_rate: found 'fast'; expected a number"),
        ("train.learning_rate=true", "train.learning_rate: found 'true'; expected a number"),
        ("model.tied_head=1", "model.tied_head: found '1'; expected true or false"),
        # out of range
        ("train.learning_rate=nan", "train.learning_rate: found nan; expected a number"),
        ("train.learning_rate=inf", "train.learning_rate: found inf; expected a number"),
        ("train.weight_decay=-inf", "train.weight_decay: found -inf; expected a number"),
        ("train.learning_rate=0", "train.learning_rate: found 0.0; expected more than 0"),
        ("grid.delay=-1", "grid.delay: found -1; expected at least 0"),
        ("grid.row_names=date:", "grid.row_names: found 'date:'; expected a list of texts"),
        ('grid.row_names=["a", 1]', "grid.row_names: found ('a', 1); expected a list of texts"),
        ('grid.row_names=["a", " "]', "grid.row_names: found an empty name"),
        ('grid.row_names=["a\\ud800"]', "grid.row_names: found ('a\\ud800',); expected valid Unicode"),
        (f"grid.row_names={json.dumps(['a'] * 99)}", "grid.row_names: found 99; expected at most grid.sub_max = "),
        ("grid.time_max=-1", "grid.time_max: found -1; expected at least 1"),
        ("grid.sub_max=99999999999", "grid.sub_max: found 99999999999; expected at most 32768"),
        ("decode.max_length=0", "decode.max_length: found 0; expected at least 1"),
        ("decode.batch_size=-8", "decode.batch_size: found -8; expected at least 1"),
        ("decode.beams=0", "decode.beams: found 0; expected at least 1"),
        ("decode.beams=2.5", "decode.beams: found '2.5'; expected a whole number"),
        ("decode.length_penalty=inf", "decode.length_penalty: found inf; expected a number"),
        ("decode.length_penalty=9", "decode.length_penalty: found 9.0; expected at most 5.0"),
        ("data.max_source=1", "data.max_source: found 1; expected at least 2"),
        ("train.steps=0", "train.steps: found 0; expected at least 1"),
        ("train.dropout=1", "train.dropout: found 1.0; expected less than 1.0"),
        ("train.seed=2147483648", "train.seed: found 2147483648; expected at most 2147483647"),
        ("mesh.data=0", "mesh.data: found 0; expected -1 or at least 1"),
        ("mesh.data=-2", "mesh.data: found -2; expected at least -1"),
        ("grid.stop=empty", "found 'empty'; expected one of empty_row, literal (did you mean empty_row?)"),
        ("train.method=Pipelined", "found 'Pipelined'; expected one of pipelined, sequential (did you mean"),
        ("decode.dtype=float16", "decode.dtype: found 'float16'; expected one of auto, float32, bfloat16"),
        ("data.train=\udcff.jsonl", "data.train: found '\\udcff.jsonl'; expected valid Unicode"),
        ("data.train=caf\udcc3\udca9.jsonl", "data.train: found 'caf\\udcc3\\udca9.jsonl'; expected PYTHONUTF8=1"),
        # contradicts another key
        ("model.eos_token_id=64", "model.eos_token_id: found 64; expected an id below model.vocab_size = 64"),
        ("decode.beams=33", "decode.beams: found 33; expected at most half of model.vocab_size = 64"),
        ("model.relative_attention_max_distance=16", "max_distance: found 16; expected more than half of the 32"),
    ],
)
def test_invalid_assignment_is_refused(assignment, message):
    said = refusal(override, CONFIG, [assignment])
    assert message in said
    assert assignment.partition("=")[0] in said


def test_keys_of_an_absent_model_are_refused():
    assert refusal(override, Config(), ["model.d_model=8"]).startswith("model.d_model: found no model in this")


def test_a_sequential_target_needs_a_separator():
    config = Config(data=DataConfig(separator=""))
    check(config, where="here")
    config = dataclasses.replace(config, train=TrainConfig(method="sequential"))
    assert refusal(check, config, where="here").startswith("here: data.separator: found nothing")


def test_types_are_checked_in_python_too():
    for section, values, message in (
        ("grid", {"delay": True}, "here: grid.delay: found True; expected a whole number"),
        ("grid", {"delay": 2.0}, "here: grid.delay: found 2.0; expected a whole number"),
        ("train", {"learning_rate": False}, "here: train.learning_rate: found False; expected a number"),
        ("train", {"learning_rate": "1e-4"}, "here: train.learning_rate: found '1e-4'; expected a number"),
        ("data", {"train": None}, "here: data.train: found None; expected text"),
        ("data", {"train": Path("x")}, "here: data.train: found "),
    ):
        config = dataclasses.replace(CONFIG, **{section: dataclasses.replace(getattr(CONFIG, section), **values)})
        assert refusal(check, config, where="here").startswith(message)
    check(dataclasses.replace(CONFIG, train=TrainConfig(learning_rate=1)), where="here")  # an int is a number
    for section in (None, DataConfig(), {"delay": 1}):
        wrong = dataclasses.replace(CONFIG, grid=section)
        assert refusal(check, wrong, where="here").startswith("here: grid: found ")


# JSON, as in a checkpoint's manifest.


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "x.json: not valid JSON (Expecting value"),
        ('{"name": ', "x.json: not valid JSON"),
        ("[" * 100_000, "x.json: not valid JSON"),
        ("[]", "x.json: top level: found list; expected an object"),
        ('{"grid": 3}', "x.json: grid: found int; expected an object"),
        ('{"grid": null}', "x.json: grid: found None; expected GridConfig"),
        ('{"gird": {}}', "x.json: gird: unknown key"),
        ('{"grid": {"dealy": 1}}', "x.json: grid.dealy: unknown key (did you mean grid.delay?)"),
        ('{"grid": {"delay": true}}', "x.json: grid.delay: found True; expected a whole number"),
        ('{"grid": {"delay": 1.0}}', "x.json: grid.delay: found 1.0; expected a whole number"),
        ('{"grid": {"delay": -1}}', "x.json: grid.delay: found -1; expected at least 0"),
        ('{"train": {"clip_norm": NaN}}', "x.json: train.clip_norm: found nan; expected a number"),
        ('{"model": {"vocab_size": 8}}', "x.json: model.d_model: missing"),
    ],
)
def test_invalid_json_config_is_refused(text, message):
    assert refusal(from_json, text, where="x.json").startswith(message)


def test_json_may_leave_keys_out():
    assert from_json("{}", where="x.json") == Config()
    assert from_json('{"model": null, "grid": {"delay": 2}}', where="x.json") == Config(grid=GridConfig(delay=2))


# Files.


@pytest.mark.parametrize(
    "content, place, message",
    [
        ("", "", ": found no `config = Config(...)`; expected one"),
        ("config = {'name': 'x'}", "", ": found no `config = Config(...)`; expected one"),
        ("a = 1\nb = = 2\n", ":2", ": SyntaxError: invalid syntax"),
        ("if True:\nx = 1\n", ":2", ": IndentationError: expected an indented block"),
        ("a = 1\n\nraise ValueError('two\\nlines')\n", ":3", ": ValueError: two"),
        ("import json\n\njson.loads('{')\n", ":3", ": JSONDecodeError: Expecting property name"),
        ("def f():\n    return 1 / 0\n\nf()\n", ":2", ": ZeroDivisionError: division by zero"),
        ("import nowhere_to_be_found\n", ":1", ": ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("import sys\nsys.exit('gone')\n", ":2", ": SystemExit: gone"),
        ("def f():\n    f()\nf()\n", ":2", ": RecursionError: "),
        (b"x = 1\nconfig = '\xff\xfe'\n", ":2", ": SyntaxError: "),
        # A ValueError or a SyntaxError, depending on the release of Python 3.11.
        (b"\x00\x01\x02\x03", "", "Error: source code "),
        (b"\x7fELF" + bytes(range(256)), "", "Error: "),
        (IMPORTS + "config = Config(grid=GridConfig(dealy=2))\n", ":2", "unexpected keyword argument 'dealy'"),
        (IMPORTS + "config = Config(\n    modle=None)\n", ":2", "unexpected keyword argument 'modle'"),
        (IMPORTS + "config = Config(model=T5Config(vocab_size=3))", ":2", "T5Config.__init__() missing 6 required"),
        (IMPORTS + "config = Config(grid=GridConfig(delay=-1))", "", ": grid.delay: found -1; expected at least 0"),
        (IMPORTS + "config = Config(grid=GridConfig(delay=True))", "", ": grid.delay: found True; expected a whole"),
        (IMPORTS + "config = Config(grid=None)\n", "", ": grid: found None; expected GridConfig"),
        (IMPORTS + "config = override(Config(), ['grid.dealy=2'])", "grid.dealy: unknown key", ""),
    ],
)
def test_invalid_config_files_are_refused(content, place, message, tmp_path):
    path = tmp_path / "bad.py"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = refusal(load, path)
    assert said.startswith(f"{path}{place}" if place[:1] in ("", ":") else place)
    assert message in said


def test_the_config_of_a_run_is_a_config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(to_json(Config(grid=GridConfig(delay=3))))
    assert load(path, ["train.steps=5"]) == override(Config(grid=GridConfig(delay=3)), ["train.steps=5"])
    path.write_bytes(b'{"name": "\xe9"}')
    assert refusal(load, path).startswith(f"{path}: not valid JSON (")
    path.write_text('{"grid": {"delay": -1}}')
    assert refusal(load, path).startswith(f"{path}: grid.delay: found -1; ")


def test_a_mistyped_argument_has_a_suggestion(tmp_path):
    path = tmp_path / "mine.py"
    for content, right in (("Config(grid=GridConfig(dealy=2))", "delay"), ("Config(modle=None)", "model")):
        path.write_text(f"{IMPORTS}config = {content}\n")
        assert right in refusal(load, path).partition("unexpected keyword")[2].lower().partition("did you mean")[2]


def test_a_syntax_error_elsewhere_names_that_file(tmp_path, monkeypatch):
    (tmp_path / "broken_neighbour.py").write_text("x = 1\n\nx = = 2\n")
    (tmp_path / "mine.py").write_text("import broken_neighbour\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal(load, tmp_path / "mine.py").startswith(f"{tmp_path / 'broken_neighbour.py'}:3: SyntaxError: ")


def test_absent_config_file_is_refused(tmp_path):
    assert refusal(load, tmp_path / "no.py") == f"{tmp_path / 'no.py'}: no such file; expected a config file"
    assert refusal(load, tmp_path) == f"{tmp_path}: found a directory; expected a config file"
    with pytest.raises(KeyboardInterrupt):  # no mistake of the user
        (tmp_path / "slow.py").write_text("raise KeyboardInterrupt")
        load(tmp_path / "slow.py")


def test_every_key_has_a_range_or_needs_none():
    """Whole numbers have lower bounds and words have choices, except names, paths and the separator."""
    for section in (T5Config, GridConfig, DataConfig, TrainConfig, DecodeConfig, MeshConfig):
        for field in dataclasses.fields(section):
            if field.type in (int, "int"):
                assert "least" in field.metadata, field.name
            free = ("init_from", "wandb", "mlflow", "draft_checkpoint")
            if field.type in (str, "str") and section is not DataConfig and field.name not in free:
                assert field.metadata.get("choices"), field.name


def test_largest_numbers_of_names_and_beams_are_accepted() -> None:
    """The bounds themselves are within them."""
    named = Config(grid=GridConfig(sub_max=2, row_names=("a", "b")))
    check(named, where="here")
    with pytest.raises(UserError, match=r"here: grid\.row_names: found 2; expected at most grid\.sub_max = 1"):
        check(dataclasses.replace(named, grid=GridConfig(sub_max=1, row_names=("a", "b"))), where="here")
    model = T5Config(vocab_size=8, d_model=4, d_kv=2, d_ff=4, num_heads=1, num_layers=1, num_decoder_layers=1)
    check(Config(model=model, decode=DecodeConfig(beams=4)), where="here")
    with pytest.raises(UserError, match=r"decode\.beams: found 5; expected at most half of model\.vocab_size = 8"):
        check(Config(model=model, decode=DecodeConfig(beams=5)), where="here")


# Settings that are sequences.


@pytest.mark.parametrize("names", [["a:", "b:"], ("a:", "b:"), np.asarray(["a:", "b:"])])
@pytest.mark.parametrize(
    "shares", [[0.8, 0.1, 0.1], (0.8, 0.1, 0.1), "0.8,0.1,0.1", "[0.8, 0.1, 0.1]", np.asarray([0.8, 0.1, 0.1])]
)
def test_sequence_settings_accept_any_sequence(names: Any, shares: Any, tmp_path: Path) -> None:
    """All sequences, in Python, in a dict and in a config file, are stored alike, so that the run can be resumed."""
    expected = Config(grid=GridConfig(row_names=("a:", "b:")), data=DataConfig(split="0.8,0.1,0.1"))
    assert override(Config(grid=GridConfig(row_names=names), data=DataConfig(split=shares)), {}) == expected
    assert override(Config(), {"grid.row_names": names, "data": {"split": shares}}) == expected
    assert hash(expected) is not None and from_json(to_json(expected), where="x") == expected
    plain = [x.tolist() if isinstance(x, np.ndarray) else x for x in (names, shares)]
    grid, data = f"GridConfig(row_names={plain[0]!r})", f"DataConfig(split={plain[1]!r})"
    (tmp_path / "c.py").write_text(f"{IMPORTS}config = Config(grid={grid}, data={data})\n")
    assert load(tmp_path / "c.py") == expected


def test_custom_method_accepts_lists() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own:
        names: tuple[str, ...] = ()

    assert override(Config(method=Own(names=["a"])), {}).method == Own(("a",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "overrides, line",
    [
        (
            ["grid.row_names=a:, b:"],
            """found 'a:, b:'; expected a list of texts, as in --set 'grid.row_names=["a:", "b:"]'""",
        ),
        (["grid.row_names=date"], """found 'date'; expected a list of texts, as in --set 'grid.row_names=["date"]'"""),
        ({"grid.row_names": "date"}, """found 'date'; expected a list of texts, such as ["date:", "party:"]"""),
        ({"grid.row_names": [1]}, """found (1,); expected a list of texts, such as ["date:", "party:"]"""),
        ({"data.targets": 3}, """found 3; expected a name, or several such as ["date", "party"]"""),
        ({"data.targets": ["a", 3]}, """found ('a', 3); expected a name, or several such as ["date", "party"]"""),
    ],
)
def test_a_refusal_shows_a_value_that_works(overrides: Any, line: str) -> None:
    assert refusal(override, Config(), overrides).endswith(line)
    shown = line.rpartition("as ")[2].removeprefix("in --set ").strip("'")
    key = "data.targets" if "data.targets" in overrides else "grid.row_names"
    override(Config(), [shown if "=" in shown else f"{key}={shown}"])
