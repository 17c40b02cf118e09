"""Low-rank adaptation (Hu et al. 2021, arXiv 2106.09685): a weight matrix W is frozen, and factors A B are trained.

The layer computes x W + x A B. The factors are parameters beside their kernel: "query/kernel" [in, out], "query/lora_a"
[in, rank], "query/lora_b" [rank, out]. B is initialised to zero, so new factors do not change the outputs. There is no
scaling factor.

If several adapters share one base, their factors are concatenated along the rank. An additional parameter "lora_of"
[adapters + 1, rank] contains 1 where a component of the rank belongs to an adapter, else 0; row 0 is for examples
without an adapter and contains zeros. For a batch, `choose` replaces "lora_of" with one row for each example. Two
matrix products therefore compute all adapters, even if the examples of a batch have different adapters.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pipejax.system import Tree

A, B, OF = "lora_a", "lora_b", "lora_of"
ADAPTED = re.compile(r"(encoder|decoder)/.*/kernel")  # kernels of attention and feed-forward, not embedding or head


def is_factor(path: str) -> bool:
    """Returns whether the parameter with this path is a low-rank factor."""
    return path.endswith((f"/{A}", f"/{B}"))


def add(params: Tree, rank: int, key: jax.Array, is_trained: Callable[[str], bool] = lambda path: True) -> Tree:
    """Returns the parameters with newly initialised factors beside each adapted kernel.

    Args:
      params: the parameters of a model.
      rank: the rank of the factors; 0: no factors are added.
      key: the key of `jax.random`.
      is_trained: whether the factor with a path is trained; other kernels get no factors.
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
    """Returns the parameters with W + A B in place of W, A and B. Factors of several adapters are not merged.

    The products have the highest precision, so that the result is the same on every device.
    """
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
    """Returns the parameters with the concatenated factors of several adapters beside their kernels.

    Args:
      params: the parameters of the base.
      adapters: the factors of each adapter, by path. Adapter number n (from 1) is row n of "lora_of".
    """
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
    """Returns whether the parameters contain factors of several adapters."""
    return any(path.endswith(f"/{OF}") for path in flatten_dict(params, sep="/"))


def choose(params: Tree, adapter: jax.Array | None) -> Tree:
    """Returns the parameters for a batch, in which "lora_of" [B, rank] has the row of each example's adapter.

    Args:
      params: the parameters, from `stack`.
      adapter: i32 [B], the number of each example's adapter, 0 for none; None: `params` has no adapters.
    """
    if adapter is None:
        return params
    flat = flatten_dict(params, sep="/")
    return unflatten_dict({path: x[adapter] if path.endswith(f"/{OF}") else x for path, x in flat.items()}, sep="/")
