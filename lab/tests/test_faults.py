"""Tests of `lab.faults` with a few trials of each kind; docs/reliability.md has the figures of many trials."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.faults import odd, refusals
from lab.faults.__main__ import table
from lab.faults.refusals import Kind

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_short_run_of_the_faults_passes(tmp_path):
    out, page = tmp_path / "faults.json", tmp_path / "faults.md"
    ended = subprocess.run(
        [sys.executable, "-m", "lab.faults", "--short", "--only=order,bits",
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


def test_table_marks_failed_part():
    results = {"parts": {"damage": {"trials": 3, "wrong_states_accepted": 1, "ok": False, "seconds": 2}}}
    assert "| Damaged checkpoints | **no** | trials 3; wrong states accepted 1 | 2 |" in table(results)


@pytest.mark.parametrize(
    "code, lines, ok",
    [
        (2, ["going on", "error: in.jsonl: no good"], True),
        (2, ["error: it is no good"], False),  # names no culprit
        (2, ["error: in.jsonl: no good", "and more"], False),
        (1, ["error: in.jsonl: no good"], False),
        (0, ["in.jsonl: read as something else", "done"], True),
        (0, ["done"], False),  # silently
        (0, ["in.jsonl", "Traceback"], False),
        (70, ["Traceback", "error: in.jsonl"], False),
    ],
)
def test_accepted_input_needs_a_message_and_refused_input_its_name(code, lines, ok, tmp_path, monkeypatch):
    class Fake:
        def start(self, name, *arguments, devices=1):
            (Path(arguments[0]) / "out.jsonl").write_text("new")
            return SimpleNamespace(end=lambda timeout: code, said=lambda: lines)

    def template(commands, place):
        place.mkdir()
        (place / "config.py").touch()
        (place / "out.jsonl").write_text("precious")
        return place

    monkeypatch.setattr(refusals, "template", template)
    kinds = [Kind("a", ("in.jsonl",), "decode", ("{here}",), codes=codes, said=("in.jsonl",))
             for codes in ((0, 2), (2,), (0,))]  # fmt: skip
    either, refused, taken = refusals.many(Fake(), tmp_path, kinds)
    assert [either["ok"], refused["ok"], taken["ok"]] == [ok, ok and code == 2, ok and code == 0]
    assert either["kept"] == (code == 0)  # after a refusal an older output is unchanged


def test_odd_inputs_are_many_and_each_has_a_name():
    assert len({kind.name for kind in odd.KINDS}) == len(odd.KINDS) >= 100
    assert all(kind.words or 0 in kind.codes for kind in odd.KINDS)
