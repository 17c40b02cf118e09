"""Hash functions for fingerprints and dropout: the positions of an array's elements, and a 32-bit mixer."""

import jax
import jax.numpy as jnp

Array = jax.Array
GOLDEN = 0x9E3779B9  # 2**32 / golden ratio: its multiples mod 2**32 spread evenly


def places(shape: tuple[int, ...]) -> Array:
    """Returns the position of each element in row-major order mod 2^32, u32 of this shape."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * jnp.uint32(size & 0xFFFFFFFF) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return place


def mix(x: Array) -> Array:
    """Applies the 32-bit finalizer of MurmurHash3 (Appleby 2011), u32 -> u32.

    Each bit of x affects every bit of the result.
    """
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(multiplier)
    return x ^ (x >> 16)
