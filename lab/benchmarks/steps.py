"""What a training step of a config takes on the device that is here, beside what `pipejax plan` says of it.

    python -m lab.benchmarks.steps --config configs/jsonl.py --models base,large --json OUT [--set KEY=VALUE ...]

A few real steps on random tokens, every source and target as long as the config allows. Utilisation is the model's own
operations (`training_flops`: what rematerialisation computes again does not count) over the peak of the device, if
that is known. Memory is the peak that the device reports since the process began, so name the larger model last; beside
it stand the compiler's figure and that of arithmetic.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lab.benchmarks.peers.worker import error_line
from lab.benchmarks.systems import SIZES, machine, names_of, save
from pipejax import config as config_lib
from pipejax.config import Config, MeshConfig
from pipejax.model.precision import compute_dtype
from pipejax.system import cli, compile_cache
from pipejax.training import costs
from pipejax.training.plan import GIB, compiled_bytes, longest_batch, measured_bytes, plan


def main(argv: Sequence[str]) -> int:
    """Measures, prints a line for each model, writes JSON after each."""
    parser = cli.Parser(prog="python -m lab.benchmarks.steps", description=__doc__)
    parser.add_argument("--config", required=True, metavar="FILE", help="a config file, such as configs/jsonl.py")
    parser.add_argument("--models", default="base", metavar="NAME,...", help=f"of {', '.join(SIZES)} (base)")
    parser.add_argument("--steps", type=cli.whole(2), default=5, metavar="N", help="the last one is timed (5)")
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_overrides("override a setting of the config (repeatable)")
    flags = parser.parse_args(argv)
    cli.check_output("--json", flags.json)
    models = names_of("--models", flags.models, SIZES)
    given = config_lib.load(flags.config, flags.overrides)
    compile_cache.use()
    found: dict[str, Any] = {"machine": machine(1), "results": [], "failures": []}
    found["command"] = "python -m lab.benchmarks.steps " + " ".join(argv)
    for name in models:
        train = dataclasses.replace(given.train, dtype=compute_dtype(given.train.dtype).name)
        config = dataclasses.replace(given, model=SIZES[name], train=train, mesh=MeshConfig(data=1))
        try:
            result = {"model": name, **measured(config, flags.steps)}
        except Exception as error:  # out of memory, say: the other model is measured all the same
            found["failures"].append({"model": name, "error": error_line(error)})
            cli.note(f"warning: {name} is left out: {error_line(error)}")
        else:
            found["results"].append(result)
            print(line(result), flush=True)
        if flags.json:
            save(flags.json, found)
    return int(bool(found["failures"]))


def measured(config: Config, steps: int) -> dict[str, Any]:
    """A step of the longest batch on the first device: seconds, operations, and bytes by three ways."""
    assert config.model is not None
    device = jax.devices()[0]
    trainer, terms = plan(config, [device])
    shapes, size = longest_batch(config), config.train.batch_size
    slots = int(np.prod(shapes["inputs"])) // size
    cli.note("compiling a step")
    compiled = compiled_bytes(trainer, config)
    cli.note(f"making {steps} steps")
    peak_bytes, seconds = measured_bytes(trainer, config, steps=steps)
    flops = config.model.training_flops(np.asarray([(shapes["source"][1], slots)] * size))
    peak = costs.peak(device)
    return {
        "batch": size,
        "source": shapes["source"][1],
        "slots": slots,
        **{key: getattr(config.train, key) for key in ("dtype", "remat", "accumulate")},
        "step_s": seconds,
        "model_flops": flops,
        "utilisation": flops / seconds / peak if peak else None,
        "peak_bytes": peak_bytes,
        "compiled_bytes": int(compiled),
        "estimate_bytes": int(sum(terms.values())),
    }


def line(result: dict[str, Any]) -> str:
    """For people."""
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
        + f"{result['model_flops'] / result['step_s'] / 1e12:.2f} TFLOP/s, {utilisation}; {memory}"
    )


if __name__ == "__main__":
    cli.run(main)
