"""Who computes a decoder step's products, and how matrices and memories lie for it: XLA, or the kernel of our own.

A backend is chosen once, when a checkpoint is opened. Whatever is laid out for it knows how it is multiplied.

Shapes: O outputs, I inputs, N columns (queries), B batch, H heads, K head width, Q queries, L source length.
"""

from typing import NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.inference import kernels
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


class SourceMemory(Protocol):
    """Keys and values of a source in each layer, as a decoder step looks into them."""

    mask: Array  # bool [B, L]

    def attend(self, layer: int, query: Array) -> Array:
        """What the queries [H K, B Q] of a layer find: [H K, B Q]."""
        ...


class Backend(Protocol):
    """Lays out what a decoder step reads. Static under jit."""

    def matrix(self, rows: Array) -> Matrix:
        """Of a matrix [O, I]."""
        ...

    def memory(self, memory: Memory) -> SourceMemory:
        """Of the model's memory."""
        ...

    def attend(
        self, projected: Array, keys: Array, values: Array, bias: Array, start: Array
    ) -> tuple[Array, Array, Array]:
        """Self-attention: what the queries find, [H K, B Q], and the cache with their own keys and values.

        Args:
          projected: query, key and value, [3 H K, B Q].
          keys: of a layer's cache, [B H, K, C].
          values: likewise, [B H, C, K].
          bias: f32 [B, H, Q, C].
          start: i32 scalar, the slot of each example's first query. What lies behind it must be masked by the bias, but
            for the queries' own.
        """
        ...


@flax.struct.dataclass
class XlaMatrix:
    """A matrix for XLA's product."""

    rows: Array  # [O, I]

    def of_normed(self, x: Array, norm: Norm, *, relu: bool = False, dtype: DTypeLike | None = None) -> Array:
        """See `Matrix`."""
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=0) + norm.epsilon)
        hidden = (wide * inverse * norm.scale[:, None]).astype(self.rows.dtype)
        if norm.factor != 1.0:
            hidden = hidden * jnp.asarray(norm.factor, hidden.dtype)
        found = jnp.matmul(self.rows, hidden, preferred_element_type=dtype)
        return jax.nn.relu(found) if relu else found

    def added(self, columns: Array, residual: Array) -> Array:
        """See `Matrix`."""
        return residual + jnp.matmul(self.rows, columns)


@flax.struct.dataclass
class KernelMatrix:
    """A float32 matrix for our own kernel."""

    panels: Array  # f32 [O / 16, I, 16]

    def of_normed(self, x: Array, norm: Norm, *, relu: bool = False, dtype: DTypeLike | None = None) -> Array:
        """See `Matrix`; always float32."""
        return kernels.normed(self.panels, x, norm.scale * norm.factor, epsilon=norm.epsilon, relu=relu)

    def added(self, columns: Array, residual: Array) -> Array:
        """See `Matrix`."""
        return kernels.added(self.panels, columns, residual)


@flax.struct.dataclass
class XlaMemory:
    """A memory for XLA's products."""

    keys: tuple[Array, ...]  # a layer each [B, H, K, L]
    values: tuple[Array, ...]  # [B, H, L, K]
    mask: Array  # bool [B, L]

    def attend(self, layer: int, query: Array) -> Array:
        """See `SourceMemory`."""
        bias, keys = jnp.where(self.mask, 0.0, MASKED), self.keys[layer]
        found = attend(by_head(query, *keys.shape[:3:2]), keys, self.values[layer], bias[:, None, None])
        return by_query(found)


@flax.struct.dataclass
class KernelMemory:
    """A float32 memory for our own kernel."""

    keys: tuple[Array, ...]  # f32, a layer each [B, H, L / 16, K, 16]
    values: tuple[Array, ...]  # f32 [B, H, K / 16, L, 16]
    mask: Array  # bool [B, L]

    def attend(self, layer: int, query: Array) -> Array:
        """See `SourceMemory`."""
        bias, keys = jnp.where(self.mask, 0.0, MASKED), self.keys[layer]
        return by_query(kernels.attend(by_head(query, keys.shape[0], keys.shape[3]), keys, self.values[layer], bias))


class Xla:
    """XLA's own products, on any device and in any dtype."""

    def matrix(self, rows: Array) -> Matrix:
        """See `Backend`."""
        return XlaMatrix(rows)

    def memory(self, memory: Memory) -> SourceMemory:
        """See `Backend`."""
        return XlaMemory(memory.keys, memory.values, memory.mask)

    def attend(
        self, projected: Array, keys: Array, values: Array, bias: Array, start: Array
    ) -> tuple[Array, Array, Array]:
        """See `Backend`."""
        query, key, value = jnp.split(by_head(projected, bias.shape[0], keys.shape[1]), 3, axis=1)
        key, value = key.reshape(-1, *key.shape[2:]), value.reshape(-1, *value.shape[2:])
        keys = jax.lax.dynamic_update_slice_in_dim(keys, key, start, axis=2)
        values = jax.lax.dynamic_update_slice_in_dim(values, value.swapaxes(1, 2), start, axis=1)
        return by_query(attend(query, keys, values, bias)), keys, values


class OwnKernel(Xla):
    """The kernel for CPUs, wherever dtype and sizes allow it; only after `kernels.use` said that it is there."""

    def matrix(self, rows: Array) -> Matrix:
        """See `Backend`."""
        fits = rows.dtype == jnp.float32 and rows.shape[0] % kernels.LANES == 0
        return KernelMatrix(kernels.panels(rows)) if fits else XlaMatrix(rows)

    def memory(self, memory: Memory) -> SourceMemory:
        """See `Backend`."""
        length, width = memory.values[0].shape[2:]
        if length % kernels.LANES or width % kernels.LANES or memory.values[0].dtype != jnp.float32:
            return XLA.memory(memory)
        keys = tuple(kernels.panels(x.swapaxes(2, 3)) for x in memory.keys)
        values = tuple(kernels.panels(x.swapaxes(2, 3)) for x in memory.values)
        return KernelMemory(keys, values, memory.mask)


XLA, OWN_KERNEL = Xla(), OwnKernel()


def by_head(columns: Array, batch: int, width: int) -> Array:
    """[M H K, B Q] -> [B, M H, K, Q]."""
    return columns.reshape(-1, width, batch, columns.shape[1] // batch).transpose(2, 0, 1, 3)


def by_query(found: Array) -> Array:
    """[B, H, K, Q] -> [H K, B Q]."""
    return found.transpose(1, 2, 0, 3).reshape(-1, found.shape[0] * found.shape[3])


def attend(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """What queries [B, H, K, Q] find in keys [.., K, C] and values [.., C, K] under bias [B, .., C]."""
    batch, heads, width, queries = query.shape
    rows = query.swapaxes(2, 3).reshape(batch * heads, queries, width)
    keys, values = keys.reshape(-1, *keys.shape[-2:]), values.reshape(-1, *values.shape[-2:])
    scores = jnp.einsum("nqk,nkc->nqc", rows, keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores.reshape(batch, heads, queries, -1) + bias, axis=3).astype(query.dtype)
    found = jnp.einsum("nqc,nck->nqk", weights.reshape(batch * heads, queries, -1), values)
    return found.reshape(batch, heads, queries, width).swapaxes(2, 3)
