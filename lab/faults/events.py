"""Records the file events of a process, or kills the process at one of them. Works on Linux with glibc only."""

import ctypes
import dataclasses
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_suffix(".c")


class CannotWatch(Exception):
    """Raised if the file events of a process cannot be recorded here, with the reason."""


@dataclasses.dataclass(frozen=True)
class Trap:
    """Settings to record all events below a directory, or to kill the process at one event.

    The process dies at the event `number`, or at the first event whose path contains `part`.
    """

    directory: Path
    log: Path
    event: int = 0
    part: str = ""


class Event(NamedTuple):
    """An opening for writing, write, truncate, rename, link, unlink, mkdir, rmdir or fsync."""

    number: int
    kind: str
    path: Path
    to: Path | None  # new path of a rename


def build(directory: Path) -> Path:
    """Compiles the library with which a process must be started (LD_PRELOAD); returns its path.

    Raises:
      CannotWatch: the system is not Linux with glibc, or there is no compiler.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        raise CannotWatch("file events can be recorded on Linux with glibc only")
    compiler = shutil.which("cc")
    if compiler is None:
        raise CannotWatch("found no C compiler (cc) to compile the library that records file events")
    target = directory / "events.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-ldl"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CannotWatch(f"cc cannot compile {SOURCE.name}: {done.stderr.strip()[:200]}")
    return target


def arm(trap: Trap, library: Path) -> None:
    """Sets the trap in this process, which was started with the library."""
    if str(library) not in os.environ.get("LD_PRELOAD", "").split(":"):
        raise CannotWatch("the process from which commands are forked was started without the library")
    shim = ctypes.CDLL(str(library))
    number, part = ctypes.c_long(trap.event), os.fsencode(trap.part)
    shim.faults_arm(os.fsencode(trap.directory), number, part, os.fsencode(trap.log))


def read(log: Path) -> list[Event]:
    """Reads the events in a log: all events, or the event at which the process died."""
    events = []
    for line in log.read_text(errors="replace").splitlines() if log.is_file() else ():
        number, kind, path, to = line.split("\t")
        events.append(Event(int(number), kind, Path(path), Path(to) if to else None))
    return sorted(events, key=lambda event: event.number)
