"""Finds files that a power cut could lose, from the order of writes, fsyncs and renames of a command."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lab.faults import events, runs
from lab.faults.events import Event, Trap
from lab.faults.runs import Commands

STEP = re.compile(r"[0-9]+")
SPARED = (".lock",)  # files whose loss does not matter
SETTINGS = ("train.steps=6", "train.checkpoint_every=2", "train.evaluate_every=2", "train.keep_checkpoints=1")


class Disk:
    """The state of a directory on a disk if the power failed now: files, names, and losses. It is empty at first."""

    def __init__(self, root: Path) -> None:
        """Starts with an empty directory."""
        self.root = root
        self.present: set[Path] = set()
        self.made_as: dict[Path, Path] = {}  # the first name of each file
        self.unwritten: set[Path] = set()  # files whose content may not be on disk
        self.unnamed: set[Path] = set()  # entries that their directory may not have on disk
        self.losses: list[str] = []

    def see(self, event: Event, later: Iterable[Path] = ()) -> None:
        """Applies an event; `later`: the paths that are renamed after it."""
        path, to = event.path, event.to
        if event.kind == "fsync":
            self._enter(path)
            self.unwritten.discard(path)
            self.unnamed = {name for name in self.unnamed if name.parent != path}
        elif event.kind in ("open", "write", "truncate", "link"):
            self._enter(path)
            self.unwritten.add(path)
        elif event.kind == "mkdir":
            self._enter(path)
        elif event.kind == "rename" and to is not None:
            if not set(later) & set(to.parents):  # otherwise the folder that contains it gets its final name later
                self._check_whole(path, to)
            if _committed(path):
                self._check_replaced(path)
            self._leave(to)
            for of in (self.present, self.unwritten, self.unnamed):
                moved = {name for name in of if name == path or path in name.parents}
                of -= moved
                of |= {to / name.relative_to(path) for name in moved}
            for name in [name for name in self.made_as if name == path or path in name.parents]:
                self.made_as[to / name.relative_to(path)] = self.made_as.pop(name)
            self._enter(to)
            self.unnamed.add(to)
        elif event.kind in ("unlink", "rmdir"):
            for step in (path, *path.parents):
                if _committed(step):
                    self._check_replaced(step)
            self._leave(path)

    def end(self) -> list[str]:
        """All losses that were possible during or after the command; empty if everything is on disk."""
        for what, paths in (("its content", self.unwritten), ("its name", self.unnamed)):
            at_risk = sorted(path for path in paths if path.name not in SPARED)
            self.losses += [f"{self._short(path)}: {what} may not be on disk at the end" for path in at_risk]
        return list(dict.fromkeys(self.losses))

    def _enter(self, path: Path) -> None:
        if path not in self.present and path != self.root:
            self.present.add(path)
            self.made_as.setdefault(path, path)
            self.unnamed.add(path)

    def _leave(self, path: Path) -> None:
        for of in (self.present, self.unwritten, self.unnamed):
            of -= {name for name in of if name == path or path in name.parents}

    def _check_whole(self, path: Path, to: Path) -> None:
        """Records a loss if a path is renamed to its final name before its content is on disk."""
        within = sorted(p for p in self.unwritten | self.unnamed if path in p.parents or p == path in self.unwritten)
        if within:
            few = ", ".join(str(p.relative_to(path)) for p in within[:3])
            self.losses.append(f"{self._short(to)}: renamed with {len(within)} not on disk ({few}, ...)")

    def _check_replaced(self, old: Path) -> None:
        """Records a loss if a step is removed before a newer step is on disk, with all names in its path."""
        newer = [p for p in self.present if p.parent == old.parent and _committed(p) and int(p.name) > int(old.name)]
        safe = [p for p in newer if not self.unnamed & {p, *p.parents}]
        if not safe and old in self.present:
            self.losses.append(f"{self._short(old)}: removed before a newer step is on disk")

    def _short(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


def _committed(path: Path) -> bool:
    return bool(STEP.fullmatch(path.name)) and path.parent.name in ("checkpoints", "best")


def losses(root: Path, happened: Sequence[Event], left: Iterable[Path] | None = None) -> list[str]:
    """The files that a power cut could have lost at some time, each once.

    Args:
      root: the directory, empty at first.
      happened: all events below it.
      left: the paths that exist after the events. Renames by a library in Rust cause no events: a file whose name
        differs from its first name counts as lost if it was not synced, and the first name is forgotten.
    """
    if left is None:
        return _replay(root, happened).end()
    there, disk = set(left), _replay(root, happened)
    passing = {disk.made_as[path] for path in disk.present - there}
    disk = _replay(root, [event for event in happened if event.path not in passing])
    unseen = sorted(str(path.relative_to(root)) for path in there - disk.present)
    return [*disk.end(), *(f"{name}: its content may not be on disk at the end" for name in unseen)]


def _replay(root: Path, happened: Sequence[Event]) -> Disk:
    disk = Disk(root)
    for number, event in enumerate(happened):
        disk.see(event, [e.path for e in happened[number + 1 :] if e.to] if event.to else ())
    return disk


def order(commands: Commands, scratch: Path) -> dict[str, Any]:
    """Traces a training, a conversion in each direction and a decode."""
    if commands.library is None:
        return {"skipped": commands.blind, "ok": None}
    config = runs.prepare(scratch / "tiny")
    (scratch / "in.jsonl").write_text('{"id": 1, "source": "honey maps"}\n' * 4)
    run = scratch / "training/run"
    traced = {
        "training": ("train", f"--config={config}", f"--workdir={run}", *(f"--set={s}" for s in SETTINGS)),
        "to_hf": ("pipejax.convert.__main__", "to-hf", str(run), "{here}/hf"),
        "from_hf": ("pipejax.convert.__main__", "from-hf", str(scratch / "to_hf/hf"), "{here}/converted"),
        "decode": ("decode", f"--checkpoint={run}", f"--input={scratch}/in.jsonl", "--output={here}/out.jsonl"),
    }
    counts, failures = {}, []
    for name, (command, *arguments) in traced.items():
        here, log = scratch / name, scratch / f"{name}.log"
        here.mkdir()
        filled = [argument.replace("{here}", str(here)) for argument in arguments]
        started = commands.start(command, *filled, trap=Trap(here, log))
        code, happened = started.end(), events.read(log)
        found = losses(here, happened, here.rglob("*"))
        if code or not any(event.kind == "fsync" for event in happened):
            found.append(f"exit code {code}, {len(happened)} events: {started.said()[-1:]}")
        counts[name] = {"events": len(happened), "at_risk": len(found)}
        failures += [f"{name}: {loss}" for loss in found]
    return {"trials": len(traced), **counts, "ok": not failures, "failures": failures[:20]}
