"""Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685): a weight matrix W is kept, and A B beside it is trained.

The factors lie beside their kernel: "query/kernel" [in, out], "query/lora_a" [in, rank], "query/lora_b" [rank, out].
B begins as zero, so that factors just added change nothing. There is no other scale than the learning rate.
"""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from pipejax.system import Tree

A, B = "lora_a", "lora_b"
ADAPTED = re.compile(r"(encoder|decoder)/.*/kernel")  # of attention and feed-forward; no embedding, no head


def is_factor(path: str) -> bool:
    """Whether the parameter of this path is one of a pair of factors."""
    return path.endswith((f"/{A}", f"/{B}"))


def add(params: Tree, rank: int, key: jax.Array, is_trained: Callable[[str], bool] = lambda path: True) -> Tree:
    """The parameters with fresh factors beside each adapted kernel.

    Args:
      params: a nested dict.
      rank: of the factors; 0: none.
      key: of the random factors.
      is_trained: whether the parameter of a path is trained; the others get none.
    """
    if not rank:
        return params
    flat = flatten_dict(params, sep="/")
    for number, path in enumerate(sorted(path for path in flat if ADAPTED.fullmatch(path))):
        width, features = flat[path].shape
        stem, own = path.removesuffix("/kernel"), jax.random.fold_in(key, number)
        if not is_trained(f"{stem}/{A}"):
            continue
        flat[f"{stem}/{A}"] = jax.random.normal(own, (width, rank)) * width**-0.5
        flat[f"{stem}/{B}"] = jnp.zeros((rank, features))
    return unflatten_dict(flat, sep="/")


def merge_factors(params: Tree) -> Tree:
    """The parameters of the T5 that those with factors are: W + A B in place of all three, on every device alike."""
    flat = flatten_dict(params, sep="/")
    for path in [path for path in flat if path.endswith(f"/{A}")]:
        stem = path.removesuffix(f"/{A}")
        flat[f"{stem}/kernel"] = flat[f"{stem}/kernel"] + jnp.dot(
            flat.pop(path), flat.pop(f"{stem}/{B}"), precision="highest"
        )
    return unflatten_dict(flat, sep="/")
