"""The former names of a decoding method, `strategy` and `objective`: each still works, with one warning."""

import dataclasses
import importlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pipejax
from pipejax import checkpoint, moved
from pipejax import config as config_lib
from pipejax.apps import demo
from pipejax.config import Config, TrainConfig
from pipejax.offline import decode_command, evaluation
from pipejax.registry import COMMANDS
from pipejax.system import strict_json
from support import oracle, tiny
from support.refusals import refuses
from support.scripted_engine import ScriptedEngine
from support.served import connect, error, service

TEXTS = [example.source for example in demo.examples("test")[:2]]
CONFIG = tiny.change(tiny.RUN_ON_ONE, train={"method": "sequential", "steps": 2})
LINE = "{} is now {}; the former name will be removed in the next release"

pytestmark = pytest.mark.usefixtures("compiled_once", "unwarned")


@pytest.fixture
def unwarned() -> None:
    """Resets the warnings about former names in this process."""
    moved.note.cache_clear()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer_files: Path) -> Path:
    """A run of the sequential method, with random weights."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(11))
    checkpoint.save_params(directory, CONFIG, params, tokenizer_source=tokenizer_files)
    return directory


@pytest.fixture(scope="module")
def t5(run: Path) -> pipejax.Generator:
    return pipejax.load(run)


@pytest.fixture
def before_the_change(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Makes configs be written with the former key until the returned function is called."""
    written = config_lib.to_json

    def write(config: Config) -> str:
        values = strict_json.loads(written(config))
        train = {"objective" if key == "method" else key: value for key, value in values["train"].items()}
        return json.dumps({**values, "train": train})

    monkeypatch.setattr(config_lib, "to_json", write)
    yield lambda: monkeypatch.setattr(config_lib, "to_json", written)


# Flags.


def test_the_former_flag_decodes_alike_and_warns_once(run: Path, tmp_path: Path, said: list[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"source": text}) + "\n" for text in TEXTS))
    found = []
    for flag in ("--method", "--strategy"):
        target = tmp_path / f"out{flag}.jsonl"
        flags = ["--checkpoint", str(run), "--input", str(source), "--output", str(target)]
        assert decode_command.main([*flags, flag, "pipelined"]) == 0
        found.append(target.read_text())
        warned = [line for line in said if "--strategy" in line]
        assert warned == (["warning: " + LINE.format("--strategy", "--method")] if flag == "--strategy" else [])
    assert found[0] == found[1] and '"method": "pipelined"' in found[0]


@pytest.mark.parametrize("command", ["decode", "evaluate", "bulk", "export"])
def test_commands_list_the_present_flag_and_refuse_both(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(COMMANDS[command][1]).main
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "--method" in text and "strategy" not in text
    with refuses("--strategy", found="--strategy and --method", expected="one of the two"):
        main(["--method", "pipelined", "--strategy", "sequential"])
    with refuses("--strategy", "'nonsense'", expected="one of pipelined, sequential"):
        main(["--strategy", "nonsense"])
    with refuses("--method", "'nonsense'", expected="one of pipelined, sequential"):
        main(["--method=nonsense"])


def test_evaluate_writes_both_keys_of_the_method(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--checkpoint", str(run), "--limit", "2", "--method", "pipelined", "--json", str(out)]
    assert evaluation.main(flags) == 0
    found = json.loads(out.read_text())
    assert (found["method"], found["strategy"]) == ("pipelined", "pipelined")


# Keywords and attributes in Python.


@pytest.mark.parametrize("call", ["decode", "stream_rows"])
def test_former_keyword_gives_the_same_records(t5: pipejax.Generator, call: str) -> None:
    decode = getattr(t5, call)
    given: Any = TEXTS if call == "decode" else TEXTS[0]
    expected = list(decode(given, method="pipelined"))
    with pytest.warns(DeprecationWarning, match=r"^strategy= is now method=; the former keyword") as caught:
        assert list(decode(given, strategy="pipelined")) == expected != list(decode(given, method="sequential"))
    assert len(caught) == 1 and caught[0].filename == __file__  # the line of the caller
    with refuses("method", found="strategy and method", expected="method alone"):
        list(decode(given, method="pipelined", strategy="pipelined"))


def test_other_calls_take_the_former_keyword(t5: pipejax.Generator) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    for call in (t5.warm_up, t5.under):
        given: Any = [] if call == t5.warm_up else schema
        with pytest.warns(DeprecationWarning, match="strategy= is now"), refuses("method", "'best'"):
            call(given, strategy="best")  # type: ignore[call-arg]


def test_inputs_are_given_by_former_keywords(t5: pipejax.Generator) -> None:
    with pytest.warns(DeprecationWarning, match="given= is now sources="):
        assert t5.decode(given=TEXTS) == t5.decode(sources=TEXTS)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="given= is now source="):
        assert [*t5.stream_rows(given=TEXTS[0])] == [*t5.stream_rows(source=TEXTS[0])]  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="given= is now schema="), refuses("schema", "method pipelined"):
        t5.under(given=[])  # type: ignore[call-arg]


def test_the_former_attribute_names_the_default_method(t5: pipejax.Generator) -> None:
    with pytest.warns(DeprecationWarning, match=r"^Generator\.default_strategy is now default_method") as caught:
        assert t5.default_strategy == t5.default_method == "sequential"  # type: ignore[attr-defined]
    assert caught[0].filename == __file__  # the line of the caller
    with pytest.warns(DeprecationWarning, match=r"^pipejax\.config\.STRATEGIES is now pipejax\.config\.METHODS"):
        assert config_lib.STRATEGIES is config_lib.METHODS


def test_a_config_is_made_by_the_former_field(tmp_path: Path) -> None:
    made: Any = TrainConfig
    with pytest.warns(DeprecationWarning, match=r"^objective= is now method=") as caught:
        former = made(objective="sequential", steps=3)
    assert former == TrainConfig(method="sequential", steps=3) and caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"^TrainConfig\.objective is now method"):
        assert former.objective == "sequential"
    with refuses("method", found="objective and method"):
        made(objective="sequential", method="sequential")
    with refuses("method", found="objective and method"):
        dataclasses.replace(former, objective="none")  # it passes the other fields by their present names
    file = tmp_path / "config.py"
    file.write_text(
        "from pipejax.config import Config, TrainConfig\nconfig = Config(train=TrainConfig(objective='sequential'))\n"
    )
    with pytest.warns(DeprecationWarning, match=r"^objective= is now method="):
        assert config_lib.load(file).train.method == "sequential"


# Keys of configs.


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.objective=sequential"],
        {"train.objective": "sequential"},
        {"train": {"objective": "sequential"}},
    ],
)
def test_the_former_key_is_set_and_warns_once(overrides: Any, said: list[str]) -> None:
    for _ in range(2):
        assert config_lib.override(Config(), overrides).train.method == "sequential"
    assert said == ["warning: " + LINE.format("train.objective", "train.method")]


def test_both_keys_are_refused() -> None:
    with refuses("train.method", found="train.objective and train.method", expected="train.method alone"):
        config_lib.override(Config(), ["train.method=none", "train.objective=sequential"])
    values = strict_json.loads(config_lib.to_json(Config()))
    values["train"]["objective"] = "sequential"
    with refuses("config.json: train.method", found="train.objective and train.method"):
        config_lib.from_json(json.dumps(values), where="config.json")


def test_the_former_key_has_the_limits_of_the_present_one(said: list[str]) -> None:
    with refuses("train.method", found="'seqential'"):
        config_lib.override(Config(), ["train.objective=seqential"])
    with refuses("--set", "train.method cannot be changed"):
        config_lib.check_taken(["train.objective=sequential"], "teach")
    assert len(said) == 1


def test_json_of_older_releases_is_read_without_a_warning(said: list[str]) -> None:
    text = config_lib.to_json(CONFIG)
    former = text.replace('"method": "sequential"', '"objective": "sequential"')
    assert former != text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert config_lib.from_json(former, where="config.json") == CONFIG
    assert said == []


def test_a_run_of_an_older_release_is_opened(before_the_change: Any, tmp_path: Path, tokenizer_files: Path) -> None:
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(11))
    checkpoint.save_params(tmp_path / "run", CONFIG, params, tokenizer_source=tokenizer_files)
    before_the_change()
    opened = pipejax.load(tmp_path / "run")
    assert opened.default_method == "sequential" and opened.config.train == CONFIG.train


@pytest.mark.slow
def test_a_run_of_an_older_release_is_continued(before_the_change: Any, tmp_path: Path, said: list[str]) -> None:
    train = {"checkpoint_every": 2, "evaluate_every": 100, "log_every": 1}
    pipejax.fit(tiny.change(CONFIG, train=train), tmp_path / "run")
    assert "objective" in strict_json.loads((tmp_path / "run/config.json").read_text())["train"]
    before_the_change()
    pipejax.fit(tiny.change(CONFIG, train={**train, "steps": 3}), tmp_path / "run")
    assert [line["step"] for line in tiny.metrics(tmp_path / "run") if line["event"] == "train"] == [1, 2, 3]
    kept = strict_json.loads((tmp_path / "run/config.json").read_text())["train"]
    assert kept["method"] == "sequential" and "objective" not in kept
    assert not [line for line in said if "former" in line]
    with refuses("train.method", "sequential"):
        pipejax.fit(tiny.change(CONFIG, train={**train, "steps": 3, "method": "pipelined"}), tmp_path / "run")


# Requests.


def test_the_former_field_of_a_request(t5: pipejax.Generator, said: list[str]) -> None:
    engine = ScriptedEngine(t5)
    client = connect(service(engine))
    for _ in range(2):
        assert client.post("/v1/completions", json={"prompt": TEXTS[0], "strategy": "pipelined"}).status_code == 200
    assert [request.method for request in engine.requests] == ["pipelined"] * 2
    warned = [line for line in said if "former" in line]
    assert warned == ["warning: " + LINE.format("the request field strategy", "method")]
    body = {"prompt": TEXTS[0], "strategy": "pipelined", "method": "pipelined"}
    found = error(client.post("/v1/completions", json=body), 400)
    assert found["param"] == "method" and found["message"].startswith("method: found strategy and method; expected")
    nothing = {"prompt": TEXTS[0], "strategy": None, "method": "sequential"}  # null counts as absent
    assert client.post("/v1/completions", json=nothing).status_code == 200
    model = client.get("/v1/models").json()["data"][0]
    assert model["methods"] == model["strategies"] == ["pipelined", "sequential"]
    assert model["default_method"] == model["default_strategy"] == "sequential"
