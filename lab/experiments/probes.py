"""Measures the harm of partial dependence: small models on generated tasks with several degrees of dependence of rows.

    python -m lab.experiments.probes --json probes.json --png probes.png [--workdir runs/probes] [--set KEY=VALUE ...]

For each kind of dependence (`lab/experiments/probe_data.py`) and seed the command trains the sequential method and the
pipelined method with each Δt, decodes 512 unseen documents, and prints Markdown tables. Finished runs are not trained
again: after an interruption the same command continues.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.experiments import probe_data
from lab.experiments.probe_data import KINDS, Kind, marks, whole
from pipejax import config as config_lib
from pipejax.apps import demo
from pipejax.config import Config, DataConfig, DecodeConfig, GridConfig, T5Config, TrainConfig
from pipejax.data.examples import Example
from pipejax.inference.answers import Record, texts
from pipejax.inference.loading import load as open_run
from pipejax.offline.evaluation import evaluate
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.files import write_text
from pipejax.training.loop import fit

DELAYS = (1, 2, 4)
MOST_DELAY = 16  # three rows then still end well before time_max
SEEDS = 2
EXAMPLES = {"train": 24_000, "test": 512}
CONFIG = Config(
    name="probe",
    model=T5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_heads=4, num_layers=1, num_decoder_layers=2),
    grid=GridConfig(time_max=64, sub_max=5),
    data=DataConfig(task="jsonl", max_source=16, max_target=32, separator=f" {demo.SEPARATOR} "),
    train=TrainConfig(
        steps=1400,
        batch_size=16,
        learning_rate=3e-3,
        schedule="linear",
        warmup_steps=100,
        beta2=0.98,
        dropout=0.0,
        log_every=100,
        checkpoint_every=500,
        keep_checkpoints=1,
    ),
    decode=DecodeConfig(max_length=24, batch_size=64),
)
PLACES = ("data.train", "data.tokenizer")  # settings that do not change a result
VARIED = ("grid.delay", "train.method", "train.seed", "train.steps")  # settings that differ between cells


@dataclasses.dataclass(frozen=True)
class Cell:
    """A training run: a kind, a decoder and a seed."""

    kind: Kind
    delay: int  # 0: sequential
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return f"{self.kind.name}-{f'delay{self.delay}' if self.delay else 'sequential'}-seed{self.seed}"

    def config(self, base: Config, data: Path, tokenizer: Path) -> Config:
        """The config of this run."""
        method = "pipelined" if self.delay else "sequential"
        return dataclasses.replace(
            base,
            grid=dataclasses.replace(base.grid, delay=max(self.delay, 1)),
            data=dataclasses.replace(base.data, train=str(data), tokenizer=str(tokenizer)),
            train=dataclasses.replace(
                base.train, steps=base.train.steps * self.kind.training, method=method, seed=self.seed
            ),
        )


def main(argv: Sequence[str]) -> int:
    """Trains and decodes, prints the tables, and draws the figure."""
    names = [kind.name for kind in KINDS]
    parser = cli.Parser(prog="python -m lab.experiments.probes", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="file for all figures")
    parser.add_argument("--png", metavar="OUT", help="file for the picture (.png, .svg or .pdf; needs matplotlib)")
    parser.add_argument(
        "--workdir", default="runs/probes", metavar="DIR", help="folder of the runs (default: runs/probes)"
    )
    parser.add_argument(
        "--kinds", default=",".join(names), metavar="A,B", help=f"some of {', '.join(names)}; default: all"
    )
    parser.add_argument(
        "--delays", default=",".join(map(str, DELAYS)), metavar="N,N", help="values of Δt (default: 1,2,4)"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=SEEDS,
        metavar="N",
        help=f"seeds, one run of each model for each (default: {SEEDS})",
    )
    parser.add_overrides("override a setting of all runs, such as train.steps=4000 (repeatable)")
    flags = parser.parse_args(argv)
    kinds, delays = _kinds(flags.kinds), _delays(flags.delays)
    if flags.seeds < 1:
        raise UserError("--seeds", found=f"{flags.seeds}", expected="at least 1")
    cli.check_output_file("--json", flags.json)
    cli.check_output_file("--png", flags.png)
    if flags.png:
        if Path(flags.png).suffix not in (".png", ".svg", ".pdf"):
            raise UserError("--png", found=f"{flags.png}", expected="a name that ends in .png, .svg or .pdf")
        from lab.experiments import probe_figure  # imported here, to fail before the training if matplotlib is missing
    base = config_lib.override(CONFIG, flags.overrides)
    cells = [Cell(kind, delay, seed) for seed in range(flags.seeds) for kind in kinds for delay in (0, *delays)]
    results = list(run_all(cells, base, Path(flags.workdir)))
    print(report(results, kinds, delays))
    if flags.json:
        cli.write_output("--json", flags.json, _document(results, base, delays))
    if flags.png:
        bars = {(kind, delay): values(results, kind, delay, "lower_rows") for kind in kinds for delay in (0, *delays)}
        probe_figure.draw(bars, Path(flags.png))
    return 0


def run_all(cells: Sequence[Cell], base: Config, workdir: Path) -> Iterator[dict[str, Any]]:
    """Yields the result of each cell; exits with the exit code of a training run that was stopped."""
    tokenizer = workdir / "tokenizer"
    if not tokenizer.is_dir():
        demo.build_tokenizer(tokenizer, probe_data.WORDS)
    tests = {kind: list(probe_data.examples(kind, "test", EXAMPLES["test"])) for kind in {c.kind for c in cells}}
    spent: list[float] = []
    for number, cell in enumerate(cells):
        data = workdir / f"{cell.kind.name}.jsonl"
        digest = write_examples(data, probe_data.examples(cell.kind, "train", EXAMPLES["train"]))
        config, directory = cell.config(base, data, tokenizer), workdir / cell.name
        path = directory / "result.json"
        if path.is_file():
            yield _read_result(path, config, digest)
            continue
        left = f"; about {sum(spent) / len(spent) * (len(cells) - number) / 60:.0f} min left" if spent else ""
        cli.note(f"--- {number + 1} of {len(cells)}: {cell.name}{left}")
        begun = time.perf_counter()
        if code := fit(config, directory):
            raise SystemExit(code)
        result = {"cell": cell.name, "kind": cell.kind.name, "delay": cell.delay, "seed": cell.seed}
        result |= decode(cell, directory, tests[cell.kind])
        result |= {"data": digest, "config": _settings(config)}
        spent.append(time.perf_counter() - begun)
        write_text(path, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        yield result


def decode(cell: Cell, directory: Path, test: Sequence[Example]) -> dict[str, Any]:
    """Decodes the test split; returns the steps and percentages of correct rows, lower rows, places and answers."""
    generator = open_run(directory)
    size = min(generator.config.decode.batch_size, len(test))
    values, records = evaluate(generator, test, batch_size=size)
    return score(cell.kind, test, records) | {key: values[key] for key in ("examples", "steps", "truncated")}


def score(kind: Kind, test: Sequence[Example], records: Sequence[Record]) -> dict[str, Any]:
    """See `decode`."""
    right = [marks(kind, e.targets, texts(r)) for e, r in zip(test, records, strict=True)]
    places = [[row[i] for row in right if len(row) > i] for i in range(max(map(len, right)))]
    return {
        "rows": _percent([mark for row in right for mark in row]),
        "lower_rows": _percent([mark for row in right for mark in row[1:]]),
        "rows_by_place": [_percent(place) for place in places],
        "documents": _percent([whole(kind, e.targets, texts(r)) for e, r in zip(test, records, strict=True)]),
    }


def report(results: Sequence[dict[str, Any]], kinds: Sequence[Kind], delays: Sequence[int]) -> str:
    """Markdown tables of the quality by kind and decoder, and a line with the steps."""
    seeds = len({r["seed"] for r in results})
    columns = (0, *delays)
    titles = ["sequential", *(f"Δt = {delay}" for delay in delays)]
    head = ["| kind | tokens that a row needs from the rows above | least sufficient Δt | " + " | ".join(titles) + " |"]
    head.append("|---|---|---|" + "---|" * len(titles))
    lines: list[str] = []
    for key, what in (("lower_rows", "Correct rows below the first"), ("documents", "Correct answers")):
        lines += [
            f"{what}, per cent: mean over {seeds} seeds (least to most); in italics if Δt is too small",
            "",
        ]
        lines += head
        for kind in kinds:
            shown = [_spread(values(results, kind, column, key), 0 < column < kind.delay) for column in columns]
            lines.append(f"| {kind.name} | {kind.description} | {kind.delay} | " + " | ".join(shown) + " |")
        lines.append("")
    steps = [_mean([v for kind in kinds for v in values(results, kind, column, "steps")]) for column in columns]
    lines.append(
        "Decoder steps on average: " + ", ".join(f"{t} {s:.1f}" for t, s in zip(titles, steps, strict=True)) + "."
    )
    return "\n".join(lines)


def values(results: Sequence[dict[str, Any]], kind: Kind, delay: int, key: str) -> list[float]:
    """A figure of a kind and decoder, for each seed."""
    return [r[key] for r in results if r["kind"] == kind.name and r["delay"] == delay]


def _spread(numbers: Sequence[float], short: bool) -> str:
    mean = f"{_mean(numbers):.1f}"
    return f"{f'*{mean}*' if short else mean} ({min(numbers):.1f} to {max(numbers):.1f})"


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _percent(truths: Sequence[bool]) -> float:
    return 100 * sum(truths) / max(len(truths), 1)


def _settings(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config_lib.flat(config).items() if key not in PLACES}


def _document(results: Sequence[dict[str, Any]], base: Config, delays: Sequence[int]) -> str:
    """All figures as JSON, with a line for each cell, and the settings that all cells share."""
    shared = {key: value for key, value in _settings(base).items() if key not in VARIED}
    cells = [
        json.dumps(
            {key: value for key, value in r.items() if key != "config"} | {"train.steps": r["config"]["train.steps"]}
        )
        for r in results
    ]
    head = json.dumps({"delays": delays, "examples": EXAMPLES, "config": shared}, indent=2, ensure_ascii=False)
    return head.removesuffix("\n}") + ',\n  "cells": [\n    ' + ",\n    ".join(cells) + "\n  ]\n}\n"


def write_examples(path: Path, examples: Iterator[Example]) -> str:
    """Writes JSON lines unless the file has them already; returns their digest."""
    lines = [
        json.dumps({"id": e.id, "source": e.source, "targets": e.targets}, ensure_ascii=False) + "\n" for e in examples
    ]
    text = "".join(lines)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _read_result(path: Path, config: Config, digest: str) -> dict[str, Any]:
    """Reads the result of a finished cell; raises a UserError if its settings or data differ."""
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        before = {"data": result["data"], **result["config"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(path, f"no result of this command ({error}); remove it to train again") from error
    now = {"data": digest, **_settings(config)}
    for key in now:
        if before.get(key) != now[key]:
            raise UserError(
                f"{path}: {key}",
                f"{before.get(key)!r} -> {now[key]!r}",
                expected="the settings of the finished results, or another --workdir",
            )
    return result


def _kinds(text: str) -> list[Kind]:
    known = {kind.name: kind for kind in KINDS}
    wanted = text.split(",")
    for name in wanted:
        if name not in known:
            raise UserError("--kinds", found=f"{name!r}", expected=f"some of {', '.join(known)}")
    return [kind for kind in KINDS if kind.name in wanted]


def _delays(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and 0 < int(word) <= MOST_DELAY for word in words):
        raise UserError("--delays", found=f"{text!r}", expected=f"whole numbers from 1 to {MOST_DELAY}, as in 1,2,4")
    return sorted({int(word) for word in words})


if __name__ == "__main__":
    cli.run(main)
