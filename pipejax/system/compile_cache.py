"""Keeps compiled programs on disk, so that only the first run of a command waits for the compiler."""

import logging
import os
from pathlib import Path

import jax

from pipejax.system.files import absolute

logger = logging.getLogger(__name__)

VARIABLE = "PIPEJAX_CACHE"  # a directory, or "off"
SIZE = 4 * 2**30  # bytes; JAX then removes the least recently used programs

_said: set[str] = set()  # why there is no cache


def directory() -> Path | None:
    """The cache's directory: $PIPEJAX_CACHE, or pipejax/ in the user's cache directory; None if it is "off"."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen == "off":
        return None
    if chosen:
        return absolute(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return absolute(home) / "pipejax"


def safe_directory() -> Path | None:
    """The cache's directory, made if it is missing; None if it is off, unusable or writable by other users.

    The files in it are executed, so no other user may write to it: a new directory has mode 700. If it cannot be used,
    the log says so and work goes on without a cache.
    """
    path = directory()
    if path is None:
        return None
    why = f"{path} is open to others; chmod 700 it, or name another in {VARIABLE}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ours_alone(path):
            return path
    except OSError as error:
        why = f"{path}: {error.strerror}"
    if why not in _said:  # once a process
        _said.add(why)
        logger.warning(f"compiled programs are not kept: {why}")
    return None


def ours_alone(path: Path) -> bool:
    """Whether only this user may write to the path, so that its files may be executed. Raises OSError if unknown."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def use_cache() -> Path | None:
    """Turns on JAX's compilation cache in this directory, unless the user configured one; returns its directory."""
    if own := jax.config.values["jax_compilation_cache_dir"]:
        return Path(own)
    path = safe_directory()
    if path is not None:
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_compilation_cache_max_size", SIZE)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    return path
