"""Compiles random decodes and training steps for absent GPUs, with the loops of decodes in CUDA graphs.

    make venv-programs
    python -m lab.benchmarks.random_programs --output FILE [--targets h100,rtx4090] [--decodes 300] [--steps 20]
                                             [--processes 2] [--seed 0]

Models have two layers in encoder and decoder, and random sizes, dtypes and weights; decodes have random methods,
drafts, batches and lengths. Each is compiled for one of the targets, in turn. A decode passes if its whole program is
one CUDA graph: the host controls no loop. The command prints a line for each failure, and exits with 1 if there is one.
320 programs take about 40 minutes of processor time: 20 minutes with two processes on two cores.

FILE has a JSON line for each program, written as soon as it is compiled. A command that was interrupted continues with
the same flags: programs in FILE are not compiled again.
"""

import dataclasses
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lab.benchmarks.programs import absent, buffers, cases, dumped
from pipejax.apps.plan import targets
from pipejax.config import Config, DataConfig, GridConfig, MeshConfig, T5Config, TrainConfig
from pipejax.decoding import Drafts, Pipelined, Sequential, Strategy, with_drafts
from pipejax.decoding.drafters import FromSource, Jacobi
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.configurations import Configuration
from pipejax.kernels.backends import Gpu
from pipejax.model.sharding import named_device
from pipejax.system import cli
from pipejax.system.errors import UserError, described_error
from pipejax.training import step
from pipejax.training.memory import longest_batch


@dataclasses.dataclass(frozen=True)
class Decode:
    """A random decode: a model, a strategy, and the shape of a batch."""

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
    """Compiles the first decoder of a decode; returns the reason why it is no single CUDA graph, or ""."""
    made = absent(found.config, jnp.dtype(found.dtype), device, found.backend, found.configuration)
    with dumped() as folder, named_device(device):
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
    """Compiles a training step; returns the reason for a failure, or ""."""
    step.Trainer(config, [device]).compile(longest_batch(config))
    return ""


KINDS: dict[str, tuple[Callable[..., Any], Callable[..., str]]] = {
    "decode": (random_decode, check_decode),
    "step": (random_step, check_step),
}


class Task(NamedTuple):
    """A random program to compile, as in the lines of the output."""

    kind: str  # of KINDS
    number: int
    target: str
    seed: int


def compile_task(task: Task) -> dict[str, Any]:
    """Compiles a random program; returns its line of the output."""
    begun, busy = time.perf_counter(), time.process_time()
    draw, check = KINDS[task.kind]
    case = draw(np.random.default_rng([task.seed, task.number]))
    try:
        why = check(case, targets.find_target(task.target, "--targets").devices(1)[0])
    except Exception as error:  # compilers raise errors of many types
        why = described_error(error)
    jax.clear_caches()
    line = {**task._asdict(), "jax": jax.__version__, "why": why} | ({"case": repr(case)} if why else {})
    return line | {"seconds": time.perf_counter() - begun, "processor_seconds": time.process_time() - busy}


def start_process() -> None:
    """Prepares a process that compiles."""
    jax.config.update("jax_platforms", "cpu")


def read_lines(output: Path) -> list[dict[str, Any]]:
    """The lines of an earlier command; a last line that was interrupted is removed from the file."""
    if not output.exists():
        return []
    whole, _, _ = output.read_text(encoding="utf-8").rpartition("\n")
    output.write_text(whole + "\n" * bool(whole), encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]


def main(argv: Sequence[str]) -> int:
    """Compiles, prints failures and a summary, and writes lines."""
    parser = cli.Parser(prog="python -m lab.benchmarks.random_programs", description=__doc__)
    parser.add_argument("--targets", default="h100,rtx4090", metavar="NAME,...", help="GPUs (h100,rtx4090)")
    parser.add_number("--decodes", "decodes to compile (300)", least=0, default=300)
    parser.add_number("--steps", "training steps to compile (20)", least=0, default=20)
    parser.add_number("--processes", "processes that compile (2)", least=1, default=2)
    parser.add_number("--seed", "the first number of the random generators (0)", least=0, default=0)
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="JSON lines; programs in this file are not compiled again"
    )
    flags = parser.parse_args(argv)
    cli.check_output_file("--output", flags.output)
    names, output = flags.targets.split(","), Path(flags.output)
    for name in names:
        targets.find_target(name, "--targets")
    counts = {"step": flags.steps, "decode": flags.decodes}  # steps first, since they take longer
    tasks = [Task(kind, n, names[n % len(names)], flags.seed) for kind, count in counts.items() for n in range(count)]
    lines = {Task(*(line[name] for name in Task._fields)): line for line in read_lines(output)}
    left, begun = [task for task in tasks if task not in lines], time.perf_counter()
    if len(left) < len(tasks):
        print(f"{len(tasks) - len(left)} programs are in {output}, {len(left)} are left", flush=True)
    spawn = multiprocessing.get_context("spawn")
    with (
        output.open("a", encoding="utf-8") as file,
        ProcessPoolExecutor(flags.processes, mp_context=spawn, initializer=start_process) as pool,
    ):
        try:
            for future in as_completed([pool.submit(compile_task, task) for task in left]):
                line = future.result()
                lines[Task(*(line[name] for name in Task._fields))] = line
                print(json.dumps(line), file=file, flush=True)
                if line["why"]:
                    print("{kind} {number} for {target}: {why}: {case}".format_map(line), flush=True)
        except BrokenProcessPool as error:
            hint = "the same command continues; with --processes 1 the first program that is missing is the reason"
            raise UserError(str(output), "a process that compiles has ended", hint=hint) from error
    found = [lines[task] for task in tasks]
    passed = Counter(f"{line['kind']}, {line['target']}" for line in found if not line["why"])
    counted, busy = ", ".join(f"{name}: {n}" for name, n in passed.items()), sum(x["processor_seconds"] for x in found)
    failed, seconds = len(found) - passed.total(), time.perf_counter() - begun
    times = f"this command took {seconds:.0f} s, all programs {busy:.0f} s of a processor"
    print(f"{counted} compiled, {failed} failed; {times}")
    return int(failed > 0)


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
