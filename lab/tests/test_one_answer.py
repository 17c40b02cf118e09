"""The walk through one answer decodes the rows of the generator."""

import re

import pytest

from lab import one_answer


def test_the_open_loop_writes_the_generators_rows(capsys: pytest.CaptureFixture[str]) -> None:
    one_answer.main(["--seed", "2"])  # `main` compares with the generator
    *steps, rows, said = capsys.readouterr().out.splitlines()
    assert said == "`Generator.decode` writes the same"
    assert len(steps) == 12 and rows.startswith("rows: [[21, 28], [28, 63, 39, 35, 5")
    # Row 0 writes 21, 28 and eos; its eos is fed too, so that row 1 can see it.
    assert re.findall("row 0 (.*?)(?:,|$)", "\n".join(steps), re.MULTILINE)[:3] == ["0 -> 21", "21 -> 28", "28 -> 1"]
    assert "row 0 1 -> " in steps[3]
