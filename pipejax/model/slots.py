"""Attention's mask and bias as vectors: where queries and keys stand, instead of an array of queries by keys.

Shapes: B batch, N slots, H heads, T buckets, W the distance from which on there is one bucket.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
from jax.sharding import NamedSharding

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The way in which attention runs in blocks. Static under jit."""

    split: NamedSharding | None = None  # of a batch over devices, each of which attends for its own examples
    interpret: bool = False  # as ordinary computations, on any device, slowly


@flax.struct.dataclass
class Slots:
    """Where queries or keys stand.

    A query sees the keys of its group that have neither a higher row nor a later time (paper section 3.2, eq. 4);
    without rows and times all keys of its group. Nobody sees a key whose group is negative, and such a query sees none.
    """

    group: Any  # i32 [B, N], as all of them
    row: Any = None
    time: Any = None
    position: Any = None  # for the bias


@flax.struct.dataclass
class Distances:
    """A bias by the difference of positions, query - key."""

    table: Array  # f32 [T, H]
    bucket: Any  # i32 [2 W + 1], of differences from -W to W; those beyond have the same as -W or W


@flax.struct.dataclass
class Seen:
    """In the place of an additive bias: `pipejax.kernels.block_attention` makes it where it needs it."""

    queries: Slots
    keys: Slots
    distances: Distances | None = None
    blocks: Blocks = flax.struct.field(pytree_node=False, default=Blocks())
