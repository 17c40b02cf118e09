"""Prompt lookup: drafts are copied from the source and from the rows generated so far."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from pipejax.decoding.drafters.drafter import Draft, Written
from pipejax.decoding.strategy import Array, SourceIds

LONGEST = 3  # the most tokens of a row that are looked up


@flax.struct.dataclass
class CopyState:
    """The source, and the place from which each row was last copied."""

    source: SourceIds
    place: Array  # i32 [B, R], the index of the last draft's first token in the searched text; -1: no draft yet
    length: Array  # i32 [B, R], the number of tokens of the row at that time


@dataclasses.dataclass(frozen=True)
class FromSource:
    """Searches the last tokens of a row in the source and in all rows, and drafts the tokens that follow there.

    A place of the searched text is the index of the token that would be copied. It matches n tokens if the n tokens
    before it equal the last n tokens of the row, up to LONGEST. Places with more matching tokens are preferred. Among
    equal ones the drafter takes the place that continues the row's last draft, otherwise the first place after all
    places from which this row and the rows above copied, otherwise the first place.
    """

    odds: tuple[float, ...] = (0.4, 0.6, 0.8)  # one for each number of matching tokens, 1 to 3

    def init(self, source: SourceIds, rows: int) -> CopyState:
        """Returns the state without drafts."""
        none = jnp.full((source.ids.shape[0], rows), -1)
        return CopyState(source, none, none)

    def propose(self, state: CopyState, written: Written, most: int) -> tuple[CopyState, Draft]:
        """Drafts the tokens that follow the best match of each row."""
        batch, rows, times = written.tokens.shape
        length = state.source.ids.shape[1]
        text = jnp.concatenate([state.source.ids, written.tokens.reshape(batch, -1)], axis=1)
        # For each place, the number of tokens from it to the end of its source or row.
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
        continued = state.place + written.length - state.length  # the place that continues the last draft of each row
        places = text.shape[1]
        copied = jax.lax.cummax(jnp.where(state.place < length, state.place, -1), axis=1)[:, :, None]
        here = jnp.arange(places)
        better = jnp.where(here == continued[:, :, None], 2, here > copied)
        # For n matching tokens, the score is 3 n plus 0, 1 or 2 by the order above, or 0 for a place without a match.
        score = jnp.where(agreeing > 0, 3 * agreeing + better, 0)
        # Score and place are packed into one number, whose maximum XLA computes much faster than an argmax. With
        # several rows float32, which represents these numbers exactly, is faster on a CPU.
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
