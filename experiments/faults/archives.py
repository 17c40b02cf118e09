"""Zips that are damaged, encrypted, packed in unknown ways, or that hold far more than they are large."""

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.faults import refusals
from experiments.faults.refusals import Kind
from experiments.faults.runs import Commands

LINE = (json.dumps({"id": "1", "title": "honey", "abstract": "maps", "keyword": "honey"}) + "\n").encode()
MEMBERS = ("train.jsonl", "valid.jsonl", "test.jsonl")
PREPARE = ("prepare", "kptimes", "--manual-dir={here}/manual", "--data-dir={here}/data")
# Offsets of fields: behind a member's local header, and behind its entry in the directory at the end.
LOCAL, CENTRAL = b"PK\x03\x04", b"PK\x01\x02"


def _zip(here: Path, content: bytes = LINE * 50, names: tuple[str, ...] = MEMBERS) -> Path:
    path = here / "manual/files.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in names:
            file.writestr(name, content)
    return path


def _field(here: Path, local: int, central: int, value: int, form: str = "<H") -> None:
    """Sets a field of every member, in both of its places."""
    path = _zip(here)
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


def _bomb(here: Path, name: str, *, letter: bytes, lead: bytes = b"") -> None:
    """A member of 6 GiB in six megabytes."""
    path = here / "manual/files.zip"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        with file.open(name, "w", force_zip64=True) as member:
            member.write(lead)
            for _ in range(6 * 2**10):
                member.write(letter * 2**20)


def _kind(name: str, spoil: Callable[[Path], Any], *words: str) -> Kind:
    return Kind(f"archive: {name}", words, "pipejax.data.__main__", PREPARE, spoil)


KINDS = (
    _kind("no zip", lambda here: _bytes(here, bytearray.clear), "files.zip: cannot be read"),
    _kind("cut off", lambda here: _bytes(here, lambda d: d.__delitem__(slice(len(d) // 2, None))), "files.zip"),
    _kind("damaged content", lambda here: _bytes(here, _damage), "files.zip:train.jsonl: cannot be read"),
    _kind("a wrong checksum", lambda here: _field(here, 14, 16, 0x1234, "<I"), "cannot be read", "CRC"),
    _kind("encrypted", lambda here: _field(here, 6, 8, 1), "cannot be read", "password"),
    _kind("strongly encrypted", lambda here: _field(here, 6, 8, 0x41), "cannot be read"),
    _kind("an unknown method", lambda here: _field(here, 8, 10, 77), "cannot be read", "compression"),
    _kind("a method of long ago", lambda here: _field(here, 8, 10, 6), "cannot be read", "compression"),
    _kind("another method than it says", lambda here: _field(here, 8, 10, 14), "cannot be read"),
    _kind("a newer version", lambda here: _field(here, 4, 6, 99), "cannot be read"),
    _kind("patched data", lambda here: _field(here, 6, 8, 0x20), "cannot be read"),
    _kind("another size than it says", lambda here: _field(here, 22, 24, 2**31, "<I"), "cannot be read"),
    _kind("an empty zip", lambda here: _zip(here, names=()), "found no train.jsonl"),
    _kind("other files", lambda here: _zip(here, names=("thesis.tex",)), "found no train.jsonl"),
    _kind("nothing but zeros in a member", lambda here: _zip(here, bytes(1000)), "train.jsonl:1: not JSON"),
    _kind(
        "a line of 6 GiB", lambda here: _bomb(here, "train.jsonl", letter=b"x"), "train.jsonl:1: found a line of more"
    ),
    _kind("an array of 6 GiB", lambda here: _bomb(here, "train.json", letter=b"1", lead=b"["), "at most 2"),
)


def many(commands: Commands, scratch: Path) -> dict[str, Any]:
    """All of them, one after another: two bombs at once would need twice the memory."""
    return refusals.summary(refusals.many(commands, scratch, KINDS, workers=1))
