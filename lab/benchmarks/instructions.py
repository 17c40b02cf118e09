"""Counts the instructions of the kernels of block attention, compiled without a GPU for several GPUs.

    make venv-programs
    python -m lab.benchmarks.instructions --targets h100,rtx4090 [--json OUT]

Compiles attention of a T5-Base in the paper's setting forward and backward, assembles the PTX of each kernel with
ptxas, and reads the loops in the output of nvdisasm. A thread computes 32 scores of a tile of 64 queries by 64 keys,
and 16 of a tile of 64 by 32. A kernel has two loops with products of matrices: the first over plain blocks, without
mask and gather, the second over all others. The table has the instructions of a thread for each score in both, their
mean weighted by the visits of both kinds in the paper's batch, registers, and bytes of spilled registers.
"""

import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lab.benchmarks.hlo import Program, dimensions
from lab.benchmarks.systems import names_of, save
from pipejax import grid
from pipejax.apps.plan import targets
from pipejax.kernels import block_attention
from pipejax.model.slots import Blocks, Distances, Seen, Slots
from pipejax.system import cli
from pipejax.system.errors import UserError

KINDS = ("encoder", "cross", "decoder")
BATCH, HEADS, WIDTH, SOURCE, SLOTS, LONGEST = 6, 12, 64, 2048, 512, 128  # a part of the paper's batch
ROWS, DELAY = 40, 1  # rows of a target; each has SLOTS / ROWS tokens
RATE = 0.1
THREADS = 128
HEADER = "target", "attention", "kernel", "plain", "general", "plain_share", "mean", "registers", "spilled_bytes"
PTX = {"xla_dump_emitter_re": "ptx"}  # without this option of XLA, newer releases dump no PTX
PRODUCTS = re.compile(r"\b(HGMMA|HMMA)\b")


class Count(NamedTuple):
    """The counts of a compiled kernel."""

    kernel: str  # such as "_attend"
    parameters: int
    registers: int
    spilled: int  # bytes
    loops: list[int]  # instructions of each loop with products of matrices, in the order of the program


def main(argv: Sequence[str]) -> int:
    """Compiles the kernels, counts instructions, prints a table, and writes JSON."""
    parser = cli.Parser(prog="python -m lab.benchmarks.instructions", description=__doc__)
    parser.add_argument("--targets", default="h100,rtx4090", metavar="NAME,...", help="GPUs (h100,rtx4090)")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="NAME,...", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--json", metavar="OUT", help="file for the results")
    flags = parser.parse_args(argv)
    cli.check_output_file("--json", flags.json)
    jax.config.update("jax_platforms", "cpu")
    kinds, own = names_of("--kinds", flags.kinds, KINDS), tools()
    results: list[dict[str, Any]] = []
    print(line({name: name for name in HEADER}))
    for target in flags.targets.split(","):
        device = targets.find_target(target, "--targets").devices(1)[0]
        for kind in kinds:
            found = [count for ptx in modules(kind, device) for count in counts(ptx, *own)]
            for count in sorted(found):
                results.append(row(target, kind, count, plain_share(kind, count.kernel)))
                print(line(results[-1]), flush=True)
    if flags.json:
        save(flags.json, results)
    return 0


def tool(name: str) -> Path:
    """The path of a program of NVIDIA's packages in this environment."""
    for place in (Path(sys.prefix, "programs"), Path(sysconfig.get_path("purelib"))):
        if found := sorted((place / "nvidia").rglob(f"bin/{name}")):
            return found[0]
    raise UserError(name, found="no such program", expected="the packages of `make venv-programs`")


def tools() -> tuple[Path, Path]:
    """The paths of the assembler and of the disassembler."""
    return tool("ptxas"), tool("nvdisasm")


def sides(kind: str) -> tuple[Slots, Slots]:
    """The coordinates of queries and keys: whole sources, and targets of ROWS rows."""
    source = Slots(np.zeros((BATCH, SOURCE), np.int32))
    flat = grid.flatten([[2] * (SLOTS // ROWS)] * ROWS, delay=DELAY, bos=0, eos=1)
    row, time = (np.broadcast_to(x[:SLOTS], (BATCH, SLOTS)).astype(np.int32) for x in (flat.row, flat.time))
    target = Slots(np.zeros((BATCH, SLOTS), np.int32), row, time, row + time)
    if kind == "cross":
        return Slots(target.example), source
    if kind == "decoder":
        return target, target
    position = np.broadcast_to(np.arange(SOURCE, dtype=np.int32), (BATCH, SOURCE))
    encoder = Slots(source.example, position=position, consecutive=True)
    return encoder, encoder


def modules(kind: str, device: jax.Device) -> list[str]:
    """The PTX modules of a program that computes attention and its gradients."""
    queries, keys = sides(kind)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def shaped(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def rows(slots: Slots, arrays: int) -> jax.ShapeDtypeStruct:
        shape = BATCH, arrays * HEADS, slots.example.shape[1], WIDTH
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def attend(
        arrays: tuple[Any, ...], table: Any, bucket: Any, of_queries: Slots, of_keys: Slots, seed: Any, back: Any
    ) -> Any:
        def forward(arrays: tuple[Any, ...], table: Any) -> Any:
            distances = None if kind == "cross" else Distances(table, bucket)
            seen = Seen(of_queries, of_keys, distances, Blocks())
            keys = arrays[1] if kind == "cross" else None
            return block_attention.attend_in_blocks(arrays[0], keys, None, seen, seed, RATE)

        found, gradient = jax.vjp(forward, arrays, table)
        return found, gradient(back)

    vectors = np.zeros((32, HEADS), np.float32), np.zeros(2 * LONGEST + 1, np.int32), queries, keys
    # As in a T5: queries, keys and values are one array, or in cross-attention two.
    arrays = (rows(queries, 1), rows(keys, 2)) if kind == "cross" else (rows(queries, 3),)
    given = arrays, *jax.tree.map(shaped, vectors), shaped(np.zeros(2, np.uint32))
    compiled = jax.jit(attend).lower(*given, rows(queries, 1))
    with tempfile.TemporaryDirectory() as folder:
        compiled.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": False, **PTX})
        return [path.read_text() for path in Path(folder).glob("*.ptx")]


def counts(ptx: str, ptxas: Path, nvdisasm: Path) -> Iterator[Count]:
    """Yields the counts of each attention kernel in a module."""
    if not re.search(r"\.entry (_attend|_backward)", ptx):
        return
    architecture = re.search(r"\.target (\w+)", ptx)
    assert architecture is not None
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "a.ptx"), Path(folder, "a.cubin")
        source.write_text(ptx)
        command = [str(ptxas), "-v", "-arch", architecture[1], str(source), "-o", str(binary)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        text = subprocess.run([str(nvdisasm), "-c", str(binary)], check=True, capture_output=True, text=True).stdout
    facts = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", said, re.DOTALL)
    by_name = {name: (int(spilled), int(registers)) for name, spilled, registers in facts}
    for part in re.split(r"^(?=\.text\.)", text, flags=re.MULTILINE):
        name = re.match(r"\.text\.(\w+):", part)
        if name and name[1].startswith(("_attend", "_backward")):
            spilled, registers = by_name[name[1]]
            entry = re.search(rf"\.entry {name[1]}\((.*?)\)", ptx, re.DOTALL)
            assert entry is not None
            yield Count(name[1].partition("__")[0], entry[1].count(".param"), registers, spilled, loops(part))


def of_program(text: str, modules: Iterable[str]) -> list[dict[str, Any]]:
    """The kernels of attention in a compiled program, from its text and its PTX modules.

    For each kernel and kind of attention: how often a run starts it, the instructions of a thread for each score, by
    loop, registers, and bytes of spilled registers. XLA compiles equal kernels once.
    """
    program, own = Program(text), tools()
    known = {(count.kernel, count.parameters): count for ptx in modules for count in counts(ptx, *own)}
    if not known and re.search(r'name = "_(attend|backward)', text):
        raise UserError("XLA", found="no PTX of the attention kernels", expected="PTX in the dumped files")
    starts: dict[tuple[str, str, int], int] = {}
    for start in program.starts():
        name = re.search(r'name = "(_attend|_backward\w*)"', start.kernel.text)
        if name:
            path = re.search(r'op_name="([^"]*)"', start.kernel.text)
            place = path[1] if path else ""
            kind = "encoder" if "/encoder/" in place else "cross" if "cross_attention" in place else "decoder"
            results = sum(1 for _ in dimensions(start.kernel.shape))
            key = kind, name[1], len(start.kernel.operands) + results
            starts[key] = starts.get(key, 0) + start.times
    return [
        {"attention": kind, "starts": times, **facts(known[name, parameters])}
        for (kind, name, parameters), times in sorted(starts.items(), key=lambda item: KINDS.index(item[0][0]))
    ]


def facts(count: Count) -> dict[str, Any]:
    """The facts about a kernel, as plain values."""
    found = {"kernel": count.kernel, "by_loop": each_score(count), "registers": count.registers}
    return {**found, "spilled_bytes": count.spilled}


def each_score(count: Count) -> list[float]:
    """The instructions of a thread for each score, by loop."""
    scores = block_attention.BLOCK * block_attention.BLOCK // (1 if count.kernel == "_attend" else 2) / THREADS
    return [round(n / scores, 1) for n in count.loops]


def loops(part: str) -> list[int]:
    """The instructions of each loop with products of matrices, from the text of a kernel."""
    places, instructions, found = dict[str, int](), list[str](), list[int]()
    for text in part.splitlines():
        if label := re.match(r"\s*(\.L\w+):", text):
            places[label[1]] = len(instructions)
        elif re.match(r"\s*/\*[0-9a-f]{4,}\*/", text):
            instructions.append(text)
            branch = re.search(r"\bBRA\b.*`\((\.L\w+)\)", text)
            if branch and branch[1] in places:  # backwards
                inside = instructions[places[branch[1]] :]
                found += [len(inside)] if any(PRODUCTS.search(each) for each in inside) else []
    return found


def plain_share(kind: str, kernel: str) -> float:
    """The share of plain blocks among the blocks that the programs of a kernel visit in the paper's batch."""
    queries, keys = sides(kind)
    longest = 0 if kind == "cross" else LONGEST
    flip = kernel == "_backward_keys"
    other = block_attention.BLOCK // (1 if kernel == "_attend" else 2)
    block = block_attention.BLOCK
    these, others = (keys, queries) if flip else (queries, keys)
    order = jax.tree.map(np.asarray, block_attention._order(these, others, block, other, longest, flip=flip))
    plain = (order.end - order.begin + order.next_end - order.next_begin).sum()
    return float(plain / max((order.last - order.first).sum(), 1))


def row(target: str, kind: str, count: Count, share: float) -> dict[str, Any]:
    """A row of the table."""
    each = each_score(count)
    both = len(each) == 2
    mean = round(share * each[0] + (1 - share) * each[1], 1) if both else each[-1] if each else None
    return {
        "target": target,
        "attention": kind,
        "kernel": count.kernel,
        "plain": each[0] if both else None,
        "general": each[-1] if each else None,
        "plain_share": round(share, 3) if both else None,
        "mean": mean,
        "registers": count.registers,
        "spilled_bytes": count.spilled,
    }


def line(found: dict[str, Any]) -> str:
    """A row as text."""
    return "".join(f"{'-' if value is None else value!s:<19}" for value in found.values())


if __name__ == "__main__":
    cli.run(main, sys.argv[1:])
