"""Who computes a decoder step's products, and how matrices and memories lie for it: XLA, or the kernel of our own.

A backend is chosen once, when a checkpoint is opened. Whatever is laid out for it knows how it is multiplied.

Shapes: O outputs, I inputs, N columns (queries), B batch, H heads, K head width, Q queries, L source length.
"""

import dataclasses
from typing import NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.inference import kernels
from pipejax.model.quantization import quantize
from pipejax.model.t5 import MASKED, Memory

Array = jax.Array


class Norm(NamedTuple):
    """T5's norm of columns: x / rms(x) * scale * factor."""

    scale: Array  # f32 [I]
    epsilon: float
    factor: float = 1.0


class Matrix(Protocol):
    """A weight matrix [O, I] as a decoder step multiplies columns [I, N] with it."""

    def of_normed(self, x: Array, norm: Norm, *, relu: bool = False, dtype: DTypeLike | None = None) -> Array:
        """[O, N], the matrix times the normed columns x [I, N]; with `relu` negative results become 0.

        `dtype` is the result's; None: that of x.
        """
        ...

    def added(self, columns: Array, residual: Array) -> Array:
        """[O, N], the residual [O, N] plus the matrix times the columns."""
        ...

    def rows_at(self, which: Array) -> Array:
        """[N, I], rows of the matrix itself; `which`: i32 [N]."""
        ...


class SourceMemory(Protocol):
    """Keys and values of a source in each layer, as a decoder step looks into them."""

    mask: Array  # bool [B, L]

    def attend(self, layer: int, query: Array) -> Array:
        """What the queries [B, H, K, Q] of a layer find: [B, H, K, Q]."""
        ...


class Backend(Protocol):
    """Lays out what a decoder step reads. Static under jit."""

    @property
    def weights(self) -> str:
        """What they are held in, one of `pipejax.config.WEIGHTS`."""
        ...

    def matrix(self, rows: Array, dtype: DTypeLike) -> Matrix:
        """Of a matrix [O, I], for columns of that dtype."""
        ...

    def memory(self, memory: Memory, dtype: DTypeLike) -> SourceMemory:
        """Of the model's memory, for queries of that dtype."""
        ...


@flax.struct.dataclass
class XlaMatrix:
    """A matrix for XLA's product."""

    rows: Array  # [O, I]
    scale: Array | None  # f32 [O] of int8
    dtype: DTypeLike = flax.struct.field(pytree_node=False)  # of the columns

    def of_normed(self, x: Array, norm: Norm, *, relu: bool = False, dtype: DTypeLike | None = None) -> Array:
        """See `Matrix`."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=0) + norm.epsilon)
        hidden = (wide * inverse * norm.scale[:, None]).astype(self.dtype)
        if norm.factor != 1.0:
            hidden = hidden * jnp.asarray(norm.factor, hidden.dtype)
        found = self._times(hidden, dtype)
        return jax.nn.relu(found) if relu else found

    def added(self, columns: Array, residual: Array) -> Array:
        """See `Matrix`."""
        return residual + self._times(columns, None)

    def rows_at(self, which: Array) -> Array:
        """See `Matrix`."""
        found = self.rows[which].astype(self.dtype)
        return found if self.scale is None else found * self.scale[which][:, None].astype(self.dtype)

    def _times(self, columns: Array, dtype: DTypeLike | None) -> Array:
        found = jnp.matmul(self.rows.astype(self.dtype), columns, preferred_element_type=dtype)
        return found if self.scale is None else found * self.scale[:, None].astype(found.dtype)


@flax.struct.dataclass
class KernelMatrix:
    """A matrix for our own kernel and float32 columns."""

    panels: Array  # [O / 16, I / depth, 16, depth], see `kernels.panels`
    scale: Array  # f32 [O] of int8, else [0]
    kernel: kernels.Kernel = flax.struct.field(pytree_node=False)

    def of_normed(self, x: Array, norm: Norm, *, relu: bool = False, dtype: DTypeLike | None = None) -> Array:
        """See `Matrix`; always float32."""
        factors = norm.scale * norm.factor
        return self.kernel.normed(self.panels, self.scale, x, factors, epsilon=norm.epsilon, relu=relu)

    def added(self, columns: Array, residual: Array) -> Array:
        """See `Matrix`."""
        return self.kernel.added(self.panels, self.scale, columns, residual)

    def rows_at(self, which: Array) -> Array:
        """See `Matrix`."""
        found = kernels.rows(self.panels, which).astype(jnp.float32)
        return found * self.scale[which][:, None] if self.scale.size else found


@flax.struct.dataclass
class XlaMemory:
    """A memory for XLA's products."""

    keys: tuple[Array, ...]  # a layer each [B, H, K, L]
    values: tuple[Array, ...]  # [B, H, L, K]
    mask: Array  # bool [B, L]

    def attend(self, layer: int, query: Array) -> Array:
        """See `SourceMemory`."""
        bias = jnp.where(self.mask, 0.0, MASKED)
        return attend(query, self.keys[layer], self.values[layer], bias[:, None, None])


@flax.struct.dataclass
class KernelMemory:
    """A memory for our own kernel."""

    keys: tuple[Array, ...]  # a layer each [B, H, L, K] in panels, float32 or bfloat16
    values: tuple[Array, ...]  # [B, H, K, L]
    mask: Array  # bool [B, L]
    kernel: kernels.Kernel = flax.struct.field(pytree_node=False)

    def attend(self, layer: int, query: Array) -> Array:
        """See `SourceMemory`."""
        bias = jnp.where(self.mask, 0.0, MASKED)
        return self.kernel.attend(query, self.keys[layer], self.values[layer], bias)


@dataclasses.dataclass(frozen=True)
class Xla:
    """XLA's own products, on any device and in any dtype."""

    weights: str = "auto"

    def matrix(self, rows: Array, dtype: DTypeLike) -> Matrix:
        """See `Backend`."""
        return XlaMatrix(*_narrowed(rows, dtype, self.weights), dtype)

    def memory(self, memory: Memory, dtype: DTypeLike) -> SourceMemory:
        """See `Backend`."""
        return XlaMemory(memory.keys, memory.values, memory.mask)


@dataclasses.dataclass(frozen=True)
class OwnKernel:
    """The kernel for CPUs, wherever dtype and sizes allow it."""

    kernel: kernels.Kernel
    weights: str = "auto"

    def matrix(self, rows: Array, dtype: DTypeLike) -> Matrix:
        """See `Backend`."""
        narrow, scale = _narrowed(rows, dtype, self.weights)
        if dtype != jnp.float32 or not kernels.fits(narrow):
            return XlaMatrix(narrow, scale, dtype)
        return KernelMatrix(kernels.panels(narrow), jnp.zeros(0) if scale is None else scale, self.kernel)

    def memory(self, memory: Memory, dtype: DTypeLike) -> SourceMemory:
        """See `Backend`."""
        length, width = memory.values[0].shape[2:]
        if length % kernels.LANES or width % kernels.LANES or dtype != jnp.float32:
            return XLA.memory(memory, dtype)
        narrow = self.weights in ("bfloat16", "int8")

        def laid(x: Array) -> Array:
            return kernels.panels(x.astype(jnp.bfloat16 if narrow else dtype).swapaxes(2, 3))

        return KernelMemory(tuple(map(laid, memory.keys)), tuple(map(laid, memory.values)), memory.mask, self.kernel)


XLA = Xla()


def fastest(weights: str = "auto") -> Backend:
    """Our own kernel if this machine can have it, XLA otherwise; `weights`: one of `pipejax.config.WEIGHTS`."""
    kernel = kernels.use()
    return OwnKernel(kernel, weights) if kernel else Xla(weights)


def _narrowed(rows: Array, dtype: DTypeLike, weights: str) -> tuple[Array, Array | None]:
    """A matrix [O, I] as it is held, and the scale f32 [O] of int8."""
    if weights == "int8":
        return quantize(rows, axis=1)
    return rows.astype(jnp.bfloat16 if weights == "bfloat16" else dtype), None


def attend(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """What queries [B, H, K, Q] find in keys [.., K, C] and values [.., C, K] under bias [B, .., C]."""
    batch, heads, width, queries = query.shape
    rows = query.swapaxes(2, 3).reshape(batch * heads, queries, width)
    keys, values = keys.reshape(-1, *keys.shape[-2:]), values.reshape(-1, *values.shape[-2:])
    scores = jnp.einsum("nqk,nkc->nqc", rows, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores.reshape(batch, heads, queries, -1) + bias, axis=3).astype(query.dtype)
    found = jnp.einsum("nqc,nck->nqk", weights.reshape(batch * heads, queries, -1), values)
    return found.reshape(batch, heads, queries, width).swapaxes(2, 3)
