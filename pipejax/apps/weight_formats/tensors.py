"""Opens the tensors of torch's files and of flax's files, under the names and in the layout that they have in torch."""

import mmap
from functools import partial
from pathlib import Path

import flax.serialization
import numpy as np
from flax.traverse_util import flatten_dict

from pipejax.apps.weight_formats import torch_files
from pipejax.convert.tensor_files import DAMAGES, DTYPES, Stored, damaged
from pipejax.system.errors import UserError


def open_torch(file: Path) -> dict[str, Stored]:
    """Opens the tensors of a torch file by name.

    Raises:
      UserError: the file is damaged, or its pickle does more than make tensors.
    """
    try:
        tensors = torch_files.open_torch_tensors(file)
    except (OSError, *DAMAGES) as error:
        raise damaged(file, "torch's tensors", error) from error
    codes = {name: torch_files.STORAGES[tensor.storage.kind][0] for name, (tensor, _) in tensors.items()}
    return {name: Stored(file, name, tensor.shape, codes[name], read) for name, (tensor, read) in tensors.items()}


def open_msgpack(file: Path) -> dict[str, Stored]:
    """Reads Flax's parameters under torch's names; a Flax kernel [in, out] is torch's weight [out, in] transposed."""
    try:
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            tree = flax.serialization.msgpack_restore(content)  # type: ignore[arg-type]  # it accepts any buffer
        leaves = flatten_dict(tree["params"] if tree.keys() == {"params"} else tree, sep=".")
    except (OSError, AssertionError, *DAMAGES) as error:
        raise damaged(file, "flax parameters", error) from error
    codes = {dtype: code for code, dtype in DTYPES.items()}
    tensors = {}
    for path, array in leaves.items():
        stem, _, kind = path.rpartition(".")
        if not isinstance(array, np.ndarray) or kind not in ("kernel", "embedding", "weight"):
            raise UserError(
                f"{file}: {path:.60}",
                found=type(array).__name__,
                expected="an array whose name ends in kernel, embedding or weight",
            )
        array = array.T if kind == "kernel" else array
        name, dtype = f"{stem}.weight", codes.get(str(array.dtype), str(array.dtype))
        tensors[name] = Stored(file, name, array.shape, dtype, partial(np.asarray, array))
    return tensors
