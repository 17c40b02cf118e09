"""The comparison of methods and drafters on the demo's task, with tiny models that are trained for two steps."""

import json
from pathlib import Path

import pytest

from lab.experiments import relatives
from pipejax.apps.teach import tagging

TINY = ("model.d_model=16", "model.d_kv=4", "model.d_ff=24", "model.num_heads=2", "model.num_decoder_layers=1")
SHORT = ("train.steps=2", "train.evaluate_every=2", "train.evaluate_examples=2", "train.checkpoint_every=2")


def test_a_table_has_the_figures_of_all_seeds() -> None:
    interval = {"value": 90.0, "low": 80.0, "high": 95.5}
    results = [
        {"name": name, "seed": seed, "headline": "em_f1", "scores": {"em_f1": interval | {"value": 90.0 + seed}}}
        | {"steps": {"value": 12.5}, "calls": {"value": 7.25}, "seconds": 0.0125, "truncated": {"time_max": seed}}
        | {"speed_ratio": interval, "decoder_speed_ratio": interval}
        for seed in range(2)
        for name in ("sequential", "pipelined")
    ]
    head, rule, *lines = relatives.table(results)
    assert head.count("|") == rule.count("|") == lines[0].count("|")
    assert [line.split(" | ")[0] for line in lines] == ["| sequential", "| pipelined"]
    cells = lines[1].split(" | ")[1:]
    assert cells[0] == "90.00 (80.00 to 95.50); 91.00 (80.00 to 95.50)"
    assert cells[1:4] == ["12.50; 12.50", "7.25; 7.25", "12.5; 12.5"] and cells[-1] == "0; 1 |"


@pytest.mark.long
def test_all_entries_are_trained_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tagging, "STEPS", 2)
    monkeypatch.setattr(relatives, "LABELLED", 20)
    out = tmp_path / "out.json"
    settings = [f"--set={setting}" for setting in (*TINY, *SHORT)]
    code = relatives.main(["--json", str(out), "--workdir", str(tmp_path), "--seeds", "1", "--limit", "3", *settings])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert code == 0 and found["examples"] == 3
    assert [entry["name"] for entry in found["results"]] == [rest.split("name=")[1] for _, rest in relatives.ENTRIES]
    assert [entry["method"] for entry in found["results"]].count("branching") == 2
    assert (tmp_path / "relatives-0.html").is_file()
