"""Draws the figure of the dependency probes. Only this module of the probes needs matplotlib (requirements/lab.txt)."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.experiments.probe_data import BASE, Kind
from pipejax.system.errors import UserError

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError as error:
    raise UserError(problem="matplotlib is not installed", expected="the libraries of requirements/lab.txt") from error

SEQUENTIAL, PIPELINED = "#8b95a1", ("#b9d5f1", "#74a9dc", "#2f6fb0", "#123f6d")
INK = "#1d2733"
HATCH = "////"
WIDTH = 0.8  # width of all bars of a kind together


def draw(bars: Mapping[tuple[Kind, int], Sequence[float]], path: Path) -> None:
    """Draws bars of correct rows below the first by kind and decoder, with a dot for each seed.

    Bars are hatched if Δt is too small.

    Args:
      bars: percentages, one for each seed, by kind and Δt (0: sequential).
      path: the file; its suffix determines the format.
    """
    kinds, columns = list(dict.fromkeys(kind for kind, _ in bars)), list(dict.fromkeys(delay for _, delay in bars))
    figure = Figure(figsize=(max(1.6 + 1.5 * len(kinds), 7), 4.4), layout="constrained")
    axes = figure.subplots()
    bar = WIDTH / len(columns)
    patches = []
    for n, delay in enumerate(columns):
        colour = PIPELINED[min(n - 1, len(PIPELINED) - 1)] if delay else SEQUENTIAL
        patches.append(Patch(facecolor=colour, label=f"pipelined, Δt = {delay}" if delay else "sequential"))
        for place, kind in enumerate(kinds):
            found = bars[kind, delay]
            x = place - WIDTH / 2 + (n + 0.5) * bar
            hatch = HATCH if 0 < delay < kind.delay else None
            mean = sum(found) / len(found)
            axes.bar(x, mean, 0.9 * bar, facecolor=colour, edgecolor=INK, linewidth=0, hatch=hatch)
            axes.plot([x] * len(found), found, "o", color=INK, markeredgecolor="white", markersize=4.5)
    axes.axhline(100 / BASE, color=INK, linewidth=0.8, linestyle=":", zorder=0)
    axes.text(1.005, 100 / BASE, "one total\nguessed", transform=axes.get_yaxis_transform(), fontsize=9, va="center")
    unseen = "hatched: Δt too small to see the needed tokens"
    patches.append(Patch(facecolor="white", edgecolor=INK, hatch=HATCH, linewidth=0, label=unseen))
    names = ["\n".join([kind.name.replace("_", " "), *textwrap.wrap(kind.description, 19)]) for kind in kinds]
    axes.set_xticks(range(len(kinds)), names, fontsize=9)
    axes.set_xlim(-0.5, len(kinds) - 0.5)
    axes.set_ylim(0, 105)
    axes.set_ylabel("correct rows below the first, %")
    axes.set_xlabel("tokens that a row needs from the rows above; a dot is a training run", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        raise UserError(path, f"cannot be written ({error})") from error
