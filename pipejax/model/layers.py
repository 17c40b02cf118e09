"""The layers of a T5. Parameters are float32; `dtype` is the dtype of the computation.

Shapes: B batch, L length, Q queries, C keys, D width, H heads, K head width, V vocabulary.
"""

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
from pipejax.model.snapshot import snapshot
from pipejax.model.t5_config import T5Config

Array = jax.Array
Method = Any  # a method of a module's class


@partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key: Array, shape: tuple[int, ...], dtype: DTypeLike, scale: float) -> Array:
    """Draws an array from a normal distribution; compiled once for each shape, dtype and scale."""
    return nn.initializers.normal(scale)(key, shape, dtype)


def normal(scale: float) -> nn.initializers.Initializer:
    """Returns an initializer that draws from a normal distribution with standard deviation `scale`.

    It compiles one program for each shape and scale: see `pipejax.model.parameters.initial`.
    """

    def draw(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> Array:
        return _drawn(key, tuple(shape), dtype, scale)

    return draw


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, without mean or bias, computed in float32."""

    epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Returns the normalised and scaled x, of the same shape, in `dtype`."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (normed * scale).astype(self.dtype)


def multiplies_with(name: str) -> Callable[[Method], Method]:
    """Marks a method that only multiplies its input with the parameter `name`, so that decoding may use a kernel."""

    def mark(method: Method) -> Method:
        method.multiplies_with = name
        return method

    return mark


def capped_by(setting: str) -> Callable[[Method], Method]:
    """Marks a module's `logits` that consists of the head's products and an optional soft cap (tanh).

    The cap is monotonic, so the highest product is the highest logit, and greedy decoding may skip products that
    cannot be the highest.

    Args:
      setting: the name of the config's field that contains the cap; 0 there means no cap.
    """

    def mark(method: Method) -> Method:
        method.capped_by = setting
        return method

    return mark


class Linear(nn.Module):
    """A linear layer: x W, plus x A B if the parameters contain low-rank factors (`pipejax.model.lora`).

    W may be int8 with a float32 scale for each output (`pipejax.model.quantization`).
    """

    features: int
    dtype: DTypeLike
    kernel_init: nn.initializers.Initializer

    @multiplies_with("kernel")
    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps x [..., in] to the outputs [..., features]."""
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
        if self.has_variable("params", lora.OF):  # [B, rank], 1 for the components of each example's adapter, else 0
            of: Array = self.get_variable("params", lora.OF)
            low = low * of[:, None].astype(self.dtype)
        return answer + jnp.dot(low, b.astype(self.dtype))


class Dropout(nn.Module):
    """Dropout (`pipejax.model.dropout.drop`). Each module draws its own seed."""

    rate: float

    @nn.compact
    def __call__(self, x: Array, deterministic: bool) -> Array:
        """Returns x after dropout; x itself if `deterministic` is True or the rate is 0."""
        return x if deterministic or not self.rate else drop(x, seed_of(self), self.rate)


class Head(nn.Module):
    """A head with a separate weight matrix: logits f32 [..., V], accumulated in float32 for every compute dtype."""

    features: int
    dtype: DTypeLike

    @multiplies_with("kernel")
    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """Maps hidden states [..., D] to the logits [..., features]."""
        kernel = self.param("kernel", normal(1.0), (hidden.shape[-1], self.features))
        found = logits_of(hidden, kernel.T, self.dtype)
        if not self.has_variable("params", "scale"):
            return found
        scale: Array = self.get_variable("params", "scale")  # f32 [V], the scales of an int8 kernel
        return found * scale


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def logits_of(hidden: Array, rows: Array, dtype: DTypeLike) -> Array:
    """Returns logits f32 [..., V] of hidden states [..., D] and rows [V, D], multiplied in `dtype`, summed in float32.

    Both products of the gradient are computed in the same way: the float32 gradient of the logits is rounded to `dtype`
    first, since float32 products would be slow.
    """
    return jnp.einsum("...d,vd->...v", hidden.astype(dtype), rows.astype(dtype), preferred_element_type=jnp.float32)


def _forward(hidden: Array, rows: Array, dtype: DTypeLike) -> tuple[Array, tuple[Array, Array]]:
    return logits_of(hidden, rows, dtype), (hidden, rows)


def _backward(dtype: DTypeLike, kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    """Returns the gradients of `hidden` and of `rows`, with the `gradient` f32 [..., V] rounded to `dtype`."""
    hidden, rows = kept
    gradient, product = gradient.astype(dtype), partial(jnp.einsum, preferred_element_type=jnp.float32)
    of_hidden = product("...v,vd->...d", gradient, rows.astype(dtype))
    of_rows = product("...v,...d->vd", gradient, hidden.astype(dtype))
    return of_hidden.astype(hidden.dtype), of_rows.astype(rows.dtype)


logits_of.defvjp(_forward, _backward)


def buckets(distances: np.ndarray, *, count: int, longest: int) -> np.ndarray:
    """Returns T5's relative position buckets of non-negative distances (Raffel et al. 2020, section 2.1).

    Each distance below count / 2 has its own bucket. Longer distances share buckets of logarithmically growing width,
    and all distances from `longest` on share the last one.

    Args:
      distances: integers of any shape.
      count: the number of buckets.
      longest: a distance; this and all greater distances are in the last bucket.

    Returns:
      i32, the buckets, 0 to count - 1.
    """
    exact = count // 2
    ratio = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(longest / exact)
    )
    logarithmic = exact + (ratio * np.float32(count - exact)).astype(np.int32)
    return np.where(distances < exact, distances, np.minimum(logarithmic, count - 1)).astype(np.int32)


class RelativeBias(nn.Module):
    """T5's relative attention bias: one learned number for each bucket of distances and each head."""

    config: T5Config
    bidirectional: bool

    def setup(self) -> None:
        c = self.config
        self.embedding = self.param(
            "embedding", normal(c.d_model**-0.5), (c.relative_attention_num_buckets, c.num_heads)
        )

    def _buckets(self) -> np.ndarray:
        """Returns i32, the buckets of the distances 0, 1, ... up to the longest.

        For a bidirectional bias, they are the buckets of the offsets key - query, from the most negative one on.
        """
        count, longest = self.config.relative_attention_num_buckets, self.config.relative_attention_max_distance
        distances = np.arange(longest + 1)
        if not self.bidirectional:
            return buckets(distances, count=count, longest=longest)
        # Keys after the query use the upper half of the buckets.
        half = buckets(distances, count=count // 2, longest=longest)
        return np.concatenate([half[:0:-1], half[:1], half[1:] + count // 2])

    def distances(self) -> Distances:
        """Returns the bias as a function of the difference of two positions, query - key, for attention in blocks."""
        buckets = self._buckets()
        # The bucket of keys with a later position does not matter in a decoder, as no query sees them.
        both = buckets[::-1] if self.bidirectional else np.concatenate([np.zeros(len(buckets) - 1, np.int32), buckets])
        return Distances(self.embedding.astype(jnp.float32), jnp.asarray(both))

    def within(self, length: int) -> Array:
        """Returns f32 [1, H, L, L], the bidirectional bias between the tokens of a sequence of `length` tokens."""
        longest = self.config.relative_attention_max_distance
        offsets = np.clip(np.arange(1 - length, length), -longest, longest)
        bucket = jnp.asarray(self._buckets()[offsets + longest])
        values = by_bucket(self.embedding, bucket[None, None])[0, :, 0]
        return along_diagonals(values, length)[None].astype(jnp.float32)

    def __call__(self, query: Array, key: Array) -> Array:
        """Returns the bias f32 [1|B, H, Q, C] between positions of queries i32 [1|B, Q] and of keys i32 [1|B, C]."""
        longest = self.config.relative_attention_max_distance
        back = query[:, :, None] - key[:, None]
        # The bucket of keys with a later position does not matter in a decoder, as no query sees them.
        place = jnp.clip(longest - back, 0, 2 * longest) if self.bidirectional else jnp.clip(back, 0, longest)
        bucket = jnp.asarray(self._buckets())[place]
        return by_bucket(self.embedding, bucket).astype(jnp.float32)


class Attention(nn.Module):
    """Multi-head attention with an additive bias, with its norm and residual. Scores are not divided by sqrt(K)."""

    config: T5Config
    dtype: DTypeLike
    dropout: float
    over_sources: bool = False  # whether the keys are tokens of sources, as in cross-attention

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
        """Splits the last axis into heads: [B, L, H * K] -> [B, H, L, K], for any number of heads H."""
        return x.reshape(*x.shape[:2], -1, self.config.d_kv).swapaxes(1, 2)

    def keys_values(self, x: Array) -> tuple[Array, Array]:
        """Returns the keys and values [B, H, L, K] of states [B, L, D] that are already normalised."""
        return self.heads(self.key(x)), self.heads(self.value(x))

    def together(self, x: Array, *names: str) -> tuple[Array | None, ...]:
        """Returns the heads of n projections of x [B, L, D] in one array [B, n H, L, K], followed by n - 1 times None.

        One product computes them, in the form that attention in blocks reads. If a layer has other parameters than its
        kernel, such as low-rank factors, the results are the heads [B, H, L, K] of each projection.

        Args:
          x: the states.
          names: the fields of the n projections, such as "key" and "value".
        """
        projections = [getattr(self, name) for name in names]
        kernels = [projection.variables["params"] for projection in projections]
        if any(set(of_layer) != {"kernel"} for of_layer in kernels):
            return tuple(self.heads(projection(x)) for projection in projections)
        kernel = jnp.concatenate([of_layer["kernel"].astype(self.dtype) for of_layer in kernels], axis=1)
        return self.heads(jnp.dot(x.astype(self.dtype), kernel)), *[None] * (len(names) - 1)

    def attend(
        self,
        x: Array,
        normed: Array,
        keys: Array | None,
        values: Array | None,
        bias: Array | Seen,
        deterministic: bool,
    ) -> Array:
        """Returns the residual x plus the output of attention, [B, Q, D].

        Args:
          x: [B, Q, D], the input of the layer.
          normed: [B, Q, D], x after the norm, from which the queries are computed.
          keys: [B, H, C, K]; None: keys and values are computed from `normed` as well, for attention in blocks.
          values: [B, H, C, K]; None: `keys` holds both, see `together`.
          bias: f32 [B|1, H|1, Q|1, C], added to the scores; or a `Seen`, for attention in blocks.
          deterministic: whether dropout is off.
        """
        queries: Array | None
        if keys is None:
            queries, keys, values = self.together(normed, "query", "key", "value")
        else:
            queries = self.heads(self.query(normed))
        seed = None if deterministic or not self.dropout else seed_of(self)
        attend_to: Callable[..., Array] = attend
        if isinstance(bias, Seen):
            # Imported here because importing Pallas takes time, and a CPU does not need it.
            attend_to = registry.find(registry.BLOCK_ATTENTION).attend_in_blocks
        found = attend_to(queries, keys, values, bias, seed, self.dropout, over_sources=self.over_sources)
        found = found.swapaxes(1, 2)
        return x + self.drop(self.output(found.reshape(x.shape[0], x.shape[1], -1)), deterministic=deterministic)


class FeedForward(nn.Module):
    """The position-wise feed-forward network, with its norm and residual: [B, L, D] -> [B, L, D]."""

    config: T5Config
    dtype: DTypeLike
    dropout: float

    @nn.compact
    def __call__(self, x: Array, deterministic: bool) -> Array:
        """Returns the residual x plus the output of the network, [B, L, D]."""
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


SNAPSHOT = snapshot(globals())  # see `t5.is_packed`
