"""The fault harness itself, on a few trials of each kind; docs/reliability.md has the figures of many."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.faults.__main__ import table

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_a_short_run(tmp_path):
    out, page = tmp_path / "faults.json", tmp_path / "faults.md"
    ended = subprocess.run(
        [sys.executable, "-m", "experiments.faults", "--short", "--only=order,bits",
         f"--json={out}", f"--table={page}", f"--scratch={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    parts = json.loads(out.read_text())["parts"]
    bits, order = parts["bits"], parts["order"]
    assert bits["silently_other_ids"] == 0 and bits["openings"] == 2 * bits["bits"] == 20
    assert order["ok"] or (order["ok"] is None and "skipped" in order), order["failures"]  # no compiler, or not Linux
    assert page.read_text() == table(json.loads(out.read_text()))
    assert not list(tmp_path.glob("faults-*")), "the runs are removed"


def test_what_is_not_as_it_must_be_is_said():
    results = {"parts": {"damage": {"trials": 3, "wrong_states_accepted": 1, "ok": False, "seconds": 2}}}
    assert "| Damaged checkpoints | **no** | trials 3; wrong states accepted 1 | 2 |" in table(results)
