"""Reads the log of a training run, metrics.jsonl."""

from pathlib import Path

from pipejax.metrics import HEADLINES
from pipejax.system import strict_json
from pipejax.system.strict_json import JsonObject

Line = JsonObject  # one object of the log; the value of "event" determines the other keys


def read_log(path: Path) -> list[tuple[str, Line]]:
    """Returns the valid lines of a log, each as text and as an object.

    Invalid lines, such as a line that a crash left incomplete, are skipped.
    """
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            values = strict_json.loads(line)
        except ValueError:
            continue
        if isinstance(values, dict) and isinstance(values.get("step"), int) and "event" in values:
            lines.append((line, values))
    return lines


def score_of(line: Line) -> tuple[float, float]:
    """Returns the key for comparing evaluations, higher is better: the headline score, then the negated loss."""
    return line[HEADLINES[line["metric"]]], -line["dev_loss"]
