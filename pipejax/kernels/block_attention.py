"""Attention on an NVIDIA GPU, forward and backward, that never stores an array of queries by keys.

Blocks of queries are combined with blocks of keys, as in FlashAttention (Dao et al. 2022, arXiv 2205.14135; Dao 2023,
arXiv 2307.08691). The kernels compute three things for each block from vectors: the bias is looked up by the difference
of two positions; the mask follows from the coordinates of queries and keys (paper section 3.2, eq. 4); and the bits of
dropout are the hash of `pipejax.model.dropout`. So memory grows linearly with the length. Blocks in which no query sees
a key are skipped.

The forward kernel (`_attend`) keeps a running maximum and a running sum of each query's softmax, and stores the
logarithm of the final sum (`sums`). With it three backward kernels compute the weights of a block again:
`_backward_queries` for the gradient of the queries, `_backward_keys` for the gradients of keys and values, and
`_backward_buckets` for the gradient of the bias. Distances of W or more have one bucket on each side. Their gradients
are summed by `_backward_queries`, so `_backward_buckets` needs only blocks that contain shorter distances.

`pipejax.model.attention.attend` is the reference: it computes the same sums in another order, with the same bits of
dropout. For a query that sees no key, whose result is not used, the kernels return zeros, and `attend` an average.

Shapes: B batch, H heads, Q queries, C keys, K head width, T buckets, W the distance from which on all distances share a
bucket.
"""

import dataclasses
import functools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pipejax.model import dropout
from pipejax.model.attention import attend
from pipejax.model.dropout import Lines
from pipejax.model.slots import Blocks, Distances, Seen, Slots

Array = jax.Array
Ref = Any  # a reference of Pallas to an array in the device's memory
LOWEST = -1e30  # lower than every score; finite, so that differences with it are not NaN
TOLERANCE = 0.05  # the largest accepted value of `difference`; the rounding of bfloat16 causes about 0.01
BLOCK = 64  # queries or keys of a block; the tensor cores of a Hopper GPU need at least this number
GROUP = 8  # buckets whose sums fit into the registers of a program
NOWHERE = 2**30  # greater than every group, row and time


class TileSizes(NamedTuple):
    """The static sizes and options of a call."""

    batch: int  # B
    heads: int  # H
    queries: int  # Q
    keys: int  # C
    width: int  # K
    own: int  # size of the block of queries (or of keys) that belongs to a program
    other: int  # size of the blocks of keys (or of queries) over which the program loops
    rate: float  # the rate of dropout; 0: no dropout
    interpret: bool  # whether Pallas interprets the kernels, on any device

    @classmethod
    def of(cls, queries: Array, keys: Array, lines: Lines | None, rate: float, interpret: bool) -> "TileSizes":
        """The sizes for queries [B, H, Q, K] and keys [B, H, C, K]."""
        other = BLOCK if queries.shape[3] <= 64 else BLOCK // 2
        batch, heads, count, width = queries.shape
        return cls(batch, heads, count, keys.shape[2], width, BLOCK, other, rate if lines else 0.0, interpret)


def misfit(width: int, *, trains: bool) -> str:
    """The reason why the kernels do not support a head width, or "" if they do.

    Args:
      width: K.
      trains: whether gradients are needed.
    """
    if not 16 <= width <= 128 or width & (width - 1):
        return f"heads of {width} are no power of two from 16 to 128"
    return (
        trial(width, trains) if jax.default_backend() == "gpu" else ""
    )  # without a GPU nothing can be tried, as when a program is compiled for another machine


@functools.cache
def trial(width: int, trains: bool) -> str:
    """The reason why this process cannot use the kernels on its GPU, or "" if their results agree with `attend`."""
    try:
        apart = float(difference(width, trains=trains))
    # The compiler raises errors of many types; with any of them, training continues without the kernels.
    except Exception as error:
        return str(error).partition("\n")[0][:200]
    return "" if apart < TOLERANCE else f"on this GPU the kernels' results are wrong by {apart:.2g}"


def difference(width: int, *, trains: bool = True, interpret: bool = False) -> Array:
    """The largest difference between results of the kernels and of `attend`, on random data; an f32 scalar.

    The difference of each array is divided by the largest magnitude in it.

    Args:
      width: K.
      trains: whether gradients are compared, too. Compiling them takes most of the time.
      interpret: whether Pallas interprets the kernels.
    """
    batch, heads, length = 2, 2, 200
    rng = np.random.default_rng(0)
    given = [
        jnp.asarray(width**-0.25 * rng.standard_normal((batch, heads, length, width)), jnp.bfloat16) for _ in "qkv"
    ]
    table = jnp.asarray(rng.standard_normal((32, heads)), jnp.float32)
    bucket = jnp.asarray(np.minimum(np.abs(np.arange(-128, 129)) // 8, 15) + 16 * (np.arange(-128, 129) < 0))
    group = jnp.asarray(np.where(np.arange(length) < np.array([[170], [90]]), 0, -1))
    row, time = jnp.arange(length) // 40, jnp.arange(length) % 40
    slots = Slots(group, *(jnp.broadcast_to(x, group.shape) for x in (row, time, row + time)))
    seed, rate = jnp.asarray([1, 2], jnp.uint32), 0.1
    seen = jax.vmap(_seen)(slots, slots)
    real = (group >= 0)[:, None, :, None]

    def ours(queries: Array, keys: Array, values: Array, table: Array) -> Array:
        there = Seen(slots, slots, Distances(table, bucket), Blocks(interpret=interpret))
        return attend_in_blocks(queries, keys, values, there, seed, rate).astype(jnp.float32)

    def others(queries: Array, keys: Array, values: Array, table: Array) -> Array:
        apart = jnp.clip(slots.position[:, :, None] - slots.position[:, None] + 128, 0, 256)
        bias = jnp.where(seen[:, None], jnp.moveaxis(table[bucket[apart]], -1, 1), -1e9)
        return jnp.where(real, attend(queries, keys, values, bias, seed, rate).astype(jnp.float32), 0.0)

    def computed(function: Any) -> Any:
        if not trains:
            return function(*given, table)
        found, back = jax.vjp(function, *given, table)
        return found, back(jnp.where(real, jnp.sin(jnp.arange(found.size)).reshape(found.shape), 0.0))

    def apart(a: Array, b: Array) -> Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.abs(a - b).max() / jnp.abs(b).max()

    pairs = jax.tree.map(apart, *(jax.jit(partial(computed, each))() for each in (ours, others)))
    return jnp.stack(jax.tree.leaves(pairs)).max()


def attend_in_blocks(
    queries: Array,
    keys: Array,
    values: Array,
    seen: Seen,
    seed: Array | None,
    rate: float,
    *,
    over_sources: bool = False,
) -> Array:
    """Computes softmax(queries keys^T + bias) values, [B, H, Q, K]. Sums are float32.

    If `seen.blocks.split` is a sharding, each device computes the attention of its own examples.

    Args:
      queries: [B, H, Q, K]. Scores are not divided by sqrt(K), as in T5.
      keys: [B, H, C, K].
      values: [B, H, C, K].
      seen: the coordinates of queries and keys, the bias, and the options of the kernels.
      seed: u32 [2], the seed of dropout on the weights; None: no dropout.
      rate: the probability that a weight is dropped.
      over_sources: as in `attend`.
    """
    split, lines = seen.blocks.split, None
    if seed is not None:
        batch, heads, count, _ = queries.shape
        lines = dropout.of_heads(dropout.lines(seed, (batch, count), over_sources=over_sources), heads)
    if split is None or split.mesh.size == 1:
        return _attend_alone(queries, keys, values, seen, lines, rate)

    def own(queries: Array, keys: Array, values: Array, seen: Seen, lines: Lines | None) -> Array:
        return _attend_alone(queries, keys, values, seen, lines, rate)

    each, everywhere = split.spec, jax.sharding.PartitionSpec()
    places: Any = seen
    of_seen = dataclasses.replace(places, queries=each, keys=each, distances=everywhere)
    specs = each, each, each, of_seen, each
    shared = jax.shard_map(own, mesh=split.mesh, in_specs=specs, out_specs=each, check_vma=False)
    found: Array = shared(queries, keys, values, seen, lines)
    return found


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend_alone(queries: Array, keys: Array, values: Array, seen: Seen, lines: Lines | None, rate: float) -> Array:
    """Computes `attend_in_blocks` on one device. `lines`: the lines [B, H, Q] of dropout; None: no dropout."""
    return _forward(queries, keys, values, seen, lines, rate)[0]


def _forward(
    queries: Array, keys: Array, values: Array, seen: Seen, lines: Lines | None, rate: float
) -> tuple[Array, Any]:
    """The outputs [B, H, Q, K], and the residuals for `_backward`; one program for each block of queries."""
    sizes = TileSizes.of(queries, keys, lines, rate, seen.blocks.interpret)
    facts = _facts(seen, lines, sizes)
    found = jax.ShapeDtypeStruct(queries.shape, values.dtype)
    sums = jax.ShapeDtypeStruct(queries.shape[:3], jnp.float32)
    first, last = _ranges(facts["queries"], facts["keys"], sizes)
    kernel = partial(_attend, sizes=sizes)
    grid = pl.cdiv(sizes.queries, sizes.own), sizes.heads, sizes.batch
    found, sums = _call(kernel, grid, (found, sums), sizes)(facts, first, last, queries, keys, values)
    return found, (queries, keys, values, seen, lines, found, sums)


def _backward(rate: float, kept: Any, gradient: Array) -> tuple[Any, ...]:
    """The gradients of queries, keys, values and of the bias table, from the `gradient` of the outputs.

    The sums that `_backward_queries` returns are added to the buckets of the differences -W and W.
    """
    queries, keys, values, seen, lines, found, sums = kept
    sizes, distances = TileSizes.of(queries, keys, lines, rate, seen.blocks.interpret), seen.distances
    sizes = sizes._replace(other=BLOCK // 2)  # larger blocks would not fit into the registers of an Ada GPU
    facts = _facts(seen, lines, sizes)
    gradient = gradient.astype(values.dtype)
    # f32 [B, H, Q], the term of the softmax's gradient that is subtracted from each row: the sum over keys of a weight
    # times its gradient, which equals the sum over channels of an output times its gradient.
    rows = (gradient.astype(jnp.float32) * found.astype(jnp.float32)).sum(axis=-1)
    given = queries, keys, values, gradient, sums, rows
    grid = pl.cdiv(sizes.queries, sizes.own), sizes.heads, sizes.batch
    ranges = _ranges(facts["queries"], facts["keys"], sizes)
    beyond = jax.ShapeDtypeStruct((*queries.shape[:2], 2, grid[0] * sizes.own), jnp.float32)
    shapes = jax.ShapeDtypeStruct(queries.shape, queries.dtype), beyond
    d_queries, beyond = _call(partial(_backward_queries, sizes=sizes), grid, shapes, sizes)(facts, *ranges, *given)
    across = _ranges(facts["keys"], facts["queries"], sizes, flip=True)
    of_keys_and_values = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)]
    grid_of_keys = pl.cdiv(sizes.keys, sizes.own), sizes.heads, sizes.batch
    d_keys, d_values = _call(partial(_backward_keys, sizes=sizes), grid_of_keys, of_keys_and_values, sizes)(
        facts, *across, *given
    )
    if distances is None:
        return d_queries, d_keys, d_values, None, None
    buckets, groups = distances.table.shape[0], pl.cdiv(distances.table.shape[0], GROUP)
    shape = jax.ShapeDtypeStruct((*queries.shape[:2], groups * GROUP, grid[0] * sizes.own), jnp.float32)
    ranges = _ranges(facts["queries"], facts["keys"], sizes, nearer=_longest(facts))
    grid = grid[0] * groups, *grid[1:]
    within = _call(partial(_backward_buckets, sizes=sizes), grid, shape, sizes)(facts, *ranges, *given)
    of_ends = jnp.arange(buckets)[:, None, None] == distances.bucket[jnp.asarray([0, -1])][:, None]
    ends = jnp.where(of_ends, beyond.sum(axis=(0, 3)).T, 0.0).sum(axis=1)
    d_table = within.sum(axis=(0, 3)).T[:buckets] + ends
    none = np.zeros(distances.bucket.shape, jax.dtypes.float0)
    of_distances = Distances(d_table.astype(distances.table.dtype), none)
    of_seen = dataclasses.replace(seen, queries=None, keys=None, distances=of_distances)
    return d_queries, d_keys, d_values, of_seen, None


_attend_alone.defvjp(_forward, _backward)


def _facts(seen: Seen, lines: Lines | None, sizes: TileSizes) -> dict[str, Any]:
    """The vectors that the kernels read.

    The coordinates of queries and keys are padded to whole blocks with slots of the group -1, which see no key and are
    seen by no query. "lines", f32 [H, 2 W + 1], contains the bias of each difference of positions from -W to W.
    """

    def filled(slots: Slots, count: int) -> Slots:
        def fill(x: Array) -> Array:
            return jnp.pad(jnp.broadcast_to(x, (sizes.batch, count)), ((0, 0), (0, -count % BLOCK)), mode="edge")

        slots = jax.tree.map(fill, slots)
        group = jnp.where(jnp.arange(slots.group.shape[1]) < count, slots.group, -1)
        return Slots(group, slots.row, slots.time, slots.position)

    facts: dict[str, Any] = {
        "queries": filled(seen.queries, sizes.queries),
        "keys": filled(seen.keys, sizes.keys),
    }
    if (distances := seen.distances) is not None:
        facts["lines"] = distances.table[distances.bucket].T.astype(jnp.float32)  # [H, 2 W + 1]
        facts["bucket"] = distances.bucket
    if lines is not None:
        facts["lines_dropped"] = lines
    return facts


def _longest(facts: dict[str, Any]) -> int:
    """W, the distance from which on all distances share a bucket."""
    longest: int = facts["bucket"].shape[0] // 2
    return longest


def _ranges(
    these: Slots, others: Slots, sizes: TileSizes, *, flip: bool = False, nearer: int | None = None
) -> tuple[Array, Array]:
    """For each block of `these`, the range of blocks of `others` that contains all visible pairs of slots.

    The range is determined from the smallest and largest coordinates of each block, so it may also contain blocks
    without a visible pair.

    Args:
      these: the queries; with `flip`, the keys.
      others: the keys; with `flip`, the queries.
      sizes: the sizes of the blocks.
      flip: whether `these` are the keys.
      nearer: if given, only blocks that may contain differences of positions between -`nearer` and `nearer` count.

    Returns:
      Two arrays i32 [B, blocks]: the first block of the range, and the first block after it; both 0 if it is empty.
    """

    def bounds(x: Any, y: Any) -> tuple[Array, Array, Array, Array]:
        """The smallest and largest values of blocks of x, [B, blocks, 1], and of y, [B, 1, other blocks]."""
        found = []
        for slots, block, z in ((these, sizes.own, x), (others, sizes.other, y)):
            z, real = (each.reshape(each.shape[0], -1, block) for each in (z, slots.group >= 0))
            found += [jnp.where(real, z, NOWHERE).min(-1), jnp.where(real, z, -NOWHERE).max(-1)]
        return found[0][..., None], found[1][..., None], found[2][:, None], found[3][:, None]

    low, high, other_low, other_high = bounds(these.group, others.group)
    meet = (other_low <= high) & (low <= other_high)
    for x, y in ((these.row, others.row), (these.time, others.time)):
        if x is not None and y is not None:
            low, high, other_low, other_high = bounds(x, y)
            meet &= low <= other_high if flip else other_low <= high
    if nearer is not None:
        low, high, other_low, other_high = bounds(these.position, others.position)
        meet &= (low - other_high < nearer) & (other_low - high < nearer)
    first, count = jnp.argmax(meet, axis=-1), meet.shape[-1]
    last = jnp.where(meet.any(axis=-1), count - jnp.argmax(meet[..., ::-1], axis=-1), 0)
    return first.astype(jnp.int32), last.astype(jnp.int32)


def _call(kernel: Any, grid: tuple[int, ...], shapes: Any, sizes: TileSizes) -> Any:
    """The `pallas_call` of a kernel; `grid` is the number of programs along each axis."""
    params = plgpu.CompilerParams(num_warps=4, num_stages=2)
    return pl.pallas_call(kernel, out_shape=shapes, grid=grid, compiler_params=params, interpret=sizes.interpret)


# In the kernels, `q` contains the indices of a block's queries, and `k` the indices of its keys.


def _of(slots: Slots, example: Array, places: Array) -> Slots:
    """The coordinates [places] of the slots of an example."""
    return jax.tree.map(lambda ref: plgpu.load(ref.at[example, places]), slots)


def _load(ref: Ref, example: Array, head: Array, places: Array, count: int) -> Array:
    """The rows [places, K] of an array [B, H, N, K], or the entries [places] of an array [B, H, N]; zeros beyond N."""
    if len(ref.shape) == 3:
        return plgpu.load(ref.at[example, head, places], mask=places < count, other=0)
    columns = jnp.arange(ref.shape[3])
    at = ref.at[example, head, places[:, None], columns[None]]
    return plgpu.load(at, mask=(places < count)[:, None], other=0)


def _queries(
    refs: Sequence[Ref], facts: dict[str, Any], example: Array, head: Array, q: Array, sizes: TileSizes
) -> Any:
    """The slots of a block of queries, followed by the block's rows of each of the arrays `refs`."""
    return [_of(facts["queries"], example, q), *(_load(ref, example, head, q, sizes.queries) for ref in refs)]


def _store(ref: Ref, example: Array, head: Array, places: Array, count: int, x: Array) -> None:
    """Stores x, [places, K] or [places], to the rows of an array [B, H, N, K] or [B, H, N]; skips rows beyond N."""
    at, mask = ref.at[example, head, places], places < count
    if x.ndim == 2:
        at, mask = ref.at[example, head, places[:, None], jnp.arange(ref.shape[3])[None]], mask[:, None]
    plgpu.store(at, x.astype(ref.dtype), mask=mask)


def _dot(a: Array, b: Array, **transposed: bool) -> Array:
    """The product of two blocks, accumulated in float32. Float32 blocks are not rounded to TF32."""
    return plgpu.dot(a, b, allow_tf32=False if a.dtype == jnp.float32 else None, **transposed)


def _seen(of_queries: Slots, of_keys: Slots) -> Array:
    """bool [q, k], the keys that each query sees (paper section 3.2, eq. 4); see `Slots`."""
    seen = (of_queries.group[:, None] == of_keys.group[None]) & (of_keys.group >= 0)[None]
    for query, key in ((of_queries.row, of_keys.row), (of_queries.time, of_keys.time)):
        if query is not None and key is not None:
            seen &= key[None] <= query[:, None]
    return seen


def _differences(facts: dict[str, Any], of_queries: Slots, of_keys: Slots) -> Array:
    """i32 [q, k], the index of each pair's difference of positions in `Distances.bucket`."""
    longest = _longest(facts)
    return jnp.clip(of_queries.position[:, None] - of_keys.position[None] + longest, 0, 2 * longest)


def _scores(facts: dict[str, Any], head: Array, of_queries: Slots, of_keys: Slots, query: Array, key: Array) -> Array:
    """f32 [q, k], the scores of a block, with the bias."""
    scores = _dot(query, key, trans_b=True)
    if "lines" not in facts:
        return scores
    return scores + plgpu.load(facts["lines"].at[head, _differences(facts, of_queries, of_keys)])


def _left(facts: dict[str, Any], sizes: TileSizes, example: Array, head: Array, q: Array, k: Array, x: Array) -> Array:
    """The block x, [q, k], after dropout, without rescaling."""
    if "lines_dropped" not in facts:
        return x
    lines = jax.tree.map(lambda ref: _load(ref, example, head, q, sizes.queries)[:, None], facts["lines_dropped"])
    columns = k.astype(jnp.uint32)[None]
    columns = columns if lines.first is None else columns - lines.first
    return jnp.where(dropout.keeps(lines.hashes, columns, sizes.rate), x, 0.0)


def _attend(
    facts: dict[str, Any],
    first_ref: Ref,
    last_ref: Ref,
    queries_ref: Ref,
    keys_ref: Ref,
    values_ref: Ref,
    found_ref: Ref,
    sums_ref: Ref,
    *,
    sizes: TileSizes,
) -> None:
    """Computes the outputs of a block of queries, from all blocks of keys that they may see.

    Also stores `sums`, f32 [B, H, Q], the logarithm of the softmax's denominator of each query (0 for a query that sees
    no key), with which the backward pass computes the weights again.
    """
    block, head, example = (pl.program_id(n) for n in range(3))
    q = block * sizes.own + jnp.arange(sizes.own)
    query, here = _load(queries_ref, example, head, q, sizes.queries), _of(facts["queries"], example, q)

    def add(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, found = carry  # the maximum of the scores, the sum of their powers, the weighted sum of values
        k = number * sizes.other + jnp.arange(sizes.other)
        there = _of(facts["keys"], example, k)
        seen = _seen(here, there)
        scores = _scores(facts, head, here, there, query, _load(keys_ref, example, head, k, sizes.keys))
        scores = jnp.where(seen, scores, LOWEST)
        now = jnp.maximum(highest, scores.max(axis=1))
        weights, kept = jnp.where(seen, jnp.exp(scores - now[:, None]), 0.0), jnp.exp(highest - now)
        value = _load(values_ref, example, head, k, sizes.keys)
        left = _left(facts, sizes, example, head, q, k, weights).astype(value.dtype)
        return now, total * kept + weights.sum(axis=1), found * kept[:, None] + _dot(left, value)

    zero = jnp.full(sizes.own, LOWEST), jnp.zeros(sizes.own), jnp.zeros((sizes.own, sizes.width))
    first, last = plgpu.load(first_ref.at[example, block]), plgpu.load(last_ref.at[example, block])
    highest, total, found = jax.lax.fori_loop(first, last, add, zero)
    some = jnp.where(total > 0, total, 1.0)  # `total` is 0 for a query that sees no key
    found = found / (some * dropout.share_kept(sizes.rate))[:, None]
    _store(found_ref, example, head, q, sizes.queries, found)
    _store(sums_ref, example, head, q, sizes.queries, jnp.where(total > 0, highest, 0.0) + jnp.log(some))


def _gradients(
    facts: dict[str, Any],
    sizes: TileSizes,
    example: Array,
    head: Array,
    q: Array,
    k: Array,
    of_queries: Sequence[Any],
    of_keys: Sequence[Any],
) -> tuple[Array, Array]:
    """Computes the weights of a block again, and the gradient of its scores.

    Args:
      of_queries: the slots and rows of the queries, the gradient of their outputs, their `sums`, and `rows`, the term
        of the softmax's gradient from `_backward`.
      of_keys: the slots and rows of the keys, and their values.

    Returns:
      f32 [q, k] twice: the weights after dropout, and the gradient of the scores.
    """
    (here, query, gradient, sums, rows), (there, key, value) = of_queries, of_keys
    scores = _scores(facts, head, here, there, query, key)
    weights = jnp.where(_seen(here, there), jnp.exp(scores - sums[:, None]), 0.0)
    left = partial(_left, facts, sizes, example, head, q, k)
    share = dropout.share_kept(sizes.rate)
    d_weights = left(_dot(gradient, value, trans_b=True)) / share
    return left(weights) / share, weights * (d_weights - rows[:, None])


def _beyond(facts: dict[str, Any], of_queries: Slots, of_keys: Slots) -> tuple[Array, Array]:
    """Whether all differences of positions of two blocks are -W or less, and whether all of them are W or more.

    In both cases all pairs of the blocks have one bucket.
    """
    longest, query, key = _longest(facts), of_queries.position, of_keys.position
    return query.max() - key.min() <= -longest, query.min() - key.max() >= longest


def _backward_queries(
    facts: dict[str, Any],
    first_ref: Ref,
    last_ref: Ref,
    queries_ref: Ref,
    keys_ref: Ref,
    values_ref: Ref,
    gradient_ref: Ref,
    sums_ref: Ref,
    rows_ref: Ref,
    d_queries_ref: Ref,
    beyond_ref: Ref,
    *,
    sizes: TileSizes,
) -> None:
    """Computes the gradient of a block of queries.

    Also stores, f32 [B, H, 2, queries], the sums of the scores' gradient over the blocks of keys whose differences are
    all -W or less, and over those whose differences are all W or more.
    """
    block, head, example = (pl.program_id(n) for n in range(3))
    q = block * sizes.own + jnp.arange(sizes.own)
    here, *_ = of_queries = _queries((queries_ref, gradient_ref, sums_ref, rows_ref), facts, example, head, q, sizes)

    def add(number: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        d_query, *sums = carry
        k = number * sizes.other + jnp.arange(sizes.other)
        there = _of(facts["keys"], example, k)
        key, value = (_load(ref, example, head, k, sizes.keys) for ref in (keys_ref, values_ref))
        d_scores = _gradients(facts, sizes, example, head, q, k, of_queries, (there, key, value))[1]
        if sums:
            row = d_scores.sum(axis=1)
            beyond = _beyond(facts, here, there)
            sums = [total + jnp.where(is_so, row, 0.0) for total, is_so in zip(sums, beyond, strict=True)]
        return d_query + _dot(d_scores.astype(key.dtype), key), *sums

    first, last = plgpu.load(first_ref.at[example, block]), plgpu.load(last_ref.at[example, block])
    none = [jnp.zeros(sizes.own)] * (2 if "lines" in facts else 0)
    d_query, *sums = jax.lax.fori_loop(first, last, add, (jnp.zeros((sizes.own, sizes.width)), *none))
    _store(d_queries_ref, example, head, q, sizes.queries, d_query)
    for number, total in enumerate(sums):
        plgpu.store(beyond_ref.at[example, head, jnp.int32(number), q], total)


def _backward_buckets(
    facts: dict[str, Any],
    first_ref: Ref,
    last_ref: Ref,
    queries_ref: Ref,
    keys_ref: Ref,
    values_ref: Ref,
    gradient_ref: Ref,
    sums_ref: Ref,
    rows_ref: Ref,
    of_buckets_ref: Ref,
    *,
    sizes: TileSizes,
) -> None:
    """Sums the gradient of the scores by bucket, for a block of queries and a group of buckets.

    Blocks of keys for which all differences are -W or less, or W or more, are left to `_backward_queries`.
    """
    turn, head, example = (pl.program_id(n) for n in range(3))
    groups = of_buckets_ref.shape[2] // GROUP
    block, least = turn // groups, turn % groups * GROUP
    q = block * sizes.own + jnp.arange(sizes.own)
    here, *_ = of_queries = _queries((queries_ref, gradient_ref, sums_ref, rows_ref), facts, example, head, q, sizes)

    def add(number: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        k = number * sizes.other + jnp.arange(sizes.other)
        there = _of(facts["keys"], example, k)
        behind, ahead = _beyond(facts, here, there)
        bucket = plgpu.load(facts["bucket"].at[_differences(facts, here, there)]) - least
        own = jnp.where((bucket >= 0) & (bucket < GROUP), 1, 0).max() > 0

        def near() -> tuple[Array, ...]:
            key, value = (_load(ref, example, head, k, sizes.keys) for ref in (keys_ref, values_ref))
            d_scores = _gradients(facts, sizes, example, head, q, k, of_queries, (there, key, value))[1]
            return tuple(total + jnp.where(bucket == n, d_scores, 0.0).sum(axis=1) for n, total in enumerate(sums))

        return jax.lax.cond(behind | ahead | ~own, lambda: sums, near)

    first, last = plgpu.load(first_ref.at[example, block]), plgpu.load(last_ref.at[example, block])
    none = tuple(jnp.zeros(sizes.own) for _ in range(GROUP))
    for number, total in enumerate(jax.lax.fori_loop(first, last, add, none)):
        plgpu.store(of_buckets_ref.at[example, head, least + number, q], total)


def _backward_keys(
    facts: dict[str, Any],
    first_ref: Ref,
    last_ref: Ref,
    queries_ref: Ref,
    keys_ref: Ref,
    values_ref: Ref,
    gradient_ref: Ref,
    sums_ref: Ref,
    rows_ref: Ref,
    d_keys_ref: Ref,
    d_values_ref: Ref,
    *,
    sizes: TileSizes,
) -> None:
    """Computes the gradients of a block of keys and of its values, from all blocks of queries that may see them."""
    block, head, example = (pl.program_id(n) for n in range(3))
    k = block * sizes.own + jnp.arange(sizes.own)
    there = _of(facts["keys"], example, k)
    of_keys = there, *(_load(ref, example, head, k, sizes.keys) for ref in (keys_ref, values_ref))

    def add(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        d_key, d_value = carry
        q = number * sizes.other + jnp.arange(sizes.other)
        of_queries = _queries((queries_ref, gradient_ref, sums_ref, rows_ref), facts, example, head, q, sizes)
        _, query, gradient, *_ = of_queries
        left, d_scores = _gradients(facts, sizes, example, head, q, k, of_queries, of_keys)
        d_value += _dot(left.astype(gradient.dtype), gradient, trans_a=True)
        return d_key + _dot(d_scores.astype(query.dtype), query, trans_a=True), d_value

    zero = jnp.zeros((sizes.own, sizes.width))
    first, last = plgpu.load(first_ref.at[example, block]), plgpu.load(last_ref.at[example, block])
    d_key, d_value = jax.lax.fori_loop(first, last, add, (zero, zero))
    _store(d_keys_ref, example, head, k, sizes.keys, d_key)
    _store(d_values_ref, example, head, k, sizes.keys, d_value)
