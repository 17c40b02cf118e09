"""A kernel of our own for decoding on a CPU, compiled once on the user's machine: see columns.cc.

Without a C++ compiler, without a cache to keep it in, or elsewhere than on a CPU everything works as well, in XLA's own
products.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from pipejax import program_cache

Array = jax.Array
TARGET = "pipejax_columns"
LANES = 16  # outputs of a panel, as in columns.cc
SOURCE = Path(__file__).parent / "columns.cc"
VARIABLE = "PIPEJAX_NATIVE"  # "off": do without


def use(*, log: Callable[[str], None]) -> bool:
    """Loads the kernel, compiling it before if need be, and says whether it is there."""
    if os.environ.get(VARIABLE) == "off" or jax.default_backend() != "cpu":
        return False
    directory = program_cache.safe_directory(log=log)
    if directory is None:
        return False
    if directory not in _tried:
        try:
            _tried[directory] = _load(directory, log)
        except OSError as error:  # a disk that is full or forbids programs, a file that is no library
            log(f"decoding goes without its own kernel: {error}")
            _tried[directory] = False
    return _tried[directory]


_tried: dict[Path, bool] = {}  # whether it could be had, by cache


def _load(directory: Path, log: Callable[[str], None]) -> bool:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        log("no C++ compiler: decoding goes without its own kernel, which is faster (Debian, Ubuntu: apt install g++)")
        return False
    flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{jax.ffi.include_dir()}"]
    key = hashlib.sha256(repr((SOURCE.read_bytes(), jax.__version__, compiler, flags, _processor())).encode())
    library = directory / f"columns-{key.hexdigest()[:16]}.so"
    if not library.exists():
        log(f"compiling a kernel for this processor (once; kept in {directory})")
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / library.name
            command = [*compiler.split(), *flags, str(SOURCE), "-o", str(made)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                log(f"decoding goes without its own kernel: {compiler}: {error}")
                return False
            if done.returncode:
                found = next((line for line in done.stderr.splitlines() if "error" in line), f"code {done.returncode}")
                log(f"decoding goes without its own kernel: {compiler}: {found}")
                return False
            made.replace(library)
    if not any(_tried.values()):  # a name can be given once
        try:
            handler = ctypes.CDLL(str(library)).pipejax_columns
        except (OSError, AttributeError) as error:
            library.unlink(missing_ok=True)  # the next start makes it anew
            raise OSError(f"{library}: cannot be loaded ({error})") from error
        jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="cpu")
    return True


def _processor() -> str:
    """What the compiler sees of the processor: a home directory may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def panels(matrix: Array) -> Array:
    """[.., O, I] -> [.., O / 16, I, 16], as `product` reads it; O must be a multiple of 16."""
    *batch, outputs, inputs = matrix.shape
    return matrix.reshape(*batch, outputs // LANES, LANES, inputs).swapaxes(-1, -2)


def product(matrix: Array, columns: Array) -> Array:
    """f32 [.., O, N], the matrix in panels f32 [.., O / 16, I, 16] times columns f32 [.., I, N]. Only after `use`."""
    shape = (*columns.shape[:-2], matrix.shape[-3] * LANES, columns.shape[-1])
    return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct(shape, jnp.float32))(matrix, columns)
