"""The T5 encoder-decoder. Masks and positions in, logits out: no grids, tasks, meshes or files here.

Shapes: B batch, L source length, Q queries of a call, C keys, D width, H heads, K head width,
F feed-forward width, V vocabulary. In a mask True means "may attend". Parameters are float32; `dtype` is that of the
computation, and norms, softmax and logits are float32 always. Architecture: Raffel et al. 2020 (v1.0) and its v1.1, mT5
and ByT5 variants.
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

from pipejax.model import attention, embedding, relative_bias, stack, stock
from pipejax.model import layers as parts
from pipejax.model.embedding import look_up
from pipejax.model.layers import Attention, Dropout, FeedForward, Head, RelativeBias, RMSNorm, logits_of
from pipejax.model.slots import Blocks, Distances, Seen, Slots
from pipejax.model.stack import apply_layers
from pipejax.model.t5_config import T5Config

Array = jax.Array
Caches = tuple[tuple[Array, Array], ...]  # keys and values [B, H, C, K] of each layer
MASKED = -1e9  # finite: a query that sees nothing gets a uniform softmax instead of NaN, and nobody reads it


@flax.struct.dataclass
class Memory:
    """Cross-attention keys and values of a source, computed once for decoding."""

    keys: tuple[Any, ...]  # a layer each [B, H, K, L], or laid out otherwise by a backend
    values: tuple[Any, ...]  # [B, H, L, K], or likewise
    mask: Array  # bool [B, L]
    adapter: Array | None = None  # i32 [B], that of each source, if several share the weights


@flax.struct.dataclass
class LayerCache:
    """Self-attention keys and values of the slots that were fed to a layer so far."""

    keys: Array  # [B, H, C, K]
    values: Array  # [B, H, C, K]
    start: Array  # i32 [B|1], the slot of the first query of each example

    def written(self, keys: Array, values: Array) -> "LayerCache":
        """With those of the queries, [B, H, Q, K], in the slots from `start` on."""

        def write(old: Array, new: Array) -> Array:
            if len(self.start) == 1:
                return jax.lax.dynamic_update_slice_in_dim(old, new, self.start[0], axis=2)
            return jax.vmap(partial(jax.lax.dynamic_update_slice_in_dim, axis=1))(old, new, self.start)

        return LayerCache(write(self.keys, keys), write(self.values, values), self.start)


def unpinned(x: Array) -> Array:
    """Leaves it to XLA where activations lie."""
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
        normed = self.attention.norm(x)
        # Added up here, where it fuses with the scores: [B, H, L, L] is never held for all layers.
        seen = bias if isinstance(bias, Seen) else bias + padding
        x = self.attention.attend(x, normed, *self.attention.keys_values(normed), seen, deterministic)
        return self.feed_forward(x, deterministic)


class DecoderLayer(nn.Module):
    """Self-attention, cross-attention over the encoded source, feed-forward."""

    config: T5Config
    dtype: DTypeLike
    dropout: float
    attention_class: ClassVar[type[Attention]] = Attention  # of both
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
        """Teacher-forced, or a step of decoding: the same computation, with the keys of earlier steps or without.

        Args:
          x: [B, Q, D].
          cache: the slots that the queries are written to before they look at them all; None: they are all there is.
          source: encoded [B, L, D], or the keys and values [B, H, L, K] that `memorize` made of it.
        """
        normed = self.self_attention.norm(x)
        keys, values = self.self_attention.keys_values(normed)
        if cache is not None:
            cache = cache.written(keys, values)
            keys, values = cache.keys, cache.values
        x = self.self_attention.attend(x, normed, keys, values, bias, deterministic)
        normed = self.cross_attention.norm(x)
        keys, values = source if isinstance(source, tuple) else self.memorize(source)
        x = self.cross_attention.attend(x, normed, keys, values, source_bias, deterministic)
        return self.feed_forward(x, deterministic), cache

    def memorize(self, encoded: Array) -> tuple[Array, Array]:
        """Cross-attention's keys and values [B, H, L, K] of an encoded source [B, L, D]."""
        return self.cross_attention.keys_values(encoded)


class Stack(nn.Module):
    """The common part of both stacks: layers, with a norm and dropout around them."""

    config: T5Config
    dtype: DTypeLike
    dropout: float
    remat: str = "none"
    pin: Callable[[Array], Array] = unpinned
    blocks: Blocks | None = None
    layer: ClassVar[type[nn.Module]]
    depth: ClassVar[str]  # the key of the config that counts the layers
    bidirectional: ClassVar[bool]  # whether a query sees what comes after it

    def setup(self) -> None:
        c = self.config
        self.layers = [self.layer(c, self.dtype, self.dropout) for _ in range(getattr(c, self.depth))]
        self.norm = RMSNorm(c.layer_norm_epsilon, self.dtype)
        self.drop = Dropout(self.dropout)
        self.set_up_bias()

    def set_up_bias(self) -> None:
        """Makes what `bias` and `distances` need."""
        self.relative_bias = RelativeBias(self.config, bidirectional=self.bidirectional)

    def distances(self) -> Distances | None:
        """`bias` by distance, for attention in blocks; None: the layers have none in common."""
        return self.relative_bias.distances()

    def seen(self, queries: Slots, keys: Slots, distances: Distances | None = None) -> Seen:
        """For attention in blocks, in the place of a bias."""
        assert self.blocks is not None
        return Seen(queries, keys, distances, self.blocks)

    def run(self, x: Array, *seen: object, deterministic: bool) -> Array:
        """All of it, [B, Q, D] to the same; `seen`: as the layers are given it."""
        x = self.drop(x, deterministic=deterministic)
        keys = partial(self.make_rng, "dropout")
        x = apply_layers(self.layers, x, *seen, deterministic=deterministic, remat=self.remat, keys=keys, pin=self.pin)
        return self.drop(self.norm(x), deterministic=deterministic)


class Encoder(Stack):
    """The encoder's stack: embedded tokens [B, L, D] to encoded ones."""

    layer: ClassVar[type[nn.Module]] = EncoderLayer
    depth: ClassVar[str] = "num_layers"
    bidirectional: ClassVar[bool] = True

    def bias(self, batch: int, length: int) -> Any:
        """The bias of self-attention that all layers are given, [B|1, H, L, L]."""
        bias = self.relative_bias.within(length)
        if self.remat != "none":
            return bias
        # Else its gradient is summed over the examples in each layer, which takes XLA long on CPUs. A scan is there to
        # save memory, and had better keep the sum.
        return jnp.broadcast_to(bias, (batch, *bias.shape[1:]))

    def __call__(self, x: Array, mask: Array, deterministic: bool) -> Array:
        if self.blocks:
            position = jnp.broadcast_to(jnp.arange(mask.shape[1]), mask.shape)
            slots = Slots(jnp.where(mask, 0, -1), position=position)
            bias: Any = self.seen(slots, slots, self.distances())
        else:
            bias = self.bias(*x.shape[:2])
        return self.run(x, bias, jnp.where(mask[:, None, None, :], 0.0, MASKED), deterministic=deterministic)


class Decoder(Stack):
    """The decoder's stack: embedded queries [B, Q, D] to hidden states of the same shape."""

    layer: ClassVar[type[nn.Module]] = DecoderLayer
    depth: ClassVar[str] = "num_decoder_layers"
    bidirectional: ClassVar[bool] = False

    def bias(self, mask: Array, query: Array, key: Array) -> Any:
        """The bias that all layers are given, [B|1, H, Q, C]; mask [B|1, Q, C], positions i32 [B|1, Q] and [B|1, C]."""
        return jnp.where(mask[:, None], self.relative_bias(query, key), MASKED)

    def memorize(self, encoded: Array, mask: Array) -> Memory:
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
        """Teacher-forced; `memory_mask` is bool [B, 1|N, L], or the slots of the keys."""
        bias: Any
        memory_bias: Any
        if isinstance(mask, Slots):
            bias, memory_bias = self.seen(mask, mask, self.distances()), self.seen(Slots(mask.group), memory_mask)
        else:
            bias, memory_bias = self.bias(mask, position, position), jnp.where(memory_mask[:, None], 0.0, MASKED)
        return self.run(x, None, bias, encoded, memory_bias, deterministic=deterministic)

    def step(
        self, x: Array, mask: Array, position: Array, key_position: Array, memory: Memory, caches: Caches, start: Array
    ) -> tuple[Array, Caches]:
        """A step of decoding; arguments as of `T5.step`, but for the embedded tokens x [B, Q, D]."""
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
    remat: str = "none"  # the trade of time for memory in teacher-forced calls: see `apply_layers`
    pin: Callable[[Array], Array] = unpinned  # a sharding constraint on [B, L, D] between the layers of a scan
    shards: int = 1  # on how many devices a batch lies when it trains
    blocks: Blocks | None = None  # the way in which attention runs in blocks, where it does
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
        """[..., D] in the compute dtype for each array of tokens [...]."""
        embedded = look_up(self.shared.embedding, tokens, self.dtype, self.shards)
        if not self.shared.has_variable("params", "scale"):
            return embedded
        scale: Array = self.shared.get_variable("params", "scale")  # of int8
        return tuple(x * scale[named][..., None].astype(self.dtype) for x, named in zip(embedded, tokens, strict=True))

    def encode(self, tokens: Array, mask: Array, *, deterministic: bool = True) -> Memory:
        """Encodes sources i32 [B, L] once and for all; mask bool [B, L], True at real tokens (0 is a legal one)."""
        (embedded,) = self.embed(tokens)
        encoded = self.encoder(embedded, mask, deterministic)
        return self.decoder.memorize(encoded, mask)

    def logits(self, hidden: Array) -> Array:
        """f32 [..., V] from the decoder's output [..., D]."""
        if self.config.scale_head:
            hidden = hidden * jnp.asarray(self.config.d_model**-0.5, hidden.dtype)
        if not self.config.tied_head:
            return self.lm_head(hidden)
        found = logits_of(hidden, self.shared.embedding, self.dtype)
        if not self.shared.has_variable("params", "scale"):
            return found
        scale: Array = self.shared.get_variable("params", "scale")  # of int8
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
        """Teacher-forced outputs of the decoder [G, N, D], for `logits`.

        Args:
          source: i32 [B, L].
          source_mask: bool [B, L].
          tokens: i32 [G, N]; each of the G rows of slots sees the memories of B / G consecutive sources end to end.
          mask: bool [G|1, N, N]; in blocks, the slots instead, whose groups are the sources of a row, 0 to B / G - 1.
          position: i32 [G|1, N]; less that of a slot that it sees, it is how far that lies back.
          memory_mask: bool [G, N, B / G * L], which source each slot sees (padding apart); None: all of its row's.
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
        """Teacher-forced logits f32 [G, N, V]; touches every parameter, so `init` may use it."""
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
        """A step of decoding by the layers of `hidden`: outputs [B, Q, D] for `logits`, and the cache with its slots.

        A step may be taken back: nobody sees its slots then, and others write them again.

        Args:
          tokens: i32 [B, Q].
          mask: bool [B, Q, C], which slots each query sees, its own included.
          position: i32 [B, Q]; less that of a slot that it sees, it is how far that lies back.
          key_position: i32 [B, C].
          start: i32 [B|1], the slot of each example's first query.
        """
        (embedded,) = self.embed(tokens)
        return self.decoder.step(embedded, mask, position, key_position, memory, cache, start)

    def empty_cache(self, batch: int, slots: int) -> Caches:
        """Zeroed keys and values [B, H, C, K] of each layer of the decoder."""
        c = self.config
        zeros = jnp.zeros((batch, c.num_heads, slots, c.d_kv), self.dtype)
        return ((zeros, zeros),) * c.num_decoder_layers


def _flax() -> stock.Picture:
    """The parts of Flax that are used."""
    space = vars(nn.Embed) | {"relu": nn.relu, "silu": nn.silu, "gelu": nn.gelu}
    return stock.picture({name.strip("_"): value for name, value in space.items()})


def is_stock(model: Any) -> bool:
    """Whether a module is T5 itself: no subclass, no function of it replaced from outside."""
    return type(model) is T5 and is_packed(model)


def is_packed(model: Any, *, changed: bool = False) -> bool:
    """Whether the decoders over packed queries repeat the arithmetic of a module.

    The file that defines the module's class declares this by `PACKED`, the class and the class of its config. A
    subclass is not packed. Nor is a module if a function of that file or of this folder was replaced, unless `changed`.
    """
    room = vars(sys.modules[type(model).__module__])
    is_known: bool = room.get("PACKED") == (type(model), type(model.config))
    return is_known and (changed or (is_unchanged() and stock.picture(room) == room["STOCK"]))


def is_unchanged() -> bool:
    """Whether nobody replaced a function of this room from outside."""
    rooms = parts, attention, embedding, relative_bias, stack
    mine = all(stock.picture(vars(room)) == room.STOCK for room in rooms) and stock.picture(globals()) == STOCK
    return mine and _flax() == FLAX


PACKED = T5, T5Config  # see `is_packed`
FLAX = _flax()
STOCK = stock.picture(globals())  # before anyone can change it; the other modules have theirs
