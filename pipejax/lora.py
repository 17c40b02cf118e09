"""Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685): a weight matrix W is kept, and A B beside it is trained.

The factors lie beside their kernel: "query/kernel" [in, out], "query/lora_a" [in, rank], "query/lora_b" [rank, out].
B begins as zero, so that factors just added change nothing. There is no other scale than the learning rate.
"""

import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

A, B = "lora_a", "lora_b"
ADAPTED = re.compile(r"(encoder|decoder)/.*/kernel")  # of attention and feed-forward; no embedding, no head


class Linear(nn.Module):
    """x W, plus x A B where the parameters hold factors."""

    features: int
    dtype: DTypeLike
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] from [..., in]."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        x = x.astype(self.dtype)
        answer = jnp.dot(x, kernel.astype(self.dtype))
        if not self.has_variable("params", A):
            return answer
        a: jax.Array = self.get_variable("params", A)
        b: jax.Array = self.get_variable("params", B)
        return answer + jnp.dot(jnp.dot(x, a.astype(self.dtype)), b.astype(self.dtype))


def is_factor(path: str) -> bool:
    """Whether the parameter of this path is one of a pair of factors."""
    return path.endswith((f"/{A}", f"/{B}"))


def add(params: Any, rank: int, key: jax.Array) -> Any:
    """The parameters with fresh factors of that rank (0: none) beside each adapted kernel."""
    if not rank:
        return params
    flat = flatten_dict(params, sep="/")
    for number, path in enumerate(sorted(path for path in flat if ADAPTED.fullmatch(path))):
        width, features = flat[path].shape
        stem, own = path.removesuffix("/kernel"), jax.random.fold_in(key, number)
        flat[f"{stem}/{A}"] = jax.random.normal(own, (width, rank)) * width**-0.5
        flat[f"{stem}/{B}"] = jnp.zeros((rank, features))
    return unflatten_dict(flat, sep="/")


def merge(params: Any) -> Any:
    """The parameters of the T5 that those with factors are: W + A B in place of all three."""
    flat = flatten_dict(params, sep="/")
    for path in [path for path in flat if path.endswith(f"/{A}")]:
        stem = path.removesuffix(f"/{A}")
        flat[f"{stem}/kernel"] = flat[f"{stem}/kernel"] + jnp.dot(flat.pop(path), flat.pop(f"{stem}/{B}"))
    return unflatten_dict(flat, sep="/")
