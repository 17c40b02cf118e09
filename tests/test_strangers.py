"""Directories and archives from unknown sources end in one line, within seconds, without filling the memory."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipejax.convert import description, from_hf, generation, peft_adapters
from pipejax.convert.huggingface import _copy_tokenizer, write_hf
from pipejax.convert.tensor_files import read_json
from pipejax.data.tokenizer import Tokenizer
from pipejax.system.errors import UserError
from pipejax.system.files import read_small, require_own
from support import oracle, tiny

pytestmark = pytest.mark.usefixtures("compiled_once")

PARAMS = oracle.random_params(tiny.MODEL, np.random.default_rng(5))
GIB = 2**30
INDEX = "model.safetensors.index.json"


def sparse(file: Path, head: bytes = b"", size: int = 17 * GIB) -> None:
    """A file of a few bytes and a hole."""
    file.unlink(missing_ok=True)
    file.write_bytes(head)
    os.truncate(file, size)


def only(directory: Path, name: str) -> Path:
    """The only weights file."""
    (directory / "model.safetensors").unlink()
    return directory / name


def link(directory: Path, name: str, target: object) -> Any:
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to(str(target))


def pipe(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)


def bomb(directory: Path, content: bytes = b"") -> None:
    """Weights of torch that unpack to far more bytes."""
    with zipfile.ZipFile(only(directory, "pytorch_model.bin"), "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("x/data.pkl", content or pickle.dumps({}))
        with out.open("x/data/0", "w", force_zip64=True) as member:
            for _ in range(64):
                member.write(bytes(2**20))


def header(directory: Path, size: int) -> None:
    """Weights with a long and well-formed header."""
    entry = '"%08d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    text = "{" + ",".join(entry % i for i in range(size // len(entry % 0))) + "}"
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())


def secret(directory: Path) -> Path:
    """A private file in the parent directory."""
    place = directory.with_name("id_rsa")
    place.write_text("secret")
    return place


DENSE = b'{"a":[' + b"[]," * (2**24 // 3)
KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a device for a config": (lambda d: link(d, "config.json", "/dev/zero"), "config.json: found a link to /dev/zero"),
    "a pipe for a config": (lambda d: pipe(d, "config.json"), "config.json: found a directory, a pipe or a device"),
    "a hole for a config": (lambda d: sparse(d / "config.json", b"{"), "config.json: found "),
    "a long config": (lambda d: (d / "config.json").write_bytes(DENSE + b"[]]}"), "found 16,777,2"),
    "deep JSON": (lambda d: (d / "config.json").write_bytes(b"[" * 10**6), "config.json: found no JSON"),
    "a pipe for settings": (lambda d: pipe(d, generation.FILE), "generation_config.json: found a directory, a pipe"),
    "a hole for settings": (lambda d: sparse(d / description.FILE), "pipejax.json: found "),
    "an index of 17 GB": (lambda d: sparse(only(d, INDEX), b'{"weight_map": {'), f"{INDEX}: found "),
    "a link for weights": (lambda d: link(d, "model.safetensors", secret(d)), "found a link to"),
    "a pipe for weights": (lambda d: pipe(d, "model.safetensors"), "model.safetensors: found a directory, a pipe or a"),
    "weights with a hole": (lambda d: sparse(d / "model.safetensors", b"\2" + bytes(7) + b"{}"), "and holes up to"),
    "flax weights with a hole": (lambda d: sparse(only(d, "flax_model.msgpack"), b"\x80"), "and holes up to 18,253"),
    "a long header": (lambda d: header(d, 40 * 2**20), "found a header of 42,"),
    "torch's weights packed": (bomb, "compressed; expected uncompressed members"),
    "deep flax weights": (lambda d: only(d, "flax_model.msgpack").write_bytes(b"\x81\xa1a" * 400 + b"\x90"), "flax"),
    "flax weights of a long list": (
        lambda d: only(d, "flax_model.msgpack").write_bytes(b"\xdd\xff\xff\xff\xff" * 500),
        "found a damaged file",
    ),
    "flax keys of lists": (lambda d: only(d, "flax_model.msgpack").write_bytes(b"\x81\x90\x90"), "found a damaged"),
    "a link for a tokenizer": (lambda d: link(d, "spiece.model", secret(d)), "spiece.model: found a link to"),
    "a link to links": (
        lambda d: (link(d, "a", secret(d)), link(d, "added_tokens.json", "a")),
        "added_tokens.json: found a link to",
    ),
    "a link back": (lambda d: link(d, "tokenizer_config.json", "../id_rsa") or secret(d), "found a link to"),
    "a hole for a tokenizer": (lambda d: sparse(d / "tokenizer.json"), "tokenizer.json: found "),
    "a pipe for a tokenizer": (lambda d: pipe(d, "tokenizer_config.json"), "tokenizer_config.json: found a directory,"),
    "a slow expression": (
        lambda d: (d / "adapter_config.json").write_text(
            json.dumps({"base_model_name_or_path": str(d), "target_modules": r"(\w+\.?)+!", "r": 1, "lora_alpha": 1})
        ),
        "another expression took more than",
    ),
    "a hole for an adapter": (lambda d: sparse(d / "adapter_config.json"), "adapter_config.json: found "),
}

PROGRAM = """
import re, sys, time
from pathlib import Path
from pipejax.convert import from_hf
from pipejax.system.errors import UserError
for place in sys.argv[1:]:
    begun = time.monotonic()
    try:
        from_hf(place, place + "-out")
        said = "converted"
    except UserError as error:
        said = str(error)
    # Not ru_maxrss, which begins with the size of the process that started this one.
    most = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
    print(Path(place).name, round(time.monotonic() - begun, 2), most, repr(said), sep="\\t", flush=True)
"""


def made(kind: str, directory: Path, tokenizer_files: Path) -> str:
    """A good directory that is spoiled, and the words of its refusal."""
    write_hf(tiny.MODEL, PARAMS, directory, tokenizer_files)
    spoil, words = KINDS[kind]
    spoil(directory)
    return words


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_ends_in_a_line_at_once(
    kind: str, tokenizer_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_adapters, "SECONDS", 0.5)
    words = made(kind, tmp_path / "t5", tokenizer_files)
    begun = time.monotonic()
    with pytest.raises(UserError) as told:
        from_hf(tmp_path / "t5", tmp_path / "out")
    assert words in str(told.value) and "\n" not in str(told.value) and len(str(told.value)) < 500
    assert time.monotonic() - begun < 5 and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_each_kind_ends_in_a_line_within_seconds_and_a_gigabyte(tokenizer_files: Path, tmp_path: Path) -> None:
    """One process tests all kinds, as its start is slow; the peak includes all earlier kinds."""
    places = {kind: tmp_path / str(number) / "t5" for number, kind in enumerate(KINDS)}
    for kind, place in places.items():
        made(kind, place, tokenizer_files)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, places.values())], capture_output=True, text=True, timeout=120
    )
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(lines) == len(KINDS), done.stderr[-2000:]
    for (kind, (_, words)), (_, seconds, megabytes, said) in zip(KINDS.items(), lines, strict=True):
        assert words in said and "\\n" not in said and len(said) < 500, (kind, said)
        assert float(seconds) < 5 and int(megabytes) < 1000, (kind, seconds, megabytes)


def test_only_links_in_the_hubs_cache_are_followed(tokenizer_files: Path, tmp_path: Path) -> None:
    """A snapshot links to ../../blobs, and these may link to files that several models share."""
    model = tmp_path / "hub/models--a--b"
    snapshot, blobs, shared = model / "snapshots/1", model / "blobs", tmp_path / "hub/blobs/ab"
    for place in (snapshot, blobs, shared):
        place.mkdir(parents=True)
    for number, file in enumerate(tokenizer_files.iterdir()):
        own = blobs / f"{number:040x}"
        real = shared / f"{number:064x}" if number == 0 else own
        real.write_bytes(file.read_bytes())
        if number == 0:
            own.symlink_to(real)
        (snapshot / file.name).symlink_to(f"../../blobs/{own.name}")
    local = tmp_path / "local"  # as downloads into a chosen folder used to link
    local.mkdir()
    for file in snapshot.iterdir():
        (local / file.name).symlink_to(file)
    for place in (snapshot, local, tokenizer_files):
        assert Tokenizer.load(place).encode("a") == Tokenizer.load(tokenizer_files).encode("a")
        assert _copy_tokenizer(place, tmp_path / f"copy-{place.name}")
    for name, target in {
        "blobs": secret(model / "x"),
        "models--a": tmp_path / "hub/models--a--b/refs",
        "deeper": tmp_path / "hub/models--a--b/blobs/deep/file",
        "other blobs": tmp_path / "docs/blobs/file",
        "up": tmp_path / "hub/blobs/ab/short",
        "a neighbour": tmp_path / "local-too/file",
    }.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("secret")
        link(local, name, target)
        with pytest.raises(UserError, match="found a link to"):
            require_own(local / name)
    (local / "inside").mkdir()
    (local / "inside/file").write_text("own")
    link(local, "own", "inside/file")
    require_own(local / "own")


def test_export_refuses_linked_tokenizer_files(tokenizer_files: Path, tmp_path: Path) -> None:
    """`push` uploads what `to-hf` copies from a run."""
    from pipejax import checkpoint
    from pipejax.convert import to_hf

    checkpoint.save_params(tmp_path / "run", tiny.RUN_ON_ONE, PARAMS, tokenizer_source=tokenizer_files)
    link(tmp_path / "run/tokenizer", "special_tokens_map.json", secret(tmp_path / "run"))
    with pytest.raises(UserError, match=r"special_tokens_map\.json: found "):
        to_hf(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_half_of_a_file_may_be_a_hole(tmp_path: Path) -> None:
    """Copies of zero tensors have holes; small files may be holes completely."""
    file = tmp_path / "file"
    for data, size, fits in ((20, 40, True), (16, 40, False), (0, 16, True), (0, 17, False)):
        sparse(file, b"\1" * data * 2**20, size * 2**20)
        if fits:
            require_own(file)
        else:
            with pytest.raises(
                UserError, match=rf"found {data * 2**20:,} bytes of data, and holes up to {size * 2**20:,}"
            ):
                require_own(file)


def test_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"{}" + b" " * (2**24 - 2))
    assert read_json(file) == {}
    file.write_bytes(b"{}" + b" " * (2**24 - 1))
    with pytest.raises(UserError, match="found 16,777,217 bytes; expected at most 16,777,216"):
        read_json(file)
    with pytest.raises(UserError, match=r"absent.json: cannot be read \(No such file"):
        read_json(tmp_path / "absent.json")
    begun = time.monotonic()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="a pipe or a device"):
        read_json(tmp_path / "pipe")
    late = threading.Timer(3, os.open, (tmp_path / "pipe", os.O_RDWR))  # releases readers that wait for a writer
    late.start()
    with pytest.raises(UserError, match="pipe: found a pipe or a device; expected a file"):
        read_small(tmp_path / "pipe")
    late.cancel()
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("kind", ["a link", "a pipe", "too much"])
def test_separate_tokenizer_is_checked_as_well(kind: str, tokenizer_files: Path, tmp_path: Path) -> None:
    """A training copies it into its run."""
    shutil.copytree(tokenizer_files, tmp_path / "t5")
    if kind == "a link":
        link(tmp_path / "t5", "spiece.model", secret(tmp_path / "t5"))
    elif kind == "a pipe":
        pipe(tmp_path / "t5", "added_tokens.json")
    else:
        (tmp_path / "t5/vocab.txt").write_bytes(b" " * (2**25 + 1))
    words = {"a link": "found a link", "a pipe": "found a directory, a pipe", "too much": "found 33,554,433 bytes"}
    with pytest.raises(UserError, match=words[kind]):
        Tokenizer.load(tmp_path / "t5")
