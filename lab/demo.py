"""`make demo`: trains the embedded task with both methods and compares both decoders on unseen documents.

    python -m lab.demo [--workdir runs] [--set KEY=VALUE ...]

Prints a table, writes a page that plays one example's grid, and then times both decoders once more in a model of
T5-Base's size with random weights. Runs that are finished are not trained again.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lab.benchmarks.systems import build, interleaved, paired, random_params
from pipejax.apps import picture
from pipejax.config import METHODS, Config, T5Config, load
from pipejax.data import make_task
from pipejax.data.examples import Example
from pipejax.decoding import Pipelined, Sequential
from pipejax.inference.answers import Record, texts
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load as open_run
from pipejax.model.precision import compute_dtype
from pipejax.model.t5_config import ARCHITECTURES
from pipejax.offline.evaluation import evaluate
from pipejax.system import cli
from pipejax.system.progress import Progress
from pipejax.training.loop import fit

CONFIG = Path(__file__).parent.parent / "configs" / "demo.py"
ROUNDS = 5  # in each round, each decoder decodes every document once
# Rows of typical answers, in tokens: a list of facts or steps, and a list of phrases.
ANSWERS = {"8 rows of 14 tokens": [14] * 8, "5 rows of 4 tokens": [4] * 5}
SOURCE = 512  # tokens of the source of these answers
SPREAD = 0.15  # if a decoder's times in the rounds differ by more, other work on the machine has distorted them


def main(argv: Sequence[str]) -> int:
    """Trains, decodes, prints, draws, and times the larger model."""
    parser = cli.Parser(prog="python -m lab.demo", description=__doc__)
    parser.add_argument(
        "--workdir", default="runs", metavar="DIR", help="holds one run for each decoder (default: runs)"
    )
    parser.add_overrides("override a setting of both runs (repeatable)")
    flags = parser.parse_args(argv)
    root = Path(flags.workdir)
    generators: dict[str, Generator] = {}
    for strategy in METHODS:
        config = load(CONFIG, [*flags.overrides, f"train.method={strategy}"])
        workdir = root / f"{config.data.task}_{strategy}"
        cli.note(f"--- {strategy}: {workdir}")
        if code := fit(config, workdir):
            return code
        generators[strategy] = open_run(workdir)
    before = load_of_others()
    test = list(make_task(config.data, config.grid.row_names).examples("test"))
    results, records = compare(generators, test)
    print(table(results), flush=True)
    warn_of_other_work(before, max(r["spread"] for r in results.values()))
    draw(generators["pipelined"].config, test, records["pipelined"], root / "demo.html")
    generators.clear()
    cli.note("\n--- T5-Base's size, random weights")
    before = load_of_others()
    timed = at_size(ARCHITECTURES["base"], ANSWERS, source=SOURCE, rounds=3)
    print(size_table(timed), flush=True)
    warn_of_other_work(before, max(line["spread"] for line in timed))
    found = {**results, "base_size_random_weights": timed}
    (root / "demo.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(
        f"\nOne example, step by step: {root / 'demo.html'} (open it in a browser)   All figures: {root / 'demo.json'}"
    )
    return 0


def compare(
    generators: Mapping[str, Generator], test: list[Example]
) -> tuple[dict[str, dict[str, Any]], dict[str, list[Record]]]:
    """Evaluates each generator at batch 1; returns the evaluations and the records, by names of decoders.

    One of the generators is called "sequential". Each evaluation also has "milliseconds", the median time of a
    document; "speed_up", the median of the ratios between the time of the sequential decoder and the time of this
    one, for the same document in the same round; and "spread", the spread of the rounds' medians. The decoders take
    turns.
    """
    results: dict[str, dict[str, Any]] = {}
    records: dict[str, list[Record]] = {}
    seconds: dict[str, list[float]] = {strategy: [] for strategy in generators}  # the times of all rounds, in order
    total = len(generators) * ROUNDS * len(test)
    progress = Progress(f"decoding the test split, {ROUNDS} times with each decoder", total, unit="answer")
    for number in range(ROUNDS):
        for strategy in list(generators)[:: -1 if number % 2 else 1]:
            results[strategy], records[strategy] = evaluate(generators[strategy], test, batch_size=1, tick=progress.add)
            seconds[strategy] += [record["seconds"] for record in records[strategy]]
    progress.close()
    for strategy, own in seconds.items():
        ratios = [other / mine for other, mine in zip(seconds["sequential"], own, strict=True)]
        rounds = [median(own[i : i + len(test)]) for i in range(0, len(own), len(test))]
        found = {"milliseconds": 1000 * median(own), "speed_up": median(ratios), "spread": spread(rounds)}
        results[strategy] |= found
    return results, records


def spread(seconds: Sequence[float]) -> float:
    """The second-slowest time (of two times, the slower one) divided by the fastest, minus 1."""
    ordered = sorted(seconds)
    return ordered[-2 if len(ordered) > 2 else -1] / ordered[0] - 1


def load_of_others() -> float | None:
    """The mean number of processes that ran or waited for a processor in the last minute; None if it is unknown."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def warn_of_other_work(load: float | None, spread: float) -> None:
    """Prints a warning if the load before the measurement, or the spread of the times, shows other work."""
    processors, signs = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, []
    if load is not None and load > 1.5 * processors:  # this process alone keeps each processor busy
        signs.append(f"a load of {load:.1f} on {processors} processors")
    if spread > SPREAD:
        signs.append(f"rounds that differ by {100 * spread:.0f} %")
    if signs:
        cli.note(f"warning: found {' and '.join(signs)}: other work distorts the times and the speed-up")


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table as text, with one line for each decoder."""
    base = results["sequential"]
    ideal = results["pipelined"]["step_ratio"]
    lines = [
        f"\n{base['examples']} unseen documents of the generated task, one at a time, on this machine\n",
        f"{'decoder':<12}{'exact-match F1':>16}{'steps':>8}{'step ratio':>12}{'ms/document':>13}{'speed-up':>10}",
    ]
    for strategy in ("sequential", "pipelined"):
        r = results[strategy]
        lines.append(
            f"{strategy:<12}{r['em_f1']:>16.2f}{r['steps']:>8.2f}{base['steps'] / r['steps']:>12.2f}"
            f"{r['milliseconds']:>13.2f}{r['speed_up']:>9.2f}x"
        )
    lines.append(f"\nThe lengths of the pipelined answers predict a step ratio of {ideal:.2f}. Times are medians.")
    return "\n".join(lines)


def draw(config: Config, test: list[Example], records: list[Record], path: Path) -> None:
    """Writes the page of a correct answer with many rows; as in the score, the order of rows does not matter."""
    right = [i for i, (e, r) in enumerate(zip(test, records, strict=True)) if sorted(e.targets) == sorted(texts(r))]
    chosen = max(
        right or range(len(test)), key=lambda i: (min(len(texts(records[i])), 6), sum(map(len, records[i]["row_ids"])))
    )
    record = records[chosen]
    tokens = [row.split() for row in texts(record)]
    grid = picture.fill(
        tokens,
        delay=config.grid.delay,
        truncated=record["truncated"],
        steps=record["steps"],
        empty_row=len(tokens) < config.grid.sub_max,
    )
    page = picture.html(grid, source=test[chosen].source, texts=texts(record))
    path.write_text(page, encoding="utf-8")


def at_size(
    architecture: T5Config, answers: Mapping[str, Sequence[int]], *, source: int, rounds: int
) -> list[dict[str, Any]]:
    """Measures both decoders in a T5 with random weights, whose answers are forced to have rows of given lengths.

    Args:
      architecture: the T5.
      answers: the numbers of tokens of each row, by the name of the answer.
      source: the number of tokens of the source.
      rounds: the number of rounds, in each of which both decoders take a turn; an earlier round does not count.

    Returns:
      for each answer: its name; the steps and the seconds of each decoder, decoding alone and with the encoder
      (medians); the speed-up of the pipelined decoder (medians of the rounds' ratios); the larger one of the two
      decoders' spreads between rounds.
    """
    strategies: dict[str, Pipelined | Sequential] = {
        "sequential": Sequential(512),
        "pipelined": Pipelined(delay=1, time_max=64, sub_max=20),
    }
    progress = Progress("timing", len(answers) * len(strategies) * (rounds + 1), unit="answer")
    with progress.aside("preparing", "random weights"):
        dtype = compute_dtype("auto").name
        systems = build(architecture, random_params(architecture), dtype, strategies=strategies)
    ids = np.random.default_rng(1).integers(3, architecture.vocab_size, (1, source), np.int32)
    for system in systems:
        with progress.aside("compiling", f"the {system.name} decoder"):
            system.run(ids, [next(iter(answers.values()))])
    found: list[dict[str, Any]] = []
    for name, rows in answers.items():
        runs = interleaved(systems, ids, [rows], rounds, lambda: progress.add(1))
        result: dict[str, Any] = {"answer": name, "source": source}
        for system in systems:
            result[system.name] = {
                "steps": system.steps([rows]),
                "decode_seconds": median(run.decode_s for run in runs[system.name]),
                "seconds": median(run.encode_s + run.decode_s for run in runs[system.name]),
            }
        result["spread"] = max(spread([run.decode_s for run in own]) for own in runs.values())
        pair = runs["pipelined"], runs["sequential"]
        found.append(
            result | {"decode_speed_up": paired(*pair, whole=False), "speed_up": paired(*pair, whole=True)},
        )
    progress.close()
    return found


def size_table(timed: Sequence[Mapping[str, Any]]) -> str:
    """The table of `at_size` as text."""
    lines = [
        f"\nBoth decoders in a model of T5-Base's size, a source of {timed[0]['source']} tokens, one at a time.",
        "The weights are random and the answers mean nothing: their lengths are set to those of typical answers.\n",
        f"{'answer':<22}{'steps':>14}{'decoding, s':>18}{'speed-up':>10}{'with encoder, s':>19}{'speed-up':>10}",
    ]
    for line in timed:
        first, second = line["sequential"], line["pipelined"]
        steps = f"{first['steps']} -> {second['steps']}"
        decoding = f"{first['decode_seconds']:.2f} -> {second['decode_seconds']:.2f}"
        whole = f"{first['seconds']:.2f} -> {second['seconds']:.2f}"
        lines.append(
            f"{line['answer']:<22}{steps:>14}{decoding:>18}{line['decode_speed_up']:>9.2f}x{whole:>19}"
            f"{line['speed_up']:>9.2f}x"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
