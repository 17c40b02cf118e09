"""Compiles the kernel by NVRTC, which JAX's wheels for CUDA include: no other compiler is needed."""

import ctypes
import functools
import hashlib
import importlib.util
import os
from pathlib import Path
from typing import Any

from pipejax.system import compile_cache

NAME, THREADS = "pipejax_launch", 256  # as in gpu.cu and device.h
SOURCES = {x.name: x.read_text(encoding="utf-8") for x in sorted(Path(__file__).parent.glob("*.[hc]*"))}


@functools.cache
def ptx(pointers: int, scratch: int, architecture: str) -> str:
    """Returns the kernel's PTX for `pointers` arguments, of which the last `scratch` are scratch; raises OSError."""
    names = [f"p{i}" for i in range(pointers)]
    options = [f"--gpu-architecture=compute_{architecture}", "--std=c++17", f"-DSCRATCH={pointers - scratch}"]
    options += [f"-DPARAMETERS={', '.join(f'void* {x}' for x in names)}", f"-DPOINTERS={', '.join(names)}"]
    library = _find()
    facts = repr((SOURCES, options, library.stat().st_size, library.stat().st_mtime_ns))
    directory = compile_cache.safe_directory()
    name = f"launch-{architecture}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.ptx"
    kept = directory / name if directory else None
    if kept and kept.exists() and compile_cache.is_trusted(kept):
        return kept.read_text(encoding="ascii")
    made = _compile(ctypes.CDLL(str(library)), options)
    if kept and compile_cache.is_writable(kept.parent):
        (scratch_file := kept.with_suffix(f".{os.getpid()}")).write_text(made, encoding="ascii")
        scratch_file.chmod(0o600)
        scratch_file.replace(kept)
    return made


def _find() -> Path:
    """Returns the path of NVRTC's library in NVIDIA's packages, after it has loaded the library's builtins."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        for library in sorted(Path(root).glob("*/lib/libnvrtc.so.*")):
            for part in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(part))
            return library
    raise OSError("found no NVRTC; expected the package nvidia-cuda-nvrtc, which jax[cuda] installs")


def _compile(nvrtc: ctypes.CDLL, options: list[str]) -> str:
    def strings(given: Any) -> Any:
        return (ctypes.c_char_p * len([*given]))(*(x.encode() for x in given))

    def text(of: str) -> str:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{of}Size")(program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{of}")(program, found)
        return found.value.decode()

    program, headers = ctypes.c_void_p(), (len(SOURCES), strings(SOURCES.values()), strings(SOURCES))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), SOURCES["gpu.cu"].encode(), b"gpu.cu", *headers)
    if nvrtc.nvrtcCompileProgram(program, len(options), strings(options)):
        raise OSError(f"NVRTC: {next((x for x in text('ProgramLog').splitlines() if 'error' in x), 'failed')}")
    return text("PTX")
