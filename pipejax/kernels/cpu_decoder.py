"""Calls pipejax's kernel for CPUs: one call computes a step of a T5's decoder, another one its encoder.

The kernel (`cpu_kernel`) computes the same functions as `step_decoder` and the model's encoder. Activations are
float32; weights may be float32, bfloat16 or int8.

Shapes as in `step_decoder`. Matrices have the layout of `cpu_kernel.panels`.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.config import T5Config
from pipejax.decoding import Step
from pipejax.inference.step_decoder import Cache, grow
from pipejax.inference.weights import Matrix, Weights, as_matrix, join
from pipejax.kernels import cpu_kernel
from pipejax.kernels.cpu_kernel import fields
from pipejax.model.layers import RelativeBias
from pipejax.model.t5 import Memory
from pipejax.system import Tree

Array = jax.Array
ACTIVATIONS = ("relu", "gated-gelu", "gated-silu")  # the index of each is its number in fields.h


def fits(config: T5Config) -> bool:
    """Returns whether the kernel supports the sizes of a config: multiples of PANEL, as in all published T5s."""
    sizes = config.d_model, config.d_kv, config.d_ff
    return not any(size % cpu_kernel.PANEL for size in sizes)


def matrix(part: Tree, *, weights: str) -> Matrix:
    """Lays a projection or a table out in panels; its outputs are padded with zeros to whole panels.

    Args:
      part: the parameters of a `Linear`, a `Head` or an embedding table.
      weights: the storage of weights, as `decode.weights`.
    """
    held = as_matrix(part, weights, jnp.float32)
    more = -held.rows.shape[0] % cpu_kernel.PANEL
    scale = jnp.pad(held.scale, (0, more)) if held.scale.size else held.scale
    return Matrix(cpu_kernel.panels(jnp.pad(held.rows, ((0, more), (0, 0)))), scale)


def memory_dtype(weights: str) -> np.dtype:
    """Returns the dtype of a source's keys and values, which depends on the storage of weights.

    Keys and values in int8 have scales: see `PANELS` in fields.h.
    """
    return np.dtype({"bfloat16": jnp.bfloat16, "int8": jnp.int8}.get(weights, jnp.float32))


def widen(memory: Memory, slots: int) -> Memory:
    """Pads a memory to `slots` slots, a multiple of 16. The added slots are masked."""

    def longer(x: Array, axis: int) -> Array:
        more = x.shape[axis] * slots // memory.mask.shape[1] - x.shape[axis]
        return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])

    more = slots - memory.mask.shape[1]
    return Memory(
        keys=tuple(x.replace(rows=longer(x.rows, 2), scale=longer(x.scale, 2)) for x in memory.keys),
        values=tuple(Matrix(longer(x.rows, 3), x.scale) for x in memory.values),
        mask=jnp.pad(memory.mask, ((0, 0), (0, more))),
    )


@flax.struct.dataclass
class Keys(Matrix):
    """The keys of a source for cross-attention.

    Int8 keys are balanced to reduce their rounding error. The mean of each channel over the source is subtracted; it
    would add the same amount to all scores of a query, which does not change the softmax. Each channel is then divided
    by a power of two near its mean magnitude, by which queries are multiplied.
    """

    balance: Array  # f32 [B, H, K], the factors by which queries are multiplied; 1 unless keys are int8


@dataclasses.dataclass(frozen=True)
class KernelDecoder:
    """The decoder of a batch, a `decoding.Model` like `step_decoder.StepDecoder`; the kernel computes its steps."""

    config: T5Config
    weights: Weights
    memory: Memory
    level: cpu_kernel.Level

    def cache(self, slots: int, old: Cache | None) -> Cache:
        """See `Model`."""
        slots += -slots % cpu_kernel.PANEL
        return grow(self.config, self.memory.mask.shape[0], jnp.float32, slots, old)

    def __call__(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """See `Model`."""
        vocabulary = self.weights.head.rows.shape[0] * cpu_kernel.PANEL
        (logits,), cache = self._step(step, cache, jax.ShapeDtypeStruct((len(step.tokens), vocabulary), jnp.float32))
        return logits.T[: self.config.vocab_size], cache

    def with_hidden(self, step: Step, cache: Cache) -> tuple[Array, Array, Cache]:
        """See `Model`."""
        count, vocabulary = len(step.tokens), self.weights.head.rows.shape[0] * cpu_kernel.PANEL
        shapes = [jax.ShapeDtypeStruct((count, size), jnp.float32) for size in (vocabulary, self.config.d_model)]
        (logits, hidden), cache = self._step(step, cache, *shapes)
        return logits.T[: self.config.vocab_size], hidden, cache

    def greedy(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """See `Model`. The kernel does not write the logits to memory."""
        (tokens,), cache = self._step(step, cache, jax.ShapeDtypeStruct((len(step.tokens),), jnp.int32))
        return tokens, cache

    def _step(
        self, step: Step, cache: Cache, answers: jax.ShapeDtypeStruct, *hidden: jax.ShapeDtypeStruct
    ) -> tuple[list[Array], Cache]:
        """Calls the kernel for a step.

        Args:
          step: the input.
          cache: keys and values of the slots, which the kernel overwrites in place.
          answers: the shape and dtype of the result: f32 [N, V] for logits, i32 [N] for tokens.
          hidden: f32 [N, D], if the outputs of the decoder are wanted, too.

        Returns:
          A list of the logits or the tokens and, if wanted, the outputs of the decoder; and the cache with the keys and
          values of the step.
        """
        c, w, memory = self.config, self.weights, self.memory
        places = jnp.arange(len(step.tokens)) if step.place_of_query is None else step.place_of_query
        batch, queries, reach = step.mask.shape
        of_step = {name: getattr(step, name) for name in ("tokens", "mask", "position", "key_position")}
        of_step |= {"start": jnp.broadcast_to(step.start, batch), "place": places.astype(jnp.int32)} | vars(step.filled)
        of_step |= {"bias": w.bias, "memory_mask": memory.mask, "head": w.head, "embedding": w.embedding or w.head}
        of_step |= {"norm": w.norm * (c.d_model**-0.5 if c.scale_head else 1.0)}
        given = fields.arrays("STEP_FIELDS", of_step)
        aliases: dict[int, int] = {}  # the caches, the last two arguments of each layer, are written in place
        for i, layer in enumerate(w.layers):
            keys, of_memory = memory.keys[i], {"memory_values": memory.values[i]}
            of_memory |= {"memory_keys": Matrix(keys.rows, keys.scale), "memory_balance": keys.balance}
            of_cache = {"cache_keys": cache.keys[i], "cache_values": cache.values[i]}
            given += fields.arrays("DECODER_LAYER_FIELDS", vars(layer) | of_memory | of_cache)
            aliases |= {len(given) - 2: 1 + 2 * i, len(given) - 1: 2 + 2 * i}
        vocabulary = {"V": w.head.rows.shape[0] * cpu_kernel.PANEL, "words": c.vocab_size}
        sizes = {"B": batch, "N": len(step.tokens), "Q": queries, "C": reach, "S": cache.keys[0].shape[2]} | vocabulary
        sizes |= {"L": memory.mask.shape[1], "P": w.bias.shape[2], "tables": len(w.bias), "layers": len(w.layers)}
        caches = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*cache.keys[:1], *cache.values[:1]) * len(w.layers))
        results = (answers, *caches, *hidden)
        found = jax.ffi.ffi_call(f"pipejax_step_{self.level.name}", results, input_output_aliases=aliases)(
            *given,
            numbers=fields.numbers("STEP_NUMBERS", _sizes(c) | sizes),
            epsilon=np.float32(c.layer_norm_epsilon),
        )
        end = 1 + 2 * len(w.layers)
        return [found[0], *found[end:]], Cache(tuple(found[1:end:2]), tuple(found[2:end:2]))


@flax.struct.dataclass
class KernelEncoderLayer:
    """The weights of an encoder layer; norm scales are float32."""

    norm: Array  # [D]
    inwards: Matrix  # [3 I, D], query, key and value, concatenated
    outwards: Matrix  # [D, I]
    feed_norm: Array  # [D]
    feed_inwards: Matrix  # [F, D], or gate and value, concatenated, [2 F, D]
    feed_outwards: Matrix  # [D, F]


@flax.struct.dataclass
class KernelEncoder:
    """The weights of the encoder, and the projections to the keys and values of cross-attention."""

    embedding: Matrix  # [V, D], in rows and not in panels
    bias: Array  # f32 [T, buckets, H]; T is 1 if all layers share a bias, or the number of layers
    norm: Array  # [D]
    layers: tuple[KernelEncoderLayer, ...]
    memories: tuple[Matrix, ...]  # for each decoder layer [2 I, D], key and value, concatenated


def encoder_layer(layer: Tree, *, weights: str) -> KernelEncoderLayer:
    """Returns the weights of an encoder layer from its parameters `layer`. `weights`: as `decode.weights`."""
    own, feed = layer["attention"], layer["feed_forward"]
    held = functools.partial(matrix, weights=weights)
    return KernelEncoderLayer(
        norm=own["norm"]["scale"],
        inwards=join(*(held(own[name]) for name in ("query", "key", "value"))),
        outwards=held(own["output"]),
        feed_norm=feed["norm"]["scale"],
        feed_inwards=join(*(held(feed[name]) for name in ("wi", "wi_0", "wi_1") if name in feed)),
        feed_outwards=held(feed["wo"]),
    )


def encode(
    config: T5Config,
    encoder: KernelEncoder,
    source: Array,
    length: Array,
    *,
    slots: int,
    outputs: bool,
    weights: str,
    level: cpu_kernel.Level,
) -> Memory:
    """Encodes sources (line 3 of Algorithm 1).

    Args:
      config: the config of the model.
      encoder: the weights of the encoder.
      source: i32 [B, L].
      length: i32 [B], the number of real tokens of each source.
      slots: the number of slots of the memory, at least L and a multiple of 16.
      outputs: whether `Memory.encoded` is kept.
      weights: the storage of weights, as `decode.weights`.
      level: the instruction set of the kernel.
    """
    longest = source.shape[1]
    x = encoder.embedding.rows[source].astype(jnp.float32)
    x = x * encoder.embedding.scale[source][..., None] if encoder.embedding.scale.size else x
    query, key, bias = jnp.zeros((1, 1), jnp.int32), jnp.arange(1 - longest, longest)[None], RelativeBias(config, True)
    biases = jnp.stack([jnp.asarray(bias.apply({"params": {"embedding": x}}, query, key)) for x in encoder.bias])
    of_sources = {"embedded": x, "length": length, "norm": encoder.norm, "bias": biases}
    return _memory(
        config,
        of_sources,
        encoder.layers,
        encoder.memories,
        slots=slots,
        outputs=outputs,
        weights=weights,
        level=level,
    )


def memorize(
    config: T5Config,
    memories: tuple[Matrix, ...],
    encoded: Array,
    length: Array,
    *,
    slots: int,
    weights: str,
    level: cpu_kernel.Level,
) -> Memory:
    """Computes the memory of sources from the outputs of an encoder, f32 [B, L, D].

    `memories` are those of a `KernelEncoder`; the other arguments are as for `encode`.
    """
    # Without layers the kernel uses neither the norm nor the bias.
    norm, bias = jnp.ones(config.d_model), jnp.zeros((1, config.num_heads, 2 * encoded.shape[1] - 1))
    of_sources = {"embedded": encoded, "length": length, "norm": norm, "bias": bias}
    return _memory(config, of_sources, (), memories, slots=slots, outputs=False, weights=weights, level=level)


def _memory(
    config: T5Config,
    of_sources: dict[str, Array],
    layers: tuple[KernelEncoderLayer, ...],
    memories: tuple[Matrix, ...],
    *,
    slots: int,
    outputs: bool,
    weights: str,
    level: cpu_kernel.Level,
) -> Memory:
    """Calls the kernel for `encode` or `memorize`; `of_sources` are the fields of ENCODE_FIELDS in fields.h."""
    length, biases = of_sources["length"].astype(jnp.int32), of_sources["bias"]
    batch, longest, _ = of_sources["embedded"].shape
    biases = biases.reshape(len(biases), config.num_heads, -1)
    given = fields.arrays("ENCODE_FIELDS", of_sources | {"length": length, "bias": biases})
    for layer in layers:
        given += fields.arrays("ENCODER_LAYER_FIELDS", vars(layer))
    for projection in memories:
        given += fields.arrays("MEMORY_FIELDS", {"projection": projection})
    dtype = memory_dtype(weights)
    depth = 4 // dtype.itemsize
    results: list[jax.ShapeDtypeStruct] = []
    for rows, inputs in ((slots, config.d_kv), (config.d_kv, slots)):  # first keys, then values
        panels = rows // cpu_kernel.PANEL, inputs // depth, cpu_kernel.PANEL, depth
        results.append(jax.ShapeDtypeStruct((batch, config.num_heads, *panels), dtype))
        scales = rows if dtype == jnp.int8 else 0
        results.append(jax.ShapeDtypeStruct((batch, config.num_heads, scales), jnp.float32))
    results.insert(2, jax.ShapeDtypeStruct((batch, config.num_heads, config.d_kv), jnp.float32))
    sizes = {
        "B": batch,
        "L": longest,
        "M": slots,
        "tables": len(biases),
        "layers": len(layers),
        "memories": len(memories),
    }
    count = 5 * len(memories)
    encoded = jax.ShapeDtypeStruct((batch, longest, config.d_model), jnp.float32)
    results = results * len(memories) + [encoded] * outputs
    found = jax.ffi.ffi_call(f"pipejax_encode_{level.name}", results)(
        *given,
        numbers=fields.numbers("ENCODE_NUMBERS", _sizes(config) | sizes),
        epsilon=np.float32(config.layer_norm_epsilon),
    )
    arrays = [found[i:count:5] for i in range(5)]
    keys, values = map(Keys, *arrays[:3]), map(Matrix, *arrays[3:])
    mask = jnp.arange(slots) < length[:, None]
    return Memory(tuple(keys), tuple(values), mask, encoded=found[-1] if outputs else None)


def listen(count: Array, switch: Array, *, level: cpu_kernel.Level) -> Array:
    """Reads a switch in host memory, by which the host can interrupt a decoding loop.

    The switch is read when the running program reaches this call, and not when the program starts. The call depends on
    `count`, which changes in each step, so XLA cannot compute it in advance or move it out of the loop. The call is not
    declared as a side effect, since JAX's fast dispatch does not support side effects, and the slow dispatch of a
    program with hundreds of arrays takes 2 to 3 ms.

    Args:
      count: i32 scalar, the number of steps left.
      switch: u32 [2], the address of an i32, low half first; non-zero means interrupt.
      level: the instruction set of the kernel.

    Returns:
      `count`, or `-count` if the switch is set.
    """
    found: Array = jax.ffi.ffi_call(f"pipejax_left_{level.name}", jax.ShapeDtypeStruct((), jnp.int32))(count, switch)
    return found


def _sizes(config: T5Config) -> dict[str, int]:
    """Returns the sizes that all calls of the kernel contain, by their names in fields.h."""
    widths = {"D": config.d_model, "H": config.num_heads, "K": config.d_kv, "F": config.d_ff}
    return widths | {"activation": ACTIVATIONS.index(config.feed_forward)}
