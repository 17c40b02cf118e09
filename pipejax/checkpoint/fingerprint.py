"""Fingerprints of arrays: exact integers that depend on the bits, not on the mesh, and that reveal a changed bit."""

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax.model.backbone import ENCODER
from pipejax.model.sharding import path_of
from pipejax.system import Tree
from pipejax.system.hashing import GOLDEN, mix, places

Array = jax.Array
Fingerprints = dict[str, list[Any]]  # path -> [dtype, shape, weighted sum, mixed sum]


def _words(x: Array) -> Array:
    """Returns the elements' bits as u32, one word per element.

    Raises:
      ValueError: an element has more than 32 bits.
    """
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = x.dtype.itemsize * 8
    if width not in (8, 16, 32):
        raise ValueError(f"fingerprint: found dtype {x.dtype}; expected at most 32 bits per element")
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{width}")).astype(jnp.uint32)


def _sums(x: Array) -> Array:
    """Returns two sums mod 2^32 over the elements, u32 [2].

    A sum does not depend on the order in which its terms are added, and therefore not on the mesh.

    The first sum weights each word by an odd number made of its position, so that one changed bit always changes the
    sum. The second sum hashes word and position, so that changes that cancel in the first sum rarely cancel in the
    second.
    """
    position, words = places(x.shape), _words(x)
    terms = words * (2 * position + 1), mix(words ^ (position * jnp.uint32(GOLDEN)))
    if x.ndim > 1:  # reducing the two sums together, first over axis 0, is several times faster on a CPU
        zeros = jnp.uint32(0), jnp.uint32(0)
        terms = jax.lax.reduce(terms, zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), (0,))
    return jnp.stack([term.sum(dtype=jnp.uint32) for term in terms])


@functools.cache
def _compiled_sums(mesh: Mesh | None) -> Callable[[Array], Array]:
    """Returns the compiled `_sums`; with a mesh, the result is replicated, so that every process has the sums."""
    return jax.jit(_sums, out_shardings=NamedSharding(mesh, P())) if mesh else jax.jit(_sums)


def _mesh_of(x: object) -> Mesh | None:
    sharding = getattr(x, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def fingerprints(tree: Tree) -> Fingerprints:
    """Returns the fingerprint of every array of a tree, by path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    # Dispatches all computations before the first result is fetched.
    numbers = [_compiled_sums(_mesh_of(x))(x) for _, x in leaves]
    return {
        path_of(keys): [str(x.dtype), list(x.shape), *(int(n) for n in np.asarray(pair))]
        for (keys, x), pair in zip(leaves, numbers, strict=True)
    }


def shapes_of(tree: Tree) -> Fingerprints:
    """Returns the dtype and shape of every array of a tree, by path: the first half of a fingerprint."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_of(keys): [str(x.dtype), list(x.shape)] for keys, x in leaves}


def digest(prints: Fingerprints) -> str:
    """Returns a digest of the fingerprints of a whole tree: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(prints, sort_keys=True).encode()).hexdigest()[:16]


def encoder_digest(prints: Fingerprints) -> str:
    """Returns a digest of the fingerprints of the parameters on which the outputs of the encoder depend."""
    return digest({path: found for path, found in prints.items() if path.startswith(ENCODER)})


def first_difference(found: Fingerprints, expected: Fingerprints) -> str | None:
    """Describes the first array, by path, whose fingerprint differs; None if all are equal."""
    for path in sorted(found.keys() | expected.keys()):
        if path not in found:
            return f"array {path} is missing"
        if path not in expected:
            return f"array {path} is unexpected"
        if found[path] != expected[path]:
            if found[path][:2] != expected[path][:2]:
                was, now = (f"{p[path][0]} {p[path][1]}" for p in (expected, found))
                return f"array {path}: found {now}; expected {was}"
            return f"array {path} does not match its fingerprint"
    return None
