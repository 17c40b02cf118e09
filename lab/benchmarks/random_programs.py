"""Compiles random decodes and training steps for GPUs that need not be here, with the loops of decodes in CUDA graphs.

    make venv-programs
    python -m lab.benchmarks.random_programs --targets h100,rtx4090 [--decodes 300] [--steps 20] [--seed 0] [--json OUT]

Models have two layers in encoder and decoder, and random sizes, dtypes and weights; decodes have random methods,
drafts, batches and lengths. Each is compiled for one of the targets, in turn. A decode passes if its whole program is
one CUDA graph: the host controls no loop. The command prints a line for each failure, and exits with 1 if there is one.
320 programs take more than half an hour on one core: start one command for each target (--targets NAME --decodes 150
--steps 10, with another --seed) on two.
"""

import dataclasses
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lab.benchmarks.programs import absent, buffers, cases, dumped
from lab.benchmarks.systems import save
from pipejax.config import Config, DataConfig, GridConfig, MeshConfig, T5Config, TrainConfig
from pipejax.decoding import Drafts, Pipelined, Sequential, Strategy, with_drafts
from pipejax.decoding.drafters import FromSource, Jacobi
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.configurations import Configuration
from pipejax.kernels.backends import Gpu
from pipejax.system import cli, targets
from pipejax.system.errors import described_error
from pipejax.training import step
from pipejax.training.memory import longest_batch


@dataclasses.dataclass(frozen=True)
class Decode:
    """A random decode."""

    config: T5Config
    dtype: str
    backend: Backend
    strategy: Strategy
    batch: int
    length: int
    configuration: Configuration


def pick(rng: np.random.Generator, *values: Any) -> Any:
    """Draws one of the values."""
    return values[rng.integers(len(values))]


def random_config(rng: np.random.Generator) -> T5Config:
    """A T5 of two layers in each stack."""
    feed_forward, tied = pick(rng, "relu", "gated-gelu"), bool(rng.integers(2))
    return T5Config(
        vocab_size=int(pick(rng, 1000, 4096, 32128)),
        d_model=int(pick(rng, 64, 128, 256, 512, 768)),
        d_kv=int(pick(rng, 16, 32, 64, 128)),
        d_ff=int(pick(rng, 128, 512, 2048)),
        num_heads=int(pick(rng, 2, 3, 8, 12)),
        num_layers=2,
        num_decoder_layers=2,
        feed_forward=feed_forward,
        tied_head=tied,
    )


def random_decode(rng: np.random.Generator) -> Decode:
    """Draws a decode: a random model, method and batch."""
    dtype = pick(rng, "bfloat16", "bfloat16", "float32")
    weights = pick(rng, "auto", "auto", "int8")
    kinds = (Gpu, XLA.__class__) if dtype == "bfloat16" else (XLA.__class__,)
    grid = Pipelined(int(rng.integers(0, 4)), int(rng.integers(4, 65)), int(rng.integers(1, 41)))
    strategy: Any = pick(rng, grid, grid, Sequential(int(rng.integers(8, 513))))
    if rng.random() < 0.3:
        strategy = with_drafts(strategy, Drafts(pick(rng, FromSource(), Jacobi()), int(rng.integers(1, 9))))
    return Decode(
        config=random_config(rng),
        dtype=dtype,
        backend=pick(rng, *kinds)(weights),
        strategy=strategy,
        batch=int(pick(rng, 1, 1, 2, 3, 8, 32)),
        length=int(pick(rng, 16, 64, 512, 1024)),
        configuration=Configuration(graph=True, steps=int(pick(rng, 0, 1))),
    )


def check_decode(found: Decode, device: jax.Device) -> str:
    """Compiles the first decoder of a decode; the reason why it is no single CUDA graph, or ""."""
    made = absent(found.config, jnp.dtype(found.dtype), device, found.backend, found.configuration)
    with dumped() as folder, targets.named(device):
        made_of = cases(made, [found.strategy], found.batch, found.length)
        next(made_of)  # the encoder has no loop
        decoder = next(made_of)
        decoder.compile()
        seen = buffers(folder)
    return "" if seen.graphs == 1 and not seen.loops else str(seen)


def random_step(rng: np.random.Generator) -> Config:
    """The config of a random training step."""
    source, target = int(pick(rng, 64, 512, 2048)), int(pick(rng, 64, 128, 512))
    train = TrainConfig(
        batch_size=4,
        accumulate=int(pick(rng, 1, 2)),
        method=pick(rng, "pipelined", "sequential"),
        dtype=pick(rng, "bfloat16", "bfloat16", "float32"),
        remat=pick(rng, "none", "dots", "layers"),
        dropout=float(pick(rng, 0.0, 0.1)),
        lora_rank=int(pick(rng, 0, 0, 4)),
    )
    data, grid = DataConfig(max_source=source, max_target=target), GridConfig(delay=int(rng.integers(0, 3)))
    return Config(model=random_config(rng), data=data, grid=grid, train=train, mesh=MeshConfig(data=1))


def check_step(config: Config, device: jax.Device) -> str:
    """Compiles a training step."""
    step.Trainer(config, [device]).compile(longest_batch(config))
    return ""


def main(argv: Sequence[str]) -> int:
    """Compiles, prints failures and a summary; writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.random_programs", description=__doc__)
    parser.add_argument("--targets", default="h100,rtx4090", metavar="NAME,...", help="GPUs (h100,rtx4090)")
    parser.add_number("--decodes", "decodes to compile (300)", least=0, default=300)
    parser.add_number("--steps", "training steps to compile (20)", least=0, default=20)
    parser.add_number("--seed", "the first number of the random generators (0)", least=0, default=0)
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    jax.config.update("jax_platforms", "cpu")
    names = flags.targets.split(",")
    devices = {name: targets.find_target(name, "--targets").devices(1)[0] for name in names}
    kinds = (("decode", flags.decodes, random_decode, check_decode), ("step", flags.steps, random_step, check_step))
    begun, passed, failures = time.perf_counter(), Counter[str](), []
    for kind, count, draw, check in kinds:
        for number in range(count):
            target = names[number % len(names)]
            case: Any = draw(np.random.default_rng([flags.seed, number]))
            try:
                why = check(case, devices[target])
            except Exception as error:  # compilers raise errors of many types
                why = described_error(error)
            if why:
                failures.append({"kind": kind, "number": number, "target": target, "why": why, "case": repr(case)})
                print(f"{kind} {number} for {target}: {why}: {case}", flush=True)
            else:
                passed[f"{kind}, {target}"] += 1
            jax.clear_caches()
    seconds, busy = time.perf_counter() - begun, sum(os.times()[:4])
    counts = ", ".join(f"{name}: {count}" for name, count in passed.items())
    print(f"{counts} compiled, {len(failures)} failed; {seconds:.0f} s, of the processor {busy:.0f} s")
    if flags.json:
        found = {
            "passed": dict(passed),
            "failures": failures,
            "seconds": seconds,
            "processor_seconds": busy,
            "jax": jax.__version__,
        }
        save(flags.json, found | {"command": "python -m lab.benchmarks.random_programs " + " ".join(argv)})
    return int(bool(failures))


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
