"""Summarises training runs by their logs: the scores that each run reached, and the steps and minutes it took."""

from collections.abc import Sequence
from pathlib import Path

from pipejax.metrics import HEADLINES
from pipejax.system.errors import UserError
from pipejax.training import run_log
from pipejax.training.run_log import Line, score_of

COLUMNS = ("run", "step", "epoch", "loss", "best at", "dev loss", "metric", "best", "last", "steps", "minutes")


def log_of(run: str) -> list[Line]:
    """Reads the lines of a run's log; lines that are not valid JSON are skipped.

    Raises:
      UserError: the log cannot be read, or none of its lines is valid.
    """
    path = Path(run) / "metrics.jsonl"
    try:
        lines = [values for _, values in run_log.read_log(path)]
    except OSError as error:
        raise UserError(path, f"cannot be read ({error.strerror})", expected="the log of a run") from error
    if not lines:
        raise UserError(path, found="no log lines", expected="at least one")
    return lines


def summary(run: str, lines: Sequence[Line]) -> dict[str, str]:
    """Returns a run as one table row, by the names in `COLUMNS`.

    "steps" is the mean number of decoder steps per example at the best evaluation. A value that the log does not have
    is absent from the row.
    """
    trained = [line for line in lines if line["event"] == "train"]
    evaluations = [line for line in lines if line["event"] == "evaluation" and line.get("metric") in HEADLINES]
    found = {"run": run, "step": str(max(line["step"] for line in lines))}
    if trained:
        last = trained[-1]
        found["epoch"] = f"{last['epoch']:.1f}" if "epoch" in last else "-"
        found["loss"] = f"{last['loss']:.4f}" if last["loss"] is not None else "none"
        found["minutes"] = f"{sum(sum(line['seconds'].values()) for line in trained) / 60:.1f}"
    # Evaluations by another metric (an older release's default) are on another scale, so they are left out below.
    if evaluations:
        best = max((x for x in evaluations if x["metric"] == evaluations[-1]["metric"]), key=score_of)
        found |= {"best at": str(best["step"]), "dev loss": f"{best['dev_loss']:.4f}", "steps": f"{best['steps']:.1f}"}
        found |= {"metric": HEADLINES[best["metric"]], "best": f"{score_of(best)[0]:.2f}"}
        found["last"] = f"{score_of(evaluations[-1])[0]:.2f}"
    return found
