"""Reads the tensors of torch's files (`pytorch_model.bin`) without torch.

Such a file is a zip archive of a pickle and the bytes of each storage. A pickle is a program: it can run code, or fill
the memory. So the pickle is interpreted here, restricted to the few operations that make dicts of tensors; all other
operations are refused. The bytes of a tensor are read on demand.
"""

import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipejax.system.errors import UserError

# torch's storages, with safetensors' and NumPy's name of the dtype.
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
OLD = (b"\x80\x02\x8a\x0a", b"\x80\x02}")  # the first bytes of files that torch wrote before it used zip archives
MOST = 2**20  # the most bytes of a pickle, in which a tensor takes some hundred bytes
DIMENSIONS = 8
SHARED = 4  # the most tensors that may share a number: T5's table has four names


FUNCTIONS = [("collections", "OrderedDict"), *(("torch._utils", f"_rebuild_{x}") for x in ("tensor_v2", "parameter"))]
MADE: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}


class Name(str):
    """The name of a function or a class in a pickle."""


class Storage(NamedTuple):
    """The bytes of one or more tensors, in a member of the archive."""

    kind: str  # a key of STORAGES
    member: str
    size: int  # count of numbers


class Tensor(NamedTuple):
    """A tensor in a pickle: a view of a storage."""

    storage: Storage
    offset: int  # offset of the first number, counted in numbers
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # counted in numbers


def open_torch_tensors(file: Path) -> dict[str, tuple[Tensor, Callable[[], np.ndarray]]]:
    """Returns the tensors of a file by name, each with a function that reads it.

    Raises:
      UserError: the file is damaged, has an old format, or its pickle does more than make tensors.
    """
    with file.open("rb") as content:
        if content.read(4).startswith(OLD):
            raise UserError(
                file,
                found="a file written by torch before 1.6",
                expected="a newer format: load it with torch.load and save it again",
            )
    archive = zipfile.ZipFile(file)  # stays open, because tensors are read later
    members = {member.filename: member for member in archive.infolist()}
    if packed := [name for name, x in members.items() if x.compress_type != zipfile.ZIP_STORED]:
        raise UserError(
            file, found=f"{packed[0]!r:.60} compressed", expected="uncompressed members, as torch.save writes"
        )
    if sum(member.file_size for member in members.values()) > file.stat().st_size:
        raise ValueError("members that overlap")
    [index] = [name for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
    root = index.removesuffix("data.pkl")
    if (order := members.get(f"{root}byteorder")) and (found := archive.read(order)[:20]) != b"little":
        raise UserError(file, found=f"bytes in the order {found!r}", expected="little-endian")
    if members[index].file_size > MOST:
        raise UserError(file, found=f"a pickle of {members[index].file_size:,} bytes", expected=f"at most {MOST:,}")
    state = _unpickled(archive.read(index), file, root)
    if not isinstance(state, dict) or not all(isinstance(x, Tensor) for x in state.values()):
        raise UserError(file, found="no dict of tensors", expected="the state dict of a T5")
    storages: dict[str, Storage] = {}
    for tensor in state.values():
        storage = tensor.storage
        size = storage.size * np.dtype(STORAGES[storage.kind][1]).itemsize
        if storages.setdefault(storage.member, storage) != storage or members[storage.member].file_size != size:
            raise ValueError(f"{storage.member!r:.60} with a size that differs from its tensors")
    most = SHARED * sum(storage.size for storage in storages.values())
    if sum(math.prod(tensor.shape) for tensor in state.values()) > most:
        raise ValueError(f"the same numbers more than {SHARED} times")
    return {name: (tensor, partial(_read_tensor, archive, tensor)) for name, tensor in state.items()}


def _unpickled(content: bytes, file: Path, root: str) -> object:
    """Interprets a pickle and returns its object.

    Raises:
      UserError: the pickle names another function than the supported ones.
      ValueError: the pickle has an unsupported operation.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def popped(count: int = 0) -> list[Any]:
        """Removes and returns the last `count` items of the stack, or all since the last mark."""
        begin = len(stack) - count if count else marks.pop()
        found = stack[begin:]
        del stack[begin:]
        return found

    for operation, argument, _ in pickletools.genops(content):
        match operation.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                break
            case "MARK":
                marks.append(len(stack))
            case name if name in MADE:
                stack.append(MADE[name]())
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINUNICODE":
                stack.append(argument)
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack.append(tuple(popped(int(name[5:] or 0))))
            case "APPEND" | "APPENDS" as name:
                items = popped(int(name == "APPEND"))
                stack[-1].extend(items)
            case "SETITEM" | "SETITEMS" as name:
                items = popped(2 * int(name == "SETITEM"))
                # Hashing another type may take arbitrarily long.
                if not all(isinstance(key, str) for key in items[::2]):
                    raise ValueError("a key that is not text")
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE" as name:
                memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL" | "STACK_GLOBAL" as name:
                stack.append(_named(file, *(str(argument).split(" ") if name == "GLOBAL" else popped(2))))
            case "REDUCE":
                stack.append(_called(file, *popped(2)))
            case "BUILD":  # sets the attributes of an ordered dict
                popped(1)
            case "BINPERSID":
                _, storage, key, _, size = popped(1)[0]
                if not (isinstance(storage, Name) and storage in STORAGES and isinstance(key, str)):
                    raise ValueError("a persistent id that is not a storage")
                stack.append(Storage(str(storage), f"{root}data/{key}", size))
            case name:
                raise pickle.UnpicklingError(f"the operation {name}")
    [found] = stack
    return found


def _named(file: Path, module: object, name: object) -> Name:
    """Returns a name in a pickle if it is one of the supported functions and classes.

    Raises:
      UserError: the name is not a supported one; the object that it names could run code.
      ValueError: the name is not text.
    """
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("a name that is not text")
    if (module, name) not in FUNCTIONS and not (module in ("torch", "torch.storage") and name in STORAGES):
        raise UserError(
            file,
            found=f"{f'{module}.{name}'!r:.80} in the pickle, which no plain tensor needs and which could run code",
            expected="only plain tensors",
        )
    return Name(name)


def _called(file: Path, name: object, given: Any) -> object:
    """Computes the result of a call in the pickle, in place of the named function."""
    match name if isinstance(name, Name) else "", given:
        case "OrderedDict", ():
            return {}
        case "_rebuild_tensor_v2", (Storage() as storage, offset, tuple(shape), tuple(strides), bool(), hooks, *more):
            if hooks or any(more):
                keys = [key for part in (hooks, *more) if isinstance(part, dict) for key in part]
                raise UserError(
                    file,
                    found=f"a tensor with {', '.join(keys)!r:.60} in addition to its numbers",
                    expected="plain tensors, as returned by torch's resolve_neg() and resolve_conj()",
                )
            return _rebuild_tensor(storage, offset, shape, strides)
        case "_rebuild_parameter", (Tensor() as tensor, bool(), _):
            return tensor
    raise ValueError("a call that does not make a plain tensor")


def _rebuild_tensor(storage: Storage, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Returns a tensor of a storage.

    Raises:
      ValueError: the tensor's numbers are outside of the storage.
    """
    numbers = (*shape, *strides, offset, storage.size)
    if not all(type(x) is int and 0 <= x < 2**48 for x in numbers) or not len(shape) == len(strides) <= DIMENSIONS:
        raise ValueError("a tensor outside of its storage")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if 0 not in shape and (last >= storage.size or math.prod(shape) > storage.size):
        raise ValueError(f"a tensor of shape {shape} outside of its storage")
    return Tensor(storage, offset, tuple(shape), tuple(strides))


def _read_tensor(archive: zipfile.ZipFile, tensor: Tensor) -> np.ndarray:
    dtype = np.dtype(STORAGES[tensor.storage.kind][1])
    numbers = np.frombuffer(archive.read(tensor.storage.member), dtype)
    strides = [stride * dtype.itemsize for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(numbers[tensor.offset :], tensor.shape, strides, writeable=False)
