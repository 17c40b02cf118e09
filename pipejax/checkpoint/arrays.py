"""Writes and reads trees of arrays in Orbax's format. No other module uses Orbax or TensorStore.

Orbax's handlers write the files of an item (one tree, such as "params"); `store.py` commits whole steps. Orbax's
CheckpointManager is not used: it syncs neither metadata nor directories, and after a failure its threads wait for each
other for minutes. Items are read by TensorStore, in which Orbax stores the arrays, so decoding does not import Orbax.
"""

import asyncio
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
import tensorstore as ts

from pipejax.checkpoint.manifest import Damaged
from pipejax.checkpoint.trouble import reading
from pipejax.system import Tree, distributed
from pipejax.system.errors import UserError
from pipejax.system.files import UTF_8, absolute, is_misread

# Orbax and TensorStore interpret these parts of a path as patterns, as "/", or as the scheme of a URL.
_MISREAD = re.compile(r"[\\\[\]*?]|:(?=/|$)|^/(gs|s3|az|hf)(?=/|$)")
# Settings of TensorStore: it caches only the nodes that locate arrays, and does not check whether files change during a
# read.
_LIMITS = {"cache_pool#nodes": {"total_bytes_limit": 10**8}, "file_io_concurrency": {"limit": 128}}
_ONCE = {"recheck_cached_data": False, "recheck_cached_metadata": False, "fill_missing_data_reads": False}
_ALIGNED = 64  # alignment in bytes from which JAX uses host memory without a copy


class Writes(Protocol):
    """A write in progress in the background."""

    def result(self) -> object: ...


def check_place(path: Path) -> None:
    """Raises a UserError if Orbax would misread the path of this directory, or if the path is not UTF-8."""
    place = str(absolute(path))
    try:
        place.encode()
    except UnicodeEncodeError:
        if is_misread(place):
            raise UserError(
                os.fsencode(place).decode(),
                found="a path in UTF-8, which Python decodes differently here",
                expected=UTF_8,
            ) from None
        raise UserError(
            f"{os.fsencode(place)!r}",
            found="a path that is not UTF-8",
            expected="a UTF-8 path",
            hint="a symbolic link to it with such a path also works",
        ) from None
    if found := _MISREAD.search(place):
        raise UserError(
            path,
            found=f"{found[0]!r} in the path",
            expected="a path without \\ [ ] * ?, without names that end in a colon and not below /gs, /s3, "
            "/az or /hf, which Orbax misreads",
            hint="a symbolic link to it with such a path also works",
        )


def begin_item(place: Path, tree: Tree) -> Sequence[Writes]:
    """Begins to write this process's part of a tree to `place`, in the background.

    Orbax holds or has copied the buffers when this function returns, so the caller may donate the buffers.
    """
    import orbax.checkpoint as ocp

    # Compression hardly makes weights smaller, and decompression takes most of the time of opening a checkpoint.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    saving = handler.async_save(ocp.utils.epath.Path(place), args=ocp.args.PyTreeSave(tree))
    with ThreadPoolExecutor(1) as pool:  # a thread, because the caller's thread may already run an event loop
        return pool.submit(asyncio.run, saving).result() or []


def finish_item(place: Path) -> None:
    """Completes the files of an item after all processes have written their parts."""
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler()
    handler.finalize(ocp.utils.epath.Path(place))


def read_item(place: Path, template: Tree, files: Mapping[str, str]) -> Tree:
    """Reads an item into arrays with the shapes, dtypes and shardings of `template`.

    Args:
      place: the item's directory.
      template: a tree of jax.ShapeDtypeStruct.
      files: digests of the item's small files, by name.

    Raises:
      Damaged: the files do not match the digests or the template.
      UserError: the files cannot be read at the moment.
    """

    def begin(wanted: jax.ShapeDtypeStruct, store: ts.TensorStore) -> Callable[[], jax.Array]:
        """Begins to read the parts of an array that this process's devices hold.

        A part that several devices hold is read once. The result waits for the parts and returns the array.
        """
        places = wanted.sharding.addressable_devices_indices_map(wanted.shape)
        names = {device: tuple((part.start, part.stop) for part in index) for device, index in places.items()}
        begun = {names[device]: _filled_part(store[index]) for device, index in places.items()}

        def end() -> jax.Array:
            for _, writing in begun.values():
                writing.result()
            held = [jax.device_put(begun[name][0], device) for device, name in names.items()]
            return jax.make_array_from_single_device_arrays(wanted.shape, wanted.sharding, held)

        return end

    with reading(place, files):
        leaves, structure = jax.tree.flatten(template)
        ends = [begin(*pair) for pair in zip(leaves, _open_arrays(place, template), strict=True)]
        return jax.tree.unflatten(structure, [ends.pop(0)() for _ in leaves])


def check_item(place: Path, template: Tree, files: Mapping[str, str]) -> None:
    """Opens the arrays of an item and compares shapes and dtypes with `template`, without reading the content.

    Raises:
      Damaged: as `read_item`.
      UserError: as `read_item`.
    """
    with reading(place, files):
        _open_arrays(place, template)


def _filled_part(store: ts.TensorStore) -> tuple[np.ndarray, ts.WriteFutures]:
    """Returns an array and the operation that fills it from the store.

    The array is aligned so that JAX can use its memory on a CPU without a copy.
    """
    dtype = store.dtype.numpy_dtype
    memory = np.empty(store.size * dtype.itemsize + _ALIGNED, np.uint8)
    memory = memory[-memory.ctypes.data % _ALIGNED :][: store.size * dtype.itemsize]
    array = memory.view(dtype).reshape(store.shape)
    return array, ts.array(array)[ts.d[:].translate_to[store.origin]].write(store)


def _open_arrays(place: Path, template: Tree) -> list[ts.TensorStore]:
    """Opens the arrays of an item, in the order of the template's leaves.

    Raises:
      Damaged: an array is missing, unexpected, or of another shape or dtype than in the template.
    """
    # Orbax writes this file. Reading does not need the file, but a step without it is incomplete.
    os.stat(place / "_METADATA")
    base = {"driver": "file", "path": f"{absolute(place)}/"}
    kept, context = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#nodes"}, ts.Context(_LIMITS)
    wanted = {
        jax.tree_util.keystr(keys, simple=True, separator="."): leaf
        for keys, leaf in jax.tree_util.tree_flatten_with_path(template)[0]
    }
    listed = ts.KvStore.open(kept, context=context).result().list().result()
    for name in sorted({key.decode().rpartition("/")[0] for key in listed} ^ wanted.keys()):
        raise Damaged(f"{place.name}: array {name} is {'missing' if name in wanted else 'unexpected'}")
    specs = [{"driver": "zarr", "kvstore": {**kept, "path": f"{name}/"}, **_ONCE} for name in wanted]
    stores = [opened.result() for opened in [ts.open(spec, read=True, context=context) for spec in specs]]
    for (name, leaf), store in zip(wanted.items(), stores, strict=True):
        if store.shape != leaf.shape or store.dtype.numpy_dtype != leaf.dtype:
            found, expected = (f"{x.dtype.name} {list(x.shape)}" for x in (store, leaf))
            raise Damaged(f"{place.name}: array {name}: found {found}; expected {expected}")
    return stores


class Saving(threading.Thread):
    """A thread that waits for the writes of a save.

    The thread is a daemon and does not keep the process alive; a process that ends meanwhile commits nothing.
    """

    def __init__(self, step: int, writes: list[Writes], commit: Callable[[], None]) -> None:
        """Starts the thread, which waits for the writes and then calls `commit`."""
        super().__init__(name=f"save-{step}", daemon=True)
        self.step, self.commit, self._writes = step, commit, writes
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Waits for the writes, and commits if there is only this process; with several, `Store.settle` commits."""
        self.error = wait_for(self._writes)
        if not (self.error or distributed.several()):
            try:
                self.commit()
            except Exception as error:
                self.error = error


def wait_for(writes: Iterable[Writes]) -> Exception | None:
    """Waits for the end of all writes; returns the first error, or None."""
    problem: Exception | None = None
    for write in writes:
        try:
            write.result()
        except Exception as error:
            problem = problem or error
    return problem
