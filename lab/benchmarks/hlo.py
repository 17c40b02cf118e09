"""Reads compiled programs as XLA prints them: the kernels of each loop, and the bytes that they read and write.

A kernel is an instruction that a device has to start: a fusion, a product, a copy, a custom call. An instruction that
only renames a buffer (a tuple, a bitcast) is no kernel.

Only bytes of the device's main memory count. An array that one of pipejax's kernels for GPUs returns in the memory of
an operand counts once, as the operand. The compiler for TPUs moves buffers into memory on the chip before they are
used, and marks their layouts with S(1): reading such a buffer counts no bytes.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"),
        *("after-all", "add-dependency", "partition-id", "replica-id", "opt-barrier", "copy-done", "slice-done"),
        *("async-done", "all-reduce-done", "all-gather-done", "collective-permute-done"),
    )
)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
PREFETCHES = ("copy-start", "slice-start")
KERNEL = "__gpu$xla.gpu.triton"  # the custom calls of kernels that are written in Pallas
HOST = ("infeed", "outfeed", "send", "recv")
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
_SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+\w*)\[([\d,]*)\](\{[^{}]*\})?")
_ON_CHIP = re.compile(r"S\([1-9]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    shape: str  # shape of the result, as text
    kind: str  # such as "fusion"
    operands: tuple[str, ...]
    calls: tuple[str, ...]  # the computations that it runs
    text: str


class Start(NamedTuple):
    """A kernel of a program, and how often a whole run of the program starts it."""

    kernel: Instruction
    times: int
    bytes: int  # bytes that one start reads and writes


class Program:
    """The computations of a compiled program by name."""

    def __init__(self, text: str) -> None:
        """Parses `text`, the result of a compiled program's `as_text`."""
        self.computations: dict[str, list[Instruction]] = {}
        self.entry, current = "", None
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (found := _INSTRUCTION.match(line)):
                current.append(_instruction(found, line))

    def every(self) -> Iterator[Instruction]:
        """Yields all instructions, including instructions inside fusions."""
        for instructions in self.computations.values():
            yield from instructions

    def loops(self, least: int = 16) -> list[str]:
        """The bodies of the innermost loops with at least `least` kernels, in the order in which they run."""
        found: list[str] = []

        def visit(computation: str) -> bool:
            inner = False
            for one in self.computations.get(computation, ()):
                if one.kind in ("while", "conditional", "call"):
                    for name in one.calls:
                        inside = visit(name)
                        if one.kind == "while" and not inside and self.kernels(name).total() >= least:
                            found.append(name)
                            inside = True
                        inner = inner or inside
            return inner

        visit(self.entry)
        return list(dict.fromkeys(found))

    def kernels(self, computation: str) -> Counter[str]:
        """The number of kernels of each kind that one run of a computation starts, without the loops inside it."""
        return Counter(self.kind(one) for one in self.computations.get(computation, ()) if one.kind not in FREE)

    def kind(self, one: Instruction) -> str:
        """The kind of a kernel: product, reduction, elementwise, copy, collective, prefetch, or the kernel's name."""
        if one.kind.removesuffix("-start") in COLLECTIVES:
            return "collective"
        if one.kind in PREFETCHES:
            return "prefetch"
        if one.kind == "custom-call":
            target = re.search(r'custom_call_target="([^"]+)"', one.text)
            name = target[1] if target else "?"
            return "product" if re.search(r"gemm|matmul|cublas", name) else f"custom call {name}"
        if one.kind in ("dot", "convolution"):
            return "product"
        if one.kind != "fusion":
            return one.kind
        inside = {inner.kind for name in one.calls for inner in self.computations.get(name, ())}
        if inside & {"dot", "convolution"}:
            return "product"
        for special in ("sort", "scatter"):
            if special in inside:
                return special
        return "reduction" if inside & {"reduce", "reduce-window"} else "elementwise"

    def bytes(self, computation: str) -> int:
        """The bytes of main memory that the kernels of a computation read and write.

        If a buffer is sliced or updated in place, only the part that moves counts. A prefetched buffer counts once.
        """
        return sum(start.bytes for start in self._starts(computation, 1))

    def _starts(self, computation: str, times: int) -> Iterator[Start]:
        """The kernels of a computation itself, without the computations that it calls."""
        instructions = self.computations[computation]
        sizes = {one.name: size(one.shape) for one in instructions}
        for one in instructions:
            if one.kind not in FREE:
                inside = self.computations.get(one.calls[0], []) if one.kind == "fusion" else [one]
                yield Start(one, times, self._read(one, inside, sizes) + self._written(one, inside))

    def starts(self, computation: str = "", times: int = 1) -> Iterator[Start]:
        """Yields the kernels of a whole run of a computation ("": the program), in the order of their first starts.

        A loop runs as often as the compiler knows, or once. Of a conditional, the branch that moves the most bytes
        counts.
        """
        computation = computation or self.entry
        own = {start.kernel.name: start for start in self._starts(computation, times)}
        for one in self.computations[computation]:
            if one.name in own:
                yield own[one.name]
            elif one.kind in ("while", "conditional", "call"):
                turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', one.text)
                most = max(one.calls, key=self.moved)
                yield from self.starts(most, times * int(turns[1] if turns else 1))

    def moved(self, computation: str = "") -> int:
        """The bytes that a whole run of a computation ("": the program) moves."""
        return sum(start.times * start.bytes for start in self.starts(computation))

    def buffers(self, computation: str = "") -> Iterator[str]:
        """Yields the shapes of all buffers in memory, as text; values inside a fusion have no buffers."""
        for one in self.computations[computation or self.entry]:
            yield one.shape
            if one.kind in ("while", "conditional", "call"):
                for name in one.calls:
                    yield from self.buffers(name)

    def _read(self, one: Instruction, inside: list[Instruction], sizes: dict[str, int]) -> int:
        if one.kind in PREFETCHES:
            return _fetched(one)[0]
        if one.kind != "fusion":
            whole = [sizes.get(name, 0) for name in one.operands]
            return sum(whole[1:] if one.kind == "dynamic-update-slice" else whole)
        total = 0
        for inner in inside:
            if number := re.search(r"parameter\((\d+)\)", inner.text):
                total += min(_used(inner.name, inside), sizes.get(one.operands[int(number[1])], 0))
        return total

    def _written(self, one: Instruction, inside: list[Instruction]) -> int:
        if one.kind in PREFETCHES:
            return _fetched(one)[1]
        written, inner = size(one.shape), {x.name: size(x.shape) for x in inside}
        if aliasing := re.search(
            rf'custom_call_target="{re.escape(KERNEL)}".*output_to_operand_aliasing=(.*?)\)\}}', one.text
        ):
            parts = _parts(one.shape)
            return written - sum(parts[int(index or 0)] for index in re.findall(r"\{(\d*)\}:", aliasing[1]))
        for update in (x for x in inside if x.kind == "dynamic-update-slice" and size(x.shape) in _parts(one.shape)):
            written -= size(update.shape) - (inner.get(update.operands[1], 0) if one.kind == "fusion" else 0)
        return max(written, 0)

    def returned(self) -> int:
        """The number of arrays in the result."""
        roots = [one for one in self.computations.get(self.entry, ()) if one.text.lstrip().startswith("ROOT")]
        return sum(1 for one in roots for _ in dimensions(one.shape))

    def copied(self) -> int:
        """The bytes of arrays that the program copies without a change, outside of loops."""
        return sum(size(one.shape) for one in self.computations.get(self.entry, ()) if self._copies(one))

    def largest(self, kind: str) -> int:
        """The elements of the largest operand of any instruction of a kind; 0 if there is no such instruction."""
        sizes = {one.name: elements(one.shape) for one in self.every()}
        found = [one for one in self.every() if one.kind == kind]
        return max((max([elements(one.shape), *(sizes.get(n, 0) for n in one.operands)]) for one in found), default=0)

    def largest_copy(self, computation: str) -> int:
        """The elements of the largest array that a computation copies without a change; 0 if it copies none."""
        copies = (one for one in self.computations.get(computation, ()) if self._copies(one))
        return max((elements(array[0]) for one in copies for array in _SHAPE.finditer(one.shape)), default=0)

    def _copies(self, one: Instruction) -> bool:
        if one.kind == "fusion":
            return {x.kind for x in self.computations.get(one.calls[0], ())} - FREE == {"copy"}
        return one.kind == "copy" or (one.kind == "copy-start" and _fetched(one)[1] > 0)

    def host_transfers(self) -> int:
        """The number of instructions at which a device waits for its host, or the host for the device."""
        return sum(
            one.kind.removesuffix("-done") in HOST
            or (one.kind == "custom-call" and bool(re.search(r"callback|MoveToHost|MoveToDevice", one.text)))
            for one in self.every()
        )


def _used(name: str, inside: list[Instruction]) -> int:
    """The bytes that a fused computation reads from one of its buffers."""
    total = 0
    for user in (x for x in inside if name in x.operands):
        if user.kind in ("dynamic-slice", "slice", "gather"):
            total += size(user.shape)
        elif user.kind in ("bitcast", "reshape"):
            total += _used(user.name, inside)
        elif user.kind != "dynamic-update-slice" or user.operands[0] != name:
            return 1 << 62
    return total


def dimensions(shape: str) -> Iterator[tuple[int, ...]]:
    """Yields the dimensions of each array of a shape."""
    for _, dims, _ in _SHAPE.findall(shape):
        yield tuple(int(n) for n in dims.split(",") if n)


def elements(shape: str) -> int:
    """The elements of all arrays of a shape, such as "bf16[2,3]{1,0}" or a tuple of these."""
    return sum(math.prod(int(n) for n in dims.split(",") if n) for _, dims, _ in _SHAPE.findall(shape))


def size(shape: str) -> int:
    """The bytes of main memory that all arrays of a shape take."""
    return sum(_parts(shape))


def _parts(shape: str) -> list[int]:
    return [bits // 8 * (not on_chip) for bits, on_chip in _arrays(shape)]


def _arrays(shape: str) -> list[tuple[int, bool]]:
    """The bits of each array of a shape, and whether the array is in memory on the chip."""
    found = []
    for dtype, dims, layout in _SHAPE.findall(shape):
        bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype.partition("e")[0]) or 8)
        count = math.prod(int(n) for n in dims.split(",") if n)
        found.append((count * bits, bool(_ON_CHIP.search(layout))))
    return found


def _fetched(one: Instruction) -> tuple[int, int]:
    """The bytes of main memory that a prefetch reads and writes; its result has the new and the whole old buffer."""
    first, second, *_ = _arrays(one.shape)
    (bits, to_chip), (_, from_chip) = (first, second) if one.kind == "copy-start" else (second, first)
    return bits // 8 * (not from_chip), bits // 8 * (not to_chip)


def _instruction(found: re.Match[str], line: str) -> Instruction:
    arguments = found[4].split("), ")[0]
    calls = re.findall(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)", line)
    if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
        calls += re.findall(r"[\w.\-]+", branches[1])
    return Instruction(found[1], found[2], found[3], tuple(re.findall(r"%([\w.\-]+)", arguments)), tuple(calls), line)
