"""Compiled programs on disk, so that only the first run of a command waits for the compiler."""

import logging
import os
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

VARIABLE = "PIPEJAX_CACHE"  # a directory, or "off"
SIZE = 4 * 2**30  # bytes; beyond it JAX drops what was used longest ago


def directory() -> Path | None:
    """Where programs are kept: $PIPEJAX_CACHE, else pipejax/ in the user's cache directory; None: nowhere."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "pipejax"


def safe_directory() -> Path | None:
    """That directory, made if need be; None if it is off, cannot be had, or is open to others.

    What lies in there is executed, so nobody else may write to it: a new one has mode 700. A cache that cannot be had
    is worth a line, no more.
    """
    path = directory()
    if path is None:
        return None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        safe = ours_alone(path)
    except OSError as error:
        logger.warning(f"compiled programs are not kept: {path}: {error.strerror}")
        return None
    if not safe:
        logger.warning(
            f"compiled programs are not kept: {path} is open to others; chmod 700 it, or name another in {VARIABLE}"
        )
        return None
    return path


def ours_alone(path: Path) -> bool:
    """Whether nobody else may write there: only then is what it holds executed. Raises OSError if it cannot be told."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def use() -> Path | None:
    """Lets JAX keep its programs there, unless the user configured a cache of JAX's own; returns its directory."""
    if own := jax.config.values["jax_compilation_cache_dir"]:
        return Path(own)
    path = safe_directory()
    if path is not None:
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_compilation_cache_max_size", SIZE)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    return path
