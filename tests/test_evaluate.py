"""The evaluation command: its scores are those of the predictions that it keeps, and its groups add up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_training import CONFIG, change, quiet

from pipejax import evaluate
from pipejax.data import demo
from pipejax.errors import UserError
from pipejax.training import fit

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluate") / "run"
    assert fit(change(CONFIG, train={"steps": 3, "evaluate_every": 100}), directory, log=quiet) == 0
    return directory


def test_the_scores_are_those_of_the_kept_predictions(run, tmp_path, capsys):
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
    assert evaluate.main(flags) == 0
    assert capsys.readouterr().out == ""
    result, lines = json.loads(out.read_text()), [json.loads(line) for line in kept.read_text().splitlines()]
    assert [line["id"] for line in lines] == [e.id for e in demo.examples("test")[:12]]
    command = [sys.executable, "-m", "pipejax.metrics", "spans", str(kept)]
    scores = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert {key: result[key] for key in scores} == scores
    assert result["steps"] == sum(line["steps"] for line in lines) / 12
    assert result["examples"] == sum(group["documents"] for group in result["by_rows"]) == 12
    assert [group["rows"] for group in result["by_rows"]] == sorted({len(line["gold"]) for line in lines})
    assert sum(g["seconds"] * g["documents"] for g in result["by_rows"]) == pytest.approx(
        12 / result["examples_per_second"]
    )
    assert result["peak_host_bytes"] > 10_000_000


def test_batches_change_no_score(run, tmp_path):
    results = []
    for size in ("1", "5"):
        out = tmp_path / f"{size}.json"
        evaluate.main(["--checkpoint", str(run), "--limit", "7", "--batch-size", size, "--json", str(out)])
        results.append(json.loads(out.read_text()))
    assert all(results[0][key] == results[1][key] for key in ("em_f1", "pm_f1", "steps", "truncated"))
    assert "seconds" not in results[1]["by_rows"][0]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--task", "nonsense"], r"data\.task: found 'nonsense'; expected one of"),
        (["--limit", "0"], r"--limit: found 0; expected at least 1"),
        (["--task", "jsonl"], r"--split test: found no examples in it"),
        (["--task", "jsonl", "--set", "data.test=/nowhere.jsonl"], r"/nowhere\.jsonl: no such file"),
    ],
)
def test_refusals(run, flags, message):
    with pytest.raises(UserError, match=message):
        evaluate.main(["--checkpoint", str(run), *flags])
