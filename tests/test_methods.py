"""Custom methods have all abilities of pipejax's methods, or refuse in one line."""

import collections
import dataclasses
import importlib
import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from starlette.testclient import TestClient

import pipejax
from pipejax import checkpoint, methods
from pipejax import config as config_lib
from pipejax.apps import demo
from pipejax.apps.bulk import workers
from pipejax.apps.export.programs_as_files import export
from pipejax.apps.picture.record_picture import main as picture
from pipejax.apps.serving import app
from pipejax.apps.serving.answer import Request
from pipejax.apps.serving.engine import Engine
from pipejax.apps.teach.lessons import lesson
from pipejax.checkpoint.run import open_run
from pipejax.config import Config, DecodeConfig, GridConfig
from pipejax.convert import huggingface
from pipejax.convert.quantized import quantize
from pipejax.data.batches import TrainingBatches, collate, longest
from pipejax.data.encoding import encode_example
from pipejax.data.examples import Example
from pipejax.decoding import Pipelined
from pipejax.decoding.drafters import FromModel
from pipejax.inference.drafter_parameters import OpenDrafter
from pipejax.inference.drafter_parameters import check as check_drafter
from pipejax.inference.generator import Generator
from pipejax.inference.report import Report
from pipejax.inference.sources import Source
from pipejax.inference.streaming import RowEvent
from pipejax.methods import Method, NamedRows, RowPrefixes, Target
from pipejax.model import t5
from pipejax.offline.decode_command import main as decode
from pipejax.offline.resume import settings_of
from pipejax.system.errors import UserError
from pipejax.training.step import Trainer, batch_loss
from support import oracle
from support.scripted_engine import ScriptedEngine
from support.staggered import STOP, Staggered
from support.tiny import FEW_WORDS, MODEL, RUN_ON_ONE, change, metrics

METHOD = Staggered(rows=3, width=5)
PARAMS = oracle.random_params(
    dataclasses.replace(FEW_WORDS, eos_token_id=STOP), np.random.default_rng(2), eos_scale=3.0
)
CONFIG = Config(model=FEW_WORDS, method=METHOD, decode=DecodeConfig(scores=True))
RUN = dataclasses.replace(change(RUN_ON_ONE, train={"steps": 4, "checkpoint_every": 2, "shapes": 1}), method=METHOD)
NAME = "support.staggered:Staggered"
BROUGHT = "method=brought:Brought"
pytestmark = pytest.mark.usefixtures("compiled_once")


def assert_same(found: Any, expected: Any) -> None:
    """Asserts equal records, except for ids; batches of other sizes round differently."""
    for key in ("row_ids", "steps", "calls", "truncated"):
        assert found[key] == expected[key]
    assert found["log_prob"] == pytest.approx(expected["log_prob"], abs=1e-3)


def sources(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [[*rng.integers(2, FEW_WORDS.vocab_size, rng.integers(2, 9)).tolist(), 1] for _ in range(count)]


def written(source: list[int]) -> tuple[list[list[int]], list[list[float]], int]:
    """Rows, log-probabilities of their tokens, and steps, in plain Python."""
    encoded = oracle.encode(PARAMS, FEW_WORDS, source)
    rows: list[list[int]] = [[] for _ in range(METHOD.rows)]
    probs: list[list[float]] = [[] for _ in rows]
    over, time = set[int](), 0
    while len(over) < len(rows):
        begun = [i for i in range(len(rows)) if 2 * i <= time]
        if going := [i for i in begun if i not in over]:
            fed = [[0, *(token for token in rows[i] if token != STOP)][: METHOD.width] for i in begun]
            logits = oracle.grid_logits(PARAMS, FEW_WORDS, encoded, fed, 2)
            for i in going:
                last = logits[i][-1]
                rows[i].append(int(last.argmax()))
                probs[i].append(float(last[rows[i][-1]] - np.log(np.exp(last - last.max()).sum()) - last.max()))
                if rows[i][-1] == STOP or len(rows[i]) == METHOD.width:
                    over.add(i)
        time += 1
    return [[token for token in row if token != STOP] for row in rows], probs, time


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(CONFIG, PARAMS, None)


def test_answers_and_scores_equal_plain_python(generator: Generator) -> None:
    """The strategy defines where a row begins, also for log-probabilities."""
    texts, seen = sources(30), set[int]()
    for size in (1, 4):
        for text, record in zip(texts, generator.decode(texts, batch_size=size), strict=True):
            rows, probs, steps = written(text)
            assert record["row_ids"] == [row for row in rows if row]
            assert record["steps"] == steps
            for row, found in zip([p for r, p in zip(rows, probs, strict=True) if r], record["log_probs"], strict=True):
                assert found == pytest.approx(row[: len(found)], abs=1e-3)
            assert record["log_prob"] == pytest.approx(sum(map(sum, probs)), abs=1e-2)
            seen.add(steps)
    assert len(seen) > 2  # answers of several lengths


def test_limit_to_source_allows_source_tokens_and_the_end_token(generator: Generator) -> None:
    texts = [[5, 7, 1], [3, 8, 6, 1]]
    for text, record in zip(texts, generator.decode(texts, limit="source", temperature=3.0), strict=True):
        assert {token for row in record["row_ids"] for token in row} <= {*text}  # and never 0
    found = generator.decode([[5, 1]], limit="source")
    # Its end token is allowed.
    assert any(len(row) < METHOD.width for row in found[0]["row_ids"]) or not found[0]["row_ids"]


@pytest.mark.parametrize(
    "more, line",
    [
        ({"row_prefixes": [[3], [4]]}, "several row_prefixes with staggered decoding, which does not support"),
        ({"row_prefixes": [[3]]}, "row_prefixes with staggered decoding, which does not support row prefixes"),
        ({"max_rows": 2}, "max_rows with staggered decoding, which does not support"),
    ],
)
def test_unsupported_row_prefixes_are_refused(generator: Generator, more: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=f"^source 0: found {line}.*; expected none"):
        generator.decode([{"source_ids": [5, 1], **more}])


def test_drafts_are_refused(generator: Generator) -> None:
    line = r"^decode\.draft: found source with staggered decoding, which does not verify drafts; expected none$"
    with pytest.raises(UserError, match=line):
        generator.decode([[5, 1]], draft="source")


@pytest.mark.parametrize(
    "setting, line",
    [
        ({"beams": 2}, "decode.beams: found 2; expected 1, since beam search is sequential, not staggered"),
        (
            {"repetition_penalty": 2},
            "decode.repetition_penalty: found 2 with staggered decoding, which .*; expected 1.0",
        ),
    ],
)
def test_unsupported_settings_are_refused(generator: Generator, setting: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=f"^{line}"):
        generator.decode([[5, 1]], **setting)
    with pytest.raises(UserError, match=f"^{line}"):
        methods.check_training(change(CONFIG, decode=setting))


def test_repeated_rows_are_left_out_with_any_method(generator: Generator, caplog: pytest.LogCaptureFixture) -> None:
    """One line reports that the answer does not end earlier."""
    given = [[token, other, 1] for token in range(2, 9) for other in range(2, 7)]
    plain, unique = generator.decode(given), generator.decode(given, unique_rows=True)
    for one, other in zip(plain, unique, strict=True):
        rows = one["row_ids"]
        assert other["row_ids"] == [row for i, row in enumerate(rows) if row not in rows[:i]]
        assert other["steps"] == one["steps"]
    assert any(one["repeated"] for one in unique)
    line = "decode.unique_rows: repeated rows are left out, but staggered decoding does not end an answer whose rows "
    assert [record.getMessage() for record in caplog.records if "unique" in record.getMessage()] == [f"{line}repeat"]


@dataclasses.dataclass(frozen=True)
class Modest(Staggered):
    """A method that can be served, and has no other abilities."""

    name = "modest"
    can = frozenset({"serve"})


@pytest.mark.parametrize(
    "more, line",
    [
        ({"temperature": 0.5}, "temperature: found 0.5 with modest decoding"),
        ({"logprobs": 0}, "logprobs: found some with modest decoding, which does not return log-probabilities"),
        ({"method": "pipelined"}, "grid.delay: found 0 without grid.row_names; expected the names"),
    ],
)
def test_unsupported_request_is_refused(more: dict[str, Any], line: str) -> None:
    """The error names the setting; settings that are invalid for any method are refused immediately."""
    made = Generator(Config(model=FEW_WORDS, method=Modest(width=5), grid=GridConfig(delay=0)), PARAMS, None)
    engine = Engine(made, places=1, queue=1)
    limits = app.Limits(body=4000, seconds=20, answers=1)
    client = TestClient(
        app.make_app(app.Service(made, engine, name="tiny", limits=limits)), raise_server_exceptions=False
    )
    reply = client.post("/v1/completions", json={"prompt": [5, 1], **more})
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith(line), reply.text
    assert client.post("/v1/completions", json={"prompt": [5, 1], "max_tokens": 1}).status_code == 200
    engine.close(drain=False, seconds=9)


def test_model_list_works_with_any_settings() -> None:
    """The list has the methods that can be served; an engine would refuse these settings before the server starts."""
    made = Generator(change(CONFIG, decode={"beams": 2, "scores": False}), PARAMS, None)
    limits = app.Limits(body=4000, seconds=20, answers=1)
    engine: Any = ScriptedEngine(made)
    client = TestClient(
        app.make_app(app.Service(made, engine, name="tiny", limits=limits)), raise_server_exceptions=False
    )
    assert client.get("/v1/models/tiny").json()["methods"] == []
    assert methods.methods_with(CONFIG, "serve").keys() == {"pipelined", "sequential", "staggered"}


def test_row_truncated_by_its_width_has_no_end(generator: Generator) -> None:
    """Other rows end with their end token."""
    cut = 0
    for text in sources(20):
        *events, record = generator.stream_rows(text)
        lengths = dict.fromkeys((e.row for e in events if isinstance(e, RowEvent)), 0)
        for event in events:
            assert isinstance(event, RowEvent)
            lengths[event.row] += not event.done
        ended = {e.row for e in events if isinstance(e, RowEvent) and e.done}
        assert not {row for row in ended if lengths[row] == METHOD.width}
        full = METHOD.width in lengths.values()
        assert not isinstance(record, RowEvent) and (record["truncated"] == "max_length") == full
        cut += full
    assert 0 < cut < 20


@pytest.mark.parametrize("objective", ["pipelined", "none"])
def test_a_drafter_is_trained_as_the_model(objective: str) -> None:
    """The loss is the method's, with any train.method."""
    drafted = type("Drafted", (Modest,), {"name": "drafted", "__module__": __name__})
    config = change(Config(model=FEW_WORDS, method=drafted(rows=2)), train={"method": objective})
    small = OpenDrafter(FromModel(), "there", config)
    borrower: Any = SimpleNamespace(drafter=FromModel())
    check_drafter(small, borrower, drafted(rows=2))
    with pytest.raises(UserError, match=r"there: found a T5 trained with method\.rows = 2; expected 3$"):
        check_drafter(small, borrower, drafted(rows=3))
    with pytest.raises(UserError, match=r"there: found a T5 trained for drafted decoding; expected modest$"):
        check_drafter(small, borrower, Modest())


def test_a_report_has_its_name(generator: Generator) -> None:
    report = Report()
    given = [Source(0, text) for text in sources(3)]
    records = list(generator.stream(given, method=None, batch_size=2, report=report))
    found = report.summary(generator.method())
    assert found["staggered_steps"] == sum(record["steps"] for record in records) / 3
    assert "pipelined_steps" not in found and found["sequential_steps"] > 0


@pytest.mark.slow
def test_streamed_and_served_answers_equal_decode(generator: Generator) -> None:
    texts = sources(5)
    expected = generator.decode(texts)
    for text, record in zip(texts, expected, strict=True):
        *events, last = generator.stream_rows(text)
        assert_same(last, record)
        rows: dict[int, list[int]] = {}
        for event in events:
            assert isinstance(event, RowEvent)
            if event.done:
                assert event.token == STOP
            else:
                rows.setdefault(event.row, []).append(event.token)
        assert [rows[i] for i in sorted(rows)] == record["row_ids"]
    engine = Engine(generator, places=2, queue=9)
    answers = [engine.submit(Request(Source(i, text), "staggered")) for i, text in enumerate(texts)]
    for answer, record in zip(answers, expected, strict=True):
        assert_same(list(answer.events())[-1], record)
    engine.close(drain=False, seconds=9)


def test_former_attribute_names_of_a_method_work_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning) as caught:

        class Former(NamedRows):
            rival = "staggered"

            def given(self, given: RowPrefixes) -> RowPrefixes:
                return super().given(given)._replace(where="Former")

            def exist(self, rows: int, most: int | None) -> int:
                return super().exist(rows, most) + 10

            def rival_steps(self, lengths: Any, *, separator: int) -> int:
                return super().rival_steps(lengths, separator=separator) + 100

    assert [str(warning.message).partition(";")[0] for warning in caught] == [
        "Former.given is now add_prefixes",
        "Former.exist is now count_rows",
        "Former.rival is now baseline",
        "Former.rival_steps is now baseline_steps",
    ]
    assert all(warning.filename == __file__ for warning in caught)
    method = Former(GridConfig(delay=0))
    assert method.baseline == "staggered"
    assert method.add_prefixes(RowPrefixes(("a", "b"), 2, "a test")) == RowPrefixes(("a", "b"), 2, "Former")
    assert method.count_rows(5, 2) == 12
    assert method.baseline_steps([3, 4], separator=1) == 109


def test_loss_of_the_method_is_used() -> None:
    """The loss of a batch, compared with NumPy."""
    tokenizer = demo.DemoTask().tokenizer()
    encoded = [encode_example(e, tokenizer, RUN, MODEL) for e in demo.examples("train")[:5]]
    assert encoded[0].target.targets.shape[1:] == (2,)
    params = oracle.random_params(MODEL, np.random.default_rng(3))
    arrays = collate(encoded).arrays
    compute = jax.jit(lambda p: batch_loss(t5.T5(MODEL), p, jax.tree.map(jnp.asarray, arrays), None, METHOD.loss))
    total, count = compute(params)
    expected, slots = 0.0, 0
    for one in encoded:
        seen = oracle.encode(params, MODEL, one.source.tolist())
        rows = [one.target.inputs[one.target.row == i].tolist() for i in range(METHOD.rows)]
        logits = np.concatenate(oracle.grid_logits(params, MODEL, seen, rows, 2))
        log_probs = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        log_probs -= logits.max(1, keepdims=True)
        for slot, (right, other) in enumerate(one.target.targets.tolist()):
            expected -= np.log(np.exp(log_probs[slot, right]) + METHOD.second * np.exp(log_probs[slot, other]))
            slots += 1
    assert count == slots and float(total) == pytest.approx(expected, rel=1e-4)
    assert jnp.isfinite(total) and longest(RUN)[1] >= max(len(e.target.inputs) for e in encoded)


class Apart(Pipelined):
    """Algorithm 1 with larger distances of rows."""

    def position(self, row: Any, time: Any) -> Any:
        return 5 * row + time


@dataclasses.dataclass(frozen=True)
class RowsApart(Method):
    """A method whose strategy has custom positions."""

    name = "rows_apart"
    can = frozenset({"draft"})

    def target(self, rows: Any, spells: Any, ids: Any, *, most: int, where: str) -> Target:
        """The layout of the pipelined method."""
        return methods.PipelinedMethod(GridConfig(delay=1)).target(rows, spells, ids, most=most, where=where)

    def strategy(self, ids: Any) -> Apart:
        return Apart(delay=1, time_max=12, sub_max=4, bos=ids.bos, eos=ids.eos)


def farther(cells: Any) -> list[list[int]]:
    """The distances of `Apart`."""
    return [[5 * abs(i - k) + abs(t - u) for k, u in cells] for i, t in cells]


@pytest.mark.slow
def test_custom_positions_decode_and_train() -> None:
    """The fast decoder, drafts, and the loss of training all equal plain lists."""
    params = oracle.random_params(FEW_WORDS, np.random.default_rng(4))
    generator = Generator(Config(model=FEW_WORDS, method=RowsApart()), params, None)
    texts, others = sources(8), 0
    found = [generator.decode(texts, batch_size=4, draft=draft) for draft in ("none", "source")]
    for i, text in enumerate(texts):
        encoded, margins = oracle.encode(params, FEW_WORDS, text), list[float]()
        says = oracle.grid_next_tokens(params, FEW_WORDS, encoded, 1, margins=margins, distances=farther)
        expected = oracle.algorithm1(says, delay=1, time_max=12, sub_max=4, stop="empty_row").rows
        plain = oracle.grid_next_tokens(params, FEW_WORDS, encoded, 1)
        others += expected != oracle.algorithm1(plain, delay=1, time_max=12, sub_max=4, stop="empty_row").rows
        if min(margins) > 1e-4:
            assert [records[i]["row_ids"] for records in found] == [expected, expected]
    assert others > 2
    config, tokenizer = dataclasses.replace(RUN_ON_ONE, method=RowsApart()), demo.DemoTask().tokenizer()
    params = oracle.random_params(MODEL, np.random.default_rng(3))
    (example,) = demo.examples("train")[:1]
    arrays = collate([encode_example(example, tokenizer, config, MODEL)]).arrays
    total, count = Trainer(change(config, train={"batch_size": 1, "accumulate": 1})).dev_loss(params, arrays)
    rows, source = [tokenizer.encode(row) for row in example.targets], [*tokenizer.encode(example.source), 1]
    expected_loss = oracle.teacher_forced_loss(params, MODEL, source, rows, 1, distances=farther)
    assert float(total / count) == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.slow
def test_custom_method_is_trained_resumed_and_opened(tmp_path: Path) -> None:
    """The run has its method wherever it is opened; a resumed run has the weights of an uninterrupted run."""
    whole = pipejax.fit(RUN, tmp_path / "whole")
    half = dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, steps=2))
    pipejax.fit(half, tmp_path / "half")
    pipejax.fit(RUN, tmp_path / "half")
    ends = [metrics(tmp_path / name)[-1]["params_fp"] for name in ("whole", "half")]
    assert ends[0] == ends[1]
    described = {"class": NAME, "rows": 3, "width": 5, "second": 0.25}
    assert json.loads((whole / "config.json").read_text())["method"] == described
    opened = pipejax.load(whole)
    assert opened.default_method == "staggered" and opened.config.method == METHOD
    evaluated = [line for line in metrics(whole) if line["event"] == "evaluation"]
    assert evaluated and all("staggered_steps" in line for line in evaluated)
    other = pipejax.load(whole, method=Staggered(rows=2, width=5))
    assert len(other.decode(["the baker smiled ."])[0]["row_ids"]) <= 2

    # In bulk and as a program, only with the run.
    (tmp_path / "in.jsonl").write_text('{"source": "the baker smiled ."}\n')
    found = workers.result_or_error(
        workers.describe, workers.BulkWork(str(whole), str(tmp_path / "out"), str(tmp_path))
    )
    assert found["settings"]["--method"] == "staggered" and not found["doubts"]
    assert found["settings"]["method.rows"] == 3
    export(whole, tmp_path / "exported", platforms=["cpu"], batch=1, length=16)
    assert (tmp_path / "exported" / "staggered-cpu.jax").is_file()

    record = tmp_path / "record.jsonl"
    record.write_text(json.dumps(opened.decode(["the baker smiled ."])[0]))
    with pytest.raises(UserError, match=r"^.*record\.jsonl.*: found a record of .* with staggered decoding"):
        picture([str(record), "--checkpoint", str(whole), "--output", str(tmp_path / "x.svg")])


# Configs.


def test_config_names_a_custom_method_and_its_settings(tmp_path: Path) -> None:
    found = config_lib.override(Config(), [f"method={NAME}", "method.rows=7"])
    assert found.method == Staggered(rows=7)
    assert config_lib.from_json(config_lib.to_json(found), where="x") == found
    assert config_lib.override(found, ["method="]).method is None
    file = tmp_path / "mine.py"
    file.write_text(f"from pipejax.config import Config\nconfig = Config(method='{NAME}')\n")
    assert config_lib.load(file).method == Staggered()
    assert methods.names(found) == ("pipelined", "sequential", "staggered")


@pytest.mark.parametrize(
    "setting, line",
    [
        ("method.rows=10", "--set: method.rows: found 10; expected at most 9"),
        ("method.row=1", "method.row: unknown key"),
        ("method=nowhere:Class", "method: found 'nowhere:Class', which cannot be imported (ModuleNotFoundError"),
        ("method=support.staggered:Other", "method: found 'support.staggered:Other', which cannot be imported (Attrib"),
    ],
)
def test_settings_of_a_custom_method_are_checked(setting: str, line: str) -> None:
    assignments = [setting] if setting.startswith("method=") else [f"method={NAME}", setting]
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        config_lib.override(Config(), assignments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose class is in a file in the same folder, which is no longer imported. No test changes them."""
    root = tmp_path_factory.mktemp("saved")
    (root / "brought.py").write_text(
        "from support.staggered import Staggered\nclass Brought(Staggered):\n    name = 'brought'\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)
        config = dataclasses.replace(RUN, model=MODEL, grid=GridConfig(), decode=DecodeConfig())
        config = config_lib.override(config, [BROUGHT, "method.rows=2"])
        checkpoint.save_params(root / "run", config, oracle.random_params(MODEL, np.random.default_rng(1)))
    del sys.modules["brought"]
    return root


@pytest.fixture
def run(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs a command with this run, in a process that starts in its directory."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "brought", None)  # so that it is removed at the end
    del sys.modules["brought"]
    monkeypatch.chdir(saved)
    return saved / "run"


def test_opening_a_run_imports_no_code(run: Path, tmp_path: Path) -> None:
    """The caller may import the class; operations without the class work."""
    places = [*sys.path]
    with pytest.raises(UserError, match=r"^method: found brought:Brought, with which .* --set method=brought:Brought"):
        pipejax.load(run)
    with pytest.raises(UserError, match=r"^method: found brought:Brought, with which"):
        pipejax.load(run, overrides=["method.rows=3"])
    quantize(run, tmp_path / "small")
    assert open_run(tmp_path / "small").config.method == open_run(run).config.method
    (tmp_path / "record.jsonl").write_text('{"id": 0, "row_ids": [[5]], "steps": 1}')
    with pytest.raises(UserError, match=r"with brought:Brought decoding, which does not write rows .*; expected none$"):
        picture([str(tmp_path / "record.jsonl"), "--checkpoint", str(run), "--output", str(tmp_path / "x.svg")])
    assert "brought" not in sys.modules and sys.path == places
    assert config_lib.load(run / "config.json").method.rows == 2  # a config that the user names


def test_named_class_takes_the_settings_of_the_run(
    run: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # like a process of a cluster
    described = workers.describe(workers.BulkWork(str(run), str(tmp_path), str(run.parent), overrides=(BROUGHT,)))
    assert described["settings"]["method.rows"] == 2 and not described["doubts"]
    opened = pipejax.load(run, overrides=[BROUGHT])
    assert opened.config.method.rows == 2 and opened.default_method == "brought"
    assert str(run.parent) in sys.path  # for later imports of the module
    opened.decode([[5, 1]])
    assert not caplog.records
    settings = settings_of(opened, "brought", [])
    for key, value in config_lib.described(opened.config.method).items():
        assert settings[f"method.{key}"] == value
    with pytest.raises(UserError, match=r"^brought:Brought: method\.row: unknown key"):
        config_lib.made({"class": "brought:Brought", "row": 1})


@pytest.mark.parametrize("by_name", [False, True])
def test_changed_method_settings_are_logged_once(run: Path, caplog: pytest.LogCaptureFixture, by_name: bool) -> None:
    """There is one line for each changed setting."""
    if by_name:
        other = pipejax.load(run, overrides=[BROUGHT, "method.rows=4"])
    else:
        other = pipejax.load(run, method=config_lib.files.find_class("brought:Brought")(rows=4))
    for _ in range(2):
        other.make_strategy()
    (told,) = caplog.records
    assert told.getMessage().startswith("method.rows: found 4, but these weights were trained with 2; ")


def test_changed_method_class_is_logged(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Settings of equal names are compared without the class; there is no line about the other method."""
    assert pipejax.load(run, method=Staggered()).decode([[5, 1]])[0]["row_ids"] is not None
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("these weights were trained with the brought:Brought method; staggered decoding will")
    assert second.startswith("method.rows: found 3, but these weights were trained with 2; ")


def test_name_in_use_is_refused() -> None:
    class Pipelined(Staggered):
        name = "pipelined"

    with pytest.raises(UserError, match=r"^method: found Pipelined with the name 'pipelined'"):
        methods.trained(Config(method=Pipelined()))


def test_targets_are_cut_to_its_rows() -> None:
    tokenizer = demo.DemoTask().tokenizer()
    example = Example("x", "the baker smiled .", ("roses",) * 5)
    assert encode_example(example, tokenizer, RUN, MODEL).target_was_cut
    batches = TrainingBatches(demo.examples("train")[:64], tokenizer, RUN, MODEL)
    assert batches[0].arrays["targets"].shape[2:] == (2,)


@dataclasses.dataclass(frozen=True)
class Strict(Modest):
    """A method with a setting without a default, which accepts few values."""

    name = "strict"
    words: str = dataclasses.field(kw_only=True)

    def __post_init__(self) -> None:
        if self.rows > 3:
            raise ValueError("many rows")


class Broken(Modest):
    """A method that cannot be created."""

    def __init__(self) -> None:
        raise OSError("no such dictionary")


HERE = __name__


@pytest.mark.parametrize(
    "overrides, line",
    [
        ({"method": Staggered}, "--set: method: found <class 'support.staggered.Staggered'>; expected an object"),
        ({"method": 3}, "--set: method: found 3; expected an object"),
        ([f"method={HERE}:Strict"], f"{HERE}:Strict: method.words: missing"),
        ([f"method={HERE}:Broken"], f"{HERE}:Broken: method: cannot be made (OSError: no such dictionary)"),
        ({"method": Strict(words="x"), "method.rows": 4}, "method.rows: found 4; Strict rejects it: many rows"),
        ({"method.rows": 4}, "method.rows: found no method in this config"),
        ({"method": change}, "--set: method: found <function change"),
    ],
)
def test_invalid_method_class_raises_one_line(overrides: Any, line: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        config_lib.override(Config(), overrides)


def test_class_instead_of_an_object_raises_one_line(run: Path, tmp_path: Path) -> None:
    for call in (
        lambda: pipejax.load(run, method=Staggered),  # type: ignore[arg-type]
        lambda: pipejax.fit(RUN, tmp_path / "new", method=Strict),  # type: ignore[arg-type]
        lambda: methods.trained(Config(method=Strict)),
    ):
        with pytest.raises(UserError, match=r"method: found <class '.*'>; expected an object"):
            call()
    with pytest.raises(UserError, match=r"^method: found .*; expected settings"):
        config_lib.to_json(Config(method=Strict(words=b"x")))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^x: method\.name: unknown key"):
        config_lib.files._build(Strict, {"name": "x"}, "method.", "x")


def test_rows_are_not_taught_by_another_method() -> None:
    saved = change(RUN, train={"method": "sequential"}, data={"separator": " ; "})
    saved = dataclasses.replace(saved, method=None)
    with pytest.raises(UserError, match=r"^--set: method\.class cannot be changed when rows are taught"):
        lesson(saved, "there", [f"method={NAME}"])


def test_custom_method_is_named_with_its_class(run: Path, tmp_path: Path) -> None:
    """Without the class the name is unknown; with the class, the run refuses another name."""
    (tmp_path / "in.jsonl").write_text('{"source_ids": [5, 1]}\n')
    places = ["--checkpoint", str(run), "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    with pytest.raises(UserError, match=r"^--method: found 'brought'; expected one of pipelined, sequential$"):
        decode([*places, "--method", "brought"])
    with pytest.raises(UserError, match=r"^method: found 'brougt'; expected one of .* \(did you mean brought\?\)$"):
        decode([*places, "--method", "brougt", "--set", BROUGHT])
    assert decode([*places, "--method", "brought", "--set", BROUGHT]) == 0


def test_export_of_a_custom_method_records_its_class(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^method: found modest; expected another value, since modest decoding"):
        export(run, tmp_path / "out", platforms=["cpu"], overrides=[f"method={HERE}:Modest"])
    export(run, tmp_path / "out", platforms=["cpu"], batch=1, length=16, overrides=[BROUGHT])
    facts = json.loads((tmp_path / "out" / "export.json").read_text())
    assert facts["method"] == {"class": "brought:Brought", "rows": 2, "width": 6, "second": 0.25}


def test_converted_run_records_its_method(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files have no statements that hold only for pipejax's rows. The class is not needed."""
    huggingface.to_hf(run, tmp_path / "hf")
    assert "transformers' generate does not support brought:Brought decoding" in capsys.readouterr().err
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "--set method=brought:Brought" in card and "first row" not in card and "joins rows" not in card
    assert "max_new_tokens" not in json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    huggingface.from_hf(tmp_path / "hf", tmp_path / "back")
    assert open_run(tmp_path / "back").config.method == open_run(run).config.method
    checkpoint.save_params(tmp_path / "ours", dataclasses.replace(RUN, model=MODEL, method=None), open_params(run))
    huggingface.to_hf(tmp_path / "ours", tmp_path / "plain")
    assert "method" not in json.loads((tmp_path / "plain" / "pipejax.json").read_text())["config"]  # as ever


def open_params(directory: Path) -> Any:
    return open_run(directory).items["params"]


# The page.


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A config with the method of the page, in a file as on the page."""
    text = (Path(__file__).parent.parent / "docs" / "methods.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    assert len(code.splitlines()) <= 80
    (tmp_path / "last_first.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "last_first", raising=False)
    importlib.invalidate_caches()
    name = "last_first:LastFirst"
    return config_lib.override(dataclasses.replace(RUN, method=None), [f"method={name}", "method.delay=2"])


def test_method_of_the_page_writes_reversed_rows(page: Config) -> None:
    """In training and decoding it equals pipejax's method for the same rows in reverse order."""
    config = page
    tokenizer = demo.DemoTask().tokenizer()
    for example in demo.examples("train")[:20]:
        turned = dataclasses.replace(example, targets=example.targets[::-1])
        plain = dataclasses.replace(config, method=None, grid=GridConfig(delay=2))
        ours, own = encode_example(turned, tokenizer, plain, MODEL), encode_example(example, tokenizer, config, MODEL)
        assert all(np.array_equal(*pair) for pair in zip(ours.target, own.target, strict=True))
    params = oracle.random_params(FEW_WORDS, np.random.default_rng(7))
    config = dataclasses.replace(config, model=FEW_WORDS)
    grid = GridConfig(delay=2, time_max=32, sub_max=8)
    on_grid = Generator(Config(model=FEW_WORDS, grid=grid), params, None)
    found = Generator(config, params, None).decode(sources(8))
    for record, turned_round in zip(found, on_grid.decode(sources(8)), strict=True):
        assert record["row_ids"] == turned_round["row_ids"][::-1] and record["steps"] == turned_round["steps"]
    for record in Generator(config, params, None).decode(sources(8), draft="source", trace=True):
        gains = collections.Counter[int]()
        for asked in itertools.chain(*record["trace"]):
            gains[asked.row] += asked.written
        rows = len(record["row_ids"])
        ends = [gains[row] - len(ids) for row, ids in enumerate(record["row_ids"])]  # rows end with one more token
        assert all(0 <= end <= 1 for end in ends) and all(gains[row] <= 1 for row in gains if row >= rows)
    assert max(len(record["row_ids"]) for record in found) > 1


@pytest.mark.long
def test_the_method_of_the_page_is_trained(page: Config, tmp_path: Path) -> None:
    run = pipejax.fit(page, tmp_path / "run")
    assert pipejax.load(run, overrides={"method.rows": 2}).decode(["the baker smiled ."], draft="source")
