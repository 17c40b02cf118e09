"""Weights in fewer bytes than the computation has: bfloat16, or int8 with a float32 scale for each output.

Only weights are rounded: norms, biases, activations and sums are those of the computation.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.model.t5 import cast_params

Array = jax.Array
SCALE = "scale"  # of a module's kernel or table, beside it


def quantize(weights: Array, axis: int) -> tuple[Array, Array]:
    """int8 of the same shape, and the f32 scale of each output: the largest magnitude along the inputs is 127."""
    weights = weights.astype(jnp.float32)
    scale = jnp.abs(weights).max(axis=axis, keepdims=True) / 127
    whole = jnp.round(weights / jnp.where(scale == 0, 1, scale))
    return whole.astype(jnp.int8), jnp.squeeze(scale, axis)


def hold(params: Any, dtype: DTypeLike, weights: str) -> Any:
    """Parameters as a T5 of that dtype computes with them, its weights held in fewer bytes.

    Args:
      params: of a T5 or a part of it.
      dtype: of the computation.
      weights: one of `pipejax.config.WEIGHTS`; "auto" and "float32": in the dtype of the computation.
    """
    if weights == "bfloat16":
        return cast_params(params, jnp.bfloat16)
    return _held(params) if weights == "int8" else cast_params(params, dtype)


def _held(params: Any) -> Any:
    if not isinstance(params, dict):
        return params
    held = {name: value if name == "relative_bias" else _held(value) for name, value in params.items()}
    for name, axis in (("kernel", 0), ("embedding", 1)):
        if name in params:
            held[name], held[SCALE] = quantize(params[name], axis)
    return held
