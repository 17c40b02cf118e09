"""Measures the cost of streaming an answer: `stream_rows` and `decode` take turns on the same sources.

    python -m lab.benchmarks.streams --checkpoint runs/mine --input texts.jsonl --documents 200

One source is decoded at a time. The first round, which compiles, does not count. The tokens of all events together must
equal the tokens of the stream's record, and this record must equal the record of `decode`; otherwise the command fails.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from lab.benchmarks.systems import machine, names_of, save, use_threads
from pipejax.data.formats import read_records
from pipejax.inference.generator import Generator
from pipejax.inference.loading import load
from pipejax.inference.streaming import RowEvent
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress

WEIGHTS = ("float32", "bfloat16", "int8")


def main(argv: Sequence[str]) -> int:
    """Measures, prints a line for each kind of weights, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.streams", description=__doc__)
    parser.add_checkpoint()
    parser.add_argument("--input", required=True, metavar="FILE", help='lines with a "source"')
    parser.add_argument(
        "--documents", type=cli.whole_number(1), default=200, metavar="N", help="decode the first N sources (200)"
    )
    parser.add_argument("--rounds", type=cli.whole_number(1), default=5, metavar="N")
    parser.add_argument("--weights", default="float32,int8", metavar="NAME,...", help=f"of {', '.join(WEIGHTS)}")
    parser.add_argument("--threads", type=cli.whole_number(1), default=2, metavar="N", help="(2)")
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    weights = names_of("--weights", flags.weights, WEIGHTS)
    use_threads(flags.threads)
    given = [x for _, x in itertools.islice(read_records(flags.input), flags.documents)]
    if not given:
        raise UserError(f"--input {flags.input}", found="no lines", expected="sources")
    results = []
    for held in weights:
        generator = load(flags.checkpoint, best=flags.best, overrides=[f"decode.weights={held}"])
        results.append({"weights": held, **measured(generator, given, flags.rounds)})
        print(line(results[-1]), flush=True)
    if flags.json:
        command = "python -m lab.benchmarks.streams " + " ".join(argv)
        save(flags.json, {"results": results, "machine": machine(flags.threads), "command": command})
    return 0


def line(result: dict[str, Any]) -> str:
    """A result as a line of text."""
    return (
        "{weights}: {events:.1f} events an answer; {decode_ms:.2f} ms, streamed {stream_ms:.2f} ms; "
        "{ratio:.3f} times as long, the first event after {first:.0%}".format(**result)
    )


def measured(generator: Generator, given: Sequence[Any], rounds: int) -> dict[str, Any]:
    """Medians over sources and rounds: milliseconds of an answer in both ways, and their ratio for each source.

    Raises:
      AssertionError: a stream differs from `decode`.
    """
    decoded, streamed, ratios, firsts = [], [], [], []
    events = 0
    progress = Progress("answering", len(given) * (rounds + 1), unit="source")
    for number in range(rounds + 1):
        for i, source in enumerate(given):
            for way in ("decode", "stream")[:: 1 if (number + i) % 2 else -1]:
                begun = time.perf_counter()
                if way == "decode":
                    (record,) = generator.decode([source])
                    whole = time.perf_counter() - begun
                else:
                    written: dict[int, list[int]] = {}
                    first, count = 0.0, 0
                    for event in generator.stream_rows(source):
                        if not isinstance(event, RowEvent):
                            last = event
                        else:
                            first, count = first or time.perf_counter() - begun, count + 1
                            if not event.done:
                                written.setdefault(event.row, []).append(event.token)
                    live = time.perf_counter() - begun
            assert last["row_ids"] == record["row_ids"], f"source {i}: the answer differs from that of decode"
            assert [written[k] for k in sorted(written)] == [row for row in record["row_ids"] if row], f"source {i}"
            if number:
                decoded.append(whole)
                streamed.append(live)
                ratios.append(live / whole)
                firsts.append(first / live)
                events += count
            progress.add(1)
    progress.close()
    return {
        "documents": len(given),
        "rounds": rounds,
        "events": events / len(ratios),
        "decode_ms": 1e3 * statistics.median(decoded),
        "stream_ms": 1e3 * statistics.median(streamed),
        "ratio": statistics.median(ratios),
        "ratio_of_sums": sum(streamed) / sum(decoded),
        "first": statistics.median(firsts),
    }


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
