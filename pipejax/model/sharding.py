"""Where arrays live: the device mesh, and a PartitionSpec for each parameter by the rules of its backbone.

Mesh axes: "data" splits batches; "fsdp" splits batches and parameters; "tensor" splits heads, feed-forward and
vocabulary.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.model.backbone import Backbone
from pipejax.system import Tree
from pipejax.system.errors import UserError


def make_mesh(data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices, or the first if the sizes name fewer; `data` = -1: all that the others leave."""
    devices, rest = devices or jax.devices(), fsdp * tensor
    if data == -1:
        if len(devices) % rest:
            raise UserError(f"mesh: found fsdp x tensor = {rest}; expected a divisor of the {len(devices)} devices")
        data = len(devices) // rest
    if data * rest > len(devices):
        raise UserError(
            f"mesh: found data x fsdp x tensor = {data * rest}; expected at most the {len(devices)} devices "
            "of this machine"
        )
    # Of the devices that are there to choose from: those that `plan` describes belong to processes of their own.
    if {device.process_index for device in devices[: data * rest]} != {device.process_index for device in devices}:
        raise UserError(
            f"mesh: found data x fsdp x tensor = {data * rest}; expected devices of each of the {jax.process_count()} "
            f"processes, {len(devices)} in all"
        )
    return jax.make_mesh(
        (data, fsdp, tensor),
        ("data", "fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
        devices=devices[: data * rest],
    )


def path_of(keys: tuple[Any, ...]) -> str:
    """A tree path as text, "encoder/norm/scale"."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def spec_of(backbone: Backbone, path: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The spec by the first rule that matches, without the axes that the dimension does not divide by."""
    for pattern, spec in backbone.sharding:
        if re.fullmatch(pattern, path):
            return P(
                *(
                    axis if axis and size % mesh.shape[axis] == 0 else None
                    for size, axis in zip(shape, spec + (None,) * len(shape), strict=False)
                )
            )
    raise UserError(f"{path}: found no rule; expected one in {type(backbone).__name__}.sharding")


def param_shardings(backbone: Backbone, params: Tree, mesh: Mesh) -> Tree:
    """A NamedSharding for every parameter of a tree of arrays or shapes."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: NamedSharding(mesh, spec_of(backbone, path_of(keys), x.shape, mesh)), params
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, P())


def gather_tables(backbone: Backbone, params: Tree, mesh: Mesh) -> Tree:
    """Parameters with tables split over "tensor" alone, as lookups need them: XLA would copy each whole."""
    flat = flatten_dict(params, sep="/")
    for path in backbone.tables:
        spec = P(spec_of(backbone, path, flat[path].shape, mesh)[0], None)
        flat[path] = jax.lax.with_sharding_constraint(flat[path], NamedSharding(mesh, spec))
    return unflatten_dict(flat, sep="/")


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of the arrays of a batch: split over data and fsdp by their first axis."""
    return NamedSharding(mesh, P(("data", "fsdp")))


def batch_shards(mesh: Mesh) -> int:
    """On how many devices a batch lies, each with rows of its own."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def split_batch(x: jax.Array, mesh: Mesh) -> jax.Array:
    """An array within a computation, laid out as batches are."""
    return jax.lax.with_sharding_constraint(x, batch_sharding(mesh))


def own_rows(mesh: Mesh, rows: int) -> frozenset[int]:
    """Which of so many rows of a batch are on devices of this process."""
    places = batch_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    return frozenset(row for place in places if place for row in range(*place[0].indices(rows)))


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """A batch, split over data and fsdp: every process has arrays of its whole size, and each device takes its rows."""
    sharding = batch_sharding(mesh)
    return {key: jax.make_array_from_process_local_data(sharding, x, x.shape) for key, x in batch.items()}


def put_tree(tree: Tree, shardings: Tree) -> Tree:
    """Arrays that every process holds whole, put where they belong: each device takes its part."""

    def put(x: Any, sharding: NamedSharding) -> jax.Array:
        whole = np.asarray(x)
        return jax.make_array_from_callback(whole.shape, sharding, lambda place: whole[place])

    return jax.tree.map(put, tree, shardings)
