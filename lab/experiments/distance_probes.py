"""Trains the probes with three distances: absolute times (pipejax's), times within the row, and the flattened text.

    python -m lab.experiments.distance_probes --json OUT [--kinds A,B] [--delays N,N] [--seeds N] [--set KEY=VALUE ...]

The command trains each model of `lab.experiments.probes` with each distance (`lab/experiments/distances.py`), and
prints a Markdown table. Finished runs are not trained again.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks.systems import names_of, save
from lab.experiments import distances, probes
from lab.experiments.probe_data import KINDS
from pipejax import config as config_lib
from pipejax.config import Config
from pipejax.system import cli

TIME = "time"  # pipejax's distance
DESCRIPTIONS = {
    TIME: "absolute time-steps",
    "row": "times within the row",
    "linear": "the flattened text",
}


@dataclasses.dataclass(frozen=True)
class Cell(probes.Cell):
    """A training run with one of the distances."""

    distance: str

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return f"{super().name}-{self.distance}"

    def config(self, base: Config, data: Path, tokenizer: Path) -> Config:
        """The config of this run."""
        config = super().config(base, data, tokenizer)
        if self.distance == TIME:
            return config
        method = distances.Places(self.delay, rows=base.grid.sub_max, times=base.grid.time_max)
        model = distances.DistanceConfig(**vars(base.model), distance=self.distance)
        return dataclasses.replace(config, method=method, model=model)


def main(argv: Sequence[str]) -> int:
    """Trains and decodes, and prints the table."""
    known = {kind.name: kind for kind in KINDS}
    parser = cli.Parser(prog="python -m lab.experiments.distance_probes", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="file for all figures")
    parser.add_argument(
        "--workdir", default="runs/distances", metavar="DIR", help="folder of the runs (runs/distances)"
    )
    parser.add_argument("--kinds", default="running_total,copy_end", metavar="A,B", help=f"of {', '.join(known)}")
    parser.add_argument("--delays", default="1,4", metavar="N,N", help="Δt (default: 1,4)")
    parser.add_argument("--seeds", type=cli.whole_number(1), default=2, metavar="N", help="runs of each (default: 2)")
    parser.add_overrides("override a setting of all runs, such as train.steps=4000 (repeatable)")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    kinds = [known[name] for name in names_of("--kinds", flags.kinds, known)]
    delays = [int(delay) for delay in names_of("--delays", flags.delays, [*map(str, range(1, probes.MOST_DELAY + 1))])]
    base = config_lib.override(probes.CONFIG, flags.overrides)
    cells = [
        Cell(kind, delay, seed, distance)
        for seed in range(flags.seeds)
        for kind in kinds
        for delay in delays
        for distance in DESCRIPTIONS
    ]
    results = [
        {"distance": cell.distance, **found}
        for cell, found in zip(cells, probes.run_all(cells, base, Path(flags.workdir)), strict=True)
    ]
    print("\n".join(table(results)))
    if flags.json:
        shown = [{key: value for key, value in r.items() if key not in ("config", "data")} for r in results]
        command = "python -m lab.experiments.distance_probes " + " ".join(argv)
        save(flags.json, {"results": shown, "command": command})
    return 0


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table with the shares of correct rows and answers: means over seeds, with their ranges."""
    found: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for r in results:
        found.setdefault((r["kind"], r["delay"], r["distance"]), []).append(r)
    lines = ["| kind | Δt | distance | rows below the first, % | answers, % |", "|---|--:|---|--:|--:|"]
    for (kind, delay, distance), runs in found.items():
        cells = []
        for key in ("lower_rows", "documents"):
            values = [run[key] for run in runs]
            cells.append(f"{sum(values) / len(values):.1f} ({min(values):.1f} to {max(values):.1f})")
        lines.append(f"| {kind} | {delay} | {DESCRIPTIONS[distance]} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    cli.run(main)
