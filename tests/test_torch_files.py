"""torch's files are read without torch, and files with other objects than tensors are refused."""

import collections
import os
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipejax.apps.weight_formats import torch_files
from pipejax.convert import read_hf
from pipejax.convert.huggingface import write_hf
from pipejax.convert.tensor_files import open_tensors
from pipejax.system.errors import UserError
from support import oracle, tiny, trees

WIDE = torch.arange(24, dtype=torch.float32).reshape(4, 6)
TENSORS = {
    "whole": WIDE,
    "turned": WIDE.T,
    "part": WIDE[1:3, 2::2],
    "number": torch.tensor(3.5),
    "none": torch.zeros(0, 3),
    "half": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "brain": torch.tensor([[1.5], [3.0]], dtype=torch.bfloat16),
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
}


def in_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy()


@pytest.mark.parametrize("ordered", [False, True])
def test_tensors_equal_torch(ordered: bool, tmp_path: Path) -> None:
    """Files have views of one storage, odd strides, parameters, and further objects of a state dict."""
    state: Any = TENSORS
    if ordered:
        state = collections.OrderedDict(TENSORS)
        state._metadata = collections.OrderedDict(version=1)  # as of a module's state_dict
    torch.save(state, tmp_path / "pytorch_model.bin")
    file, found = open_tensors(tmp_path)
    assert file.name == "pytorch_model.bin" and found.keys() == TENSORS.keys()
    assert [found[name].dtype for name in ("whole", "half", "brain")] == ["F32", "F16", "BF16"]
    for name, tensor in TENSORS.items():
        assert found[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(found[name].read().astype(np.float32), in_numpy(tensor))


def test_t5_in_shards_is_read(tmp_path: Path) -> None:
    """The parameters equal those of safetensors; tied tables that torch stores three times are one."""
    params = oracle.random_params(tiny.MODEL, np.random.default_rng(0))
    write_hf(tiny.MODEL, params, tmp_path / "safe", None)
    write_hf(tiny.MODEL, params, tmp_path / "torch", None)
    expected = read_hf(tmp_path / "safe")
    arrays = {name: stored.read() for name, stored in open_tensors(tmp_path / "safe")[1].items()}
    state = {name: torch.tensor(array) for name, array in arrays.items()}
    state |= dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), state["shared.weight"])
    (tmp_path / "torch" / "model.safetensors").unlink()
    halves = dict(list(state.items())[::2]), dict(list(state.items())[1::2])
    places = {name: f"pytorch_model-{i}.bin" for i, half in enumerate(halves) for name in half}
    for i, half in enumerate(halves):
        torch.save(half, tmp_path / "torch" / f"pytorch_model-{i}.bin")
    index = tmp_path / "torch" / "pytorch_model.bin.index.json"
    index.write_text(f'{{"weight_map": {str(places).replace(chr(39), chr(34))}}}')
    found = read_hf(tmp_path / "torch")
    assert found[0] == expected[0]
    trees.same_bits(found[1], expected[1])


class Runs:
    """An object whose pickle calls a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


@pytest.mark.parametrize(
    "wants, named",
    [
        (Runs(os.mkdir, "made"), "posix.mkdir"),
        (Runs(eval, "open('made', 'w')"), "eval"),
        (Runs(getattr, "x", "upper"), "getattr"),
        (Runs(torch.load, "x"), "torch.serialization.load"),
        (np.ones(2), "numpy"),
        (torch.nn.Linear(2, 2), "torch.nn"),
        ({"step": TENSORS["whole"], "args": collections.Counter()}, "collections.Counter"),
        ({"step": 3}, "no dict of tensors"),
        ([TENSORS["whole"]], "no dict of tensors"),
    ],
)
def test_other_pickled_objects_are_refused(
    wants: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(wants, "pytorch_model.bin")
    with pytest.raises(UserError, match=rf"^{tmp_path}/pytorch_model.bin: found .*{named}"):
        open_tensors(tmp_path)
    assert os.listdir() == ["pytorch_model.bin"]


def test_a_tensor_stays_within_its_storage(tmp_path: Path) -> None:
    """Numbers of a pickle lead beyond the bytes of the archive, or before them, or are no numbers."""
    storage: Any = torch_files.Storage("FloatStorage", "x", 6)
    wrong: list[Any] = [
        (3, (2, 2), (2, 1)),
        (-1, (2,), (1,)),
        (0, (7,), (1,)),
        (5, (2,), (-1,)),
        (0, (2,), (6,)),
        (0, (10**12,), (0,)),  # one number 10^12 times, which would fill the memory
        (0, (0, 10**30), (1, 1)),
        (0, (1,), (10**30,)),
        (True, (2,), (1,)),
        (0, (2.0,), (1,)),
        (0, (2,), (1, 1)),
        (0, (1,) * 9, (1,) * 9),
    ]
    for offset, shape, strides in wrong:
        with pytest.raises(ValueError, match="outside of its storage"):
            torch_files._rebuild_tensor(storage, offset, shape, strides)
    assert torch_files._rebuild_tensor(storage, 2, (2, 2), (2, 1)).offset == 2


COMPLEX = torch.tensor([1 + 2j])
UNPLAIN: dict[str, tuple[Callable[[], Any], str]] = {  # and words of each refusal
    "negative": (lambda: torch._neg_view(WIDE), "with 'neg'"),
    "a parameter": (lambda: torch.nn.Parameter(torch._neg_view(WIDE)), "with 'neg'"),
    "imaginary": (lambda: COMPLEX.conj().imag, "with 'neg'"),
    "complex": (lambda: COMPLEX, "torch.ComplexFloatStorage"),
    "conjugate": (lambda: COMPLEX.conj(), "torch.ComplexFloatStorage"),
    "quantized": (lambda: torch.quantize_per_tensor(WIDE, 0.1, 0, torch.qint8), "_rebuild_qtensor"),
    "sparse": (lambda: WIDE.to_sparse(), "_rebuild_sparse_tensor"),
    "rows": (lambda: WIDE.to_sparse_csr(), "_rebuild_sparse_tensor"),
    "no numbers": (lambda: torch.empty(2, device="meta"), "_rebuild_meta_tensor"),
    "unsigned": (lambda: torch.ones(2, dtype=torch.uint16), "_rebuild_tensor_v3"),
    "eight bits": (lambda: torch.ones(2).to(torch.float8_e4m3fn), "float8|_rebuild_tensor_v3"),
}


@pytest.mark.filterwarnings("ignore")  # torch's warnings about deprecated features
@pytest.mark.parametrize("kind", UNPLAIN)
def test_numbers_that_are_not_plain_are_refused(kind: str, tmp_path: Path) -> None:
    make, words = UNPLAIN[kind]
    torch.save({"a": make()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=rf"^{tmp_path}/pytorch_model.bin: found .*({words})[^\n]*$"):
        open_tensors(tmp_path)


def archive(file: Path, pickled: bytes, *packing: int, **members: bytes) -> None:
    """Writes a file in torch's format, from a pickle and members."""
    with zipfile.ZipFile(file, "w", packing[0] if packing else zipfile.ZIP_STORED) as out:
        for name, content in {"data.pkl": pickled, "data/0": bytes(24), **members}.items():
            out.writestr(f"x/{name}", content)


TYPE = b"ctorch\nFloatStorage\n"
GLOBAL, SIX = b"ctorch._utils\n_rebuild_tensor_v2\n", b"K\x06"


def one(size: bytes = SIX, shape: bytes = b"K\x06\x85", metadata: bytes = b"", key: bytes = b"X\x01\0\0\x000") -> bytes:
    """A handwritten pickle of a tensor "a" of 6 zeros."""
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\n" + key + b"X\3\0\0\0cpu" + size + b"tQ"
    tensor = GLOBAL + b"(" + storage + b"K\0" + shape + b"K\1\x85\x89ccollections\nOrderedDict\n)R" + metadata + b"tR"
    return b"\x80\2}X\1\0\0\0a" + tensor + b"s."


def deep(times: int = 60) -> bytes:
    """A tuple with the previous tuple twice, repeatedly: it has 2^times parts when it is written out."""
    return b")" + b"q\0h\0\x86" * times


ORDERS = ("big", "middle", "")  # of bytes
HOSTILE: dict[str, tuple[Any, str]] = {
    "a size beyond the bytes": ((one(b"K\7"),), "with a size that differs"),
    "a smaller size": ((one(b"K\5", b"K\5\x85"),), "with a size that differs"),
    "a size that is no number": ((one(b"X\1\0\0\x006"),), "damaged file"),
    "a size of 2^62": ((one(b"\x8a\x08" + b"\0" * 7 + b"\x40"),), "outside of its storage"),
    "a truth for a size": ((one(b"\x88", b"K\1\x85"),), "outside of its storage"),
    "a member that is not there": ((one(key=b"X\1\0\0\x001"),), "x/data/1"),
    "a persistent id of nested tuples": ((b"\x80\2" + deep() + b"Q.",), "damaged file"),
    "nested tuples for a kind": ((one(deep(), deep()),), "outside of its storage"),
    "nested tuples for a key": ((b"\x80\2}" + deep() + b"Ns.",), "a key that is not text"),
    "nested tuples for a storage's kind": ((one().replace(TYPE, deep()),), "a persistent id"),
    "a text for a storage's kind": ((one().replace(TYPE, b"X\x0c\0\0\0FloatStorage"),), "a persistent id"),
    "nested tuples for a storage's key": ((one(key=deep()),), "a persistent id"),
    "metadata of nested tuples": ((one(metadata=b"}X\1\0\0\0x" + deep() + b"s"),), "a tensor with 'x'"),
    "a set": ((b"\x80\4\x8f(" + deep() + b"\x90.",), "the operation EMPTY_SET"),
    "a memo of 2^32": ((b"\x80\2Nr\xff\xff\xff\xff.",), "no dict of tensors"),
    "marks in a long stack": ((b"\x80\2" + b"N" * 100_000 + b"(t" * 100_000 + b".",), "damaged file"),
    "a long pickle": ((b"\x80\2" + b"N" * 2**20 + b".",), "a pickle of 1,048,579 bytes; expected at most"),
    "a call of a call": ((one().replace(b"tR" + b"s.", b"tR)Rs."),), "a call that does not make a plain tensor"),
    "another storage": ((one().replace(TYPE, b"cmine\nFloatStorage\n"),), "'mine.FloatStorage' in the pickle"),
    "an instance": ((b"\x80\2ctorch\nFloatStorage\n)\x81.",), "the operation NEWOBJ"),
    "a name with a line's end": ((b"\x80\4\x8c\x03a\nb\x8c\x01c\x93.",), r"found 'a\nb.c' in the pickle"),
    **{order: ((one(),), f"bytes in the order {order.encode()!r}; expected little-endian") for order in ORDERS},
    "packed": ((one(), zipfile.ZIP_DEFLATED), "'x/data.pkl' compressed"),
    "packed by bzip2": ((one(), zipfile.ZIP_BZIP2), "'x/data.pkl' compressed"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_file_raises_one_line_at_once(kind: str, tmp_path: Path) -> None:
    given, words = HOSTILE[kind]
    more = {"byteorder": kind.encode()} if kind in ORDERS else {}
    archive(tmp_path / "pytorch_model.bin", *given, **more)
    begun = time.process_time()
    with pytest.raises(UserError) as told:
        {name: stored.read() for name, stored in open_tensors(tmp_path)[1].items()}
    assert words in str(told.value) and "\n" not in str(told.value) and len(str(told.value)) < 400
    assert time.process_time() - begun < 4


def test_handmade_file_is_read(tmp_path: Path) -> None:
    """Otherwise the refusals above could be caused by a mistake in it."""
    for metadata in (b"", b"}", b"N"):
        archive(tmp_path / "pytorch_model.bin", one(metadata=metadata), byteorder=b"little", version=b"3\n")
        [found] = open_tensors(tmp_path)[1].values()
        assert found.read().tolist() == [0] * 6
    assert torch.load(tmp_path / "pytorch_model.bin")["a"].tolist() == [0] * 6


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickles_is_read(protocol: int, tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", pickle_protocol=protocol)
    for name, stored in open_tensors(tmp_path)[1].items():
        np.testing.assert_array_equal(stored.read().astype(np.float32), in_numpy(TENSORS[name]))


def test_tensors_may_share_a_storage_at_most_four_times(tmp_path: Path) -> None:
    """A small file with many names for the same numbers would fill the memory."""
    torch.save(dict.fromkeys("abcd", WIDE), tmp_path / "pytorch_model.bin")
    assert len(open_tensors(tmp_path)[1]) == 4
    torch.save(dict.fromkeys("abcde", WIDE), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="the same numbers more than 4 times"):
        open_tensors(tmp_path)


def test_members_that_overlap_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    archive(file, one(), **{"data/1": bytes(500)})
    content, own = file.read_bytes(), zipfile.ZipFile(file).getinfo("x/data/0")
    place = content.rindex(b"PK\1\2", 0, content.rindex(b"x/data/1"))
    file.write_bytes(content[: place + 20] + struct.pack("<II", 4000, 4000) + content[place + 28 :])
    assert own.file_size == 24
    with pytest.raises(UserError, match="members that overlap"):
        open_tensors(tmp_path)


def test_error_for_an_old_file_names_the_torch_version(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"torch before 1\.6"):
        open_tensors(tmp_path)


def test_damaged_file_raises_one_line_or_is_read_correctly(tmp_path: Path) -> None:
    """Bytes are changed, or files end early: there is a UserError, or the tensors are correct."""
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": WIDE, "b": TENSORS["brain"]}, file)
    whole, rng, refused = file.read_bytes(), np.random.default_rng(0), 0
    for trial in range(300):
        content = bytearray(whole[: rng.integers(len(whole))] if trial % 3 == 0 else whole)
        if trial % 3:
            content[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
        try:
            found = {name: stored.read() for name, stored in open_tensors(tmp_path)[1].items()}
        except UserError as error:
            assert str(error).startswith(str(file)) and "\n" not in str(error)
            refused += 1
            continue
        for name, array in found.items():
            expected = {"a": WIDE, "b": TENSORS["brain"]}.get(name)
            if expected is not None and array.shape == tuple(expected.shape):
                np.testing.assert_array_equal(array.astype(np.float32), in_numpy(expected))
    assert refused > 100
