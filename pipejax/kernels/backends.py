"""Backends that compute with pipejax's kernels for CPUs and GPUs. `registry.STEP_COMPUTERS` lists their functions."""

import dataclasses
import os
from functools import partial
from typing import ClassVar, TypeGuard

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.data.shapes import memory_length
from pipejax.decoding import Model, Step
from pipejax.decoding.choice import first_argmax
from pipejax.inference.backends import Array, Backend, Compute, LayerDecoder, Reading, Ready, Xla, call
from pipejax.inference.weights import Layer, Weights, as_matrix, bias_tables, join, lay_out, lay_out_layer
from pipejax.kernels import cpu_decoder, cpu_kernel, products
from pipejax.kernels.cpu_decoder import KernelDecoder
from pipejax.model.backbone import Backbone, Module
from pipejax.model.t5 import Memory, is_unchanged
from pipejax.model.t5_config import T5Config
from pipejax.system import Tree

HEAD_WIDTH = 64  # the head width of all published T5s except 3B and 11B


@dataclasses.dataclass(frozen=True)
class Products(Backend):
    """The backend for any backbone in float32 on a CPU: its Flax layers, with pipejax's kernel for the products."""

    level: cpu_kernel.Level = cpu_kernel.LEVELS[-1]

    def prepare(self, model: Module, params: Tree, *, compute: Compute = call) -> Ready:
        """See `Backend`. Arrays that encoder and decoder share are stored once, except matrices of products in both."""
        held = Backend.prepare(self, model, params, compute=compute).encoding
        one, length = jnp.zeros((1, cpu_kernel.PANEL), jnp.int32), jnp.ones(1, jnp.int32)
        memory = jax.eval_shape(lambda params: self.encode(model, params, one, length), held)
        single = products.split_kernel_weights(
            partial(_step, model, memory), held, compute=compute, weights=self.weights, rough=_cap(model) is not None
        )
        return Ready(products.needed(lambda params: self.encode(model, params, one, length), held), single)

    def decoder(self, model: Module, weights: products.StepParams, memory: Memory) -> Model[Tree]:
        """See `Backend`."""
        return ProductDecoder(model, weights.others, memory, weights.matrices, self.level)

    @property
    def reading(self) -> Reading:
        """See `Backend`."""
        return self.level.reading


def _step(model: Module, memory: Memory, params: Tree) -> Tree:
    """Computes the logits of a step with one query. This function is traced to find the matrix products of a step."""
    zeros = partial(jnp.zeros, dtype=jnp.int32)
    memory = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), memory)
    given = jnp.ones((1, 1, 1), bool), zeros((1, 1)), zeros((1, 1)), memory, model.empty_cache(1, 1), zeros(1)
    hidden, _ = model.apply({"params": params}, zeros((1, 1)), *given, method="step")
    return model.apply({"params": params}, hidden[0], method="logits")


def _cap(model: Module) -> float | None:
    """Returns the soft cap of a module's logits, 0 for no cap; None if `logits` is not marked by `layers.capped_by`."""
    setting: str | None = getattr(type(model).logits, "capped_by", None)
    return None if setting is None else float(getattr(model.config, setting))


@dataclasses.dataclass(frozen=True)
class ProductDecoder(LayerDecoder):
    """A `LayerDecoder` whose products are computed by pipejax's kernel."""

    matrices: dict[str, products.Panels]
    level: cpu_kernel.Level

    def with_hidden(self, step: Step, cache: Tree) -> tuple[Array, Array, Tree]:
        """See `Model`."""
        with products.multiplying(self.matrices, self.level):
            return super().with_hidden(step, cache)

    def greedy(self, step: Step, cache: Tree) -> tuple[Array, Tree]:
        """See `Model`."""
        with products.multiplying(self.matrices, self.level, _cap(self.model)):
            logits, _, cache = super().with_hidden(step, cache)
        return first_argmax(logits), cache


@dataclasses.dataclass(frozen=True)
class Gpu(Xla):
    """The backend that computes with XLA, except for the decoder's steps, which use pipejax's kernels for GPUs."""

    interpret: bool = False  # whether Pallas interprets the kernels, which works on any device

    def decoder(self, model: Module, weights: Weights, memory: Memory) -> Model[Tree]:
        """See `Backend`."""
        from pipejax.kernels.gpu import GpuDecoder  # imported here, as importing Pallas takes time

        return GpuDecoder(model.config, weights, memory, model.dtype, self.interpret)

    @property
    def without_kernels(self) -> Backend:
        """See `Backend`."""
        return Xla(self.weights)


@dataclasses.dataclass(frozen=True)
class OwnKernel(Xla):
    """The backend with pipejax's kernel for CPUs, for an unmodified T5 or UMT5, with float32 activations."""

    level: cpu_kernel.Level = cpu_kernel.LEVELS[-1]
    skips_fillers: ClassVar[bool] = True
    can_listen: ClassVar[bool] = True

    def _encoder_layer(self, model: Module, layer: Tree) -> Tree:
        return cpu_decoder.encoder_layer(layer, weights=self.weights)

    def _decoder_layer(self, model: Module, layer: Tree) -> tuple[Tree, Layer]:
        matrix = partial(cpu_decoder.matrix, weights=self.weights)
        memory = join(*(matrix(layer["cross_attention"][name]) for name in ("key", "value")))
        return memory, lay_out_layer(layer, matrix)

    def _ends(self, model: Module, params: Tree) -> tuple[Tree, Weights]:
        laid = lay_out(model.config, params, partial(cpu_decoder.matrix, weights=self.weights))
        own = params["encoder"]
        encoder = cpu_decoder.KernelEncoder(
            embedding=as_matrix(params["shared"], self.weights, jnp.float32),
            bias=bias_tables(own),
            norm=own["norm"]["scale"],
            layers=(),
            memories=(),
        )
        return encoder, laid

    def _encoder(self, ends: Tree, layers: list[Tree], memories: list[Tree]) -> Tree:
        return ends.replace(layers=tuple(layers), memories=tuple(memories))

    def encode(self, model: Module, encoder: Tree, source: Array, length: Array, *, outputs: bool = False) -> Memory:
        """See `Backend`."""
        return cpu_decoder.encode(
            model.config,
            encoder,
            source,
            length,
            slots=memory_length(source.shape[1]),
            outputs=outputs,
            weights=self.weights,
            level=self.level,
        )

    def projections(self, encoder: Tree) -> Tree:
        """See `Backend`."""
        return encoder.memories

    def memorize(self, model: Module, projections: Tree, encoded: Array, length: Array) -> Memory:
        """See `Backend`."""
        return cpu_decoder.memorize(
            model.config,
            projections,
            encoded,
            length,
            slots=memory_length(encoded.shape[1]),
            weights=self.weights,
            level=self.level,
        )

    def widen(self, memory: Memory, slots: int) -> Memory:
        """See `Backend`."""
        return cpu_decoder.widen(memory, slots)

    def decoder(self, model: Module, weights: Weights, memory: Memory) -> Model[Tree]:
        """See `Backend`."""
        return KernelDecoder(model.config, weights, memory, self.level)

    @property
    def reading(self) -> Reading:
        """See `Backend`."""
        return self.level.reading

    def listen(self, count: Array, switch: Array) -> Array:
        """See `Backend`."""
        return cpu_decoder.listen(count, switch, level=self.level)


def _is_packed_t5(backbone: Backbone, portable: Backend) -> TypeGuard[T5Config]:
    """Returns whether a backbone is an unmodified T5 or UMT5.

    The steps of these two backbones compute packed queries with the weights of `Xla`.
    """
    return type(portable) is Xla and isinstance(backbone, T5Config)


def cpu_decoder_backend(backbone: Backbone, portable: Backend, dtype: DTypeLike) -> Backend | None:
    """Returns the backend `OwnKernel` for an unmodified T5 or UMT5 in float32 whose sizes the kernel supports, or None.

    Args:
      backbone: the backbone.
      portable: the backend that computes with XLA.
      dtype: the compute dtype.
    """
    if not _is_packed_t5(backbone, portable) or dtype != jnp.float32:
        return None
    level = cpu_kernel.use()
    return OwnKernel(portable.weights, level) if level and cpu_decoder.fits(backbone) else None


def gpu_backend(backbone: Backbone, portable: Backend, dtype: DTypeLike) -> Backend | None:
    """Returns the backend `Gpu` for an unmodified T5 or UMT5 in bfloat16 on a GPU, or None.

    See `cpu_decoder_backend` for the arguments.
    """
    if not _is_packed_t5(backbone, portable) or dtype != jnp.bfloat16:
        return None
    if jax.default_backend() != "gpu":
        return None
    from pipejax.kernels import gpu

    return Gpu(portable.weights) if gpu.use() else None


def try_kernels(*, trains: bool) -> None:
    """Makes the missing trials of the kernels for GPUs. Attention is tried with heads of the usual width, HEAD_WIDTH.

    Args:
      trains: whether gradients are needed.
    """
    if os.environ.get(cpu_kernel.VARIABLE) == "off":
        return
    from pipejax.kernels import block_attention, gpu  # imported here, as importing Pallas takes time

    block_attention.refusal(HEAD_WIDTH, trains=trains)
    gpu.refusal()


def cpu_products_backend(backbone: Backbone, portable: Backend, dtype: DTypeLike) -> Backend | None:
    """Returns the backend `Products` for any other backbone in float32 on a CPU, or None.

    See `cpu_decoder_backend` for the arguments.
    """
    if _is_packed_t5(backbone, portable) or dtype != jnp.float32:
        return None
    level = cpu_kernel.use()
    return Products(portable.weights, level) if level and is_unchanged() else None
