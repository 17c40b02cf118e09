"""The compilation of a launch's kernel by NVRTC, which JAX's wheels for CUDA bring: it needs no other compiler."""

import ctypes
import functools
import hashlib
import importlib.util
import logging
from pathlib import Path

from pipejax.system import compile_cache

logger = logging.getLogger(__name__)

NAME = "pipejax_launch"
HEADERS = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.h"))}
ENTRY = """
#include "decode.h"
extern "C" __global__ void __launch_bounds__(launch::kThreads, 1) {name}({parameters}) {{
  __shared__ launch::Room room;
  if (threadIdx.x == 0) {{ {copies} room.numbers = *static_cast<const launch::Numbers*>(p0); }}
  __syncthreads();
  launch::Decode<launch::Bfloat16>(room, blockIdx.x, gridDim.x, {scratch}).Run();
}}
"""


@functools.cache
def ptx(pointers: int, scratch: int, architecture: str) -> str:
    """The kernel's PTX for so many arguments, the last of which are scratch; raises OSError."""
    source = ENTRY.format(
        name=NAME,
        parameters=", ".join(f"void* p{i}" for i in range(pointers)),
        copies=" ".join(f"room.pointers[{i}] = p{i};" for i in range(pointers)),
        scratch=pointers - scratch,
    )
    library = _find()
    facts = repr((source, HEADERS, architecture, library.stat().st_size, library.stat().st_mtime_ns))
    directory = compile_cache.safe_directory()
    kept = (
        directory / f"launch-{architecture}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.ptx"
        if directory
        else None
    )
    if kept and kept.exists() and compile_cache.ours_alone(kept):
        return kept.read_text(encoding="ascii")
    made = _compile(ctypes.CDLL(str(library)), source, architecture)
    if kept:
        kept.write_text(made, encoding="ascii")
        kept.chmod(0o600)
    return made


def _find() -> Path:
    """NVRTC's library in the packages of NVIDIA; loads the part that it opens by name."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        for library in sorted(Path(root).glob("*/lib/libnvrtc.so.*")):
            for part in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(part))
            return library
    raise OSError("found no NVRTC; expected the package nvidia-cuda-nvrtc, which jax[cuda] brings")


def _compile(nvrtc: ctypes.CDLL, source: str, architecture: str) -> str:
    program, names, texts = ctypes.c_void_p(), [x.encode() for x in HEADERS], [x.encode() for x in HEADERS.values()]
    strings, options = (
        ctypes.c_char_p * len(names),
        (f"--gpu-architecture=compute_{architecture}".encode(), b"--std=c++17"),
    )
    given = source.encode(), b"launch.cu", len(names), strings(*texts), strings(*names)

    def text(of: str) -> str:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{of}Size")(program, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{of}")(program, found)
        return found.value.decode()

    if failed := nvrtc.nvrtcCreateProgram(ctypes.byref(program), *given):
        raise OSError(f"NVRTC: error {failed}")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            log = text("ProgramLog")
            raise OSError(f"NVRTC: {next((x for x in log.splitlines() if 'error' in x), log[:200])}")
        return text("PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
