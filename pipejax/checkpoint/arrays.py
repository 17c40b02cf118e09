"""Trees of arrays on disk, in Orbax's format. The only module that knows Orbax.

Its handlers write and read the files of an item; that a step is committed whole is ours (`store.py`). Orbax's own
manager is not used: it syncs neither metadata nor directories, and its threads wait minutes for each other's signals
after a failure.
"""

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp

from pipejax.checkpoint.manifest import on_host
from pipejax.checkpoint.trouble import reading
from pipejax.system.errors import UserError

# Orbax and TensorStore look for patterns in the path, take "\\" for "/", and read some names as a URL's scheme.
_MISREAD = re.compile(r"[\\\[\]*?]|:(?=/|$)|^/(gs|s3|az|hf)(?=/|$)")


class Writes(Protocol):
    """Files that are being written in the background."""

    def result(self) -> Any:
        """Waits for them; raises what went wrong."""


def check_place(path: Path) -> None:
    """Raises a UserError if arrays in that directory would be written or looked for somewhere else."""
    place = str(path.absolute())
    try:
        place.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{os.fsencode(place)!r}: found a path that is not UTF-8; expected one that is (a link to it serves)"
        ) from None
    if found := _MISREAD.search(place):
        raise UserError(
            f"{path}: found {found[0]!r} in the path; expected one without \\ [ ] * ?, without names that end in a "
            "colon and not below /gs, /s3, /az or /hf, which Orbax takes for something else (a link to it serves)"
        )


def make_place(place: Path) -> None:
    """Makes the directory of an item. One process does, before any calls `begin`."""
    # Orbax would have the other processes wait for the inner one, for ten minutes if the first one fails.
    (place / "array_metadatas").mkdir(parents=True)


def begin(place: Path, tree: Any) -> Sequence[Writes]:
    """Begins to write this process's part of a tree; once it returns, the buffers may be donated.

    Before that, Orbax has copied each array to the host, or holds it so that a step that takes it over has to copy.
    """
    saving = ocp.StandardCheckpointHandler().async_save(ocp.utils.epath.Path(place), args=ocp.args.StandardSave(tree))
    with ThreadPoolExecutor(1) as pool:  # no loop of the caller's is in the way there
        return pool.submit(asyncio.run, saving).result() or []


def finish(place: Path) -> None:
    """Puts the parts of all processes together, once all are written. One process does."""
    handler = ocp.StandardCheckpointHandler()
    handler.finalize(ocp.utils.epath.Path(place))


def read(place: Path, template: Any, files: Mapping[str, str]) -> Any:
    """A tree of jax.ShapeDtypeStruct with shardings, filled; `files` as for `reading`.

    Raises:
      Damaged, UserError: as `reading`.
    """
    with reading(place, files):
        os.stat(place / "_METADATA")  # Orbax would make do without, in some cases
        return ocp.StandardCheckpointHandler().restore(place, args=ocp.args.StandardRestore(template))


class _Shapes(ocp.type_handlers.NumpyHandler):  # type: ignore[misc]
    """Tells shapes without reading on what mesh an array was saved, which is no matter here."""

    def typestr(self) -> str:
        return "jax.Array"


def shapes(place: Path, files: Mapping[str, str]) -> Any:
    """The tree as it was saved, of jax.ShapeDtypeStruct on the host, as no one device may have room for all of it.

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
