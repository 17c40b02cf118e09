"""The figure of the dependency probes. The only module here that needs matplotlib (requirements-experiments.txt)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.probe_data import BASE, Kind
from pipejax.errors import UserError

try:
    from matplotlib.figure import Figure
except ImportError as error:
    raise UserError(
        "matplotlib is not installed; expected what `pip install -r requirements-experiments.txt` brings"
    ) from error

SEQUENTIAL, PIPELINED = "#8b95a1", ("#cfe1f5", "#84b3e0", "#2f6fb0", "#123f6d")
WIDTH = 0.8  # of the bars of a kind


def draw(bars: Mapping[tuple[Kind, int], Sequence[float]], path: Path) -> None:
    """Bars of right rows below the first by kind and decoder, a dot a seed; hatched where Δt does not suffice.

    Args:
      bars: per cent for each seed, by kind and Δt (0: sequential).
      path: its suffix tells the format.
    """
    kinds, columns = list(dict.fromkeys(kind for kind, _ in bars)), list(dict.fromkeys(delay for _, delay in bars))
    figure = Figure(figsize=(1.6 + 1.5 * len(kinds), 4), layout="constrained")
    axes = figure.subplots()
    bar = WIDTH / len(columns)
    for n, delay in enumerate(columns):
        colour = PIPELINED[min(n - 1, len(PIPELINED) - 1)] if delay else SEQUENTIAL
        label = f"pipelined, Δt = {delay}" if delay else "sequential"
        for place, kind in enumerate(kinds):
            found = bars[kind, delay]
            x = place - WIDTH / 2 + (n + 0.5) * bar
            hatch = "///" if 0 < delay < kind.delay else None
            axes.bar(
                x,
                sum(found) / len(found),
                0.92 * bar,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0,
                label=label if place == 0 else None,
            )
            axes.plot([x] * len(found), found, "o", color="#1d2733", markersize=3)
    axes.axhline(100 / BASE, color="#1d2733", linewidth=0.8, linestyle=":")
    axes.annotate("guessing one digit", (-0.45, 100 / BASE + 1), fontsize=8)
    names = [f"{kind.name.replace('_', ' ')}\n(Δt ≥ {kind.delay})" for kind in kinds]
    axes.set_xticks(range(len(kinds)), names)
    axes.set_ylim(0, 105)
    axes.set_ylabel("right rows below the first, %")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(columns), frameon=False)
    try:
        figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be written ({error})") from error
