"""What fingerprints and dropout share: numbered places, and a mixer of 32 bits."""

import jax
import jax.numpy as jnp

Array = jax.Array
GOLDEN = 0x9E3779B9  # 2**32 over the golden ratio: multiples of it spread evenly


def places(shape: tuple[int, ...]) -> Array:
    """u32 of that shape: each element's place in row-major order, mod 2**32, whatever mesh the array lies on."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        place = place * jnp.uint32(size & 0xFFFFFFFF) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return place


def mix(x: Array) -> Array:
    """The finalizer of MurmurHash3 (Appleby 2011) on u32: each bit of x decides about every bit of the result."""
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(multiplier)
    return x ^ (x >> 16)
