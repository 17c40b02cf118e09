"""The device mesh, and the sharding of parameters and batches over it.

Mesh axes: "data" splits batches; "fsdp" splits batches and parameters; "tensor" splits heads, feed-forward width and
vocabulary. The PartitionSpec of a parameter follows from the rules of its backbone (`Backbone.sharding`).
"""

import contextlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from pipejax.model.backbone import Backbone
from pipejax.system import Tree
from pipejax.system.errors import UserError


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns a device mesh with the axes "data", "fsdp" and "tensor".

    Args:
      data: the size of the axis "data"; -1: all devices that the other axes leave.
      fsdp: the size of the axis "fsdp".
      tensor: the size of the axis "tensor".
      devices: the devices to choose from, by default all. If the mesh has fewer devices, it uses the first devices.

    Raises:
      UserError: the sizes do not fit the number of devices, or the mesh would leave out all devices of a process.
    """
    devices, rest = devices or jax.devices(), fsdp * tensor
    if data == -1:
        if len(devices) % rest:
            raise UserError(
                "mesh", found=f"fsdp x tensor = {rest}", expected=f"a divisor of the {len(devices)} devices"
            )
        data = len(devices) // rest
    if data * rest > len(devices):
        raise UserError(
            "mesh",
            found=f"data x fsdp x tensor = {data * rest}",
            expected=f"at most the {len(devices)} devices of this machine",
        )
    # Compares with the given devices, as the devices that `pipejax plan` describes have process numbers of their own.
    if {device.process_index for device in devices[: data * rest]} != {device.process_index for device in devices}:
        raise UserError(
            "mesh",
            found=f"data x fsdp x tensor = {data * rest}",
            expected=f"devices of all {jax.process_count()} processes, {len(devices)} in all",
        )
    return jax.make_mesh(
        (data, fsdp, tensor),
        ("data", "fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
        devices=devices[: data * rest],
    )


def path_of(keys: tuple[Any, ...]) -> str:
    """Returns the text form of a tree path, such as "encoder/norm/scale"."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def spec_of(backbone: Backbone, path: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the PartitionSpec of a parameter, by the first rule of its backbone that matches the path.

    A dimension that is not divisible by the size of its mesh axis is not split. Raises a UserError if no rule matches.
    """
    for pattern, spec in backbone.sharding:
        if re.fullmatch(pattern, path):
            return P(
                *(
                    axis if axis and size % mesh.shape[axis] == 0 else None
                    for size, axis in zip(shape, spec + (None,) * len(shape), strict=False)
                )
            )
    raise UserError(path, found="no rule", expected=f"a rule in {type(backbone).__name__}.sharding")


def param_shardings(backbone: Backbone, params: Tree, mesh: Mesh) -> Tree:
    """Returns a NamedSharding for every parameter of a tree of arrays or shapes."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: NamedSharding(mesh, spec_of(backbone, path_of(keys), x.shape, mesh)), params
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays that every device holds completely."""
    return NamedSharding(mesh, P())


def gather_tables(backbone: Backbone, params: Tree, mesh: Mesh) -> Tree:
    """Constrains embedding tables to be split only over "tensor", for lookups within a computation.

    With a table that is also split along its width, XLA would copy the whole table for a lookup.
    """
    flat = flatten_dict(params, sep="/")
    for path in backbone.tables:
        spec = P(spec_of(backbone, path, flat[path].shape, mesh)[0], None)
        flat[path] = jax.lax.with_sharding_constraint(flat[path], NamedSharding(mesh, spec))
    return unflatten_dict(flat, sep="/")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of the arrays of a batch: the first axis is split over "data" and "fsdp"."""
    return NamedSharding(mesh, P(("data", "fsdp")))


def batch_shards(mesh: Mesh) -> int:
    """Returns the number of parts into which a batch is split, the size of "data" times the size of "fsdp"."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def split_batch(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Constrains an array within a computation to the sharding of batches."""
    return jax.lax.with_sharding_constraint(x, batch_sharding(mesh))


def own_rows(mesh: Mesh, rows: int) -> frozenset[int]:
    """Returns the indices of those among `rows` rows of a batch that are on devices of this process."""
    places = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    return frozenset(row for place in places if place for row in range(*place[0].indices(rows)))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts a batch on the devices, split over "data" and "fsdp".

    Every process passes arrays of the whole batch; each device receives only its rows.
    """
    sharding = batch_sharding(mesh)
    return {key: jax.make_array_from_process_local_data(sharding, x, x.shape) for key, x in batch.items()}


def put_tree(tree: Tree, shardings: Tree) -> Tree:
    """Puts a tree of whole arrays, which every process has, on the devices; each device receives only its part."""

    def put(x: ArrayLike, sharding: NamedSharding) -> jax.Array:
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda place: whole[place])

    return jax.tree.map(put, tree, shardings)


def named_device(device: jax.Device) -> contextlib.AbstractContextManager[object]:
    """Returns a context manager for tracing and lowering, in which Pallas knows the type of an absent device."""
    if device in jax.devices():
        return contextlib.nullcontext()
    named = AbstractDevice(device_kind=device.device_kind, num_cores=None, platform=device.platform)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=named))
