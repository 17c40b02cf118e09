"""The tagger of the drafter `spans`: finds the rows of an answer in the output of the encoder, by one linear map.

A row of an answer is a *span*, which is copied from the source, or an *entry* of a table. The table has rows that many
answers have and that are not in the sources of these answers. The tagger gives each token of the source four kinds of
logits: that a span begins at the token; that the token continues the span of the token before it (the tags B and I of
BIO tagging); that the token is evidence for an entry; and a number by which rows are sorted. Rows without names are a
set: every span and every entry is in the answer or not. A row with a name has one value: one span, one entry, or
something else.

Shapes: B sources, L source length, D width of the encoder, R rows, W most tokens of a row, N names (1 without names), E
entries of the table.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.model.auxiliary import Auxiliary, Outputs
from pipejax.model.backbone import Backbone, smallest_batch, with_encoder_outputs
from pipejax.system import Tree
from pipejax.system.fields import setting

Array = jax.Array
STOP = -1  # ends each list of ids in a setting that has several
NEVER = -1e9  # the logit of an impossible tag


class Entry(NamedTuple):
    """An entry of the table."""

    name: int  # the number of the row's name; 0 without names
    ids: tuple[int, ...]  # the tokens of the value, without the end token


@flax.struct.dataclass
class Logits:
    """The logits of a batch, f32; padding has the logit NEVER.

    If rows have no names, the logits are log-odds; if rows have names, see `SpanTags.values`.
    """

    begins: Array  # [B, N, L], of a span at each token, for each name
    goes_on: Array  # [B, N, L], log-odds that each token continues the span of the token before it
    evidence: Array  # [B, E, L], of each entry at each token
    entries: Array  # [B, E], of each entry
    order: Array  # [B, L], numbers by which spans are sorted
    order_of_entries: Array  # [B, E]


@flax.struct.dataclass
class Rows:
    """The rows of the answers of a training batch."""

    tokens: Array  # i32 [B, R, W], values of the rows, without names and end tokens; STOP beyond
    length: Array  # i32 [B, R], number of tokens of the value, without the end token; 0: no value, or W or more tokens
    exists: Array  # bool [B, R], whether there is a row with a value
    counts: Array  # bool [B], whether the example counts: copies that fill a batch do not


@dataclasses.dataclass(frozen=True)
class SpanTags(Auxiliary):
    """The tagger. `pipejax teach --tagger` sets the fields, which describe the answers that it trained on."""

    rows: int = setting(32, least=1, most=2**10)  # R, the most rows of an answer that are drafted
    longest: int = setting(32, least=2, most=2**10)  # W, the most tokens of a row, the end token included
    names: tuple[int, ...] = setting(())  # the ids of the names of rows, in order, STOP after each name
    entries: tuple[int, ...] = setting(())  # the entries, each as the number of its name, its ids and STOP
    # Pairs of the token with which a span begins and the token with which its row begins.
    initial: tuple[int, ...] = setting(())

    @functools.cached_property
    def row_names(self) -> tuple[tuple[int, ...], ...]:
        """The names of rows; empty if rows have no names."""
        return tuple(_parted(self.names))

    @functools.cached_property
    def table(self) -> tuple[Entry, ...]:
        """The entries."""
        return tuple(Entry(ids[0], ids[1:]) for ids in _parted(self.entries))

    @functools.cached_property
    def entry_ids(self) -> np.ndarray:
        """i32 [E, W], the tokens of each entry, STOP beyond its length."""
        found = np.full((len(self.table), self.longest), STOP, np.int32)
        for ids, entry in zip(found, self.table, strict=True):
            ids[: len(entry.ids)] = entry.ids[: self.longest]
        return found

    @functools.cached_property
    def entry_lengths(self) -> np.ndarray:
        """i32 [E], the number of tokens of each entry."""
        return np.asarray([len(entry.ids) for entry in self.table], np.int32)

    @functools.cached_property
    def entry_names(self) -> np.ndarray:
        """i32 [E], the number of each entry's name."""
        return np.asarray([entry.name for entry in self.table], np.int32)

    def begin_row(self, ids: Array) -> Array:
        """Returns the first tokens of rows, given the first tokens `ids` of their spans; the shapes are equal."""
        pairs = dict(zip(self.initial[::2], self.initial[1::2], strict=True))
        table = np.arange(max(pairs, default=0) + 1, dtype=np.int32)
        table[[*pairs]] = [*pairs.values()]
        return jnp.where(ids < len(table), jnp.take(jnp.asarray(table), ids, mode="clip"), ids)

    def init_params(self, rng: Array, backbone: Backbone) -> Tree:
        """Returns the initial parameters: zeros, except the weight of the place, by which rows are sorted at first."""
        width, names, entries = encoder_width(backbone), max(len(self.row_names), 1), len(self.table)
        return {
            "kernel": jnp.zeros((width, 2 * names + entries + 1)),
            "bias": jnp.zeros(2 * names + entries),
            # The logit of a value that is neither a span nor an entry; without names, the log-odds that an answer has
            # such a row.
            "other": jnp.zeros(names),
            "place": jnp.ones(()),  # the weight of the place in the source
            "order": jnp.zeros(entries),
        }

    def apply(self, params: Tree, encoded: Array, real: Array) -> Logits:
        """Returns the logits of the tags.

        Args:
          params: the parameters.
          encoded: [B, L, D], the output of the encoder.
          real: bool [B, L], which tokens are not padding.
        """
        x = encoded.astype(jnp.float32)
        x = x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
        names, entries = max(len(self.row_names), 1), len(self.table)
        found = jnp.einsum("bld,df->bfl", x, params["kernel"])
        tags = jnp.where(real[:, None], found[:, :-1] + params["bias"][:, None], NEVER)
        begins, goes_on, evidence = jnp.split(tags, [names, 2 * names], axis=1)
        order = found[:, -1] + params["place"] * jnp.arange(x.shape[1])
        anchor = evidence.argmax(axis=2) if entries else jnp.zeros((len(x), 0), jnp.int32)
        return Logits(
            begins=begins,
            goes_on=goes_on,
            evidence=evidence,
            entries=jax.nn.logsumexp(evidence, axis=2),
            order=order,
            order_of_entries=jnp.take_along_axis(order, anchor, axis=1) + params["order"],
        )

    def values(self, params: Tree, logits: Logits) -> Array:
        """Returns the log-probabilities f32 [B, N, L + E + 1] of the values of named rows.

        A value is a span that begins at one of L tokens, one of E entries, or something else.
        """
        own = self.entry_names == np.arange(logits.begins.shape[1])[:, None]  # [N, E]
        entries = jnp.where(own, logits.entries[:, None], NEVER)
        other = jnp.broadcast_to(params["other"][:, None], (*logits.begins.shape[:2], 1))
        return jax.nn.log_softmax(jnp.concatenate([logits.begins, entries, other], axis=2), axis=2)

    def loss(self, params: Tree, outputs: Outputs) -> tuple[Array, Array]:
        """Returns the summed loss of a batch and its number of rows.

        A row may be in the source several times. The tagger then learns to find one of these places: the loss counts
        the sum of the probabilities of the places (the log-odds of rows without names are added in the same way).
        Without names, the other places of a row are neither right nor wrong.
        """
        batch = outputs.batch
        source, length = batch["source"], batch["source_length"]
        rows = self.rows_of(batch)
        real = (jnp.arange(source.shape[1]) < length[:, None]) & rows.counts[:, None]
        logits = self.apply(params, outputs.encoded, real)
        places = self.find(rows, source, length)
        is_entry = (rows.tokens[:, :, None] == self.entry_ids).all(axis=3) & (rows.length > 0)[:, :, None]  # [B, R, E]
        if self.row_names:
            number = np.arange(rows.length.shape[1])
            is_entry &= self.entry_names == number[:, None]
            values, begins = self.values(params, logits), logits.begins
            right = jnp.concatenate([places, is_entry], axis=2)
            right = jnp.concatenate([right, ~right.any(axis=2, keepdims=True)], axis=2)
            losses = -jax.nn.logsumexp(jnp.where(right, values, NEVER), axis=2)
            total = jnp.where(rows.length > 0, losses, 0).sum()
            goes_on = logits.goes_on
        else:
            begins, goes_on = logits.begins, logits.goes_on
            found = jax.nn.logsumexp(jnp.where(places, begins, NEVER), axis=2)  # [B, R]
            total = jnp.where(places.any(axis=2), jax.nn.softplus(-found), 0).sum()
            others = real & ~places.any(axis=1)
            total += jnp.where(others, jax.nn.softplus(begins[:, 0]), 0).sum()
            is_in = is_entry.any(axis=1)
            total += jax.nn.softplus(jnp.where(is_in, -logits.entries, logits.entries)).sum()
            others = (rows.exists & ~places.any(axis=2) & ~is_entry.any(axis=2)).any(axis=1)
            losses = jax.nn.softplus(jnp.where(others, -params["other"], params["other"]))
            total += jnp.where(rows.counts, losses, 0).sum()
        best = jnp.where(places, begins, NEVER).argmax(axis=2)  # [B, R]
        total += self._loss_of_ends(jnp.broadcast_to(goes_on, places.shape), best, rows, places.any(axis=2))
        if not self.row_names:
            total += _loss_of_order(logits, best, places.any(axis=2), is_entry)
        return total, rows.exists.sum().astype(jnp.float32)

    def _loss_of_ends(self, goes_on: Array, best: Array, rows: Rows, found: Array) -> Array:
        """Returns the summed loss of the ends of spans.

        The log-odds of the tokens after the place of a row are compared with the length of the row.

        Args:
          goes_on: f32 [B, R, L], the log-odds that each token continues the span of the token before it.
          best: i32 [B, R], the place at which the row begins in the source.
          rows: the rows.
          found: bool [B, R], whether the row has a place in the source.
        """
        offsets = jnp.arange(1, self.longest)
        at = best[:, :, None] + offsets
        inside = at < goes_on.shape[2]
        own = jnp.take_along_axis(goes_on, jnp.minimum(at, goes_on.shape[2] - 1), axis=2)
        continues = offsets < rows.length[:, :, None]
        judged = found[:, :, None] & inside & (offsets <= rows.length[:, :, None]) & (own > NEVER / 2)
        return jnp.where(judged, jax.nn.softplus(jnp.where(continues, -own, own)), 0).sum()

    def rows_of(self, batch: Mapping[str, Array]) -> Rows:
        """Returns the rows of a training batch, read from its slots; see `training.step.batch_loss`."""
        sources, groups = len(batch["source"]), len(batch["inputs"])
        count = len(self.row_names) or self.rows
        counts = (batch["weights"] > 0) & (jnp.arange(batch["inputs"].shape[1]) < batch["slots"][:, None])
        owner = jnp.arange(groups)[:, None] * (sources // groups) + batch["example"]
        owner, row, time = jnp.where(counts, owner, sources), batch["row"], batch["time"]  # `sources`: dropped
        late = jnp.full((sources, count), np.iinfo(np.int32).max)
        first = late.at[owner, row].min(time, mode="drop")
        place = time - first.at[owner, row].get(mode="fill", fill_value=0)
        tokens = jnp.full((sources, count, self.longest + 1), STOP)
        tokens = tokens.at[owner, row, place].set(batch["targets"], mode="drop")
        length = jnp.zeros((sources, count), jnp.int32).at[owner, row].add(1, mode="drop") - 1
        exists, length = length > 0, jnp.where(length < self.longest, jnp.maximum(length, 0), 0)
        # The tokens are kept without end tokens.
        tokens = jnp.where(jnp.arange(self.longest) < length[:, :, None], tokens[:, :, : self.longest], STOP)
        return Rows(tokens, length, exists, jnp.zeros(sources, bool).at[owner].max(counts, mode="drop"))

    def find(self, rows: Rows, source: Array, length: Array) -> Array:
        """Returns bool [B, R, L], whether each row is found at each place of the source.

        Args:
          rows: the rows.
          source: i32 [B, L], the source ids.
          length: i32 [B], the lengths of the sources without padding.
        """
        most = source.shape[1]
        begins, padded = self.begin_row(source), jnp.pad(source, ((0, 0), (0, self.longest)), constant_values=STOP - 1)

        def compare(offset: Array, same: Array) -> Array:
            here = jax.lax.dynamic_slice_in_dim(padded, offset, most, axis=1)
            token = jax.lax.dynamic_index_in_dim(rows.tokens, offset, axis=2)
            equal = (here[:, None] == token) | ((offset == 0) & (begins[:, None] == token))
            return same & (equal | (offset >= rows.length[:, :, None]))

        last = jnp.arange(most) + rows.length[:, :, None] <= length[:, None, None]
        return jax.lax.fori_loop(0, self.longest, compare, last & (rows.length > 0)[:, :, None])


def encoder_width(backbone: Backbone) -> int:
    """Returns D, the width of the output of a backbone's encoder."""
    module = backbone.module()

    def encode(key: Array) -> Array:
        variables = {"params": backbone.init_params(key)}
        return with_encoder_outputs(module.apply, variables, *smallest_batch(), method="hidden")[1]

    width: int = jax.eval_shape(encode, jax.random.key(0)).shape[-1]
    return width


def _loss_of_order(logits: Logits, best: Array, found: Array, is_entry: Array) -> Array:
    """Returns the loss of the numbers that sort rows.

    The loss of an answer is the sum over the pairs of its rows, divided by the number of its rows with a place or an
    entry. The result is the sum over the answers.

    Args:
      logits: the logits.
      best: i32 [B, R], the place of each row.
      found: bool [B, R], whether the row has a place in the source.
      is_entry: bool [B, R, E], whether the row is the entry.
    """
    order = jnp.take_along_axis(logits.order, best, axis=1)
    if is_entry.shape[2]:
        of_entry = jnp.take_along_axis(logits.order_of_entries, is_entry.argmax(axis=2), axis=1)
        order = jnp.where(found, order, of_entry)
    known = found | is_entry.any(axis=2)
    rows = jnp.arange(best.shape[1])
    pairs = known[:, :, None] & known[:, None] & (rows[:, None] < rows)
    losses = jnp.where(pairs, jax.nn.softplus(order[:, :, None] - order[:, None]), 0).sum(axis=(1, 2))
    return (losses / jnp.maximum(known.sum(axis=1), 1)).sum()


def _parted(ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the lists of ids that are followed by STOP."""
    begun = 0
    for i, token in enumerate(ids):
        if token == STOP:
            yield ids[begun:i]
            begun = i + 1
