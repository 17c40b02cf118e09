"""Compares the decoding speed of pipejax with that of other systems that do the same work, for a T5 of random weights.

    python -m lab.benchmarks.decode --model base --patterns 8x14,5x4,7x40 --peers hf,ct2-int8,openvino-int8 --json OUT

A pattern NxM is an answer of N rows of M tokens: a sequential decoder takes N (M + 1) steps for it (a separator
between rows, an eos), the pipelined one N + M. NxMu has the same tokens in rows of unequal length, one of them 1.5
times the mean. The systems take turns, in another order in each round. Times are medians over the rounds, and a ratio
is the median of the ratios in the rounds. Each of the other systems runs in its own process (`lab.benchmarks.peers`).
A system that cannot decode a batch decodes one example, and its time is multiplied by the size of the batch.
"""

import contextlib
import itertools
import math
import re
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from lab.benchmarks.peers.process import PEERS, Process, peer
from lab.benchmarks.peers.worker import error_line
from lab.benchmarks.systems import (
    KERNELS,
    SIZES,
    SUFFIXES,
    Pipejax,
    Rows,
    Run,
    System,
    backbone,
    bandwidth,
    build_each,
    interleaved,
    machine,
    models,
    names_of,
    paired,
    random_params,
    save,
    step_bytes,
    use_threads,
    write,
)
from pipejax.decoding import Pipelined, Sequential
from pipejax.system import cli, compile_cache
from pipejax.system.errors import UserError
from pipejax.system.progress import Progress

OURS = ("pipejax-pipelined", "pipejax-sequential")


def main(argv: Sequence[str]) -> int:
    """Measures the systems, prints a table, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.decode", description=__doc__)
    parser.add_argument(
        "--model", default="base", metavar="NAME", help=f"one of {', '.join(SIZES)}, umt5-base, ... (base)"
    )
    parser.add_argument("--patterns", default="8x14,5x4,7x40", metavar="NxM,...")
    parser.add_argument("--source", type=int, default=512, metavar="L", help="tokens of each source (512)")
    parser.add_argument("--batch", default="1", metavar="B,...", help="examples decoded together (1)")
    parser.add_argument(
        "--peers", default="", metavar="NAME,...", help=f"some of {', '.join(PEERS)}; make venv-peers installs them"
    )
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument(
        "--enough",
        type=float,
        default=math.inf,
        metavar="S",
        help="seconds after which a system takes no further turn",
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of each system (2)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of pipejax")
    parser.add_argument(
        "--weights",
        default="float32",
        metavar="NAME,...",
        help=f"weights of pipejax, one system for each, some of {', '.join(SUFFIXES)} (float32)",
    )
    parser.add_argument(
        "--kernels",
        default="own",
        metavar="NAME,...",
        help=f"kernels of pipejax, one system for each, some of {', '.join(KERNELS)} (own)",
    )
    parser.add_argument(
        "--sub-max", default="20", metavar="S,...", help="rows of the grid; the first value gives the main figure"
    )
    parser.add_argument(
        "--time-max",
        default="64",
        metavar="T,...",
        help="time-steps of the grids, one value for all or one for each (64)",
    )
    parser.add_argument(
        "--max-length", type=int, default=512, metavar="N", help="most tokens of the sequential decoder (512)"
    )
    parser.add_argument("--keep", metavar="DIR", help="directory in which the peers' models are kept and reused")
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    use_threads(flags.threads)
    patterns = {text: rows_of(text) for text in flags.patterns.split(",")}
    peers, weights = names_of("--peers", flags.peers, PEERS), names_of("--weights", flags.weights, SUFFIXES)
    kernels, batches = names_of("--kernels", flags.kernels, KERNELS), whole_numbers("--batch", flags.batch)
    rows_of_grid = whole_numbers("--sub-max", flags.sub_max)
    times = whole_numbers("--time-max", flags.time_max) * (1 if "," in flags.time_max else len(rows_of_grid))
    if len(times) != len(rows_of_grid):
        raise UserError(
            "--time-max", found=f"{flags.time_max}", expected="one value, or as many values as --sub-max has"
        )
    grids = list(zip(rows_of_grid, times, strict=True))
    compile_cache.use_cache()
    for text, rows in patterns.items():
        for most, time_max in grids:
            if len(rows) >= most or len(rows) + max(rows) > time_max:
                raise UserError(f"--patterns {text}", found=f"more than a grid of {most} x {time_max} can hold")
        if sum(rows) + len(rows) > flags.max_length:
            raise UserError(
                f"--patterns {text}", found=f"{sum(rows) + len(rows)} tokens", expected=f"{flags.max_length}"
            )

    config = backbone(flags.model)
    params = random_params(config)
    strategies: dict[str, Pipelined | Sequential] = {OURS[0]: Pipelined(1, times[0], rows_of_grid[0])}
    strategies[OURS[1]] = Sequential(flags.max_length)
    strategies |= {f"{OURS[0]}-{s}x{t}": Pipelined(1, t, s) for s, t in grids[1:]}
    ours = build_each(config, params, flags.dtype, strategies=strategies, weights=weights, kernels=kernels)
    systems: list[System] = [*ours]
    failures: list[dict[str, Any]] = []
    with models(flags.keep, flags.model) as scratch, contextlib.ExitStack() as stack:
        versions = dict[str, str]()
        if peers:
            directory = write(config, params, scratch)
            for name in peers:
                cli.note(f"loading {name}")
                try:
                    started = stack.enter_context(peer(name, directory, threads=flags.threads, dtype=flags.dtype))
                except Exception as error:  # any error: our own systems are measured nevertheless
                    failures.append(failure(name, error_line(error)))
                else:
                    systems.append(started)
                    versions |= started.versions
        del params
        total = len(batches) * len(patterns) * len(systems) * (flags.rounds + 1)
        progress, results = Progress("measuring", total, unit="run"), list[dict[str, Any]]()
        memory = bandwidth(flags.threads)
        here = machine(flags.threads)
        here |= {"bandwidth": memory, "versions": {"jax": here["versions"]["jax"], **versions}}
        about = {"machine": here, "model": flags.model, "dtype": flags.dtype}
        about |= {"source": flags.source, "command": "python -m lab.benchmarks.decode " + " ".join(argv)}
        for count, (text, rows) in itertools.product(batches, patterns.items()):
            source = np.random.default_rng(1).integers(3, config.vocab_size, (count, flags.source), np.int32)
            batch, broken = [rows] * count, dict[str, str]()
            runs = interleaved(
                systems, source, batch, flags.rounds, lambda: progress.add(1), broken, enough=flags.enough
            )
            failures += [failure(name, why, pattern=text, batch=count) for name, why in broken.items()]
            measured = [system for system in systems if system.name in runs]
            results += [summary(text, system, batch, runs[system.name]) for system in measured]
            lines = table(text, measured, batch, runs) if measured else []
            for held, whose in itertools.product(weights, kernels):
                name = OURS[1] + SUFFIXES[held] + KERNELS[whose]
                if count == 1 and name in runs:
                    own = next(r for r in results[-len(measured) :] if r["system"] == name)
                    size = min({"float32": 4, "bfloat16": 2, "int8": 1}[w] for w in (held, flags.dtype))
                    least = step_bytes(config, source=flags.source, slots=own["steps"] // 2, itemsize=size) / memory
                    over = own["decode_s"] / own["steps"] / least
                    lines.append(f"{name}: {over:.2f} times the time for reading its bytes at {memory / 1e9:.1f} GB/s")
            print("\n".join(lines), end="\n\n", flush=True)
            if flags.json:  # written after each pattern, so that an interrupted run leaves its results
                save(flags.json, {"results": results, "failures": failures, **about})
        progress.close()
    return int(bool(failures))


def failure(system: str, why: str, **where: Any) -> dict[str, Any]:
    """Prints a warning about a system that was not measured, and returns the record of it."""
    cli.note(f"warning: {system} is left out{''.join(f', {key} {value}' for key, value in where.items())}: {why}")
    return {"system": system, **where, "error": why}


def rows_of(text: str) -> list[int]:
    """The lengths of rows that a pattern describes: "8x14" is [14] * 8, "8x14u" [13, 13, 13, 13, 21, 13, 13, 13]."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(u?)", text)
    if not found:
        raise UserError("--patterns", found=f"{text!r}", expected="such as 8x14 or 8x14u")
    count, length = int(found[1]), int(found[2])
    if not found[3] or count == 1:
        return [length] * count
    longest = round(1.5 * length)
    share, more = divmod(count * length - longest, count - 1)
    rows = [share + (i < more) for i in range(count - 1)]
    return [*rows[: count // 2], longest, *rows[count // 2 :]]


def whole_numbers(flag: str, text: str) -> list[int]:
    """The numbers in a list with commas; raises a UserError that names `flag`."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise UserError(flag, found=f"{text!r}", expected="whole numbers with commas")
    return [int(x) for x in text.split(",")]


def summary(pattern: str, system: System, batch: Rows, runs: list[Run]) -> dict[str, Any]:
    """The medians of one system, as a record."""
    found: dict[str, Any] = {
        "pattern": pattern,
        "system": system.name,
        "batch": len(batch),
        "steps": system.steps(batch),
        "decode_s": statistics.median(r.decode_s for r in runs),
        "encode_s": statistics.median(r.encode_s for r in runs),
        "rounds": len(runs),
    }
    if isinstance(system, Pipejax):
        found["kernels"] = system.kernels
    if isinstance(system, Process) and not system.batches and len(batch) > 1:
        found["one_by_one"] = True
    return found


def table(pattern: str, systems: Sequence[System], batch: Rows, runs: dict[str, list[Run]]) -> list[str]:
    """The table as lines of text. The system that is fastest, encoder included, comes first."""
    own = runs[systems[0].name]
    lines = [
        f"{pattern}, {len(batch)} x {len(batch[0])} rows; {systems[0].name} is faster by these factors:",
        f"{'system':<28}{'steps':>6}{'ms/step':>9}{'encode s':>10}{'decode s':>10}{'decoding':>10}{'with encoder':>14}",
    ]
    for system in sorted(systems, key=lambda system: statistics.median(map(sum, runs[system.name]))):
        mine, steps = runs[system.name], system.steps(batch)
        decode, encode = (statistics.median(getattr(r, x) for r in mine) for x in ("decode_s", "encode_s"))
        lines.append(
            f"{system.name:<28}{steps:>6}{1e3 * decode / steps:>9.2f}{encode:>10.3f}{decode:>10.3f}"
            f"{paired(own, mine, whole=False):>9.2f}x{paired(own, mine, whole=True):>13.2f}x"
        )
    return lines


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
