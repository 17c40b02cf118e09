"""Matrix products and attention of a decoding step on an NVIDIA GPU: one Pallas kernel each, where XLA starts several.

A step takes little time, most of which is spent on starting kernels and on waiting for memory. A product is divided
into enough programs to keep the device busy, if necessary along its inner axis as well. XLA then adds the parts in the
kernel that computes the next norm. Attention to the source is divided in the same way, and attention to the cache also
writes the new keys and values. A step with a single query (sequential decoding of one example) uses XLA's kernels,
which are faster in this case. The results differ from XLA's in the last bits: sums are computed in another order, and
fewer intermediate results are rounded.

The kernels read arrays by rows, so each query is a row of their arguments. In `StepDecoder` each query is a column, so
arguments and results are transposed; between two kernels XLA removes both transpositions.

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
from pipejax.inference.step_decoder import StepDecoder
from pipejax.inference.weights import Layer, Matrix
from pipejax.kernels import child_trials, cpu_kernel
from pipejax.model.t5 import MASKED, Memory
from pipejax.system import Tree

logger = logging.getLogger(__name__)

Array = jax.Array
Ref = Any  # a reference of Pallas to an array in the device's memory
LEAST = 16  # the least number of rows, columns and inner elements of a product in a kernel
LOWEST = -1e30  # lower than every score; finite, so that differences with it are not NaN
MOST_QUERIES = 64  # the most queries of an example that the attention kernels support
BUSY = 288  # programs of a product that keep a large GPU busy; attention has longer programs, so half as many suffice


@dataclasses.dataclass(frozen=True)
class GpuDecoder(StepDecoder):
    """The step decoder with the kernels of this module, where dtype and sizes allow them.

    Outside of trials, `use()` must have returned True.
    """

    interpret: bool = False  # whether Pallas interprets the kernels, on any device

    def _times(self, matrix: Matrix, columns: Array, dtype: DTypeLike | None = None) -> Array:
        if not self._multiplies(matrix, columns):
            return super()._times(matrix, columns, dtype)
        return self._product(matrix, columns, dtype=jnp.dtype(dtype or self.dtype))[0].T

    def _add(self, matrix: Matrix, columns: Array, residual: Array) -> Array:
        if not self._multiplies(matrix, columns):
            return super()._add(matrix, columns, residual)
        # XLA adds the parts in the kernel of the norm that follows.
        parts = self._product(matrix, columns, dtype=jnp.dtype(jnp.float32), split=True)
        return (residual.astype(jnp.float32) + parts.sum(axis=0).T).astype(residual.dtype)

    def _activate(self, x: Array, layer: Layer) -> Array:
        matrix = layer.feed_inwards
        if self.config.feed_forward != "relu" or not self._multiplies(matrix, x):
            return super()._activate(x, layer)
        return self._product(matrix, self._normalize(x, layer.feed_norm), relu=True, dtype=jnp.dtype(self.dtype))[0].T

    def _product(self, matrix: Matrix, columns: Array, **options: Any) -> Array:
        return _product(matrix.rows, columns.T, interpret=self.interpret, **options)

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

    def _multiplies(self, matrix: Matrix, columns: Array) -> bool:
        """Returns whether the product kernel supports a matrix and columns.

        The matrix must have the decoder's dtype and sizes that are multiples of LEAST, and there must be at least two
        columns.
        """
        fits = matrix.rows.dtype == self.dtype and not matrix.scale.size and columns.shape[1] > 1
        return fits and not any(size % LEAST for size in matrix.rows.shape)

    def _attends(self, queries: int) -> bool:
        """Returns whether the attention kernels support this number of queries of an example, and the head width.

        A batch with a single query is not supported.
        """
        width, fits = self.config.d_kv, queries * self.memory.mask.shape[0] > 1 and queries <= MOST_QUERIES
        return fits and width >= LEAST and width & (width - 1) == 0


@functools.cache
def use() -> bool:
    """Returns whether this process has a GPU on which the kernels compile and agree with XLA.

    The result is determined once. If the kernels fail on a GPU, a warning is logged.
    """
    if os.environ.get(cpu_kernel.VARIABLE) == "off" or jax.default_backend() != "gpu":
        return False
    if why := refusal():
        logger.warning(f"decoding runs without pipejax's kernels: {why}")
    return not why


def refusal() -> str:
    """Returns the reason why the kernels are not used on this machine's GPU, or "" if a trial has passed."""
    return child_trials.refusal("kernels of a decoding step", f"{__name__}:disagreement")


def disagreement() -> str:
    """Returns the reason why the results of the kernels cannot be used, or "" if they agree with XLA's.

    The function runs in a child process; see `child_trials`.
    """
    child_trials.require_gpu()
    apart = max(float(jax.device_get(trial(queries))) for queries in (1, 20, 40))
    return "" if apart < TOLERANCE else f"on this GPU their results differ from XLA's by {apart:.2g}"


TOLERANCE = 0.05  # the largest accepted value of `trial`; the rounding to bfloat16 causes 0.01 to 0.02


def trial(queries: int, *, interpret: bool = False) -> Array:
    """Returns an f32 scalar, the largest difference between results of the kernels and results x of XLA.

    Each difference is divided by 1 + |x|.

    Args:
      queries: the number of random queries of each of two examples.
      interpret: whether Pallas interprets the kernels.
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

    def compute(decoder: StepDecoder) -> Tree:
        matrix = Matrix(rows, jnp.zeros(0))
        products = decoder._of_normed(matrix, x, norm, dtype=jnp.float32), decoder._add(matrix, x, residual)
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
    """Returns the largest power of two, up to `most`, that divides `number`."""
    return min(number & -number, most)


def _holding(number: int, most: int) -> int:
    """Returns the smallest power of two that is at least `number`, limited to the range from LEAST to `most`."""
    return min(max(1 << (number - 1).bit_length(), LEAST), most)


@functools.partial(jax.jit, static_argnames=("split", "relu", "dtype", "interpret"))
def _product(
    rows: Array, x: Array, *, split: bool = False, relu: bool = False, dtype: DTypeLike, interpret: bool
) -> Array:
    """Multiplies x [N, I] with the transposed matrix `rows` [O, I].

    Args:
      rows: [O, I].
      x: [N, I].
      split: whether the inner axis may be divided into several parts.
      relu: whether negative results are replaced by 0; not together with `split`.
      dtype: the dtype of the result.
      interpret: whether Pallas interprets the kernel.

    Returns:
      [S, N, O]; the sum of the S parts is the product.
    """
    (outputs, inputs), queries = rows.shape, x.shape[0]
    high = _holding(queries, 64)
    wide = _power(outputs, 64 if outputs >= 8192 else 32 if high > 32 else 16)
    deep = _power(inputs, 256 if wide == 16 else 128)
    blocks = (outputs // wide) * pl.cdiv(queries, high)
    parts = _parts(inputs // deep, BUSY // blocks) if split else 1
    chunks = inputs // deep // parts

    def kernel(rows_ref: Ref, x_ref: Ref, out_ref: Ref) -> None:
        o = pl.program_id(0) * wide + jnp.arange(wide)
        n = pl.program_id(1) * high + jnp.arange(high)
        part, real = pl.program_id(2), (n < queries)[:, None]

        def add(number: Array, products: Array) -> Array:
            i = (part * chunks + number) * deep + jnp.arange(deep)
            matrix = plgpu.load(rows_ref.at[o[:, None], i[None]])
            columns = plgpu.load(x_ref.at[n[:, None], i[None]], mask=real, other=0)
            return products + plgpu.dot(columns, matrix, trans_b=True)

        products = jax.lax.fori_loop(0, chunks, add, jnp.zeros((high, wide), jnp.float32))
        if relu:
            products = jnp.maximum(products, 0)
        plgpu.store(out_ref.at[part, n[:, None], o[None]], products.astype(dtype), mask=real)

    warps = min(max(high * wide // 128, 2), 4)
    grid, shape = (
        (outputs // wide, pl.cdiv(queries, high), parts),
        jax.ShapeDtypeStruct((parts, queries, outputs), dtype),
    )
    return _call(kernel, grid, shape, warps, interpret)(rows, x)


def _parts(chunks: int, most: int) -> int:
    """Returns the largest divisor of `chunks` that is at most `most`, or 1."""
    return max(n for n in range(1, max(min(chunks, most), 1) + 1) if chunks % n == 0)


@functools.partial(jax.jit, static_argnames="interpret")
def _attend_memory(query: Array, keys: Array, values: Array, mask: Array, *, interpret: bool) -> Array:
    """Computes cross-attention.

    If the source is divided among several programs, each of them returns the sums of its part (see `Sums`), and XLA
    combines them.

    Args:
      query: [B * Q, H * K].
      keys: [B, H, K, L].
      values: [B, H, L, K].
      mask: bool [B, L].
      interpret: whether Pallas interprets the kernel.

    Returns:
      [B * Q, H * K].
    """
    batch, heads, width, length = keys.shape
    queries = query.shape[0] // batch
    block = _holding(length, 64 if width <= 64 else 32)
    parts = _parts(pl.cdiv(length, block), BUSY // (2 * batch * heads))
    span = pl.cdiv(length, block) // parts
    sizes = {"heads": heads, "width": width, "queries": queries}

    def kernel(query_ref: Ref, keys_ref: Ref, values_ref: Ref, bias_ref: Ref, out_ref: Ref, *sums_refs: Ref) -> None:
        head, part = pl.program_id(0), pl.program_id(1)

        def bias(slots: Array, seen: Array) -> Array:
            return plgpu.load(bias_ref.at[head // heads, slots], mask=seen, other=0)[None]

        first, last = part * span * block, jnp.minimum((part + 1) * span * block, length)
        sums = _look(query_ref, keys_ref, values_ref, bias, first, last, span, block, **sizes)
        if parts == 1:
            _finish(sums, out_ref, **sizes)
            return
        real, row, column = _places(**sizes)
        plgpu.store(out_ref.at[part, row[:, None], column[None]], sums[2], mask=real[:, None])
        for ref, each in zip(sums_refs, sums, strict=False):
            plgpu.store(ref.at[part, row, head % heads], each, mask=real)

    one = jax.ShapeDtypeStruct(query.shape, query.dtype)
    several = tuple(
        jax.ShapeDtypeStruct((parts, *query.shape[:1], n), jnp.float32) for n in (query.shape[1], heads, heads)
    )
    call = _call(kernel, (batch * heads, parts), one if parts == 1 else several, 4, interpret)
    bias = jnp.where(mask, 0.0, MASKED)
    found = call(query, keys.reshape(-1, width, length), values.reshape(-1, length, width), bias)
    if parts == 1:
        return found
    found, highest, total = found
    kept = jnp.exp(highest - highest.max(axis=0))
    found = (found.reshape(*kept.shape, width) * kept[..., None]).sum(axis=0) / (total * kept).sum(axis=0)[..., None]
    return found.reshape(query.shape).astype(query.dtype)


@functools.partial(jax.jit, static_argnames="interpret")
def _attend_cache(
    projected: Array, keys: Array, values: Array, bias: Array, start: Array, *, interpret: bool
) -> tuple[Array, Array, Array]:
    """Computes self-attention over the cache and the queries of the step, and writes their keys and values.

    Args:
      projected: [B * Q, 3 * H * K], queries, keys and values, concatenated.
      keys: [B * H, K, C], the cache, written in place.
      values: [B * H, C, K], the cache, written in place.
      bias: f32 [B, H, Q, C].
      start: i32 [B|1], the first slot of each example to be written; slots from there on are not read.
      interpret: whether Pallas interprets the kernel.

    Returns:
      The outputs [B * Q, H * K], and the cache's keys and values.
    """
    _, heads, queries, slots = bias.shape
    width, high = keys.shape[1], _holding(queries, MOST_QUERIES)
    block = _holding(slots, 64 if width <= 64 else 32)
    sizes = {"heads": heads, "width": width, "queries": queries}

    def kernel(
        start_ref: Ref,
        projected_ref: Ref,
        keys_ref: Ref,
        values_ref: Ref,
        bias_ref: Ref,
        out_ref: Ref,
        new_keys_ref: Ref,
        new_values_ref: Ref,
    ) -> None:
        head = pl.program_id(0)
        first = start_ref[0 if len(start) == 1 else head // heads]
        places, columns = jnp.arange(high), jnp.arange(width)
        real = places < queries

        def bias(slots: Array, seen: Array) -> Array:
            at = bias_ref.at[(head * queries + places)[:, None], slots[None]]
            return plgpu.load(at, mask=real[:, None] & seen[None], other=0)

        blocks = pl.cdiv(first, block)
        sums = _look(projected_ref, keys_ref, values_ref, bias, jnp.int32(0), first, blocks, block, **sizes)
        # New keys and values are read from `projected` and not from the cache, because threads are not synchronised
        # between writing the cache and reading it.
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
        query = _query(projected_ref, **sizes)
        scores = jnp.where(real[None], plgpu.dot(query, key, trans_b=True) + bias(place, real), LOWEST)
        _finish(_more(sums, scores, value), out_ref, **sizes)

    found = jax.ShapeDtypeStruct((projected.shape[0], heads * width), projected.dtype)
    results = found, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values))
    call = _call(kernel, (keys.shape[0],), results, 4, interpret, aliases={2: 1, 3: 2})
    return call(start, projected, keys, values, bias.reshape(-1, slots))


Sums = tuple[
    Array, Array, Array
]  # a softmax over some slots: maximum score f32 [high], sum of powers f32 [high], weighted sum of values f32 [high, K]


def _places(*, heads: int, width: int, queries: int) -> tuple[Array, Array, Array]:
    """Computes the coordinates of the example and head of a program.

    Returns:
      bool [high], whether each query is real; i32 [high], the rows of the queries; i32 [K], the columns of the head.
    """
    head, places = pl.program_id(0), jnp.arange(_holding(queries, MOST_QUERIES))
    return places < queries, (head // heads) * queries + places, (head % heads) * width + jnp.arange(width)


def _query(ref: Ref, **sizes: int) -> Array:
    """Returns the queries [high, K] of a program's example and head; zeros after the Q real ones."""
    real, row, column = _places(**sizes)
    return plgpu.load(ref.at[row[:, None], column[None]], mask=real[:, None], other=0)


def _look(
    query_ref: Ref,
    keys_ref: Ref,
    values_ref: Ref,
    bias: Any,
    first: Array,
    last: Array,
    blocks: Any,
    block: int,
    **sizes: int,
) -> Sums:
    """Computes the sums over slots in blocks of `block`.

    Args:
      query_ref: [B * Q, ...], whose first columns are the queries.
      keys_ref: [B * H, K, C].
      values_ref: [B * H, C, K].
      bias: maps slots and their validity to the bias of the queries for them.
      first: the first slot.
      last: the slot after the last one.
      blocks: the number of blocks.
      block: the number of slots of a block.
      sizes: the arguments of `_places`.
    """
    head, columns = pl.program_id(0), jnp.arange(sizes["width"])
    query = _query(query_ref, **sizes)

    def add(number: Array, sums: Sums) -> Sums:
        slot = first + number * block + jnp.arange(block)
        seen = slot < last
        key = plgpu.load(keys_ref.at[head, columns[:, None], slot[None]], mask=seen[None], other=0)
        value = plgpu.load(values_ref.at[head, slot[:, None], columns[None]], mask=seen[:, None], other=0)
        return _more(sums, jnp.where(seen[None], plgpu.dot(query, key) + bias(slot, seen), LOWEST), value)

    high, width = query.shape
    zero = jnp.full(high, LOWEST), jnp.zeros(high, jnp.float32), jnp.zeros((high, width), jnp.float32)
    return jax.lax.fori_loop(0, blocks, add, zero)


def _more(sums: Sums, scores: Array, values: Array) -> Sums:
    """Adds the slots of a block to the sums (Milakov and Gimelshein 2018, arXiv 1805.02867).

    Args:
      sums: the sums over earlier slots.
      scores: f32 [high, block].
      values: [block, K].
    """
    highest, total, found = sums
    now = jnp.maximum(highest, scores.max(axis=1))
    weights, kept = jnp.exp(scores - now[:, None]), jnp.exp(highest - now)
    found = found * kept[:, None] + plgpu.dot(weights.astype(values.dtype), values)
    return now, total * kept + weights.sum(axis=1), found


def _finish(sums: Sums, out_ref: Ref, **sizes: int) -> None:
    """Divides the weighted sums of values by the sums of powers, and stores the results of the real queries."""
    real, row, column = _places(**sizes)
    found = (sums[2] / sums[1][:, None]).astype(out_ref.dtype)
    plgpu.store(out_ref.at[row[:, None], column[None]], found, mask=real[:, None])


def _call(
    kernel: Any, grid: tuple[int, ...], shape: Any, warps: int, interpret: bool, aliases: dict[int, int] | None = None
) -> Any:
    """Returns the `pallas_call` of a kernel.

    Args:
      kernel: the kernel.
      grid: the number of programs along each axis.
      shape: the shapes and dtypes of the results.
      warps: the number of warps of a program.
      interpret: whether Pallas interprets the kernel.
      aliases: argument -> result, for arrays that are written in place.
    """
    params = plgpu.CompilerParams(num_warps=warps, num_stages=3)
    return pl.pallas_call(
        kernel,
        out_shape=shape,
        grid=grid,
        compiler_params=params,
        interpret=interpret,
        input_output_aliases=aliases or {},
    )
