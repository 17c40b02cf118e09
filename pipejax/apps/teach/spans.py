"""The drafter `spans`: drafts all rows of an answer before the first call, from the tags of the source's tokens.

The tagger (`tags.SpanTags`) finds spans of the source and entries of its table, the *candidates* for rows, when the
source is encoded. With names each row has one candidate. Without names the candidates are sorted; row i is expected to
be candidate i. Once the model has written tokens of a row, the row gets the nearest candidate that begins with these
tokens, and the rows below it that have not begun get the candidates that follow. A row without such a candidate is not
drafted, and takes no candidate from the rows below it. After the last candidate the empty row that ends the answer is
drafted.

Shapes: B batch, L source length, R rows, W most tokens of a row, N names, E entries, M candidates, D most drafted
tokens of a row in a call.
"""

import dataclasses
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp

from pipejax import checkpoint
from pipejax import config as config_lib
from pipejax.apps.teach.tags import NEVER, Logits, SpanTags
from pipejax.decoding import SourceIds
from pipejax.decoding.drafters import Draft, TargetModel, Written
from pipejax.system import Tree
from pipejax.system.errors import UserError

Array = jax.Array
MARKS = (0.4, 0.8)  # the thresholds of a candidate's probability that separate the degrees of trust


@flax.struct.dataclass
class Tagger:
    """The parameters of the drafter."""

    params: Tree  # the parameters of the tagger
    tags: SpanTags = flax.struct.field(pytree_node=False)
    end: int = flax.struct.field(pytree_node=False)  # the end token of rows


@flax.struct.dataclass
class Candidates:
    """The rows that may be in an answer, in their order."""

    tokens: Array  # i32 [B, M, W], with names and end tokens
    length: Array  # i32 [B, M], number of tokens; 0: there is no such candidate
    chance: Array  # f32 [B, M], the probability that row m of the answer is candidate m


class _Values:
    """The values that rows can have: spans of the source, and entries of the table."""

    def __init__(self, tags: SpanTags, ids: Array, length: Array, logits: Logits) -> None:
        """Finds the ends of spans, from the logits of a batch of sources `ids`, i32 [B, L] with `length` i32 [B]."""
        self.tags, self.ids, self.logits = tags, ids, logits
        # `stop` is the first place after each place that does not continue a span, and `sums` has the cumulative
        # log-probabilities of the more likely decision at each place: it continues a span, or it does not.
        places = jnp.arange(ids.shape[1])
        stops = (logits.goes_on <= 0) | (places >= length[:, None, None])
        after = jnp.where(stops, places, ids.shape[1])
        after = jax.lax.cummin(after, axis=2, reverse=True)
        self.stop = jnp.pad(after, ((0, 0), (0, 0), (0, 1)), constant_values=ids.shape[1])[:, :, 1:]
        self.sums = jnp.cumsum(jax.nn.log_sigmoid(jnp.abs(logits.goes_on)), axis=2)

    def spans(self, place: Array) -> tuple[Array, Array, Array]:
        """Returns the spans that begin at the places i32 [B, N, K].

        Returns:
          The tokens i32 [B, N, K, W] and the lengths i32 [B, N, K] of the spans, and the log-probabilities f32
          [B, N, K] of their ends, given their beginnings.
        """
        last = self.ids.shape[1] - 1
        stop = jnp.take_along_axis(self.stop, place, axis=2)
        length = jnp.minimum(stop - place, self.tags.longest - 1)
        at = jnp.minimum(place[..., None] + jnp.arange(self.tags.longest), last)
        tokens = jnp.take_along_axis(self.ids[:, None, None], at, axis=3)
        tokens = tokens.at[..., 0].set(self.tags.begin_row(tokens[..., 0]))
        sums = (jnp.take_along_axis(self.sums, jnp.minimum(x, last), axis=2) for x in (stop, place))
        return tokens, length, jnp.subtract(*sums)


@dataclasses.dataclass(frozen=True)
class Spans:
    """Drafts rows that a tagger finds in the source."""

    odds: tuple[float, ...] = (0.3, 0.7, 0.97)  # one for each degree of trust, see `MARKS`
    wants: ClassVar[frozenset[str]] = frozenset({"parameters", "encoded"})

    def load(self, directory: str, target: TargetModel) -> Tagger:
        """Returns the tagger of the run in `decode.draft_checkpoint` or, if that is "", the tagger of the checkpoint.

        Args:
          directory: the value of `decode.draft_checkpoint`.
          target: the model of the checkpoint.

        Raises:
          UserError: there is no tagger.
        """
        config, params = target.config, target.auxiliary
        if directory:
            params = checkpoint.open_auxiliary(directory, target.fingerprint)
            config = checkpoint.open_run(directory, packed=True).config
        tags = config.auxiliary
        if isinstance(tags, dict):
            tags = config_lib.made(tags, "auxiliary")
        if params is None or not isinstance(tags, SpanTags):
            raise UserError(
                "spans",
                found=f"no tagger in {directory or 'the checkpoint'}",
                expected="a run of pipejax teach --tagger, or one in decode.draft_checkpoint",
            )
        assert target.config.model is not None
        return Tagger(params, tags, target.config.model.eos_token_id)

    def read(self, source: SourceIds) -> Candidates:
        """Returns the candidates for the rows of each answer."""
        tagger: Tagger = source.parameters
        ids, length = jnp.asarray(source.ids), jnp.asarray(source.length)
        assert source.encoded is not None
        logits = tagger.tags.apply(tagger.params, source.encoded, jnp.arange(ids.shape[1]) < length[:, None])
        values = _Values(tagger.tags, ids, length, logits)
        return (named if tagger.tags.row_names else unnamed)(tagger, values)

    def init(self, source: SourceIds, rows: int) -> None:
        """Returns None, because the drafter has no state."""

    def propose(self, state: None, written: Written, most: int) -> tuple[None, Draft]:
        """Drafts the tokens of each row's candidate that follow the written tokens."""
        assert written.source is not None
        found: Candidates = written.source.memory
        tagger: Tagger = written.source.parameters
        number = align(found, written, moves=not tagger.tags.row_names)
        tokens, length, chance = (
            jnp.take_along_axis(x, number.reshape(*number.shape, *[1] * (x.ndim - 2)), axis=1, mode="clip")
            for x in (found.tokens, found.length, found.chance)
        )
        count = jnp.where(number < found.length.shape[1], length - written.length, 0)
        at = written.length[:, :, None] + jnp.arange(most)
        drafted = jnp.take_along_axis(tokens, at, axis=2, mode="clip")
        trust = sum((chance > mark).astype(jnp.int32) for mark in MARKS)
        return None, Draft(drafted, jnp.clip(count, 0, most), jnp.asarray(trust))


def align(found: Candidates, written: Written, *, moves: bool) -> Array:
    """Returns the number i32 [B, R] of each row's candidate; the number M means that the row has no candidate.

    Args:
      found: the candidates.
      written: the rows.
      moves: whether the candidate of a row may have another number than the row.
    """
    rows, count = written.tokens.shape[1], found.tokens.shape[1]
    compared = min(found.tokens.shape[2], written.tokens.shape[2])
    row, number = jnp.arange(rows), jnp.arange(count)
    tokens, begun = written.tokens[:, :, :compared], written.length > 0
    beyond = jnp.arange(compared) >= written.length[:, :, None]
    if not moves:
        own = jnp.minimum(row, count - 1)
        fits = ((tokens == found.tokens[:, own, :compared]) | beyond).all(axis=2) & (row < count)
        return jnp.where(fits & (written.length <= found.length[:, own]), row, count)
    there = found.tokens[:, None, :, :compared]
    fits = ((tokens[:, :, None] == there) | beyond[:, :, None]).all(axis=3)
    fits &= begun[:, :, None] & (written.length[:, :, None] <= found.length[:, None])
    far = jnp.abs(number - row[:, None])
    nearest = jnp.where(fits, far * count + number, rows * count + count * count).min(axis=2) % count
    is_found = fits.any(axis=2)
    # The number of a row that has not begun follows from the last row above it whose candidate is known.
    takes = jnp.cumsum(~begun | is_found, axis=1)
    last = jax.lax.cummax(jnp.where(is_found, row, -1), axis=1)
    known = jnp.maximum(last, 0)
    base = jnp.take_along_axis(nearest - takes, known, axis=1)
    expected = takes + jnp.where(last >= 0, base, -1)
    number = jnp.where(is_found, nearest, jnp.where(begun, count, expected))
    return jnp.where((number >= 0) & (number < count), number, count)


def named(tagger: Tagger, values: _Values) -> Candidates:
    """Returns the most likely value of each named row, with the row's name."""
    tags, logits = tagger.tags, values.logits
    chances = tags.values(tagger.params, logits)
    most = values.ids.shape[1]
    place = chances[:, :, :most].argmax(axis=2)[:, :, None]  # [B, N, 1]
    tokens, length, log_prob = (x[:, :, 0] for x in values.spans(place))
    log_prob += chances[:, :, :most].max(axis=2)
    if tags.table:
        of_entries = chances[:, :, most:-1]
        entry, other = of_entries.argmax(axis=2), of_entries.max(axis=2)
        is_entry = other > log_prob
        tokens = jnp.where(is_entry[:, :, None], jnp.asarray(tags.entry_ids)[entry], tokens)
        length = jnp.where(is_entry, jnp.asarray(tags.entry_lengths)[entry], length)
        log_prob = jnp.maximum(log_prob, other)
    wide = max(map(len, tags.row_names)) + tags.longest
    rows = []
    for number, name in enumerate(tags.row_names):
        begun = jnp.broadcast_to(jnp.asarray(name), (len(tokens), len(name)))
        row = jnp.concatenate([begun, tokens[:, number]], axis=1)
        rows.append(jnp.pad(row, ((0, 0), (0, wide - row.shape[1]))))
    length = length + jnp.asarray([len(name) for name in tags.row_names])
    return _ended(jnp.stack(rows, axis=1), length, jnp.exp(log_prob), tagger.end)


def unnamed(tagger: Tagger, values: _Values) -> Candidates:
    """Returns the likely rows in their order, and the empty row after these rows."""
    tags, logits = tagger.tags, values.logits
    most = min(tags.rows, values.ids.shape[1])
    begins, place = jax.lax.top_k(logits.begins, most)  # [B, 1, K]
    tokens, length, log_prob = (x[:, 0] for x in values.spans(place))
    chance = jax.nn.sigmoid(begins[:, 0])
    order = jnp.take_along_axis(logits.order, place[:, 0], axis=1)
    whole = jnp.exp(log_prob)
    if tags.table:
        of_entries, entry = jax.lax.top_k(logits.entries, min(tags.rows, len(tags.table)))
        tokens = jnp.concatenate([tokens, jnp.asarray(tags.entry_ids)[entry]], axis=1)
        length = jnp.concatenate([length, jnp.asarray(tags.entry_lengths)[entry]], axis=1)
        chance = jnp.concatenate([chance, jax.nn.sigmoid(of_entries)], axis=1)
        own = jnp.take_along_axis(logits.order_of_entries, entry, axis=1)
        order = jnp.concatenate([order, own], axis=1)
        whole = jnp.concatenate([whole, jnp.ones_like(of_entries)], axis=1)
    # A row is in the answer once: of candidates with the same tokens the most likely one remains.
    tokens = jnp.where(jnp.arange(tags.longest) < length[:, :, None], tokens, -1)
    same = (tokens[:, :, None] == tokens[:, None]).all(axis=3)
    number = jnp.arange(tokens.shape[1])
    better = (chance[:, None] > chance[:, :, None]) | (
        (chance[:, None] == chance[:, :, None]) & (number < number[:, None])
    )
    repeated = (same & better).any(axis=2)
    chosen = (chance > 0.5) & ~repeated
    no_others = jnp.where(chosen | repeated, 1, 1 - chance).prod(axis=1) * jax.nn.sigmoid(-tagger.params["other"][0])
    # The empty row is sorted after the last candidate.
    ranks = jnp.argsort(jnp.where(chosen, order, -NEVER), axis=1)[:, : tags.rows]
    length, chance, whole = (jnp.take_along_axis(x, ranks, axis=1) for x in (length, chance, whole))
    tokens = jnp.take_along_axis(tokens, ranks[:, :, None], axis=1)
    count = jnp.minimum(chosen.sum(axis=1), tags.rows)
    pad = ((0, 0), (0, tags.rows + 1 - ranks.shape[1]))
    place = jnp.arange(tags.rows + 1)
    is_in = place < count[:, None]
    length = jnp.where(is_in, jnp.pad(length, pad), 0)
    # Row i is candidate i if all candidates before candidate i are in the answer, and no other rows come before it.
    before = jnp.cumprod(jnp.where(is_in, jnp.pad(chance, pad), 1), axis=1)
    chance = before * jnp.where(is_in, jnp.pad(whole, pad), no_others[:, None])
    found = _ended(jnp.pad(tokens, (*pad, (0, 1))), length, chance, tagger.end)
    return dataclasses.replace(found, length=jnp.where(place <= count[:, None], found.length, 0))


def _ended(tokens: Array, length: Array, chance: Array, end: int) -> Candidates:
    """Returns the candidates of `length` tokens, each followed by an end token."""
    here = jnp.arange(tokens.shape[2]) == length[:, :, None]
    return Candidates(jnp.where(here, end, tokens), length + 1, chance)
