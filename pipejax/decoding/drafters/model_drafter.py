"""Drafts by a small T5, which decodes the same grid ahead of the large one.

The small model has a separate cache, which contains only accepted tokens between drafts. The first step of a draft
feeds all tokens that were accepted since the last draft; every further step feeds the newest drafted token of each row.
The slots of drafted tokens are freed at the end of the draft; tokens that are accepted are fed again later.

Shapes as in `drafter`; K = D + 2, the most tokens of a row in a step: bos and all tokens that one call can accept.
"""

import dataclasses
import math
from typing import Any, ClassVar, Protocol

import flax.struct
import jax
import jax.numpy as jnp

from pipejax.decoding.choice import first_argmax
from pipejax.decoding.core import Sizes, begin, decode, grow
from pipejax.decoding.drafters.drafter import Draft, Written
from pipejax.decoding.gathering import NOWHERE, Filled, Query
from pipejax.decoding.rows import Rows
from pipejax.decoding.strategy import Array, Decoded, Model, Plain, SourceIds, ends_of, is_end
from pipejax.decoding.times import NEVER, over_earlier_rows
from pipejax.grid import Numbers, start
from pipejax.system import Tree

MARKS = (0.6, 0.9)  # thresholds of a draft's mean probability (geometric) for the degrees of trust


@flax.struct.dataclass
class Ahead:
    """The state of the strategy `Looking` while the small T5 decodes one draft."""

    tokens: Array  # i32 [B, R, T], accepted tokens, then drafted ones
    length: Array  # i32 [B, R], number of accepted and drafted tokens
    ended: Array  # bool [B, R], whether the last token of each row is an end token
    known: Array  # i32 [B, R], number of accepted tokens
    fed: Array  # i32 [B, R], number of tokens, bos included, that the small model was fed
    stopped: Array  # bool [B, R], whether the next token was too unlikely to be drafted
    log_prob: Array  # f32 [B, R], sum over the drafted tokens
    live: Array  # bool [B, K, R], the queries of the step


@dataclasses.dataclass(frozen=True)
class Looking(Plain):
    """The strategy by which the small T5 decodes one draft: it continues each row by at most `most` tokens.

    A token is fed only after all known tokens that it can see, so a row waits for the rows above it.
    """

    grid: Rows
    most: int  # D
    least: float  # the least probability of a drafted token

    @property
    def most_queries(self) -> int:
        """K for each row."""
        return self.grid.rows * (self.most + 2)

    @property
    def slots(self) -> int:
        """The slots of all accepted tokens, and of one draft."""
        return self.grid.slots_without_drafts + self.grid.rows * (self.most + 1)

    def position(self, row: Numbers, time: Numbers) -> Numbers:
        """Returns the position on the large model's grid."""
        return self.grid.position(row, time)

    @property
    def group(self) -> Any:
        """The groups of the large model's grid."""
        return self.grid.group

    def init(self, batch: int, source: SourceIds | None = None) -> Ahead:
        """Returns the state without accepted tokens."""
        none = jnp.zeros((batch, self.grid.rows), jnp.int32)
        return self.begun(jnp.zeros((batch, self.grid.rows, self.grid.time_max), jnp.int32), none, none)

    def begun(self, tokens: Array, length: Array, fed: Array) -> Ahead:
        """Returns the state before a draft.

        Args:
          tokens: i32 [B, R, T], the accepted tokens.
          length: i32 [B, R], number of them.
          fed: i32 [B, R], number of tokens, bos included, that the small model was fed.
        """
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
        """Feeds accepted tokens that are not fed yet, else the newest token of each row or the bos of a new row."""
        rows, columns, times = jnp.arange(self.grid.rows), jnp.arange(self.most + 2)[:, None], self.grid.time_max
        first = start(rows, self.grid.delay)
        newest = first + state.length
        cell = state.fed[:, None] + columns  # [B, K, R], 0 is bos
        time = first + cell
        unfed = (cell <= state.length[:, None]) & (time < times)
        written = (unfed & (cell <= state.known[:, None]) & (state.known > 0)[:, None]).any(axis=1)
        # Tokens drafted beyond time_max - 1 could not be verified.
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
        """Returns the most likely token i32 [N], and its log-probability f32 [N]."""
        return first_argmax(logits), logits.max(axis=0) - jax.nn.logsumexp(logits, axis=0)

    def advance(self, state: Ahead, answers: tuple[Array, Array]) -> Ahead:
        """Appends the token generated from the newest token of each row, if the new token is likely enough."""
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
        """Returns bool [B], whether no query is left."""
        return ~state.live.any(axis=(1, 2))

    def result(self, state: Ahead) -> Decoded:
        """Returns the rows; steps and truncation are not used."""
        none = jnp.zeros(len(state.length), jnp.int32)
        return Decoded(tokens=state.tokens, lengths=state.length, steps=none, truncated=none)


@flax.struct.dataclass
class DrafterCache:
    """The small T5's cache between drafts."""

    fed: Array  # i32 [B, R], number of tokens of each row, bos included, in the cache
    used: Array  # i32 [B], number of slots that these tokens use
    filled: Filled
    cache: Tree


class SmallModel(Protocol):
    """The parameters of a small T5, with the functions that compute with them."""

    def read(self, source: SourceIds) -> Tree:
        """Returns the memory of sources, from their ids, or from the outputs of the large model's encoder."""

    def widen(self, memory: Tree, slots: int) -> Tree:
        """Returns the memory padded to `slots` tokens."""

    def decoder(self, memory: Tree) -> Model[Tree]:
        """Returns the decoder of the encoded sources."""


@dataclasses.dataclass(frozen=True)
class FromModel:
    """Drafts by a small T5 with the same vocabulary. Its parameters are a `SmallModel`."""

    odds: tuple[float, ...] = (0.5, 0.75, 0.95)  # one for each degree of trust: see `MARKS`
    least: float = 0.4  # a draft ends before the first token below this probability
    wants: ClassVar[frozenset[str]] = frozenset({"parameters", "encoded"})
    loops: ClassVar[bool] = True

    def read(self, source: SourceIds) -> Tree:
        """Returns the memory of the small T5."""
        small: SmallModel = source.parameters
        return small.read(source)

    def widen(self, source: SourceIds, slots: int) -> Tree:
        """Returns the memory of the small T5, padded to `slots` tokens."""
        small: SmallModel = source.parameters
        return small.widen(source.memory, slots)

    def init(self, source: SourceIds, rows: int) -> DrafterCache:
        """Returns an empty cache."""
        looking, sizes, decoder = self._bound(source)
        batch = len(source.ids)
        carry = begin(looking, decoder, looking.init(batch), sizes, apart=True)
        carry = grow(decoder, carry, sizes.slots[-1])
        return DrafterCache(jnp.zeros((batch, rows), jnp.int32), carry.used, carry.filled, carry.cache)

    def propose(self, state: DrafterCache, written: Written, most: int) -> tuple[DrafterCache, Draft]:
        """Drafts by the small model's greedy decoding of the same grid."""
        looking, sizes, decoder = self._bound(written.source)
        begun = looking.begun(written.tokens, written.length, state.fed)
        carry = begin(looking, decoder, begun, sizes, apart=True)
        # The first step feeds only accepted tokens, and bos of rows that begin before any others; both stay cached.
        first = carry.state.live
        # Slots from `used` on are freed at the end.
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

    def _bound(self, source: SourceIds | None) -> tuple[Looking, Sizes, Model[Tree]]:
        """Returns the strategy of the small T5, the sizes of its steps, and its decoder, for a batch of sources."""
        assert source and source.setting, "`Drafts.bind_source` binds the small model"
        setting, small = source.setting, source.parameters
        looking = Looking(setting.rows, setting.most, self.least)
        # Each size is one more copy of the small model's step in each loop of the large one, so use only a few.
        few = setting.query_counts[:: max(len(setting.query_counts) // 2, 1)]
        return looking, Sizes.fit(looking, len(source.ids), query_counts=few), small.decoder(source.memory)
