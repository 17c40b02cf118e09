"""Caches compiled programs on disk, so that only the first run of a command waits for the compiler."""

import functools
import logging
import math
import os
from pathlib import Path

import jax

from pipejax.system.files import absolute

logger = logging.getLogger(__name__)
_say_once = functools.cache(logger.warning)

VARIABLE = "PIPEJAX_CACHE"  # the variable with a directory, or "off"
SIZE = 4 * 2**30  # bytes; beyond them JAX removes the least recently used programs


def directory() -> Path | None:
    """Returns $PIPEJAX_CACHE, or pipejax/ in the user's cache directory; None if the variable is "off"."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen == "off":
        return None
    if chosen:
        return absolute(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return absolute(home) / "pipejax"


def safe_directory() -> Path | None:
    """Returns the cache's directory, created if missing; None if it is off, unusable or writable by other users.

    The files of the cache are executed, so only this user and root may be able to write to the directory: a new
    directory has mode 700. Root's directory is only read (`is_writable`): it may be part of an image that another user
    runs. If the directory cannot be used, a warning is logged and nothing is cached.
    """
    path = directory()
    if path is None:
        return None
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = _trouble(path)
    except OSError as error:
        why = f"{path}: {error.strerror}"
    if why:
        _say_once(f"compiled programs are not kept: {why}; {VARIABLE}=DIR names another directory")
    return None if why else path


def is_writable(path: Path) -> bool:
    """Returns whether new files may be written to the cache's directory; if not, a warning is logged once."""
    if os.access(path, os.W_OK):
        return True
    _say_once(
        f"{path}: its programs are used, but this user may not add others; {VARIABLE}=DIR names a directory that keeps "
        "them"
    )
    return False


def is_trusted(path: Path) -> bool:
    """Returns whether only this user and root may write to the path, so that its files may be executed.

    Raises:
      OSError: the path cannot be examined.
    """
    found = path.stat()
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & 0o022


def _trouble(path: Path) -> str:
    """Returns the reason why a directory cannot be the cache; "" if it can."""
    owner = path.stat().st_uid
    if owner not in (os.getuid(), 0):
        return f"{path} belongs to another user (number {owner})"
    if not is_trusted(path):
        return (
            f"{path} is open to others{' (chmod 700 closes it)' if owner == os.getuid() else ', and belongs to root'}"
        )
    if not os.access(path, os.R_OK | os.X_OK):
        return f"{path} is closed to this user (in an image, chmod -R a+rX lets every user read it)"
    return ""


def use_cache() -> Path | None:
    """Enables JAX's compilation cache in `safe_directory()`, unless the user configured a cache.

    Returns:
      The directory of the cache; None if programs are not cached.
    """
    if own := jax.config.values["jax_compilation_cache_dir"]:
        return Path(own)
    path = safe_directory()
    if path is None:
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    if is_writable(path):
        jax.config.update("jax_compilation_cache_max_size", SIZE)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    else:  # a size limit would require writing files that record each program's last use
        jax.config.update("jax_compilation_cache_max_size", -1)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    return path
