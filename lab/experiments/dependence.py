"""Tests `pipejax probe` on tasks whose dependence is known: do its costs predict which rows fail after training?

    python -m lab.experiments.dependence --json docs/dependence.json [--workdir runs/probes] [--updates N]

For each kind of `lab/experiments/probe_data.py` the command trains the sequential model of `lab.experiments.probes`,
runs `pipejax probe` on 512 unseen documents, and compares the cost of each Δt with the rows that training with this Δt
loses: rows below the first that are correct for the sequential decoder and wrong for the pipelined one. Trained models
are not trained again, and measurements with the same number of updates are not repeated.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.experiments import probe_data, probes
from lab.experiments.probe_data import KINDS, Kind
from pipejax.apps import demo
from pipejax.apps.probe import probe_command
from pipejax.apps.probe.summary import is_significant
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.training.loop import fit

TRAINED = Path(__file__).parents[2] / "docs/probes.json"
SEED = 0


def main(argv: Sequence[str]) -> int:
    """Trains and measures the models, and prints a table."""
    parser = cli.Parser(prog="python -m lab.experiments.dependence", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="file for all figures")
    parser.add_argument(
        "--workdir", default="runs/probes", metavar="DIR", help="folder of the runs (default: runs/probes)"
    )
    parser.add_argument("--trained", default=str(TRAINED), metavar="FILE", help="results of lab.experiments.probes")
    parser.add_argument(
        "--updates",
        type=cli.whole_number(0),
        default=probe_command.UPDATES,
        metavar="N",
        help="updates of the models",
    )
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    gaps = read_gaps(flags.trained)
    kinds = {kind.name: gaps[kind.name] | measure(kind, Path(flags.workdir), flags.updates) for kind in KINDS}
    found = {"updates": flags.updates, "seed": SEED, "delays": probes.DELAYS, **correlations(kinds), "kinds": kinds}
    print(report(found))
    if flags.json:
        cli.write_output("--json", flags.json, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return 0


def read_gaps(path: str) -> dict[str, dict[str, list[float]]]:
    """The percentages of rows that each kind loses with each Δt: the mean over seeds, and the least.

    Raises:
      UserError: the file does not have these figures.
    """
    found = dict[str, dict[str, list[float]]]()
    try:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        for kind in KINDS:
            whole, *with_delay = (probes.values(cells, kind, n, "lower_rows") for n in (0, *probes.DELAYS))
            lost = [[sum(whole) / len(whole) - right for right in of_seeds] for of_seeds in with_delay]
            found[kind.name] = {"lost": [sum(one) / len(one) for one in lost], "least_lost": [min(one) for one in lost]}
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError) as error:
        raise UserError(
            f"--trained {path}", found=f"{error!r}", expected="results of lab.experiments.probes"
        ) from error
    return found


def measure(kind: Kind, workdir: Path, updates: int) -> dict[str, Any]:
    """Measures the costs of a kind in nats by Δt: all costs, and with 0 for costs that are not significant."""
    cell = probes.Cell(kind, 0, SEED)
    files = {split: workdir / f"{kind.name}{suffix}.jsonl" for split, suffix in (("train", ""), ("test", "-test"))}
    tokenizer, run = workdir / "tokenizer", workdir / cell.name
    if not tokenizer.is_dir():
        demo.build_tokenizer(tokenizer, probe_data.WORDS)
    for split, path in files.items():
        probes.write_examples(path, probe_data.examples(kind, split, probes.EXAMPLES[split]))
    if code := fit(cell.config(probes.CONFIG, files["train"], tokenizer), run):
        raise SystemExit(code)
    output = workdir / f"{cell.name}-probed-{updates}"
    if not (output / probe_command.PAGE).is_file():
        learn = ["--adapt", str(files["train"]), "--updates", str(updates)] if updates else []
        given = ["--checkpoint", str(run), "--input", str(files["test"]), "--output", str(output), "--batch-size", "64"]
        probe_command.main([*given, *learn, "--resume"])
    found = json.loads((output / probe_command.NUMBERS).read_text(encoding="utf-8"))
    costs = [found["conditions"][f"delay_{delay}"] for delay in probes.DELAYS]
    return {
        "costs": [part["cost"] for part in costs],
        "errors": [part["error"] for part in costs],
        "told": [part["cost"] if is_significant(part) else 0.0 for part in costs],
        "hidden": found["conditions"]["hidden"]["cost"],
        "nll": found["nll"]["whole"],
        "says": found["says"],
    }


def correlations(kinds: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Spearman's correlations between costs and lost rows, over all kinds and Δt."""

    def of(key: str) -> list[float]:
        return [number for found in kinds.values() for number in found[key]]

    return {f"spearman_{key}": spearman(of("told"), of(key)) for key in ("lost", "least_lost")}


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of ranks. Equal numbers share their mean rank; it is 0 if all numbers of one are equal."""

    def centred(numbers: Sequence[float]) -> list[float]:
        ordered = sorted(numbers)
        ranks = [ordered.index(number) + (ordered.count(number) - 1) / 2 for number in numbers]
        return [rank - (len(ranks) - 1) / 2 for rank in ranks]

    a, b = centred(one), centred(other)
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product / ((sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5 or 1.0)


def report(found: dict[str, Any]) -> str:
    """A Markdown table with the cost of each Δt and the rows lost in training with it."""
    head = [f"Δt = {delay}: nats, rows lost" for delay in found["delays"]]
    lines = [f"| kind | {' | '.join(head)} | hidden |", "|---|" + "---|" * (len(head) + 1)]
    for name, one in found["kinds"].items():
        cells = [f"{cost:.3f}, {lost:.1f} %" for cost, lost in zip(one["told"], one["lost"], strict=True)]
        lines.append(f"| {name} | {' | '.join(cells)} | {one['hidden']:.3f} |")
    lines.append("")
    lines.append(
        f"Spearman's correlation: {found['spearman_lost']:.2f} with the mean of the seeds, "
        f"{found['spearman_least_lost']:.2f} with the better seed of each."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
