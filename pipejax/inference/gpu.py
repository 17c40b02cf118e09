"""A decoding step's products and attention on an NVIDIA GPU: one kernel each, in Pallas, where XLA starts several.

A step is short, and starting its kernels takes longer than their work. So the norm, the activation and the residual
are part of the product beside them, and an attention is one kernel, which writes the cache too. Nothing here is exact
to the last bit of what XLA computes: sums run in another order, and less is rounded on the way.

Arrays lie a query a row, since a kernel reads rows: what comes and goes as columns is transposed, and between two
kernels XLA drops both transpositions.

Shapes: O outputs, I inputs, N queries of a step, B batch, Q queries of an example, H heads, K head width, C slots of a
cache, L source length.
"""

import dataclasses
import functools
import logging
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.typing import DTypeLike

from pipejax.config import T5Config
from pipejax.inference import kernels
from pipejax.inference.step_decoder import StepDecoder
from pipejax.inference.weights import Layer, Matrix
from pipejax.model.t5 import MASKED, Memory

logger = logging.getLogger(__name__)

Array = jax.Array
LEAST = 16  # rows, columns and depth of a product in a kernel
LOWEST = -1e30  # below every score; finite, so that nothing becomes NaN
MOST_QUERIES = 64  # of an example, that one kernel attends for


@dataclasses.dataclass(frozen=True)
class GpuDecoder(StepDecoder):
    """The step decoder with the kernels below wherever dtype and sizes allow it; only after `use` said they work."""

    interpret: bool = False  # runs them as ordinary computations, on any device

    def _of_normed(
        self, matrix: Matrix, x: Array, scale: Array, factor: float = 1.0, dtype: DTypeLike | None = None
    ) -> Array:
        if not self._multiplies(matrix):
            return super()._of_normed(matrix, x, scale, factor, dtype)
        return self._normed(matrix, x, scale, factor=factor, dtype=jnp.dtype(dtype or x.dtype))

    def _normed(self, matrix: Matrix, x: Array, scale: Array, **options: Any) -> Array:
        epsilon = self.config.layer_norm_epsilon
        return _product(matrix.rows, x.T, scale, epsilon=epsilon, interpret=self.interpret, **options).T

    def _added(self, matrix: Matrix, columns: Array, residual: Array) -> Array:
        if not self._multiplies(matrix):
            return super()._added(matrix, columns, residual)
        return _product(matrix.rows, columns.T, residual.T, dtype=residual.dtype, interpret=self.interpret).T

    def _activated(self, x: Array, layer: Layer) -> Array:
        if self.config.feed_forward != "relu" or not self._multiplies(layer.feed_inwards):
            return super()._activated(x, layer)
        return self._normed(layer.feed_inwards, x, layer.feed_norm, relu=True, dtype=x.dtype)

    def _attend_cache(
        self, projected: Array, keys: Array, values: Array, bias: Array, start: Array
    ) -> tuple[Array, Array, Array]:
        if not self._attends(bias.shape[2]):
            return super()._attend_cache(projected, keys, values, bias, start)
        found, keys, values = _attend_cache(projected.T, keys, values, bias, start, interpret=self.interpret)
        return found.T, keys, values

    def _attend_memory(self, number: int, query: Array) -> Array:
        if not self._attends(query.shape[1] // self.memory.mask.shape[0]):
            return super()._attend_memory(number, query)
        keys, values = self.memory.keys[number], self.memory.values[number]
        return _attend_memory(query.T, keys, values, self.memory.mask, interpret=self.interpret).T

    def _multiplies(self, matrix: Matrix) -> bool:
        fits = matrix.rows.dtype == self.dtype and not matrix.scale.size
        return fits and not any(size % LEAST for size in matrix.rows.shape)

    def _attends(self, queries: int) -> bool:
        width = self.config.d_kv
        return queries <= MOST_QUERIES and width >= LEAST and width & (width - 1) == 0


@functools.cache
def use() -> bool:
    """Whether this process decodes on a GPU where the kernels compile and find what XLA finds. Asked once."""
    if os.environ.get(kernels.VARIABLE) == "off" or jax.default_backend() != "gpu":
        return False
    try:
        apart = max(float(jax.device_get(trial(queries))) for queries in (1, 20, 40))
    # The compiler's errors are of many kinds, and none of them may keep anyone from decoding.
    except Exception as error:
        logger.warning(f"decoding goes without its own kernels: {str(error).partition(chr(10))[0][:200]}")
        return False
    if not apart < TOLERANCE:
        logger.warning(f"decoding goes without its own kernels: on this GPU their results are wrong by {apart:.2g}")
        return False
    return True


TOLERANCE = 0.05  # of `trial`; what both round to bfloat16 is apart by 0.01 to 0.02


def trial(queries: int, *, interpret: bool = False) -> Array:
    """How far the kernels are from what XLA finds for random numbers, relative to 1 + |x|, at the most: f32 scalar.

    `queries` is Q of each of two examples; `interpret` as in `GpuDecoder`.
    """
    batch, heads, width, slots, inputs = 2, 2, 64, 192, 256
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return jnp.asarray(scale * rng.standard_normal(shape), jnp.bfloat16)

    x, residual = normal(inputs, batch * queries), normal(3 * heads * width, batch * queries)
    rows, projected = normal(3 * heads * width, inputs, scale=inputs**-0.5), normal(*residual.shape, scale=0.5)
    norm = jnp.asarray(rng.uniform(0.5, 2.0, inputs), jnp.float32)
    keys, values = normal(batch * heads, width, slots, scale=0.3), normal(batch * heads, slots, width)
    bias = jnp.asarray(np.where(rng.random((batch, heads, queries, slots)) < 0.7, 0.0, MASKED), jnp.float32)
    first = jnp.asarray([97, 61])
    place = jnp.arange(slots) - first[:, None, None, None]
    bias = jnp.where(place == 0, 0.0, jnp.where(place < queries, bias, MASKED))  # every query sees something
    of_source = keys.reshape(batch, heads, width, slots), values.reshape(batch, heads, slots, width)
    memory = Memory(of_source[:1], of_source[1:], bias[:, 0, 0] == 0)
    config = T5Config(16, inputs, width, inputs, heads, 1, 1)

    def compute(decoder: Any) -> Any:
        matrix = Matrix(rows, jnp.zeros(0))
        products = decoder._of_normed(matrix, x, norm, dtype=jnp.float32), decoder._added(matrix, x, residual)
        looked_up = decoder._attend_memory(0, projected[: heads * width])
        return products, looked_up, decoder._attend_cache(projected, keys, values, bias, first)

    none: Any = None
    dtype = jnp.dtype(jnp.bfloat16)
    ours = jax.jit(lambda: compute(GpuDecoder(config, none, memory, dtype, interpret)))()
    others = jax.jit(lambda: compute(StepDecoder(config, none, memory, dtype)))()

    def apart(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return (jnp.abs(a - b) / (1 + jnp.abs(b))).max()

    return jnp.stack(jax.tree.leaves(jax.tree.map(apart, ours, others))).max()


def _power(number: int, most: int) -> int:
    """The largest power of two, up to `most`, that divides it."""
    return min(number & -number, most)


def _holding(number: int, most: int) -> int:
    """The least power of two, from LEAST to `most`, that holds it."""
    return min(max(1 << (number - 1).bit_length(), LEAST), most)


@functools.partial(jax.jit, static_argnames=("epsilon", "factor", "relu", "dtype", "interpret"))
def _product(
    rows: Array,
    x: Array,
    more: Array,
    *,
    epsilon: float | None = None,
    factor: float = 1.0,
    relu: bool = False,
    dtype: Any,
    interpret: bool,
) -> Array:
    """[N, O]: x times the matrix's rows, x normed first or a residual added.

    Args:
      rows: [O, I].
      x: [N, I].
      more: the norm's scale f32 [I], or the residual [N, O].
      epsilon: the norm's; None: it is a residual.
      factor: the norm's.
      relu: negative results become 0.
      dtype: the result's.
      interpret: as in `GpuDecoder`.
    """
    (outputs, inputs), queries = rows.shape, x.shape[0]
    high = _holding(queries, 64)
    wide = _power(outputs, 64 if outputs >= 8192 else 32 if high > 32 else 16)
    deep = _power(inputs, 256 if wide == 16 else 128)
    grid = outputs // wide, pl.cdiv(queries, high)

    def kernel(rows_ref: Any, x_ref: Any, more_ref: Any, out_ref: Any) -> None:
        o = pl.program_id(0) * wide + jnp.arange(wide)
        n = pl.program_id(1) * high + jnp.arange(high)
        real = (n < queries)[:, None]

        def add(number: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            products, squares = sums
            i = number * deep + jnp.arange(deep)
            matrix = plgpu.load(rows_ref.at[o[:, None], i[None]])
            part = plgpu.load(x_ref.at[n[:, None], i[None]], mask=real, other=0)
            if epsilon is not None:  # what a column is divided by, its sum can be divided by as well
                wide_part = part.astype(jnp.float32)
                squares += (wide_part * wide_part).sum(axis=1)
                part = (wide_part * plgpu.load(more_ref.at[i])[None]).astype(part.dtype)
            return products + plgpu.dot(part, matrix, trans_b=True), squares

        zero = jnp.zeros((high, wide), jnp.float32), jnp.zeros(high, jnp.float32)
        products, squares = jax.lax.fori_loop(0, inputs // deep, add, zero)
        if epsilon is None:
            products += plgpu.load(more_ref.at[n[:, None], o[None]], mask=real, other=0).astype(jnp.float32)
        else:
            products *= (jax.lax.rsqrt(squares / inputs + epsilon) * factor)[:, None]
        if relu:
            products = jnp.maximum(products, 0)
        plgpu.store(out_ref.at[n[:, None], o[None]], products.astype(dtype), mask=real)

    warps = min(max(high * wide // 128, 2), 4)
    return _call(kernel, grid, jax.ShapeDtypeStruct((queries, outputs), dtype), warps, interpret)(rows, x, more)


@functools.partial(jax.jit, static_argnames="interpret")
def _attend_memory(query: Array, keys: Array, values: Array, mask: Array, *, interpret: bool) -> Array:
    """[B Q, H K]: what queries [B Q, H K] find in keys [B, H, K, L] and values [B, H, L, K] under mask [B, L]."""
    batch, heads, width, length = keys.shape
    queries = query.shape[0] // batch
    look = functools.partial(_look, heads=heads, width=width, queries=queries, slots=length)

    def kernel(query_ref: Any, keys_ref: Any, values_ref: Any, bias_ref: Any, out_ref: Any) -> None:
        head = pl.program_id(0)

        def bias(slots: Array, seen: Array) -> Array:
            return plgpu.load(bias_ref.at[head // heads, slots], mask=seen, other=0)[None]

        sums = look(query_ref, keys_ref, values_ref, bias, jnp.int32(length))
        _finish(sums, out_ref, heads=heads, width=width, queries=queries)

    bias = jnp.where(mask, 0.0, MASKED)
    call = _call(kernel, (batch * heads,), jax.ShapeDtypeStruct(query.shape, query.dtype), 4, interpret)
    return call(query, keys.reshape(-1, width, length), values.reshape(-1, length, width), bias)


@functools.partial(jax.jit, static_argnames="interpret")
def _attend_cache(
    projected: Array, keys: Array, values: Array, bias: Array, start: Array, *, interpret: bool
) -> tuple[Array, Array, Array]:
    """What queries find in a cache and among themselves, [B Q, H K], and the cache with their keys and values.

    Args:
      projected: [B Q, 3 H K], query, key, value.
      keys: [B H, K, C].
      values: [B H, C, K].
      bias: f32 [B, H, Q, C].
      start: i32 [B|1], each example's first new slot; nothing is read from there on.
      interpret: as in `GpuDecoder`.
    """
    _, heads, queries, slots = bias.shape
    width, high = keys.shape[1], _holding(queries, MOST_QUERIES)
    look = functools.partial(_look, heads=heads, width=width, queries=queries, slots=slots)

    def kernel(
        start_ref: Any,
        projected_ref: Any,
        keys_ref: Any,
        values_ref: Any,
        bias_ref: Any,
        out_ref: Any,
        new_keys_ref: Any,
        new_values_ref: Any,
    ) -> None:
        head = pl.program_id(0)
        first = start_ref[0 if len(start) == 1 else head // heads]
        places, columns = jnp.arange(high), jnp.arange(width)
        real = places < queries

        def bias(slots: Array, seen: Array) -> Array:
            at = bias_ref.at[(head * queries + places)[:, None], slots[None]]
            return plgpu.load(at, mask=real[:, None] & seen[None], other=0)

        sums = look(projected_ref, keys_ref, values_ref, bias, first)
        # The cache is written and not read again: threads do not wait for each other in between.
        row, place = (head // heads) * queries + places, first + places
        column = (head % heads) * width + columns
        key, value = (
            plgpu.load(
                projected_ref.at[row[:, None], (part * heads * width + column)[None]], mask=real[:, None], other=0
            )
            for part in (1, 2)
        )
        plgpu.store(new_keys_ref.at[head, columns[None], place[:, None]], key, mask=real[:, None])
        plgpu.store(new_values_ref.at[head, place[:, None], columns[None]], value, mask=real[:, None])
        query = _query(projected_ref, heads=heads, width=width, queries=queries)
        scores = jnp.where(real[None], plgpu.dot(query, key, trans_b=True) + bias(place, real), LOWEST)
        _finish(_more(sums, scores, value), out_ref, heads=heads, width=width, queries=queries)

    found = jax.ShapeDtypeStruct((projected.shape[0], heads * width), projected.dtype)
    results = found, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values))
    call = _call(kernel, (keys.shape[0],), results, 4, interpret, aliases={2: 1, 3: 2})
    return call(start, projected, keys, values, bias.reshape(-1, slots))


Sums = tuple[
    Array, Array, Array
]  # of a softmax so far: its highest score f32 [high], its sum f32 [high], f32 [high, K]


def _query(ref: Any, *, heads: int, width: int, queries: int) -> Array:
    """The queries of a program's example and head, [high, K]; zeros beyond the Q-th."""
    head, places = pl.program_id(0), jnp.arange(_holding(queries, MOST_QUERIES))
    at = (head // heads) * queries + places, (head % heads) * width + jnp.arange(width)
    return plgpu.load(ref.at[at[0][:, None], at[1][None]], mask=(places < queries)[:, None], other=0)


def _look(
    query_ref: Any,
    keys_ref: Any,
    values_ref: Any,
    bias: Any,
    used: Array,
    *,
    heads: int,
    width: int,
    queries: int,
    slots: int,
) -> Sums:
    """The sums over the first `used` slots of keys [.., K, C] and values [.., C, K], a block after the other."""
    head, columns = pl.program_id(0), jnp.arange(width)
    query = _query(query_ref, heads=heads, width=width, queries=queries)
    block = _holding(slots, 64 if width <= 64 else 32)

    def add(number: Array, sums: Sums) -> Sums:
        slot = number * block + jnp.arange(block)
        seen = slot < used
        key = plgpu.load(keys_ref.at[head, columns[:, None], slot[None]], mask=seen[None], other=0)
        value = plgpu.load(values_ref.at[head, slot[:, None], columns[None]], mask=seen[:, None], other=0)
        return _more(sums, jnp.where(seen[None], plgpu.dot(query, key) + bias(slot, seen), LOWEST), value)

    high = query.shape[0]
    zero = jnp.full(high, LOWEST), jnp.zeros(high, jnp.float32), jnp.zeros((high, width), jnp.float32)
    return jax.lax.fori_loop(0, pl.cdiv(used, block), add, zero)


def _more(sums: Sums, scores: Array, values: Array) -> Sums:
    """The sums with more scores f32 [high, block] and their values [block, K] (Milakov and Gimelshein 2018)."""
    highest, total, found = sums
    now = jnp.maximum(highest, scores.max(axis=1))
    weights, kept = jnp.exp(scores - now[:, None]), jnp.exp(highest - now)
    found = found * kept[:, None] + plgpu.dot(weights.astype(values.dtype), values)
    return now, total * kept + weights.sum(axis=1), found


def _finish(sums: Sums, out_ref: Any, *, heads: int, width: int, queries: int) -> None:
    head, places = pl.program_id(0), jnp.arange(sums[2].shape[0])
    at = (head // heads) * queries + places, (head % heads) * width + jnp.arange(width)
    found = (sums[2] / sums[1][:, None]).astype(out_ref.dtype)
    plgpu.store(out_ref.at[at[0][:, None], at[1][None]], found, mask=(places < queries)[:, None])


def _call(
    kernel: Any, grid: tuple[int, ...], shape: Any, warps: int, interpret: bool, aliases: dict[int, int] | None = None
) -> Any:
    params = plgpu.CompilerParams(num_warps=warps, num_stages=3)
    return pl.pallas_call(
        kernel,
        out_shape=shape,
        grid=grid,
        compiler_params=params,
        interpret=interpret,
        input_output_aliases=aliases or {},
    )
