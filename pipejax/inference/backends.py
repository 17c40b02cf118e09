"""Backends, which lay out weights and compute the encoder and the decoding steps.

There are three levels. `Backend` computes any backbone by calling the layers of its module. `Xla` supports the stock T5
and UMT5 only: it repeats their arithmetic with XLA's matrix products over packed queries, on any device.
`registry.STEP_COMPUTERS` names backends with pipejax's kernels for certain devices, which are faster still. A backend
is chosen once (`choose`), before the weights are laid out.

`prepare` turns a checkpoint's parameters into `Ready`: it merges low-rank factors, rounds the weights to the stored
dtype, and lays them out in the order in which a step reads them. With weights "int8", each row of a matrix [O, I] is
stored as int8 with one float32 scale (`quantization.quantize`); `Xla` computes products in the compute dtype and
multiplies each output by its scale. A checkpoint that is already int8 is not rounded again.

Shapes: O outputs, I inputs of a matrix; B batch, L source length; N, Q, C as in `decoding.core`.
"""

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from typing import ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax import registry
from pipejax.data.shapes import memory_length
from pipejax.decoding import Model, Step
from pipejax.decoding.choice import first_argmax
from pipejax.inference.step_decoder import StepDecoder
from pipejax.inference.weights import Layer, Weights, as_matrix, lay_out, lay_out_layer
from pipejax.model import lora, quantization
from pipejax.model.backbone import Backbone, Module, with_encoder_outputs
from pipejax.model.parameters import check_read
from pipejax.model.t5 import Memory, is_packed
from pipejax.system import Tree

logger = logging.getLogger(__name__)

Array = jax.Array


class Reading(NamedTuple):
    """The fixed cost of a decoder call, in units of the cost of one column (query), by the dtype of the weights.

    On a CPU, reading the weights takes a fixed time per call. The fields express this time as a number of columns.
    """

    float32: float
    bfloat16: float
    int8: float
    # The fixed cost if the processor's cache holds the weights: the time between calls and between parts of a call.
    cached: float


Compute = Callable[..., Tree]  # calls a function of a tree with static options, compiled or not
CACHE = 32e6  # bytes; smaller weights are assumed to stay in the cache of a CPU: see `Reading.cached`


@flax.struct.dataclass
class Ready:
    """A backbone's parameters in the layout of a backend."""

    encoding: Tree  # parameters for `Backend.encode`
    decoding: Tree  # parameters for `Backend.decoder`; a `Weights` for the stock T5
    drafter: Tree = None  # the drafter's own parameters


def call(function: Compute, *arguments: Tree, **options: object) -> Tree:
    """Calls a function without compiling it."""
    return function(*arguments, **options)


def _prepare_part(params: Tree, *, model: Module, backend: "Backend", part: str) -> Tree:
    """Calls the backend's method named `part` with merged parameters.

    The function is not a closure, so that jit can cache its compilation. The parameters are converted to float32,
    except int8 parameters that remain int8, because rounding these again would change nothing.
    """
    stay = backend.weights == "int8" and quantization.is_int8(params)
    return getattr(backend, part)(model, lora.merge_factors(params if stay else quantization.dequantize(params)))


@dataclasses.dataclass(frozen=True)
class Backend:
    """Computes any backbone with the layers of its module, on any device and in any dtype. Static under jit."""

    weights: str = "auto"  # the dtype in which weights are stored, one of `pipejax.config.WEIGHTS`
    skips_fillers: ClassVar[bool] = False  # whether the time of a step depends on its live queries, not on its size
    can_listen: ClassVar[bool] = False  # whether a running program reads the switch of `listen`

    def prepare(self, model: Module, params: Tree, *, compute: Compute = call) -> Ready:
        """Merges low-rank factors, rounds the weights, and lays them out. The method can be traced.

        Args:
          model: the module.
          params: the checkpoint's parameters.
          compute: calls a function, compiled or not; see `Compute`.

        Raises:
          UserError: int8 is requested, and a layer of the module does not read the scales.
        """
        held = compute(_prepare_part, params, model=model, backend=self, part="_held")
        if self.weights == "int8":
            of_one = lora.choose(held, jnp.zeros(1, jnp.int32) if lora.is_stacked(held) else None)
            check_read("decode.weights: found int8", model, of_one, f"/{quantization.SCALE}")
        return Ready(held, held)

    def _held(self, model: Module, params: Tree) -> Tree:
        """Returns the parameters in the dtype in which they are stored."""
        return quantization.cast_or_quantize(params, model.dtype, self.weights)

    def encode(self, model: Module, encoder: Tree, source: Array, length: Array, *, outputs: bool = False) -> Memory:
        """Encodes sources i32 [B, L] of `length` i32 [B] tokens.

        Args:
          model: the module.
          encoder: `Ready.encoding`.
          source: the sources.
          length: their lengths.
          outputs: whether `Memory.encoded`, [B, L, D], is kept.

        Returns:
          A memory with `memory_length(L)` slots; the slots after the source are masked.
        """
        mask = jnp.arange(source.shape[1]) < length[:, None]
        call: Compute = partial(model.apply, {"params": encoder}, source, mask, method="encode")
        memory: Memory
        if outputs:
            memory, encoded = with_encoder_outputs(call)
            memory = dataclasses.replace(memory, encoded=encoded)
        else:
            memory = call()
        return Backend.widen(self, memory, memory_length(source.shape[1]))

    def projections(self, encoder: Tree) -> Tree:
        """Returns the part of `Ready.encoding` that `memorize` needs."""
        return {"decoder": encoder["decoder"]}

    def memorize(self, model: Module, projections: Tree, encoded: Array, length: Array) -> Memory:
        """Computes the memory of sources from the outputs of the encoder, [B, L, D], as `encode` does.

        Args:
          model: the module.
          projections: the result of the method `projections`.
          encoded: the outputs of the encoder.
          length: i32 [B], the number of tokens of each source.
        """
        mask = jnp.arange(encoded.shape[1]) < length[:, None]
        found: Memory = model.apply(
            {"params": projections}, encoded, mask, method=lambda model, *given: model.decoder.memorize(*given)
        )
        return Backend.widen(self, found, memory_length(encoded.shape[1]))

    def widen(self, memory: Memory, slots: int) -> Memory:
        """Pads a memory to `slots` slots, at least as many as it has; the added slots are masked."""
        more = slots - memory.mask.shape[1]
        return dataclasses.replace(
            memory,
            keys=tuple(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more))) for x in memory.keys),
            values=tuple(jnp.pad(x, ((0, 0), (0, 0), (0, more), (0, 0))) for x in memory.values),
            mask=jnp.pad(memory.mask, ((0, 0), (0, more))),
        )

    def decoder(self, model: Module, weights: Tree, memory: Memory) -> Model[Tree]:
        """Returns the decoder of an encoded batch; `weights` is `Ready.decoding`."""
        return LayerDecoder(model, weights, memory)

    @property
    def reading(self) -> Reading:
        """The fixed cost of a step on a CPU, in columns, by the dtype of the weights."""
        return Reading(float32=10.0, bfloat16=6.0, int8=5.0, cached=1.5)

    @property
    def without_kernels(self) -> "Backend":
        """The backend that reads the same `Ready.decoding` and computes steps with XLA alone; by default itself."""
        return self

    def listen(self, count: Array, switch: Array) -> Array:
        """Returns the number of steps left, i32 scalar; negative if the switch is set.

        A backend that cannot read the switch returns `count` unchanged (see `can_listen`).

        Args:
          count: i32 scalar, the number of steps left.
          switch: u32 [2], the address of a flag, an i32 in the host's memory, low half first. The switch is
            set if the flag is not 0.
        """
        return count


@dataclasses.dataclass(frozen=True)
class LayerDecoder:
    """A `decoding.Model` that calls the step of a backbone's module, with queries unpacked to [B, Q]."""

    model: Module
    weights: Tree
    memory: Memory

    def cache(self, slots: int, old: Tree) -> Tree:
        """See `Model`."""
        new = self.model.empty_cache(self.memory.mask.shape[0], slots)
        if old is None:
            return new
        return jax.tree.map(lambda new, old: jax.lax.dynamic_update_slice(new, old, (0,) * old.ndim), new, old)

    def __call__(self, step: Step, cache: Tree) -> tuple[Array, Tree]:
        """See `Model`."""
        logits, _, cache = self.with_hidden(step, cache)
        return logits, cache

    def with_hidden(self, step: Step, cache: Tree) -> tuple[Array, Array, Tree]:
        """See `Model`."""
        tokens, places = step.tokens, step.query_at_place
        if places is not None:
            # Fillers are padding; their tokens have no effect.
            tokens = jnp.take(tokens, places.reshape(-1), mode="clip")
        # A draft may contain numbers that are no token ids; a column of NaN would spoil its slot.
        tokens = jnp.clip(tokens, 0, self.model.config.vocab_size - 1).reshape(step.position.shape)
        params, given = {"params": self.weights}, (step.mask, step.position, step.key_position)
        hidden, cache = self.model.apply(params, tokens, *given, self.memory, cache, step.start, method="step")
        hidden = hidden.reshape(-1, hidden.shape[-1])
        if step.place_of_query is not None:
            hidden = jnp.take(hidden, step.place_of_query, axis=0, mode="clip")
        return self.model.apply(params, hidden, method="logits").T, hidden, cache

    def greedy(self, step: Step, cache: Tree) -> tuple[Array, Tree]:
        """See `Model`."""
        logits, cache = self(step, cache)
        return first_argmax(logits), cache


@dataclasses.dataclass(frozen=True)
class Xla(Backend):
    """XLA's matrix products over packed queries, for the stock T5 and UMT5."""

    def prepare(self, model: Module, params: Tree, *, compute: Compute = call) -> Ready:
        """See `Backend`. Prepares one layer at a time, so that only one layer is in memory in float32.

        Raises:
          ValueError: the module is not the stock T5 or UMT5.
        """
        if not is_packed(model):
            raise ValueError(f"found {type(model).__name__}, changed or of another kind; expected the stock T5 or UMT5")
        lay = partial(compute, _prepare_part, model=model, backend=self)
        encoder = _with_tables(params["encoder"], model.config.num_layers)
        decoder = _with_tables(params["decoder"], model.config.num_decoder_layers)
        layers, memories, weights = [], [], []
        for i in range(model.config.num_layers):
            layers.append(lay(encoder.pop(f"layers_{i}"), part="_encoder_layer"))
        for i in range(model.config.num_decoder_layers):
            memory, layer = lay(decoder.pop(f"layers_{i}"), part="_decoder_layer")
            memories.append(memory)
            weights.append(layer)
        ends, whole = lay({**params, "encoder": encoder, "decoder": decoder}, part="_ends")
        return Ready(self._encoder(ends, layers, memories), whole.replace(layers=tuple(weights)))

    def _encoder_layer(self, model: Module, layer: Tree) -> Tree:
        """Lays out a layer of the encoder."""
        return quantization.cast_or_quantize(layer, model.dtype, self.weights)

    def _decoder_layer(self, model: Module, layer: Tree) -> tuple[Tree, Layer]:
        """Lays out a layer of the decoder.

        Returns:
          The projections that compute the layer's memory of a source, and the other weights.
        """
        projections = {"cross_attention": {key: layer["cross_attention"][key] for key in ("key", "value")}}
        held = quantization.cast_or_quantize(projections, model.dtype, self.weights)
        return held, lay_out_layer(layer, partial(as_matrix, weights=self.weights, dtype=model.dtype))

    def _ends(self, model: Module, params: Tree) -> tuple[Tree, Weights]:
        """Returns the laid-out parameters outside of layers: parameters for `encode`, and weights of the decoder."""
        held = quantization.cast_or_quantize(
            {key: params[key] for key in ("shared", "encoder")}, model.dtype, self.weights
        )
        return held, lay_out(model.config, params, partial(as_matrix, weights=self.weights, dtype=model.dtype))

    def _encoder(self, ends: Tree, layers: list[Tree], memories: list[Tree]) -> Tree:
        """Combines the parts into the parameters for `encode`."""
        encoder = {**ends["encoder"], **{f"layers_{i}": layer for i, layer in enumerate(layers)}}
        return {**ends, "encoder": encoder, "decoder": {f"layers_{i}": layer for i, layer in enumerate(memories)}}

    def decoder(self, model: Module, weights: Weights, memory: Memory) -> Model[Tree]:
        """See `Backend`."""
        return StepDecoder(model.config, weights, memory, model.dtype)


def _with_tables(stack: Tree, count: int) -> Tree:
    """Returns a copy of a stack's parameters in which the relative biases of single layers are stacked into one."""
    if "relative_bias" in stack:
        return dict(stack)
    tables = [stack[f"layers_{i}"]["relative_bias"]["embedding"] for i in range(count)]
    return {**stack, "relative_bias": {"embedding": jnp.stack(tables)}}


XLA = Xla()


def call_costs(weights: Tree, backend: Backend = XLA) -> float:
    """Returns the fixed cost of a call on a CPU, in columns: the time of reading the weights."""
    held = sorted(jax.tree.leaves(weights), key=lambda x: x.nbytes)
    cached = sum(x.nbytes for x in held) < CACHE
    return backend.reading.cached if cached else getattr(backend.reading, held[-1].dtype.name)


def portable(model: Module, weights: str = "auto") -> Backend:
    """Returns the fastest backend that runs on any device; logs a line if it computes layer by layer."""
    if is_packed(model):
        return Xla(weights)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    changed = "which is modified, " if is_packed(model, changed=True) else ""
    logger.info(
        f"decoding computes {kind}, {changed}layer by layer, because the fast decoders support "
        "only unmodified T5 and UMT5"
    )
    return Backend(weights)


def choose(wanted: Backend | None, backbone: Backbone, dtype: DTypeLike, weights: str) -> Backend:
    """Returns the backend `wanted`, or the fastest backend if `wanted` is None.

    If `wanted` is an `Xla` that does not support the backbone, the result is a `Backend`.
    """
    if wanted is None:
        return fastest(backbone, dtype, weights)
    return portable(backbone.module(dtype=dtype), wanted.weights) if type(wanted) is Xla else wanted


def fastest(backbone: Backbone, dtype: DTypeLike, weights: str = "auto") -> Backend:
    """Returns the fastest backend on this machine.

    Args:
      backbone: the architecture.
      dtype: the compute dtype.
      weights: the dtype of stored weights, one of `pipejax.config.WEIGHTS`.
    """
    found = portable(backbone.module(dtype=dtype), weights)
    for place in registry.STEP_COMPUTERS.values():
        faster: Backend | None = registry.find(place)(backbone, found, dtype)
        if faster is not None:
            return faster
    return found
