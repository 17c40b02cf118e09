"""Weights in fewer bytes than the computation has: bfloat16, or int8 with a float32 scale for each output.

Only weights are rounded: norms, biases, activations and sums are those of the computation. An int8 matrix has its scale
beside it: "query/kernel" [in, out] and "query/scale" [out], "shared/embedding" [V, D] and "shared/scale" [V].

A scale has 17 significant bits, so whole number times scale is exact in float32. Hence `hold` rounds what `whole` gives
back to the same numbers and scales again, and a checkpoint with int8 weights decodes as its original does in int8.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from pipejax.model.backbone import VECTORS
from pipejax.model.precision import cast_params
from pipejax.system import Tree
from pipejax.system.errors import UserError

Array = jax.Array
SCALE = "scale"  # of a module's kernel or table, beside it
_INPUTS = {"kernel": 0, "embedding": 1}  # the axis of the inputs, by what a matrix is called
_BITS = 16  # of a scale, after the first one


def quantize(weights: Array, axis: int) -> tuple[Array, Array]:
    """int8 of the same shape, and the f32 scale of each output: the largest magnitude along the inputs is 127."""
    weights = weights.astype(jnp.float32)
    scale = jnp.abs(weights).max(axis=axis, keepdims=True) * np.float32(1 / 127)
    scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=_BITS)
    rounded = jnp.round(weights / jnp.where(scale == 0, 1, scale))
    return rounded.astype(jnp.int8), jnp.squeeze(scale, axis)


def scale_path(path: str) -> str | None:
    """Where the scale of this parameter is if it is int8; None of what is no weight matrix and never int8."""
    module, _, name = path.rpartition("/")
    if name not in _INPUTS or path.endswith(VECTORS):
        return None
    return f"{module}/{SCALE}" if module else SCALE


def hold(params: Tree, dtype: DTypeLike, weights: str) -> Tree:
    """Parameters as a T5 of that dtype computes with them, its weights held in fewer bytes."""
    if weights == "bfloat16":
        return cast_params(params, jnp.bfloat16)
    if weights != "int8":
        return cast_params(params, dtype)
    flat = flatten_dict(params, sep="/")
    for path in list(flat):
        if (scale := scale_path(path)) and scale not in flat:
            flat[path], flat[scale] = quantize(flat[path], _inputs(path))
    return unflatten_dict(flat, sep="/")


def whole(params: Tree) -> Tree:
    """The float32 parameters that those of a T5 or a part of it stand for, whatever they are held in."""
    flat = flatten_dict(params, sep="/")
    scales = {path: scale for path in flat if (scale := scale_path(path)) in flat}
    for path, scale in scales.items():
        flat[path] = flat[path].astype(jnp.float32) * jnp.expand_dims(flat.pop(scale), _inputs(path))
    return jax.tree.map(lambda x: x.astype(jnp.float32), unflatten_dict(flat, sep="/"))


def is_int8(params: Tree) -> bool:
    """Whether all weight matrices of a T5 or a part of it are int8."""
    flat = flatten_dict(params, sep="/")
    return all(scale is None or scale in flat for scale in map(scale_path, flat))


def check_scales(where: str, dtypes: Mapping[str, str]) -> None:
    """Raises a UserError that begins with `where` unless exactly the int8 parameters, by path, have scales."""
    for path, dtype in sorted(dtypes.items()):
        has = scale_path(path) in dtypes
        if (dtype == "int8") != has:
            found, expected = ("with", "int8") if has else ("without", "one, or a float dtype")
            raise UserError(f"{where}: {path}: found {dtype} {found} a scale; expected {expected}")


def _inputs(path: str) -> int:
    return _INPUTS[path.rpartition("/")[2]]
