"""Weights stored in fewer bytes than the compute dtype: bfloat16, or int8 with a float32 scale for each output.

Only weight matrices are rounded. Norms, biases, activations and sums have the dtypes of the computation. The scale of
an int8 matrix is a parameter beside it: "query/kernel" [in, out] and "query/scale" [out], "shared/embedding" [V, D] and
"shared/scale" [V]. A weight is the int8 value times the scale of its output.

A scale has 17 significant bits, so its product with an int8 value is exact in float32. So quantising dequantised
weights again (`cast_or_quantize` after `dequantize`) gives the same int8 values and scales, and a checkpoint with int8
weights decodes exactly like its original with `decode.weights` = int8.
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
SCALE = "scale"  # the name of the scale beside a kernel or table
_INPUTS = {"kernel": 0, "embedding": 1}  # name of a matrix -> the axis of its inputs, over which a scale is shared
_BITS = 16  # the mantissa bits of a scale, without the implicit leading one


def quantize(weights: Array, axis: int) -> tuple[Array, Array]:
    """Rounds a weight matrix to int8, with the largest magnitude of each output mapped to 127.

    Args:
      weights: a matrix of any float dtype.
      axis: the axis of the inputs.

    Returns:
      i8 of the same shape, and the f32 scale of each output.
    """
    weights = weights.astype(jnp.float32)
    scale = jnp.abs(weights).max(axis=axis, keepdims=True) * np.float32(1 / 127)
    scale = jax.lax.reduce_precision(scale, exponent_bits=8, mantissa_bits=_BITS)
    rounded = jnp.round(weights / jnp.where(scale == 0, 1, scale))
    return rounded.astype(jnp.int8), jnp.squeeze(scale, axis)


def scale_path(path: str) -> str | None:
    """Returns the path of the scale that belongs to a parameter if it is int8; None if it is not a weight matrix."""
    module, _, name = path.rpartition("/")
    if name not in _INPUTS or path.endswith(VECTORS):
        return None
    return f"{module}/{SCALE}" if module else SCALE


def cast_or_quantize(params: Tree, dtype: DTypeLike, weights: str) -> Tree:
    """Casts or quantises the parameters of a model for decoding.

    Args:
      params: the parameters; int8 matrices with scales stay as they are if `weights` is "int8".
      dtype: the compute dtype.
      weights: the storage of weight matrices: "bfloat16", "int8", or another value for the compute dtype.
    """
    if weights == "bfloat16":
        return cast_params(params, jnp.bfloat16)
    if weights != "int8":
        return cast_params(params, dtype)
    flat = flatten_dict(params, sep="/")
    for path in list(flat):
        if (scale := scale_path(path)) and scale not in flat:
            flat[path], flat[scale] = quantize(flat[path], _inputs(path))
    return unflatten_dict(flat, sep="/")


def dequantize(params: Tree) -> Tree:
    """Returns the float32 values of the parameters of a model or of a part of it.

    int8 matrices are multiplied by their scales, and the result has no scales.
    """
    flat = flatten_dict(params, sep="/")
    scales = {path: scale for path in flat if (scale := scale_path(path)) in flat}
    for path, scale in scales.items():
        flat[path] = flat[path].astype(jnp.float32) * jnp.expand_dims(flat.pop(scale), _inputs(path))
    return jax.tree.map(lambda x: x.astype(jnp.float32), unflatten_dict(flat, sep="/"))


def is_int8(params: Tree) -> bool:
    """Returns whether all weight matrices among the parameters of a model or of a part of it are int8."""
    flat = flatten_dict(params, sep="/")
    return all(scale is None or scale in flat for scale in map(scale_path, flat))


def check_scales(where: str, dtypes: Mapping[str, str]) -> None:
    """Raises a UserError that begins with `where` unless exactly the int8 parameters have scales.

    `dtypes`: the name of each parameter's dtype, by path.
    """
    for path, dtype in sorted(dtypes.items()):
        has = scale_path(path) in dtypes
        if (dtype == "int8") != has:
            found, expected = ("with", "int8") if has else ("without", "one, or a float dtype")
            raise UserError(f"{where}: {path}", found=f"{dtype} {found} a scale", expected=expected)


def _inputs(path: str) -> int:
    """Returns the axis of the inputs of the matrix with this path."""
    return _INPUTS[path.rpartition("/")[2]]
