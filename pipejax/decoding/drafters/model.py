"""Drafts of a small T5, which decodes the same grid ahead of the large one.

It keeps keys and values of its own, of what is written and of nothing else. A draft begins with one step that feeds all
tokens which were written since the last draft; every further step feeds the newest drafted token of each row. The slots
of drafted tokens are free again when the draft is over, and nobody sees them: right ones are fed once more as written.

Shapes as in `interface`; K = D + 2, the most tokens of a row that a step feeds: bos and all that one call can accept.
"""

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp

from pipejax.decoding.choice import first_argmax
from pipejax.decoding.core import Sizes, begin, decode, grow
from pipejax.decoding.drafters.interface import Draft, Written
from pipejax.decoding.gathering import NOWHERE, Filled, Query
from pipejax.decoding.interface import Array, Decoded, Model, Plain, SourceIds, ends_of, is_end
from pipejax.decoding.rows import Rows
from pipejax.decoding.times import NEVER, over_earlier_rows
from pipejax.grid import Numbers, start
from pipejax.system import Tree

MARKS = (0.6, 0.9)  # mean probability of a draft's tokens at which its degree of trust rises


@flax.struct.dataclass
class Ahead:
    """A draft as it grows."""

    tokens: Array  # i32 [B, R, T], written, then drafted
    length: Array  # i32 [B, R]
    ended: Array  # bool [B, R], by a written or drafted end token
    known: Array  # i32 [B, R], how many tokens are written
    fed: Array  # i32 [B, R], how many of bos and these tokens are fed
    stopped: Array  # bool [B, R], the next token was too unlikely to be drafted
    log_prob: Array  # f32 [B, R], of the drafted tokens
    live: Array  # bool [B, K, R], what the step feeds


@dataclasses.dataclass(frozen=True)
class Looking(Plain):
    """The small T5's decoding of one draft: a `Strategy` that begins where rows stand and ends `most` tokens later.

    A token is fed once those are that it can see, as far as they are known; so a row waits for the rows above it.
    """

    grid: Rows
    most: int  # D
    least: float  # probability of a token, below which it is not drafted

    @property
    def most_queries(self) -> int:
        """K of each row."""
        return self.grid.rows * (self.most + 2)

    @property
    def slots(self) -> int:
        """All that is written, and one draft."""
        return self.grid.slots_without_drafts + self.grid.rows * (self.most + 1)

    def position(self, row: Numbers, time: Numbers) -> Numbers:
        """As on the large one's grid."""
        return self.grid.position(row, time)

    def init(self, batch: int, source: SourceIds | None = None) -> Ahead:
        """Nothing is written."""
        none = jnp.zeros((batch, self.grid.rows), jnp.int32)
        return self.begun(jnp.zeros((batch, self.grid.rows, self.grid.time_max), jnp.int32), none, none)

    def begun(self, tokens: Array, length: Array, fed: Array) -> Ahead:
        """Nothing is drafted."""
        last = jnp.take_along_axis(tokens, jnp.maximum(length - 1, 0)[:, :, None], axis=2)[:, :, 0]
        return Ahead(
            tokens=tokens,
            length=length,
            ended=(length > 0) & is_end(last, ends_of(self.grid)),
            known=length,
            fed=fed,
            stopped=length < 0,
            log_prob=jnp.zeros(length.shape),
            live=jnp.zeros((len(length), self.most + 2, self.grid.rows), bool),
        )

    def query(self, state: Ahead) -> tuple[Ahead, Query]:
        """All that is written and not fed; else the newest token of each row, and the bos of one that may begin."""
        rows, columns, times = jnp.arange(self.grid.rows), jnp.arange(self.most + 2)[:, None], self.grid.time_max
        first = start(rows, self.grid.delay)
        newest = first + state.length
        cell = state.fed[:, None] + columns  # [B, K, R], 0 is bos
        time = first + cell
        unfed = (cell <= state.length[:, None]) & (time < times)
        written = (unfed & (cell <= state.known[:, None]) & (state.known > 0)[:, None]).any(axis=1)
        # What is drafted beyond time_max - 1 could not be verified.
        drafts = (state.fed == state.length) & ~state.stopped & (newest < times - 1)
        drafts &= state.ended | (state.length - state.known < self.most)
        drafts &= (state.length > 0) | self.grid.may_begin(state.ended, state.length)
        far = jnp.where(written | drafts, newest, first + state.fed - 1)
        limit = over_earlier_rows(jax.lax.cummin, jnp.where(state.ended, NEVER, far), NEVER)
        live = unfed & (written | (drafts & (limit >= newest)))[:, None]
        at = jnp.clip(cell - 1, 0, times - 1).swapaxes(1, 2)
        fed = jnp.take_along_axis(state.tokens, at, axis=2).swapaxes(1, 2)
        fed = jnp.where(cell == 0, self.grid.bos, fed)
        row = jnp.broadcast_to(rows, live.shape)
        state = dataclasses.replace(state, live=live)
        return state, Query(*(x.reshape(len(x), -1) for x in (fed, row, time, live)))

    def choose(self, logits: Array) -> tuple[Array, Array]:
        """The most likely token i32 [N], and its log-probability f32 [N]."""
        return first_argmax(logits), logits.max(axis=0) - jax.nn.logsumexp(logits, axis=0)

    def advance(self, state: Ahead, answers: tuple[Array, Array]) -> Ahead:
        """Drafts the answer to the newest token of each row."""
        count = state.live.sum(axis=1)
        fed = state.fed + count
        at = jnp.maximum(count - 1, 0)[:, None]
        token, log_prob = (jnp.take_along_axis(x.reshape(state.live.shape), at, axis=1)[:, 0] for x in answers)
        asks = (count > 0) & ~state.ended & (fed > state.length)
        drafts = asks & (log_prob >= math.log(max(self.least, 1e-30)))
        here = drafts[:, :, None] & (jnp.arange(self.grid.time_max) == state.length[:, :, None])
        return dataclasses.replace(
            state,
            tokens=jnp.where(here, token[:, :, None], state.tokens),
            length=state.length + drafts,
            ended=state.ended | (drafts & is_end(token, ends_of(self.grid))),
            fed=fed,
            stopped=state.stopped | (asks & ~drafts),
            log_prob=state.log_prob + jnp.where(drafts, log_prob, 0),
        )

    def done(self, state: Ahead) -> Array:
        """Nothing is left to be fed."""
        return ~state.live.any(axis=(1, 2))

    def result(self, state: Ahead) -> Decoded:
        """The rows; nobody needs the rest."""
        none = jnp.zeros(len(state.length), jnp.int32)
        return Decoded(tokens=state.tokens, lengths=state.length, steps=none, truncated=none)


@flax.struct.dataclass
class DrafterCache:
    """The memory that the small T5 keeps from draft to draft."""

    fed: Array  # i32 [B, R], how many of bos and the written tokens of each row are in the cache
    used: Array  # i32 [B], slots that they take
    filled: Filled
    cache: Tree


@dataclasses.dataclass(frozen=True)
class FromModel:
    """The answers of a small T5 of the same vocabulary. `over` lends it the decoder of a batch, while one is traced."""

    odds: tuple[float, ...] = (0.5, 0.75, 0.95)  # by the mean probability of the drafted tokens
    least: float = 0.4  # probability of a token, below which a draft ends
    looking: Looking | None = None
    sizes: Sizes | None = None
    decoder: Model[Tree] | None = None

    def over(self, decoder: Model[Tree], grid: Rows, most: int, *, queries: tuple[int, ...], batch: int) -> "FromModel":
        """The drafter for one batch."""
        looking = Looking(grid, most, self.least)
        sizes = Sizes.fit(looking, batch, queries=queries)
        return dataclasses.replace(self, looking=looking, sizes=sizes, decoder=decoder)

    def init(self, source: SourceIds, rows: int) -> DrafterCache:
        """An empty cache."""
        looking, sizes, decoder = self._lend()
        batch = len(source.ids)
        carry = begin(looking, decoder, looking.init(batch), sizes, apart=True)
        carry = grow(decoder, carry, sizes.slots[-1])
        return DrafterCache(jnp.zeros((batch, rows), jnp.int32), carry.used, carry.filled, carry.cache)

    def propose(self, state: DrafterCache, written: Written, most: int) -> tuple[DrafterCache, Draft]:
        """Its greedy decoding of the same grid, from where each row stands."""
        looking, sizes, decoder = self._lend()
        begun = looking.begun(written.tokens, written.length, state.fed)
        carry = begin(looking, decoder, begun, sizes, apart=True)
        # The first step feeds what is written, and perhaps the bos of a row that is certain to begin if any more do.
        first = carry.state.live
        fed, used = state.fed + first.sum(axis=1), state.used + first.sum(axis=(1, 2))
        carry = dataclasses.replace(carry, used=state.used, filled=state.filled, cache=state.cache)
        carry = decode(looking, decoder, carry, sizes=sizes, slots=sizes.slots[-1]).carry
        drafted: Ahead = carry.state
        free = jnp.arange(carry.filled.row.shape[1]) >= used[:, None]
        filled = dataclasses.replace(carry.filled, row=jnp.where(free, NOWHERE, carry.filled.row))
        place = jnp.minimum(written.length[:, :, None] + jnp.arange(most), written.tokens.shape[2] - 1)
        count = drafted.length - written.length
        mean = drafted.log_prob / jnp.maximum(count, 1)
        trust = sum((mean > math.log(mark)).astype(jnp.int32) for mark in MARKS)
        tokens = jnp.take_along_axis(drafted.tokens, place, axis=2)
        return DrafterCache(fed, used, filled, carry.cache), Draft(tokens, count, jnp.asarray(trust))

    def _lend(self) -> tuple[Looking, Sizes, Model[Tree]]:
        assert self.looking and self.sizes and self.decoder, "no T5 was lent to the drafter"
        return self.looking, self.sizes, self.decoder
