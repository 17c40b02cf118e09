"""Zips that are damaged, encrypted, packed by unknown methods, or far larger when they are unpacked."""

import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.faults import refusals
from lab.faults.disks import snapshot
from lab.faults.refusals import Kind
from lab.faults.runs import Commands
from pipejax.apps.papers.data_sets import PUBLISHED
from pipejax.apps.papers.manual import Manual
from pipejax.system.errors import UserError

LINE = '{"id": "%d", "title": "honey", "abstract": "maps", "keyword": "honey"}\n'
LINES = "".join(LINE % number for number in range(50)).encode()
MEMBERS = ("train.jsonl", "valid.jsonl", "test.jsonl")
PREPARE = ("prepare", "kptimes", "--manual-dir={here}/manual", "--data-dir={here}/data")
# Offsets of fields: in a member's local header, and in its entry in the directory at the end.
LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"


def _zip(here: Path, content: bytes = LINES, names: tuple[str, ...] = MEMBERS) -> Path:
    path = here / "manual/files.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in names:
            file.writestr(name, content)
    return path


def _field(
    here: Path, local: int, central: int, value: int, form: str = "<H", names: tuple[str, ...] = MEMBERS
) -> None:
    """Sets a field of every member, in its header and in its entry."""
    path = _zip(here, names=names)
    data = bytearray(path.read_bytes())
    for mark, offset in ((LOCAL, local), (CENTRAL, central)):
        at = data.find(mark)
        while at >= 0:
            struct.pack_into(form, data, at + offset, value)
            at = data.find(mark, at + 1)
    path.write_bytes(data)


def _bytes(here: Path, change: Callable[[bytearray], Any]) -> None:
    path = _zip(here)
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def _damage(data: bytearray) -> None:
    start = data.find(b"train.jsonl") + len(b"train.jsonl") + 4
    data[start : start + 8] = bytes(8)


def _bomb(here: Path, name: str) -> None:
    """Writes a zip of 26 MB with a member of 6 GiB, which is a single line."""
    path = here / "manual/files.zip"
    path.parent.mkdir()
    deflated = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with deflated as file, file.open(name, "w", force_zip64=True) as member:
        for _ in range(6 * 2**8):
            member.write(b"x" * 2**22)


def _kind(name: str, spoil: Callable[[Path], Any], *words: str) -> Kind:
    return Kind(f"archive: {name}", words, "pipejax.apps.statistics.data_command", PREPARE, spoil)


ENCRYPTED = _kind("encrypted", lambda here: _field(here, 6, 8, 1), "files.zip:train.jsonl: cannot be read", "password")
KINDS = (
    _kind("no zip", lambda here: _bytes(here, bytearray.clear), "files.zip: cannot be read"),
    _kind("cut off", lambda here: _bytes(here, lambda d: d.__delitem__(slice(len(d) // 2, None))), "files.zip"),
    _kind("damaged content", lambda here: _bytes(here, _damage), "files.zip:train.jsonl: cannot be read"),
    _kind("a wrong checksum", lambda here: _field(here, 14, 16, 0x1234, "<I"), "cannot be read", "CRC"),
    ENCRYPTED,
    _kind("strongly encrypted", lambda here: _field(here, 6, 8, 0x41), "cannot be read"),
    _kind("an unknown method", lambda here: _field(here, 8, 10, 77), "cannot be read", "compression"),
    _kind("an obsolete method", lambda here: _field(here, 8, 10, 6), "cannot be read", "compression"),
    _kind("another method than in the header", lambda here: _field(here, 8, 10, 14), "cannot be read"),
    _kind("a newer version", lambda here: _field(here, 4, 6, 99), "cannot be read"),
    _kind("patched data", lambda here: _field(here, 6, 8, 0x20), "cannot be read"),
    _kind("another size than in the header", lambda here: _field(here, 22, 24, 10, "<I"), "cannot be read"),
    _kind("an empty zip", lambda here: _zip(here, names=()), "found no train.jsonl"),
    _kind("other files", lambda here: _zip(here, names=("thesis.tex",)), "found no train.jsonl"),
    _kind("a member of zeros", lambda here: _zip(here, bytes(1000)), "train.jsonl:1: not JSON"),
    _kind("a line of 6 GiB", lambda here: _bomb(here, "train.jsonl"), "train.jsonl:1: found a line of more"),
    _kind(
        "an array with a declared size of 3 GiB",
        lambda here: _field(here, 22, 24, 3 * 2**30, "<I", ("train.json",)),
        "at most",
    ),
)


def many(commands: Commands, scratch: Path) -> dict[str, Any]:
    """Reads all archives in this process, and one by the command, whose imports take seconds."""
    results = [attempt(kind, scratch / str(number)) for number, kind in enumerate(KINDS)]
    return refusals.summary([*results, *refusals.many(commands, scratch / "command", [ENCRYPTED])])


def attempt(kind: Kind, here: Path) -> dict[str, Any]:
    """Reads all records of a spoiled archive; returns the result."""
    here.mkdir(parents=True)
    kind.spoil(here)
    before, line = snapshot(here), ""
    published = PUBLISHED["kptimes"]
    try:
        for records in published.read(Manual(here / "manual", expected=published.files)).values():
            for _ in records:
                pass
    except UserError as error:
        line = str(error)
    ok = "\n" not in line and line != "" and all(word in line for word in kind.words)
    kept = snapshot(here) == before
    shutil.rmtree(here)
    return {"kind": kind.name, "line": line.replace(str(here), "HERE"), "ok": ok, "kept": kept}
