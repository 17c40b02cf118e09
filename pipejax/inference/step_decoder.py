"""The T5 decoder as decoding needs it: one step of gathered live queries, in XLA's products, on any device.

The same function of the same parameters as `t5.Decoder` without dropout, and tests hold the two together. What
differs is the cost. Weights lie as a step reads them (`weights`), and activations are columns: [D, N], a column a
query. Whatever depends on positions alone is computed once a step and shared by the layers.

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
from pipejax.decoding.core import Step
from pipejax.inference.weights import Layer, Matrix, Weights
from pipejax.model.t5 import MASKED, Memory

Array = jax.Array


@flax.struct.dataclass
class Cache:
    """Keys and values of what was fed, a layer each, in the very shapes that the products of attention read.

    In any other shape XLA may write a step's keys twice, reshaped and not, and copy the cache to do so.
    """

    keys: tuple[Array, ...]  # [B * H, K, C]
    values: tuple[Array, ...]  # [B * H, C, K]


@dataclasses.dataclass(frozen=True)
class StepDecoder:
    """A `decoding.Model`: the decoder over one batch of encoded sources."""

    config: T5Config
    weights: Weights
    memory: Memory
    dtype: DTypeLike

    def cache(self, slots: int, old: Cache | None) -> Cache:
        """See `Model`."""
        return grown(self.config, self.memory.mask.shape[0], self.dtype, slots, old)

    def __call__(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """See `Model`."""
        w = self.weights
        bias, memory_bias = self._bias(step), jnp.where(self.memory.mask, 0.0, MASKED)[:, None, None]
        x = self._embedded(step.tokens)
        keys, values = [], []
        for i, layer in enumerate(w.layers):
            projected = self._at_places(self._of_normed(layer.self_inwards, x, layer.self_norm), step)
            query, key, value = jnp.split(projected, 3, axis=1)  # [B, H, K, Q] each
            key, value = key.reshape(-1, *key.shape[2:]), value.reshape(-1, *value.shape[2:])
            k = jax.lax.dynamic_update_slice_in_dim(cache.keys[i], key, step.start, axis=2)
            v = jax.lax.dynamic_update_slice_in_dim(cache.values[i], value.swapaxes(1, 2), step.start, axis=1)
            keys.append(k)
            values.append(v)
            x = x + self._times(layer.self_outwards, self._gathered(attend(query, k, v, bias), step))

            query = self._at_places(self._of_normed(layer.cross_query, x, layer.cross_norm), step)
            found = attend(query, self.memory.keys[i], self.memory.values[i], memory_bias)
            x = x + self._times(layer.cross_outwards, self._gathered(found, step))
            x = x + self._times(layer.feed_outwards, self._activated(x, layer))
        factor = self.config.d_model**-0.5 if self.config.scale_head else 1.0
        return self._of_normed(w.head, x, w.norm, factor, jnp.float32), Cache(tuple(keys), tuple(values))

    def _embedded(self, tokens: Array) -> Array:
        """[D, N]."""
        table = self.weights.embedding or self.weights.head
        found = table.rows[tokens].astype(self.dtype)
        return (found * table.scale[tokens][:, None].astype(self.dtype) if table.scale.size else found).T

    def _of_normed(
        self, matrix: Matrix, x: Array, scale: Array, factor: float = 1.0, dtype: DTypeLike | None = None
    ) -> Array:
        """The matrix [O, I] times the norm of the columns x [I, N], times a factor: [O, N]; `dtype`: None is x's."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=0) + self.config.layer_norm_epsilon)
        hidden = (wide * inverse * scale[:, None]).astype(self.dtype)
        if factor != 1.0:
            hidden = hidden * jnp.asarray(factor, hidden.dtype)
        return self._times(matrix, hidden, dtype)

    def _times(self, matrix: Matrix, columns: Array, dtype: DTypeLike | None = None) -> Array:
        found = jnp.matmul(matrix.rows.astype(self.dtype), columns, preferred_element_type=dtype)
        return found * matrix.scale[:, None].astype(found.dtype) if matrix.scale.size else found

    def _activated(self, x: Array, layer: Layer) -> Array:
        if self.config.feed_forward == "relu":
            return jax.nn.relu(self._of_normed(layer.feed_inwards, x, layer.feed_norm))
        gate, value = jnp.split(self._of_normed(layer.feed_inwards, x, layer.feed_norm), 2)
        activation = (
            jax.nn.silu
            if self.config.feed_forward == "gated-silu"
            else functools.partial(jax.nn.gelu, approximate=True)
        )
        return activation(gate) * value

    def _bias(self, step: Step) -> Array:
        """f32 [B, H, Q, C] for self-attention."""
        table = self.weights.bias
        bias = jnp.take(table, jnp.clip(step.distance, 0, table.shape[1] - 1), axis=1)  # [H, B, Q, C]
        return jnp.where(step.mask[:, None], bias.swapaxes(0, 1), MASKED)

    def _at_places(self, x: Array, step: Step) -> Array:
        """[M I, N] -> [B, M H, K, Q]: the queries of each example side by side."""
        heads = x.reshape(-1, self.config.d_kv, x.shape[1])
        if step.query_at_place is None:
            return heads[None]
        found = jnp.take(heads, step.query_at_place, axis=2, mode="clip")  # fillers get any query
        return jnp.moveaxis(found, 2, 0)

    def _gathered(self, found: Array, step: Step) -> Array:
        """[B, H, K, Q] -> [I, N]."""
        if step.place_of_query is None:
            return found.reshape(-1, found.shape[3])
        columns = found.transpose(1, 2, 0, 3).reshape(-1, found.shape[0] * found.shape[3])
        return jnp.take(columns, step.place_of_query, axis=1, mode="clip")


def grown(config: T5Config, batch: int, dtype: DTypeLike, slots: int, old: Cache | None) -> Cache:
    """A cache of that many slots: those of `old`, if there is one, and zeroed ones after them."""
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
    """What queries [B, H, K, Q] find in keys [.., K, C] and values [.., C, K] under bias [B, .., C]."""
    batch, heads, width, queries = query.shape
    rows = query.swapaxes(2, 3).reshape(batch * heads, queries, width)
    keys, values = keys.reshape(-1, *keys.shape[-2:]), values.reshape(-1, *values.shape[-2:])
    scores = jnp.einsum("nqk,nkc->nqc", rows, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores.reshape(batch, heads, queries, -1) + bias, axis=3).astype(query.dtype)
    found = jnp.einsum("nqc,nck->nqk", weights.reshape(batch * heads, queries, -1), values)
    return found.reshape(batch, heads, queries, width).swapaxes(2, 3)
