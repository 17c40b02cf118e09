"""Times the encoder and decoding of two trees of this project, such as a branch and its origin, which take turns.

    python -m lab.benchmarks.trees OLD NEW --sources 2048,8x512,90+331+700 --weights int8 --rounds 9 --json OUT

Each tree runs in a separate process with the same random weights. The trees take turns, in alternating order. A batch
of sources is written NxL, N sources of L tokens, or as the lengths joined by "+". Every source has the same answer. A
ratio is the median of the rounds' ratios of the old time to the new time, with the 95 % interval of the median if there
are at least six rounds: the new tree is faster if the ratio is above 1. `peak_mib` is the peak memory of a process up
to the end of the batch.
"""

import json
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

WORKER = (
    f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r}, run_name='worker')"  # runs in a tree's directory
)


def main(argv: Sequence[str]) -> int:
    """Measures the batches, prints a line for each, and writes JSON."""
    from lab.benchmarks.decode import rows_of
    from lab.benchmarks.systems import SIZES, SUFFIXES, Run, machine, median_interval, save
    from pipejax.system import cli

    parser = cli.Parser(prog="python -m lab.benchmarks.trees", description=__doc__)
    parser.add_argument("old", metavar="OLD", help="a folder with pipejax/ and lab/")
    parser.add_argument("new", metavar="NEW", help="another one")
    parser.add_argument("--model", choices=SIZES, default="base")
    parser.add_argument("--sources", default="512", metavar="BATCH,...", help="batches, each L, NxL or L+L+... (512)")
    parser.add_argument("--pattern", default="8x14", metavar="NxM", help="rows of an answer, as in decode (8x14)")
    parser.add_argument("--weights", choices=SUFFIXES, default="int8")
    parser.add_argument("--rounds", type=cli.whole_number(1), default=7, metavar="N")
    parser.add_argument(
        "--threads", type=cli.whole_number(1), default=2, metavar="N", help="threads of each process (2)"
    )
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    batches, rows = {text: lengths_of(text) for text in flags.sources.split(",")}, rows_of(flags.pattern)
    trees = [Tree(Path(path), flags.model, flags.weights, flags.threads) for path in (flags.old, flags.new)]
    results: list[dict[str, Any]] = []
    for text, lengths in batches.items():
        runs: list[list[Run]] = [[], []]
        memory = [0.0, 0.0]
        for number in range(flags.rounds + 1):  # the first round compiles
            for which in (0, 1) if number % 2 else (1, 0):
                *seconds, memory[which] = trees[which].ask([lengths, rows])
                runs[which] += [Run(*seconds)] * bool(number)
        ratios = {
            "encode": [a.encode_s / b.encode_s for a, b in zip(*runs, strict=True)],
            "decode": [a.decode_s / b.decode_s for a, b in zip(*runs, strict=True)],
            "both": [(a.encode_s + a.decode_s) / (b.encode_s + b.decode_s) for a, b in zip(*runs, strict=True)],
        }
        medians = {name: statistics.median(values) for name, values in ratios.items()}
        intervals = {name: median_interval(values) for name, values in ratios.items()}
        texts = {
            name: f"{medians[name]:.2f}x" + (" ({:.2f} to {:.2f})".format(*interval) if interval else "")
            for name, interval in intervals.items()
        }
        middle = [[statistics.median(x) for x in zip(*found, strict=True)] for found in runs]
        print(
            f"{text}: encoder {middle[0][0]:.3f} to {middle[1][0]:.3f} s, {texts['encode']}; "
            f"decoding {middle[0][1]:.3f} to {middle[1][1]:.3f} s, {texts['decode']}; both {texts['both']}; "
            f"peak {memory[0]:.0f} and {memory[1]:.0f} MiB",
            flush=True,
        )
        named = {
            name: dict(zip(("encode_s", "decode_s"), x, strict=True))
            for name, x in zip(("old", "new"), middle, strict=True)
        }
        for name, most in zip(named, memory, strict=True):
            named[name]["peak_mib"] = most
        results.append({"sources": text, **named, **medians, "intervals": intervals})
        if flags.json:
            places = {flags.old: "OLD", flags.new: "NEW"}
            command = "python -m lab.benchmarks.trees " + " ".join(places.get(word, word) for word in argv)
            save(flags.json, {"results": results, "machine": machine(flags.threads), "command": command})
    for tree in trees:
        tree.close()
    return 0


def lengths_of(text: str) -> list[int]:
    """The lengths of the sources of a batch."""
    from pipejax.system.errors import UserError

    found = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)|[1-9]\d*(?:\+[1-9]\d*)+", text)
    if not found:
        raise UserError("--sources", found=f"{text!r}", expected="such as 512, 8x512 or 90+331+700")
    return [int(found[2])] * int(found[1] or 1) if found[2] else [int(x) for x in text.split("+")]


class Tree:
    """A process that runs the code of a tree."""

    def __init__(self, directory: Path, model: str, weights: str, threads: int) -> None:
        """Starts it."""
        command = [sys.executable, "-c", WORKER, model, weights, str(threads)]
        self.process = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: Any) -> list[float]:
        """Sends a batch to the process; returns its seconds and MiB."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        found: list[float] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        """Ends it."""
        self.process.communicate()


def work(model: str, weights: str, threads: str) -> None:
    """Answers each line, with lengths of sources and of rows, by seconds of encoder and decoding and the peak MiB."""
    from lab.benchmarks import systems
    from pipejax.data.shapes import bucket
    from pipejax.decoding import Pipelined, Sequential
    from pipejax.system import compile_cache

    systems.use_threads(int(threads))
    compile_cache.use_cache()
    config, clock = systems.SIZES[model], time.perf_counter if threads != "1" else time.process_time
    strategies: dict[str, Pipelined | Sequential] = {"": Pipelined(1, 64, 20)}
    (ours,) = systems.build_each(
        config, systems.random_params(config), "float32", strategies=strategies, weights=[weights]
    )
    for line in sys.stdin:
        lengths, rows = json.loads(line)
        source = np.random.default_rng(1).integers(3, config.vocab_size, (len(lengths), bucket(max(lengths))), np.int32)
        begun = clock()
        memory = ours.decoder.encode(source, np.asarray(lengths, np.int32))
        middle = clock()
        ours.decoder.decode(memory, [rows] * len(lengths))
        seconds = middle - begun, clock() - middle
        del memory
        print(json.dumps([*seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]), flush=True)


if __name__ == "worker":
    work(*sys.argv[1:])
if __name__ == "__main__":
    from pipejax.system import cli

    cli.run(main, sys.argv[1:])
