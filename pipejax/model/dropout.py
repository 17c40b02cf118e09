"""Dropout whose mask is a hash of each element's index, computed where it is used and never stored.

JAX's generator writes arrays of up to 28 bytes for each element of a mask, so that a training step on a CPU took 1.6
times as long. Here the random bits of an element are a function of its index and a seed. They are computed in the same
loop as the product that they mask, and computed again in the backward pass. The hash is not cryptographic.

Definition of the bits (`VERSION`):

- A site (a module with dropout) has a seed of two words, drawn from the rng of the step by stack, layer and module.
- A line consists of the elements of an array along its last axis: a token's features, or a query's weights for all
  keys. Its hash is computed from the example's number in the whole batch, the token's index in its example, and the
  head. So a mask does not depend on the mesh, on the parts of a batch (`train.accumulate`), on packing or on padding.
- Columns c and c + 8 of each block of 16 share a hash of 32 bits: the first eight columns take the low half, the others
  the high half. Columns that are keys are counted from the first key of the query's example. A thread of a tensor core
  holds results that are 8 columns or 8 rows apart, so in tiles [queries, keys] and in tiles [keys, queries] it needs
  only one hash for two elements. Compilers find this shared hash, except if a row has slots of several examples.
- An element is dropped if its 16 bits, as a number, are less than `threshold(rate)`: rates are multiples of 2**-16.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.system.hashing import GOLDEN, mix, places

Array = jax.Array
VERSION = 2  # the version of the definition above; version 1 hashed each column, and numbered lines by array index
# The name of the rng from which seeds are drawn. Its key is the same for all parts of a batch, since masks also depend
# on the numbers of the examples. Without it seeds are drawn from the rng "dropout", whose key differs in each part of a
# batch, so it also serves modules whose masks do not depend on examples.
STREAM = "batch_dropout"


@flax.struct.dataclass
class Lines:
    """The hashes of the lines of an array."""

    hashes: Array  # u32 [...], the array's shape without its last axis
    first: Array | None = None  # u32 [...], the index of the column that counts as column 0; None: 0
    multiple: int = flax.struct.field(pytree_node=False, default=1)  # a common divisor of all values of `first`


class Numbering(NamedTuple):
    """The keys (see `place`) of a batch's tokens, and the beginnings of examples that share a sequence."""

    sources: Array  # u32 [B, L], the keys of source tokens
    slots: Array  # u32 [G, N], the keys of target slots
    first_slot: Array | None  # u32 [G, N], the first slot of each slot's example; None: one example per sequence
    first_source: Array | None  # u32 [G, N], the first token of its source in the sequence's joined sources, or None


_numbering: ContextVar[Numbering | None] = ContextVar("numbering", default=None)


def place(number: Array, at: Array) -> Array:
    """Returns u32, the key of a token: a mix of the number of its example in the batch and its index in the example."""
    return number.astype(jnp.uint32) * jnp.uint32(GOLDEN) + at.astype(jnp.uint32)


@contextlib.contextmanager
def numbered(numbers: Array, length: int, example: Array) -> Iterator[None]:
    """Returns a context manager in which models are traced with lines numbered by example.

    Args:
      numbers: i32 [B], the number of each source's example in the whole batch.
      length: L, the padded length of the sources.
      example: i32 [G, N], the index of each slot's example among the B / G examples of its row. The slots of an example
        are adjacent.
    """
    groups, width = example.shape
    of_sources = place(numbers[:, None], jnp.arange(length)[None])
    first_slot = first_source = None
    at = jnp.broadcast_to(jnp.arange(width), example.shape)
    owner = numbers[:, None]
    if len(numbers) > groups:
        begins = jnp.diff(example, axis=1, prepend=-1) != 0
        first_slot = jax.lax.cummax(jnp.where(begins, at, 0), axis=1)
        first_source, at = example * length, at - first_slot
        owner = jnp.take_along_axis(numbers.reshape(groups, -1), example, axis=1)
    token = _numbering.set(Numbering(of_sources, place(owner, at), first_slot, first_source))
    try:
        yield
    finally:
        _numbering.reset(token)


def make_seed(key: Array) -> Array:
    """Returns u32 [2], a seed drawn from a key of `jax.random`."""
    return jax.random.bits(key, (2,), jnp.uint32)


def seed_of(module: Any) -> Array:
    """Returns u32 [2], the seed of the site `module`, drawn from its rng `STREAM`, or from "dropout" if it has none."""
    return make_seed(module.make_rng(STREAM if module.has_rng(STREAM) else "dropout"))


def lines(seed: Array, shape: tuple[int, ...], *, over_sources: bool = False) -> Lines:
    """Returns the lines of an array whose first axes are batch and tokens.

    Args:
      seed: u32 [2].
      shape: the shape of the array without its last axis.
      over_sources: whether the columns are the tokens of a row's sources; otherwise they are the slots of the same row.
    """
    near, known, first, multiple = shape[:2], _numbering.get(), None, 1
    if known and near == known.slots.shape:
        at, first = known.slots, known.first_source if over_sources else known.first_slot
        multiple = known.sources.shape[1] if over_sources else 1
    elif known and near == known.sources.shape:
        at = known.sources
    else:
        axes = [jax.lax.broadcasted_iota(jnp.uint32, near, axis) for axis in range(len(near))]
        at = place(*axes) if len(axes) == 2 else sum(axes, jnp.zeros(near, jnp.uint32))
    hashes = mix(mix(at + seed[0]) ^ seed[1])
    if more := shape[2:]:
        hashes = for_head(hashes.reshape(*near, *(1 for _ in more)), places(more))
    return Lines(hashes, first, multiple)


def for_head(hashes: Array, head: Array) -> Array:
    """Returns u32, the hashes of lines for single heads, from the hashes of queries and the numbers of the heads."""
    return mix(hashes + (head.astype(jnp.uint32) + 1) * jnp.uint32(GOLDEN))


def of_heads(lines: Lines, heads: int) -> Lines:
    """Returns the lines [B, H, Q] of the weights of H heads, from the lines [B, Q] of their queries."""
    hashes = for_head(lines.hashes[:, None], jnp.arange(heads)[:, None])
    if lines.first is None:
        return Lines(hashes)
    first = lines.first[:, None].astype(jnp.uint32)
    if lines.multiple % 16:
        return Lines(hashes, jnp.broadcast_to(first, hashes.shape))
    return Lines(hashes - first // 16 * 8 * jnp.uint32(GOLDEN))  # gives the same bits with columns counted from 0


def threshold(rate: float) -> int:
    """Returns the number of 16-bit values that drop an element: at least 1 and less than 2**16, for a rate above 0."""
    return min(max(round(rate * 2**16), 1), 2**16 - 1) if rate else 0


def share_kept(rate: float) -> float:
    """Returns the probability that an element is kept."""
    return 1 - threshold(rate) / 2**16


def keeps(hashes: Array, columns: Array | np.ndarray, rate: float) -> Array:
    """Returns bool, False for dropped elements. The hashes of lines and the column numbers, both u32, are broadcast."""
    one = np.uint32(1)
    pair = ((columns >> one * 4) * (one * 8) + (columns & one * 7)) * (one * GOLDEN)
    # The product moves the column's half to the top. A shift would be slower, since CPUs shift all elements of a vector
    # by the same number of bits.
    bits = mix(hashes + pair) * (one << (one * 16 - (columns & one * 8) * (one * 2)))
    return bits >= jnp.uint32(threshold(rate) << 16)


def mask_of(lines: Lines, columns: int, rate: float) -> Array:
    """Returns bool [..., C], the mask of C = `columns` columns of each line: False with probability `rate`."""
    # A constant, so that the compiler finds the columns that share a hash.
    column: Array | np.ndarray = np.arange(columns, dtype=np.uint32)
    if lines.first is not None:
        column = column - lines.first[..., None].astype(jnp.uint32)
    return keeps(lines.hashes[..., None], column, rate)


def mask(seed: Array, shape: tuple[int, ...], rate: float) -> Array:
    """Returns bool, the mask of an array of the given shape: False with probability `rate`."""
    return mask_of(lines(seed, shape[:-1]), shape[-1], rate)


def zero_dropped(x: Array, lines: Lines, rate: float) -> Array:
    """Returns x with zeros in place of dropped elements, without rescaling."""
    # `jax.lax.scan` would expand a constant zero to an array of the size of x before its loop, and every layer would
    # read this array. So the zero is computed from `hashes`, one for each line: a single one would have to be sent to
    # all devices.
    zero = (lines.hashes & jnp.uint32(0))[..., None].astype(x.dtype)
    return jnp.where(mask_of(lines, x.shape[-1], rate), x, zero)


def drop(x: Array, seed: Array, rate: float) -> Array:
    """Returns x after dropout: each element is 0 with probability `rate`, or else divided by `share_kept(rate)`."""
    return _drop(x, Lines(lines(seed, x.shape[:-1]).hashes), rate)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _drop(x: Array, lines: Lines, rate: float) -> Array:
    # In float32, since bfloat16 cannot represent 1 - rate exactly.
    return zero_dropped((x.astype(jnp.float32) * (1 / share_kept(rate))).astype(x.dtype), lines, rate)


def _forward(x: Array, lines: Lines, rate: float) -> tuple[Array, Lines]:
    return _drop(x, lines, rate), lines


def _backward(rate: float, lines: Lines, gradient: Array) -> tuple[Array, None]:
    return _drop(gradient, lines, rate), None


_drop.defvjp(_forward, _backward)
