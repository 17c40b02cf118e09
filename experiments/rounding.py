"""What weights in fewer bytes cost: score, equal answers and log-probability, beside float32.

    python -m experiments.rounding --checkpoint runs/mine [--test FILE] [--limit 500]

Decodes the test split of a checkpoint's task once with each kind of weights. "Equal" is the percentage of documents
with the rows of float32, token for token; the log-probability is the mean over all tokens that were written, by the
rounded model itself.
"""

import json
import sys
from collections.abc import Sequence
from typing import Any

from pipejax import config as config_lib
from pipejax import metrics
from pipejax.data import make_task
from pipejax.inference.evaluation import evaluate
from pipejax.inference.loading import load
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress

KINDS = ("float32", "bfloat16", "int8")


def main(argv: Sequence[str]) -> int:
    """Decodes, prints a table, writes JSON."""
    parser = cli.Parser(prog="python -m experiments.rounding", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("--test", default="", metavar="FILE", help="documents with their rows (default: the task's)")
    parser.add_argument("--limit", type=cli.whole(1), metavar="N", help="only the first so many documents")
    parser.add_argument("--batch-size", type=cli.whole(1), default=8, metavar="N", help="(8)")
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    flags = parser.parse_args(argv)
    cli.check_output("--json", flags.json)
    results: list[dict[str, Any]] = []
    plain: list[list[list[int]]] = []
    print(f"{'weights':<10}{'score':>8}{'equal':>9}{'log-probability':>17}{'steps':>8}")
    for kind in KINDS:
        generator = load(flags.checkpoint, best=flags.best, overrides=[f"decode.weights={kind}", "decode.scores=true"])
        if flags.test:
            generator.config = config_lib.override(generator.config, [f"data.test={flags.test}"])
        examples = make_task(generator.config.data).examples("test")[: flags.limit]
        if not len(examples):
            raise UserError("--test: found no documents; expected some")
        progress = Progress(kind, len(examples), unit="document")
        found, records = evaluate(generator, examples, batch_size=flags.batch_size, tick=progress.add)
        progress.close()
        rows = [record["row_ids"] for record in records]
        plain = plain or rows
        tokens = [x for record in records for row in record["log_probs"] for x in row]
        results.append(
            {
                "weights": kind,
                "score": found[metrics.HEADLINES[found["metric"]]],
                "equal": 100 * sum(a == b for a, b in zip(rows, plain, strict=True)) / len(rows),
                "log_prob": sum(tokens) / max(len(tokens), 1),
                "steps": found["steps"],
            }
        )
        print("{weights:<10}{score:>8.2f}{equal:>8.1f}%{log_prob:>17.4f}{steps:>8.2f}".format(**results[-1]), flush=True)
    if flags.json:
        cli.write_output("--json", flags.json, json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
