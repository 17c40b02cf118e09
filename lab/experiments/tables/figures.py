"""Draws Figures 4 and 5 of the paper from our runs; the paper's values are drawn separately."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

from lab.experiments.tables import paper

COLOURS = {"wikihowqa": "#0b6e4f", "cnn_dailymail": "#c9762c", "pubmed": "#4a4e69", "msqa": "#7a9e9f"}
OTHERS = ("#a05195", "#e8b04b", "#2f6690")
FEWEST = 10  # fewest documents for a point
Groups = Sequence[dict[str, Any]]  # field `by_rows` of an evaluation


def speed_up(pairs: dict[str, tuple[Groups, Groups]], path: Path) -> None:
    """Draws Figure 4: sequential seconds divided by pipelined seconds, by the number of rows; `pairs` are by task."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    colours = iter(OTHERS)
    for task, (sequential, pipelined) in pairs.items():
        colour = COLOURS.get(task) or next(colours)
        after = {group["rows"]: group for group in pipelined}
        points = [
            (group["rows"], group["seconds"] / after[group["rows"]]["seconds"])
            for group in sequential
            if group["rows"] in after and group["documents"] >= FEWEST and "seconds" in group
        ]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=paper.TITLES[task]) if points else None
        if known := paper.FIGURE_4.get(task):
            label = f"{paper.TITLES[task]}, the paper's, T5-Base on an RTX 4090"
            axes.plot(list(known), list(known.values()), "D", markerfacecolor="none", color=colour, label=label)
    axes.axhline(1, color="#1d2733", linewidth=0.8, linestyle=":")
    _finish(figure, axes, f"rows of the target (at least {FEWEST} documents)", "speed-up, sequential / pipelined", path)


def quality(title: str, score: str, sequential: Groups, pipelined: Groups, path: Path) -> None:
    """Draws Figure 5: the main score of both decoders by the number of rows in the data."""
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    for groups, name, colour in ((sequential, "sequential", "#4a4e69"), (pipelined, "pipelined", "#0b6e4f")):
        points = [(group["rows"], group[score]) for group in groups if group["documents"] >= FEWEST]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name) if points else None
    axes.set_ylim(bottom=0)
    _finish(figure, axes, f"rows of the target (at least {FEWEST} documents)", f"{title}: {score}", path)


def _finish(figure: Any, axes: Any, across: str, up: str, path: Path) -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
