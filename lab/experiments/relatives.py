"""Compares methods and drafters on the demo's task: a small T5 is trained for each method, and all take turns.

    python -m lab.experiments.relatives --json OUT [--workdir runs] [--seeds N] [--limit N] [--set KEY=VALUE ...]

`pipejax compare` compares the runs, once for each seed of the training, and its pages with pictures are
WORKDIR/relatives-SEED.html. The runs of the first seed are the runs of `make demo`. Finished runs are not trained
again.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks.systems import machine, save
from lab.demo import CONFIG
from pipejax.apps.compare import compare_command
from pipejax.apps.teach.tagging import teach_tagger
from pipejax.config import METHODS, load
from pipejax.data import make_task
from pipejax.system import cli
from pipejax.system.files import write_text
from pipejax.training.loop import fit

# The settings of each training, by the name of its run.
TRAININGS = {
    **{f"demo_long_{name}": (f"train.method={name}",) for name in METHODS},
    "demo_long_branching": ("method=branching",),
}
LABELLED = 2000  # the sources whose answers train the tagger
TAGGED = "demo_long_tagged"  # the run of the pipelined method with a tagger, which `pipejax teach --tagger` trains
# The entries of the comparison: the name of a run, and the rest of the entry. The first one is the baseline.
ENTRIES = (
    ("demo_long_sequential", "name=sequential"),
    ("demo_long_sequential", "draft=source,name=sequential with drafts of source"),
    ("demo_long_pipelined", "name=pipelined"),
    ("demo_long_pipelined", "draft=source,name=pipelined with drafts of source"),
    ("demo_long_pipelined", "draft=jacobi,name=pipelined with drafts of jacobi"),
    (TAGGED, "draft=spans,name=pipelined with drafts of spans"),
    ("demo_long_branching", "name=branching"),
    ("demo_long_branching", "method=branching,method.least=10,name=branching with 10 phrases at least"),
)


def main(argv: Sequence[str]) -> int:
    """Trains and compares the methods, and prints a table."""
    parser = cli.Parser(prog="python -m lab.experiments.relatives", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="file for all figures")
    parser.add_argument("--workdir", default="runs", metavar="DIR", help="folder of the runs (default: runs)")
    parser.add_argument(
        "--seeds", type=cli.whole_number(1), default=2, metavar="N", help="trainings of each method (default: 2)"
    )
    parser.add_argument("--limit", type=cli.whole_number(1), metavar="N", help="use only the first N test examples")
    parser.add_overrides("override a setting of all runs (repeatable)")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    root, results = Path(flags.workdir), list[dict[str, Any]]()
    for seed in range(flags.seeds):
        for name, settings in TRAININGS.items():
            place = root / run_of(name, seed)
            cli.note(f"--- {place}")
            if code := fit(load(CONFIG, [*settings, f"train.seed={seed}", *flags.overrides]), place):
                return code
        if code := add_tagger(root, seed):
            return code
        found = compared(root, seed, limit=flags.limit)
        results += [{"seed": seed, "headline": found["headline"], **entry} for entry in found["entries"]]
    print("\n".join(table(results)))
    if flags.json:
        command = " ".join(["python -m lab.experiments.relatives", *argv])
        facts = {key: found[key] for key in ("task", "split", "examples", "confidence", "order_seed")}
        save(flags.json, {"results": results, "machine": machine(os.cpu_count() or 1), "command": command, **facts})
    return 0


def run_of(name: str, seed: int) -> str:
    """The directory of a run; the first seed has the directory of `make demo`."""
    return f"{name}-{seed}" if seed else name


def add_tagger(root: Path, seed: int) -> int:
    """Trains the tagger of a seed on the answers of its pipelined run; returns the exit code."""
    place, sources = root / run_of(TAGGED, seed), root / "relatives-sources.jsonl"
    cli.note(f"--- {place}")
    examples = make_task(load(CONFIG).data).examples("train")[:LABELLED]
    write_text(sources, "".join(json.dumps({"id": e.id, "source": e.source}) + "\n" for e in examples))
    return teach_tagger(str(root / run_of("demo_long_pipelined", seed)), str(sources), place)


def compared(root: Path, seed: int, *, limit: int | None) -> dict[str, Any]:
    """The results of `pipejax compare` over the runs of a seed."""
    out, page = root / f"relatives-{seed}.json", root / f"relatives-{seed}.html"
    entries = [f"--entry=run={root / run_of(name, seed)},{rest}" for name, rest in ENTRIES]
    limited = [] if limit is None else ["--limit", str(limit)]
    compare_command.main([*entries, *limited, "--json", str(out), "--output", str(page)])
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a Markdown table, one for each entry, with the figures of all seeds."""
    names = dict.fromkeys(result["name"] for result in results)
    lines = [
        f"| method | {results[0]['headline']} | steps | calls | ms an example | speed | speed of the decoder | cut |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in names:
        own = [result for result in results if result["name"] == name]
        columns = [
            ["{value:.2f} ({low:.2f} to {high:.2f})".format(**r["scores"][r["headline"]]) for r in own],
            [f"{r['steps']['value']:.2f}" for r in own],
            [f"{r['calls']['value']:.2f}" for r in own],
            [f"{1000 * r['seconds']:.1f}" for r in own],
            ["{value:.2f} ({low:.2f} to {high:.2f})".format(**r["speed_ratio"]) for r in own],
            ["{value:.2f} ({low:.2f} to {high:.2f})".format(**r["decoder_speed_ratio"]) for r in own],
            [str(sum(r["truncated"].values())) for r in own],
        ]
        lines.append(f"| {name} | {' | '.join('; '.join(cells) for cells in columns)} |")
    return lines


if __name__ == "__main__":
    cli.run(main)
