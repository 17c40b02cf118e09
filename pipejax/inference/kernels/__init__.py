"""A kernel of our own for decoding on a CPU, compiled once on the user's machine: see columns.cc.

Without a C++ compiler, without a cache to keep it in, or elsewhere than on a CPU everything works as well, in XLA's own
products.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.system import compile_cache

logger = logging.getLogger(__name__)

Array = jax.Array
TARGETS = ("pipejax_added", "pipejax_normed", "pipejax_attend")
LANES = 16  # outputs of a panel, as in columns.cc
SOURCE = Path(__file__).parent / "columns.cc"
VARIABLE = "PIPEJAX_NATIVE"  # "off": do without


def use() -> bool:
    """Loads the kernel, compiling it before if need be, and says whether it is there."""
    if os.environ.get(VARIABLE) == "off" or jax.default_backend() != "cpu":
        return False
    directory = compile_cache.safe_directory()
    if directory is None:
        return False
    if directory not in _tried:
        try:
            _tried[directory] = _load(directory)
        except OSError as error:  # a disk that is full or forbids programs, a file that is no library
            logger.warning(f"decoding goes without its own kernel: {error}")
            _tried[directory] = False
    return _tried[directory]


_tried: dict[Path, bool] = {}  # whether it could be had, by cache


def _load(directory: Path) -> bool:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        logger.warning(
            "no C++ compiler: decoding goes without its own kernel, which is faster (Debian, Ubuntu: apt install g++)"
        )
        return False
    flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{jax.ffi.include_dir()}"]
    key = hashlib.sha256(repr((SOURCE.read_bytes(), jax.__version__, compiler, flags, _processor())).encode())
    library = directory / f"columns-{key.hexdigest()[:16]}.so"
    if not (library.exists() and compile_cache.ours_alone(library)):
        logger.info(f"compiling a kernel for this processor (once; kept in {directory})")
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / library.name
            command = [*compiler.split(), *flags, str(SOURCE), "-o", str(made)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                logger.warning(f"decoding goes without its own kernel: {compiler}: {error}")
                return False
            if done.returncode:
                found = next((line for line in done.stderr.splitlines() if "error" in line), f"code {done.returncode}")
                logger.warning(f"decoding goes without its own kernel: {compiler}: {found}")
                return False
            made.chmod(0o700)  # the linker makes it as open as the umask allows
            made.replace(library)
    if not any(_tried.values()):  # a name can be given once
        try:
            loaded = ctypes.CDLL(str(library))
            handlers = {name: getattr(loaded, name) for name in TARGETS}
        except (OSError, AttributeError) as error:
            library.unlink(missing_ok=True)  # the next start makes it anew
            raise OSError(f"{library}: cannot be loaded ({error})") from error
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return True


def _processor() -> str:
    """What the compiler sees of the processor: a home directory may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def panels(matrix: Array) -> Array:
    """[.., O, I] -> [.., O / 16, I, 16], as the kernel reads it; O must be a multiple of 16."""
    *batch, outputs, inputs = matrix.shape
    return matrix.reshape(*batch, outputs // LANES, LANES, inputs).swapaxes(-1, -2)


# All of these only after `use`. Matrices are in panels, f32 [O / 16, I, 16]; columns are f32 [I, N].


def added(matrix: Array, columns: Array, residual: Array) -> Array:
    """f32 [O, N], the residual f32 [O, N] plus the matrix times the columns."""
    return _call("pipejax_added", matrix, columns, residual)


def normed(matrix: Array, columns: Array, scale: Array, *, epsilon: float, relu: bool = False) -> Array:
    """f32 [O, N], the matrix times the columns in their root-mean-square norm with scale f32 [I]; then perhaps relu."""
    return _call("pipejax_normed", matrix, columns, scale, epsilon=np.float32(epsilon), relu=relu)


def attend(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """What queries find: f32 [B, H, K, N].

    Args:
      query: f32 [B, H, K, N].
      keys: f32 [B, H, L / 16, K, 16], in panels.
      values: f32 [B, H, K / 16, L, 16], in panels.
      bias: f32 [B, L], added to the scores before the softmax.
    """
    result = jax.ShapeDtypeStruct(query.shape, jnp.float32)
    return jax.ffi.ffi_call("pipejax_attend", result)(keys, values, query, bias)


def _call(target: str, matrix: Array, columns: Array, *more: Array, **attributes: Any) -> Array:
    shape = matrix.shape[0] * LANES, columns.shape[1]
    return jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(shape, jnp.float32))(matrix, columns, *more, **attributes)
