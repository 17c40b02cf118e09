"""Compiles programs for absent accelerators, and counts kernels and bytes of each decoding step, memory and problems.

    make venv-programs
    python -m lab.benchmarks.programs --targets h100,rtx4090,v5e --model base --json OUT [--dump DIR]

The command compiles the encoder and both decoders for each target and batch, with --train training steps too, and
counts instructions in the compiled text. A decoder has a program for each size of its cache. The counts show neither
results nor speed: kernels are started one after the other, and only the device shows the cost of a start.

    python -m lab.benchmarks.programs --targets h100,rtx4090 --batches 0 --train paper,long,large,lora

compiles the steps that must fit in a GPU's memory, without an array of queries by keys; --arrays compiles them with
such arrays.

For a training step the command also counts the kernels that a whole run starts and, for a GPU, the instructions of
attention (`lab.benchmarks.instructions`). With --trees OLD,. it counts both trees by the same rules:

    python -m lab.benchmarks.programs --targets h100 --batches 0 --train --trees ../old,. --json OUT
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lab.benchmarks import instructions
from lab.benchmarks.hlo import COLLECTIVES, Program, dimensions
from lab.benchmarks.systems import SIZES, names_of, save
from pipejax.apps.plan import targets
from pipejax.config import Config, DataConfig, GridConfig, MeshConfig, T5Config, TrainConfig
from pipejax.decoding import GREEDILY, Pipelined, Sequential, SourceIds, Strategy
from pipejax.inference import programs
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.configurations import DEFAULT, Configuration
from pipejax.inference.programs import Call, Programs
from pipejax.inference.report import Report
from pipejax.kernels.backends import Gpu
from pipejax.model.sharding import named_device
from pipejax.system import cli
from pipejax.system.errors import UserError
from pipejax.training import step
from pipejax.training.memory import longest_batch

DTYPES = ("float32", "bfloat16")
MATTERS = 1_000_000  # elements; a sort or a scatter of more elements is reported
SMALL = 100_000  # bytes; a kernel that moves fewer bytes costs hardly more than its start
COPIED = 50_000  # elements; a copy of more elements in a step is a copy of a cache


class Training(NamedTuple):
    """A training step, and the bytes of a GPU's memory that it may take."""

    model: T5Config | None = None  # None: the T5 of --model
    source: int = 2048
    target: int = 512
    batch: int = 24
    accumulate: int = 4
    lora_rank: int = 0
    most: float = 80e9  # most bytes in total
    most_temporary: float = 80e9

    @property
    def config(self) -> Config:
        """The config of the step, with configs/jsonl.py for all other settings."""
        train = TrainConfig(batch_size=self.batch, accumulate=self.accumulate, remat="layers", lora_rank=self.lora_rank)
        data = DataConfig(max_source=self.source, max_target=self.target)
        return Config(model=self.model, data=data, train=train, mesh=MeshConfig(data=1))


LARGE = SIZES["large"]
TRAININGS = {
    "paper": Training(most_temporary=4 * 2**30),
    # 512 tokens would be 768 slots, which is the width of T5-Base: arrays of width and slots would look like attention.
    "long": Training(SIZES["base"], source=16384, target=640, batch=1, accumulate=1, most=24e9),
    "large": Training(LARGE, source=4096),
    "lora": Training(dataclasses.replace(LARGE, d_kv=128, d_ff=16384, num_heads=32), lora_rank=16),  # T5-3B
}


class Case(NamedTuple):
    """A program to compile."""

    name: str
    compile: Callable[[], jax.stages.Compiled]
    facts: Callable[[], dict[str, Any]] = dict  # called after compilation


def main(argv: Sequence[str]) -> int:
    """Compiles, counts, prints a table, and writes JSON; returns 1 if a program but the encoder's has problems."""
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
    parser.add_argument("--arrays", action="store_true", help="compile attention with arrays of queries by keys")
    parser.add_argument("--graph", action="store_true", help="compile decoders with their loops in a CUDA graph")
    parser.add_argument("--xla", action="store_true", help="compile without our own kernels for GPUs")
    parser.add_argument(
        "--trees",
        default=".",
        metavar="DIR,...",
        help="directories of this project, such as an older worktree, whose training steps are compiled (.)",
    )
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    parser.add_argument("--dump", metavar="DIR", help="folder for the text of each program and its PTX for a GPU")
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
        device, is_gpu = kind.devices(1)[0], isinstance(kind, targets.GpuTarget)
        config, dtype = SIZES[name_of_model], jnp.dtype(name_of_dtype)
        made = absent(
            config, dtype, device, Gpu() if is_gpu and not flags.xla else XLA, Configuration(graph=flags.graph)
        )
        both = Sequential(512), Pipelined(GridConfig().delay, GridConfig().time_max, GridConfig().sub_max)
        decoders = (case for batch in batches if batch for case in cases(made, both, batch, flags.source))
        steps = [step_of(name, config, name_of_dtype, device, arrays=flags.arrays) for name in trainings]
        own = ((".", case) for case in itertools.chain(decoders, steps))
        trees = flags.trees.split(",")
        of_others = ((tree, case) for tree in trees if tree != "." for case in steps)
        for tree, case in itertools.chain(of_others, own if "." in trees else ()):
            name, more = case.name, dict[str, Any]()
            if tree == ".":
                found, more = compiled_here(case, device)
            else:
                found = compiled_by(Path(tree), target, name_of_model, name_of_dtype, name.split(", ")[1])
            result = {"target": target, "model": name_of_model, "dtype": name_of_dtype, "program": name}
            result |= ({"tree": name_of_tree(tree)} if trees != ["."] else {}) | {"compile_s": found.seconds}
            result |= report(found.text, found.memory) | more
            if is_gpu and not flags.arrays:
                result["attention"] = instructions.of_program(found.text, found.ptx)
            if name.startswith("train"):
                whole = TRAININGS[name.split(", ")[1]]
                result["squares"] = squares(found.text, whole._replace(model=whole.model or config).config)
            results.append(result)
            print("\n".join(lines(result)), flush=True)
            if flags.dump and tree == ".":
                stem = f"{target} {name_of_model} {name_of_dtype} {name}".replace(" ", "-")
                (Path(flags.dump) / f"{stem}.hlo").write_text(found.text)
                for number, module in enumerate(found.ptx):
                    (Path(flags.dump) / f"{stem}-{number}.ptx").write_text(module)
    if flags.json:
        named = ",".join(map(name_of_tree, flags.trees.split(",")))
        command = "python -m lab.benchmarks.programs " + " ".join(named if x == flags.trees else x for x in argv)
        save(flags.json, {"results": results, "jax": jax.__version__, "command": command})
    return int(any(troubles(result) for result in results if not result["program"].startswith("encode")))


def step_of(name: str, config: T5Config, dtype: str, device: jax.Device, *, arrays: bool) -> Case:
    """A training step of TRAININGS; `config`: the T5 for steps that do not name one."""
    own = TRAININGS[name]._replace(model=TRAININGS[name].model or config)
    on_gpu = device.platform in ("gpu", "cuda")
    limits = {"most": own.most, "most_temporary": own.most_temporary} if on_gpu else {}
    lower = partial(training, own, dtype, device, arrays=arrays)

    def compiled() -> jax.stages.Compiled:
        found: jax.stages.Compiled = lower().compile(compiler_options=step.GPU_OPTIONS if on_gpu else None)
        return found

    return Case(f"train, {name}{', arrays' * arrays}", compiled, lambda: dict(limits))


def name_of_tree(tree: str) -> str:
    """The name of a tree in results: its last directory, or "." for this one."""
    return Path(tree).name or "."


class Compiled(NamedTuple):
    """A compiled program."""

    text: str
    ptx: list[str]  # its PTX modules, for a GPU
    memory: Any  # sizes in bytes, with the names of JAX's memory analysis
    seconds: float


def compiled_here(case: Case, device: jax.Device) -> tuple[Compiled, dict[str, Any]]:
    """Compiles a program of this tree; returns it with further facts."""
    begun = time.perf_counter()
    on_gpu = device.platform in ("gpu", "cuda")
    with dumped(instructions.PTX if on_gpu else {}) as folder, named_device(device):
        compiled = case.compile()
        seconds, more = time.perf_counter() - begun, case.facts()
        ptx = [path.read_text() for path in folder.glob("*.ptx")]
        if on_gpu and "slots" in case.name:
            more["buffers"] = buffers(folder)._asdict()
    return Compiled(compiled.as_text() or "", ptx, compiled.memory_analysis(), seconds), more


def compiled_by(tree: Path, target: str, model: str, dtype: str, name: str) -> Compiled:
    """Compiles a training step with the code of another tree of this project, by calling this module of that tree."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, "-m", "lab.benchmarks.programs", "--targets", target, "--batches", "0"]
        command += ["--model", model, "--dtype", dtype, "--train", name, "--dump", folder, "--json", str(out)]
        # For trees whose --dump writes no PTX.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_emitter_re=ptx"
        done = subprocess.run(
            command, cwd=tree, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, check=False
        )
        if not out.exists():
            raise UserError(str(tree), found=done.stderr[-2000:], expected="a compiled training step")
        (result,) = json.loads(out.read_text())["results"]
        (text,) = (path.read_text() for path in Path(folder).glob("*.hlo"))
        memory = SimpleNamespace(**{f"{kind}_size_in_bytes": size for kind, size in result["memory"].items()})
        return Compiled(text, [path.read_text() for path in Path(folder).glob("*.ptx")], memory, result["compile_s"])


def training(own: Training, dtype: str, device: jax.Device, *, arrays: bool = False) -> Any:
    """Lowers a training step for the longest batch and a device; `arrays`: attention without kernels."""
    whole = own.config
    whole = dataclasses.replace(whole, train=dataclasses.replace(whole.train, dtype=dtype))
    with mock.patch.object(step, "choose_blocks", return_value=None) if arrays else contextlib.nullcontext():
        return step.Trainer(whole, [device]).lower(longest_batch(whole))


def squares(text: str, whole: Config) -> list[str]:
    """The shapes of buffers that have all heads and two lengths."""
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


def absent(
    config: T5Config, dtype: Any, device: jax.Device, backend: Backend = XLA, configuration: Configuration = DEFAULT
) -> Programs:
    """The programs of a T5 for a device that may be absent, with shapes instead of weights.

    Args:
      config: the config of the T5.
      dtype: the dtype of computations.
      device: the device of all arrays.
      backend: computes the steps of a decoder.
      configuration: the configuration of the decoders.
    """
    made = Programs(config, dtype, devices=[device], backend=backend)
    made.configurations.fixed, made._call_costs = configuration, 1.0
    params = jax.eval_shape(config.init_params, jax.random.key(0))
    ready, place = jax.eval_shape(partial(backend.prepare, made.model), params), NamedSharding(made._mesh(1), P())
    made._placed[1] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), ready)
    return made


def cases(made: Programs, strategies: Sequence[Strategy], batch: int, length: int) -> Iterator[Case]:
    """Yields the encoder and the decoders of a batch, as `Programs.decode` compiles them.

    Args:
      made: the programs, from `absent`.
      strategies: the decoders.
      batch: the size of the batch.
      length: tokens of each source.
    """
    configuration, ready, report = made.configurations.fixed or DEFAULT, made.on(1), Report()
    source = np.zeros((1, batch, length), np.int32), np.ones((1, batch), np.int32)
    encoder = Call("encoder", 0, (ready.encoding, *source, None), (1, batch, length))
    yield Case(f"encode, batch {batch}", partial(made._program, encoder, report))
    encode = partial(programs.encode_batch, made.model, backend=made.backend)
    of_one = jax.eval_shape(encode, ready.encoding, *(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in source))
    memory = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), of_one)
    for strategy in map(made.tuned_for, strategies):
        carry, read = None, SourceIds(*source) if strategy.reads_source else None
        options = GREEDILY.take(np.zeros((1, batch), np.int32))
        for slots in programs.schedule(strategy, batch, made.devices[0].platform, configuration).slots:
            arguments = (ready.decoding, None), memory, carry, read, options
            decoder = Call(strategy, slots, arguments, memory.mask.shape, configuration)
            name = f"{type(strategy).__name__.lower()}, batch {batch}, {slots} slots"
            yield Case(name, partial(made._program, decoder, report), partial(_least_bytes, made, decoder))
            carry = made._find(decoder, report).carry


def _least_bytes(made: Programs, decoder: Call) -> dict[str, Any]:
    """The bytes that a step of a decoder must read: its weights, the encoded sources, and its cache."""
    weights, memory, *_ = decoder.arguments
    cache = made._find(decoder, Report()).carry.cache
    arrays = jax.tree.leaves((weights, memory, cache))
    return {"least_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)}


class Buffers(NamedTuple):
    """The work of the host in a run of a program for a GPU, from XLA's sequence of thunks."""

    graphs: int  # CUDA graphs that the host starts
    loops: int  # loops that the host controls
    others: int  # kernels and copies that the host starts one by one


def buffers(folder: Path) -> Buffers:
    """Reads the sequence of thunks of the last program that was compiled with dumps in this folder."""
    path = max(folder.glob("*.thunk_sequence_after_thunk_passes.txt"))
    return count_thunks(path.read_text())


def count_thunks(text: str) -> Buffers:
    """Counts the thunks that are in no command buffer (CUDA graph). Thunks inside another thunk are indented."""
    counts, inside = Counter[str](), None
    for indent, kind in re.findall(r"^( *)\d+: k(\w+)", text, re.MULTILINE):
        if inside is not None and len(indent) > inside:
            continue
        inside = len(indent) if kind == "CommandBuffer" else None
        counts[kind] += 1
    loops = counts["While"] + counts["Conditional"]
    return Buffers(counts["CommandBuffer"], loops, counts.total() - loops - counts["CommandBuffer"])


@contextlib.contextmanager
def dumped(more: Mapping[str, str] = MappingProxyType({})) -> Iterator[Path]:
    """A context in which programs of `Programs`, and training steps for GPUs, are compiled with dumps in a folder."""
    options: Any = Configuration.compiler_options
    with tempfile.TemporaryDirectory() as folder:

        def with_dumps(configuration: Configuration) -> dict[str, str | bool]:
            return {**(options.fget(configuration) or {}), "xla_dump_to": folder, "xla_dump_hlo_as_text": True, **more}

        with (
            mock.patch.object(Configuration, "compiler_options", property(with_dumps)),
            mock.patch.dict(step.GPU_OPTIONS, {"xla_dump_to": folder, **more}),
        ):
            yield Path(folder)


def report(text: str, memory: Any) -> dict[str, Any]:
    """Counts instructions, bytes and buffers of a compiled program."""
    program = Program(text)
    starts, kinds = list(program.starts()), dict[str, dict[str, int]]()
    for start in starts:
        kind = kinds.setdefault(program.kind(start.kernel), {"starts": 0, "bytes": 0})
        kind["starts"] += start.times
        kind["bytes"] += start.times * start.bytes
    every = Counter(one.kind.removesuffix("-start") for one in program.every())
    bodies = program.loops() or [program.entry]
    return {
        "per_step": bool(program.loops()),
        "loops": [{"kernels": dict(program.kernels(body)), "bytes": program.bytes(body)} for body in bodies],
        "starts": sum(start.times for start in starts),
        "small_starts": sum(start.times for start in starts if start.bytes < SMALL),
        "kinds": dict(sorted(kinds.items(), key=lambda item: -item[1]["bytes"])),
        "moved": sum(start.times * start.bytes for start in starts),
        # The work outside of loops, which a run does once.
        "returned": program.returned(),
        "copied": program.copied(),
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
    """The problems of a program: transfers, collectives, conditionals, large arrays, and too much memory."""
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
    """The bytes that the compiler reserves."""
    return memory["argument"] + memory["output"] + memory["temp"] - memory["alias"]


def lines(result: dict[str, Any]) -> list[str]:
    """The counts of a program as lines of text."""
    printed = []
    for loop in result["loops"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(loop["kernels"].items()))
        unit = "an iteration" if result["per_step"] else "in all"
        count = sum(loop["kernels"].values())
        name = f"{result['target']:<8} {result['model']} {result['dtype']} {result['program']:<32}"
        least = f", {loop['bytes'] / result['least_bytes']:.2f} of the least" if "least_bytes" in result else ""
        printed.append(f"{name} {count:>5} kernels {unit} ({kinds}), {loop['bytes'] / 1e6:.0f} MB{least}")
    memory, trouble = result["memory"], troubles(result)
    printed.append(
        f"{'':<41} arguments {memory['argument'] / 2**20:.0f} MiB, temporary {memory['temp'] / 2**20:.0f} MiB, "
        f"in all {in_all(memory) / 2**20:.0f} MiB, moved in a run {result['moved'] / 1e9:.1f} GB, "
        f"compiled in {result['compile_s']:.0f} s{'; ' if trouble else ''}{', '.join(trouble)}"
    )
    if "buffers" in result:
        host = Buffers(**result["buffers"])
        printed.append(
            f"{'':<41} returns {result['returned']} arrays of {memory['output'] / 2**20:.1f} MiB, "
            f"{memory['alias'] / 2**20:.1f} MiB in place of arguments, copies {result['copied'] / 2**20:.2f} MiB once; "
            f"the host starts {host.graphs} CUDA graphs and {host.others} kernels, and controls {host.loops} loops"
        )
    if result["program"].startswith("train"):
        by_kind = (f"{name} {x['starts']} ({x['bytes'] / 1e9:.1f} GB)" for name, x in result["kinds"].items())
        printed.append(
            f"{'':<41} a run starts {result['starts']} kernels, {result['small_starts']} of which move less than "
            f"{SMALL / 1e6:g} MB: {', '.join(by_kind)}"
        )
    for own in result.get("attention", ()):
        loops = " and ".join(map(str, own["by_loop"]))
        printed.append(
            f"{'':<41} {own['kernel']} ({own['attention']}), {own['starts']} starts: {loops} instructions a score, "
            f"{own['registers']} registers, {own['spilled_bytes']} bytes spilled"
        )
    return printed


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
