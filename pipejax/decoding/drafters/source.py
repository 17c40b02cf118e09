"""Drafts that are copied: from the source, and from what is written already."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from pipejax.decoding.drafters.interface import Draft, Written
from pipejax.decoding.interface import Array, SourceIds

LONGEST = 3  # tokens of a row that are looked up, at the most


@flax.struct.dataclass
class CopyState:
    """The source, and where each row copies."""

    source: SourceIds
    place: Array  # i32 [B, R], of the last draft's first token in the text that is searched; -1: there was none
    length: Array  # i32 [B, R], tokens of the row when it was drafted


@dataclasses.dataclass(frozen=True)
class FromSource:
    """Looks the last tokens of a row up, and drafts what follows them there.

    The more tokens agree the better. Of places that agree equally well it takes the one at which the row copies
    already, else the first one behind all that this row and those before it copy from the source, else the first.
    Searched are the source and then all rows.
    """

    odds: tuple[float, ...] = (0.4, 0.6, 0.8)  # by the number of tokens that agree

    def init(self, source: SourceIds, rows: int) -> CopyState:
        """No row copies yet."""
        none = jnp.full((source.ids.shape[0], rows), -1)
        return CopyState(source, none, none)

    def propose(self, state: CopyState, written: Written, most: int) -> tuple[CopyState, Draft]:
        """Drafts the tokens that follow the place that agrees best."""
        batch, rows, times = written.tokens.shape
        length = state.source.ids.shape[1]
        text = jnp.concatenate([state.source.ids, written.tokens.reshape(batch, -1)], axis=1)
        # Of each place how many tokens follow it, itself included, before its source or its row is over.
        left = jnp.concatenate(
            [
                state.source.length[:, None] - jnp.arange(length),
                (written.length[:, :, None] - jnp.arange(times)).reshape(batch, -1),
            ],
            axis=1,
        )
        begins = jnp.concatenate([jnp.arange(length), jnp.tile(jnp.arange(times), rows)])  # tokens before the place

        agreeing, agrees = jnp.zeros((), jnp.int32), left[:, None] > 0
        for back in range(1, LONGEST + 1):
            last = jnp.take_along_axis(written.tokens, jnp.maximum(written.length - back, 0)[:, :, None], axis=2)
            before = jnp.pad(text, ((0, 0), (back, 0)))[:, : text.shape[1]]
            agrees &= (before[:, None] == last) & (written.length >= back)[:, :, None] & (begins >= back)
            agreeing = agreeing + agrees
        goes_on = state.place + written.length - state.length
        places = text.shape[1]
        copied = jax.lax.cummax(jnp.where(state.place < length, state.place, -1), axis=1)[:, :, None]
        here = jnp.arange(places)
        better = jnp.where(here == goes_on[:, :, None], 2, here > copied)
        score = jnp.where(agreeing > 0, 3 * agreeing + better, 0)
        # One maximum of both: XLA computes it much faster than an argmax. With several rows a CPU is faster in float32,
        # which holds these numbers exactly.
        both = score * places + here[::-1]
        fits = rows > 1 and 12 * places < 2**24
        most_agreeing = both.astype(jnp.float32 if fits else jnp.int32).max(axis=2).astype(jnp.int32)
        place, best = places - 1 - most_agreeing % places, most_agreeing // places // 3
        found = best > 0

        tokens = jnp.take_along_axis(text[:, None], place[:, :, None] + jnp.arange(most), axis=2, mode="clip")
        count = jnp.where(found, jnp.minimum(jnp.take_along_axis(left, place, axis=1), most), 0)
        state = CopyState(
            state.source, jnp.where(found, place, state.place), jnp.where(found, written.length, state.length)
        )
        return state, Draft(tokens, count, jnp.maximum(best - 1, 0))
