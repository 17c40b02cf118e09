"""The T5 decoder as decoding needs it: one step of gathered live queries, on weights laid out for it once.

The same function of the same parameters as `t5.Decoder` without dropout, and tests hold the two together. What
differs is the cost. A step reads every weight for a few tokens, so weights lie in rows as they are read, projections
of the same input are one, and activations are columns: [D, N], a column a query. Whatever depends on positions alone
is computed once a step and shared by the layers.

Shapes as in `decoding.core`: B batch, N queries of a step, Q queries of one example, C cache slots, L source length,
D width, H heads, K head width, I = H * K, F feed-forward width, V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax.config import T5Config
from pipejax.decoding.core import Step
from pipejax.inference.backends import XLA, Backend, Matrix, Norm, SourceMemory
from pipejax.model.t5 import MASKED, buckets

Array = jax.Array


@flax.struct.dataclass
class Layer:
    """Weights of a decoder layer, in the compute dtype and laid out for a backend; norm scales are float32."""

    self_norm: Array  # [D]
    self_inwards: Matrix  # [3 I, D]: query, key, value
    self_outwards: Matrix  # [D, I]
    cross_norm: Array  # [D]
    cross_query: Matrix  # [I, D]
    cross_outwards: Matrix  # [D, I]
    feed_norm: Array  # [D]
    feed_inwards: Matrix  # [F, D], or gate and value [2 F, D]
    feed_outwards: Matrix  # [D, F]


@flax.struct.dataclass
class Weights:
    """What a decoder step reads, except for the source."""

    embedding: Array  # [V, D]
    layers: tuple[Layer, ...]
    norm: Array  # [D]
    head: Matrix  # [V, D], the embedding itself if tied
    bias: Array  # f32 [H, distances], the last for all that is farther


@flax.struct.dataclass
class Cache:
    """Keys and values of what was fed, a layer each, in the very shapes that the products of attention read.

    In any other shape XLA may write a step's keys twice, reshaped and not, and copy the cache to do so.
    """

    keys: tuple[Array, ...]  # [B * H, K, C]
    values: tuple[Array, ...]  # [B * H, C, K]


def lay_out(config: T5Config, params: Any, dtype: DTypeLike, backend: Backend) -> Weights:
    """The decoder's weights from a T5's parameters, but for its layers."""
    embedding = params["shared"]["embedding"].astype(dtype)
    head = embedding if config.tied_head else params["lm_head"]["kernel"].T.astype(dtype)
    longest = config.relative_attention_max_distance
    of_distance = buckets(np.arange(longest + 1), count=config.relative_attention_num_buckets, longest=longest)
    decoder = params["decoder"]
    return Weights(
        embedding=embedding,
        layers=(),
        norm=decoder["norm"]["scale"],
        head=backend.matrix(head),
        bias=decoder["relative_bias"]["embedding"][of_distance].T.astype(jnp.float32),
    )


def lay_out_layer(layer: Any, dtype: DTypeLike, backend: Backend) -> Layer:
    """A layer of the decoder from its parameters."""
    own, cross, feed = layer["self_attention"], layer["cross_attention"], layer["feed_forward"]

    def rows(*parts: Any) -> Matrix:
        return backend.matrix(jnp.concatenate([x["kernel"].T for x in parts]).astype(dtype))

    return Layer(
        self_norm=own["norm"]["scale"],
        self_inwards=rows(own["query"], own["key"], own["value"]),
        self_outwards=rows(own["output"]),
        cross_norm=cross["norm"]["scale"],
        cross_query=rows(cross["query"]),
        cross_outwards=rows(cross["output"]),
        feed_norm=feed["norm"]["scale"],
        feed_inwards=rows(*(feed[name] for name in ("wi", "wi_0", "wi_1") if name in feed)),
        feed_outwards=rows(feed["wo"]),
    )


@dataclasses.dataclass(frozen=True)
class StepDecoder:
    """A `decoding.Model`: the decoder over one batch of encoded sources."""

    config: T5Config
    weights: Weights
    memory: SourceMemory
    dtype: DTypeLike
    backend: Backend = XLA

    def cache(self, slots: int, old: Cache | None) -> Cache:
        """See `Model`."""
        c, heads = self.config, self.memory.mask.shape[0] * self.config.num_heads
        if old is None:
            keys, values = jnp.zeros((heads, c.d_kv, slots), self.dtype), jnp.zeros((heads, slots, c.d_kv), self.dtype)
            return Cache((keys,) * c.num_decoder_layers, (values,) * c.num_decoder_layers)
        more = (0, slots - old.keys[0].shape[2])
        return Cache(
            keys=tuple(jnp.pad(x, ((0, 0), (0, 0), more)) for x in old.keys),
            values=tuple(jnp.pad(x, ((0, 0), more, (0, 0))) for x in old.values),
        )

    def __call__(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """See `Model`."""
        w = self.weights
        bias = self._bias(step)
        x = w.embedding[step.tokens].T
        keys, values = [], []
        for i, layer in enumerate(w.layers):
            projected = _at_places(self._of_normed(layer.self_inwards, x, layer.self_norm), step)
            found, k, v = self.backend.attend(projected, cache.keys[i], cache.values[i], bias, step.start)
            keys.append(k)
            values.append(v)
            x = layer.self_outwards.added(_gathered(found, step), x)

            query = _at_places(self._of_normed(layer.cross_query, x, layer.cross_norm), step)
            x = layer.cross_outwards.added(_gathered(self.memory.attend(i, query), step), x)
            x = layer.feed_outwards.added(self._activated(x, layer), x)
        factor = self.config.d_model**-0.5 if self.config.scale_head else 1.0
        norm = Norm(w.norm, self.config.layer_norm_epsilon, factor)
        return w.head.of_normed(x, norm, dtype=jnp.float32), Cache(tuple(keys), tuple(values))

    def _of_normed(self, matrix: Matrix, x: Array, scale: Array, *, relu: bool = False) -> Array:
        return matrix.of_normed(x, Norm(scale, self.config.layer_norm_epsilon), relu=relu)

    def _activated(self, x: Array, layer: Layer) -> Array:
        if self.config.feed_forward == "relu":
            return self._of_normed(layer.feed_inwards, x, layer.feed_norm, relu=True)
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


def _at_places(x: Array, step: Step) -> Array:
    """[.., N] -> [.., B Q]: the queries of each example side by side."""
    if step.query_at_place is None:
        return x
    return jnp.take(x, step.query_at_place.reshape(-1), axis=1, mode="clip")  # fillers get any query


def _gathered(found: Array, step: Step) -> Array:
    """[.., B Q] -> [.., N]."""
    return found if step.place_of_query is None else jnp.take(found, step.place_of_query, axis=1, mode="clip")
