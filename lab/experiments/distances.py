"""Two alternatives to the paper's distance |t1 - t2| + |i1 - i2|, as a method and a backbone.

The paper does not define whether t is the absolute time-step, as in pipejax, or the place within the row. It also does
not discuss the order of the finished text as an alternative. `row` is the Manhattan distance with places within rows.
`linear` is the distance in the text that is written so far: the number of tokens that the query sees, row after row,
from the key (excluded) to the query (included). The final lengths of the rows above do not matter, since these rows are
still open: the distance of a key in such a row grows with the row. Training and decoding compute the same distance,
since it depends only on the tokens that a query sees.

Neither distance is a difference of two numbers. Therefore the strategy encodes row and place in one position, and the
backbone decodes them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pipejax import decoding, grid
from pipejax.config import GridConfig, T5Config
from pipejax.methods import Ids, Method, PipelinedMethod, Spells, Target
from pipejax.model import t5
from pipejax.system.fields import setting

Array = jax.Array
PITCH = 2**12  # positions of a row, more than the places that it can have
DISTANCES = ("row", "linear")


class Steps(decoding.Pipelined):
    """Algorithm 1 with positions that encode row and place."""

    def position(self, row: grid.Numbers, time: grid.Numbers) -> grid.Numbers:
        """The position: `PITCH` times the row, plus the place within the row."""
        return row * PITCH + time - self.start(row)


@dataclasses.dataclass(frozen=True)
class Places(Method):
    """The pipelined method with the positions of `Steps`; its backbone is a `DistanceConfig`."""

    delay: int = setting(1, least=1)  # time-steps between the starts of two rows
    rows: int = setting(20, least=1)  # most rows
    times: int = setting(50, least=1, most=PITCH - 1)  # most time-steps

    name: ClassVar[str] = "places"

    @property
    def _pipelined(self) -> PipelinedMethod:
        return PipelinedMethod(GridConfig(delay=self.delay, time_max=self.times, sub_max=self.rows))

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        """The layout of the pipelined method."""
        return self._pipelined.target(rows, spells, ids, most=most, where=where)

    def most_slots(self, most: int) -> int:
        """The most slots of the pipelined method."""
        return self._pipelined.most_slots(most)

    def strategy(self, ids: Ids) -> decoding.Strategy:
        """Algorithm 1."""
        return Steps(self.delay, self.times, self.rows, bos=ids.bos, eos=ids.eos, other_ends=ids.other_ends)


def within_rows(query: Array, key: Array) -> Array:
    """The Manhattan distances i32 [B, Q, C] of positions [B, Q] and [B, C]; arbitrary for keys that are not visible."""
    of_query, of_key = query[:, :, None], key[:, None]
    return abs(of_query // PITCH - of_key // PITCH) + abs(of_query % PITCH - of_key % PITCH)


def linear(mask: Array, key: Array) -> Array:
    """The number i32 [B, Q, C] of tokens that a query sees after each key; `mask` is [B, Q, C], `key` is [B, C]."""
    later = key[:, None] > key[:, :, None]  # [B, C, C]: the last axis is the later key
    return jnp.einsum("bqc,bkc->bqk", mask.astype(jnp.int32), later.astype(jnp.int32))


class Decoder(t5.Decoder):
    """The decoder of a T5 with another distance."""

    config: "DistanceConfig"

    def bias(self, mask: Array, query: Array, key: Array) -> Any:
        """The bias f32 [B, H, Q, C] of the distances."""
        apart = within_rows(query, key) if self.config.distance == "row" else linear(mask, key)
        size = len(apart)
        found = self.relative_bias(apart.reshape(size, -1), jnp.zeros((size, 1), jnp.int32))
        return jnp.where(mask[:, None], found.reshape(size, -1, *apart.shape[1:]), t5.MASKED)


class DistanceT5(t5.T5):
    """The module."""

    decoder_stack = Decoder


@dataclasses.dataclass(frozen=True)
class DistanceConfig(T5Config):
    """The backbone."""

    distance: str = setting("row", choices=DISTANCES)

    def module(self, **options: Any) -> DistanceT5:
        """Returns the module for a dtype and other options of training."""
        return DistanceT5(self, **options)
