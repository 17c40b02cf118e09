"""The T5 encoder-decoder: Raffel et al. 2020 (v1.0), and the variants v1.1, mT5 and ByT5.

The module maps tokens, masks and positions to logits. It is independent of grids, tasks, meshes and files.

Shapes: B batch, L source length, G sequences in training (each with the slots of B / G packed targets), N slots of a
sequence, Q queries of a call, C keys, D width, H heads, K head width, V vocabulary. In a mask True means "may attend".
Parameters are float32. `dtype` is the dtype of the computation; norms, softmax and logits are always float32.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax import registry
from pipejax.model import attention, embedding, relative_bias, stack
from pipejax.model import layers as parts
from pipejax.model.backbone import Module
from pipejax.model.embedding import look_up
from pipejax.model.layers import Attention, Dropout, FeedForward, Head, RelativeBias, RMSNorm, logits_of
from pipejax.model.slots import Blocks, Distances, Seen, Slots
from pipejax.model.snapshot import Snapshot, snapshot
from pipejax.model.stack import apply_layers
from pipejax.model.t5_config import T5Config
from pipejax.system import Tree

Array = jax.Array
Caches = tuple[tuple[Array, Array], ...]  # for each layer, keys and values [B, H, C, K]
# The bias of masked keys. It is finite so that a query that sees nothing, whose output is not used, gets a uniform
# softmax instead of NaN.
MASKED = -1e9


@flax.struct.dataclass
class Memory:
    """Cross-attention keys and values of a source, computed once for decoding."""

    keys: tuple[Tree, ...]  # for each layer [B, H, K, L]; a backend may use another layout
    values: tuple[Tree, ...]  # for each layer [B, H, L, K]; a backend may use another layout
    mask: Array  # bool [B, L], True at real tokens
    adapter: Array | None = None  # i32 [B], the number of each source's adapter, if there are several adapters
    encoded: Array | None = None  # [B, L, D], the outputs of the encoder, if a drafter wants them


@flax.struct.dataclass
class LayerCache:
    """The self-attention keys and values of a layer in all cache slots."""

    keys: Array  # [B, H, C, K]
    values: Array  # [B, H, C, K]
    start: Array  # i32 [B|1], the slot of the first query of each example

    def written(self, keys: Array, values: Array) -> "LayerCache":
        """Returns the cache with the queries' keys and values, [B, H, Q, K], written to the slots from `start` on."""

        def write(old: Array, new: Array) -> Array:
            if len(self.start) == 1:
                return jax.lax.dynamic_update_slice_in_dim(old, new, self.start[0], axis=2)
            return jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=1))(old, new, self.start)

        return LayerCache(write(self.keys, keys), write(self.values, values), self.start)


def unpinned(x: Array) -> Array:
    """Returns x itself. As the default of `T5.pin`, it lets XLA choose the sharding of activations."""
    return x


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward."""

    config: T5Config
    dtype: DTypeLike
    dropout: float
    attention_class: ClassVar[type[Attention]] = Attention
    feed_forward_class: ClassVar[type[nn.Module]] = FeedForward

    def setup(self) -> None:
        self.attention = self.attention_class(self.config, self.dtype, self.dropout)
        self.feed_forward = self.feed_forward_class(self.config, self.dtype, self.dropout)

    def __call__(self, x: Array, bias: Array | Seen, padding: Array, deterministic: bool) -> Array:
        """Computes the layer: [B, L, D] -> [B, L, D].

        Args:
          x: [B, L, D].
          bias: f32 [B|1, H, L, L], the relative bias; or a `Seen`, for attention in blocks.
          padding: f32 [B, 1, 1, L], MASKED at padding, otherwise 0.
          deterministic: whether dropout is off.
        """
        normed, keys, values = self.attention.norm(x), None, None
        if not isinstance(bias, Seen):
            # Each layer computes this sum, which fuses with the scores, so no [B, H, L, L] is stored for all layers.
            bias = bias + padding
            keys, values = self.attention.keys_values(normed)
        x = self.attention.attend(x, normed, keys, values, bias, deterministic)
        return self.feed_forward(x, deterministic)


class DecoderLayer(nn.Module):
    """Self-attention, then cross-attention over the encoded source, then feed-forward."""

    config: T5Config
    dtype: DTypeLike
    dropout: float
    attention_class: ClassVar[type[Attention]] = Attention  # for self-attention and cross-attention
    feed_forward_class: ClassVar[type[nn.Module]] = FeedForward

    def setup(self) -> None:
        self.self_attention = self.attention_class(self.config, self.dtype, self.dropout)
        self.cross_attention = self.attention_class(self.config, self.dtype, self.dropout, over_sources=True)
        self.feed_forward = self.feed_forward_class(self.config, self.dtype, self.dropout)

    def __call__(
        self,
        x: Array,
        cache: LayerCache | None,
        bias: Any,
        source: Array | tuple[Array, Array],
        source_bias: Array,
        deterministic: bool,
    ) -> tuple[Array, LayerCache | None]:
        """Computes the layer, teacher-forced (without a cache) or for a step of decoding (with a cache).

        Args:
          x: [B, Q, D].
          cache: the slots of earlier steps; the keys and values of the queries are written to it before attention.
            None: the queries see only each other.
          bias: f32 [B|1, H, Q, C] for self-attention, or a `Seen` for attention in blocks.
          source: the encoded source [B, L, D], or its keys and values [B, H, L, K] from `memorize`.
          source_bias: f32 [B, 1, Q|1, L] for cross-attention, or a `Seen`.
          deterministic: whether dropout is off.

        Returns:
          [B, Q, D], and the cache with the slots of the queries.
        """
        normed = self.self_attention.norm(x)
        keys: Array | None = None
        values: Array | None = None
        if not isinstance(bias, Seen):
            keys, values = self.self_attention.keys_values(normed)
            if cache is not None:
                cache = cache.written(keys, values)
                keys, values = cache.keys, cache.values
        x = self.self_attention.attend(x, normed, keys, values, bias, deterministic)
        normed = self.cross_attention.norm(x)
        if isinstance(source, tuple):
            keys, values = source
        elif isinstance(source_bias, Seen):
            keys, values = self.cross_attention.together(source, "key", "value")
        else:
            keys, values = self.memorize(source)
        x = self.cross_attention.attend(x, normed, keys, values, source_bias, deterministic)
        return self.feed_forward(x, deterministic), cache

    def memorize(self, encoded: Array) -> tuple[Array, Array]:
        """Returns the keys and values [B, H, L, K] of cross-attention for an encoded source [B, L, D]."""
        return self.cross_attention.keys_values(encoded)


class Stack(nn.Module):
    """The base class of encoder and decoder: a stack of layers, followed by a norm, with dropout before and after."""

    config: T5Config
    dtype: DTypeLike
    dropout: float
    remat: str = "none"
    pin: Callable[[Array], Array] = unpinned
    blocks: Blocks | None = None
    layer: ClassVar[type[nn.Module]]
    depth: ClassVar[str]  # the field of the config that is the number of layers
    bidirectional: ClassVar[bool]  # whether a query sees later tokens

    def setup(self) -> None:
        c = self.config
        self.layers = [self.layer(c, self.dtype, self.dropout) for _ in range(getattr(c, self.depth))]
        self.norm = RMSNorm(c.layer_norm_epsilon, self.dtype)
        self.drop = Dropout(self.dropout)
        self.set_up_bias()

    def set_up_bias(self) -> None:
        """Makes the submodules that `bias` and `distances` need. Called by `setup`."""
        self.relative_bias = RelativeBias(self.config, bidirectional=self.bidirectional)

    def distances(self) -> Distances | None:
        """Returns the bias as a function of distance, for attention in blocks; None if the layers share no bias."""
        return self.relative_bias.distances()

    def seen(self, queries: Slots, keys: Slots, distances: Distances | None = None) -> Seen:
        """Returns the argument that replaces the bias of attention in blocks."""
        assert self.blocks is not None
        seen = Seen(queries, keys, distances, blocks=self.blocks)
        # Imported here because importing Pallas takes time, and a CPU does not need it.
        planned: Seen = registry.find(registry.BLOCK_ATTENTION).planned(seen, len(queries.example), self.config.d_kv)
        return planned

    def run(self, x: Array, *seen: object, deterministic: bool) -> Array:
        """Applies dropout, all layers, the norm and dropout to x [B, Q, D]. `seen`: the layers' further arguments."""
        x = self.drop(x, deterministic=deterministic)
        keys = partial(self.make_rng, "dropout")
        scan: dict[str, Any] = {"remat": self.remat, "pin": self.pin}
        scan["grouped"] = self.blocks is not None and self.blocks.is_alone
        x = apply_layers(self.layers, x, *seen, deterministic=deterministic, keys=keys, **scan)
        return self.drop(self.norm(x), deterministic=deterministic)


class Encoder(Stack):
    """The encoder: it maps embedded tokens [B, L, D] to encoded ones [B, L, D]."""

    layer: ClassVar[type[nn.Module]] = EncoderLayer
    depth: ClassVar[str] = "num_layers"
    bidirectional: ClassVar[bool] = True

    def bias(self, batch: int, length: int) -> Array:
        """Returns the bias f32 [B|1, H, L, L] of self-attention in all layers."""
        bias = self.relative_bias.within(length)
        if self.remat != "none":
            return bias
        # Without the broadcast, every layer would sum the gradient over the examples, which XLA does slowly on CPUs. In
        # a scan, whose purpose is to save memory, that sum is preferable.
        return jnp.broadcast_to(bias, (batch, *bias.shape[1:]))

    def __call__(self, x: Array, mask: Array, deterministic: bool) -> Array:
        """Encodes embedded tokens: [B, L, D] -> [B, L, D]. `mask`: bool [B, L], True at real tokens."""
        if self.blocks:
            position = jnp.broadcast_to(jnp.arange(mask.shape[1]), mask.shape)
            slots = Slots(jnp.where(mask, 0, -1), position=position, consecutive=True)
            bias: Array | Seen = self.seen(slots, slots, self.distances())
        else:
            bias = self.bias(*x.shape[:2])
        return self.run(x, bias, jnp.where(mask[:, None, None, :], 0.0, MASKED), deterministic=deterministic)


class Decoder(Stack):
    """The decoder: it maps embedded queries [B, Q, D] to hidden states [B, Q, D]."""

    layer: ClassVar[type[nn.Module]] = DecoderLayer
    depth: ClassVar[str] = "num_decoder_layers"
    bidirectional: ClassVar[bool] = False

    def bias(self, mask: Array, query: Array, key: Array) -> Any:
        """Returns the bias f32 [B|1, H, Q, C] of self-attention in all layers.

        Args:
          mask: bool [B|1, Q, C].
          query: i32 [B|1, Q], the positions of the queries.
          key: i32 [B|1, C], the positions of the keys.
        """
        return jnp.where(mask[:, None], self.relative_bias(query, key), MASKED)

    def memorize(self, encoded: Array, mask: Array) -> Memory:
        """Returns the keys and values of cross-attention in all layers, for the encoded sources [B, L, D] of a batch.

        `mask`: bool [B, L], True at real tokens.
        """
        pairs = [layer.memorize(encoded) for layer in self.layers]
        return Memory(keys=tuple(k.swapaxes(2, 3) for k, _ in pairs), values=tuple(v for _, v in pairs), mask=mask)

    def __call__(
        self,
        x: Array,
        mask: Array | Slots,
        position: Array,
        encoded: Array,
        memory_mask: Any,
        deterministic: bool,
    ) -> Array:
        """Computes the teacher-forced outputs [G, N, D]. The batch axis of the layers has the G sequences.

        Args:
          x: [G, N, D], the embedded inputs.
          mask: bool [G|1, N, N], or the slots for attention in blocks.
          position: i32 [G|1, N].
          encoded: [G, L, D], the encoded sources of each row, concatenated.
          memory_mask: bool [G, 1|N, L], or the slots of the source tokens for attention in blocks.
          deterministic: whether dropout is off.
        """
        bias: Array | Seen
        memory_bias: Array | Seen
        if isinstance(mask, Slots):
            bias, memory_bias = self.seen(mask, mask, self.distances()), self.seen(Slots(mask.example), memory_mask)
        else:
            bias, memory_bias = self.bias(mask, position, position), jnp.where(memory_mask[:, None], 0.0, MASKED)
        return self.run(x, None, bias, encoded, memory_bias, deterministic=deterministic)

    def step(
        self, x: Array, mask: Array, position: Array, key_position: Array, memory: Memory, caches: Caches, start: Array
    ) -> tuple[Array, Caches]:
        """Computes a step of decoding. The arguments are as in `T5.step`, but x [B, Q, D] has the tokens embedded."""
        bias, memory_bias = self.bias(mask, position, key_position), jnp.where(memory.mask[:, None, None], 0.0, MASKED)
        written = []
        for layer, cache, keys, values in zip(self.layers, caches, memory.keys, memory.values, strict=True):
            x, own = layer(x, LayerCache(*cache, start), bias, (keys.swapaxes(2, 3), values), memory_bias, True)
            written.append((own.keys, own.values))
        return self.norm(x), tuple(written)


class T5(nn.Module):
    """A T5. Call its methods with `model.apply({"params": params}, ..., method="encode")`."""

    config: T5Config
    dtype: DTypeLike = jnp.float32
    dropout: float = 0.0
    remat: str = "none"  # trades time for memory in teacher-forced calls: see `apply_layers`
    pin: Callable[[Array], Array] = unpinned  # a sharding constraint on [B, L, D], applied between the layers of a scan
    shards: int = 1  # the number of devices over which a batch is split in training
    blocks: Blocks | None = None  # the options of attention in blocks; None: attention uses arrays of queries by keys
    encoder_stack: ClassVar[type[nn.Module]] = Encoder
    decoder_stack: ClassVar[type[nn.Module]] = Decoder

    def setup(self) -> None:
        c = self.config
        self.shared = nn.Embed(c.vocab_size, c.d_model, embedding_init=parts.normal(1.0))
        self.encoder = self.encoder_stack(c, self.dtype, self.dropout, self.remat, self.pin, self.blocks)
        self.decoder = self.decoder_stack(c, self.dtype, self.dropout, self.remat, self.pin, self.blocks)
        if not c.tied_head:
            self.lm_head = Head(c.vocab_size, self.dtype)

    def embed(self, *tokens: Array) -> tuple[Array, ...]:
        """Returns the embeddings [..., D], in the compute dtype, of each array of tokens [...]."""
        embedded = look_up(self.shared.embedding, tokens, self.dtype, self.shards)
        if not self.shared.has_variable("params", "scale"):
            return embedded
        scale: Array = self.shared.get_variable("params", "scale")  # f32 [V], the scales of an int8 table
        return tuple(x * scale[named][..., None].astype(self.dtype) for x, named in zip(embedded, tokens, strict=True))

    def encode(self, tokens: Array, mask: Array, *, deterministic: bool = True) -> Memory:
        """Encodes sources for decoding (line 3 of Algorithm 1).

        Args:
          tokens: i32 [B, L].
          mask: bool [B, L], True at real tokens. Padding is marked only by the mask, as the id 0 may be a real token.
          deterministic: whether dropout is off.
        """
        (embedded,) = self.embed(tokens)
        encoded = self.encoder(embedded, mask, deterministic)
        return self.decoder.memorize(encoded, mask)

    def logits(self, hidden: Array) -> Array:
        """Returns the logits f32 [..., V] of hidden states [..., D], the decoder's outputs."""
        if self.config.scale_head:
            hidden = hidden * jnp.asarray(self.config.d_model**-0.5, hidden.dtype)
        if not self.config.tied_head:
            return self.lm_head(hidden)
        found = logits_of(hidden, self.shared.embedding, self.dtype)
        if not self.shared.has_variable("params", "scale"):
            return found
        scale: Array = self.shared.get_variable("params", "scale")  # f32 [V], the scales of an int8 table
        return found * scale

    def hidden(
        self,
        source: Array,
        source_mask: Array,
        tokens: Array,
        mask: Array | Slots,
        position: Array,
        memory_mask: Array | None = None,
        *,
        deterministic: bool = True,
    ) -> Array:
        """Returns the teacher-forced outputs of the decoder [G, N, D], the argument of `logits` (paper section 3.3).

        Args:
          source: i32 [B, L].
          source_mask: bool [B, L], True at real tokens.
          tokens: i32 [G, N], the inputs of G sequences. Sequence g attends to the concatenated encodings of the sources
            g * B / G to (g + 1) * B / G - 1.
          mask: bool [G|1, N, N]; for attention in blocks the slots, in which `example` is the number of the source
            within the sequence, 0 to B / G - 1.
          position: i32 [G|1, N]; the distance to a visible slot is this position minus the slot's position.
          memory_mask: bool [G, N, B / G * L], the source tokens that each slot may see, where True at padding has no
            effect; None: all sources of its sequence.
          deterministic: whether dropout is off.
        """
        embedded, inputs = self.embed(source, tokens)
        encoded = self.encoder(embedded, source_mask, deterministic)
        groups = tokens.shape[0]
        encoded = encoded.reshape(groups, -1, encoded.shape[-1])
        if isinstance(mask, Slots):
            owner = jnp.arange(source.shape[0])[:, None] % (source.shape[0] // groups)
            keys = Slots(jnp.where(source_mask, owner, -1).reshape(groups, -1))
            return self.decoder(inputs, mask, position, encoded, keys, deterministic)
        real = source_mask.reshape(groups, 1, -1)
        seen = real if memory_mask is None else memory_mask & real
        return self.decoder(inputs, mask, position, encoded, seen, deterministic)

    def __call__(self, *args: Array, deterministic: bool = True) -> Array:
        """Returns the teacher-forced logits f32 [G, N, V]; see `hidden`.

        The call uses every parameter, so that `init` can make them all.
        """
        return self.logits(self.hidden(*args, deterministic=deterministic))

    def step(
        self,
        tokens: Array,
        mask: Array,
        position: Array,
        key_position: Array,
        memory: Memory,
        cache: Caches,
        start: Array,
    ) -> tuple[Array, Caches]:
        """Computes a step of decoding, with the same layers as `hidden` (line 8 of Algorithm 1).

        A step may be undone: its cache slots are then masked, and later steps overwrite them.

        Args:
          tokens: i32 [B, Q].
          mask: bool [B, Q, C], the slots that each query sees, its own included.
          position: i32 [B, Q]; the distance to a visible slot is this position minus the slot's position.
          key_position: i32 [B, C], the positions of the slots.
          memory: the encoded sources.
          cache: keys and values of the slots.
          start: i32 [B|1], the slot to which each example's first query is written.

        Returns:
          The outputs [B, Q, D], the argument of `logits`, and the cache with the keys and values of the queries.
        """
        (embedded,) = self.embed(tokens)
        return self.decoder.step(embedded, mask, position, key_position, memory, cache, start)

    def empty_cache(self, batch: int, slots: int) -> Caches:
        """Returns keys and values of zeros, [B, H, C, K], for each layer of the decoder; `batch`: B, `slots`: C."""
        c = self.config
        zeros = jnp.zeros((batch, c.num_heads, slots, c.d_kv), self.dtype)
        return ((zeros, zeros),) * c.num_decoder_layers


def _flax() -> Snapshot:
    """Returns a snapshot of the parts of Flax that a T5 uses."""
    space = vars(nn.Embed) | {"relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu}
    return snapshot({name.strip("_"): value for name, value in space.items()})


def is_unpatched(model: Module) -> bool:
    """Returns whether a module is an unmodified T5: not a subclass, and without functions replaced at run time."""
    return type(model) is T5 and is_packed(model)


def is_packed(model: Module, *, changed: bool = False) -> bool:
    """Returns whether the decoders over packed queries compute the same as a module.

    The Python module that defines the class declares this by a pair `PACKED`: the class, and the class of its config.
    Subclasses are not packed. A module is not packed either if a function of that Python module or of this package was
    replaced at run time, unless `changed` is True.
    """
    names = vars(sys.modules.get(type(model).__module__, type(model)))  # a class of a file that is run has no module
    is_known: bool = names.get("PACKED") == (type(model), type(model.config))
    return is_known and (changed or (is_unchanged() and snapshot(names) == names["SNAPSHOT"]))


def is_unchanged() -> bool:
    """Returns whether no function of the T5's modules, or of Flax as far as used, was replaced after its import."""
    modules = parts, attention, embedding, relative_bias, stack
    same = all(snapshot(vars(module)) == module.SNAPSHOT for module in modules) and snapshot(globals()) == SNAPSHOT
    return same and _flax() == FLAX


PACKED = T5, T5Config  # see `is_packed`
FLAX = _flax()
SNAPSHOT = snapshot(globals())  # taken at import, before other code can replace a function
