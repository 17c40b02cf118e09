"""What a process does to files, event by event: kills at one of them, and the whole list. Linux and glibc only."""

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
    """Says why there is no seeing the file events of a process here."""


@dataclasses.dataclass(frozen=True)
class Trap:
    """Watches what happens below a directory: all events are written down, or the process dies at one.

    That is the event of this number, or the first one whose path has `part` in it.
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
    to: Path | None  # of a rename


def build(directory: Path) -> Path:
    """Compiles the library that a process must be started with (LD_PRELOAD).

    Raises:
      CannotWatch: another system, or no compiler.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        raise CannotWatch("file events can be seen on Linux with glibc only")
    compiler = shutil.which("cc")
    if compiler is None:
        raise CannotWatch("found no C compiler (cc), which sees to it that file events are seen")
    target = directory / "events.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(target), str(SOURCE), "-ldl"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CannotWatch(f"cc cannot compile {SOURCE.name}: {done.stderr.strip()[:200]}")
    return target


def arm(trap: Trap, library: Path) -> None:
    """Sets the trap in this process, which was started with the library."""
    if str(library) not in os.environ.get("LD_PRELOAD", "").split(":"):
        raise CannotWatch("the processes that commands are forked from were started without the library")
    shim = ctypes.CDLL(str(library))
    number, part = ctypes.c_long(trap.event), os.fsencode(trap.part)
    shim.faults_arm(os.fsencode(trap.directory), number, part, os.fsencode(trap.log))


def read(log: Path) -> list[Event]:
    """The events that a process has left: all, or the one that it died at."""
    events = []
    for line in log.read_text(errors="replace").splitlines() if log.is_file() else ():
        number, kind, path, to = line.split("\t")
        events.append(Event(int(number), kind, Path(path), Path(to) if to else None))
    return sorted(events, key=lambda event: event.number)
