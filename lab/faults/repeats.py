"""Runs the same command in two directories, and again in a finished directory."""

from pathlib import Path
from typing import Any

from lab.faults import runs
from lab.faults.disks import snapshot
from lab.faults.runs import Commands


def twice(commands: Commands, scratch: Path) -> dict[str, Any]:
    """Compares the metrics of two runs of one command, and a finished run before and after a repetition."""
    config = runs.prepare(scratch / "tiny")
    codes = [commands.train(config, scratch / name, cold=name == "a").end() for name in ("a", "b")]
    first, second = runs.outcome(scratch / "a"), runs.outcome(scratch / "b")
    before = snapshot(scratch / "a")
    codes.append(commands.train(config, scratch / "a").end())
    unchanged = snapshot(scratch / "a") == before
    return {
        "runs": 2,
        "same_metrics": first["log"] == second["log"],
        "same_state": first["state"] == second["state"],
        "params_fp": first["params_fp"],
        "a_finished_run_repeated_changes_nothing": unchanged,
        "ok": codes == [0, 0, 0] and first == second and unchanged,
    }
