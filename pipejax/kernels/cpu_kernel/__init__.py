"""Compiles and loads pipejax's C++ kernel for encoding and decoding on a CPU; see t5.cc.

A wheel may contain the compiled kernel (tools/ship_kernel.py); otherwise it is compiled once on the user's machine.
Without a C++ compiler, without a cache directory, or on other devices, XLA computes the same.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax

from pipejax.inference.backends import Reading
from pipejax.kernels import processor
from pipejax.system import compile_cache
from pipejax.system.errors import UserError, did_you_mean, first_line

logger = logging.getLogger(__name__)

Array = jax.Array


class Level(NamedTuple):
    """An instruction set for which the kernel can be compiled."""

    name: str
    needs: frozenset[str]  # the required processor features
    options: str  # the options of the compiler
    reading: Reading  # measured, except for the first three values of "amx", whose products differ


_V3 = {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
NATIVE = "-march=native"
LEVELS = (  # in this order, the fastest first
    Level(
        "amx",
        frozenset(_BF16 | {"amx_tile", "amx_int8", "amx_bf16"}),
        "-march=x86-64-v4 -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16",
        Reading(20.0, 15.0, 15.0, 8.0),
    ),
    Level("bf16", frozenset(_BF16), "-march=x86-64-v4 -mavx512vnni -mavx512bf16", Reading(20.0, 15.0, 15.0, 8.0)),
    Level("vnni", frozenset(_VNNI), "-march=x86-64-v4 -mavx512vnni", Reading(20.0, 15.0, 15.0, 8.0)),
    Level("avx512", frozenset(_V4), "-march=x86-64-v4", Reading(20.0, 15.0, 5.0, 8.0)),
    Level("avx2", frozenset(_V3), "-march=x86-64-v3", Reading(7.0, 5.0, 3.0, 4.0)),
    Level("native", frozenset(), NATIVE, Reading(7.0, 5.0, 3.0, 4.0)),  # the only level that Arm processors support
)
TARGETS = ("pipejax_step", "pipejax_encode", "pipejax_product", "pipejax_peaks", "pipejax_left")
PANEL = 16  # outputs of a panel; kPanel in digits.h
SOURCES = sorted(x for x in Path(__file__).parent.iterdir() if x.suffix in (".cc", ".h"))
SHIPPED = Path(__file__).parent / "compiled"  # a directory that only some wheels contain
VARIABLE = "PIPEJAX_NATIVE"  # "off": no kernel; the name of a level: this one, or the best supported one after it


def use() -> Level | None:
    """Loads the kernel, and compiles it first if necessary.

    Returns:
      The level of the loaded kernel; None if it is switched off, not supported on this machine, or failed to load.

    Raises:
      UserError: the environment variable PIPEJAX_NATIVE has an unknown value.
    """
    wanted, names = os.environ.get(VARIABLE, ""), [level.name for level in LEVELS]
    if wanted not in ("", "off", *names):
        hint = did_you_mean(wanted, ["off", *names])
        raise UserError(VARIABLE, found=f"{wanted!r}", expected=f"off, {', '.join(names)}", hint=hint)
    if wanted == "off" or jax.default_backend() != "cpu":
        return None
    levels = [level for level in LEVELS[names.index(wanted) if wanted else 0 :] if level.needs <= processor.features()]
    key = compile_cache.directory(), levels[0].name
    if key not in _tried:
        try:
            _tried[key] = _first_shipped(levels) or _first_compiled(levels)
        except OSError as error:  # for example a full disk, a file system mounted noexec, or a corrupt library
            logger.warning(f"decoding runs without pipejax's kernel: {error}")
            _tried[key] = None
    return _tried[key]


_tried: dict[tuple[Path | None, str], Level | None] = {}  # results of `use`, by cache directory and best level
_registered: set[str] = set()  # names of the levels whose functions are registered; JAX allows one registration


def shipped(level: Level) -> Path:
    """Returns the path that a shipped kernel for the present sources has in a wheel.

    A shipped kernel is trusted like the package.
    """
    return SHIPPED / f"t5-{level.name}-{_digest([x.read_bytes() for x in SOURCES])}.so"


def build(level: Level, compiler: str, library: Path) -> str:
    """Compiles the kernel for a level; its source files are compiled in parallel.

    Args:
      level: the instruction set.
      compiler: the command of the C++ compiler.
      library: the file to write.

    Returns:
      The reason of a failure, or "" on success.
    """
    units = [source for source in SOURCES if source.suffix == ".cc"]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(units)) as pool:
        objects = [Path(scratch) / f"{unit.stem}.o" for unit in units]
        commands = [
            [*_flags(level), "-c", str(unit), "-o", str(made)] for unit, made in zip(units, objects, strict=True)
        ]
        reasons = [*pool.map(functools.partial(_run, compiler), commands)]
        return next(filter(None, reasons), "") or _run(compiler, ["-shared", *map(str, objects), "-o", str(library)])


def _run(compiler: str, arguments: list[str]) -> str:
    """Runs the compiler; returns the reason of a failure, or "" on success."""
    try:
        done = subprocess.run([*compiler.split(), *arguments], capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return next((line for line in done.stderr.splitlines() if "error" in line), f"code {done.returncode}")
    return ""


def _first_shipped(levels: list[Level]) -> Level | None:
    """Returns the first level whose kernel is shipped and can be loaded; None if there is none.

    A kernel that was built for another system or another version of JAX may not be loadable.
    """
    for level in levels:
        library = shipped(level)
        try:
            if library.exists() and _load(library, level):
                return level
        except (OSError, jax.errors.JaxRuntimeError) as error:  # built for another version of JAX or another system
            logger.info(f"{library}: cannot be loaded on this machine ({first_line(error)})")
    return None


def _first_compiled(levels: list[Level]) -> Level | None:
    """Returns the first level whose kernel can be compiled and loaded; None if there is none.

    A warning in the log gives the reason for None, unless the cache is switched off.

    Raises:
      OSError: a compiled library cannot be loaded.
    """
    directory = compile_cache.safe_directory()
    if directory is None:
        return None
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.warning(
            "no C++ compiler: decoding runs without pipejax's faster kernel (Debian, Ubuntu: apt install g++)"
        )
        return None
    failed = ""
    for level in levels:
        library, failed = _compiled(directory, level, compiler, quiet=bool(failed))
        if library is None:
            continue
        try:
            if _load(library, level):
                return level
        except OSError as error:
            with contextlib.suppress(PermissionError):
                library.unlink(missing_ok=True)  # the next start compiles it again
            raise OSError(f"{library}: cannot be loaded ({error})") from error
    failed = failed or "the operating system does not permit the instructions of the kernel"
    logger.warning(f"decoding runs without pipejax's kernel: {failed}")
    return None


def _compiled(directory: Path, level: Level, compiler: str, *, quiet: bool) -> tuple[Path | None, str]:
    """Compiles the kernel, unless the cache directory has it already.

    Returns:
      The path of the library and ""; or None and the reason of a failure.
    """
    here = sorted(processor.features()) if level is LEVELS[-1] else []  # machines may share a home directory
    sources = [x.read_bytes() for x in SOURCES]
    library = directory / f"t5-{level.name}-{_digest(sources, jax.__version__, compiler, _flags(level), here)}.so"
    if library.exists() and compile_cache.is_trusted(library):
        return library, ""
    if not compile_cache.is_writable(directory):
        return None, f"{directory} has no kernel for this processor, and is not writable"
    if not quiet:
        logger.info(f"compiling a kernel for this processor, once, in 20 to 60 s; it is stored in {directory}")
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        made = Path(scratch) / library.name
        if failed := build(level, compiler, made):
            return None, f"{compiler}: {failed}"
        made.chmod(0o700)  # the linker sets the permissions that the umask allows
        made.replace(library)
    return library, ""


def _flags(level: Level) -> list[str]:
    """Returns the options of the compiler for a level."""
    # Loops are aligned to cache lines. Otherwise their alignment, and up to 4 % of a step's time, would depend on
    # unrelated code before them.
    always = "-O3 -ffp-contract=off -std=c++17 -fPIC -w -falign-functions=64 -falign-loops=64"
    # Every 64-bit Arm processor has NEON, which compilers use by default; some compilers do not accept -march=native.
    options = "" if processor.is_arm() and level.options == NATIVE else level.options
    return [*always.split(), *options.split(), f"-I{jax.ffi.include_dir()}"]


def _digest(*facts: object) -> str:
    """Returns a hash of the text form of values, for the name of a library."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _load(library: Path, level: Level) -> bool:
    """Loads a library and registers its functions with JAX.

    Returns:
      False if the system does not allow this process to use the level's instructions.

    Raises:
      OSError: the file is not a library with these functions.
    """
    if level.name in _registered:
        return True
    loaded = ctypes.CDLL(str(library))
    try:
        handlers = {name: getattr(loaded, name) for name in TARGETS}
        ready = loaded.pipejax_ready
    except AttributeError as error:
        raise OSError(str(error)) from error
    if not ready():
        return False
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(f"{name}_{level.name}", jax.ffi.pycapsule(handler), platform="cpu")
    _registered.add(level.name)
    return True


def panels(matrix: Array) -> Array:
    """Returns a matrix in the layout of the kernel: [.., O, I] -> [.., O / 16, I / depth, 16, depth].

    `depth` is the number of inputs that fill 32 bits: 1 for float32, 2 for bfloat16, 4 for int8.
    """
    *batch, outputs, inputs = matrix.shape
    depth = 4 // matrix.dtype.itemsize
    return matrix.reshape(*batch, outputs // PANEL, PANEL, inputs // depth, depth).swapaxes(-2, -3)
