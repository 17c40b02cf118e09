"""Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685): a weight matrix W is kept, and A B beside it is trained.

The factors lie beside their kernel: "query/kernel" [in, out], "query/lora_a" [in, rank], "query/lora_b" [rank, out].
B begins as zero, so that factors just added change nothing. There is no other scale than the learning rate.

Where several adapters share one base, their factors lie end to end along the rank, and beside them "lora_of"
[adapters + 1, rank] says by 1 and 0 which adapter has which part; the first row, of none, is zeros. For a batch it has
a row for each example. So all adapters are computed in two products, whoever has which.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pipejax.system import Tree

A, B, OF = "lora_a", "lora_b", "lora_of"
ADAPTED = re.compile(r"(encoder|decoder)/.*/kernel")  # of attention and feed-forward; no embedding, no head


def is_factor(path: str) -> bool:
    """Whether the parameter of this path is one of a pair of factors."""
    return path.endswith((f"/{A}", f"/{B}"))


def add(params: Tree, rank: int, key: jax.Array, is_trained: Callable[[str], bool] = lambda path: True) -> Tree:
    """The parameters with fresh factors of that rank (0: none) beside each adapted kernel."""
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
    """Parameters with W + A B in place of all three, on every device alike; factors of several adapters stay."""
    flat = flatten_dict(params, sep="/")
    for path in [path for path in flat if path.endswith(f"/{A}")]:
        stem = path.removesuffix(f"/{A}")
        if f"{stem}/{OF}" in flat:
            continue
        flat[f"{stem}/kernel"] = flat[f"{stem}/kernel"] + jnp.dot(
            flat.pop(path), flat.pop(f"{stem}/{B}"), precision="highest"
        )
    return unflatten_dict(flat, sep="/")


def stack(params: Tree, adapters: Sequence[Mapping[str, jax.Array]]) -> Tree:
    """The parameters with the factors of several adapters beside their kernels."""
    flat = dict(flatten_dict(params, sep="/"))
    for stem in sorted({path.removesuffix(f"/{A}") for own in adapters for path in own if path.endswith(f"/{A}")}):
        owners = [number for number, own in enumerate(adapters, 1) if f"{stem}/{A}" in own]
        for name, axis in ((A, 1), (B, 0)):
            flat[f"{stem}/{name}"] = jnp.concatenate([adapters[n - 1][f"{stem}/{name}"] for n in owners], axis)
        ranks = [adapters[n - 1][f"{stem}/{A}"].shape[1] for n in owners]
        numbers = np.arange(len(adapters) + 1)[:, None]
        flat[f"{stem}/{OF}"] = jnp.asarray(numbers == np.repeat(owners, ranks), jnp.float32)
    return unflatten_dict(flat, sep="/")


def is_stacked(params: Tree) -> bool:
    """Whether the parameters hold the factors of several adapters."""
    return any(path.endswith(f"/{OF}") for path in flatten_dict(params, sep="/"))


def choose(params: Tree, adapter: jax.Array | None) -> Tree:
    """The parameters for a batch whose examples have these adapters, i32 [B]; None: there are no adapters."""
    if adapter is None:
        return params
    flat = flatten_dict(params, sep="/")
    return unflatten_dict({path: x[adapter] if path.endswith(f"/{OF}") else x for path, x in flat.items()}, sep="/")
