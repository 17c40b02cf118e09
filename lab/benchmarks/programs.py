"""What an accelerator would run, compiled without one: kernels and bytes of each decoding step, memory, trouble.

    make venv-programs
    python -m lab.benchmarks.programs --targets h100,rtx4090,v5e --model base --json OUT [--dump DIR]

Compiles the encoder and both decoders for each target, batch by batch, with --train training steps too, and counts
what the compiled text holds. A decoder has a program for each size that its cache grows to. It proves no numbers and no
speed: kernels are started one after the other, and what a start costs only the device can tell.

    python -m lab.benchmarks.programs --targets h100,rtx4090 --batches 0 --train paper,long,large,lora

are the steps that have to fit a GPU, without an array of queries by keys; --arrays compiles them with such arrays.
"""

import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from lab.benchmarks.hlo import COLLECTIVES, Program, dimensions
from lab.benchmarks.systems import SIZES, names_of, save
from pipejax.config import Config, DataConfig, GridConfig, MeshConfig, T5Config, TrainConfig
from pipejax.decoding import Pipelined, Sequential
from pipejax.inference import programs
from pipejax.inference.backends import XLA, Backend
from pipejax.kernels.backends import Gpu
from pipejax.model.slots import Blocks
from pipejax.model.t5 import T5
from pipejax.system import cli, targets
from pipejax.system.errors import UserError
from pipejax.training import step
from pipejax.training.memory import longest_batch

DTYPES = ("float32", "bfloat16")
MATTERS = 1_000_000  # elements from which on a sort or a scatter counts as large
COPIED = 50_000  # elements from which on a copy in a step is one of a cache


class Training(NamedTuple):
    """A training step, and the bytes that it may take on a GPU."""

    model: T5Config | None = None  # None: that of --model
    source: int = 2048
    target: int = 512
    batch: int = 24
    accumulate: int = 4
    lora_rank: int = 0
    most: float = 80e9  # of all
    most_temporary: float = 80e9

    @property
    def config(self) -> Config:
        """With the other settings of configs/jsonl.py."""
        train = TrainConfig(batch_size=self.batch, accumulate=self.accumulate, remat="layers", lora_rank=self.lora_rank)
        data = DataConfig(max_source=self.source, max_target=self.target)
        return Config(model=self.model, data=data, train=train, mesh=MeshConfig(data=1))


LARGE = SIZES["large"]
TRAININGS = {
    "paper": Training(most_temporary=4 * 2**30),
    # 512 tokens are 768 slots, as many as the width of T5-Base: what has both could not be told from attention.
    "long": Training(SIZES["base"], source=16384, target=640, batch=1, accumulate=1, most=24e9),
    "large": Training(LARGE, source=4096),
    "lora": Training(dataclasses.replace(LARGE, d_kv=128, d_ff=16384, num_heads=32), lora_rank=16),  # T5-3B
}


class Case(NamedTuple):
    """A program to compile."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    least: int = 0  # bytes of all that a step of a decoder reads: its weights, the encoded sources, its cache


def main(argv: Sequence[str]) -> int:
    """Compiles, counts, prints a table, writes JSON; 1 if a program but the encoder's holds what it had better not."""
    parser = cli.Parser(prog="python -m lab.benchmarks.programs", description=__doc__)
    parser.add_argument("--targets", default="h100", metavar="NAME,...", help=f"of {', '.join(targets.TARGETS)} (h100)")
    parser.add_argument("--model", default="base", metavar="NAME,...", help=f"of {', '.join(SIZES)} (base)")
    parser.add_argument("--source", type=int, default=512, metavar="L", help="tokens of each source (512)")
    parser.add_argument("--batches", default="1,8", metavar="B,...", help="examples decoded together (1,8); 0: none")
    parser.add_argument("--dtype", default="bfloat16", metavar="NAME,...", help=f"of {', '.join(DTYPES)} (bfloat16)")
    parser.add_argument(
        "--train",
        nargs="?",
        const="paper",
        metavar="NAME,...",
        help=f"training steps of {', '.join(TRAININGS)} (paper)",
    )
    parser.add_argument("--arrays", action="store_true", help="attention keeps its arrays of queries by keys")
    parser.add_argument("--xla", action="store_true", help="without our own kernels for GPUs")
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_argument("--dump", metavar="DIR", help="write the text of each program there")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    batches = [int(b) for b in flags.batches.split(",") if b.isdigit()]
    if len(batches) != len(flags.batches.split(",")):
        raise UserError("--batches", found=f"{flags.batches!r}", expected="whole numbers with commas")
    kinds = {name: targets.find_target(name, "--targets") for name in flags.targets.split(",")}
    if flags.dump:
        Path(flags.dump).mkdir(parents=True, exist_ok=True)
    models, dtypes = names_of("--model", flags.model, SIZES), names_of("--dtype", flags.dtype, DTYPES)
    trainings = names_of("--train", flags.train, TRAININGS) if flags.train else []
    results = []
    for (target, kind), name_of_model, name_of_dtype in itertools.product(kinds.items(), models, dtypes):
        device = kind.devices(1)[0]
        sharding = jax.sharding.SingleDeviceSharding(device)
        backend = XLA if flags.xla or not isinstance(kind, targets.GpuTarget) else Gpu()
        config, dtype = SIZES[name_of_model], jnp.dtype(name_of_dtype)
        programs_of: list[tuple[str, Any, dict[str, float]]] = [
            (case.name, partial(_lowered, case, sharding), {"least_bytes": case.least} if case.least else {})
            for case in cases(config, dtype, [b for b in batches if b], flags.source, sharding, backend)
        ]
        for name in trainings:
            own = TRAININGS[name]._replace(model=TRAININGS[name].model or config)
            limits = (
                {"most": own.most, "most_temporary": own.most_temporary} if isinstance(kind, targets.GpuTarget) else {}
            )
            lower = partial(training, own, name_of_dtype, device, arrays=flags.arrays)
            programs_of.append((f"train, {name}{', arrays' * flags.arrays}", lower, limits))
        for name, lower, more in programs_of:
            begun = time.perf_counter()
            compiled = lower().compile()
            text = compiled.as_text() or ""
            result = {"target": target, "model": name_of_model, "dtype": name_of_dtype, "program": name}
            result["compile_s"] = time.perf_counter() - begun
            result |= report(text, compiled.memory_analysis()) | more
            if name.startswith("train"):
                whole = TRAININGS[name.split(", ")[1]]
                result["squares"] = squares(text, whole._replace(model=whole.model or config).config)
            results.append(result)
            print("\n".join(lines(result)), flush=True)
            if flags.dump:
                stem = f"{target} {name_of_model} {name_of_dtype} {name}".replace(" ", "-")
                (Path(flags.dump) / f"{stem}.hlo").write_text(text)
    if flags.json:
        command = "python -m lab.benchmarks.programs " + " ".join(argv)
        save(flags.json, {"results": results, "jax": jax.__version__, "command": command})
    return int(any(troubles(result) for result in results if not result["program"].startswith("encode")))


def _lowered(case: Case, sharding: jax.sharding.Sharding) -> Any:
    with targets.named(next(iter(sharding.device_set))):
        return jax.jit(case.function, out_shardings=sharding).lower(*case.arguments)


def training(own: Training, dtype: str, device: jax.Device, *, arrays: bool = False) -> Any:
    """A training step for the longest batch, lowered for that device; `arrays`: attention as it is without kernels."""
    whole = own.config
    whole = dataclasses.replace(whole, train=dataclasses.replace(whole.train, dtype=dtype))
    with mock.patch.object(step, "choose_blocks", return_value=None) if arrays else contextlib.nullcontext():
        return step.Trainer(whole, [device]).lower(longest_batch(whole))


def squares(text: str, whole: Config) -> list[str]:
    """The shapes of buffers of all heads and two lengths."""
    assert isinstance(whole.model, T5Config)
    batch, heads = longest_batch(whole), whole.model.num_heads
    (sources, length), (groups, slots) = batch["source"], batch["inputs"]
    memory = sources // groups * length
    pairs = {tuple(sorted(pair)) for pair in ((length, length), (slots, slots), (slots, memory))}
    found = set()
    for shape in Program(text).buffers():
        for dims in dimensions(shape):
            if tuple(sorted(dims[-2:])) in pairs and math.prod(dims) >= heads * math.prod(dims[-2:]):
                found.add(str([*dims]))
    return sorted(found)


def cases(
    config: T5Config,
    dtype: Any,
    batches: Sequence[int],
    length: int,
    sharding: jax.sharding.Sharding,
    backend: Backend = XLA,
) -> Iterator[Case]:
    """The programs of a T5, with shapes in the place of arrays.

    Args:
      config: of the T5.
      dtype: that it computes in.
      batches: sizes of batches.
      length: tokens of each source.
      sharding: where everything lies.
      backend: whose products a decoder's are.
    """

    def on_device(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    device: Any = next(iter(sharding.device_set))
    platform = "accelerator" if device.platform == "cpu" else device.platform  # a CPU goes through more sizes
    blocks = Blocks() if isinstance(backend, Gpu) else None
    model, grid = T5(config, dtype=dtype, blocks=blocks), GridConfig()
    params = jax.eval_shape(lambda key: config.init_params(key), jax.random.key(0))
    ready = on_device(jax.eval_shape(partial(backend.prepare, model), params))
    strategies = Sequential(512), Pipelined(grid.delay, grid.time_max, grid.sub_max)
    for batch in batches:
        source = on_device(jax.ShapeDtypeStruct((batch, length), np.int32))
        lengths = on_device(jax.ShapeDtypeStruct((batch,), np.int32))
        encode = partial(programs.encode_batch, model, backend=backend)
        yield Case(f"encode, batch {batch}", encode, (ready.encoding, source, lengths))
        memory = on_device(jax.eval_shape(encode, ready.encoding, source, lengths))
        for strategy in strategies:
            sizes, carry = programs.schedule(strategy, batch, platform), None
            for slots in sizes.slots:
                decode = partial(programs.decode_batch, model, strategy, sizes=sizes, slots=slots, backend=backend)
                arguments = ready.decoding, memory, carry
                carry = on_device(jax.eval_shape(decode, *arguments).carry)
                least = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((ready.decoding, memory, carry.cache)))
                name = f"{type(strategy).__name__.lower()}, batch {batch}, {slots} slots"
                yield Case(name, decode, arguments, least)


def report(text: str, memory: Any) -> dict[str, Any]:
    """Counts of a compiled program."""
    program = Program(text)
    every = Counter(one.kind.removesuffix("-start") for one in program.every())
    bodies = program.loops() or [program.entry]
    return {
        "per_step": bool(program.loops()),
        "loops": [{"kernels": dict(program.kernels(body)), "bytes": program.bytes(body)} for body in bodies],
        "moved": program.moved(),
        "memory": {
            name: int(getattr(memory, f"{name}_size_in_bytes")) for name in ("argument", "output", "temp", "alias")
        },
        "largest_copy": max(program.largest_copy(body) for body in program.loops()) if program.loops() else 0,
        "largest_sort": program.largest("sort"),
        "largest_scatter": program.largest("scatter"),
        "collectives": sum(every[name] for name in COLLECTIVES),
        "host_transfers": program.host_transfers(),
        "conditionals": every["conditional"],
    }


def troubles(result: dict[str, Any]) -> list[str]:
    """What such a program had better not hold."""
    counts = {name: result[name.replace(" ", "_")] for name in ("host transfers", "collectives", "conditionals")}
    found = [f"{count} {name}" for name, count in counts.items() if count]
    large = {"sort": MATTERS, "scatter": MATTERS} | ({"copy": COPIED} if "slots" in result["program"] else {})
    for kind, least in large.items():
        if (most := result[f"largest_{kind}"]) >= least:
            found.append(f"a {kind} of {most / 1e6:.2f} M elements")
    found += [f"an array of queries by keys, {shape}" for shape in result.get("squares", ())]
    for name, bytes_ in (("most", in_all(result["memory"])), ("most_temporary", result["memory"]["temp"])):
        if bytes_ > result.get(name, bytes_):
            found.append(f"{bytes_ / 1e9:.1f} GB, over {name.replace('_', ' ')} {result[name] / 1e9:.1f}")
    return found


def in_all(memory: dict[str, int]) -> int:
    """Bytes that the compiler sets aside."""
    return memory["argument"] + memory["output"] + memory["temp"] - memory["alias"]


def lines(result: dict[str, Any]) -> list[str]:
    """The same for people."""
    said = []
    for loop in result["loops"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(loop["kernels"].items()))
        unit = "a turn" if result["per_step"] else "in all"
        count = sum(loop["kernels"].values())
        name = f"{result['target']:<8} {result['model']} {result['dtype']} {result['program']:<32}"
        least = f", {loop['bytes'] / result['least_bytes']:.2f} of the least" if "least_bytes" in result else ""
        said.append(f"{name} {count:>5} kernels {unit} ({kinds}), {loop['bytes'] / 1e6:.0f} MB{least}")
    memory, trouble = result["memory"], troubles(result)
    said.append(
        f"{'':<41} arguments {memory['argument'] / 2**20:.0f} MiB, temporary {memory['temp'] / 2**20:.0f} MiB, "
        f"in all {in_all(memory) / 2**20:.0f} MiB, moved in a run {result['moved'] / 1e9:.1f} GB, "
        f"compiled in {result['compile_s']:.0f} s{'; ' if trouble else ''}{', '.join(trouble)}"
    )
    return said


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
