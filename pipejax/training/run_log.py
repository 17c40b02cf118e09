"""Reading the log of a training, metrics.jsonl."""

from pathlib import Path
from typing import Any

from pipejax.metrics import HEADLINES
from pipejax.system import strict_json

Line = dict[str, Any]  # an object of the log; its "event" says which other keys it has


def read_log(path: Path) -> list[tuple[str, Line]]:
    """The lines of a log and what they hold; what is no line of a log, such as one torn by a crash, is left out."""
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
    """The key by which evaluations are compared, higher being better: the metric's chief score, then the loss."""
    return line[HEADLINES[line["metric"]]], -line["dev_loss"]
