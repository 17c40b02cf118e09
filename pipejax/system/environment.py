"""Checks the environment's settings of JAX and XLA: resets settings that change results, refuses unusable ones.

The module needs only the standard library, so that it can act before JAX is imported.
"""

import contextlib
import functools
import importlib.util
import os
import platform
import subprocess
import sys

from pipejax.system.errors import UserError

# The settings of JAX that change computed values, with the values that this package needs: JAX's defaults.
PINNED: dict[str, bool | int | str] = {
    "jax_enable_x64": False,
    "jax_disable_jit": False,
    "jax_debug_nans": False,  # the trainer skips a step that is not finite
    "jax_threefry_partitionable": True,
    "jax_default_prng_impl": "threefry2x32",
    "jax_random_seed_offset": 0,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
}
_WORDS = {
    False: ("0", "false", "f", "no", "n", "off"),
    True: ("1", "true", "t", "yes", "y", "on"),
}  # the words that JAX reads as booleans
# The number of open files that a process must be allowed. A save opens several files per array, and Orbax hangs without
# them.
FILES = 256
MEMORY = 2 << 30  # bytes of address space; with less, libraries below JAX abort the process without an exception
_FLAGS = "XLA_FLAGS"
_PROBE = "from jaxlib import xla_client; xla_client.CompileOptions().executable_build_options.debug_options"


def pin() -> list[str]:
    """Resets environment variables that contradict pinned settings; returns the old ones as "VARIABLE=VALUE".

    This affects JAX only if it is imported later, in this process or in a child process. Commands report the variables
    in a line, `pipejax.load` in a warning.
    """
    found = []
    for name, value in PINNED.items():
        variable, same = name.upper(), _WORDS[value] if isinstance(value, bool) else (str(value),)
        if os.environ.get(variable, "").lower() not in ("", *same):
            found.append(f"{variable}={os.environ[variable]}")
            os.environ[variable] = same[0]
    return found


IGNORED = pin()  # at import, before JAX is imported


def check_platform() -> None:
    """Raises a UserError if the system lacks a requirement of pipejax, or JAX has no package for the machine."""
    expected = "expected Linux (also in WSL2, on Intel, AMD or Arm), or macOS on Apple silicon"
    if lacking := [name for name in ("fcntl", "resource") if importlib.util.find_spec(name) is None]:
        found = "native Windows" if sys.platform == "win32" else f"the system {sys.platform!r}"
        wsl = "; wsl --install sets up WSL2" if sys.platform == "win32" else ""
        raise UserError(found=f"{found}, whose Python lacks {' and '.join(lacking)}; {expected}{wsl}")
    if importlib.util.find_spec("jax") is not None and importlib.util.find_spec("jaxlib") is not None:
        return  # JAX is installed, even if built by the user
    if sys.platform == "darwin" and platform.machine() == "x86_64":  # this is also true under Rosetta
        raise UserError(found=f"Python for a Mac with an Intel processor, for which JAX has no package; {expected}")
    if sys.maxsize < 2**32:
        raise UserError(found=f"Python of 32 bits, for which JAX has no package; {expected}, with Python of 64 bits")


def allow_files() -> None:
    """Raises the limit of open files to FILES if possible.

    Raises:
      UserError: the limit is lower than FILES and cannot be raised.
    """
    import resource  # absent on Windows, which `check_platform` refuses earlier

    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY or allowed >= FILES:
        return
    if most == resource.RLIM_INFINITY or most >= FILES:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, most))
            return
    raise UserError("ulimit -n", found=f"a limit of {allowed} open files", expected=f"at least {FILES}")


def check_memory() -> None:
    """Raises a UserError if the limit of address space is less than the process needs for libraries and threads."""
    import resource

    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY and allowed < MEMORY:
        raise UserError(
            "ulimit -v",
            found=f"{allowed >> 10} KiB of address space",
            expected=f"unlimited, or at least {MEMORY >> 10} and the memory of the model",
        )


def check_environment() -> None:
    """Checks the settings that `pin` could not reset; called before JAX computes anything."""
    for name, value in settings().items():
        if name in PINNED and value != PINNED[name]:
            raise UserError(
                name,
                found=f"{value!r}, from jax.config or from {name.upper()} before pipejax was imported",
                expected=f"{PINNED[name]!r}, because other values would change results",
            )
    check_flags()
    if "jax" in sys.modules:
        try:
            sys.modules["jax"].devices()
        except (RuntimeError, AssertionError) as error:  # JAX 0.10 raises an AssertionError for CUDA without its plugin
            wanted = os.environ.get("JAX_PLATFORMS", "")
            reason = str(error).partition("\n")[0] or "JAX has no plugin for it, or there is no such device"
            raise UserError(
                "JAX_PLATFORMS", found=f"{wanted!r} ({reason})", expected="a platform of this machine"
            ) from error


def settings() -> dict[str, bool | int | str | None]:
    """Returns JAX's values of the pinned settings and the matmul precision; empty if JAX is not imported."""
    if "jax" not in sys.modules:
        return {}
    values = sys.modules["jax"].config.values
    return {name: _plain(values[name]) for name in (*PINNED, "jax_default_matmul_precision") if name in values}


def _plain(value: object) -> bool | int | str | None:
    return value if value is None or isinstance(value, bool | int) else str(getattr(value, "value", value))


def check_flags() -> None:
    """Raises a UserError if XLA_FLAGS has a flag that this XLA does not know."""
    _try_flags(os.environ.get(_FLAGS, "").strip())


@functools.cache
def _try_flags(flags: str) -> None:
    """Starts a process with these flags, because XLA aborts the process for an unknown flag."""
    if not flags:
        return
    ended = subprocess.run([sys.executable, "-c", _PROBE], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    said = ended.stderr.decode(errors="replace").splitlines()
    reason = next((line.partition("] ")[2] for line in said if ".cc:" in line), "")
    if ended.returncode and reason:
        raise UserError(_FLAGS, found=f"{flags!r} ({reason})", expected="flags that this XLA knows")
