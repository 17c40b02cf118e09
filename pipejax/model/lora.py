"""Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685): a weight matrix W is kept, and A B beside it is trained.

The factors lie beside their kernel: "query/kernel" [in, out], "query/lora_a" [in, rank], "query/lora_b" [rank, out].
B begins as zero, so that factors just added change nothing. There is no other scale than the learning rate.

Where several adapters share one base, the factors have an axis more, of the adapters: "lora_a" [adapters + 1, in,
rank], whose first is zeros, for none. For a batch the axis is that of its examples.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
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
    """The parameters of the T5 that those with factors are: W + A B in place of all three, on every device alike.

    Factors of several adapters stay.
    """
    flat = flatten_dict(params, sep="/")
    for path in [path for path, x in flat.items() if path.endswith(f"/{A}") and x.ndim == 2]:
        stem = path.removesuffix(f"/{A}")
        flat[f"{stem}/kernel"] = flat[f"{stem}/kernel"] + jnp.dot(
            flat.pop(path), flat.pop(f"{stem}/{B}"), precision="highest"
        )
    return unflatten_dict(flat, sep="/")


def stack(params: Tree, adapters: Sequence[Mapping[str, jax.Array]]) -> Tree:
    """The parameters with the factors of several adapters beside their kernels.

    Smaller ranks are filled up with zeros, and so is all of an adapter that has no factors of a kernel.

    Args:
      params: of the base, a nested dict.
      adapters: the factors of each, by path.
    """
    flat = dict(flatten_dict(params, sep="/"))
    for path in sorted({path for factors in adapters for path in factors}):
        known = [factors[path] for factors in adapters if path in factors]
        shape = [max(sizes) for sizes in zip(*(x.shape for x in known), strict=True)]
        stacked = np.zeros((len(adapters) + 1, *shape), np.float32)
        for own, factors in zip(stacked[1:], adapters, strict=True):
            if (x := factors.get(path)) is not None:
                own[: x.shape[0], : x.shape[1]] = x
        flat[path] = jnp.asarray(stacked)
    return unflatten_dict(flat, sep="/")


def is_stacked(params: Tree) -> bool:
    """Whether the parameters hold the factors of several adapters."""
    return any(is_factor(path) and x.ndim == 3 for path, x in flatten_dict(params, sep="/").items())


def choose(params: Tree, adapter: jax.Array | None) -> Tree:
    """The parameters for a batch whose examples have these adapters, i32 [B]; None: there are no adapters."""
    if adapter is None:
        return params
    flat = flatten_dict(params, sep="/")
    return unflatten_dict({path: x[adapter] if is_factor(path) else x for path, x in flat.items()}, sep="/")
