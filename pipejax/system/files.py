"""Files: what lies at a path, and writing whole or not at all, so that what is said to be written is on the disk.

A rename is atomic for whoever looks, but after a loss of power it may have survived while what was renamed has not. So
everything is synced before the rename, and the directory that holds the name after it. What a killed process leaves
has a name of ours, and whoever writes there next removes it.
"""

import contextlib
import errno
import fcntl
import glob
import itertools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pipejax.system.errors import UserError


def look(path: str | Path, where: str = "") -> Literal["", "file", "directory"]:
    """What lies at a path, through links: "" for nothing, "file" for all that is no directory, pipes and devices too.

    Path's own questions raise an OSError on one Python and say "nothing" on another if they are not answered.

    Raises:
      UserError: the path may not be looked at, is too long, or cannot be one; it begins with `where`.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return ""
        raise UserError(f"{where}{' ' if where else ''}{path}: cannot be looked at ({error.strerror})") from error
    except ValueError as error:  # a NUL, or characters that no file name has
        raise UserError(f"{where}{' ' if where else ''}{str(path)!r}: found no path ({error}); expected one") from error
    return "directory" if stat.S_ISDIR(mode) else "file"


_PARTIAL = "-partial"


def sync(path: Path) -> None:
    """Waits until a file's content, or a directory's names, are on the disk. Whatever cannot be synced is let be."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # one where names may be made but not listed
            return
        raise
    try:
        os.fsync(handle)
    except OSError as error:  # pipes, devices, and directories of some network file systems
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def sync_tree(directory: Path) -> None:
    """As `sync`, for all that is in a directory and for itself; what is inside of a directory comes before it."""
    for place, _, names in os.walk(directory, topdown=False, onerror=_raise):
        for name in names:
            sync(Path(place, name))
        sync(Path(place))


def sync_output(path: Path) -> None:
    """As `sync`, for a file that was just written and for its name; anything but a file is let be."""
    if path.is_file():
        sync(path)
        sync(Path(os.path.realpath(path)).parent)


def _sync_name(path: Path) -> None:
    """As `sync`, for the name that something whole has just taken: it is there, whatever becomes of this."""
    try:
        sync(path.parent)
    except OSError as error:
        raise UserError(f"{path}: is written, but a loss of power may undo that ({error.strerror})") from error


def write_text(path: Path, text: str) -> None:
    """Replaces a file whole, or leaves it as it was."""
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}-", delete=False, encoding="utf-8"
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    _sync_name(path)


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory to fill, which takes the place of `target` at the end of the block: whole and on disk, or not at all.

    `target` must be absent or empty. An exception leaves everything as it was, missing parents included.

    Raises:
      UserError: all is there, but its name may not be on the disk.
    """
    made = make_directories(target.parent)
    partial: Path | None = None
    try:
        sweep_partial(target)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}{_PARTIAL}-", dir=target.parent))
        with _held(partial):
            partial.chmod(0o755)
            yield partial
            sync_tree(partial)
            if target.is_dir():
                target.rmdir()
            partial.rename(target)
    except BaseException:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        remove_empty(made)
        raise
    _sync_name(target)


def make_directories(directory: Path) -> list[Path]:
    """Makes a directory and its parents; those that were missing, the innermost first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)
    return missing


def remove_empty(directories: list[Path]) -> None:
    """Removes each of these directories if nothing is in it, in their order."""
    for directory in directories:
        with contextlib.suppress(OSError):
            directory.rmdir()


def free_name(path: Path) -> Path:
    """The path, or where something is there already, it with -2, -3 and so on behind it."""
    names = (path.with_name(f"{path.name}-{count}") for count in itertools.count(2))
    return next(name for name in itertools.chain([path], names) if not os.path.lexists(name))


def sweep(directory: Path, *patterns: str) -> None:
    """Removes files and directories whose names match: what killed processes have left. What cannot go stays."""
    for pattern in patterns:
        with contextlib.suppress(OSError):
            for path in directory.glob(pattern):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        path.unlink()


def sweep_text(path: Path) -> None:
    """Removes what a `write_text` left that was killed. Nobody else may be writing the file."""
    sweep(path.parent, f".{glob.escape(path.name)}-{'[a-z0-9_]' * 8}")


def sweep_partial(target: Path) -> None:
    """Removes what a `new_directory` left that was killed, unless somebody is filling it."""
    for path in target.parent.glob(f".{glob.escape(target.name)}{_PARTIAL}*"):
        with contextlib.suppress(OSError), _held(path) as alone:
            if alone:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[bool]:
    """Holds a lock on a directory, which goes with the process, however that ends; whether it could be had."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        yield _locked(handle)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another, or a file system without locks
        return False
    return True


def _raise(error: OSError) -> None:
    raise error
