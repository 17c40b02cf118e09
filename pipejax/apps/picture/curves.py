"""Draws losses, scores and learning rates of runs, from their logs, as a self-contained HTML page.

curves.html, a `string.Template`, has the layout.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pipejax.apps.log_summary import COLUMNS, log_of, summary
from pipejax.apps.markup import CHART_STYLE, COLOURS, STYLE, Chart, count, escape, legend, table, template, ticks
from pipejax.metrics import HEADLINES
from pipejax.training.run_log import Line

Points = list[tuple[int, float]]  # steps and values
DASH = '<svg width="26" height="10"><path class="$c" d="M0 5H26"/></svg>'  # the mark of a run in the legend
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 880, 260, 64, 16, 12, 30  # pixels of a chart, and of its margins
MOST = 800  # the most points of a curve, about one per pixel; if there are more, neighbours are averaged


class Curve(NamedTuple):
    """One quantity of one run."""

    run: int
    name: str
    points: Points
    dashed: bool = False


def page(*runs: str | Path) -> str:
    """Returns the page with the curves of these runs, as HTML.

    Raises:
      UserError: the log of a run is absent or cannot be read.
    """
    return html([str(run) for run in runs], [log_of(str(run)) for run in runs])


def html(runs: Sequence[str], logs: Sequence[Sequence[Line]]) -> str:
    """Returns one page for these runs and the lines of their logs."""
    sections = []
    for heading, curves in charts(logs).items():
        if any(curve.points for curve in curves):
            sections.append(f"<section><h2>{escape(heading)}</h2>{chart(curves, runs)}</section>")
        else:
            sections.append(f'<section><h2>{escape(heading)}</h2><p class="quiet">not in these logs</p></section>')
    rows = [summary(run, log) for run, log in zip(runs, logs, strict=True)]
    return template("pipejax.apps.picture", "curves.html").substitute(
        title=escape(f"Curves of {runs[0]}" if len(runs) == 1 else f"Curves of {count(len(runs), 'run')}"),
        style=f"{STYLE}\n{CHART_STYLE}",
        legend=legend(runs, DASH),
        charts="".join(sections),
        table=table(COLUMNS, ([row.get(name, "-") for name in COLUMNS] for row in rows)),
    )


def charts(logs: Sequence[Sequence[Line]]) -> dict[str, list[Curve]]:
    """Returns the curves of each chart, by its heading. Scores by different metrics are in different charts."""
    found: dict[str, list[Curve]] = {"Loss (dashed: of the dev split)": []}
    for run, log in enumerate(logs):
        found["Loss (dashed: of the dev split)"] += [
            Curve(run, "loss", points(log, "train", "loss")),
            Curve(run, "dev loss", points(log, "evaluation", "dev_loss"), dashed=True),
        ]
    for run, log in enumerate(logs):
        for metric in dict.fromkeys(line["metric"] for line in log if line.get("metric") in HEADLINES):
            of_metric = [line for line in log if line.get("metric") == metric]
            name = HEADLINES[metric]
            found.setdefault(f"Score: {name}", []).append(Curve(run, name, points(of_metric, "evaluation", name)))
    found["Learning rate"] = [
        Curve(run, "learning rate", points(log, "train", "learning_rate")) for run, log in enumerate(logs)
    ]
    return found


def points(log: Sequence[Line], event: str, key: str) -> Points:
    """Returns the finite values of a key by step, in order; if a step was logged twice, the last value."""
    found: dict[int, float] = {}
    for line in log:
        value = line.get(key)
        if line["event"] == event and isinstance(value, int | float) and math.isfinite(value):
            found[line["step"]] = float(value)
    return sorted(found.items())


def thinned(some: Points) -> Points:
    """Returns at most MOST points: the means of groups of neighbours."""
    size = math.ceil(len(some) / MOST)
    parts = [some[i : i + size] for i in range(0, len(some), size)] if size > 1 else [[point] for point in some]
    return [(round(sum(x for x, _ in part) / len(part)), sum(y for _, y in part) / len(part)) for part in parts]


def chart(curves: Sequence[Curve], runs: Sequence[str]) -> str:
    """Returns the curves over steps as SVG; a curve with one point is a dot."""
    values = [y for curve in curves for _, y in curve.points]
    last = max(x for curve in curves for x, _ in curve.points)
    low, high = min(values), max(values)
    if low > 0 and low < 0.6 * high:
        low = 0.0
    if low == high:
        low, high = low - abs(low or 1) / 2, high + abs(high or 1) / 2
    marks = ticks(low, high)
    if marks[-1] < high:  # the topmost line must be above all curves
        marks.append(marks[-1] + marks[1] - marks[0])
        high = marks[-1]
    axes = Chart(WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, last=max(last, 1), low=low, high=high)
    parts = []
    for curve in curves:
        shown = [(axes.x(x), axes.y(y)) for x, y in thinned(curve.points)]
        if not shown:
            continue
        final = curve.points[-1]
        tip = f"<title>{escape(runs[curve.run])}: {curve.name} {final[1]:.6g} at step {final[0]:,}</title>"
        kind = f'class="c{curve.run % COLOURS}{" dashed" * curve.dashed}"'
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in shown)
        parts.append(f'<path {kind} d="M{line}">{tip}</path>')
        if curve.dashed or len(shown) == 1:
            parts += [f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="3">{tip}</circle>' for x, y in shown]
    steps = [(step, f"{int(step):,}") for step in ticks(0, last, 8) if step == int(step)]
    return axes.svg(marks, steps, 8, parts)
