"""Writes and reads trees of arrays in Orbax's format. No other module uses Orbax.

Orbax's handlers write and read the files of an item (one tree, such as "params"); `store.py` commits whole steps.
Orbax's CheckpointManager is not used: it syncs neither metadata nor directories, and after a failure its threads wait
minutes for each other.
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
import orbax.checkpoint as ocp

from pipejax.checkpoint.manifest import on_host
from pipejax.checkpoint.trouble import reading
from pipejax.system import Tree, distributed
from pipejax.system.errors import UserError
from pipejax.system.files import UTF_8, is_misread

# Orbax and TensorStore read these parts of a path as patterns, as "/", or as the scheme of a URL.
_MISREAD = re.compile(r"[\\\[\]*?]|:(?=/|$)|^/(gs|s3|az|hf)(?=/|$)")


class Writes(Protocol):
    """A write that goes on in the background."""

    def result(self) -> object:
        """Waits for the end of the write; raises its error."""


def check_place(path: Path) -> None:
    """Raises a UserError if Orbax would take the path of this directory for another one."""
    place = str(path.absolute())
    try:
        place.encode()
    except UnicodeEncodeError:
        if is_misread(place):
            said = f"{os.fsencode(place).decode()}: found a path in UTF-8, which Python reads otherwise here"
            raise UserError(f"{said}; expected {UTF_8}") from None
        raise UserError(
            f"{os.fsencode(place)!r}: found a path that is not UTF-8; expected one that is (a symbolic link to it "
            "will do)"
        ) from None
    if found := _MISREAD.search(place):
        raise UserError(
            f"{path}: found {found[0]!r} in the path; expected one without \\ [ ] * ?, without names that end in a "
            "colon and not below /gs, /s3, /az or /hf, which Orbax misreads (a symbolic link to it will do)"
        )


def make_place(place: Path) -> None:
    """Makes the directory of an item. One process calls this, before all processes call `begin`."""
    # Otherwise the other processes wait in Orbax for the inner directory: ten minutes if the first process fails.
    (place / "array_metadatas").mkdir(parents=True)


def begin(place: Path, tree: Tree) -> Sequence[Writes]:
    """Begins to write this process's part of a tree; after the return the caller may donate the buffers.

    By then Orbax has copied each array to the host, or holds a reference, so that a donating step has to copy it.
    """
    saving = ocp.StandardCheckpointHandler().async_save(ocp.utils.epath.Path(place), args=ocp.args.StandardSave(tree))
    with ThreadPoolExecutor(1) as pool:  # the caller's thread may run an event loop already
        return pool.submit(asyncio.run, saving).result() or []


def finish(place: Path) -> None:
    """Merges the parts of all processes after all are written. One process calls this."""
    handler = ocp.StandardCheckpointHandler()
    handler.finalize(ocp.utils.epath.Path(place))


def read(place: Path, template: Tree, files: Mapping[str, str]) -> Tree:
    """Reads the arrays of an item.

    Args:
      place: the item's directory.
      template: a tree of jax.ShapeDtypeStruct with shardings; the result has the same tree.
      files: digests of the item's small files, as for `reading`.

    Raises:
      Damaged, UserError: as `reading`.
    """
    with reading(place, files):
        os.stat(place / "_METADATA")  # raises if it is missing; Orbax does not always
        return ocp.StandardCheckpointHandler().restore(place, args=ocp.args.StandardRestore(template))


class _Shapes(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
    """Reads shapes without the mesh on which an array was saved, which does not matter here."""

    def typestr(self) -> str:
        return "jax.Array"


def shapes(place: Path, files: Mapping[str, str]) -> Tree:
    """The tree of an item as it was saved: jax.ShapeDtypeStruct on the host, as one device may lack the memory.

    Raises:
      Damaged, UserError: as `reading`.
    """
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, _Shapes()), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    sharding = on_host()
    with reading(place, files):
        saved = ocp.PyTreeCheckpointHandler(type_handler_registry=registry).metadata(place).tree
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), saved)


class Saving(threading.Thread):
    """A thread that waits for a save. It is a daemon, so the process can end without it; Orbax ends its writes."""

    def __init__(self, step: int, writes: list[Writes], commit: Callable[[], None]) -> None:
        """Starts the thread, which waits for the writes and then calls `commit`."""
        super().__init__(name=f"save-{step}", daemon=True)
        self.step, self.commit, self._writes = step, commit, writes
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Waits for the writes, and commits if this process is the only one; else `Store.settle` commits."""
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
