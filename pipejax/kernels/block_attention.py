"""Attention on an NVIDIA GPU, forward and backward, that never holds an array of queries by keys.

Blocks of queries meet blocks of keys, as in FlashAttention (Dao et al. 2022, arXiv 2205.14135; Dao 2023,
arXiv 2307.08691). The bias is looked up by the difference of two positions, the mask follows from where queries and
keys stand, and the bits of dropout are the hash of places of `pipejax.model.dropout`: all three are made where a block
needs them. So a kernel reads vectors, and memory grows with the length, not with its square. Blocks in which no query
sees a key are skipped.

`pipejax.model.attention.attend` is the reference: the same sums in another order, the same bits of dropout. A query
that sees no key finds zeros here, and an average there; nobody reads either.

Shapes: B batch, H heads, Q queries, C keys, K head width, T buckets, W the distance from which on there is one bucket.
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
LOWEST = -1e30  # below every score; finite, so that nothing becomes NaN
TOLERANCE = 0.05  # of `difference`; bfloat16 alone makes 0.01
BLOCK = 64  # places of a block; the tensor cores of a Hopper want no fewer
GROUP = 8  # buckets whose sums a program's registers hold
NOWHERE = 2**30  # beyond every group, row and time


class TileSizes(NamedTuple):
    """Static facts of a call."""

    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    own: int  # queries, or keys, of a program's block
    other: int  # keys, or queries, of a block that it meets
    rate: float  # of dropout; 0: without
    interpret: bool

    @classmethod
    def of(cls, queries: Array, keys: Array, lines: Lines | None, rate: float, interpret: bool) -> "TileSizes":
        """Those of arrays [B, H, Q, K] and [B, H, C, K]."""
        other = BLOCK if queries.shape[3] <= 64 else BLOCK // 2
        batch, heads, count, width = queries.shape
        return cls(batch, heads, count, keys.shape[2], width, BLOCK, other, rate if lines else 0.0, interpret)


def misfit(width: int, *, trains: bool) -> str:
    """The reason for which heads of that width cannot be attended for; "": they can. `trains`: gradients are needed."""
    if not 16 <= width <= 128 or width & (width - 1):
        return f"heads of {width} are no power of two from 16 to 128"
    return (
        trial(width, trains) if jax.default_backend() == "gpu" else ""
    )  # for a device that is not here, nothing can be tried


@functools.cache
def trial(width: int, trains: bool) -> str:
    """The reason for which this process cannot use the kernels on its GPU; "": they find what `attend` finds."""
    try:
        apart = float(difference(width, trains=trains))
    # The compiler's errors are of many kinds, and none of them may keep anyone from training.
    except Exception as error:
        return str(error).partition("\n")[0][:200]
    return "" if apart < TOLERANCE else f"on this GPU the kernels' results are wrong by {apart:.2g}"


def difference(width: int, *, trains: bool = True, interpret: bool = False) -> Array:
    """The largest difference from `attend`, relative to the largest number: of results and gradients, f32 scalar.

    Without gradients if nothing `trains`, as they take the compiler the longest.
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
    """softmax(queries keys^T + bias) values, [B, H, Q, K]; sums in float32.

    Args:
      queries: [B, H, Q, K], not divided by sqrt(K): T5's are not.
      keys: [B, H, C, K].
      values: [B, H, C, K].
      seen: positions and visibility of queries and keys, the bias, and the block sizes.
      seed: u32 [2], of dropout on the weights; None: without.
      rate: of dropout.
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
    """`attend_in_blocks` on one device."""
    return _forward(queries, keys, values, seen, lines, rate)[0]


def _forward(
    queries: Array, keys: Array, values: Array, seen: Seen, lines: Lines | None, rate: float
) -> tuple[Array, Any]:
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
    queries, keys, values, seen, lines, found, sums = kept
    sizes, distances = TileSizes.of(queries, keys, lines, rate, seen.blocks.interpret), seen.distances
    sizes = sizes._replace(other=BLOCK // 2)  # more would not fit into an Ada's registers
    facts = _facts(seen, lines, sizes)
    gradient = gradient.astype(values.dtype)
    # What softmax's gradient takes off each row of scores.
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
    """The vectors that a kernel reads, places filled up to whole blocks with such as see and show nothing."""

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
    """W."""
    longest: int = facts["bucket"].shape[0] // 2
    return longest


def _ranges(
    these: Slots, others: Slots, sizes: TileSizes, *, flip: bool = False, nearer: int | None = None
) -> tuple[Array, Array]:
    """For each block of these, i32 [B, blocks], the first of the others that it meets and the first after the last.

    `these` are queries and the others keys, or with `flip` the other way round. With `nearer` only blocks that hold a
    difference of positions below it count.
    """

    def bounds(x: Any, y: Any) -> tuple[Array, Array, Array, Array]:
        """The least and the most of a block, [B, blocks, 1] and [B, 1, other blocks]."""
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
    params = plgpu.CompilerParams(num_warps=4, num_stages=2)
    return pl.pallas_call(kernel, out_shape=shapes, grid=grid, compiler_params=params, interpret=sizes.interpret)


# In the kernels, `q` are places of a block's queries and `k` those of its keys.


def _of(slots: Slots, example: Array, places: Array) -> Slots:
    return jax.tree.map(lambda ref: plgpu.load(ref.at[example, places]), slots)


def _load(ref: Ref, example: Array, head: Array, places: Array, count: int) -> Array:
    """Rows [places, K] of an array [B, H, N, K], or of one [B, H, N]; zeros beyond N."""
    if len(ref.shape) == 3:
        return plgpu.load(ref.at[example, head, places], mask=places < count, other=0)
    columns = jnp.arange(ref.shape[3])
    at = ref.at[example, head, places[:, None], columns[None]]
    return plgpu.load(at, mask=(places < count)[:, None], other=0)


def _queries(
    refs: Sequence[Ref], facts: dict[str, Any], example: Array, head: Array, q: Array, sizes: TileSizes
) -> Any:
    """The slots of a block's queries, and the rows of each of these arrays."""
    return [_of(facts["queries"], example, q), *(_load(ref, example, head, q, sizes.queries) for ref in refs)]


def _store(ref: Ref, example: Array, head: Array, places: Array, count: int, x: Array) -> None:
    at, mask = ref.at[example, head, places], places < count
    if x.ndim == 2:
        at, mask = ref.at[example, head, places[:, None], jnp.arange(ref.shape[3])[None]], mask[:, None]
    plgpu.store(at, x.astype(ref.dtype), mask=mask)


def _dot(a: Array, b: Array, **transposed: bool) -> Array:
    return plgpu.dot(a, b, allow_tf32=False if a.dtype == jnp.float32 else None, **transposed)


def _seen(of_queries: Slots, of_keys: Slots) -> Array:
    """bool [q, k]: which keys each query sees."""
    seen = (of_queries.group[:, None] == of_keys.group[None]) & (of_keys.group >= 0)[None]
    for query, key in ((of_queries.row, of_keys.row), (of_queries.time, of_keys.time)):
        if query is not None and key is not None:
            seen &= key[None] <= query[:, None]
    return seen


def _differences(facts: dict[str, Any], of_queries: Slots, of_keys: Slots) -> Array:
    """i32 [q, k], the place of each pair in `Distances.bucket`."""
    longest = _longest(facts)
    return jnp.clip(of_queries.position[:, None] - of_keys.position[None] + longest, 0, 2 * longest)


def _scores(facts: dict[str, Any], head: Array, of_queries: Slots, of_keys: Slots, query: Array, key: Array) -> Array:
    """f32 [q, k] with the bias."""
    scores = _dot(query, key, trans_b=True)
    if "lines" not in facts:
        return scores
    return scores + plgpu.load(facts["lines"].at[head, _differences(facts, of_queries, of_keys)])


def _left(facts: dict[str, Any], sizes: TileSizes, example: Array, head: Array, q: Array, k: Array, x: Array) -> Array:
    """The block [q, k] after dropout, not divided by the kept share."""
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
    """A block of queries against all keys that it may see; also the logarithms of their sums, for the backward pass."""
    block, head, example = (pl.program_id(n) for n in range(3))
    q = block * sizes.own + jnp.arange(sizes.own)
    query, here = _load(queries_ref, example, head, q, sizes.queries), _of(facts["queries"], example, q)

    def add(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, found = carry
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
    some = jnp.where(total > 0, total, 1.0)  # of a query that sees nothing, 0
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
    """The weights that dropout left, and the gradient of the scores, f32 [q, k].

    Args:
      of_queries: their slots, themselves, the results' gradient, the logarithms of the sums, and `rows`.
      of_keys: their slots, themselves, and their values.
    """
    (here, query, gradient, sums, rows), (there, key, value) = of_queries, of_keys
    scores = _scores(facts, head, here, there, query, key)
    weights = jnp.where(_seen(here, there), jnp.exp(scores - sums[:, None]), 0.0)
    left = partial(_left, facts, sizes, example, head, q, k)
    share = dropout.share_kept(sizes.rate)
    d_weights = left(_dot(gradient, value, trans_b=True)) / share
    return left(weights) / share, weights * (d_weights - rows[:, None])


def _beyond(facts: dict[str, Any], of_queries: Slots, of_keys: Slots) -> tuple[Array, Array]:
    """Whether all differences of two blocks are -W or less, and whether all are W or more: then there is one bucket."""
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
    """The gradient of a block of queries, and the sums of its scores' gradient over keys beyond -W and beyond W."""
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
    """The sums of the scores' gradient by bucket, for a block of queries, some buckets, and the keys that are near."""
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
    """The gradients of a block of keys and of its values."""
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
