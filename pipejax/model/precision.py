"""The dtype of a computation, and what float32 means in it."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.model.backbone import VECTORS
from pipejax.system import Tree


def compute_dtype(name: str) -> jnp.dtype:
    """The dtype of that name; "auto" is bfloat16 where the hardware has it, float32 on a CPU."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def precision(dtype: DTypeLike) -> contextlib.AbstractContextManager[object]:
    """Around the tracing of a model of that dtype: float32 means float32, of whatever is multiplied.

    By JAX's default a GPU rounds it to TF32, and a TPU to bfloat16.
    """
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else contextlib.nullcontext()


def cast_params(params: Tree, dtype: DTypeLike) -> Tree:
    """Parameters in the compute dtype, so that decoding does not read float32; norms and biases stay float32."""

    def cast(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return x if name.endswith(VECTORS) else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
