"""How much of a training step and of a decode a device spends in kernels, and how much it waits, from JAX's profiler.

    python -m lab.benchmarks.profile --config configs/jsonl.py --models base --pattern 8x14 --source 512 --json OUT

`--work train,decode` says which of both is looked at. Each is made twice before, so that all is compiled. Busy is the
time in which a kernel runs, waiting the rest of the seconds that the host counts, without a profile: it slows a host.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.profiler import ProfileData

from lab.benchmarks.decode import OURS, rows_of
from lab.benchmarks.peers.worker import error_line
from lab.benchmarks.steps import add_flags, cases, resolved
from lab.benchmarks.systems import SIZES, build, machine, names_of, random_params, save
from pipejax.config import Config, T5Config
from pipejax.decoding import Pipelined, Sequential
from pipejax.system import cli, compile_cache
from pipejax.training.memory import plan, stepper

GAP = 10e-6  # seconds from which on a gap between kernels is one of the host's
MOST = 12  # kernels that are named
LINES = ("Stream", "tf_XLA")  # of a trace: a GPU's kernels, and a CPU's threads, whose figures mean little


def main(argv: Sequence[str]) -> int:
    """Looks, prints a line for each, writes JSON after each."""
    parser = cli.Parser(prog="python -m lab.benchmarks.profile", description=__doc__)
    add_flags(parser)
    parser.add_argument("--work", default="train,decode", metavar="NAME,...", help="train, decode (both)")
    parser.add_argument("--pattern", default="8x14", metavar="NxM", help="of the answer (8x14)")
    parser.add_argument(
        "--source", type=cli.whole_number(1), default=512, metavar="L", help="tokens of its source (512)"
    )
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    which, chosen = names_of("--work", flags.work, ("train", "decode")), cases(flags)
    compile_cache.use_cache()
    found: dict[str, Any] = {"machine": machine(1), "results": [], "failures": []}
    found["command"] = "python -m lab.benchmarks.profile " + " ".join(argv)

    for name, config in chosen:
        if "train" in which:
            look(found, f"{name}, a training step", partial(training, config), flags.json)
        if "decode" in which:
            for system in OURS:
                short = system.removeprefix("pipejax-")
                make = partial(decoding, SIZES[name], system, flags)
                look(found, f"{name}, {flags.pattern}, {short}", make, flags.json)
    return int(bool(found["failures"]))


def look(found: dict[str, Any], name: str, make: Callable[[], Callable[[], Any]], path: str | None) -> None:
    """Adds the profile of a call, or why there is none, and writes it down."""
    try:
        found["results"].append({"name": name, **profiled(make())})
    except Exception as error:  # of whatever kind: the other work is looked at all the same
        found["failures"].append({"name": name, "error": error_line(error)})
        cli.note(f"warning: {name} is left out: {error_line(error)}")
    else:
        print(line(found["results"][-1]), flush=True)
    if path:
        save(path, found)


def training(config: Config) -> Callable[[], Any]:
    """A call that makes a training step."""
    config = resolved(config)
    return stepper(plan(config, [jax.devices()[0]])[0], config)


def decoding(model: T5Config, name: str, flags: argparse.Namespace) -> Callable[[], Any]:
    """A call that decodes an answer, with its encoder."""
    rows, rng = rows_of(flags.pattern), np.random.default_rng(1)
    strategies: dict[str, Pipelined | Sequential] = {OURS[0]: Pipelined(1, 64, 20), OURS[1]: Sequential(512)}
    (system,) = build(model, random_params(model), "bfloat16", strategies={name: strategies[name]})
    source = rng.integers(3, model.vocab_size, (1, flags.source), np.int32)
    return partial(system.run, source, [rows])


def profiled(call: Callable[[], Any]) -> dict[str, Any]:
    """The seconds of a call, of its kernels and between them, and the kernels that take most."""
    for _ in range(2):
        call()
    begun = time.perf_counter()
    call()
    seconds = time.perf_counter() - begun
    with tempfile.TemporaryDirectory() as scratch:
        with jax.profiler.trace(scratch):
            call()
        traces = [ProfileData.from_file(str(path)) for path in Path(scratch).rglob("*.xplane.pb")]
    return {"seconds": seconds} | kernels(event for trace in traces for event in events(trace))


def events(trace: ProfileData) -> Iterator[tuple[str, float, float]]:
    """Yields name, begin and end in seconds of each kernel."""
    planes = [*trace.planes]
    for plane in [p for p in planes if p.name.startswith("/device:GPU")] or planes:
        for thread in plane.lines:
            if (thread.name or "").startswith(LINES):
                for event in thread.events:
                    yield event.name, 1e-9 * event.start_ns, 1e-9 * event.end_ns


def kernels(given: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """How many there are, when at least one runs, the long gaps between them, and those that take most."""
    found = sorted(given, key=lambda event: event[1])
    busy, until, gaps = 0.0, found[0][1] if found else 0.0, list[float]()
    for _, begin, end in found:
        if begin - until >= GAP:
            gaps.append(begin - until)
        busy += max(end - max(begin, until), 0.0)
        until = max(until, end)
    seconds, count = Counter[str](), Counter[str]()
    for name, begin, end in found:
        seconds[name] += end - begin  # type: ignore[assignment]
        count[name] += 1
    most = sorted(seconds, key=seconds.__getitem__, reverse=True)[:MOST]
    return {
        "kernels": len(found),
        "busy_s": busy,
        "gaps": len(gaps),
        "gaps_s": sum(gaps),
        "most": [{"name": name[:80], "seconds": seconds[name], "count": count[name]} for name in most],
    }


def line(result: dict[str, Any]) -> str:
    """For people."""
    waits = max(result["seconds"] - result["busy_s"], 0.0)
    return (
        "{name}: {seconds:.4f} s, {kernels} kernels, busy {busy_s:.4f} s, ".format(**result)
        + f"waiting {waits:.4f} s ({waits / result['seconds']:.0%}), {result['gaps']} gaps of at least 10 us"
    )


if __name__ == "__main__":
    cli.run(main)
