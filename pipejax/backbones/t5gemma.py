"""T5Gemma (Zhang et al. 2025, arXiv 2504.06225): an encoder-decoder of Gemma 2 blocks, whose sides may differ in width.

A "side" is the encoder or the decoder. The architecture differs from T5 as follows:

- Norms multiply by 1 + scale, and are applied before and after each sublayer.
- Groups of query heads share a head of keys and values (grouped-query attention).
- Positions are rotary. A rotary score depends on the difference of two positions, so with the positions row + time it
  depends on the distance of the paper (section 4.3).
- Every second layer of self-attention sees only a window of positions.
- Scores and logits have soft caps.
- Embeddings are multiplied by the square root of the width.

Dropout is applied in the same places as in transformers, except on attention weights, which have none.

Shapes as in `pipejax.model.t5`, except: G groups of heads that share keys and values, R heads of a group.
"""

import dataclasses
from collections.abc import Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax.model import layers as parts
from pipejax.model import t5
from pipejax.model.backbone import Backbone
from pipejax.model.config_json import Key, Keys, id_key, read_keys
from pipejax.model.embedding import look_up
from pipejax.model.layers import Dropout, Head, Linear, RMSNorm, capped_by, multiplies_with, normal
from pipejax.model.stack import apply_layers
from pipejax.model.t5_config import T5Config
from pipejax.system.errors import UserError
from pipejax.system.fields import setting
from pipejax.system.strict_json import JsonMapping, JsonObject

Array = jax.Array
# The values in which layers differ: i32 scalars left and right, the window -right < query - key < left of positions
# that a query sees, and the rotary frequencies f32 [K / 2].
Own = tuple[Array, Array, Array]
Seen = tuple[Array, Array, Array]  # mask bool [B|1, Q|1, C], positions of queries i32 [B|1, Q] and keys [B|1, C]
Slots = tuple[Array, Array, Array, Array]  # queries, keys, values, mask
Source = tuple[Array, Array, Array]  # keys, values, mask
EVERYTHING = 2**30  # a bound of a window that contains all positions
LAYER_TYPES = ("sliding_attention", "full_attention")
HEAD = "lm_head.out_proj.weight"
# The keys of config.json, as transformers reads them: ROPE for the object rope_parameters, SIDE for the objects encoder
# and decoder, KEYS for the whole file.
ROPE: Keys = {
    "rope_type": Key(str, None),
    "type": Key(str, None),  # an older name; rope_type takes precedence
    "rope_theta": Key(float, None),
    "factor": Key(float, None, null=None),
    "partial_rotary_factor": Key(float, None, null=None),  # only for the type linear
}
SIDE: Keys = {
    "vocab_size": Key(int, 256_000),
    "hidden_size": Key(int, 2304),
    "intermediate_size": Key(int, 9216),
    "num_hidden_layers": Key(int, 26),
    "num_attention_heads": Key(int, 8),
    "num_key_value_heads": Key(int, 4),
    "head_dim": Key(int, 256),
    "hidden_activation": Key(str, "gelu_pytorch_tanh"),
    "attention_bias": Key(bool, False),
    "rms_norm_eps": Key(float, 1e-6),
    "query_pre_attn_scalar": Key(int, 256),
    "sliding_window": Key(int, 4096),
    "layer_types": Key(list, None, null=None),  # None: every second layer has full attention
    "attn_logit_softcapping": Key(float, 50.0, null=0.0),
    "final_logit_softcapping": Key(float, 30.0, null=0.0),
    "rope_parameters": Key(dict, None, null=None),
    "rope_scaling": Key(dict, None, null=None),  # in older files, like the next key
    "rope_theta": Key(float, 10_000.0, null=None),
    "pad_token_id": id_key(0),
    "eos_token_id": id_key(1),
    "bos_token_id": id_key(2),
}
KEYS: Keys = {
    "encoder": Key(dict, {}, null={}, keys=SIDE),
    "decoder": Key(dict, {}, null={}, keys=SIDE),
    "dropout_rate": Key(float, 0.0),
    "tie_word_embeddings": Key(bool, True),
    # These ids take precedence over the ids of the decoder, which has no `decoder_start_token_id`.
    "pad_token_id": id_key(None),
    "eos_token_id": id_key(None),
    "bos_token_id": id_key(None),
    "decoder_start_token_id": id_key(None),
}
INNER, SHARED = (f"num_{kind}_heads * head_dim" for kind in ("attention", "key_value"))
SIZES = ("hidden_size", "intermediate_size", INNER, SHARED, "head_dim")  # the sizes of a side, one for each axis letter
# Path within a layer, name in Hugging Face's files, and axes in lower-case letters.
FEED_FORWARD = (
    *(("feed_forward/wi_0/kernel", "mlp.gate_proj", "df"), ("feed_forward/wi_1/kernel", "mlp.up_proj", "df")),
    *(("feed_forward/wo/kernel", "mlp.down_proj", "fd"), ("feed_forward/norm/scale", "pre_feedforward_layernorm", "d")),
    ("feed_forward/post_norm/scale", "post_feedforward_layernorm", "d"),
)


def attention(ours: str, theirs: str, source: str) -> tuple[tuple[str, str, str], ...]:
    """Returns the entries of an attention sublayer: path within a layer, name in Hugging Face's files, and axes.

    Args:
      ours: the name of the sublayer in paths.
      theirs: its name in Hugging Face's files, "self" or "cross".
      source: the letter of the width of the states from which keys and values are computed.
    """
    axes = {"query": "di", "key": f"{source}j", "value": f"{source}j", "output": "id"}
    return (
        *((f"{ours}/{path}/kernel", f"{theirs}_attn.{path[0]}_proj", own) for path, own in axes.items()),
        (f"{ours}/norm/scale", f"pre_{theirs}_attn_layernorm", "d"),
        (f"{ours}/post_norm/scale", f"post_{theirs}_attn_layernorm", "d"),
    )


@dataclasses.dataclass(frozen=True)
class GemmaStack:
    """The architecture of one side of a T5Gemma (names as in Hugging Face's config.json where one exists)."""

    hidden_size: int = setting(least=1, most=2**16)  # width
    intermediate_size: int = setting(least=1, most=2**18)  # inner width of the feed-forward layers
    num_attention_heads: int = setting(least=1, most=2**10)
    num_key_value_heads: int = setting(least=1, most=2**10)  # heads of keys and values, each shared by a group of heads
    head_dim: int = setting(least=2, most=2**12)
    query_pre_attn_scalar: int = setting(256, least=1)  # scores are divided by its square root
    sliding_window: int = setting(4096, least=1)  # number of positions that a query of a sliding layer sees
    full_every: int = setting(2, least=1)  # every n-th layer has full attention, the others have a sliding window
    attn_logit_softcapping: float = setting(50.0, least=0.0)  # soft cap of scores; 0: no cap
    rope_theta: float = setting(10_000.0, above=0.0)  # base of the rotary frequencies
    full_rope_theta: float = setting(10_000.0, above=0.0)  # the same base in layers with full attention
    full_rope_factor: float = setting(1.0, above=0.0)  # divisor of the positions in layers with full attention

    def is_full(self, layer: int) -> bool:
        """Returns whether a layer has full attention, and not a sliding window."""
        return (layer + 1) % self.full_every == 0

    def layer_types(self, depth: int) -> list[str]:
        """Returns the value of layer_types in config.json for `depth` layers."""
        return [LAYER_TYPES[self.is_full(i)] for i in range(depth)]

    def own(self, layer: int, window: tuple[int, int]) -> Own:
        """Returns the values in which a layer differs from others.

        Args:
          layer: the number of the layer.
          window: the bounds left and right of the window of sliding layers, see `Own`.
        """
        is_full = self.is_full(layer)
        theta, factor = (self.full_rope_theta, self.full_rope_factor) if is_full else (self.rope_theta, 1.0)
        frequencies = theta ** -(np.arange(0, self.head_dim, 2, dtype=np.float32) / self.head_dim) / factor
        left, right = (EVERYTHING, EVERYTHING) if is_full else window
        return jnp.int32(left), jnp.int32(right), jnp.asarray(frequencies, jnp.float32)


def rotate(x: Array, position: Array, frequencies: Array) -> Array:
    """Rotates the pairs (x[i], x[i + K / 2]) by angles proportional to positions (rotary positions, Su et al. 2021).

    Args:
      x: [B, H, L, K].
      position: i32 [B|1, L].
      frequencies: f32 [K / 2], the angle of each pair for one position.
    """
    angle = position[:, None, :, None].astype(jnp.float32) * frequencies
    one, other = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1).astype(x.dtype)


def cap(x: Array, most: float) -> Array:
    """Returns most * tanh(x / most), a soft cap that keeps magnitudes below `most`; if `most` is 0, returns x."""
    return most * jnp.tanh(x / most) if most else x


def near(seen: Seen, own: Own) -> Array:
    """Returns bool [B, Q, C], the mask restricted to the layer's window of positions."""
    (mask, query, key), (left, right, _) = seen, own
    back = query[:, :, None] - key[:, None]
    return mask & (back < left) & (-back < right)


class Norm(RMSNorm):
    """Root-mean-square normalisation that multiplies by 1 + scale."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (normed * (1 + scale)).astype(self.dtype)


class Sublayer(nn.Module):
    """The base class of sublayers: the norms before and after a sublayer, and its residual."""

    config: "T5GemmaConfig"
    stack: GemmaStack
    dtype: DTypeLike
    dropout: float

    def setup(self) -> None:
        self.norm, self.post_norm = (Norm(self.config.rms_norm_eps, self.dtype) for _ in range(2))
        self.drop = Dropout(self.dropout)

    def dense(self, inputs: int, outputs: int) -> Linear:
        """Returns a projection from `inputs` to `outputs` numbers."""
        return Linear(outputs, self.dtype, normal(inputs**-0.5))

    def add(self, x: Array, found: Array, deterministic: bool) -> Array:
        """Returns the residual x plus the normalised output of the sublayer, after dropout."""
        return x + self.drop(self.post_norm(found), deterministic=deterministic)


class GemmaAttention(Sublayer):
    """Grouped-query attention with a soft cap. Keys and values may be computed from states of another width."""

    def setup(self) -> None:
        super().setup()
        s = self.stack
        inner, shared = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        self.query, self.output = self.dense(s.hidden_size, inner), self.dense(inner, s.hidden_size)
        self.key, self.value = self.dense(s.hidden_size, shared), self.dense(s.hidden_size, shared)

    def heads(self, x: Array) -> Array:
        """Splits the last axis into heads: [B, L, H * K] -> [B, H, L, K]."""
        return x.reshape(*x.shape[:2], -1, self.stack.head_dim).swapaxes(1, 2)

    def queries(self, normed: Array) -> Array:
        """Returns the queries [B, H, Q, K] of normalised states [B, Q, D]."""
        return self.heads(self.query(normed))

    def keys_values(self, x: Array) -> tuple[Array, Array]:
        """Returns the keys and values [B, G, L, K] of normalised or encoded states [B, L, D]."""
        return self.heads(self.key(x)), self.heads(self.value(x))

    def turned(self, x: Array, position: Array, frequencies: Array) -> tuple[Array, Array, Array]:
        """Returns the queries, keys and values of self-attention, with queries and keys rotated.

        Args:
          x: [B, L, D], not yet normalised.
          position: i32 [B|1, L].
          frequencies: f32 [K / 2].
        """
        normed = self.norm(x)
        keys, values = self.keys_values(normed)
        return rotate(self.queries(normed), position, frequencies), rotate(keys, position, frequencies), values

    def attend(self, x: Array, queries: Array, keys: Array, values: Array, mask: Array, deterministic: bool) -> Array:
        """Returns the residual x plus the output of attention, [B, Q, D].

        Args:
          x: [B, Q, D], the input of the sublayer.
          queries: [B, H, Q, K].
          keys: [B, G, C, K].
          values: [B, G, C, K].
          mask: bool [B|1, Q|1, C].
          deterministic: whether dropout is off.
        """
        groups = queries.reshape(queries.shape[0], keys.shape[1], -1, *queries.shape[2:])
        scores = jnp.einsum("bgrqk,bgck->bgrqc", groups, keys, preferred_element_type=jnp.float32)
        scores = cap(scores * self.stack.query_pre_attn_scalar**-0.5, self.stack.attn_logit_softcapping)
        weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, t5.MASKED), axis=-1).astype(values.dtype)
        found = jnp.einsum("bgrqc,bgck->bgrqk", weights, values)
        found = found.reshape(queries.shape).swapaxes(1, 2).reshape(*x.shape[:2], -1)
        return self.add(x, self.output(found), deterministic)


class GemmaFeedForward(Sublayer):
    """The gated feed-forward network: [B, L, D] -> [B, L, D]."""

    def setup(self) -> None:
        super().setup()
        width, inner = self.stack.hidden_size, self.stack.intermediate_size
        self.wi_0, self.wi_1, self.wo = self.dense(width, inner), self.dense(width, inner), self.dense(inner, width)

    def __call__(self, x: Array, deterministic: bool) -> Array:
        """Returns the residual x plus the output of the network, [B, L, D]."""
        normed = self.norm(x)
        hidden = nn.gelu(self.wi_0(normed), approximate=True) * self.wi_1(normed)
        return self.add(x, self.wo(self.drop(hidden, deterministic=deterministic)), deterministic)


class GemmaEncoderLayer(nn.Module):
    """A layer of the encoder: self-attention, then feed-forward."""

    config: "T5GemmaConfig"
    dtype: DTypeLike
    dropout: float

    def setup(self) -> None:
        given = self.config, self.config.encoder, self.dtype, self.dropout
        self.attention, self.feed_forward = self.config.attention_class(*given), GemmaFeedForward(*given)

    def __call__(self, x: Array, own: Own, seen: Seen, deterministic: bool) -> Array:
        """Computes the layer: [B, L, D] -> [B, L, D]. `own`: the values of the layer; `seen`: mask and positions."""
        found = self.attention.turned(x, seen[1], own[2])
        x = self.attention.attend(x, *found, near(seen, own), deterministic)
        return self.feed_forward(x, deterministic)


class GemmaDecoderLayer(nn.Module):
    """A layer of the decoder: self-attention, cross-attention, then feed-forward; see `t5.DecoderLayer`.

    Cross-attention has no rotary positions and no windows.
    """

    config: "T5GemmaConfig"
    dtype: DTypeLike
    dropout: float

    def setup(self) -> None:
        given = self.config, self.config.decoder, self.dtype, self.dropout
        self.self_attention, self.feed_forward = self.config.attention_class(*given), GemmaFeedForward(*given)
        self.set_up_cross(*given)

    def set_up_cross(self, *given: Any) -> None:
        """Makes the cross-attention, with the same arguments as the other sublayers."""
        self.cross_attention = self.config.attention_class(*given)

    def __call__(
        self, x: Array, own: Own, cache: t5.LayerCache | None, seen: Seen, source: Any, real: Array, deterministic: bool
    ) -> tuple[Array, t5.LayerCache | None]:
        """Computes the layer, teacher-forced or for a step of decoding; see `t5.DecoderLayer`.

        Args:
          x: [B, Q, D].
          own: the values in which layers differ.
          cache: the slots of earlier steps; None: the queries see only each other.
          seen: the mask and the positions of queries and keys.
          source: the encoded source [B, L, D], or its keys and values [B, G, L, K].
          real: bool [B, 1|Q, L], the source tokens that the queries see.
          deterministic: whether dropout is off.
        """
        queries, keys, values = self.self_attention.turned(x, seen[1], own[2])
        if cache is not None:
            cache = cache.written(keys, values)
            keys, values = cache.keys, cache.values
        memory = source if isinstance(source, tuple) else self.memorize(source)
        x = self.look(x, (queries, keys, values, near(seen, own)), (*memory, real), deterministic)
        return self.feed_forward(x, deterministic), cache

    def look(self, x: Array, slots: Slots, source: Source, deterministic: bool) -> Array:
        """Applies self-attention and then cross-attention to x [B, Q, D].

        Args:
          x: [B, Q, D].
          slots: queries, keys, values and mask of self-attention.
          source: keys, values and mask of cross-attention.
          deterministic: whether dropout is off.
        """
        x = self.self_attention.attend(x, *slots, deterministic)
        queries = self.cross_attention.queries(self.cross_attention.norm(x))
        return self.cross_attention.attend(x, queries, *source, deterministic)

    def memorize(self, encoded: Array) -> tuple[Array, Array]:
        """Returns the keys and values [B, G, L, K] of cross-attention for an encoded source [B, L, D]."""
        return self.cross_attention.keys_values(encoded)


class GemmaEmbedder(nn.Module):
    """An embedding table [V, D], which may also be the head. It may be int8 with a scale for each row."""

    size: int
    width: int
    dtype: DTypeLike
    shards: int

    def setup(self) -> None:
        self.embedding = self.param("embedding", normal(self.width**-0.5), (self.size, self.width))

    def __call__(self, tokens: Array) -> Array:
        """Returns the embeddings [..., D] of tokens [...], multiplied by the square root of the width."""
        (found,) = look_up(self.embedding, (tokens,), self.dtype, self.shards)
        if self.has_variable("params", "scale"):
            scale: Array = self.get_variable("params", "scale")
            found = found * scale[tokens][..., None].astype(self.dtype)
        return found * jnp.asarray(self.width**0.5, self.dtype)

    @multiplies_with("embedding")
    def logits(self, hidden: Array) -> Array:
        """Returns the logits f32 [..., V] of hidden states [..., D], before the soft cap."""
        found = parts.logits_of(hidden, self.embedding, self.dtype)
        return found * self.get_variable("params", "scale") if self.has_variable("params", "scale") else found


class GemmaStackModule(t5.Stack):
    """The base class of both sides; see `t5.Stack`."""

    config: Any
    shards: int = 1
    side: ClassVar[str]

    def setup(self) -> None:
        c = self.config
        self.layers = [self.layer(c, self.dtype, self.dropout) for _ in range(getattr(c, self.depth))]
        self.norm = Norm(c.rms_norm_eps, self.dtype)
        self.drop = Dropout(self.dropout)
        if not c.has_one_table:
            self.embedder = GemmaEmbedder(c.vocab_size, getattr(c, self.side).hidden_size, self.dtype, self.shards)

    def own(self) -> list[Own]:
        """Returns the values of each layer in which layers differ."""
        return [getattr(self.config, self.side).own(i, self.config.window(self.side)) for i in range(len(self.layers))]

    def run(self, x: Array, *seen: object, deterministic: bool) -> Array:
        """Applies dropout, all layers, the norm and dropout to x [B, Q, D]; see `t5.Stack.run`."""
        x = self.drop(x, deterministic=deterministic)
        given: JsonObject = {"own": self.own(), "remat": self.remat, "pin": self.pin}
        keys = partial(self.make_rng, "dropout")
        x = apply_layers(self.layers, x, *seen, deterministic=deterministic, keys=keys, **given)
        return self.drop(self.norm(x), deterministic=deterministic)


class GemmaEncoder(GemmaStackModule):
    """The encoder; see `t5.Encoder`."""

    layer: ClassVar[type[nn.Module]] = GemmaEncoderLayer
    side: ClassVar[str] = "encoder"
    depth: ClassVar[str] = "num_layers"

    def __call__(self, x: Array, mask: Array, deterministic: bool) -> Array:
        """Encodes embedded tokens: [B, L, D] -> [B, L, D]. `mask`: bool [B, L], True at real tokens."""
        position = jnp.arange(x.shape[1])[None]
        return self.run(x, (mask[:, None], position, position), deterministic=deterministic)


class GemmaDecoder(GemmaStackModule):
    """The decoder; see `t5.Decoder`."""

    layer: ClassVar[type[nn.Module]] = GemmaDecoderLayer
    side: ClassVar[str] = "decoder"
    depth: ClassVar[str] = "num_decoder_layers"
    memorize = t5.Decoder.memorize

    def __call__(self, x: Array, mask: Array, position: Array, encoded: Array, real: Array, deterministic: bool) -> Any:
        """Returns the teacher-forced outputs [G, N, D]; see `t5.Decoder`. `real`: bool [G, 1|N, L], the memory mask."""
        return self.run(x, None, (mask, position, position), encoded, real, deterministic=deterministic)

    def step(
        self,
        x: Array,
        mask: Array,
        position: Array,
        key_position: Array,
        memory: t5.Memory,
        caches: t5.Caches,
        start: Array,
    ) -> tuple[Array, t5.Caches]:
        """Computes a step of decoding; see `t5.Decoder.step`."""
        seen, written = (mask, position, key_position), []
        for i, (layer, own, cache) in enumerate(zip(self.layers, self.own(), caches, strict=True)):
            source = memory.keys[i].swapaxes(2, 3), memory.values[i]
            x, new = layer(x, own, t5.LayerCache(*cache, start), seen, source, memory.mask[:, None], True)
            written.append((new.keys, new.values))
        return self.norm(x), tuple(written)


class T5Gemma(t5.T5):
    """The Flax module of a T5Gemma; see `t5.T5` for its fields and methods."""

    config: Any
    encoder_stack: ClassVar[type[nn.Module]] = GemmaEncoder
    decoder_stack: ClassVar[type[nn.Module]] = GemmaDecoder

    def setup(self) -> None:
        c = self.config
        given = c, self.dtype, self.dropout, self.remat, self.pin, self.blocks, self.shards
        self.encoder, self.decoder = self.encoder_stack(*given), self.decoder_stack(*given)
        self.set_up_table()
        if not c.tied_head:
            self.lm_head = Head(c.vocab_size, self.dtype)

    def set_up_table(self) -> None:
        """Makes an embedding table for both sides, if there is only one. Here each side makes its own table."""

    def table(self, stack: Any) -> Any:
        """Returns the embedding table of a side."""
        return stack.embedder

    def embed(self, *tokens: Array) -> tuple[Array, ...]:
        """Returns the embeddings [..., D], in the compute dtype, of source tokens and of decoder inputs."""
        return tuple(self.table(side)(each) for side, each in zip((self.encoder, self.decoder), tokens, strict=True))

    def encode(self, tokens: Array, mask: Array, *, deterministic: bool = True) -> t5.Memory:
        return self.decoder.memorize(self.encoder(self.table(self.encoder)(tokens), mask, deterministic), mask)

    def step(self, tokens: Array, *given: Any) -> tuple[Array, t5.Caches]:
        return self.decoder.step(self.table(self.decoder)(tokens), *given)

    @capped_by("final_logit_softcapping")
    def logits(self, hidden: Array) -> Array:
        """Returns the logits f32 [..., V] of hidden states [..., D], after the soft cap."""
        found = self.table(self.decoder).logits(hidden) if self.config.tied_head else self.lm_head(hidden)
        return cap(found, self.config.final_logit_softcapping)

    def empty_cache(self, batch: int, slots: int) -> t5.Caches:
        s = self.config.decoder
        zeros = jnp.zeros((batch, s.num_key_value_heads, slots, s.head_dim), self.dtype)
        return ((zeros, zeros),) * self.config.num_decoder_layers


@dataclasses.dataclass(frozen=True)
class T5GemmaConfig(Backbone):
    """The architecture of a T5Gemma."""

    encoder: GemmaStack
    decoder: GemmaStack
    vocab_size: int = setting(least=2, most=2**24)  # rows of each table
    num_layers: int = setting(least=1, most=2**10)  # layers of the encoder
    num_decoder_layers: int = setting(least=1, most=2**10)  # layers of the decoder
    final_logit_softcapping: float = setting(30.0, least=0.0)  # soft cap of logits; 0: no cap
    rms_norm_eps: float = setting(1e-6, above=0.0)  # added to the mean square under the root
    dropout_rate: float = setting(0.0, least=0.0, below=1.0)  # kept for Hugging Face; training uses train.dropout
    tied_head: bool = setting(True)  # the head is the decoder's table; False: lm_head/kernel
    pad_token_id: int = setting(0, least=0)  # the padding of batches
    eos_token_id: int = setting(1, least=0)  # ends rows; it also ends sources if the tokenizer adds it
    decoder_start_token_id: int = setting(2, least=0)  # bos: the token with which every row begins
    other_eos_token_ids: tuple[int, ...] = setting(())  # further tokens that end a row in decoding

    model_types: ClassVar[tuple[str, ...]] = ("t5gemma",)
    keys: ClassVar[Keys] = KEYS  # the table of the keys of config.json
    attention_class: ClassVar[type[GemmaAttention]] = GemmaAttention  # the attention of every layer
    tables: ClassVar[tuple[str, ...]] = ("encoder/embedder/embedding", "decoder/embedder/embedding")
    has_one_table: ClassVar[bool] = False  # whether both sides share one embedding table
    # The prefixes of tensor names in files, by side.
    prefixes: ClassVar[Mapping[str, str]] = {"encoder": "model.encoder", "decoder": "model.decoder"}
    side_types: ClassVar[Mapping[str, str]] = dict.fromkeys(("encoder", "decoder"), "t5_gemma_module")
    attentions: ClassVar[Mapping[str, tuple[tuple[str, str, str], ...]]] = {
        "encoder": attention("attention", "self", "d"),
        "decoder": attention("self_attention", "self", "d") + attention("cross_attention", "cross", "D"),
    }

    def module(self, **options: Any) -> T5Gemma:
        return T5Gemma(self, **options)

    def window(self, side: str) -> tuple[int, int]:
        """Returns the bounds left and right of the window of a side's sliding layers: see `Own`."""
        size: int = getattr(self, side).sliding_window
        # As in transformers; DeepMind's encoder excludes the outermost positions. The right bound has no effect in the
        # decoder, whose mask already hides later positions.
        return (size + 1, size + 1) if side == "encoder" else (size, EVERYTHING)

    def tensors(self) -> dict[str, tuple[str, str]]:
        """See `Backbone`. Upper-case letters are axes of the encoder, lower-case letters axes of the decoder."""
        table = dict[str, tuple[str, str]]()
        for side, depth in (("encoder", self.num_layers), ("decoder", self.num_decoder_layers)):
            found = {"embedder/embedding": ("embed_tokens", "Vd"), "norm/scale": ("norm", "d")}
            for i in range(depth):
                parts = self.attentions[side] + FEED_FORWARD
                found |= {f"layers_{i}/{path}": (f"layers.{i}.{name}", axes) for path, name, axes in parts}
            for path, (name, axes) in found.items():  # the letters of the encoder are upper case
                axes = axes.upper() if side == "encoder" else axes
                table[f"{side}/{path}"] = (f"{self.prefixes[side]}.{name}.weight", axes)
        return table if self.tied_head else table | {"lm_head/kernel": (HEAD, "dV")}

    def sizes(self) -> dict[str, tuple[str, int]]:
        found = {"V": ("vocab_size", self.vocab_size)}
        for side, letters in (("encoder", "DFIJK"), ("decoder", "dfijk")):
            s: GemmaStack = getattr(self, side)
            inner, shared = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
            sizes = s.hidden_size, s.intermediate_size, inner, shared, s.head_dim
            found |= {x: (f"{side}.{key}", size) for x, key, size in zip(letters, SIZES, sizes, strict=True)}
        return found

    def like_t5(self) -> T5Config:
        """See `Backbone`. Each size is the larger one of encoder and decoder."""
        a, b = self.encoder, self.decoder
        width, head, inner = (max(getattr(s, key) for s in (a, b)) for key in ("hidden_size", "head_dim", SIZES[1]))
        heads = max(a.num_attention_heads, b.num_attention_heads)
        depths = self.num_layers, self.num_decoder_layers
        return T5Config(self.vocab_size, width, head, inner, heads, *depths, feed_forward="gated-gelu")

    def check(self, where: str) -> None:
        """See `Backbone`. Heads must form equal groups, and the head width must be even for rotary positions."""
        for side in ("encoder", "decoder"):
            s: GemmaStack = getattr(self, side)
            if s.num_attention_heads % s.num_key_value_heads or s.head_dim % 2:
                found = f"{s.num_attention_heads} heads of {s.head_dim} in {s.num_key_value_heads} groups"
                raise UserError(f"{where}: model.{side}", found=found, expected="equal groups, and an even head_dim")

    @classmethod
    def read_facts(cls, facts: JsonMapping) -> dict[str, object]:
        """See `Backbone`. Raises a UserError also if the sides have different vocabularies or epsilons."""
        given = read_keys(facts, cls.keys)
        encoder, decoder = cls.sides(given)
        for key in ("vocab_size", "rms_norm_eps"):
            if encoder[key] != decoder[key]:
                raise UserError(
                    f"encoder.{key}", found=f"{encoder[key]!r:.60}", expected=f"the decoder's, {decoder[key]!r:.60}"
                )
        ids = {key: decoder[key] if given[key] is None else given[key] for key in SIDE if key.endswith("_token_id")}
        start = given["decoder_start_token_id"]
        return {
            "vocab_size": decoder["vocab_size"],
            "num_layers": encoder["num_hidden_layers"],
            "num_decoder_layers": decoder["num_hidden_layers"],
            "encoder": cls.read_stack(encoder, "encoder"),
            "decoder": cls.read_stack(decoder, "decoder"),
            "final_logit_softcapping": decoder["final_logit_softcapping"],
            "rms_norm_eps": decoder["rms_norm_eps"],
            "dropout_rate": given["dropout_rate"],
            "tied_head": given["tie_word_embeddings"],
            "pad_token_id": ids["pad_token_id"],
            "eos_token_id": ids["eos_token_id"],
            "decoder_start_token_id": ids["bos_token_id"] if start is None else start,
        }

    @classmethod
    def sides(cls, given: JsonMapping) -> tuple[JsonObject, JsonObject]:
        """Returns the values of the encoder and of the decoder, from the values of config.json."""
        return given["encoder"], given["decoder"]

    @classmethod
    def read_stack(cls, given: JsonMapping, side: str) -> GemmaStack:
        """Reads the architecture of a side from the values of its object in config.json.

        Raises:
          UserError: a value is not supported; the message begins with the side and the key.
        """
        for key, expected in (("hidden_activation", "gelu_pytorch_tanh"), ("attention_bias", False)):
            if given[key] != expected:
                raise UserError(f"{side}.{key}", found=f"{given[key]!r}", expected=f"{expected!r}")
        fields, depth = {field.name for field in dataclasses.fields(GemmaStack)}, given["num_hidden_layers"]
        types = given["layer_types"]
        if types is None:
            every = min(cls.default_pattern(given, side), depth + 1)
        else:
            every = types.index(LAYER_TYPES[1]) + 1 if LAYER_TYPES[1] in types else len(types) + 1
        values = {key: given[key] for key in fields & given.keys()} | {"full_every": every}
        stack = GemmaStack(**values | cls.read_rotations(given, side))
        if types is not None and types != stack.layer_types(depth):
            raise UserError(
                f"{side}.layer_types",
                found=f"{types!r:.80}",
                expected=f"{depth}, every n-th of them {LAYER_TYPES[1]}",
            )
        return stack

    @classmethod
    def default_pattern(cls, given: JsonMapping, side: str) -> int:
        """Returns the value of `GemmaStack.full_every` if a side has no layer_types."""
        return 2

    @classmethod
    def read_rotations(cls, given: JsonMapping, side: str) -> JsonObject:
        """Returns the rotary fields of `GemmaStack` for a side.

        The key rope_scaling takes precedence over rope_parameters.
        """
        place, found = f"{side}.rope_parameters", given["rope_scaling"] or given["rope_parameters"] or {}
        kind, theta, _ = read_rope(found, given["rope_theta"], place)
        if kind != "default" or found.keys() & set(LAYER_TYPES):
            raise UserError(place, found=f"{found!r:.80}", expected="one object with rope_type default")
        return {"rope_theta": theta, "full_rope_theta": theta}

    def earlier_doubts(self) -> str:
        """See `Backbone`. Earlier versions read an absent soft cap as no cap."""
        sides = ("encoder", "decoder")
        found = [f"{side}.attn_logit_softcapping" for side in sides if not getattr(self, side).attn_logit_softcapping]
        found += [] if self.final_logit_softcapping else ["final_logit_softcapping"]
        return f"no {', no '.join(found)}, which may have been absent in config.json and not null" if found else ""

    def facts(self) -> dict[str, object]:
        ids = {"pad_token_id": self.pad_token_id, "eos_token_id": self.eos_fact}
        ids["bos_token_id"] = self.decoder_start_token_id  # the only key for this token
        common = {"vocab_size": self.vocab_size, "tie_word_embeddings": self.tied_head, **ids}
        sides = dict[str, dict[str, object]]()
        for side, depth in (("encoder", self.num_layers), ("decoder", self.num_decoder_layers)):
            stack: GemmaStack = getattr(self, side)
            own = {key: x for key, x in dataclasses.asdict(stack).items() if not key.startswith(("full", "rope"))}
            sides[side] = {
                **(common | own | self.rotations(stack)),
                "model_type": self.side_types[side],
                "num_hidden_layers": depth,
                "layer_types": stack.layer_types(depth),
                "hidden_activation": "gelu_pytorch_tanh",
                "rms_norm_eps": self.rms_norm_eps,
                "attn_logit_softcapping": stack.attn_logit_softcapping or None,
                "final_logit_softcapping": self.final_logit_softcapping or None,
            }
        facts = {"architectures": ["T5GemmaForConditionalGeneration"], "model_type": self.model_types[0]}
        return {**facts, "is_encoder_decoder": True, "dropout_rate": self.dropout_rate, **common, **sides}

    def rotations(self, stack: GemmaStack) -> dict[str, object]:
        """Returns the keys of config.json that `read_rotations` reads, with the values of a side."""
        return {"rope_parameters": {"rope_type": "default", "rope_theta": stack.rope_theta}}

    def fitted(self, tensors: MutableMapping[str, Any], weights: Path) -> Self:
        """See `Backbone`. If the file has a tensor for the head, the head is not tied, as in transformers."""
        return dataclasses.replace(self, tied_head=self.tied_head and HEAD not in tensors)

    def without_copies(self, params: MutableMapping[str, np.ndarray]) -> Self:
        """See `Backbone`. A head that equals the decoder's embedding table becomes tied."""
        if self.tied_head or not np.array_equal(params["lm_head/kernel"].T, params[self.tables[-1]]):
            return self
        del params["lm_head/kernel"]
        return dataclasses.replace(self, tied_head=True)


def read_rope(given: JsonMapping, theta: float | None, where: str) -> tuple[str, float, float]:
    """Reads an object of rotary parameters of config.json.

    Args:
      given: the object.
      theta: the default of its rope_theta.
      where: the path of the object, for messages.

    Returns:
      The type, theta, and the factor by which positions are divided.

    Raises:
      UserError: a value is missing or not supported.
    """
    found = read_keys(given, ROPE, f"{where}.")
    kind: str = found["rope_type"] or found["type"] or "default"
    theta, factor = found["rope_theta"] or theta, found["factor"]
    if theta is None:
        raise UserError(f"{where}.rope_theta", found="null", expected="a number")
    if kind == "default":
        return kind, theta, 1.0
    if factor is None or found["partial_rotary_factor"] not in (None, 1):
        raise UserError(where, found=f"{given!r:.80}", expected="a factor and no partial_rotary_factor")
    return kind, theta, factor


# Published sizes of a side: the number of layers; width, feed-forward width, heads, groups of heads and head width.
_SIDES = {
    "s": (8, GemmaStack(512, 1024, 8, 8, 64, 64)),
    "b": (12, GemmaStack(768, 2048, 12, 12, 64, 64)),
    "l": (24, GemmaStack(1024, 2816, 16, 16, 64, 64)),
    "ml": (26, GemmaStack(1152, 6912, 4, 4, 256)),
    "xl": (24, GemmaStack(2048, 5120, 32, 32, 64, 64)),
    "2b": (26, GemmaStack(2304, 9216, 8, 4, 256)),
    "9b": (42, GemmaStack(3584, 14336, 16, 8, 256)),
}
ARCHITECTURES = {
    f"t5gemma-{one}-{other}": T5GemmaConfig(_SIDES[one][1], _SIDES[other][1], 256_000, _SIDES[one][0], _SIDES[other][0])
    for one, other in (*((side, side) for side in _SIDES), ("9b", "2b"))
}
