"""The metrics command on files, and the metrics of evaluation and training."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipejax import checkpoint, config, methods, metrics
from pipejax.apps import log_summary
from pipejax.apps.scoring import metrics_command as command
from pipejax.config import Config, DataConfig
from pipejax.data import TASKS, make_task
from pipejax.data.examples import Example
from pipejax.inference.report import Report
from pipejax.metrics import keyphrases, rouge, spans, total
from pipejax.offline.evaluation import evaluate
from pipejax.system.errors import UserError
from pipejax.training.examiner import Examiner
from pipejax.training.loop import fit
from support.tiny import RUN_ON_ONE, change

DOCUMENTS: list[dict[str, Any]] = [
    {"id": "a", "source": "graphs of cats", "gold": ["graphs", "a dog"], "pred": ["graph", "the dog"]},
    {"id": 2, "source": "nothing", "gold": [], "pred": [""]},
    {"source": "no id", "gold": ["cats sat\non mats"], "pred": []},
]
SOURCES = [d["source"] for d in DOCUMENTS]
GOLD = [d["gold"] for d in DOCUMENTS]
PREDICTED = [d["pred"] for d in DOCUMENTS]


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


# The command.


@pytest.mark.parametrize(
    "name, expected",
    [
        ("spans", spans.combine(total(spans.per_document(GOLD, PREDICTED)), 3)),
        ("keyphrases", keyphrases.combine(total(keyphrases.per_document(SOURCES, GOLD, PREDICTED)), 3)),
        (
            "keyphrases_kp20k",
            keyphrases.combine(total(keyphrases.per_document(SOURCES, GOLD, PREDICTED, by_spaces=True)), 3),
        ),
        ("rouge", rouge.combine(total(rouge.per_document(GOLD, PREDICTED)), 3)),
        ("rouge_score", rouge.combine(total(rouge.per_document(GOLD, PREDICTED, ascii_only=True)), 3)),
    ],
)
def test_metrics_command_prints_one_object(tmp_path, capfd, name, expected) -> None:
    assert command.main([name, str(write(tmp_path / "f.jsonl", DOCUMENTS))]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out) == expected  # equal in every digit
    assert printed.err == ""


def test_metrics_command_runs_as_a_process(tmp_path) -> None:
    # Warnings are errors: this detects libraries that print or download when they are imported.
    more: dict[str, Any] = {"capture_output": True, "text": True, "cwd": Path(__file__).parents[1]}
    command = [sys.executable, "-W", "error", "-m", "pipejax", "metrics", "rouge"]
    done = subprocess.run([*command, write(tmp_path / "f.jsonl", DOCUMENTS)], **more)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == metrics.score("rouge", SOURCES, GOLD, PREDICTED)
    refused = subprocess.run([*command, tmp_path / "absent.jsonl"], **more)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == f"error: {tmp_path / 'absent.jsonl'}: no such file; expected a file of JSON lines\n"


def test_only_keyphrases_read_the_source(tmp_path) -> None:
    path = str(write(tmp_path / "f.jsonl", [{"gold": ["x"], "pred": ["x"]}, {"source": 3, "gold": [], "pred": []}]))
    for name in ("exact", "spans", "rouge", "rouge_score"):
        assert command.main([name, path]) == 0
    for name in ("keyphrases", "keyphrases_kp20k"):
        with pytest.raises(UserError, match=r':1: found no "source"; expected one \(keys: gold, pred\)$'):
            command.main([name, path])


GOOD = {"id": "x", "source": "", "gold": [], "pred": []}


@pytest.mark.parametrize(
    "lines, place, words",
    [
        ([GOOD, {**GOOD, "id": "y", "gold": "graphs"}], ":2:", '"gold": found text; expected a list of texts'),
        ([{**GOOD, "pred": None}], ":1:", '"pred": found null; expected a list of texts'),
        ([{**GOOD, "pred": ["a", ["b"]]}], ":1:", '"pred[1]": found a list; expected text'),
        ([{**GOOD, "gold": [7]}], ":1:", '"gold[0]": found the number 7; expected text'),
        (
            [{"id": "x", "source": "s", "pred": []}],
            ":1:",
            'found no "gold"; expected a list of texts (keys: id, source, pred)',
        ),
        (
            [{"id": "x", "source": "s", "gold": []}],
            ":1:",
            'found no "pred"; expected a list of texts (keys: id, source, gold)',
        ),
        ([{**GOOD, "source": ["s"]}], ":1:", '"source": found a list; expected text'),
        ([{**GOOD, "id": 1.5}], ":1:", '"id": found the number 1.5; expected text or a whole number'),
        ([GOOD, "", GOOD], ":3:", "\"id\": found 'x' again; it was used in line 1"),
        ([GOOD, '{"id": "y", "gold"'], ":2:", "not JSON"),
        (["[]"], ":1:", "found a list; expected an object"),
        (["", ""], ":", "found no lines; expected at least one document"),
        ([], ":", "found no lines; expected at least one document"),
    ],
)
def test_invalid_lines_are_refused(tmp_path, capfd, lines, place, words) -> None:
    path = write(tmp_path / "f.jsonl", lines)
    with pytest.raises(UserError) as error:
        command.main(["keyphrases", str(path)])
    assert str(error.value).startswith(f"{path}{place}") and words in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().out == ""


def test_invalid_bytes_are_refused(tmp_path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"gold": [], "pred": ["caf\xe9"]}\n')
    with pytest.raises(UserError, match=r"f\.jsonl:1: found byte 0xe9 at column 27; expected UTF-8"):
        command.main(["spans", str(path)])


def test_unknown_metric_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match=r"^metric: found 'bleu'; expected one of exact, exact_caseless, spans, "):
        command.main(["bleu", str(tmp_path)])
    with pytest.raises(ValueError, match=r"expected one of exact, .*, rouge, rouge_score; got 'bleu'"):
        metrics.score("bleu", [], [], [])


# Evaluation and training.


def test_every_metric_of_the_config_has_a_headline_among_its_scores() -> None:
    assert tuple(metrics.HEADLINES) == config.METRICS
    done: list[int] = []
    for name, headline in metrics.HEADLINES.items():
        assert headline in metrics.score(name, SOURCES, GOLD, PREDICTED, tick=done.append)
    assert sum(done) == len(metrics.HEADLINES) * len(DOCUMENTS)


def test_task_has_its_metric() -> None:
    assert {task: make_task(DataConfig(task=task, rows="sentences")).metric for task in TASKS} == {
        **dict.fromkeys(("demo", "demo_long", "jsonl", "csv"), "exact"),
        "msqa": "spans",
        **dict.fromkeys(("kp20k", "kptimes"), "keyphrases_kp20k"),
        **dict.fromkeys(("wikihowqa", "cnn_dailymail", "pubmed", "sumpubmed", "wikihow"), "rouge_score"),
    }
    assert make_task(DataConfig(task="jsonl", metric="rouge")).metric == "rouge"
    with pytest.raises(UserError, match=r"data\.metric: found 'rogue'; expected one of .* \(did you mean rouge\?"):
        config.override(Config(), ["data.metric=rogue"])


class Canned:
    """A generator with given answers."""

    default_method = "pipelined"

    def __init__(self, data: DataConfig, rows: list[list[str]]) -> None:
        self.config, self.rows, self.answer_format, self.tokenizer = Config(data=data), rows, None, None

    def method(self, name: str) -> methods.Method:
        return methods.make(name, self.config)

    def stream(self, sources: Sequence[Any], *, report: Report, **rest: Any):
        report.examples += len(self.rows)
        return [{"rows": rows, "steps": 1} for rows in self.rows]


EXAMPLES = [Example(str(i), d["source"], tuple(d["gold"])) for i, d in enumerate(DOCUMENTS)]


@pytest.mark.parametrize("name", list(metrics.HEADLINES))
def test_evaluation_scores_by_the_metric(name) -> None:
    """Rows without text are no predictions."""
    expected = metrics.score(name, SOURCES, GOLD, [[row for row in rows if row.strip()] for rows in PREDICTED])
    by_config: Any = Canned(DataConfig(task="demo", metric=name), PREDICTED)
    by_argument: Any = Canned(DataConfig(task="demo"), PREDICTED)
    for result, _ in (evaluate(by_config, EXAMPLES), evaluate(by_argument, EXAMPLES, metric=name)):
        assert result["metric"] == name
        assert {key: result[key] for key in expected} == expected


@pytest.mark.slow
def test_main_score_selects_the_best_step(tmp_path, monkeypatch, said) -> None:
    """The second evaluation of a run has the highest ROUGE-Lsum and the lowest other scores."""
    headlines = iter([10.0, 30.0, 20.0])

    def scripted(name: str, *rest: Any) -> dict[str, float]:
        value = next(headlines)
        return {"rouge1": 100 - value, "em_f1": 100 - value, metrics.HEADLINES[name]: value}

    monkeypatch.setattr(metrics, "combine", scripted)
    train = {"steps": 3, "evaluate_every": 1, "evaluate_examples": 2, "length_group": 1, "shapes": 1}
    assert fit(change(RUN_ON_ONE, train=train, data={"metric": "rouge"}), tmp_path) == 0
    best = checkpoint.open_run(tmp_path, best=True)
    assert (best.step, best.metadata["score"][0]) == (2, 30.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["rougeLsum"] for line in lines if line["event"] == "evaluation"] == [10.0, 30.0, 20.0]


def evaluations(*metric_and_score: tuple[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "event": "evaluation",
            "step": i + 1,
            "metric": name,
            metrics.HEADLINES[name]: value,
            "dev_loss": 1.0,
            "steps": 2,
        }
        for i, (name, value) in enumerate(metric_and_score)
    ]


@pytest.mark.parametrize(
    "lines, kept, highest, without_better",
    [
        (evaluations(("spans", 90.0), ("spans", 95.0)), False, -np.inf, 0),
        (evaluations(("spans", 90.0), ("exact", 50.0), ("exact", 40.0)), True, 50.0, 1),
        (evaluations(("exact", 50.0), ("exact", 60.0)), True, 60.0, 0),
        ([], True, -np.inf, 0),
    ],
)
def test_scores_by_a_former_default_are_not_compared(said, lines, kept, highest, without_better) -> None:
    """A run is resumed from a version with another default metric, whose scores chose best/ on another scale."""
    directory: Any = SimpleNamespace(logged=lambda event: lines)
    best: Any = SimpleNamespace(score=(95.0, -1.0))
    unused: Any = None
    found = Examiner(RUN_ON_ONE, unused, unused, [], unused, directory, best, unused)
    assert (bool(best.score), found.highest[0], found.without_better) == (kept, highest, without_better)
    expected = "warning: scores by spans so far, by exact from here on: best/ is selected again"
    assert said == ([] if kept else [expected])


def test_runs_are_compared_by_their_last_metric() -> None:
    found = log_summary.summary("run", evaluations(("spans", 90.0), ("exact", 50.0), ("exact", 40.0)))
    assert (found["best"], found["best at"], found["last"]) == ("50.00", "2", "40.00")
