"""Examines paths, and writes files and directories completely or not at all, synced to the disk.

A rename is atomic for other processes, but after a loss of power the new name may exist without its content. So the
content is synced before the rename, and the containing directory after it. Temporary files have recognisable names; the
next writer removes the temporary files of killed processes.
"""

import contextlib
import errno
import glob
import itertools
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pipejax.system.errors import UserError


def look(path: str | Path, where: str = "") -> Literal["", "file", "directory"]:
    """Returns the kind of thing at a path, following links: "file" (also for pipes), "directory", or "" for nothing.

    `Path.exists` is not used, because it differs between Python versions.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return ""
        raise UserError(f"{where}{' ' if where else ''}{path}", f"cannot be inspected ({error.strerror})") from error
    except ValueError as error:  # a NUL, or characters that a file name cannot contain
        raise UserError(
            f"{where}{' ' if where else ''}{str(path)!r}", found=f"an invalid path ({error})", expected="one"
        ) from error
    return "directory" if stat.S_ISDIR(mode) else "file"


def absolute(path: str | Path) -> Path:
    """Returns the absolute path without "..", which Orbax refuses; `link/..` is the parent of the link's target."""
    path = Path(path).absolute()
    return Path(os.path.realpath(path)) if ".." in path.parts else path


@contextlib.contextmanager
def writing(place: str | Path) -> Iterator[None]:
    """Returns a context manager that turns an OSError of writing into a UserError that names the place."""
    try:
        yield
    except OSError as error:
        raise UserError(place, f"cannot be written ({error.strerror or error})") from error


def is_misread(text: str) -> bool:
    """Returns whether a command-line text is UTF-8 that Python decoded otherwise.

    The reason is PYTHONUTF8=0 or the locale.
    """
    try:
        os.fsencode(text).decode()
    except UnicodeError:
        return False
    return any("\udc80" <= character <= "\udcff" for character in text)


SMALL = 2**24  # the most bytes of a file read at once: settings, an index, names
VOCABULARY = 2**25  # the most bytes of a tokenizer's file


def read_small(path: str | Path, most: int = SMALL) -> bytes:
    """Returns the content of a file.

    Raises:
      UserError: the file is larger than `most` bytes, or not a regular file.
      OSError: the file cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without O_NONBLOCK, opening a pipe would wait for a writer
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise UserError(path, found="a pipe or a device", expected="a file")
        if found.st_size > most:
            raise UserError(path, found=f"{found.st_size:,} bytes", expected=f"at most {most:,}")
        return file.read(most)


# Files in the hub's cache, to which the directories of models link; several models may share the second kind.
_HUB_BLOB = re.compile(r".*/(models--[^/]+/blobs/[^/]+|blobs/[0-9a-f]{2}/[0-9a-f]{64})")


def require_own(file: Path) -> None:
    """Raises a UserError unless a file of a downloaded directory is regular, complete, and in it or the hub's cache.

    A link to another place would copy a private file into the converted checkpoint, which may be published.
    """
    real, home = os.path.realpath(file), os.path.realpath(file.parent)
    if not real.startswith(os.path.join(home, "")) and not _HUB_BLOB.fullmatch(real):
        raise UserError(file, found=f"a link to {real}", expected=f"a file in {file.parent}, or in the hub's cache")
    if not os.path.isfile(file):
        raise UserError(file, found="a directory, a pipe or a device", expected="a file")
    try:
        written, size = _written(file), os.path.getsize(file)
    except OSError as error:
        raise UserError(file, f"cannot be read ({error.strerror})", expected="a file") from error
    if written < size // 2 and size > SMALL:
        raise UserError(file, found=f"{written:,} bytes of data, and holes up to {size:,}", expected="a complete file")


def _written(file: Path) -> int:
    """Returns the bytes of a file without its holes; an unfinished download has holes."""
    end = written = 0
    with file.open("rb") as content:
        try:
            while True:
                begin = os.lseek(content.fileno(), end, os.SEEK_DATA)
                end = os.lseek(content.fileno(), begin, os.SEEK_HOLE)
                written += end - begin
        except OSError as error:  # the end of the file, or a file system without holes
            return written if error.errno == errno.ENXIO else os.path.getsize(file)


UTF_8 = "PYTHONUTF8=1 in the environment, or a locale of UTF-8"  # with either, Python decodes these texts correctly


def stand_in(path: Path) -> str:
    """Names the placeholder that a clone or a download left in a file's place; "" for any other file.

    Placeholders are git-LFS pointers and web pages.
    """
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError:
        return ""
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return "a git-LFS pointer (git lfs pull fetches the file itself)"
    page = head.lstrip().lower().startswith((b"<!doctype html", b"<html"))
    return "a web page (download the file itself)" if page else ""


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    import hashlib  # imported here, so that commands start faster

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_PARTIAL = "-partial"  # a part of the name of a directory that is not complete yet


def sync(path: Path) -> None:
    """Waits until a file's content or a directory's entries are on the disk; ignores paths that cannot be synced."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # a directory with write but without read permission
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
    """Syncs all files and directories below a directory, and the directory."""
    for place, _, names in os.walk(directory, topdown=False, onerror=_raise):
        for name in names:
            sync(Path(place, name))
        sync(Path(place))


def sync_output(path: Path) -> None:
    """Syncs a regular file and the directory that contains it; does nothing for pipes and devices."""
    if path.is_file():
        sync(path)
        sync(Path(os.path.realpath(path)).parent)


def _sync_name(path: Path) -> None:
    try:
        sync(path.parent)
    except OSError as error:
        raise UserError(path, f"written, but possibly lost if the power fails ({error.strerror})") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file completely or not at all."""
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields an empty file to write. At the end the file is synced and renamed to `path`.

    A file that exists at `path` is replaced. If the block raises an exception, `path` does not change.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        yield Path(name)
        sync(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)  # an interrupt may arrive after the file is renamed
        raise
    _sync_name(path)


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yields a directory to fill. At the end the directory is synced and renamed to `target`, which is absent or empty.

    If the block raises an exception, the directory is removed.
    """
    made = make_directories(target.parent)
    partial: Path | None = None
    try:
        sweep_partial(target)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}{_PARTIAL}-", dir=target.parent))
        with _locked(partial):
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
    """Creates a directory with its parents, durably; returns the created ones, innermost first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)
    return missing


def remove_empty(directories: list[Path]) -> None:
    """Removes the directories that are empty."""
    for directory in directories:
        with contextlib.suppress(OSError):
            directory.rmdir()


def free_name(path: Path) -> Path:
    """Returns the path or, if it exists, the first free path with -2, -3 and so on appended."""
    names = (path.with_name(f"{path.name}-{count}") for count in itertools.count(2))
    return next(name for name in itertools.chain([path], names) if not os.path.lexists(name))


def sweep(directory: Path, *patterns: str) -> None:
    """Removes the files and directories that match the patterns; errors are ignored."""
    for pattern in patterns:
        with contextlib.suppress(OSError):
            for path in directory.glob(pattern):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with contextlib.suppress(OSError):
                        path.unlink()


def sweep_text(path: Path) -> None:
    """Removes the temporary files of killed calls of `write_text`. No other process may be writing the file."""
    sweep(path.parent, f".{glob.escape(path.name)}-{'[a-z0-9_]' * 8}")


def sweep_partial(target: Path) -> None:
    """Removes the directories of killed calls of `new_directory`. Directories in use are locked and are kept."""
    for path in target.parent.glob(f".{glob.escape(target.name)}{_PARTIAL}*"):
        with contextlib.suppress(OSError), _locked(path) as alone:
            if alone:
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Locks a directory during the block; yields whether that worked.

    The lock ends with the process, even if killed.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        yield lock(handle)
    finally:
        os.close(handle)


def lock(handle: int) -> bool:
    """Locks an open file or directory; returns whether that worked. The lock ends with the handle or the process."""
    import fcntl  # absent on Windows, which `environment.check_platform` refuses

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process holds the lock, or the file system has none
        return False
    return True


def _raise(error: OSError) -> None:
    raise error
