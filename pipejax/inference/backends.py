"""The backends, which compute encoder and decoder steps, and lay weights and memories out for it: XLA, our own kernel.

A backend is chosen once, when a checkpoint is opened.

Shapes: O outputs, I inputs of a matrix; B batch, L source length.
"""

import dataclasses
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pipejax.config import T5Config
from pipejax.data.shapes import memory_length
from pipejax.decoding import Model
from pipejax.inference import kernel_decoder, kernels
from pipejax.inference.kernel_decoder import KernelDecoder
from pipejax.inference.kernels import Reading
from pipejax.inference.step_decoder import Cache, StepDecoder
from pipejax.inference.weights import Layer, Weights, joined, lay_out, lay_out_layer, narrowed
from pipejax.model import quantization
from pipejax.model.t5 import T5, Memory

Array = jax.Array
CACHE = 32e6  # weights of so many bytes stay in a CPU's cache: see `kernels.Reading`


class Backend(Protocol):
    """Lays weights out and computes with them. Static under jit."""

    def encoder_layer(self, model: T5, layer: Any) -> Any:
        """A layer of the encoder from its parameters."""
        ...

    def decoder_layer(self, model: T5, layer: Any) -> tuple[Any, Layer]:
        """A layer of the decoder from its parameters: what makes its memory of a source, and the rest."""
        ...

    def ends(self, model: T5, params: Any) -> tuple[Any, Weights]:
        """The arrays that are in no layer, from parameters without layers: the encoder's, and the decoder's."""
        ...

    def encoder(self, ends: Any, layers: list[Any], memories: list[Any]) -> Any:
        """All that `encode` reads."""
        ...

    def encode(self, model: T5, encoder: Any, source: Array, length: Array) -> Memory:
        """The memory of a batch of sources, of `memory_length(L)` slots.

        Args:
          model: the T5.
          encoder: as `encoder` gives it.
          source: i32 [B, L].
          length: i32 [B], real tokens of each.
        """
        ...

    def widened(self, memory: Memory, slots: int) -> Memory:
        """The memory with so many slots, at least as many as it has; those added are masked."""
        ...

    def decoder(self, model: T5, weights: Weights, memory: Memory) -> Model[Cache]:
        """The decoder of a batch."""
        ...

    @property
    def skips_fillers(self) -> bool:
        """Whether a step takes the time of the queries that are asked, and not of as many as it has room for."""
        ...

    @property
    def reading(self) -> Reading:
        """The time that a step on a CPU takes beside its columns."""
        ...

    @property
    def can_listen(self) -> bool:
        """Whether a program that runs can be told to pause."""
        ...

    def left(self, count: Array, switch: Array) -> Array:
        """The count i32 of steps left, below zero if the program is told to pause.

        `switch`: u32 [2], the address of an i32 of the host's that is not 0 then, low half first.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Xla:
    """XLA's own products, on any device and in any dtype."""

    weights: str = "auto"  # the dtype that they are held in, one of `pipejax.config.WEIGHTS`

    def encoder_layer(self, model: T5, layer: Any) -> Any:
        """See `Backend`."""
        return quantization.hold(layer, model.dtype, self.weights)

    def decoder_layer(self, model: T5, layer: Any) -> tuple[Any, Layer]:
        """See `Backend`."""
        projections = {"cross_attention": {key: layer["cross_attention"][key] for key in ("key", "value")}}
        held = quantization.hold(projections, model.dtype, self.weights)
        return held, lay_out_layer(layer, partial(narrowed, weights=self.weights, dtype=model.dtype))

    def ends(self, model: T5, params: Any) -> tuple[Any, Weights]:
        """See `Backend`."""
        own = {key: params[key] for key in ("shared", "encoder")}
        held = quantization.hold(own, model.dtype, self.weights)
        return held, lay_out(model.config, params, partial(narrowed, weights=self.weights, dtype=model.dtype))

    def encoder(self, ends: Any, layers: list[Any], memories: list[Any]) -> Any:
        """See `Backend`."""
        encoder = {**ends["encoder"], **{f"layers_{i}": layer for i, layer in enumerate(layers)}}
        return {**ends, "encoder": encoder, "decoder": {f"layers_{i}": layer for i, layer in enumerate(memories)}}

    def encode(self, model: T5, encoder: Any, source: Array, length: Array) -> Memory:
        """See `Backend`."""
        mask = jnp.arange(source.shape[1]) < length[:, None]
        memory: Any = model.apply({"params": encoder}, source, mask, method="encode")
        return Xla.widened(self, memory, memory_length(source.shape[1]))

    def widened(self, memory: Memory, slots: int) -> Memory:
        """See `Backend`."""
        more = slots - memory.mask.shape[1]
        return Memory(
            keys=tuple(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more))) for x in memory.keys),
            values=tuple(jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0))) for x in memory.values),
            mask=jnp.pad(memory.mask, ((0, 0), (0, more))),
        )

    def decoder(self, model: T5, weights: Weights, memory: Memory) -> Model[Cache]:
        """See `Backend`."""
        return StepDecoder(model.config, weights, memory, model.dtype)

    @property
    def skips_fillers(self) -> bool:
        """See `Backend`."""
        return False

    @property
    def reading(self) -> Reading:
        """See `Backend`."""
        return Reading(float32=10.0, bfloat16=6.0, int8=5.0, cached=1.5)

    @property
    def can_listen(self) -> bool:
        """See `Backend`."""
        return False

    def left(self, count: Array, switch: Array) -> Array:
        """See `Backend`."""
        return count


@dataclasses.dataclass(frozen=True)
class Gpu(Xla):
    """XLA, with our own kernels for a GPU in the decoder's steps."""

    interpret: bool = False  # runs them as ordinary computations, on any device

    def decoder(self, model: T5, weights: Weights, memory: Memory) -> Model[Cache]:
        """See `Backend`."""
        from pipejax.inference.gpu import GpuDecoder  # importing Pallas takes time, and elsewhere nobody needs it

        return GpuDecoder(model.config, weights, memory, model.dtype, self.interpret)


@dataclasses.dataclass(frozen=True)
class OwnKernel(Xla):
    """Our kernel for CPUs; activations are float32."""

    level: kernels.Level = kernels.LEVELS[-1]

    def encoder_layer(self, model: T5, layer: Any) -> Any:
        """See `Backend`."""
        return kernel_decoder.encoder_layer(layer, weights=self.weights)

    def decoder_layer(self, model: T5, layer: Any) -> tuple[Any, Layer]:
        """See `Backend`."""
        matrix = partial(kernel_decoder.matrix, weights=self.weights)
        memory = joined(layer["cross_attention"]["key"], layer["cross_attention"]["value"])
        return matrix(memory), lay_out_layer(layer, matrix)

    def ends(self, model: T5, params: Any) -> tuple[Any, Weights]:
        """See `Backend`."""
        laid = lay_out(model.config, params, partial(kernel_decoder.matrix, weights=self.weights))
        own = params["encoder"]
        encoder = kernel_decoder.Encoder(
            embedding=narrowed(params["shared"]["embedding"], self.weights, jnp.float32),
            bias=own["relative_bias"]["embedding"],
            norm=own["norm"]["scale"],
            layers=(),
            memories=(),
        )
        return encoder, laid

    def encoder(self, ends: Any, layers: list[Any], memories: list[Any]) -> Any:
        """See `Backend`."""
        return ends.replace(layers=tuple(layers), memories=tuple(memories))

    def encode(self, model: T5, encoder: Any, source: Array, length: Array) -> Memory:
        """See `Backend`."""
        slots = memory_length(source.shape[1])
        return kernel_decoder.encode(
            model.config, encoder, source, length, slots=slots, weights=self.weights, level=self.level
        )

    def widened(self, memory: Memory, slots: int) -> Memory:
        """See `Backend`."""
        return kernel_decoder.widened(memory, slots)

    def decoder(self, model: T5, weights: Weights, memory: Memory) -> Model[Cache]:
        """See `Backend`."""
        return KernelDecoder(model.config, weights, memory, self.level)

    @property
    def skips_fillers(self) -> bool:
        """See `Backend`."""
        return True

    @property
    def reading(self) -> Reading:
        """See `Backend`."""
        return self.level.reading

    @property
    def can_listen(self) -> bool:
        """See `Backend`."""
        return True

    def left(self, count: Array, switch: Array) -> Array:
        """See `Backend`."""
        return kernel_decoder.left(count, switch, level=self.level)


XLA = Xla()


def call_costs(weights: Weights, backend: Backend = XLA) -> float:
    """The cost of a call on a CPU whatever it computes, in columns: the reading of the weights."""
    held = sorted(jax.tree.leaves(weights), key=lambda x: x.nbytes)
    cached = sum(x.nbytes for x in held) < CACHE
    return backend.reading.cached if cached else getattr(backend.reading, held[-1].dtype.name)


def fastest(config: T5Config, dtype: Any, weights: str = "auto") -> Backend:
    """The fastest on this machine for a T5 of that compute dtype; `weights`: one of `pipejax.config.WEIGHTS`."""
    level = kernels.use() if dtype == jnp.float32 and kernel_decoder.fits(config) else None
    if level:
        return OwnKernel(weights, level)
    if dtype == jnp.bfloat16 and jax.default_backend() == "gpu":
        from pipejax.inference import gpu

        return Gpu(weights) if gpu.use() else Xla(weights)
    return Xla(weights)
