"""Curves of runs, from logs written by hand."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipejax.apps import markup
from pipejax.apps.picture import curves
from pipejax.apps.picture.picture_command import main
from pipejax.system.errors import UserError

ROOT = Path(__file__).parents[1]


def line(event: str, step: int, **values: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "seconds": {"steps": 1.0}, **values}


def write(place: Path, *lines: dict[str, Any]) -> str:
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(place)


def trained(*losses: float | None) -> list[dict[str, Any]]:
    return [line("train", 10 * i, loss=loss, learning_rate=1e-4 * i) for i, loss in enumerate(losses, start=1)]


def evaluated(step: int, score: float, metric: str = "exact", name: str = "em_f1") -> dict[str, Any]:
    return line("evaluation", step, metric=metric, dev_loss=1.5, steps=7.0, **{name: score})


def paths(page: str, run: int) -> list[list[tuple[float, float]]]:
    """The curves of a run, in pixels, from the top of the page; the first is the legend's."""
    found = re.findall(rf'<path class="c{run}(?: dashed)?" d="M([^"]*)"', page)
    pairs = [[point.split() for point in one.split("L")] for one in found[1:]]
    return [[(float(x), float(y)) for x, y in one] for one in pairs]


def test_points_are_placed_by_their_values(tmp_path: Path) -> None:
    run = write(tmp_path / "one", *trained(4.0, 2.0, 1.0), evaluated(20, 30.0), evaluated(30, 60.0))
    loss, dev, score, rate = paths(curves.page(run), 0)
    assert len(loss) == 3 and len(dev) == len(score) == 2 and len(rate) == 3
    left, right = curves.LEFT, curves.WIDTH - curves.RIGHT
    assert [x for x, _ in loss] == pytest.approx([left + (right - left) * step / 30 for step in (10, 20, 30)], abs=0.1)
    top, bottom = curves.TOP, curves.HEIGHT - curves.BOTTOM
    assert [y for _, y in loss] == pytest.approx([top, (top + bottom) / 2, bottom - (bottom - top) / 4], abs=0.1)
    assert score[0][1] - score[1][1] == pytest.approx((bottom - top) / 2, abs=0.1)  # 30 of 60


def test_runs_are_overlaid_with_names_and_a_chart_for_each_metric(tmp_path: Path) -> None:
    runs = [
        write(tmp_path / "a <b>", *trained(3.0, 2.0), evaluated(20, 30.0)),
        write(tmp_path / "second", *trained(4.0, 3.0, 2.0), evaluated(20, 40.0, "keyphrases", "present_f1@M")),
    ]
    page = curves.page(*runs)
    assert [len(paths(page, i)) for i in (0, 1)] == [4, 4]
    assert page.count("Score: ") == 2 and "a &lt;b&gt;" in page and "<b>" not in page
    assert "Curves of 2 runs" in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_missing_values_and_incomplete_lines_leave_gaps_in_curves(tmp_path: Path) -> None:
    run = write(tmp_path / "one", *trained(4.0, None, float("nan"), 1.0), line("left_out", 30, loss="nan"))
    with (tmp_path / "one" / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "step": 50, "lo')
    loss, rate = paths(curves.page(run), 0)
    assert len(loss) == 2 and len(rate) == 4


def test_curves_of_runs_with_no_one_and_many_evaluations(tmp_path: Path) -> None:
    one = write(tmp_path / "one", *trained(2.5))
    assert "<circle" in curves.page(one) and "Score" not in curves.page(one)
    none = write(tmp_path / "none", line("left_out", 1, loss="nan", grad_norm="nan", ids=[]))
    assert curves.page(none).count("not in these logs") == 2
    many = write(tmp_path / "many", *trained(*(1 + 1 / (i + 1) for i in range(5000))))
    loss, _ = paths(curves.page(many), 0)
    assert 400 < len(loss) <= curves.MOST and [x for x, _ in loss] == sorted(x for x, _ in loss)


@pytest.mark.parametrize("low, high", [(0.0, 6.3), (0.31, 0.34), (0.0, 1e-4), (-2.0, 3.0), (1e6, 3e6)])
def test_ticks_are_few_and_round(low: float, high: float) -> None:
    found = markup.ticks(low, high)
    assert 2 <= len(found) <= 6 and low <= found[0] and found[-1] <= high + 1e-12
    assert all(len(f"{x:.6g}".strip("-0.").replace(".", "").rstrip("0").split("e")[0]) <= 3 for x in found)


def test_picture_command_draws_runs_and_records(tmp_path: Path) -> None:
    run, output = write(tmp_path / "run", *trained(4.0, 2.0)), tmp_path / "out.html"
    assert main([run, "--output", str(output)]) == 0
    assert output.read_text() == curves.page(run)
    record = tmp_path / "records.jsonl"
    record.write_text(json.dumps({"id": "x", "rows": ["a b"], "steps": 3}) + "\n")
    for arguments, words in (
        ([run, str(record)], "records.jsonl: found a file"),
        ([str(record), str(record)], "found a second file; expected one file of records, or directories"),
        ([run, "--id", "x"], "--id: found with a run"),
        ([str(tmp_path)], "metrics.jsonl: cannot be read"),
    ):
        with pytest.raises(UserError, match=words):
            main([*arguments, "--output", str(output)])
    with pytest.raises(UserError, match=r"expected a name that ends in \.html, for curves"):
        main([run, "--output", str(tmp_path / "x.svg")])


@pytest.mark.slow
def test_the_page_about_notebooks_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its blocks run one after the other, like the cells of a notebook."""
    shown: list[str] = []
    display = SimpleNamespace(IFrame=lambda path, width, height: shown.append(path))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "notebooks.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    space: dict[str, Any] = {}
    try:
        for block in blocks:
            exec(block, space)
    finally:
        space["logger"].handlers.clear()
    assert shown == ["curves.html"] and "em_f1" in (tmp_path / "curves.html").read_text()
    assert space["record"]["steps"] > 0
