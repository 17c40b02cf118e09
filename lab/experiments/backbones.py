"""Compares the pipelined and the sequential method on the embedded task with each backbone.

    python -m lab.experiments.backbones [--workdir runs/backbones] [--only NAME,...] [--set KEY=VALUE ...]

Small models of each kind, of about the size of `make demo`'s T5, are trained with both methods for the same number of
steps and evaluated on the same unseen documents. The command prints a table and writes WORKDIR/backbones.json. Finished
runs are not trained again.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from lab.benchmarks.systems import names_of
from lab.demo import CONFIG
from pipejax.backbones.t5gemma import GemmaStack, T5GemmaConfig
from pipejax.backbones.t5gemma2 import T5Gemma2Config
from pipejax.backbones.umt5 import UMT5Config
from pipejax.config import METHODS, load
from pipejax.data import make_task
from pipejax.inference.loading import load as open_run
from pipejax.model.backbone import Backbone
from pipejax.offline.evaluation import evaluate
from pipejax.system import cli
from pipejax.training.loop import fit

SIDE = GemmaStack(192, 512, 6, 3, 32, 32, sliding_window=12)  # sources and answers are longer than the window
BACKBONES: dict[str, Backbone] = {
    "umt5": UMT5Config(96, 192, 32, 512, 6, 2, 3, feed_forward="gated-gelu", tied_head=False, scale_head=False),
    "t5gemma": T5GemmaConfig(SIDE, SIDE, 96, 2, 3),
    "t5gemma2": T5Gemma2Config(SIDE, SIDE, 96, 2, 3),
}


def main(argv: Sequence[str]) -> int:
    """Trains and evaluates missing models, prints the table, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.experiments.backbones", description=__doc__)
    parser.add_argument("--workdir", default="runs/backbones", metavar="DIR", help="(runs/backbones)")
    parser.add_argument("--only", default=",".join(BACKBONES), metavar="NAME,...", help=f"of {', '.join(BACKBONES)}")
    parser.add_overrides("override a setting of all runs (repeatable)")
    flags = parser.parse_args(argv)
    results = dict[str, dict[str, dict[str, float]]]()
    for name in names_of("--only", flags.only, BACKBONES):
        results[name] = {}
        for method in METHODS:
            config = load(CONFIG, [*flags.overrides, f"train.method={method}"])
            config = dataclasses.replace(config, model=BACKBONES[name])
            workdir = Path(flags.workdir) / f"{name}_{method}"
            cli.note(f"--- {name}, {method}: {workdir}")
            if code := fit(config, workdir):
                return code
            found, _ = evaluate(open_run(workdir), list(make_task(config.data, config.grid.row_names).examples("test")))
            results[name][method] = {key: float(found[key]) for key in ("em_f1", "steps")}
        own = results[name]
        told = ", ".join(f"{method} F1 {own[method]['em_f1']:.2f} in {own[method]['steps']:.1f}" for method in own)
        print(f"{name}: {told} steps", flush=True)
    cli.write_output("--workdir", str(Path(flags.workdir) / "backbones.json"), json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    cli.run(main)
