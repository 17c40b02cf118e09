"""The T5 decoder for decoding: one step of gathered live queries, with XLA's matrix products, on any device.

Computes the same function of the same parameters as `t5.Decoder` without dropout; tests compare the two. Only the cost
differs. The weights are laid out in the order in which a step reads them (`weights`), and activations are columns:
[D, N], one column per query. Values that depend only on positions are computed once per step and shared by the layers.

Shapes as in `decoding.core`: B batch, N queries of a step, Q queries of one example, C cache slots, L source length,
D width, H heads, K head width, I = H * K, F feed-forward width, V vocabulary.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.config import T5Config
from pipejax.decoding import Step
from pipejax.decoding.choice import first_argmax
from pipejax.inference.weights import Layer, Matrix, Weights
from pipejax.model.t5 import MASKED, Memory

Array = jax.Array


@flax.struct.dataclass
class Cache:
    """Keys and values of the tokens fed so far, by layer, in the shapes that the products of attention read.

    With other shapes, XLA may write the keys of a step twice, once reshaped and once unchanged, and copy the cache.
    """

    keys: tuple[Array, ...]  # [B * H, K, C]
    values: tuple[Array, ...]  # [B * H, C, K]


@dataclasses.dataclass(frozen=True)
class StepDecoder:
    """A `decoding.Model`: the decoder of one batch of encoded sources."""

    config: T5Config
    weights: Weights
    memory: Memory
    dtype: DTypeLike

    def cache(self, slots: int, old: Cache | None) -> Cache:
        """See `Model`."""
        return grow(self.config, self.memory.mask.shape[0], self.dtype, slots, old)

    def __call__(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """See `Model`."""
        x, cache = self._run_layers(step, cache)
        return self._logits(x), cache

    def with_hidden(self, step: Step, cache: Cache) -> tuple[Array, Array, Cache]:
        """See `Model`."""
        x, cache = self._run_layers(step, cache)
        return self._logits(x), self._normalize(x, self.weights.norm).T, cache

    def _logits(self, x: Array) -> Array:
        """Returns the logits f32 [V, N] of the last layer's output [D, N]."""
        factor = self.config.d_model**-0.5 if self.config.scale_head else 1.0
        return self._of_normed(self.weights.head, x, self.weights.norm, factor, jnp.float32)

    def _run_layers(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """Returns the output of the last layer [D, N], before the norm, and the cache with the step's tokens."""
        w = self.weights
        biases = [self._bias(step, table) for table in w.bias]
        x = self._embed(step.tokens)
        keys, values = [], []
        for i, layer in enumerate(w.layers):
            projected = _at_places(self._of_normed(layer.self_inwards, x, layer.self_norm), step)
            found, k, v = self._attend_cache(
                projected, cache.keys[i], cache.values[i], biases[i % len(biases)], step.start
            )
            keys.append(k)
            values.append(v)
            x = self._add(layer.self_outwards, _gather(found, step), x)

            query = _at_places(self._of_normed(layer.cross_query, x, layer.cross_norm), step)
            x = self._add(layer.cross_outwards, _gather(self._attend_memory(i, query), step), x)
            x = self._add(layer.feed_outwards, self._activate(x, layer), x)
        return x, Cache(tuple(keys), tuple(values))

    def greedy(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """See `Model`."""
        logits, cache = self(step, cache)
        return first_argmax(logits), cache

    def _embed(self, tokens: Array) -> Array:
        """Returns the embeddings [D, N] of tokens i32 [N]."""
        table = self.weights.embedding or self.weights.head
        found = table.rows[tokens].astype(self.dtype)
        return (found * table.scale[tokens][:, None].astype(self.dtype) if table.scale.size else found).T

    def _of_normed(
        self, matrix: Matrix, x: Array, scale: Array, factor: float = 1.0, dtype: DTypeLike | None = None
    ) -> Array:
        """Returns the matrix [O, I] times the normalised columns x [I, N], times a factor: [O, N].

        `dtype` is the result's; None: the dtype of x.
        """
        return self._times(matrix, self._normalize(x, scale, factor), dtype)

    def _normalize(self, x: Array, scale: Array, factor: float = 1.0) -> Array:
        """Returns the columns x [D, N] divided by their root mean square, times `scale` [D] and a factor."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=0) + self.config.layer_norm_epsilon)
        hidden = (wide * inverse * scale[:, None]).astype(self.dtype)
        return hidden if factor == 1.0 else hidden * jnp.asarray(factor, hidden.dtype)

    def _times(self, matrix: Matrix, columns: Array, dtype: DTypeLike | None = None) -> Array:
        """Returns the matrix [O, I] times columns [I, N]: [O, N]. The scales of an int8 matrix are applied last."""
        found = jnp.matmul(matrix.rows.astype(self.dtype), columns, preferred_element_type=dtype)
        return found * matrix.scale[:, None].astype(found.dtype) if matrix.scale.size else found

    def _add(self, matrix: Matrix, columns: Array, residual: Array) -> Array:
        """Returns the residual [O, N] plus the matrix [O, I] times the columns [I, N]."""
        return residual + self._times(matrix, columns)

    def _attend_cache(
        self, projected: Array, keys: Array, values: Array, bias: Array, start: Array
    ) -> tuple[Array, Array, Array]:
        """Writes a step's keys and values to a layer's cache, and attends to it.

        Args:
          projected: [3 I, B Q], queries, keys and values.
          keys: [B * H, K, C].
          values: [B * H, C, K].
          bias: f32 [B, H, Q, C], including the mask.
          start: i32 [B|1], the slot of each example's first query.

        Returns:
          The attended values [I, B Q], and the cache's keys and values, to which this step's are added.
        """
        query, key, value = jnp.split(self._by_head(projected), 3, axis=1)
        key, value = key.reshape(-1, *key.shape[2:]), value.reshape(-1, *value.shape[2:])
        keys, values = _write(keys, key, start, axis=2), _write(values, value.swapaxes(1, 2), start, axis=1)
        return _by_query(attend(query, keys, values, bias)), keys, values

    def _attend_memory(self, number: int, query: Array) -> Array:
        """Attends to the source with the queries [I, B Q] of a layer; returns [I, B Q]."""
        bias = jnp.where(self.memory.mask, 0.0, MASKED)[:, None, None]
        return _by_query(attend(self._by_head(query), self.memory.keys[number], self.memory.values[number], bias))

    def _by_head(self, columns: Array) -> Array:
        """Reshapes [M I, B Q] -> [B, M H, K, Q]."""
        batch = self.memory.mask.shape[0]
        return columns.reshape(-1, self.config.d_kv, batch, columns.shape[1] // batch).transpose(2, 0, 1, 3)

    def _activate(self, x: Array, layer: Layer) -> Array:
        """Returns the hidden activations [F, N] of the feed-forward layer."""
        if self.config.feed_forward == "relu":
            return jax.nn.relu(self._of_normed(layer.feed_inwards, x, layer.feed_norm))
        gate, value = jnp.split(self._of_normed(layer.feed_inwards, x, layer.feed_norm), 2)
        activation = (
            jax.nn.silu
            if self.config.feed_forward == "gated-silu"
            else functools.partial(jax.nn.gelu, approximate=True)
        )
        return activation(gate) * value

    def _bias(self, step: Step, table: Array) -> Array:
        """Returns the bias of self-attention f32 [B, H, Q, C], including the mask, from a table [H, distances]."""
        back = step.position[:, :, None] - step.key_position[:, None]
        bias = jnp.take(table, jnp.clip(back, 0, table.shape[1] - 1), axis=1)  # [H, B, Q, C]
        return jnp.where(step.mask[:, None], bias.swapaxes(0, 1), MASKED)


def _write(cache: Array, new: Array, start: Array, *, axis: int) -> Array:
    """Returns the cache [B * H, ...] with new values written at each example's slots along `axis`."""
    if len(start) == 1:
        return jax.lax.dynamic_update_slice_in_dim(cache, new, start[0], axis=axis)
    caches, new_tokens = (x.reshape(len(start), -1, *x.shape[1:]) for x in (cache, new))

    def one(cache: Array, new: Array, start: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(cache, new, start, axis=axis)

    return jax.vmap(one)(caches, new_tokens, start).reshape(cache.shape)


def _at_places(x: Array, step: Step) -> Array:
    """Returns the queries grouped by example: [..., N] -> [..., B Q]."""
    if step.query_at_place is None:
        return x
    return jnp.take(x, step.query_at_place.reshape(-1), axis=1, mode="clip")  # fillers are padding; any query will do


def _gather(found: Array, step: Step) -> Array:
    """Returns the queries packed again: [..., B Q] -> [..., N]."""
    return found if step.place_of_query is None else jnp.take(found, step.place_of_query, axis=1, mode="clip")


def _by_query(found: Array) -> Array:
    """Reshapes [B, H, K, Q] -> [I, B Q]."""
    return found.transpose(1, 2, 0, 3).reshape(-1, found.shape[0] * found.shape[3])


def grow(config: T5Config, batch: int, dtype: DTypeLike, slots: int, old: Cache | None) -> Cache:
    """Returns a cache with `slots` slots: the slots of `old`, if given, followed by zeros."""
    heads, width = batch * config.num_heads, config.d_kv
    if old is None:
        keys, values = jnp.zeros((heads, width, slots), dtype), jnp.zeros((heads, slots, width), dtype)
        return Cache((keys,) * config.num_decoder_layers, (values,) * config.num_decoder_layers)
    more = (0, slots - old.keys[0].shape[2])
    return Cache(
        keys=tuple(jnp.pad(x, ((0, 0), (0, 0), more)) for x in old.keys),
        values=tuple(jnp.pad(x, ((0, 0), more, (0, 0))) for x in old.values),
    )


def attend(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """Returns the attended values [B, H, K, Q] of queries [B, H, K, Q].

    Args:
      query: [B, H, K, Q].
      keys: [B * H, K, C], or [B, H, K, L].
      values: [B * H, C, K], or [B, H, L, K].
      bias: added to the scores f32 [B, H, Q, C].
    """
    batch, heads, width, queries = query.shape
    rows = query.swapaxes(2, 3).reshape(batch * heads, queries, width)
    keys, values = keys.reshape(-1, *keys.shape[-2:]), values.reshape(-1, *values.shape[-2:])
    scores = jnp.einsum("nqk,nkc->nqc", rows, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores.reshape(batch, heads, queries, -1) + bias, axis=3).astype(query.dtype)
    found = jnp.einsum("nqc,nck->nqk", weights.reshape(batch * heads, queries, -1), values)
    return found.reshape(batch, heads, queries, width).swapaxes(2, 3)
