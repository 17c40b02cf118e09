"""What an accelerator would run, compiled without one: kernels and bytes of each decoding step, memory, trouble.

    make venv-programs
    python -m benchmarks.programs --targets h100,rtx4090,v5e --model base --json OUT [--dump DIR]

Compiles the encoder and both decoders for each target, batch by batch, and counts what the compiled text holds. A
decoder has a program for each size that its cache grows to. It proves no numbers and no speed: kernels are
started one after the other, and what a start costs only the device can tell.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hlo import COLLECTIVES, Program
from benchmarks.systems import SIZES, save
from benchmarks.targets import TARGETS
from pipejax.config import GridConfig, T5Config
from pipejax.decoding import Pipelined, Sequential
from pipejax.inference import programs
from pipejax.model.t5 import T5, init_params
from pipejax.system import cli
from pipejax.system.errors import UserError

MATTERS = 1_000_000  # elements from which on a sort or a scatter counts as large


class Case(NamedTuple):
    """A program to compile."""

    name: str
    function: Any
    arguments: tuple[Any, ...]


def main(argv: Sequence[str]) -> int:
    """Compiles, counts, prints a table, writes JSON."""
    parser = cli.Parser(prog="python -m benchmarks.programs", description=__doc__)
    parser.add_argument("--targets", default="h100", metavar="NAME,...", help=f"of {', '.join(TARGETS)} (h100)")
    parser.add_argument("--model", choices=SIZES, default="base")
    parser.add_argument("--source", type=int, default=512, metavar="L", help="tokens of each source (512)")
    parser.add_argument("--batches", default="1,8", metavar="B,...", help="examples decoded together (1,8)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--json", metavar="OUT", help="write the results there")
    parser.add_argument("--dump", metavar="DIR", help="write the text of each program there")
    flags = parser.parse_args(argv)
    cli.check_output("--json", flags.json)
    batches = [int(b) for b in flags.batches.split(",") if b.isdigit() and int(b)]
    if not batches or len(batches) != len(flags.batches.split(",")):
        raise UserError(f"--batches: found {flags.batches!r}; expected whole numbers with commas")
    targets = flags.targets.split(",")
    if unknown := [name for name in targets if name not in TARGETS]:
        raise UserError(f"--targets: found {unknown[0]!r}; expected {', '.join(TARGETS)}")
    if flags.dump:
        Path(flags.dump).mkdir(parents=True, exist_ok=True)
    results = []
    for target in targets:
        device = TARGETS[target].devices(1)[0]
        sharding = jax.sharding.SingleDeviceSharding(device)
        for case in cases(SIZES[flags.model], jnp.dtype(flags.dtype), batches, flags.source, sharding):
            begun = time.perf_counter()
            compiled = jax.jit(case.function, out_shardings=sharding).lower(*case.arguments).compile()
            text = compiled.as_text() or ""
            result = {"target": target, "program": case.name, "compile_s": time.perf_counter() - begun}
            result |= report(text, compiled.memory_analysis())
            results.append(result)
            print("\n".join(lines(result)), flush=True)
            if flags.dump:
                (Path(flags.dump) / f"{target}-{case.name.replace(' ', '-')}.hlo").write_text(text)
    if flags.json:
        command = "python -m benchmarks.programs " + " ".join(argv)
        save(flags.json, {"results": results, "jax": jax.__version__, "command": command, "model": flags.model})
    return 0


def cases(
    config: T5Config, dtype: Any, batches: Sequence[int], length: int, sharding: jax.sharding.Sharding
) -> Iterator[Case]:
    """The programs of a T5, with shapes in the place of arrays."""

    def on_device(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    model, grid = T5(config, dtype=dtype), GridConfig()
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    ready = on_device(jax.eval_shape(partial(programs.prepare, model), params))
    strategies = Sequential(512), Pipelined(grid.delay, grid.time_max, grid.sub_max)
    for batch in batches:
        source = on_device(jax.ShapeDtypeStruct((batch, length), np.int32))
        lengths = on_device(jax.ShapeDtypeStruct((batch,), np.int32))
        encode = partial(programs.encode_batch, model)
        yield Case(f"encode, batch {batch}", encode, (ready.encoding, source, lengths))
        memory = on_device(jax.eval_shape(encode, ready.encoding, source, lengths))
        for strategy in strategies:
            sizes, carry = programs.schedule(strategy, batch, "accelerator"), None
            for slots in sizes.slots:
                decode = partial(programs.decode_batch, model, strategy, sizes=sizes, slots=slots)
                arguments = ready.decoding, memory, carry
                yield Case(f"{type(strategy).__name__.lower()}, batch {batch}, {slots} slots", decode, arguments)
                carry = on_device(jax.eval_shape(decode, *arguments).carry)


def report(text: str, memory: Any) -> dict[str, Any]:
    """Counts of a compiled program."""
    program = Program(text)
    every = Counter(one.kind.removesuffix("-start") for one in program.every())
    bodies = program.loops() or [program.entry]
    return {
        "per_step": bool(program.loops()),
        "loops": [{"kernels": dict(program.kernels(body)), "bytes": program.bytes(body)} for body in bodies],
        "memory": {
            name: int(getattr(memory, f"{name}_size_in_bytes")) for name in ("argument", "output", "temp", "alias")
        },
        "largest_sort": program.largest("sort"),
        "largest_scatter": program.largest("scatter"),
        "collectives": sum(every[name] for name in COLLECTIVES),
        "host_transfers": program.host_transfers(),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The same for people."""
    said = []
    for loop in result["loops"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(loop["kernels"].items()))
        unit = "a step" if result["per_step"] else "in all"
        count = sum(loop["kernels"].values())
        name = f"{result['target']:<8} {result['program']:<32}"
        said.append(f"{name} {count:>5} kernels {unit} ({kinds}), {loop['bytes'] / 1e6:.0f} MB")
    memory = result["memory"]
    trouble = [f"{result['host_transfers']} host transfers"] if result["host_transfers"] else []
    trouble += [f"{result['collectives']} collectives"] if result["collectives"] else []
    for kind in ("sort", "scatter"):
        if result[f"largest_{kind}"] >= MATTERS:
            trouble.append(f"a {kind} of {result[f'largest_{kind}'] / 1e6:.1f} M elements")
    said.append(
        f"{'':<41} arguments {memory['argument'] / 2**20:.0f} MiB, temporary {memory['temp'] / 2**20:.0f} MiB, "
        f"compiled in {result['compile_s']:.0f} s{'; ' if trouble else ''}{', '.join(trouble)}"
    )
    return said


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
