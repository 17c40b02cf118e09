"""Measures time and memory of a config's training step on this device, and compares them with `pipejax plan`.

    python -m lab.benchmarks.steps --config configs/jsonl.py --models base,large --json OUT [--set KEY=VALUE ...]

The command makes a few steps on random tokens, with every source and target as long as the config allows. With
--sources there is a case for each length; its batches have about as many tokens as the config's, in whole examples.
Utilisation is the number of the model's own operations (`training_flops`, without the operations that
rematerialisation repeats) divided by the peak of the device, if the peak is known. Memory is the peak that the device
reports since the start of the process, so name the larger model last; the compiler's figure and the estimate of
`pipejax plan` are printed with it. Compilation time includes tracing; --again adds the time of a new trainer, which
finds the program in the cache.
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lab.benchmarks.decode import whole_numbers
from lab.benchmarks.peers.worker import error_line
from lab.benchmarks.systems import SIZES, machine, names_of, save
from pipejax import config as config_lib
from pipejax.apps.plan.step_memory import compiled_bytes, measured_bytes, plan
from pipejax.config import Config, MeshConfig
from pipejax.model.precision import compute_dtype
from pipejax.system import cli, compile_cache
from pipejax.training import monitoring
from pipejax.training.memory import GIB, choose_remat, device_memory, longest_batch


def main(argv: Sequence[str]) -> int:
    """Measures the models, prints a line for each, and writes JSON after each."""
    parser = cli.Parser(prog="python -m lab.benchmarks.steps", description=__doc__)
    add_flags(parser)
    parser.add_argument("--again", action="store_true", help="load each program again, from the cache")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    chosen = cases(flags)
    compile_cache.use_cache()
    found: dict[str, Any] = {"machine": machine(1), "results": [], "failures": []}
    found["command"] = "python -m lab.benchmarks.steps " + " ".join(argv)
    for name, config in chosen:
        try:
            result = {"system": "pipejax", "model": name, **measured(config, flags.steps, again=flags.again)}
        except Exception as error:  # such as a lack of memory: the other models are measured nevertheless
            found["failures"].append(failure(name, config, "pipejax", error))
        else:
            found["results"].append(result)
            print(line(result), flush=True)
        if flags.json:
            save(flags.json, found)
    return int(bool(found["failures"]))


def add_flags(parser: cli.Parser) -> None:
    """Adds the flags that select the steps to measure."""
    parser.add_argument("--config", required=True, metavar="FILE", help="a config file, such as configs/jsonl.py")
    parser.add_argument("--models", default="base", metavar="NAME,...", help=f"of {', '.join(SIZES)} (base)")
    parser.add_argument("--sources", default="", metavar="L,...", help="tokens of a source (as in the config)")
    parser.add_argument(
        "--steps",
        type=cli.whole_number(2),
        default=5,
        metavar="N",
        help="steps to make, of which the last is timed (5)",
    )
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    parser.add_overrides("override a setting of the config (repeatable)")


def cases(flags: argparse.Namespace) -> list[tuple[str, Config]]:
    """The names of the models, with the configs of their steps."""
    models, given = names_of("--models", flags.models, SIZES), config_lib.load(flags.config, flags.overrides)
    sources = whole_numbers("--sources", flags.sources) if flags.sources else [given.data.max_source]
    return [(name, dataclasses.replace(of_length(given, x), model=SIZES[name])) for name in models for x in sources]


def of_length(config: Config, source: int) -> Config:
    """The config with sources of the given length, and parts with as many tokens as before, or with one example."""
    train, data = config.train, dataclasses.replace(config.data, max_source=source)
    if source != config.data.max_source:
        part = max(train.batch_size // train.accumulate * config.data.max_source // source, 1)
        train = dataclasses.replace(train, batch_size=part * train.accumulate, pack=math.gcd(part, 3))
    return dataclasses.replace(config, data=data, train=train, mesh=MeshConfig(data=1))


def resolved(config: Config) -> Config:
    """The config with the values that depend on this device filled in."""
    train = dataclasses.replace(config.train, dtype=compute_dtype(config.train.dtype).name)
    return choose_remat(dataclasses.replace(config, train=train), device_memory())


def work(config: Config) -> dict[str, Any]:
    """The size of a step, and the number of the model's own operations."""
    assert config.model is not None
    shapes, size = longest_batch(config), config.train.batch_size
    source, slots = shapes["source"][1], int(np.prod(shapes["inputs"])) // size
    flops = config.model.training_flops(np.asarray([(source, slots)] * size))
    return {
        "batch": size,
        "accumulate": config.train.accumulate,
        "source": source,
        "slots": slots,
        "model_flops": flops,
    }


def failure(name: str, config: Config, system: str, error: Exception) -> dict[str, Any]:
    """Prints a warning about a step that was not measured, and returns the record of it."""
    where = {"system": system, "model": name, "source": config.data.max_source}
    cli.note(f"warning: {', '.join(map(str, where.values()))} is left out: {error_line(error)}")
    return where | {"error": error_line(error)}


def measured(config: Config, steps: int, *, again: bool = False) -> dict[str, Any]:
    """Measures a step of the longest batch on the first device: seconds, operations, and three figures of bytes."""
    device, config = jax.devices()[0], resolved(config)

    def compiling() -> tuple[float, Any, Any]:
        trainer, terms = plan(config, [device])
        begun = time.perf_counter()
        trainer.program(longest_batch(config))
        return time.perf_counter() - begun, trainer, terms

    cli.note("compiling a step")
    compile_s, trainer, terms = compiling()
    compiled = compiled_bytes(trainer, config)
    cli.note(f"making {steps} steps")
    peak_bytes, seconds = measured_bytes(trainer, config, steps=steps)
    size, peak = work(config), monitoring.peak(device)
    found = size | {key: getattr(config.train, key) for key in ("dtype", "remat")}
    found |= {
        "step_s": seconds,
        "utilisation": size["model_flops"] / seconds / peak if peak else None,
        "compile_s": compile_s,
        "peak_bytes": peak_bytes,
        "compiled_bytes": int(compiled),
        "estimate_bytes": int(sum(terms.values())),
    }
    if again:
        jax.clear_caches()
        found["cached_s"] = compiling()[0]
    return found


def line(result: dict[str, Any]) -> str:
    """A result as a line of text."""
    utilisation = "utilisation unknown" if result["utilisation"] is None else f"{result['utilisation']:.1%} of its peak"
    memory = ", ".join(
        f"{'none reported' if size is None else f'{size / GIB:.2f} GiB'} {name}"
        for name, size in (
            ("at most", result["peak_bytes"]),
            ("by the compiler", result["compiled_bytes"]),
            ("by arithmetic", result["estimate_bytes"]),
        )
    )
    return (
        "{model}, batch {batch}, source {source}, {dtype}, remat {remat}: {step_s:.3f} s a step, ".format(**result)
        + f"{result['model_flops'] / result['step_s'] / 1e12:.2f} TFLOP/s, {utilisation}; {memory}; "
        + f"compiled in {result['compile_s']:.0f} s"
        + (f", from the cache in {result['cached_s']:.0f} s" if "cached_s" in result else "")
    )


if __name__ == "__main__":
    cli.run(main)
