"""The layers that a T5 is made of. Parameters are float32; `dtype` is that of the computation."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax import registry
from pipejax.model import lora
from pipejax.model.attention import attend
from pipejax.model.dropout import drop, seed_of
from pipejax.model.relative_bias import along_diagonals, by_bucket
from pipejax.model.slots import Distances, Seen
from pipejax.model.stock import picture
from pipejax.model.t5_config import T5Config

Array = jax.Array
Method = Any  # a function of a module's class


@partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key: Array, shape: tuple[int, ...], dtype: DTypeLike, scale: float) -> Array:
    return nn.initializers.normal(scale)(key, shape, dtype)


def normal(scale: float) -> nn.initializers.Initializer:
    """Draws from a normal distribution, by one program for each shape: see `pipejax.model.parameters.initial`."""

    def draw(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        return _drawn(key, tuple(shape), dtype, scale)

    return draw


class RMSNorm(nn.Module):
    """Root-mean-square norm without mean or bias, in float32."""

    epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Of the same shape."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (normed * scale).astype(self.dtype)


def multiplies_with(name: str) -> Callable[[Method], Method]:
    """Marks a method that multiplies with this parameter and does nothing else, which decoding may do faster."""

    def mark(method: Method) -> Method:
        method.multiplies_with = name
        return method

    return mark


def capped_by(setting: str) -> Callable[[Method], Method]:
    """Marks a module's `logits` that is the head's products and nothing else, bent softly below a setting.

    0 there: not bent. Decoding may then leave out products that are lower than the highest.
    """

    def mark(method: Method) -> Method:
        method.capped_by = setting
        return method

    return mark


class Linear(nn.Module):
    """x W, plus x A B where the parameters hold low-rank factors (`pipejax.model.lora`).

    W may be int8 with a scale for each output (`pipejax.model.quantization`).
    """

    features: int
    dtype: DTypeLike
    kernel_init: nn.initializers.Initializer

    @multiplies_with("kernel")
    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[..., features] from [..., in]."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        x = x.astype(self.dtype)
        answer = jnp.dot(x, kernel.astype(self.dtype))
        if self.has_variable("params", "scale"):
            scale: Array = self.get_variable("params", "scale")
            answer = answer * scale.astype(self.dtype)
        if not self.has_variable("params", lora.A):
            return answer
        a: Array = self.get_variable("params", lora.A)
        b: Array = self.get_variable("params", lora.B)
        low = jnp.dot(x, a.astype(self.dtype))
        if self.has_variable("params", lora.OF):  # [B, rank]: the part of each example's adapter
            of: Array = self.get_variable("params", lora.OF)
            low = low * of[:, None].astype(self.dtype)
        return answer + jnp.dot(low, b.astype(self.dtype))


class Dropout(nn.Module):
    """`pipejax.model.dropout.drop` with a seed of its own."""

    rate: float

    @nn.compact
    def __call__(self, x: Array, deterministic: bool) -> Array:
        """x itself if there is nothing to drop."""
        return x if deterministic or not self.rate else drop(x, seed_of(self), self.rate)


class Head(nn.Module):
    """An own head: logits f32 [..., V], accumulated in float32 whatever the compute dtype."""

    features: int
    dtype: DTypeLike

    @multiplies_with("kernel")
    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """[..., features] from [..., D]."""
        kernel = self.param("kernel", normal(1.0), (hidden.shape[-1], self.features))
        found = logits_of(hidden, kernel.T, self.dtype)
        if not self.has_variable("params", "scale"):
            return found
        scale: Array = self.get_variable("params", "scale")  # of int8
        return found * scale


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def logits_of(hidden: Array, rows: Array, dtype: DTypeLike) -> Array:
    """f32 [..., V] from hidden [..., D] and rows [V, D], multiplied in `dtype` and summed in float32.

    So are both products of the gradient: the logits' own is float32, and a product with that would be slow.
    """
    return jnp.einsum("...d,vd->...v", hidden.astype(dtype), rows.astype(dtype), preferred_element_type=jnp.float32)


def _forward(hidden: Array, rows: Array, dtype: DTypeLike) -> tuple[Array, tuple[Array, Array]]:
    return logits_of(hidden, rows, dtype), (hidden, rows)


def _backward(dtype: DTypeLike, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    hidden, rows = kept
    gradient, product = gradient.astype(dtype), partial(jnp.einsum, preferred_element_type=jnp.float32)
    of_hidden = product("...v,vd->...d", gradient, rows.astype(dtype))
    of_rows = product("...v,...d->vd", gradient, hidden.astype(dtype))
    return of_hidden.astype(hidden.dtype), of_rows.astype(rows.dtype)


logits_of.defvjp(_forward, _backward)


def buckets(distances: np.ndarray, *, count: int, longest: int) -> np.ndarray:
    """T5's relative position buckets of non-negative distances: exact up to count / 2, logarithmic up to `longest`."""
    exact = count // 2
    ratio = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(longest / exact)
    )
    logarithmic = exact + (ratio * np.float32(count - exact)).astype(np.int32)
    return np.where(distances < exact, distances, np.minimum(logarithmic, count - 1)).astype(np.int32)


class RelativeBias(nn.Module):
    """One learned number per bucket of distance and head."""

    config: T5Config
    bidirectional: bool

    def setup(self) -> None:
        c = self.config
        self.embedding = self.param(
            "embedding", normal(c.d_model**-0.5), (c.relative_attention_num_buckets, c.num_heads)
        )

    def _buckets(self) -> np.ndarray:
        """The bucket of each distance up to the longest; bidirectional: of each offset, the most negative first."""
        count, longest = self.config.relative_attention_num_buckets, self.config.relative_attention_max_distance
        distances = np.arange(longest + 1)
        if not self.bidirectional:
            return buckets(distances, count=count, longest=longest)
        # Keys after the query use the upper half of the buckets.
        half = buckets(distances, count=count // 2, longest=longest)
        return np.concatenate([half[:0:-1], half[:1], half[1:] + count // 2])

    def distances(self) -> Distances:
        """The same by the difference of two positions, query - key."""
        buckets = self._buckets()
        # Keys ahead, which a decoder's query does not see, get any bucket.
        both = buckets[::-1] if self.bidirectional else np.concatenate([np.zeros(len(buckets) - 1, np.int32), buckets])
        return Distances(self.embedding.astype(jnp.float32), jnp.asarray(both))

    def within(self, length: int) -> Array:
        """f32 [1, H, L, L], bidirectional, among the tokens of a sequence."""
        longest = self.config.relative_attention_max_distance
        offsets = np.clip(np.arange(1 - length, length), -longest, longest)
        bucket = jnp.asarray(self._buckets()[offsets + longest])
        values = by_bucket(self.embedding, bucket[None, None])[0, :, 0]
        return along_diagonals(values, length)[None].astype(jnp.float32)

    def __call__(self, query: Array, key: Array) -> Array:
        """f32 [1|B, H, Q, C] from positions i32 [1|B, Q] and [1|B, C]."""
        longest = self.config.relative_attention_max_distance
        back = query[:, :, None] - key[:, None]
        # Keys ahead, which a decoder's query does not see, get any bucket.
        place = jnp.clip(longest - back, 0, 2 * longest) if self.bidirectional else jnp.clip(back, 0, longest)
        bucket = jnp.asarray(self._buckets())[place]
        return by_bucket(self.embedding, bucket).astype(jnp.float32)


class Attention(nn.Module):
    """Multi-head attention with an additive bias, its norm and its residual; T5 does not divide by sqrt(d)."""

    config: T5Config
    dtype: DTypeLike
    dropout: float
    over_sources: bool = False  # whether the keys are of sources

    def setup(self) -> None:
        c = self.config
        inner = c.num_heads * c.d_kv
        dense = partial(Linear, dtype=self.dtype)
        self.norm = RMSNorm(c.layer_norm_epsilon, self.dtype)
        self.query = dense(inner, kernel_init=normal((c.d_model * c.d_kv) ** -0.5))
        self.key = dense(inner, kernel_init=normal(c.d_model**-0.5))
        self.value = dense(inner, kernel_init=normal(c.d_model**-0.5))
        self.output = dense(c.d_model, kernel_init=normal(inner**-0.5))
        self.drop = Dropout(self.dropout)

    def heads(self, x: Array) -> Array:
        """[B, L, H*K] -> [B, H, L, K]."""
        return x.reshape(*x.shape[:2], self.config.num_heads, self.config.d_kv).swapaxes(1, 2)

    def keys_values(self, x: Array) -> tuple[Array, Array]:
        """Keys and values [B, H, L, K] of already normed states [B, L, D]."""
        return self.heads(self.key(x)), self.heads(self.value(x))

    def attend(
        self, x: Array, normed: Array, keys: Array, values: Array, bias: Array | Seen, deterministic: bool
    ) -> Array:
        """x [B, Q, D] plus what its normed form, as large, finds in keys and values [B, H, C, K]."""
        queries = self.heads(self.query(normed))
        seed = None if deterministic or not self.dropout else seed_of(self)
        attend_to: Any = attend
        if isinstance(bias, Seen):
            # Imported here, as importing Pallas takes time, which decoding on a CPU need not spend.
            attend_to = registry.find(registry.BLOCK_ATTENTION).attend_in_blocks
        found = attend_to(queries, keys, values, bias, seed, self.dropout, over_sources=self.over_sources)
        found = found.swapaxes(1, 2)
        return x + self.drop(self.output(found.reshape(x.shape[0], x.shape[1], -1)), deterministic=deterministic)


class FeedForward(nn.Module):
    """The position-wise network, its norm and its residual."""

    config: T5Config
    dtype: DTypeLike
    dropout: float

    @nn.compact
    def __call__(self, x: Array, deterministic: bool) -> Array:
        c = self.config
        dense = partial(Linear, dtype=self.dtype)
        inwards = partial(dense, c.d_ff, kernel_init=normal(c.d_model**-0.5))
        drop = Dropout(self.dropout)
        hidden = RMSNorm(c.layer_norm_epsilon, self.dtype, name="norm")(x)
        if c.feed_forward == "relu":
            hidden = nn.relu(inwards(name="wi")(hidden))
        else:
            activation = nn.silu if c.feed_forward == "gated-silu" else partial(nn.gelu, approximate=True)
            hidden = activation(inwards(name="wi_0")(hidden)) * inwards(name="wi_1")(hidden)
        hidden = drop(hidden, deterministic=deterministic)
        hidden = dense(c.d_model, kernel_init=normal(c.d_ff**-0.5), name="wo")(hidden)
        return x + drop(hidden, deterministic=deterministic)


STOCK = picture(globals())  # see `t5.is_packed`
