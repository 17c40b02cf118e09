"""The experiments with `pipejax probe`: ranks, tables and the files of trained runs; nothing is trained."""

import json
from pathlib import Path

import pytest

from lab.experiments import dependence, probes, real_dependence
from pipejax.system.errors import UserError


@pytest.mark.parametrize(
    "one, other, rho",
    [
        ([1, 2, 3], [10, 20, 30], 1.0),
        ([1, 2, 3], [3, 2, 1], -1.0),
        ([1, 2, 3, 4, 5], [5, 6, 7, 8, 7], 0.8207826816681233),  # an example with ties from a textbook
        ([0, 0, 0, 1], [0, 0, 0, 9], 1.0),
        ([0, 0, 0], [1, 2, 3], 0.0),
    ],
)
def test_spearman_equals_known_correlations(one: list[float], other: list[float], rho: float) -> None:
    assert dependence.spearman(one, other) == pytest.approx(rho)


def test_rows_lost_by_the_runs_of_the_page() -> None:
    found = dependence.read_gaps(str(dependence.TRAINED))
    assert [round(lost) for lost in found["copy_end"]["lost"]] == [41, 21, 0]
    assert [round(lost) for lost in found["running_total"]["lost"]] == [0, 0, 9]
    assert found["running_total"]["least_lost"] == [0, 0, 0]  # only one of its seeds failed


def test_files_without_results_are_refused(tmp_path: Path) -> None:
    for text in ("", "{}", json.dumps({"cells": []})):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(
            UserError, match=r"^--trained .*x\.json: found .*; expected results of lab\.experiments\.probes"
        ):
            dependence.read_gaps(str(tmp_path / "x.json"))


def test_table_has_costs_lost_rows_and_correlations() -> None:
    one = {"costs": [0.5, 0.001, 0], "told": [0.5, 0.0, 0.0], "lost": [40.0, 0.0, 0.0], "hidden": 0.7}
    found = {"delays": probes.DELAYS, "kinds": {"copy_end": one}, "spearman_lost": 1.0, "spearman_least_lost": 0.5}
    lines = dependence.report(found).splitlines()
    assert lines[2] == "| copy_end | 0.500, 40.0 % | 0.000, 0.0 % | 0.000, 0.0 % | 0.700 |"
    assert lines[-1].endswith("1.00 with the mean of the seeds, 0.50 with the better seed of each.")


def test_sign_of_a_gap_needs_enough_size_and_small_error() -> None:
    """Three answers of two tokens, with differences of 0.3, 0.1 and 0.2 nats for each token."""
    dear, cheap = [[1.0, 2.0], [1.0, 1.0], [3.0, 1.0]], [[0.4, 2.0], [1.0, 0.8], [2.6, 1.0]]
    found = real_dependence.gap(dear, cheap)
    assert found == {"nats": pytest.approx(0.2), "error": pytest.approx(0.1 / 3**0.5, abs=1e-6)}
    assert real_dependence.sign(found) == 1
    assert real_dependence.sign(real_dependence.gap(cheap, dear)) == -1
    assert real_dependence.sign({"nats": 0.2, "error": 0.11}) == 0
    assert real_dependence.sign({"nats": 0.004, "error": 0.0}) == 0


def test_the_table_of_real_texts() -> None:
    part = {"nats": 0.02, "error": 0.003}
    found = {"right": {"1 and 2": False}, "probed": {"1 and 2": part}, "trained": {"1 and 2": part}, "says": "x"}
    head, _, line, _, says = real_dependence.report("kp20k", found).splitlines()
    assert head.startswith("| KP20k: Δt | probed") and says == "x"
    assert line == "| 1 and 2 | +0.0200 ± 0.0030 | +0.0200 ± 0.0030 | no |"
