"""The figure of the dependency probes. The only module here that needs matplotlib (requirements/lab.txt)."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.experiments.probe_data import BASE, Kind
from pipejax.system.errors import UserError

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError as error:
    raise UserError(
        problem="matplotlib is not installed", expected="what `pip install -r requirements/lab.txt` brings"
    ) from error

SEQUENTIAL, PIPELINED = "#8b95a1", ("#b9d5f1", "#74a9dc", "#2f6fb0", "#123f6d")
INK = "#1d2733"
HATCH = "////"
WIDTH = 0.8  # of the bars of a kind


def draw(bars: Mapping[tuple[Kind, int], Sequence[float]], path: Path) -> None:
    """Bars of right rows below the first by kind and decoder, a dot a seed; hatched where Δt does not suffice.

    Args:
      bars: per cent for each seed, by kind and Δt (0: sequential).
      path: its suffix tells the format.
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
    unseen = "hatched: Δt too small to see what is taken"
    patches.append(Patch(facecolor="white", edgecolor=INK, hatch=HATCH, linewidth=0, label=unseen))
    names = ["\n".join([kind.name.replace("_", " "), *textwrap.wrap(kind.says, 19)]) for kind in kinds]
    axes.set_xticks(range(len(kinds)), names, fontsize=9)
    axes.set_xlim(-0.5, len(kinds) - 0.5)
    axes.set_ylim(0, 105)
    axes.set_ylabel("right rows below the first, %")
    axes.set_xlabel("what a row takes from the rows above; a dot is a training run", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        raise UserError(path, f"cannot be written ({error})") from error
