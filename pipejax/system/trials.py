"""Trials of kernels and configurations on the NVIDIA GPUs of this machine, and their verdicts, which are kept on disk.

A trial chooses between computations with the same result, such as pipejax's kernels and XLA's. The verdict depends on
the GPUs, their driver, JAX, the sources of pipejax that make the programs, and the trial itself. The name of its file
is a hash of all of these, so that a later process finds it and waits for no trial. The files are in the directory
`verdicts` of the cache of compiled programs; `pipejax trials` lists them, and `pipejax trials --remove` removes them.

The trials of kernels, which run before this process uses a GPU (`try_kernels_early`), are in `pipejax/kernels/`.
"""

import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from pipejax import registry
from pipejax.system.errors import UserError, first_line
from pipejax.system.files import read_small, sweep, write_text
from pipejax.system.strict_json import JsonObject, loads

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)

PACKAGE = Path(__file__).resolve().parents[1]
SOURCES = ("decoding", "inference", "kernels", "model")  # the folders whose modules make the programs of a GPU
LIBRARIES = ("jax", "jaxlib", *(f"jax-cuda{n}-{part}" for n in (12, 13) for part in ("plugin", "pjrt")))


class Verdict(NamedTuple):
    """The outcome of a trial."""

    choice: str
    reason: str  # one line
    lasts: bool = True  # whether later processes would come to the same verdict


class Gpus(NamedTuple):
    """The NVIDIA GPUs of this machine."""

    names: tuple[str, ...] = ()
    driver: str = ""  # the version of their driver; "": there is no GPU, or NVIDIA's library NVML is missing


@dataclasses.dataclass(frozen=True)
class Trial:
    """A comparison that is made once on a machine."""

    name: str  # the name in log lines and in the name of the file, such as "kernels of a decoding step"
    program: str  # everything else that the verdict depends on

    def verdict(self, choices: Collection[str], decide: Callable[[], Verdict]) -> Verdict:
        """Returns the kept verdict. Without one, decides, and keeps the verdict if it lasts.

        Processes that decide at the same time do not wait for each other; the last one's verdict is kept.

        Args:
          choices: the possible choices; a kept verdict with another choice is not used.
          decide: makes the trial.
        """
        if kept := self.kept(choices):
            return kept
        found = decide()
        if found.lasts:
            self._keep(found)
        return found

    def kept(self, choices: Collection[str]) -> Verdict | None:
        """Returns the kept verdict; None without one. A file that is not a verdict is removed, with a warning."""
        place = self._place()
        if place is None:
            return None
        try:
            found = loads(read_small(place))
            if found["digest"] != _digest(found["facts"], found["choice"], found["reason"]):
                raise ValueError("its digest does not match")
            if found["facts"] != self._facts() or found["choice"] not in choices:
                raise ValueError("it belongs to another trial")
        except FileNotFoundError:
            return None
        except (OSError, UserError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning(f"{place}: not a verdict of a trial ({first_line(error)}); the trial is repeated")
            self.forget()
            return None
        return Verdict(found["choice"], found["reason"])

    def forget(self) -> None:
        """Removes the kept verdict, if there is one."""
        if place := self._place():
            sweep(place.parent, place.name)

    def _keep(self, verdict: Verdict) -> None:
        if (place := self._place()) is None:
            return
        facts = self._facts()
        content = {
            "trial": self.name,
            "choice": verdict.choice,
            "reason": verdict.reason,
            "made": time.strftime("%Y-%m-%d"),
            "digest": _digest(facts, verdict.choice, verdict.reason),
            "facts": facts,
        }
        try:
            place.parent.mkdir(mode=0o700, exist_ok=True)
            write_text(place, json.dumps(content, indent=1) + "\n")
        except (OSError, UserError) as error:
            _warn_once(f"verdicts of trials are not kept: {first_line(error)}")

    def _facts(self) -> JsonObject:
        return machine() | {"trial": self.name, "program": self.program}

    def _place(self) -> Path | None:
        """Returns the path of the verdict's file; None if verdicts are not kept."""
        if not gpus().driver:
            _warn_once("verdicts of trials are not kept: NVIDIA's library NVML, which knows the driver, is missing")
            return None
        from pipejax.system import compile_cache  # imported here: a child process starts sooner without JAX

        directory = compile_cache.safe_directory()
        name = f"{self.name.replace(' ', '-')}-{_digest(self._facts())[:16]}.json"
        return None if directory is None else directory / "verdicts" / name


def try_kernels_early(*, trains: bool) -> None:
    """Tries the kernels for GPUs whose verdicts are missing, before this process uses a GPU.

    Where only one process may use a GPU, later trials would fail. On a machine without NVIDIA GPUs, the function
    does nothing.

    Args:
      trains: whether gradients are needed.
    """
    if gpus().names and {"cuda", "gpu"} & {*_platforms().split(",")}:
        registry.find(registry.TRY_KERNELS)(trains=trains)


def _platforms() -> str:
    """Returns the platforms that this process may use, with commas."""
    import jax

    return str(jax.config.values["jax_platforms"] or "cuda")


@functools.cache
def gpus() -> Gpus:
    """Returns the NVIDIA GPUs of this machine, as NVML lists them. NVML does not use them: it creates no context."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Gpus()
    if nvml.nvmlInit_v2():
        return Gpus()
    text, count, names = ctypes.create_string_buffer(96), ctypes.c_uint(), []
    driver = "" if nvml.nvmlSystemGetDriverVersion(text, 96) else text.value.decode(errors="replace")
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        device = ctypes.c_void_p()
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        if not failed and not nvml.nvmlDeviceGetName(device, text, 96):
            names.append(text.value.decode(errors="replace"))
    nvml.nvmlShutdown()
    return Gpus(tuple(names), driver)


def machine() -> JsonObject:
    """Returns the facts on which every verdict depends."""
    kinds, driver = sorted({*gpus().names}), gpus().driver
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if len(kinds) > 1 else ""
    flags = os.environ.get("XLA_FLAGS", "")
    return {
        "gpus": kinds,
        "visible": visible,
        "driver": driver,
        "libraries": _libraries(),
        "flags": flags,
        "sources": _sources(),
    }


@functools.cache
def _libraries() -> dict[str, str]:
    """Returns the versions of JAX and of its plugins for CUDA."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def _sources() -> str:
    """Returns a hash of the modules in SOURCES."""
    content = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            content.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return content.hexdigest()


def _digest(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
