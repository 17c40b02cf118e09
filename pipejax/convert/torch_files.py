"""Reads the tensors of torch's files (`pytorch_model.bin`) without torch.

Such a file is a zip archive of a pickle and the bytes of each storage. A pickle can run code, so this one is read by an
unpickler that knows ordered dicts, storages and the two functions that make tensors of them; whatever else it names is
refused before anything is called. Bytes are read when a tensor is.
"""

import collections
import math
import pickle
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from pipejax.system.errors import UserError

# torch's storages: safetensors' name of their dtype, and NumPy's.
STORAGES = {
    "FloatStorage": ("F32", "<f4"),
    "HalfStorage": ("F16", "<f2"),
    "BFloat16Storage": ("BF16", "bfloat16"),
    "DoubleStorage": ("F64", "<f8"),
    "LongStorage": ("I64", "<i8"),
    "IntStorage": ("I32", "<i4"),
    "ByteStorage": ("U8", "u1"),
    "BoolStorage": ("BOOL", "?"),
}
# Errors of the zip archive and of the pickle in a damaged file.
DAMAGES = (
    zipfile.BadZipFile,
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
OLD = (b"\x80\x02\x8a\x0a", b"\x80\x02}")  # how files begin that torch wrote before it wrote archives


class Storage(NamedTuple):
    """The bytes of one or more tensors, in a member of the archive."""

    kind: str  # of STORAGES
    member: str
    size: int  # numbers


class Tensor(NamedTuple):
    """A tensor that is not read yet."""

    storage: Storage
    offset: int  # of its first number, in numbers
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in numbers


def open_tensors(file: Path) -> dict[str, tuple[Tensor, Callable[[], np.ndarray]]]:
    """The tensors of a file by name, each with a function that reads it."""
    with file.open("rb") as content:
        if content.read(4).startswith(OLD):
            raise UserError(
                f"{file}: found a file as torch before 1.6 wrote it; expected a newer one: torch.load it and "
                "torch.save it again"
            )
    archive = zipfile.ZipFile(file)  # stays open: tensors are read later
    [index] = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
    root = index.removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise UserError(f"{file}: found bytes in big-endian order; expected little-endian")
    with archive.open(index) as content:
        found = _Unpickler(content, file, root).load()
    if not isinstance(found, dict) or not all(isinstance(x, Tensor) for x in found.values()):
        raise UserError(f"{file}: found no dict of tensors; expected the state dict of a T5")
    return {name: (tensor, partial(_read, archive, tensor)) for name, tensor in found.items()}


class _Unpickler(pickle.Unpickler):
    """Knows what a dict of tensors is made of, and nothing else."""

    def __init__(self, content: IO[bytes], file: Path, root: str) -> None:
        super().__init__(content)
        self.file, self.root = file, root

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module in ("torch", "torch.storage") and name in STORAGES:
            return name
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda tensor, *_: tensor
        raise UserError(
            f"{self.file}: found {module}.{name} in its pickle, which could run code; expected tensors and nothing else"
        )

    def persistent_load(self, pid: tuple[str, str, str, str, int]) -> Storage:
        kind, storage, key, _, size = pid
        if kind != "storage" or storage not in STORAGES:
            raise pickle.UnpicklingError(f"a persistent id of kind {kind!r:.20}")
        return Storage(storage, f"{self.root}data/{key}", int(size))


def _rebuild_tensor(storage: Storage, offset: int, shape: Sequence[int], strides: Sequence[int], *_: object) -> Tensor:
    """In the place of torch's function; raises a ValueError if the numbers lie outside of the storage."""
    shape, strides, offset = tuple(map(int, shape)), tuple(map(int, strides)), int(offset)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    fits = isinstance(storage, Storage) and min((*shape, *strides, offset)) >= 0
    if not fits or (0 not in shape and (last >= storage.size or math.prod(shape) > storage.size)):
        raise ValueError(f"a tensor of shape {shape} outside of its storage")
    return Tensor(storage, offset, shape, strides)


def _read(archive: zipfile.ZipFile, tensor: Tensor) -> np.ndarray:
    """The numbers of a tensor; raises a ValueError or a BadZipFile if the archive is damaged."""
    dtype = np.dtype(STORAGES[tensor.storage.kind][1])
    numbers = np.frombuffer(archive.read(tensor.storage.member), dtype)
    if len(numbers) != tensor.storage.size:
        raise ValueError(f"{tensor.storage.member} holds {len(numbers)} numbers, not {tensor.storage.size}")
    strides = [stride * dtype.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(numbers[tensor.offset :], tensor.shape, strides, writeable=False)
