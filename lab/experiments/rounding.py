"""Compares weights in fewer bytes with float32: scores, equal answers, log-probabilities and times.

    python -m lab.experiments.rounding --checkpoint runs/mine [--test FILE] [--limit 500] [--json OUT]

The command decodes the test split of a checkpoint's task once with each kind of weights, one document at a time.
"Equal" is the percentage of documents whose rows equal the rows of float32 in every token. The log-probability is the
mean over all written tokens, computed by the rounded model. The time is the median for encoding, decoding and
detokenizing a document, measured in a second run without log-probabilities. After `make venv-bench`,
`python -m lab.benchmarks.plot OUT ... --output FILE.svg` draws the score over the time.
"""

import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from lab.benchmarks.systems import machine, save, use_threads
from pipejax import config as config_lib
from pipejax import metrics
from pipejax.data import OWN_FILES, TASKS, make_task
from pipejax.data.examples import Example
from pipejax.inference.answers import Record
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.offline.evaluation import evaluate
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress

KINDS = ("float32", "bfloat16", "int8")


def main(argv: Sequence[str]) -> int:
    """Decodes with each kind of weights, prints a table, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.experiments.rounding", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("--test", default="", metavar="FILE", help="documents with their rows (default: the task's)")
    parser.add_argument("--limit", type=cli.whole_number(1), metavar="N", help="decode only the first N documents")
    parser.add_argument("--threads", type=cli.whole_number(1), default=2, metavar="N", help="(2)")
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    use_threads(flags.threads)
    results: list[dict[str, Any]] = []
    plain: list[list[list[int]]] = []
    examples: Sequence[Example] = ()
    for kind in KINDS:
        generator = opened(flags, kind)
        examples = (
            examples
            or make_task(generator.config.data, generator.config.grid.row_names).examples("test")[: flags.limit]
        )
        if not len(examples):
            raise UserError("--test", found="a file without documents", expected="documents")
        found, records = measured(generator, examples, kind, scores=True)
        rows = [record["row_ids"] for record in records]
        plain = plain or rows
        tokens = [x for record in records for row in record["log_probs"] for x in row]
        _, timed = measured(generator, examples, f"{kind}, timed", scores=False)
        results.append(
            {
                "weights": kind,
                "strategy": found["strategy"],
                "metric": metrics.HEADLINES[found["metric"]],
                "score": found[metrics.HEADLINES[found["metric"]]],
                "equal": 100 * sum(a == b for a, b in zip(rows, plain, strict=True)) / len(rows),
                "log_prob": sum(tokens) / max(len(tokens), 1),
                "steps": found["steps"],
                "milliseconds": 1e3 * median(record["seconds"] for record in timed),
            }
        )
        if kind == KINDS[0]:
            print(f"{'weights':<10}{'score':>8}{'equal':>9}{'log-probability':>17}{'steps':>8}{'ms':>10}")
        print(line(results[-1]), flush=True)
    if flags.json:
        command = "python -m lab.experiments.rounding " + " ".join(argv)
        save(flags.json, {"results": results, "machine": machine(flags.threads), "command": command})
    return 0


def opened(flags: Any, kind: str) -> Generator:
    """Opens the checkpoint with a kind of weights, and with the documents of --test in its config."""
    generator = load(flags.checkpoint, best=flags.best, overrides=[f"decode.weights={kind}"])
    data = generator.config.data
    if flags.test:  # scored by the metric of the checkpoint's task
        metric = data.metric or (make_task(data).metric if data.task in TASKS else "")
        task = data.task if data.task == "csv" else "jsonl"
        own = [f"data.task={task}", f"data.test={flags.test}", f"data.metric={metric}"]
        generator.config = config_lib.override(generator.config, own)
    elif data.task in (*OWN_FILES, "none") and not data.test:
        raise UserError("--test", found="none", expected="a file, as the checkpoint names no test split")
    return generator


def measured(
    generator: Generator, examples: Sequence[Example], name: str, *, scores: bool
) -> tuple[dict[str, Any], list[Record]]:
    """Evaluates with or without log-probabilities; returns the evaluation and its records."""
    generator.config = config_lib.override(generator.config, [f"decode.scores={str(scores).lower()}"])
    progress = Progress(name, len(examples), unit="document")
    found = evaluate(generator, examples, batch_size=1, tick=progress.add)
    progress.close()
    return found


def line(result: dict[str, Any]) -> str:
    """A result as a line of text."""
    return "{weights:<10}{score:>8.2f}{equal:>8.1f}%{log_prob:>17.4f}{steps:>8.2f}{milliseconds:>10.2f}".format(
        **result
    )


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
