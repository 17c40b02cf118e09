"""The evaluation command: its scores equal the scores of the predictions that it keeps, and its groups add up."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipejax import methods, metrics
from pipejax.apps import demo
from pipejax.apps.scoring import metrics_command as command
from pipejax.config import Config, DataConfig, GridConfig
from pipejax.data import make_task
from pipejax.data.examples import Example, fingerprint
from pipejax.inference.loading import load
from pipejax.inference.programs import CPU_BATCH
from pipejax.offline import evaluation
from pipejax.system.errors import UserError
from pipejax.training.loop import fit
from support import schemas
from support.tiny import RUN_ON_ONE as CONFIG
from support.tiny import change

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory, compiled_once):
    directory = tmp_path_factory.mktemp("evaluate") / "run"
    assert fit(change(CONFIG, train={"steps": 3, "evaluate_every": 100}), directory) == 0
    return directory


@pytest.mark.slow
def test_scores_equal_scores_of_the_kept_predictions(run, tmp_path, capsys):
    out, kept = tmp_path / "out.json", tmp_path / "kept.jsonl"
    flags = [
        "--checkpoint",
        str(run),
        "--task",
        "demo",
        "--limit",
        "12",
        "--json",
        str(out),
        "--predictions",
        str(kept),
    ]
    assert evaluation.main(flags) == 0
    assert capsys.readouterr().out == ""
    result, lines = json.loads(out.read_text()), [json.loads(line) for line in kept.read_text().splitlines()]
    assert [line["id"] for line in lines] == [e.id for e in demo.examples("test")[:12]]
    command = [sys.executable, "-m", "pipejax", "metrics", "exact", str(kept)]
    scores = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert {key: result[key] for key in scores} == scores
    assert result["steps"] == sum(line["steps"] for line in lines) / 12
    assert result["examples"] == sum(group["documents"] for group in result["by_rows"]) == 12
    assert [group["rows"] for group in result["by_rows"]] == sorted({len(line["gold"]) for line in lines})
    assert sum(g["seconds"] * g["documents"] for g in result["by_rows"]) == pytest.approx(
        12 / result["examples_per_second"]
    )
    assert result["peak_host_bytes"] > 10_000_000


def test_the_same_text_scores_the_same_from_either_decoder():
    """A sequential answer of sentences is one text, a pipelined answer has rows: ROUGE-Lsum must be equal for both."""
    said = ["The cat sat on the mat.", "It was a sunny day in the garden.", "Nobody saw the dog."]
    gold = ("A dog sat on the mat.", "The day was sunny.", "Nobody was in the garden.")
    examples = [Example("a", "summarize: something", gold)]
    data = DataConfig(task="jsonl", separator=" ", metric="rouge")

    def scores(rows, strategy):
        def stream(sources, *, report, **_):
            report.examples, report.steps = 1, 9
            yield {"id": "a", "rows": rows, "text": " ".join(said), "row_ids": [], "steps": 9, "truncated": None}

        method = partial(methods.make, config=Config(data=data))
        generator: Any = SimpleNamespace(
            config=Config(data=data),
            stream=stream,
            default_method=strategy,
            method=method,
            answer_format=None,
            tokenizer=None,
        )
        return evaluation.evaluate(generator, examples, batch_size=2)[0]

    joined, parted = scores([" ".join(said)], "sequential"), scores(said, "pipelined")
    keys = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    assert [joined[key] for key in keys] == [parted[key] for key in keys]
    by_hand = metrics.score("rouge", [""], [gold], [said])["rougeLsum"]
    assert joined["rougeLsum"] == by_hand != metrics.score("rouge", [""], [gold], [[" ".join(said)]])["rougeLsum"]


@pytest.mark.slow
def test_indistinguishable_rows_give_no_step_ratio(run, tmp_path):
    out = tmp_path / "out.json"
    flags = ["--checkpoint", str(run), "--limit", "3", "--batch-size", "3", "--json", str(out)]
    evaluation.main([*flags, "--method", "sequential", "--set", "data.separator= "])
    found = json.loads(out.read_text())
    assert found["pipelined_steps"] is None and found["step_ratio"] is None and found["sequential_steps"] > 0
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert (found["step"], found["params_fp"], found["limit"]) == (3, last["params_fp"], 3)


@pytest.mark.slow
def test_full_disk_does_not_affect_the_other_file(run, tmp_path, capsys):
    kept = tmp_path / "predictions.jsonl"
    flags = ["--checkpoint", str(run), "--limit", "3", "--json", "/dev/full", "--predictions", str(kept)]
    with pytest.raises(UserError, match=r"--json /dev/full: cannot be written \(No space left"):
        evaluation.main(flags)
    assert len(kept.read_text().splitlines()) == 3
    assert json.loads(capsys.readouterr().out)["examples"] == 3  # the output was standard output
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


@pytest.mark.slow
def test_batches_change_no_score(run, tmp_path):
    results = []
    for size in ("1", "50"):
        out = tmp_path / f"{size}.json"
        evaluation.main(["--checkpoint", str(run), "--limit", "7", "--batch-size", size, "--json", str(out)])
        results.append(json.loads(out.read_text()))
    assert all(results[0][key] == result[key] for result in results for key in ("em_f1", "pm_f1", "steps", "truncated"))
    assert [result["batch_size"] for result in results] == [1, 7]  # the settings in use
    assert load(run).batch_size_for(50) == CPU_BATCH
    assert "seconds" not in results[1]["by_rows"][0]


@pytest.mark.slow
def test_evaluation_reports_that_it_decodes_one_sample(run, tmp_path, capsys):
    for more in ([], ["--set", "decode.samples=3", "--set", "decode.temperature=1"]):
        flags = ["--checkpoint", str(run), "--limit", "2", "--json", str(tmp_path / "out.json"), *more]
        assert evaluation.main(flags) == 0
        line = "decode.samples: found 3; one answer of each example is decoded and scored"
        assert (line in capsys.readouterr().err) == bool(more)
        assert json.loads((tmp_path / "out.json").read_text())["examples"] == 2


def test_tables_bad_lines_and_parts_of_a_file(run, tmp_path, said):
    """A part of one file is scored, and a table with some bad rows."""
    table, out = tmp_path / "test.csv", tmp_path / "out.json"
    notes = [demo.examples("test")[i] for i in range(20)]
    table.write_text("source,targets\n" + "".join(f"{e.source},{'|'.join(e.targets)}\n" for e in notes) + "the baker\n")
    flags = ["--checkpoint", str(run), "--task", "csv", "--batch-size", "8", "--json", str(out)]
    flags += [x for s in ("data.rows=delimiter", "data.delimiter=|") for x in ("--set", s)]
    with pytest.raises(UserError, match=r"test\.csv:22: found 1 column; expected 2"):
        evaluation.main([*flags, "--set", f"data.test={table}"])
    evaluation.main([*flags, "--set", f"data.test={table}", "--skip-bad"])
    assert json.loads(out.read_text())["examples"] == 20
    parted = [*flags, "--skip-bad", "--set", f"data.train={table}", "--set", "data.split=0.5,0,0.5"]
    evaluation.main(parted)
    count = json.loads(out.read_text())["examples"]
    assert 0 < count < 20 and any(f": {20 - count} train, {count} test" in line for line in said)
    with pytest.raises(UserError, match=r"data\.dev: found no file"):
        evaluation.main([*parted, "--split", "dev"])


@pytest.mark.parametrize(
    "learned, others, told",
    [("the same", [], False), ("", [], False), ("others", [], True), ("others", ["data.train={}.jsonl"], False)],
)
def test_evaluation_warns_if_examples_may_have_been_trained_on(learned, others, told, tmp_path, monkeypatch, capsys):
    """The split of a file differs from the split of the run, because the file or the rule has changed."""
    texts = "".join(json.dumps({"source": f"text {i}", "targets": ["x"]}) + "\n" for i in range(40))
    for name in ("a", "a.jsonl"):
        (tmp_path / name).write_text(texts)
    generator = schemas.generator()
    generator.config = change(generator.config, data={"train": str(tmp_path / "a"), "split": "0.5,0,0.5"})
    generator.trained, generator.learned = generator.config, learned
    if learned == "the same":
        generator.learned = fingerprint(make_task(generator.config.data).examples("train"), None)
    monkeypatch.setattr(evaluation, "load", lambda *args, **settings: generator)
    monkeypatch.setattr(evaluation, "evaluate", None)
    flags = [f"--set={other.format(tmp_path / 'a')}" for other in others]
    with pytest.raises(TypeError):
        evaluation.main(["--checkpoint", "x", "--json", str(tmp_path / "out.json"), *flags])
    assert ("found training examples that differ from the run's" in capsys.readouterr().err) == told


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--task", "nonsense"], r"data\.task: found 'nonsense'; expected one of"),
        (["--limit", "0"], r"--limit: found 0; expected at least 1"),
        (["--task", "jsonl"], r"data\.test: found no file; expected one, as in --set data\.test=FILE, or "),
        (["--json", "/nowhere/out.json"], r"--json /nowhere/out\.json: found no directory /nowhere; expected an exist"),
        (["--predictions", "/"], r"--predictions /: found a directory; expected a file"),
        (["--task", "jsonl", "--set", "data.test=/nowhere.jsonl"], r"/nowhere\.jsonl: no such file"),
        (
            ["--set", "data.task=none"],
            r"has no task.*--task jsonl --set",
        ),
        (["--set", "data.test=/nowhere.jsonl"], r"data\.test: found a file; expected none, as demo has its own"),
    ],
)
def test_invalid_flags_of_evaluate_are_refused(run, flags, message):
    with pytest.raises(UserError, match=message):
        evaluation.main(["--checkpoint", str(run), *flags])


class Canned:
    """A generator with given answers."""

    default_method = "pipelined"

    def __init__(self, config, *answers, schema=None, tokenizer=None):
        self.config, self.answers, self.answer_format, self.tokenizer = config, answers, schema, tokenizer

    def method(self, name):
        return methods.make(name, self.config)

    def stream(self, sources, *, report, **rest):
        report.examples += len(self.answers)
        for rows in self.answers:
            yield {"rows": rows, "text": "", "row_ids": [], "steps": 1, "calls": 1, "truncated": None}


def evaluated(generator: Any, *examples: Example) -> dict[str, Any]:
    """The scores of an evaluation, whose only group by rows must have the same scores."""
    result, records = evaluation.evaluate(generator, examples)
    name = result["metric"]
    headline = metrics.HEADLINES[name]
    (group,) = evaluation.by_rows(generator, examples, records, name)
    assert group[headline] == result[headline]
    return result


def kept_scores(generator: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], *examples: Example) -> Any:
    """The scores of `pipejax metrics` on the kept predictions."""
    result, records = evaluation.evaluate(generator, examples)
    (tmp_path / "kept.jsonl").write_text(evaluation._predictions(generator, examples, records))
    assert command.main([result["metric"], str(tmp_path / "kept.jsonl")]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("task", ["kp20k", "kptimes"])
def test_presence_is_judged_in_title_and_abstract_alone(task, tmp_path, capsys):
    """The published rule excludes the words of the template."""
    published: Any = make_task(DataConfig(task=task))
    raw = {
        "id": b"1",
        "title": b"on deep",
        "abstract": b"nets of graphs",
        "keyphrases": [b"title", b"context", b"deep nets"],
    }
    example = published._example("test", 0, raw)
    assert example.source == "Title: on deep Context: nets of graphs"
    rows = ["title:", "deep nets", "title", "deep context: nets"]
    generator = Canned(Config(data=DataConfig(task=task)), rows)
    expected = metrics.score("keyphrases_kp20k", ["on deep nets of graphs"], [example.targets], [rows])
    assert expected["present_f1@M"] == 100 and expected["absent_f1@M"] > 0
    for found in (evaluated(generator, example), kept_scores(generator, tmp_path, capsys, example)):
        assert {key: found[key] for key in expected} == expected


def test_presence_in_the_fields_of_own_records(tmp_path, capsys):
    data = DataConfig(task="jsonl", metric="keyphrases", source_template="Summary of {b}, please: {a}")
    task: Any = make_task(data)
    (example,) = task.examples_of([("x:1", {"a": "deep", "b": "graphs", "targets": ["summary", "deep"]})])
    assert (example.source, example.document) == ("Summary of graphs, please: deep", "graphs deep")
    generator = Canned(Config(data=data), ["deep", "graphs deep"])
    found = evaluated(generator, example)
    assert (found["present_f1@M"], found["absent_f1@M"]) == (pytest.approx(200 / 3), 0)
    assert kept_scores(generator, tmp_path, capsys, example)["present_f1@M"] == found["present_f1@M"]
    plain: Any = make_task(DataConfig(task="jsonl", source_template=data.source_template))
    assert plain.examples_of([("x:1", {"a": "d", "b": "g", "targets": ["s"]})])[0].document == ""  # none is needed


def test_values_of_named_rows_are_compared_by_type(tmp_path, capsys):
    config = Config(grid=GridConfig(row_names=("price:", "maker:")), data=DataConfig(task="jsonl"))
    example = Example("a", "x", ("price: 1.50", "maker: 1.0 Ltd"))
    generator = Canned(config, ["price: 1.5", "maker: 1 Ltd"])
    assert evaluated(generator, example)["em_f1"] == 50  # of the two columns, the price
    assert kept_scores(generator, tmp_path, capsys, example)["em_f1"] == 50
    assert evaluated(Canned(Config(data=config.data), *generator.answers), example)["em_f1"] == 0


def test_values_under_a_schema_are_compared_by_its_types():
    """A version is a text in the schema, even if it looks like a number."""
    names = {1: "version:", 2: "pages:"}
    kinds = ((1, str), (2, json.loads))
    schema = SimpleNamespace(rows=[SimpleNamespace(beginning=(i,), value=kind) for i, kind in kinds])
    tokenizer = SimpleNamespace(decode=lambda ids: names[ids[0]], change=lambda text: None)
    config = Config(grid=GridConfig(row_names=("version:",)), data=DataConfig(task="jsonl"))
    generator = Canned(config, ["version: 1.1", "pages: 3.0"], schema=schema, tokenizer=tokenizer)
    assert evaluated(generator, Example("a", "x", ("version: 1.10", "pages: 3")))["em_f1"] == 50
    assert evaluated(generator, Example("a", "x", ("version: 1.1", "pages: three")))["em_f1"] == 50


# Rows that no answer can have.


class CannedText(Canned):
    """A generator whose answer is always one text, which the separator splits into rows."""

    default_method = "sequential"

    def stream(self, sources, *, report, **rest):
        for record in super().stream(sources, report=report, **rest):
            text, rows = self.method("sequential").read([self.config.data.separator.join(record["rows"])], " ; ")
            yield {**record, "text": text, "rows": rows}


@pytest.mark.parametrize(
    "kind, separator, rows, said_so, score",
    [
        (CannedText, " ; ", ("baker ; clerk", "river"), "'baker ; clerk' comes back as 'baker'", 40),
        (CannedText, " ; ", ("baker", "clerk", "; river"), "'; river' comes back as 'river'", 200 / 3),
        (CannedText, " ; ", ("baker ;", "clerk"), "'baker ;' comes back as 'baker'", 50),
        (CannedText, " ; ", ("baker", "clerk;river"), "", 100),
        (Canned, " ; ", ("baker ; clerk", "river"), "", 100),  # on the grid a row is a row
    ],
)
def test_evaluation_reports_rows_with_separator(
    kind: Any, separator: str, rows: tuple[str, ...], said_so: str, score: float, tmp_path: Path, said: list[str]
) -> None:
    evaluation._warn_once.cache_clear()
    config = Config(data=DataConfig(task="jsonl", separator=separator))
    generator = kind(config, rows, tokenizer=schemas.tokenizer())
    example = Example("a", "the baker", rows, "x.jsonl:1")
    result, records = evaluation.evaluate(generator, [example])
    assert result["em_f1"] == pytest.approx(score)
    begin = "warning: 1 of 1 examples have rows that contain data.separator, so they are split when an answer is read: "
    assert said == ([f"{begin}{said_so} (x.jsonl:1)"] if said_so else [])
    evaluation.evaluate(generator, [example])
    assert len(said) == bool(said_so)  # once
    said.clear()
    (tmp_path / "kept.jsonl").write_text(evaluation._predictions(generator, [example], records))
    command.main(["exact", str(tmp_path / "kept.jsonl")])
    told = [line for line in said if "1 of 1 documents have gold rows that contain the separator" in line]
    assert len(told) == bool(said_so) and all(line.endswith("kept.jsonl:1") for line in told)


def test_evaluation_reports_targets_changed_by_tokenizer(said: list[str]) -> None:
    evaluation._warn_once.cache_clear()
    config = Config(data=DataConfig(task="jsonl"))
    generator: Any = Canned(config, ["baker"], tokenizer=schemas.tokenizer())
    evaluation.evaluate(generator, [Example("a", "the ~ baker", ("baker 猫",), "x.jsonl:1")])
    assert [line for line in said if "1 of 1 examples have targets that the tokenizer does not give back" in line]
    assert not [line for line in said if "sources" in line]  # they do not lower the score


def test_metrics_report_rows_with_separator_of_a_file(tmp_path: Path, said: list[str]) -> None:
    lines = [
        {"gold": ["a", "b"], "pred": [], "separator": ", "},
        {"gold": ["a, b"], "pred": [], "separator": ", "},
        {"gold": ["a ; b"], "pred": [], "separator": " "},
        {"gold": {"x": "a, b"}, "pred": {}, "separator": ", "},
        {"gold": ["a, b"], "pred": []},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command.main(["exact", str(tmp_path / "x.jsonl")])
    (line,) = said
    assert "1 of 5 documents" in line and line.endswith("the first is at " + str(tmp_path / "x.jsonl:2"))
