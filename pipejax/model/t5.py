"""The T5 encoder-decoder. Masks and positions in, logits out: no grids, tasks, meshes or files here.

Shapes: B batch, L source length, Q queries of a call, C keys, D width, H heads, K head width,
F feed-forward width, V vocabulary. In a mask True means "may attend". Parameters are float32; `dtype` is that of the
computation, and norms, softmax and logits are float32 always. Architecture: Raffel et al. 2020 (v1.0) and its v1.1, mT5
and ByT5 variants.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax.config import T5Config
from pipejax.model.attention import attend
from pipejax.model.dropout import make_seed
from pipejax.model.embedding import look_up
from pipejax.model.layers import Dropout, Head, Linear, RMSNorm, logits_of
from pipejax.model.relative_bias import along_diagonals, by_bucket

Array = jax.Array
VECTORS = ("norm/scale", "relative_bias/embedding")  # how the paths of parameters end that are no weight matrices
MASKED = -1e9  # finite: a query that sees nothing gets a uniform softmax instead of NaN, and nobody reads it


@flax.struct.dataclass
class Memory:
    """Cross-attention keys and values of a source, computed once for decoding (`pipejax.inference.step_decoder`)."""

    keys: tuple[Array, ...]  # a layer each [B, H, K, L]
    values: tuple[Array, ...]  # [B, H, L, K]
    mask: Array  # bool [B, L]


def buckets(distances: np.ndarray, *, count: int, longest: int) -> np.ndarray:
    """T5's relative position buckets of non-negative distances: exact up to count / 2, logarithmic up to `longest`."""
    exact = count // 2
    ratio = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(longest / exact)
    )
    logarithmic = exact + (ratio * np.float32(count - exact)).astype(np.int32)
    return np.where(distances < exact, distances, np.minimum(logarithmic, count - 1)).astype(np.int32)


def unpinned(x: Array) -> Array:
    """Leaves it to XLA where activations lie."""
    return x


class RelativeBias(nn.Module):
    """One learned number per bucket of distance and head, shared by all layers of a stack."""

    config: T5Config
    bidirectional: bool

    def setup(self) -> None:
        c = self.config
        self.embedding = self.param(
            "embedding", nn.initializers.normal(c.d_model**-0.5), (c.relative_attention_num_buckets, c.num_heads)
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

    def setup(self) -> None:
        c = self.config
        inner = c.num_heads * c.d_kv
        dense = partial(Linear, dtype=self.dtype)
        self.norm = RMSNorm(c.layer_norm_epsilon, self.dtype)
        self.query = dense(inner, kernel_init=nn.initializers.normal((c.d_model * c.d_kv) ** -0.5))
        self.key = dense(inner, kernel_init=nn.initializers.normal(c.d_model**-0.5))
        self.value = dense(inner, kernel_init=nn.initializers.normal(c.d_model**-0.5))
        self.output = dense(c.d_model, kernel_init=nn.initializers.normal(inner**-0.5))
        self.drop = Dropout(self.dropout)

    def heads(self, x: Array) -> Array:
        """[B, L, H*K] -> [B, H, L, K]."""
        return x.reshape(*x.shape[:2], self.config.num_heads, self.config.d_kv).swapaxes(1, 2)

    def keys_values(self, x: Array) -> tuple[Array, Array]:
        """Keys and values [B, H, L, K] of already normed states [B, L, D]."""
        return self.heads(self.key(x)), self.heads(self.value(x))

    def attend(self, x: Array, normed: Array, keys: Array, values: Array, bias: Array, deterministic: bool) -> Array:
        """x plus what its normed form finds in keys and values, [B, Q, D].

        Args:
          x, normed: [B, Q, D].
          keys, values: [B, H, C, K].
          bias: [B|1, H|1, Q|1, C].
        """
        queries = self.heads(self.query(normed))
        seed = None if deterministic or not self.dropout else make_seed(self.make_rng("dropout"))
        found = attend(queries, keys, values, bias, seed, self.dropout).swapaxes(1, 2)
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
        inwards = partial(dense, c.d_ff, kernel_init=nn.initializers.normal(c.d_model**-0.5))
        drop = Dropout(self.dropout)
        hidden = RMSNorm(c.layer_norm_epsilon, self.dtype, name="norm")(x)
        if c.feed_forward == "relu":
            hidden = nn.relu(inwards(name="wi")(hidden))
        else:
            activation = nn.silu if c.feed_forward == "gated-silu" else partial(nn.gelu, approximate=True)
            hidden = activation(inwards(name="wi_0")(hidden)) * inwards(name="wi_1")(hidden)
        hidden = drop(hidden, deterministic=deterministic)
        hidden = dense(c.d_model, kernel_init=nn.initializers.normal(c.d_ff**-0.5), name="wo")(hidden)
        return x + drop(hidden, deterministic=deterministic)


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    config: T5Config
    dtype: DTypeLike
    dropout: float

    def setup(self) -> None:
        self.attention = Attention(self.config, self.dtype, self.dropout)
        self.feed_forward = FeedForward(self.config, self.dtype, self.dropout)

    def __call__(self, x: Array, bias: Array, padding: Array, deterministic: bool) -> Array:
        normed = self.attention.norm(x)
        # Added up here, where it fuses with the scores: [B, H, L, L] is never held for all layers.
        x = self.attention.attend(x, normed, *self.attention.keys_values(normed), bias + padding, deterministic)
        return self.feed_forward(x, deterministic)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention over the encoded source, feed-forward."""

    config: T5Config
    dtype: DTypeLike
    dropout: float

    def setup(self) -> None:
        self.self_attention = Attention(self.config, self.dtype, self.dropout)
        self.cross_attention = Attention(self.config, self.dtype, self.dropout)
        self.feed_forward = FeedForward(self.config, self.dtype, self.dropout)

    def __call__(self, x: Array, bias: Array, encoded: Array, memory_bias: Array, deterministic: bool) -> Array:
        """Teacher-forced: the keys are the queries themselves, and the memory is computed here."""
        normed = self.self_attention.norm(x)
        x = self.self_attention.attend(x, normed, *self.self_attention.keys_values(normed), bias, deterministic)
        normed, memory = self.cross_attention.norm(x), self.cross_attention.keys_values(encoded)
        x = self.cross_attention.attend(x, normed, *memory, memory_bias, deterministic)
        return self.feed_forward(x, deterministic)


def apply_layers(
    layers: Sequence[nn.Module],
    x: Array,
    *seen: Array,
    deterministic: bool,
    remat: str,
    keys: Callable[[], Array],
    pin: Callable[[Array], Array],
) -> Array:
    """Runs x through a stack of equal layers: `x = layer(x, *seen, deterministic)`.

    With `remat` "none" layer by layer. Otherwise in one `lax.scan` over the stacked parameters, which compiles one
    layer instead of all, and keeps for the backward pass each layer's input alone ("layers") or the results of its
    weight matrices, too ("dots"); the rest is computed again. XLA sees what that saves only in a scan.

    Args:
      layers: bound modules that differ in nothing but their parameters.
      x: [B, L, D].
      seen: what all layers are given alike.
      deterministic: False applies dropout.
      remat: one of `pipejax.config.REMATS`.
      keys: makes the rng from which each layer's dropout key is folded; called only if dropout applies.
      pin: says where x lies between layers of a scan, inside of which XLA would lay it out as the weights are.
    """
    if remat == "none":
        for layer in layers:
            x = layer(x, *seen, deterministic)
        return x
    layer = layers[0].clone(parent=None, name=None)
    # Cast first: a stack is a copy, and gradients of matrices are in the compute dtype either way.
    own = (cast_params(each.variables["params"], layer.dtype) for each in layers)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *own)
    dropout = None if deterministic else jax.random.split(keys(), len(layers))

    def body(x: Array, given: tuple[Any, Array | None]) -> tuple[Array, None]:
        params, key = given
        rngs = None if key is None else {"dropout": key}
        return layer.apply({"params": params}, pin(x), *seen, deterministic, rngs=rngs), None  # type: ignore[return-value]

    policies = jax.checkpoint_policies
    kept = policies.nothing_saveable if remat == "layers" else policies.dots_with_no_batch_dims_saveable
    # The scan itself keeps XLA from merging the second computation with the first.
    return jax.lax.scan(jax.checkpoint(body, policy=kept, prevent_cse=False), x, (stacked, dropout))[0]


class Encoder(nn.Module):
    """The encoder's stack: embedded tokens [B, L, D] to encoded ones."""

    config: T5Config
    dtype: DTypeLike
    dropout: float
    remat: str = "none"
    pin: Callable[[Array], Array] = unpinned

    def setup(self) -> None:
        c = self.config
        self.relative_bias = RelativeBias(c, bidirectional=True)
        self.layers = [EncoderLayer(c, self.dtype, self.dropout) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.layer_norm_epsilon, self.dtype)
        self.drop = Dropout(self.dropout)

    def __call__(self, x: Array, mask: Array, deterministic: bool) -> Array:
        bias = self.relative_bias.within(x.shape[1])
        if self.remat == "none":
            # Else its gradient is summed over the examples in each layer, which takes XLA long on CPUs. A scan is there
            # to save memory, and had better keep the sum.
            bias = jnp.broadcast_to(bias, (x.shape[0], *bias.shape[1:]))
        seen = bias, jnp.where(mask[:, None, None, :], 0.0, MASKED)
        x = self.drop(x, deterministic=deterministic)
        keys = partial(self.make_rng, "dropout")
        x = apply_layers(self.layers, x, *seen, deterministic=deterministic, remat=self.remat, keys=keys, pin=self.pin)
        return self.drop(self.norm(x), deterministic=deterministic)


class Decoder(nn.Module):
    """The decoder's stack: embedded queries [B, Q, D] to hidden states of the same shape."""

    config: T5Config
    dtype: DTypeLike
    dropout: float
    remat: str = "none"
    pin: Callable[[Array], Array] = unpinned

    def setup(self) -> None:
        c = self.config
        self.relative_bias = RelativeBias(c, bidirectional=False)
        self.layers = [DecoderLayer(c, self.dtype, self.dropout) for _ in range(c.num_decoder_layers)]
        self.norm = RMSNorm(c.layer_norm_epsilon, self.dtype)
        self.drop = Dropout(self.dropout)

    def memorize(self, encoded: Array, mask: Array) -> Memory:
        pairs = [layer.cross_attention.keys_values(encoded) for layer in self.layers]
        return Memory(keys=tuple(k.swapaxes(2, 3) for k, _ in pairs), values=tuple(v for _, v in pairs), mask=mask)

    def __call__(
        self, x: Array, mask: Array, position: Array, encoded: Array, memory_mask: Array, deterministic: bool
    ) -> Array:
        """Teacher-forced; `memory_mask` is bool [B, 1|N, L]."""
        bias = jnp.where(mask[:, None], self.relative_bias(position, position), MASKED)
        memory_bias = jnp.where(memory_mask[:, None], 0.0, MASKED)
        x = self.drop(x, deterministic=deterministic)
        seen, keys = (bias, encoded, memory_bias), partial(self.make_rng, "dropout")
        x = apply_layers(self.layers, x, *seen, deterministic=deterministic, remat=self.remat, keys=keys, pin=self.pin)
        return self.drop(self.norm(x), deterministic=deterministic)


class T5(nn.Module):
    """A T5. Call its methods with `model.apply({"params": params}, ..., method="encode")`."""

    config: T5Config
    dtype: DTypeLike = jnp.float32
    dropout: float = 0.0
    remat: str = "none"  # the trade of time for memory in teacher-forced calls: see `apply_layers`
    pin: Callable[[Array], Array] = unpinned  # a sharding constraint on [B, L, D] between the layers of a scan
    shards: int = 1  # on how many devices a batch lies when it trains

    def setup(self) -> None:
        c = self.config
        self.shared = nn.Embed(c.vocab_size, c.d_model, embedding_init=nn.initializers.normal(1.0))
        self.encoder = Encoder(c, self.dtype, self.dropout, self.remat, self.pin)
        self.decoder = Decoder(c, self.dtype, self.dropout, self.remat, self.pin)
        if not c.tied_head:
            self.lm_head = Head(c.vocab_size, self.dtype)

    def embed(self, *tokens: Array) -> tuple[Array, ...]:
        """[..., D] in the compute dtype for each array of tokens [...]."""
        embedded = look_up(self.shared.embedding, tokens, self.dtype, self.shards)
        if not self.shared.has_variable("params", "scale"):
            return embedded
        scale: Array = self.shared.get_variable("params", "scale")  # of int8
        return tuple(x * scale[named][..., None].astype(self.dtype) for x, named in zip(embedded, tokens, strict=True))

    def encode(self, tokens: Array, mask: Array, *, deterministic: bool = True) -> Memory:
        """Encodes sources once and for all.

        Args:
          tokens: i32 [B, L].
          mask: bool [B, L], True at real tokens (never judged by id: 0 is a legal token).
          deterministic: False applies dropout (needs the rng "dropout").
        """
        (embedded,) = self.embed(tokens)
        encoded = self.encoder(embedded, mask, deterministic)
        return self.decoder.memorize(encoded, mask)

    def logits(self, hidden: Array) -> Array:
        """f32 [..., V] from the decoder's output [..., D]."""
        if self.config.scale_head:
            hidden = hidden * jnp.asarray(self.config.d_model**-0.5, hidden.dtype)
        if not self.config.tied_head:
            return self.lm_head(hidden)
        return logits_of(hidden, self.shared.embedding, self.dtype)

    def hidden(
        self,
        source: Array,
        source_mask: Array,
        tokens: Array,
        mask: Array,
        position: Array,
        memory_mask: Array | None = None,
        *,
        deterministic: bool = True,
    ) -> Array:
        """Teacher-forced outputs of the decoder [G, N, D], for `logits`.

        Args:
          source: i32 [B, L].
          source_mask: bool [B, L].
          tokens: i32 [G, N]; each of the G rows of slots sees the memories of B / G consecutive sources end to end.
          mask: bool [G|1, N, N].
          position: i32 [G|1, N]; less that of a slot that it sees, it is how far that lies back.
          memory_mask: bool [G, N, B / G * L], which source each slot sees (padding apart); None: all of its row's.
          deterministic: False applies dropout.
        """
        embedded, inputs = self.embed(source, tokens)
        encoded = self.encoder(embedded, source_mask, deterministic)
        groups = tokens.shape[0]
        encoded = encoded.reshape(groups, -1, encoded.shape[-1])
        real = source_mask.reshape(groups, 1, -1)
        seen = real if memory_mask is None else memory_mask & real
        return self.decoder(inputs, mask, position, encoded, seen, deterministic)

    def __call__(self, *args: Array, deterministic: bool = True) -> Array:
        """Teacher-forced logits f32 [G, N, V]; touches every parameter, so `init` may use it."""
        return self.logits(self.hidden(*args, deterministic=deterministic))


def init_params(config: T5Config, rng: Array) -> Any:
    """Fresh float32 parameters with Hugging Face's initial scales. Jit-able: see the paths in `tests/test_t5.py`."""
    token, seen = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool)
    return T5(config).init(rng, token, seen, token, seen[:, None], token)["params"]


def cast_params(params: Any, dtype: DTypeLike) -> Any:
    """Parameters in the compute dtype, so that decoding does not read float32; norms and biases stay float32."""

    def cast(path: tuple[Any, ...], x: Array) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return x if name.endswith(VECTORS) else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
