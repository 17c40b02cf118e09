"""The dtype of a computation and the precision of its matrix products."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.model.backbone import VECTORS
from pipejax.system import Tree


def compute_dtype(name: str) -> jnp.dtype:
    """Returns the dtype with this name; "auto" is float32 if JAX's default backend is a CPU, otherwise bfloat16."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def precision(dtype: DTypeLike) -> contextlib.AbstractContextManager[object]:
    """Returns a context manager in which a model is traced.

    If the dtype is float32, matrix products in its block are computed in full float32. By JAX's default, a GPU rounds
    the factors of float32 products to TF32, and a TPU to bfloat16.
    """
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else contextlib.nullcontext()


def cast_params(params: Tree, dtype: DTypeLike) -> Tree:
    """Casts weight matrices to the compute dtype, so that decoding reads fewer bytes. Norms and biases stay float32."""

    def cast(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return x if name.endswith(VECTORS) else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
