"""Zips of publishers that are damaged, encrypted or too large are refused in one line with their name and member."""

import zipfile

import pytest

from lab.faults import archives
from pipejax.apps.papers import manual
from pipejax.apps.papers.data_sets import PUBLISHED
from pipejax.data import lines, tables
from pipejax.system.errors import UserError

SMALL = [kind for kind in archives.KINDS if "6 GiB" not in kind.name]


@pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.name)
def test_unreadable_archive_is_refused(kind, tmp_path):
    result = archives.attempt(kind, tmp_path / "here")
    assert result["ok"] and result["kept"], result


def test_complete_archive_is_read(tmp_path):
    archives._zip(tmp_path)
    published = PUBLISHED["kptimes"]
    splits = published.read(manual.Manual(tmp_path / "manual", expected=published.files))
    assert {name: len(list(records)) for name, records in splits.items()} == {"train": 50, "dev": 50, "test": 50}


@pytest.mark.parametrize("name, lead", [("train.jsonl", b""), ("train.json", b"["), ("train.csv", b"")])
def test_archive_that_expands_too_much_is_refused(name, lead, tmp_path, monkeypatch):
    """Reading stops at the limit of a record: the rest of the member is damaged, and causes no other error."""
    monkeypatch.setattr(lines, "LONGEST", 1000)
    monkeypatch.setattr(manual, "WHOLE", 2**20)
    path = tmp_path / "files.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, lead + b"1" * 2**24)
    data = bytearray(path.read_bytes())
    data[2**23] ^= 1
    path.write_bytes(data)
    file = manual.Manual(tmp_path, expected="").need(name)
    with pytest.raises(UserError) as caught:
        if name == "train.json":
            file.read()
        elif name == "train.csv":
            tables.TextTable(tables.lines_of(file.open(), str(file)), str(file))
        else:
            list(lines.read_objects(file.open(), str(file)))
    expected = "found 0 GiB" if name == "train.json" else "1: found a line of more than"
    assert str(caught.value).startswith(f"{path}:{name}") and expected in str(caught.value)
