"""Launches the kernel on a CPU, with a thread of the system for each block; the source is compiled once."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax

from lab import launch

SOURCES = Path(launch.__file__).parent
NAMES = "float32", "bfloat16"


@functools.cache
def register(directory: Path) -> None:
    """Compiles the kernel unless it is in the cache `directory`, and registers it with XLA."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "clang++"
    options = ["-O2", "-ffp-contract=off", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread"]
    own = Path(__file__).with_suffix(".cc")
    command = [compiler, *options, f"-isystem{jax.ffi.include_dir()}", f"-I{SOURCES}", str(own)]
    facts = repr((command, jax.__version__, [x.read_bytes() for x in (own, *sorted(SOURCES.glob("*.h")))]))
    library = directory / f"launch-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(made)], check=True, timeout=300)
        made.replace(library)
    loaded = ctypes.CDLL(str(library))
    for name in NAMES:
        handler = jax.ffi.pycapsule(getattr(loaded, f"pipejax_launch_{name}"))
        jax.ffi.register_ffi_target(f"pipejax_launch_{name}", handler, platform="cpu")


def blocks(count: int = 3, **changes: Any) -> launch.LaunchBlocks:
    """The blocks of a launch on a CPU, after `register`."""
    return launch.LaunchBlocks(count, "", patience=30_000)._replace(**changes)
