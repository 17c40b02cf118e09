"""`make demo`: trains the embedded task with both objectives and compares both decoders on unseen documents.

    python -m experiments.demo [--workdir runs] [--set KEY=VALUE ...]

Prints one table and writes a page that plays one example's grid. Runs that are finished are not trained again.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipejax.config import STRATEGIES, Config, load
from pipejax.data import make_task
from pipejax.data.core import Example
from pipejax.inference import picture
from pipejax.inference.evaluation import evaluate
from pipejax.inference.generator import Generator, Record, texts
from pipejax.inference.generator import load as open_run
from pipejax.system import cli
from pipejax.system.progress import Progress
from pipejax.training.loop import fit

CONFIG = Path(__file__).parent.parent / "configs" / "demo.py"
ROUNDS = 3  # of the timing, in turn A B A B; the best of each counts


def main(argv: Sequence[str]) -> int:
    """Trains, decodes, prints, draws."""
    parser = cli.Parser(prog="python -m experiments.demo", description=__doc__)
    parser.add_argument("--workdir", default="runs", metavar="DIR", help="holds one run a decoder (default: runs)")
    parser.add_overrides("override a setting of both runs (repeatable)")
    flags = parser.parse_args(argv)
    root = Path(flags.workdir)
    generators: dict[str, Generator] = {}
    for strategy in STRATEGIES:
        config = load(CONFIG, [*flags.overrides, f"train.objective={strategy}"])
        workdir = root / f"demo_{strategy}"
        cli.note(f"--- {strategy}: {workdir}")
        if code := fit(config, workdir):
            return code
        generators[strategy] = open_run(workdir)
    test = list(make_task(config.data).examples("test"))
    results, records = compare(generators, test)
    print(table(results))
    draw(generators["pipelined"].config, test, records, root / "demo.html")
    (root / "demo.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(
        f"\nOne example, step by step: {root / 'demo.html'} (open it in a browser)   All figures: {root / 'demo.json'}"
    )
    return 0


def compare(generators: dict[str, Generator], test: list[Example]) -> tuple[dict[str, dict[str, Any]], list[Record]]:
    """The evaluation of each strategy at batch 1, timed in turn; and the pipelined records."""
    results: dict[str, dict[str, Any]] = {}
    records: list[Record] = []
    progress = Progress("decoding the test split", 2 * ROUNDS * len(test), unit="example")
    for _ in range(ROUNDS):
        for strategy, generator in generators.items():
            found, decoded = evaluate(generator, test, batch_size=1, tick=progress.add)
            if strategy == "pipelined":
                records = decoded
            best = results.setdefault(strategy, found)
            best["examples_per_second"] = max(best["examples_per_second"], found["examples_per_second"])
    progress.close()
    return results, records


def table(results: dict[str, dict[str, Any]]) -> str:
    """One line a decoder."""
    base = results["sequential"]
    count = base["examples"]
    ideal = results["pipelined"]["step_ratio"]
    lines = [
        f"\n{count} unseen documents of the generated task, batch 1, this machine\n",
        f"{'decoder':<12}{'exact-match F1':>16}{'steps':>8}{'step ratio':>12}{'examples/s':>12}{'speed-up':>10}",
    ]
    for strategy in ("sequential", "pipelined"):
        r = results[strategy]
        lines.append(
            f"{strategy:<12}{r['em_f1']:>16.2f}{r['steps']:>8.2f}{base['steps'] / r['steps']:>12.2f}"
            f"{r['examples_per_second']:>12.1f}{r['examples_per_second'] / base['examples_per_second']:>9.2f}x"
        )
    lines.append(f"\nThe lengths of the pipelined answers predict a step ratio of {ideal:.2f}.")
    return "\n".join(lines)


def draw(config: Config, test: list[Example], records: list[Record], path: Path) -> None:
    """The page of a right answer with many rows."""
    right = [i for i, (e, r) in enumerate(zip(test, records, strict=True)) if list(e.targets) == r["rows"]]
    chosen = max(
        right or range(len(test)), key=lambda i: (min(len(texts(records[i])), 5), sum(map(len, records[i]["row_ids"])))
    )
    record = records[chosen]
    tokens = [row.split() for row in texts(record)]
    page = picture.html(
        tokens,
        delay=config.grid.delay,
        truncated=record["truncated"],
        steps=record["steps"],
        source=test[chosen].source,
        texts=record["rows"],
    )
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    cli.run(main)
