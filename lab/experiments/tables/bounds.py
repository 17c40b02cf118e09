"""Counts the effects of bounds on time-steps and rows on real answers, for each data set's bounds and the paper's.

    PIPEJAX_DATA=DIR python -m lab.experiments.tables.bounds [--json FILE]

DIR holds the data sets below as JSON lines with "source" and "targets", and T5's tokenizer in t5_tokenizer/. The
command uses no model: it counts the gold rows. The step ratio divides the steps of whole sequential answers by the
steps of pipelined answers that the bounds may cut, so it is larger if bounds cut answers. The ratio "same tokens"
compares with a sequential decoder that writes only the tokens of the pipelined one.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.benchmarks.systems import save
from lab.experiments import real_data
from lab.experiments.tables.cells import SUB_MAX, TIME_MAX
from pipejax.apps.papers.data_sets import PUBLISHED
from pipejax.apps.papers.texts import plain_text
from pipejax.apps.statistics.split_statistics import Statistics, measure_split
from pipejax.config import DataConfig, GridConfig
from pipejax.data.examples import Example
from pipejax.data.formats import read_records
from pipejax.data.tokenizer import Tokenizer
from pipejax.system import cli
from pipejax.system.progress import Progress

COMMAND = "PIPEJAX_DATA=data python -m lab.experiments.tables.bounds --json OUT"
PRINTED = GridConfig(delay=1, time_max=TIME_MAX, sub_max=SUB_MAX)
FILES = {
    "msqa": ("MSQA test", "multispanqa/test.jsonl"),
    "kp20k": ("KP20k test", "kp20k/test.jsonl.gz"),
    "kptimes": ("KPTimes test", "kptimes/test.jsonl.gz"),
    "wikihow": ("wikiHow", "wikihow/articles_229.jsonl"),
    "cnn_dailymail": ("CNN/DM validation", "cnn_dailymail/validation_1000.jsonl.gz"),
    "sumpubmed": ("SumPubMed test", "sumpubmed/test.jsonl.gz"),
}


def main(argv: Sequence[str]) -> int:
    """Counts, prints a table, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.experiments.tables.bounds", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    data = real_data.directory()
    tokenizer, results = Tokenizer.load(data / "t5_tokenizer"), list[dict[str, Any]]()
    for name, (title, path) in FILES.items():
        published = PUBLISHED[name]
        examples = read(data / path, published.placeholders)
        config = DataConfig(task=name, max_target=published.max_target, separator=published.separator)
        results += lines_of(title, examples, tokenizer, config, published.grid)
    print("\n".join(table(results)))
    if flags.json:
        save(flags.json, {"results": results, "command": COMMAND})
    return 0


def read(path: Path, placeholders: tuple[tuple[str, str], ...]) -> list[Example]:
    """Reads the examples of a file, with placeholders replaced as in training."""
    found = []
    records: Iterable[tuple[str, Any]] = read_records(path)
    for place, record in records:
        rows = (plain_text(row, placeholders) for row in record["targets"])
        found.append(Example(place, plain_text(record["source"], placeholders), tuple(row for row in rows if row)))
    return found


def lines_of(
    title: str, examples: Sequence[Example], tokenizer: Tokenizer, data: DataConfig, own: GridConfig
) -> list[dict[str, Any]]:
    """The counts under the data set's own bounds, and under the paper's."""
    found = []
    for bounds in dict.fromkeys((own, PRINTED)):
        progress = Progress(f"counting {title}", len(examples), unit="example")
        counts = measure_split(examples, tokenizer, data, bounds, tick=progress.add)
        progress.close()
        found.append({"set": title, **line(counts, bounds)})
    return found


def line(counts: Statistics, bounds: GridConfig) -> dict[str, Any]:
    """The counts that the table shows, as a record."""
    return {
        "time_max": bounds.time_max,
        "sub_max": bounds.sub_max,
        "answers": counts["examples"],
        "free_ratio": counts["step_ratio"],
        "cut": counts["cut_percent"]["either"],
        "kept": counts["kept_percent"],
        "bounded_ratio": counts["bounded_ratio"],
        "kept_ratio": counts["kept_ratio"],
    }


def table(results: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the table in Markdown."""
    head = ["data set", "documents", "step ratio, no bounds", "bounds", "answers cut, %", "tokens kept, %"]
    lines, before = [[*head, "step ratio", "same tokens"], ["---", "--:", "--:", "---", *["--:"] * 4]], ""
    for r in results:
        named = [r["set"], f"{r['answers']:,}", f"{r['free_ratio']:.2f}"] if r["set"] != before else [""] * 3
        before = r["set"]
        bounds = f"{r['time_max']}/{r['sub_max']}"
        bounds = f"as printed ({bounds})" if (r["time_max"], r["sub_max"]) == (TIME_MAX, SUB_MAX) else bounds
        cells = [f"{r['cut']:.1f}", f"{r['kept']:.1f}", f"{r['bounded_ratio']:.2f}", f"{r['kept_ratio']:.2f}"]
        lines.append([*named, bounds, *cells])
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    cli.run(main)
