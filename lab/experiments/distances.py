"""Two other readings of the time in the paper's distance |t1 - t2| + |i1 - i2|, as a method and a backbone.

The paper does not say whether t is the absolute time-step, as pipejax takes it, or the place within the row, nor why
the order of the finished text is not asked instead. `row` is the Manhattan distance with places within rows. `linear`
is the distance in the text as far as it is written: the number of tokens that the query sees between the key and
itself, row after row, itself included. The final lengths of the rows above, which are still open, play no part: the
distance of a key in them grows with them, in training as in decoding, since both know what a query sees.

Neither is a difference of two numbers, so the strategy's position keeps row and place apart, and the backbone takes
them apart again.
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
PITCH = 2**12  # positions of a row: more than it has places
DISTANCES = ("row", "linear")


class Steps(decoding.Pipelined):
    """Algorithm 1 with positions that keep row and place apart."""

    def position(self, row: grid.Numbers, time: grid.Numbers) -> grid.Numbers:
        """The place within the row in the lower digits."""
        return row * PITCH + time - self.start(row)


@dataclasses.dataclass(frozen=True)
class Places(Method):
    """The pipelined method with the positions of `Steps`; its backbone is a `DistanceConfig`."""

    delay: int = setting(1, least=1)  # time-steps between the starts of two rows
    rows: int = setting(20, least=1)  # at the most
    times: int = setting(50, least=1, most=PITCH - 1)  # time-steps at the most

    name: ClassVar[str] = "places"

    @property
    def _pipelined(self) -> PipelinedMethod:
        return PipelinedMethod(GridConfig(delay=self.delay, time_max=self.times, sub_max=self.rows))

    def target(self, rows: Sequence[str], spells: Spells, ids: Ids, *, most: int, where: str) -> Target:
        """As pipelined."""
        return self._pipelined.target(rows, spells, ids, most=most, where=where)

    def most_slots(self, most: int) -> int:
        """As pipelined."""
        return self._pipelined.most_slots(most)

    def strategy(self, ids: Ids) -> decoding.Strategy:
        """Algorithm 1."""
        return Steps(self.delay, self.times, self.rows, bos=ids.bos, eos=ids.eos, other_ends=ids.other_ends)


def within_rows(query: Array, key: Array) -> Array:
    """i32 [B, Q, C], the Manhattan distance of positions [B, Q] and [B, C]; any number where a query does not see."""
    of_query, of_key = query[:, :, None], key[:, None]
    return abs(of_query // PITCH - of_key // PITCH) + abs(of_query % PITCH - of_key % PITCH)


def linear(mask: Array, key: Array) -> Array:
    """i32 [B, Q, C], the tokens that a query sees after each key, by mask [B, Q, C] and positions [B, C]."""
    later = key[:, None] > key[:, :, None]  # [B, C, the later ones]
    return jnp.einsum("bqc,bkc->bqk", mask.astype(jnp.int32), later.astype(jnp.int32))


class Decoder(t5.Decoder):
    """The T5's, with another distance."""

    config: "DistanceConfig"

    def bias(self, mask: Array, query: Array, key: Array) -> Any:
        """f32 [B, H, Q, C]."""
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
        """The module, for a dtype and other options of training."""
        return DistanceT5(self, **options)
