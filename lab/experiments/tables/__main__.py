"""Measures the paper's Tables 1 to 5 and Figures 4 and 5, and prints them with the numbers of the paper.

    python -m lab.experiments.tables --output DIR --run [--tasks msqa,kp20k] [--sizes base,large] [--delays 2,3]
    python -m lab.experiments.tables --output DIR                  # collects finished runs in --workdir

--run trains and evaluates missing models. Each model is a run directory WORKDIR/TASK_SIZE_OBJECTIVE, trained by
train.py with configs/TASK.py and the settings of its size and method, and evaluated by `python -m pipejax evaluate` at
batch 1, so you can also put runs from other machines there. Decoding computes in float32, as the paper did according to
its memory figures, and in bfloat16 on a second line. If a config has wider bounds than the paper's 50 steps and 20
rows, rows are also decoded under the paper's bounds. With --set data.tokenizer=DIR, the directory of T5's tokenizer,
answers are counted under both bounds. After an interruption the same command continues. It writes DIR/tables.md,
figure_4.png, figure_5.png and results.json. The size "scratch" is a small T5 for machines without a GPU, pretrained by
`python -m lab.experiments.pretraining`: the comparison is the same, but its scores are not comparable with the paper's.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.experiments.tables import bounds, paper, report
from lab.experiments.tables.cells import DTYPES, SIZES, Cell, Scores, Way, gap, grid_of, make, read, ways_of
from pipejax import metrics
from pipejax.apps.statistics.split_statistics import measure_split
from pipejax.config import METHODS
from pipejax.data import make_task
from pipejax.data.tokenizer import Tokenizer
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.files import write_text
from pipejax.system.progress import Progress


def main(argv: Sequence[str]) -> int:
    """Makes or collects the runs, and writes tables and figures."""
    parser = cli.Parser(prog="python -m lab.experiments.tables", description=__doc__)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for tables and figures")
    parser.add_argument("--workdir", default="runs", metavar="DIR", help="folder of the runs (default: runs)")
    parser.add_argument("--run", action="store_true", help="train and evaluate missing models")
    parser.add_argument("--tasks", default=",".join(paper.TITLES), metavar="A,B", help="tasks (default: all six)")
    parser.add_argument("--sizes", default="base", metavar="A,B", help=f"some of {', '.join(SIZES)} (default: base)")
    parser.add_argument("--delays", default="", metavar="2,3", help="further Δt for Table 5, with --run")
    parser.add_argument("--splits", default="dev,test", metavar="A,B", help="splits to evaluate (default: dev,test)")
    known = ",".join(DTYPES)
    parser.add_argument("--dtypes", default=known, metavar="A,B", help=f"dtypes of decoding (default: {known})")
    parser.add_argument("--limit", type=int, metavar="N", help="evaluate only the first N documents, with --run")
    parser.add_argument("--crossed", action="store_true", help="evaluate each model with the other decoder, too")
    parser.add_argument(
        "--beams", type=int, default=1, metavar="N", help="evaluate sequential models with beam search, too"
    )
    parser.add_overrides("override a setting of all trainings (repeatable)")
    flags = parser.parse_args(argv)
    tasks, sizes = _chosen("--tasks", flags.tasks, paper.TITLES), _chosen("--sizes", flags.sizes, SIZES)
    splits = _chosen("--splits", flags.splits, ("dev", "test"))
    dtypes = _chosen("--dtypes", flags.dtypes, DTYPES)
    delays = [int(delay) for delay in _chosen("--delays", flags.delays, ("2", "3"))] if flags.delays else []
    for flag, value in (("--limit", flags.limit), ("--beams", flags.beams)):
        if value is not None and value < 1:
            raise UserError(flag, found=f"{value}", expected="at least 1")
    output, workdir = Path(flags.output), Path(flags.workdir)
    cells = grid_of(tasks, sizes, dict.fromkeys(paper.TABLES[4], delays))
    if not cells:
        raise UserError(
            f"--sizes {flags.sizes}", found=f"no config of {flags.tasks} in that size", expected="one in configs/"
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {output}", f"cannot be written ({error.strerror})") from error
    if flags.run:
        for cell in cells:
            cell.config(flags.overrides)  # a wrong setting is an error before hours of work
        for cell in cells:
            ways = ways_of(cell, dtypes, flags.overrides)
            if flags.crossed and cell.delay == 1:
                ways += [Way(strategy, dtype=dtypes[0]) for strategy in METHODS if strategy != cell.objective]
            if flags.beams > 1 and cell.objective == "sequential":
                ways.append(Way("sequential", flags.beams, dtypes[0]))
            options = {"splits": splits, "overrides": flags.overrides, "limit": flags.limit, "ways": ways}
            if code := make(cell, workdir.absolute(), **options):
                return code
    _write(output, workdir, tasks, sizes, splits, dtypes, flags.beams, flags.overrides)
    return 0


def _write(
    output: Path,
    workdir: Path,
    tasks: list[str],
    sizes: list[str],
    splits: list[str],
    dtypes: list[str],
    beams: int,
    overrides: Sequence[str],
) -> None:
    every = grid_of(tasks, sizes, dict.fromkeys(paper.TABLES[4], paper.DELAYS[1:]))
    first = dtypes[0]
    beam = [Way("sequential", beams, first)] if beams > 1 else []
    ways = [Way("sequential", dtype=first), *beam, Way("pipelined", dtype=first)]
    own = {cell: ways_of(cell, dtypes, overrides) for cell in every}
    results = {
        (cell, split, way): found
        for cell in every
        for split in splits
        for way in dict.fromkeys([*own[cell], *ways])
        if (found := read(cell, workdir, split, way))
    }
    gaps = {}
    for task, size, split in {(cell.task, cell.size, split) for cell, split, _ in results}:
        both = {objective: Cell(task, size, objective) for objective in METHODS}
        pair = [results.get((both[s], split, Way(s, dtype=first))) for s in METHODS]
        if pair[0] and pair[1]:
            if pair[0]["examples"] != pair[1]["examples"]:
                raise UserError(
                    both["pipelined"].name, found="other documents than in the evaluation of its counterpart"
                )
            gaps[task, size, split] = gap(both, workdir, split, pair[0]["metric"], first)
    statistics, counted = _statistics(tasks, sizes[0], overrides)
    parts = [("Table 1: the data sets", report.table_1(statistics))]
    parts.append(("The bounds on steps and rows, test split", "\n".join(bounds.table(counted)) if counted else ""))
    for number, members in paper.TABLES.items():
        wanted = [task for task in members if task in tasks]
        text = report.table_of_scores(wanted, sizes, splits, own, results, gaps) if wanted else ""
        parts.append((f"Table {number}: {', '.join(paper.TITLES[task] for task in members)}", text))
    sentences = [task for task in paper.TABLES[4] if task in tasks]
    parts.append(("Table 5: Δt, test split", report.table_5(sentences, sizes[0], first, results)))
    last = splits[-1]
    several = [c for c in every if c.delay == 1 and sum((c, last, way) in results for way in ways) > 1]
    text = report.crossed(several, ways, last, results)
    parts.append(("Models and decoders", text))
    pictures = _draw(output, tasks, sizes[0], last, first, results)
    text = "\n\n".join(f"## {title}\n\n{body or 'Nothing measured.'}" for title, body in parts)
    head = (
        'Columns headed "paper" have the numbers of arXiv 2506.23431; all other numbers were measured by this command. '
        "Gaps are pipelined minus sequential, with the 95 % interval of a paired bootstrap over the documents. Steps, "
        f"speed and memory were measured on the {last} split at batch 1.\n"
    )
    write_text(output / "tables.md", f"{head}\n{text}\n{pictures}")
    values = [{**dataclasses.asdict(c), "split": s, **way._asdict(), **found} for (c, s, way), found in results.items()]
    rows = [{"task": t, "size": s, "split": p, "gap": found} for (t, s, p), found in sorted(gaps.items())]
    write_text(output / "results.json", json.dumps({"results": values, "gaps": rows}, indent=1) + "\n")
    cli.note(f"{len(results)} evaluations; written to {output / 'tables.md'}")


def _statistics(
    tasks: Sequence[str], size: str, overrides: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The statistics of the tasks whose data exist, for Table 1; with a tokenizer also the effects of bounds."""
    found: dict[str, dict[str, Any]] = {}
    counted = list[dict[str, Any]]()
    for task in tasks:
        cell = Cell(task, size, "pipelined")
        try:
            config = cell.config(overrides)
            task_data = make_task(config.data, config.grid.row_names)
            test = task_data.examples("test")
            train = len(task_data.examples("train"))
            tokenizer = Tokenizer.load(config.data.tokenizer) if config.data.tokenizer else None
        except UserError as error:
            cli.note(f"Table 1, {paper.TITLES[task]}: {error}")
            continue
        progress = Progress(f"reading {paper.TITLES[task]}", len(test), unit="example")
        found[task] = measure_split(test, None, config.data, config.grid, tick=progress.add) | {"train": train}
        progress.close()
        if tokenizer:
            counted += bounds.lines_of(paper.TITLES[task], test, tokenizer, config.data, config.grid)
    return found, counted


def _draw(output: Path, tasks: Sequence[str], size: str, split: str, dtype: str, results: report.Results) -> str:
    """Draws the figures for which there are measurements; returns their Markdown."""
    pairs: dict[str, tuple[Scores, Scores]] = {}
    for task in tasks:
        both = [results.get((Cell(task, size, s), split, Way(s, dtype=dtype))) for s in ("sequential", "pipelined")]
        if both[0] and both[1]:
            pairs[task] = both[0], both[1]
    if not pairs:
        return ""
    try:
        from lab.experiments.tables import figures
    except ModuleNotFoundError as error:
        raise UserError("figures", found=f"no {error.name}; install requirements/lab.txt") from error
    figures.speed_up({t: (a["by_rows"], b["by_rows"]) for t, (a, b) in pairs.items()}, output / "figure_4.png")
    task = "wikihowqa" if "wikihowqa" in pairs else next(iter(pairs))
    before, after = pairs[task]
    score = metrics.HEADLINES[before["metric"]]
    title = paper.TITLES[task]
    says = f"\n{paper.FIGURE_5_SAYS}\n" if task == "wikihowqa" else ""  # the paper's figure shows this task
    figures.quality(title, score, before["by_rows"], after["by_rows"], output / "figure_5.png")
    return (
        f"\n## Figure 4: speed-up by the number of rows\n\n![speed-up](figure_4.png)\n"
        f"\n## Figure 5: quality by the number of rows ({title})\n\n![quality](figure_5.png)\n{says}"
    )


def _chosen(flag: str, text: str, known: Any) -> list[str]:
    """The names in a list with commas; raises a UserError for a name that is not in `known`."""
    wanted = text.split(",")
    for name in wanted:
        if name not in known:
            raise UserError(flag, found=f"{name!r}", expected=f"some of {', '.join(known)}")
    return list(dict.fromkeys(wanted))


if __name__ == "__main__":
    cli.run(main)
