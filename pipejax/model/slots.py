"""The mask and bias of attention as vectors: coordinates of queries and keys instead of an array of queries by keys.

Attention in blocks (`pipejax.kernels.block_attention`) computes mask and bias of each block from these vectors.

Shapes: B batch, N slots, H heads, T buckets, W the distance from which on all distances share a bucket.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import numpy as np
from jax.sharding import NamedSharding

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Options of attention in blocks. Static under jit."""

    split: NamedSharding | None = None  # the sharding of a batch over devices; each attends for its examples
    interpret: bool = False  # whether the kernels run as ordinary JAX computations: on any device, but slowly

    @property
    def is_alone(self) -> bool:
        """Whether one device computes everything."""
        return self.split is None or self.split.mesh.size == 1


@flax.struct.dataclass
class Slots:
    """The coordinates of queries or keys; all arrays are i32 [B, N].

    A query sees the keys of its example that have neither a higher row nor a later time (paper section 3.2, eq. 4), and
    whose group is its own group or 0 (`grid.shares_group`). Without rows and times a query sees all keys of its
    example, and without groups the keys of all groups. A key with a negative example is seen by no query, and a query
    with a negative example sees no key.
    """

    example: Any  # the number of the example, in a packed array, to which a slot belongs; negative for padding
    row: Any = None
    time: Any = None
    position: Any = None  # the position that determines the bias
    group: Any = None  # the group of the slot's row; None: all rows are in group 0
    consecutive: bool = flax.struct.field(pytree_node=False, default=False)  # whether positions are 0, 1, 2, ...


@flax.struct.dataclass
class Distances:
    """An attention bias as a function of the difference of positions, query - key."""

    table: Array  # f32 [T, H], the bias of each bucket and head
    # i32 [2 W + 1], the buckets of differences from -W to W; larger differences are clipped to this range
    bucket: Array | np.ndarray
    # f32 [H, 2 W + 1], the bias of each of these differences; `block_attention.planned` fills it in
    lines: Array | None = None


@flax.struct.dataclass
class Seen:
    """The vectors that replace an additive bias: `pipejax.kernels.block_attention` computes the bias of each block."""

    queries: Slots
    keys: Slots
    distances: Distances | None = None
    blocks: Blocks = flax.struct.field(pytree_node=False, default=Blocks())
    plan: Any = None  # `block_attention.Plan`; None: `attend_in_blocks` computes it
