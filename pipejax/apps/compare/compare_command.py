"""Compares runs by their logs, or decodes a split by several entries and compares scores, steps and times.

pipejax compare RUN RUN ...
pipejax compare --entry run=DIR,method=NAME,draft=NAME --entry ... --split test [--json OUT] [--output PAGE.html]

With RUNs, one line for each run: the scores that it reached, and the steps and minutes it took. With entries, each
entry decodes the same examples, block by block in turns. The first entry is the baseline: gains and speed ratios
compare with it, and their 95 % intervals are from a paired bootstrap.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence

import jax

from pipejax import metrics
from pipejax.apps.compare import bootstrap, quality_page
from pipejax.apps.compare.entries import FORM, Entry, open_all, parse
from pipejax.apps.compare.measurement import FEW, Interval, Results, blocks_of, measure
from pipejax.apps.log_summary import COLUMNS, log_of, summary
from pipejax.data import make_task
from pipejax.data.examples import Example
from pipejax.inference.generator import Generator
from pipejax.inference.lazy_programs import dtype_of
from pipejax.offline.evaluation import examples_of, note_samples, use_data
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress
from pipejax.system.strict_json import JsonObject

READ = ("task", "targets", "rows", "delimiter")  # settings of data that determine the rows


def main(argv: Sequence[str]) -> int:
    """Compares runs by their logs, or entries on a split."""
    parser = cli.Parser(prog="pipejax compare", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="the --workdir of a run of pipejax train")
    parser.add_argument("--entry", action="append", default=[], metavar="ENTRY", help=f"repeatable: {FORM}")
    parser.add_argument("--task", help="task of the data (default: the task of the first entry's training)")
    parser.add_argument("--split", choices=("train", "dev", "test"), help="(default: test)")
    parser.add_number("--batch-size", "examples decoded together (default: 1)", most=2**16)
    parser.add_number("--limit", "use only the first N examples")
    parser.add_number("--seed", "seed of the order in which entries take turns (default: 0)", least=0)
    parser.add_argument("--json", nargs="?", const="-", metavar="OUT", help="print or write JSON")
    parser.add_argument("--output", metavar="PAGE.html", help="write a page with a picture of scores against time")
    parser.add_overrides("a setting of data, for all entries (repeatable)")
    flags = parser.parse_args(argv)
    of_entries = {"--task": flags.task, "--split": flags.split, "--batch-size": flags.batch_size}
    of_entries |= {"--limit": flags.limit, "--seed": flags.seed, "--output": flags.output, "--set": flags.overrides}
    if bool(flags.runs) == bool(flags.entry):
        found = "neither" if not flags.runs else "both"
        raise UserError("compare", found=f"{found} of RUN and --entry", expected="RUN [RUN ...], or --entry")
    if flags.runs:
        if given := [flag for flag, value in of_entries.items() if value]:
            raise UserError(given[0], found="with RUN", expected="with --entry")
        return compare_logs(flags.runs, as_json=flags.json is not None)
    if flags.output and not flags.output.endswith(".html"):
        raise UserError("--output", found=flags.output, expected="a name that ends in .html")
    for flag, target in (("--json", flags.json), ("--output", flags.output)):
        cli.check_output_file(flag, None if target == "-" else target)
    if wrong := [text for text in flags.overrides if not text.startswith("data.")]:
        raise UserError(
            f"--set {wrong[0]}",
            "not a setting of data",
            expected="data.KEY=VALUE",
            hint="other settings are parts of --entry",
        )
    return compare_entries(flags)


def compare_logs(runs: Sequence[str], *, as_json: bool) -> int:
    """Prints a line for each run; see `apps.log_summary`."""
    rows = [summary(run, log_of(run)) for run in runs]
    if as_json:
        print("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    else:
        print(table(COLUMNS, [[row.get(name, "-") for name in COLUMNS] for row in rows]))
    return 0


def compare_entries(flags: argparse.Namespace) -> int:
    """Decodes the split by each entry, and prints and writes the results."""
    entries = [parse(text) for text in flags.entry]
    generators = open_all(entries)
    split = flags.split or "test"
    examples, metric = examples_of(
        generators[0], entries[0].run, task=flags.task, split=split, limit=flags.limit, overrides=flags.overrides
    )
    for own in generators[1:]:  # settings such as data.max_source change answers
        use_data(own, flags.task, flags.overrides)
    for own in generators:
        note_samples(own)
    sources = [
        own_sources(entry, own, generators[0], examples, split=split)
        for entry, own in zip(entries, generators, strict=True)
    ]
    size = generators[0].batch_size_for(min(flags.batch_size or 1, len(examples)))
    blocks = blocks_of(len(examples), size)
    progress = Progress("comparing", (len(examples) + len(blocks[0])) * len(entries), unit="answer")
    seed = flags.seed or 0
    results = measure(entries, generators, sources, metric=metric, batch_size=size, seed=seed, tick=progress.add)
    progress.close()
    if len(blocks) < FEW:
        cli.note(f"warning: {len(blocks)} blocks of examples; intervals of times need at least {FEW}")
    about: JsonObject = {
        "task": generators[0].config.data.task,
        "split": split,
        "examples": len(examples),
        "blocks": len(blocks),
        "batch_size": size,
        "metric": metric,
        "headline": metrics.HEADLINES[metric],
        "confidence": bootstrap.CONFIDENCE,
        "bootstrap_samples": bootstrap.SAMPLES,
        "bootstrap_seed": bootstrap.SEED,
        "order_seed": seed,
        "device": jax.local_devices()[0].device_kind,
    }
    described = [
        {**_described(result), "dtype": dtype_of(own.config).name, **own.origin}
        for result, own in zip(results, generators, strict=True)
    ]
    if flags.json == "-":
        print(json.dumps({**about, "entries": described}, indent=2, ensure_ascii=False))
    else:
        print(table(HEADER, [cells(result, about["headline"]) for result in results]))
    try:
        if flags.json not in (None, "-"):
            text = json.dumps({**about, "entries": described}, indent=2, ensure_ascii=False) + "\n"
            cli.write_output("--json", flags.json, text)
    finally:  # if one output cannot be written, the other one is still written
        if flags.output:
            cli.write_output("--output", flags.output, quality_page.page(results, about, HEADER, cells))
    return 0


def own_sources(
    entry: Entry, own: Generator, first: Generator, examples: Sequence[Example], *, split: str
) -> Sequence[Example]:
    """Returns the examples with the sources that an entry's run reads.

    The template of the run makes the sources, if it differs from the template of the first entry. The reference rows
    are the rows of the first entry.

    Args:
      entry: the entry.
      own: its generator.
      first: the generator of the first entry.
      examples: the examples of the first entry.
      split: their split.

    Raises:
      UserError: the examples lack a field of the template.
    """
    data, base = own.config.data, first.config.data
    differing = [f"data.{key}" for key in READ if getattr(data, key) != getattr(base, key)]
    if differing and own.trained is not None and own.trained.train.method != "none":
        cli.note(
            f"{entry.name}: the rows of the first entry are the reference; the run has other {', '.join(differing)}"
        )
    if not data.source_template or data.source_template == base.source_template:
        return examples
    made = make_task(dataclasses.replace(base, source_template=data.source_template), first.config.grid.row_names)
    found = made.examples(split)[: len(examples)]
    return [dataclasses.replace(example, source=x.source) for example, x in zip(examples, found, strict=True)]


HEADER = (
    "entry", "method", "score", "gain", "steps", "calls", "ms", "ms decoder", "speed", "speed decoder", "MiB", "cut"
)  # fmt: skip


def cells(result: Results, headline: str) -> list[str]:
    """Returns the cells of an entry's line, in the order of `HEADER`."""
    decoder = result.seconds - result.encoder_seconds
    return [
        result.entry.name,
        result.method,
        _shown(result.scores[headline], "{:.2f}"),
        _shown(result.gains[headline], "{:+.2f}"),
        f"{result.steps[0]:.1f}",
        f"{result.calls[0]:.1f}",
        f"{1000 * result.seconds:.1f}",
        f"{1000 * decoder:.1f}",
        _shown(result.speed_ratio, "{:.2f}"),
        _shown(result.decoder_speed_ratio, "{:.2f}"),
        "-" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.0f}",
        str(sum(result.truncated.values())),
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in aligned columns: the first column to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(x.rjust(n) for x, n in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _shown(value: Interval, form: str) -> str:
    """Returns a value with its interval, such as "92.10 [91.30, 92.80]"."""
    middle, low, high = (form.format(x) for x in value)
    return f"{middle} [{low}, {high}]"


def _described(result: Results) -> JsonObject:
    """Returns the results of an entry as an object of JSON."""

    def interval(value: Interval) -> JsonObject:
        return dict(zip(("value", "low", "high"), value, strict=True))

    return {
        "name": result.entry.name,
        "run": result.entry.run,
        "best": result.entry.best,
        "method": result.method,
        "settings": list(result.entry.overrides),
        "scores": {name: interval(value) for name, value in result.scores.items()},
        "gains": {name: interval(value) for name, value in result.gains.items()},
        "steps": interval(result.steps),
        "calls": interval(result.calls),
        "truncated": result.truncated,
        "seconds": result.seconds,
        "encoder_seconds": result.encoder_seconds,
        "speed_ratio": interval(result.speed_ratio),
        "decoder_speed_ratio": interval(result.decoder_speed_ratio),
        "peak_bytes": result.peak_bytes,
    }
