"""The formats of files of tensors that are opened, and one line for each kind of damage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from safetensors.numpy import save_file

from pipejax.convert.tensor_files import open_tensors, read_json
from pipejax.system.errors import UserError

INDEX = "model.safetensors.index.json"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 891646390\n"
TENSORS: dict[str, Any] = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.ones(4, np.float16)}
PLACES = {"a.weight": "1.safetensors", "b.weight": "2.safetensors"}


def write_whole(directory: Path, tensors: dict[str, Any]) -> None:
    save_file(tensors, directory / "model.safetensors")


def write_shards(directory: Path, places: object) -> None:
    """Writes each of TENSORS to a shard, and an index with `places`."""
    for name, shard in PLACES.items():
        save_file({name: TENSORS[name]}, directory / shard)
    (directory / INDEX).write_text(json.dumps({"weight_map": places}))


def put(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).write_bytes(content)


def whole(**tensors: Any) -> Callable[[Path], None]:
    return lambda directory: write_whole(directory, {k: np.asarray(v) for k, v in tensors.items()})


def shards(places: object) -> Callable[[Path], None]:
    return lambda directory: write_shards(directory, places)


def both(*writes: Callable[[Path], Any]) -> Callable[[Path], None]:
    def write_all(directory: Path) -> None:
        for write in writes:
            write(directory)

    return write_all


def read(directory: Path) -> dict[str, np.ndarray]:
    return {name: stored.read() for name, stored in open_tensors(directory)[1].items()}


def test_one_file_is_read(tmp_path: Path) -> None:
    bfloat = np.full((2, 2), 0.5, ml_dtypes.bfloat16)
    write_whole(tmp_path, TENSORS | {"c": bfloat})
    file, tensors = open_tensors(tmp_path)
    assert file == tmp_path / "model.safetensors"
    assert {name: (x.name, x.shape, x.dtype, x.file) for name, x in tensors.items()} == {
        "a.weight": ("a.weight", (2, 3), "F32", file),
        "b.weight": ("b.weight", (4,), "F16", file),
        "c": ("c", (2, 2), "BF16", file),
    }
    for name, array in read(tmp_path).items():
        expected = bfloat if name == "c" else TENSORS[name]
        assert array.dtype == expected.dtype and np.array_equal(array, expected)


def test_shards_are_read(tmp_path: Path) -> None:
    write_shards(tmp_path, PLACES)
    file, tensors = open_tensors(tmp_path)
    assert file.name == INDEX and {name: x.file.name for name, x in tensors.items()} == PLACES
    assert all(np.array_equal(array, TENSORS[name]) for name, array in read(tmp_path).items())


@pytest.mark.parametrize("wrapped", [False, True])
def test_msgpack_file_is_read(wrapped: bool, tmp_path: Path) -> None:
    kernel, table, scale = TENSORS["a.weight"], np.ones((3, 2), ml_dtypes.bfloat16), TENSORS["b.weight"]
    norm = {"norm": {"weight": scale}}
    tree = {"head": {"kernel": kernel}, "shared": {"embedding": table}, "block": {"0": norm}}
    (tmp_path / "flax_model.msgpack").write_bytes(msgpack_serialize({"params": tree} if wrapped else tree))
    tensors = open_tensors(tmp_path)[1]
    assert {name: (x.shape, x.dtype) for name, x in tensors.items()} == {
        "head.weight": ((3, 2), "F32"),
        "block.0.norm.weight": ((4,), "F16"),
        "shared.weight": ((3, 2), "BF16"),
    }
    arrays = read(tmp_path)
    assert np.array_equal(arrays["head.weight"], kernel.T) and np.array_equal(arrays["shared.weight"], table)


def test_safetensors_come_first(tmp_path: Path) -> None:
    both(put("flax_model.msgpack", b""), put("x.bin", b""), shards(PLACES), whole(a=[1.0]))(tmp_path)
    with pytest.raises(UserError, match="F64"):
        open_tensors(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert open_tensors(tmp_path)[0].name == INDEX


DAMAGES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "nothing": (lambda directory: None, ("no weights", "model.safetensors")),
    "bin": (put("pytorch_model.bin", b""), ("pytorch_model.bin: found a damaged file", "torch's tensors")),
    "lfs bin": (put("pytorch_model.bin", LFS), ("pytorch_model.bin: found a git-LFS pointer",)),
    "empty": (put("model.safetensors", b""), ("model.safetensors: found a damaged file",)),
    "lfs pointer": (
        put("model.safetensors", LFS),
        ("model.safetensors: found a git-LFS pointer", "expected safetensors"),
    ),
    "lfs shard": (both(shards(PLACES), put("2.safetensors", LFS)), ("2.safetensors: found a git-LFS pointer",)),
    "lfs index": (put(INDEX, LFS), (f"{INDEX}: found a git-LFS pointer", "expected a JSON object")),
    "lfs msgpack": (put("flax_model.msgpack", LFS), ("flax_model.msgpack: found a git-LFS pointer",)),
    "web page": (put("model.safetensors", b"\n<!DOCTYPE html><html>"), ("model.safetensors: found a web page",)),
    "bin beside a training's": (
        both(put("last.bin", b""), put("training_args.bin", b""), put("optimizer.pt", b"")),
        ("found only last.bin (torch weights", "save_pretrained as safetensors"),
    ),
    "only a training's": (both(put("training_args.bin", b""), put("rng_state_0.pth", b"")), ("found no weights",)),
    "tensorflow": (both(put("tf_model.h5", b""), put("training_args.bin", b"")), ("only tf_model.h5 (TensorFlow",)),
    "rust": (put("rust_model.ot", b""), ("only rust_model.ot (Rust weights",)),
    "a pickle of another name": (put("last.ckpt", b""), ("only last.ckpt (torch weights",)),
    "adapter": (put("adapter_model.safetensors", b""), ("only adapter_model.safetensors (a LoRA adapter",)),
    "variant": (put("model.fp16.safetensors", b""), ("only model.fp16.safetensors (a variant: rename it",)),
    "random": (put("model.safetensors", bytes(range(200))), ("damaged",)),
    "integers": (whole(w=np.ones(2, np.int8)), ("model.safetensors: w: found dtype I8", "F32, F16, BF16")),
    "doubles": (whole(w=np.ones(2)), ("w: found dtype F64",)),
    "nan": (whole(w=np.array([1, np.nan, np.nan], np.float16)), ("w: found 2 values that are NaN",)),
    "infinite": (whole(w=np.array([[np.inf]], ml_dtypes.bfloat16)), ("w: found 1 values", "infinite")),
    "index no json": (put(INDEX, b"{"), (INDEX, "found no JSON")),
    "index without map": (put(INDEX, b"{}"), (INDEX, "weight_map: found None")),
    "index of numbers": (shards({"a.weight": 3}), (INDEX, "weight_map: found {'a.weight': 3}")),
    "index goes up": (shards(PLACES | {"a.weight": "../1.safetensors"}), (INDEX, "'../1.safetensors'")),
    "index goes anywhere": (shards(PLACES | {"a.weight": "/etc/passwd"}), (INDEX, "'/etc/passwd'")),
    "index goes nowhere": (shards(PLACES | {"a.weight": ""}), (INDEX, "found ''")),
    "parent as a shard": (shards(PLACES | {"a.weight": ".."}), (INDEX, "found '..'")),
    "absent shard": (shards(PLACES | {"a.weight": "3.safetensors"}), (INDEX, "3.safetensors", "a.weight")),
    "not in its shard": (shards(PLACES | {"c": "1.safetensors"}), ("1.safetensors: c: missing", INDEX)),
    "in two shards": (
        both(shards(PLACES), lambda directory: save_file(TENSORS, directory / "2.safetensors")),
        ("2.safetensors: a.weight: found, but not listed", INDEX),
    ),
    "damaged shard": (both(shards(PLACES), put("2.safetensors", b"")), ("2.safetensors: found a damaged file",)),
    "empty msgpack": (put("flax_model.msgpack", b""), ("flax_model.msgpack", "damaged")),
    "broken msgpack": (put("flax_model.msgpack", b"\x93\x01"), ("flax_model.msgpack", "damaged")),
    "msgpack of a number": (put("flax_model.msgpack", b"\x01"), ("flax_model.msgpack", "damaged")),
    "msgpack of no array": (put("flax_model.msgpack", b"\x81\xa1a\x01"), ("msgpack: a: found int",)),
    "msgpack of integers": (
        put("flax_model.msgpack", msgpack_serialize({"a": {"kernel": np.arange(3)}})),
        ("flax_model.msgpack: a.weight: found dtype int64",),
    ),
    "msgpack of a bias": (
        put("flax_model.msgpack", msgpack_serialize({"a": {"bias": np.ones(3, "f")}})),
        ("flax_model.msgpack: a.bias: found ndarray",),
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_raises_one_line(case: str, tmp_path: Path) -> None:
    damage, words = DAMAGES[case]
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    message = str(caught.value)
    assert message.startswith(str(tmp_path)) and "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("cut", [1, 7, 9, 60, 100])
def test_truncated_file_is_refused(cut: int, tmp_path: Path) -> None:
    write_whole(tmp_path, TENSORS)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(UserError, match=r"model\.safetensors: found a damaged file"):
        open_tensors(tmp_path)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"[]", "found []; expected a JSON object"),
        (b"{'a': 1}", "found no JSON"),
        (b"", "found no JSON"),
        (b'{"\xff": 1}', "found no JSON"),
        (b"[" * 100_000, "found no JSON"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_invalid_json_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_json(tmp_path / "x.json")
    assert str(caught.value).startswith(f"{tmp_path / 'x.json'}: ") and words in str(caught.value)


def test_json_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "x.json") == {"a": 1}
