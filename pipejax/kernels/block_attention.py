"""Attention on an NVIDIA GPU, forward and backward, that never stores an array of queries by keys.

Blocks of queries are combined with blocks of keys, as in FlashAttention (Dao et al. 2022, arXiv 2205.14135; Dao 2023,
arXiv 2307.08691). The kernels compute three things for each block from vectors: the bias is looked up by the difference
of two positions; the mask follows from the coordinates of queries and keys (paper section 3.2, eq. 4); and the bits of
dropout are the hash of `pipejax.model.dropout`. So memory grows linearly with the length. Blocks in which no query sees
a key are skipped. A block is plain if every query sees every key and all differences of positions have the same bucket.
A kernel visits plain blocks in a separate loop, which computes no mask and adds a single number as bias (`Order`).

The forward kernel (`_attend`) keeps a running maximum and a running sum of each query's softmax, and stores the
logarithm of the final sum (`sums`). With it the backward kernels compute the weights of a block again:
`_backward_queries` for the gradient of the queries, and `_backward_keys` for the gradients of keys and values, in tiles
[keys, queries]. Distances of W or more have one bucket on each side, whose gradients `_backward_queries` sums. For
shorter distances, if positions are 0, 1, 2, ... (in an encoder), `_backward_queries` writes the gradient of the scores
to a band, an array [queries, differences]. If several slots have the same position (in a decoder), `_backward_buckets`
sums the gradient by bucket instead.

`pipejax.model.attention.attend` is the reference: it computes the same sums in another order, with the same bits of
dropout. For a query that sees no key, whose result is not used, the kernels return zeros, and `attend` an average.

Shapes: B batch, H heads, Q queries, C keys, K head width, T buckets, W the distance from which on all distances share a
bucket.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pipejax.grid import shares_group
from pipejax.kernels import child_trials
from pipejax.model import dropout
from pipejax.model.attention import attend
from pipejax.model.dropout import Lines
from pipejax.model.slots import Blocks, Distances, Seen, Slots
from pipejax.system import Tree

Array = jax.Array
Ref = Any  # a reference of Pallas to an array in the device's memory
Kernel = Callable[..., None]  # reads and writes references
Shapes = Any  # `jax.ShapeDtypeStruct`s of a kernel's results: one, or a sequence of them
Add = Callable[[Array, Array | None, tuple[Array, ...]], tuple[Array, ...]]
# Queries [B, Q, H, K], keys and values [B, C, H, K]; those that one product computes are one array with all heads.
Projections = tuple[Array, ...]
Kept = tuple[Projections, Seen, Lines | None, Array, Array]  # arguments and results that the backward pass reads
LOWEST = -1e30  # lower than every score; finite, so that differences with it are not NaN
TOLERANCE = 0.05  # the largest accepted value of `difference`; the rounding of bfloat16 causes about 0.01
BLOCK = 64  # queries or keys of a block; the tensor cores of a Hopper GPU need at least this number
BACKWARD_BLOCK = 32  # the size of blocks in the loops of backward kernels; more would exceed an Ada GPU's registers
GROUP = 8  # buckets whose sums fit into the registers of a program
NOWHERE = 2**30  # greater than every example, row, time and group


class Heads(NamedTuple):
    """A reference to an array [B, N, heads, K], and the index of the first head to read."""

    ref: Ref
    first: int = 0


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
    def of(cls, projections: Projections, lines: Lines | None, rate: float, interpret: bool) -> "TileSizes":
        """Returns the sizes of a call."""
        batch, queries, _, width = projections[0].shape
        keys, heads = projections[-1].shape[1], sum(x.shape[2] for x in projections) // 3
        other, own_rate = forward_block(width), rate if lines else 0.0
        return cls(batch, heads, queries, keys, width, BLOCK, other, own_rate, interpret)


class Facts(NamedTuple):
    """The vectors that the kernels read, as arrays, or in a kernel as references to them."""

    queries: Slots  # padded to whole blocks with slots of the example -1, which see no key and are seen by no query
    keys: Slots
    lines: Any = None  # f32 [H, 2 W + 1], the bias of each difference of positions from -W to W; None: no bias
    bucket: Any = None  # i32 [2 W + 1], see `Distances`
    dropped: Lines | None = None  # the lines [B, H, Q] of dropout; None: no dropout

    @classmethod
    def of(cls, seen: Seen, dropped: Lines | None) -> "Facts":
        """Returns the vectors of a call with a plan."""
        found = cls(seen.plan.queries, seen.plan.keys, dropped=dropped)
        if (distances := seen.distances) is None:
            return found
        return found._replace(lines=distances.lines, bucket=distances.bucket)

    @property
    def longest(self) -> int:
        """W, the distance from which on all distances share a bucket; 0 without a bias."""
        return 0 if self.bucket is None else int(self.bucket.shape[0]) // 2


class Order(NamedTuple):
    """The blocks of `others` that the program of a block visits; each field is i32 [B, blocks].

    All visible pairs are in the blocks `first` to `last` - 1. Two runs of these blocks are plain: every query sees
    every key, and all differences of positions have the same bucket, so that neither a mask nor a gather is needed.
    Each run may be empty.
    """

    first: Array
    begin: Array  # the first block of the first plain run
    end: Array  # the block after this run
    next_begin: Array  # the first block of the second plain run
    next_end: Array  # the block after the second run
    last: Array  # the block after the last one to visit
    ahead: Array  # 1 if the differences of positions in the first run are W or more; 0 if they are -W or less


class Plan(NamedTuple):
    """The padded coordinates and the orders of blocks of a call. Layers with the same coordinates share a plan."""

    queries: Slots  # padded to whole blocks, see `Facts`
    keys: Slots
    forward: Order  # the order of `_attend`
    backward: Order  # the order of `_backward_queries` and `_backward_buckets`
    across: Order  # the order of `_backward_keys`


def planned(seen: Seen, batch: int, width: int) -> Seen:
    """Returns `seen` with its `Plan`, and with the bias of each difference of positions; `batch`: B, `width`: K.

    `attend_in_blocks` makes the plan of a `Seen` without one. A stack makes the plan once for all of its layers: XLA
    would otherwise start up to 25 small kernels for it in each layer of the backward pass.
    """
    if seen.plan is not None:
        return seen

    def filled(slots: Slots) -> Slots:
        count = slots.example.shape[1]

        def fill(x: Array) -> Array:
            return jnp.pad(jnp.broadcast_to(x, (batch, count)), ((0, 0), (0, -count % BLOCK)), mode="edge")

        slots = jax.tree.map(fill, slots)
        number = jnp.arange(slots.example.shape[1])
        example = jnp.where(number < count, slots.example, -1)
        if slots.consecutive:  # the padding continues the positions, so that each pair has its own place in the band
            slots = dataclasses.replace(slots, position=jnp.broadcast_to(number, example.shape))
        return dataclasses.replace(slots, example=example)

    queries, keys, distances = filled(seen.queries), filled(seen.keys), seen.distances
    longest = 0
    if distances is not None:
        longest = int(distances.bucket.shape[0]) // 2
        lines = jax.lax.stop_gradient(distances.table)[distances.bucket].T.astype(jnp.float32)
        distances = dataclasses.replace(distances, lines=lines)
    other = forward_block(width)
    plan = Plan(
        queries,
        keys,
        _order(queries, keys, BLOCK, other, longest),
        _order(queries, keys, BLOCK, BACKWARD_BLOCK, longest),
        _order(keys, queries, BLOCK, BACKWARD_BLOCK, longest, flip=True),
    )
    return dataclasses.replace(seen, distances=distances, plan=plan)


def forward_block(width: int) -> int:
    """Returns the number of keys of a block in the forward kernel; `width`: K."""
    return BLOCK if width <= 64 else BLOCK // 2


def misfit(width: int, *, trains: bool) -> str:
    """Returns the reason why the kernels do not support a head width, or "" if they do.

    Args:
      width: K.
      trains: whether gradients are needed.
    """
    if not 16 <= width <= 128 or width & (width - 1):
        return f"the width of heads, {width}, is not a power of two from 16 to 128"
    if jax.default_backend() != "gpu":  # nothing can be tried, as when a program is compiled for another machine
        return ""
    return refusal(width, trains=trains)


def refusal(width: int, *, trains: bool) -> str:
    """Returns the reason why the kernels are not used on this machine's GPU, or "" if a trial has passed.

    See `misfit` for the arguments.
    """
    name = "attention in blocks, with gradients" if trains else "attention in blocks"
    return child_trials.refusal(name, f"{__name__}:disagreement", width, trains)


def disagreement(width: int, trains: bool) -> str:
    """Returns the reason why the results of the kernels cannot be used, or "" if they agree with `attend`."""
    child_trials.require_gpu()
    apart = float(difference(width, trains=trains))
    return "" if apart < TOLERANCE else f"on this GPU the kernels' results differ from XLA's by {apart:.2g}"


def difference(width: int, *, trains: bool = True, interpret: bool = False) -> Array:
    """Returns an f32 scalar, the largest difference between results of the kernels and of `attend`, on random data.

    The difference of each array is divided by the largest magnitude in it. The data are a decoder's rows and an
    encoder's sources, whose lengths are no multiples of the blocks.

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
    example = jnp.asarray(np.where(np.arange(length) < np.array([[170], [90]]), 0, -1))
    row, time = jnp.arange(length) // 40, jnp.arange(length) % 40
    row, time = jnp.broadcast_to(row, example.shape), jnp.broadcast_to(time, example.shape)
    whole = jnp.where(jnp.arange(length) < jnp.asarray([[length], [90]]), 0, -1)
    position = jnp.broadcast_to(jnp.arange(length), example.shape)
    sides = Slots(example, row, time, row + time), Slots(whole, position=position, consecutive=True)
    # Queries, keys and values are one array, as in self-attention, or two, as in cross-attention.
    of_sides = [
        _difference(given, table, bucket, slots, one_array=one_array, trains=trains, interpret=interpret)
        for slots, one_array in zip(sides, (True, False), strict=True)
    ]
    return jnp.stack(of_sides).max()


def _difference(
    given: Sequence[Array],
    table: Array,
    bucket: Array,
    slots: Slots,
    *,
    one_array: bool,
    trains: bool,
    interpret: bool,
) -> Array:
    """Computes `difference` for queries, keys and values `given` [B, H, N, K], with the coordinates of their slots."""
    seed, rate = jnp.asarray([1, 2], jnp.uint32), 0.1
    seen = jax.vmap(_seen)(slots, slots)
    real = (slots.example >= 0)[:, None, :, None]

    def ours(queries: Array, keys: Array, values: Array, table: Array) -> Array:
        there = Seen(slots, slots, Distances(table, bucket), Blocks(interpret=interpret))
        rest: Array | None = jnp.concatenate([keys, values], axis=1)
        if one_array:
            queries, rest = jnp.concatenate([queries, keys, values], axis=1), None
        return attend_in_blocks(queries, rest, None, there, seed, rate).astype(jnp.float32)

    def others(queries: Array, keys: Array, values: Array, table: Array) -> Array:
        apart = jnp.clip(slots.position[:, :, None] - slots.position[:, None] + 128, 0, 256)
        bias = jnp.where(seen[:, None], jnp.moveaxis(table[bucket[apart]], -1, 1), -1e9)
        return jnp.where(real, attend(queries, keys, values, bias, seed, rate).astype(jnp.float32), 0.0)

    def computed(function: Callable[..., Array]) -> Tree:
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
    keys: Array | None,
    values: Array | None,
    seen: Seen,
    seed: Array | None,
    rate: float,
    *,
    over_sources: bool = False,
) -> Array:
    """Computes softmax(queries keys^T + bias) values, [B, H, Q, K]. Sums are float32.

    If one product computes keys and values, or also the queries, the arguments may be one array, with the heads of the
    queries first and the heads of the values last. Separate copies would be read and written once more.

    If `seen.blocks.split` is a sharding, each device computes the attention of its own examples.

    Args:
      queries: [B, H, Q, K]; or queries, keys and values [B, 3 H, Q, K], if `keys` is None. As in T5, scores are not
        divided by sqrt(K).
      keys: [B, H, C, K]; or keys and values [B, 2 H, C, K], if `values` is None; or None.
      values: [B, H, C, K], or None.
      seen: the coordinates of queries and keys, the bias, and the options of the kernels.
      seed: u32 [2], the seed of dropout on the weights; None: no dropout.
      rate: the probability that a weight is dropped.
      over_sources: as in `attend`.
    """
    split, lines = seen.blocks.split, None
    # The layers transpose the arrays that their products return, and the compiler cancels both transpositions.
    projections = tuple(x.swapaxes(1, 2) for x in (queries, keys, values) if x is not None)
    sizes = TileSizes.of(projections, None, rate, seen.blocks.interpret)
    seen = planned(seen, sizes.batch, sizes.width)
    if seed is not None:
        of_slots = dropout.lines(seed, (sizes.batch, sizes.queries), over_sources=over_sources)
        lines = dropout.of_heads(of_slots, sizes.heads)
    if seen.blocks.is_alone:
        return _attend_alone(projections, seen, lines, rate).swapaxes(1, 2)

    assert split is not None

    def own(projections: Projections, seen: Seen, lines: Lines | None) -> Array:
        return _attend_alone(projections, seen, lines, rate)

    each, everywhere = split.spec, jax.sharding.PartitionSpec()
    places: Any = seen
    of_seen = dataclasses.replace(places, queries=each, keys=each, plan=each, distances=everywhere)
    specs = each, of_seen, each
    shared = jax.shard_map(own, mesh=split.mesh, in_specs=specs, out_specs=each, check_vma=False)
    found: Array = shared(projections, seen, lines)
    return found.swapaxes(1, 2)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _attend_alone(projections: Projections, seen: Seen, lines: Lines | None, rate: float) -> Array:
    """Computes `attend_in_blocks` on one device, from and to arrays [B, N, H, K], as products of layers have them.

    `lines`: the lines [B, H, Q] of dropout; None: no dropout.
    """
    return _forward(projections, seen, lines, rate)[0]


def _forward(projections: Projections, seen: Seen, lines: Lines | None, rate: float) -> tuple[Array, Kept]:
    """Returns the outputs [B, Q, H, K] and the residuals for `_backward`. A program computes a block of queries."""
    sizes = TileSizes.of(projections, lines, rate, seen.blocks.interpret)
    facts, order = Facts.of(seen, lines), seen.plan.forward
    shape = sizes.batch, sizes.queries, sizes.heads, sizes.width
    found = jax.ShapeDtypeStruct(shape, projections[-1].dtype)
    sums = jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.queries), jnp.float32)
    kernel = partial(_attend, sizes=sizes)
    grid = pl.cdiv(sizes.queries, sizes.own), sizes.heads, sizes.batch
    found, sums = _call(kernel, grid, (found, sums), sizes)(facts, order, projections)
    return found, (projections, seen, lines, found, sums)


def _backward(rate: float, kept: Kept, gradient: Array) -> tuple[Any, ...]:
    """Returns the gradients of queries, keys, values and of the bias table, from the `gradient` of the outputs.

    The sums for distances of W or more, which `_backward_queries` stores, are added to the buckets of the differences
    -W and W.
    """
    projections, seen, lines, found, sums = kept
    sizes = TileSizes.of(projections, lines, rate, seen.blocks.interpret)._replace(other=BACKWARD_BLOCK)
    facts, order = Facts.of(seen, lines), seen.plan.backward
    given = projections, gradient.astype(found.dtype), sums
    grid = pl.cdiv(sizes.queries, sizes.own), sizes.heads, sizes.batch
    near = sizes.batch, sizes.heads
    of_queries, *of_keys = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in projections)
    shapes = [
        of_queries,
        jax.ShapeDtypeStruct(sums.shape, jnp.float32),
        jax.ShapeDtypeStruct((*near, 2, grid[0] * sizes.own), jnp.float32),
    ]
    if has_band := seen.queries.consecutive and seen.keys.consecutive and facts.longest > 0:
        shapes += [jax.ShapeDtypeStruct((*near, grid[0] * sizes.own, 2 * facts.longest), of_queries.dtype)]
    call = _call(partial(_backward_queries, sizes=sizes), grid, shapes, sizes)
    d_queries, products, beyond, *band = call(facts, order, *given, found)
    known = *given, products
    # If one array holds queries, keys and values, `_backward_keys` completes the array of their gradients.
    begun = None if of_keys else d_queries
    grid_of_keys = pl.cdiv(sizes.keys, sizes.own), sizes.heads, sizes.batch
    call = _call(partial(_backward_keys, sizes=sizes), grid_of_keys, of_keys or [of_queries], sizes, begun=begun)
    d_projections = call(begun, facts, seen.plan.across, *known)
    d_projections = (d_queries, *d_projections) if of_keys else tuple(d_projections)
    if (distances := seen.distances) is None:
        return d_projections, None, None
    buckets = distances.table.shape[0]
    if has_band:
        of_lines = _sum_band(band[0], order, sizes)  # f32 [H, 2 W]
        of_buckets = distances.bucket[: 2 * facts.longest] == jnp.arange(buckets)[:, None]
        d_table = jnp.where(of_buckets[..., None], of_lines.T, 0.0).sum(axis=1)
    else:
        groups = pl.cdiv(buckets, GROUP)
        shape = jax.ShapeDtypeStruct((*near, groups * GROUP, grid[0] * sizes.own), jnp.float32)
        grid = grid[0] * groups, *grid[1:]
        within = _call(partial(_backward_buckets, sizes=sizes), grid, shape, sizes)(facts, order, *known)
        d_table = within.sum(axis=(0, 3)).T[:buckets]
    of_ends = jnp.arange(buckets)[:, None, None] == distances.bucket[jnp.asarray([0, -1])][:, None]
    d_table += jnp.where(of_ends, beyond.sum(axis=(0, 3)).T, 0.0).sum(axis=1)
    none = np.zeros(distances.bucket.shape, jax.dtypes.float0)
    of_distances = Distances(d_table.astype(distances.table.dtype), none)
    nothing: Any = None  # integers have no gradient
    of_seen = dataclasses.replace(seen, queries=nothing, keys=nothing, plan=nothing, distances=of_distances)
    return d_projections, of_seen, None


def _sum_band(band: Array, order: Order, sizes: TileSizes) -> Array:
    """Returns f32 [H, 2 W], the sums of the band of `_backward_queries` over examples and queries.

    Entries that `_backward_queries` has not written are undefined and are left out.
    """
    longest, query = band.shape[3] // 2, jnp.arange(band.shape[2])
    key = query[:, None] - jnp.arange(-longest, longest)  # nothing is written at index 0, the difference -W
    first, last = (jnp.repeat(x, sizes.own, axis=1)[..., None] for x in (order.first, order.last))
    block = key // sizes.other
    written = (key >= 0) & (key[None] < sizes.keys) & (block >= first) & (block < last)
    written &= (query[:, None] < sizes.queries) & (jnp.arange(2 * longest) > 0)
    return jnp.where(written[:, None], band, 0.0).astype(jnp.float32).sum(axis=(0, 2))


_attend_alone.defvjp(_forward, _backward)


def _order(these: Slots, others: Slots, own: int, other: int, longest: int, *, flip: bool = False) -> Order:
    """Returns the blocks of `others` that each block of `these` visits.

    The order is determined from the smallest and largest coordinates of each block, so the visited blocks may also
    contain blocks without a visible pair.

    Args:
      these: the queries; with `flip`, the keys.
      others: the keys; with `flip`, the queries.
      own: the size of the blocks of `these`.
      other: the size of the blocks of `others`.
      longest: W; 0 without a bias.
      flip: whether `these` are the keys.
    """

    def parts(x: Array, slots: Slots, block: int) -> tuple[Array, Array]:
        """Returns the values [B, blocks, slots of a block], and whether each slot is real."""
        found = x.reshape(x.shape[0], -1, block)
        return found, slots.example.reshape(found.shape) >= 0

    def bounds(x: Array, y: Array) -> tuple[Array, Array, Array, Array]:
        """Returns the smallest and largest values of blocks of x, [B, blocks, 1], and of y, [B, 1, other blocks]."""
        found = []
        for slots, block, z in ((these, own, x), (others, other, y)):
            values, real = parts(z, slots, block)
            found += [jnp.where(real, values, NOWHERE).min(-1), jnp.where(real, values, -NOWHERE).max(-1)]
        return found[0][..., None], found[1][..., None], found[2][:, None], found[3][:, None]

    low, high, other_low, other_high = bounds(these.example, others.example)
    meet = (other_low <= high) & (low <= other_high)
    full, other_full = (
        parts(slots.example, slots, block)[1].all(-1) for slots, block in ((these, own), (others, other))
    )
    plain = full[..., None] & other_full[:, None] & (low == high) & (other_low == other_high) & (low == other_low)
    for x, y in ((these.row, others.row), (these.time, others.time)):
        if x is not None and y is not None:
            low, high, other_low, other_high = bounds(x, y)
            meet &= low <= other_high if flip else other_low <= high
            plain &= high <= other_low if flip else other_high <= low
    if these.group is not None and others.group is not None:
        low, high, other_low, other_high = bounds(these.group, others.group)
        least, most = (low, high) if flip else (other_low, other_high)  # of the keys
        meet &= (least == 0) | ((low <= other_high) & (other_low <= high))
        plain &= (most == 0) | ((low == high) & (low == other_low) & (low == other_high))
    if longest:
        low, high, other_low, other_high = bounds(these.position, others.position)
        ahead, behind = low - other_high >= longest, other_low - high >= longest  # with `flip`: the other way round
        ahead, behind = (plain & x for x in ((behind, ahead) if flip else (ahead, behind)))
    else:
        ahead, behind = plain, jnp.zeros_like(plain)
    numbers = jnp.arange(meet.shape[-1])

    def run(found: Array, empty: Array) -> tuple[Array, Array]:
        """Returns the first run of True along the last axis: its first block, and the block after it."""
        begin = jnp.argmax(found, axis=-1)
        ends = jnp.where(~found & (numbers > begin[..., None]), numbers, len(numbers)).min(-1)
        some = found.any(-1)
        return jnp.where(some, begin, empty), jnp.where(some, ends, empty)

    first, some = jnp.argmax(meet, axis=-1), meet.any(axis=-1)
    last = jnp.where(some, len(numbers) - jnp.argmax(meet[..., ::-1], axis=-1), 0)
    one, two = run(ahead, last), run(behind, last)
    is_first = one[0] <= two[0]
    earlier = [jnp.where(is_first, x, y) for x, y in zip(one, two, strict=True)]
    later = [jnp.where(is_first, y, x) for x, y in zip(one, two, strict=True)]
    return Order(*(x.astype(jnp.int32) for x in (first, *earlier, *later, last, is_first)))


def _call(
    kernel: Kernel, grid: tuple[int, ...], shapes: Shapes, sizes: TileSizes, *, begun: Array | None = None
) -> Callable[..., Any]:
    """Returns the `pallas_call` of a kernel.

    Args:
      kernel: the kernel.
      grid: the number of programs along each axis.
      shapes: the shapes and dtypes of the results.
      sizes: the sizes of the call.
      begun: the first argument, if the first result is this array with some of its elements replaced, in the memory of
        the array; otherwise None.
    """
    params, aliases = plgpu.CompilerParams(num_warps=4, num_stages=2), {} if begun is None else {0: 0}
    given: dict[str, Any] = {"input_output_aliases": aliases, "interpret": sizes.interpret}
    return pl.pallas_call(kernel, out_shape=shapes, grid=grid, compiler_params=params, **given)


def _visit(order: Order, example: Array, block: Array, add: Add, carry: tuple[Array, ...]) -> tuple[Array, ...]:
    """Calls `add` for each block of a program's order, first for plain blocks; returns the last carry.

    `add(number, side, carry)` gets the number of the block and, for a plain block, `side`: 1 if all differences of
    positions are W or more, 0 if all are -W or less; for other blocks None.
    """
    refs: Sequence[Ref] = order
    first, begin, end, next_begin, next_end, last, is_ahead = (plgpu.load(ref.at[example, block]) for ref in refs)

    def plain(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        is_earlier = i < end - begin
        number = jnp.where(is_earlier, begin + i, next_begin + i - (end - begin))
        return add(number, jnp.where(is_earlier, is_ahead, 1 - is_ahead), carry)

    def general(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        number = first + i
        number = jnp.where(number >= begin, number + (end - begin), number)
        return add(jnp.where(number >= next_begin, number + (next_end - next_begin), number), None, carry)

    count = end - begin + next_end - next_begin
    carry = jax.lax.fori_loop(0, count, plain, carry)
    return jax.lax.fori_loop(0, last - first - count, general, carry)


# In the kernels, `q` contains the indices of a block's queries, and `k` the indices of its keys. A tile is an array
# [q, k], or [k, q] if `down` is True.


def _of(slots: Slots, example: Array, places: Array) -> Slots:
    """Returns the coordinates [places] of the slots of an example."""
    return jax.tree.map(lambda ref: plgpu.load(ref.at[example, places]), slots)


def _apart(refs: Sequence[Ref], sizes: TileSizes) -> list[Heads]:
    """Returns the heads of queries, keys and values, or of their gradients.

    An array of `refs` may hold several of the three.
    """
    return [Heads(ref, first) for ref in refs for first in range(0, ref.shape[2], sizes.heads)]


def _rows(heads: Heads, example: Array, head: Array, places: Array, count: int) -> Array:
    """Returns the rows [places, K] of an array [B, N, heads, K]; zeros beyond N."""
    ref, first = heads
    at = ref.at[example, places[:, None], first + head, jnp.arange(ref.shape[3])[None]]
    return plgpu.load(at, mask=(places < count)[:, None], other=0)


def _entries(ref: Ref, example: Array, head: Array, places: Array, count: int) -> Array:
    """Returns the entries [places] of an array [B, H, N]; zeros beyond N."""
    return plgpu.load(ref.at[example, head, places], mask=places < count, other=0)


def _store_rows(heads: Heads, example: Array, head: Array, places: Array, count: int, x: Array) -> None:
    """Stores x, [places, K], to the rows of an array [B, N, heads, K]; skips rows beyond N."""
    ref, first = heads
    at = ref.at[example, places[:, None], first + head, jnp.arange(ref.shape[3])[None]]
    plgpu.store(at, x.astype(ref.dtype), mask=(places < count)[:, None])


def _dot(a: Array, b: Array, **transposed: bool) -> Array:
    """Returns the product of two blocks, accumulated in float32. Float32 blocks are not rounded to TF32."""
    return plgpu.dot(a, b, allow_tf32=False if a.dtype == jnp.float32 else None, **transposed)


def _across(of_queries: Array, of_keys: Array, *, down: bool = False) -> tuple[Array, Array]:
    """Returns vectors of queries and of keys with an additional axis each, so that both broadcast to a tile."""
    return (of_queries[None], of_keys[:, None]) if down else (of_queries[:, None], of_keys[None])


def _seen(of_queries: Slots, of_keys: Slots, *, down: bool = False) -> Array:
    """Returns a bool tile, the keys that each query sees (paper section 3.2, eq. 4); see `Slots`."""
    query, key = _across(of_queries.example, of_keys.example, down=down)
    seen = (query == key) & (key >= 0)
    for x, y in ((of_queries.row, of_keys.row), (of_queries.time, of_keys.time)):
        if x is not None and y is not None:
            query, key = _across(x, y, down=down)
            seen &= key <= query
    if of_queries.group is not None and of_keys.group is not None:
        seen &= shares_group(*_across(of_queries.group, of_keys.group, down=down))
    return seen


def _differences(facts: Facts, of_queries: Slots, of_keys: Slots, *, down: bool = False) -> Array:
    """Returns an i32 tile, the index of each pair's difference of positions in `Distances.bucket`."""
    query, key = _across(of_queries.position, of_keys.position, down=down)
    return jnp.clip(query - key + facts.longest, 0, 2 * facts.longest)


def _bias(facts: Facts, head: Array, of_queries: Slots, of_keys: Slots, side: Array | None, *, down: bool) -> Any:
    """Returns the bias of a tile, f32: a scalar for a plain block, otherwise a tile. `side` as in `_visit`."""
    if facts.lines is None:
        return 0.0
    if side is not None:
        return plgpu.load(facts.lines.at[head, side * (2 * facts.longest)])
    return plgpu.load(facts.lines.at[head, _differences(facts, of_queries, of_keys, down=down)])


def _left(
    facts: Facts, sizes: TileSizes, example: Array, head: Array, q: Array, k: Array, x: Array, *, down: bool = False
) -> Array:
    """Returns the tile x after dropout, without rescaling."""
    if facts.dropped is None:
        return x
    lines = jax.tree.map(lambda ref: _entries(ref, example, head, q, sizes.queries), facts.dropped)
    hashes, columns = _across(lines.hashes, k.astype(jnp.uint32), down=down)
    if lines.first is not None:
        columns = columns - _across(lines.first, k, down=down)[0]
    return jnp.where(dropout.keeps(hashes, columns, sizes.rate), x, 0.0)


def _attend(
    facts: Facts,
    order: Order,
    projections: tuple[Ref, ...],
    found_ref: Ref,
    sums_ref: Ref,
    *,
    sizes: TileSizes,
) -> None:
    """Computes the outputs of a block of queries, from all blocks of keys that they may see.

    The kernel also stores `sums`, f32 [B, H, Q], the logarithm of the softmax's denominator of each query (0 for a
    query that sees no key), with which the backward pass computes the weights again.
    """
    block, head, example = (pl.program_id(n) for n in range(3))
    q = block * sizes.own + jnp.arange(sizes.own)
    queries, keys, values = _apart(projections, sizes)
    query, here = _rows(queries, example, head, q, sizes.queries), _of(facts.queries, example, q)

    def add(number: Array, side: Array | None, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        highest, total, found = carry  # the maximum of the scores, the sum of their powers, the weighted sum of values
        k = number * sizes.other + jnp.arange(sizes.other)
        there = _of(facts.keys, example, k)
        scores = _dot(query, _rows(keys, example, head, k, sizes.keys), trans_b=True)
        scores += _bias(facts, head, here, there, side, down=False)
        seen = None if side is not None else _seen(here, there)
        scores = scores if seen is None else jnp.where(seen, scores, LOWEST)
        now = jnp.maximum(highest, scores.max(axis=1))
        weights, kept = jnp.exp(scores - now[:, None]), jnp.exp(highest - now)
        weights = weights if seen is None else jnp.where(seen, weights, 0.0)
        value = _rows(values, example, head, k, sizes.keys)
        left = _left(facts, sizes, example, head, q, k, weights).astype(value.dtype)
        return now, total * kept + weights.sum(axis=1), found * kept[:, None] + _dot(left, value)

    zero = jnp.full(sizes.own, LOWEST), jnp.zeros(sizes.own), jnp.zeros((sizes.own, sizes.width))
    highest, total, found = _visit(order, example, block, add, zero)
    some = jnp.where(total > 0, total, 1.0)  # `total` is 0 for a query that sees no key
    found = found / (some * dropout.share_kept(sizes.rate))[:, None]
    _store_rows(Heads(found_ref), example, head, q, sizes.queries, found)
    sums = jnp.where(total > 0, highest, 0.0) + jnp.log(some)
    plgpu.store(sums_ref.at[example, head, q], sums, mask=q < sizes.queries)


class QueryBlock(NamedTuple):
    """The data of a block of queries that the backward kernels read."""

    slots: Slots
    rows: Array  # [q, K], the queries
    gradient: Array  # [q, K], the gradient of the outputs
    sums: Array  # f32 [q], see `_attend`
    products: Array  # f32 [q], the term of the softmax's gradient that is subtracted from each row

    @classmethod
    def load(
        cls, facts: Facts, queries: Heads, refs: tuple[Ref, Ref, Ref], example: Array, head: Array, q: Array, count: int
    ) -> "QueryBlock":
        """Reads a block; `refs`: gradient, sums and products."""
        rows = (_rows(heads, example, head, q, count) for heads in (queries, Heads(refs[0])))
        entries = (_entries(ref, example, head, q, count) for ref in refs[1:])
        return cls(_of(facts.queries, example, q), *rows, *entries)


class KeyBlock(NamedTuple):
    """The data of a block of keys that the backward kernels read."""

    slots: Slots
    rows: Array  # [k, K], the keys
    values: Array  # [k, K]

    @classmethod
    def load(
        cls, facts: Facts, keys: Heads, values: Heads, example: Array, head: Array, k: Array, count: int
    ) -> "KeyBlock":
        """Reads a block."""
        rows = (_rows(heads, example, head, k, count) for heads in (keys, values))
        return cls(_of(facts.keys, example, k), *rows)


def _gradients(
    facts: Facts,
    sizes: TileSizes,
    at: tuple[Array, Array, Array, Array],
    queries: QueryBlock,
    keys: KeyBlock,
    side: Array | None,
    *,
    down: bool = False,
) -> tuple[Array, Array]:
    """Computes the weights of a tile again, and the gradient of its scores.

    Args:
      facts: the vectors of the call.
      sizes: the sizes of the call.
      at: the example, the head, and the indices `q` and `k`.
      queries: a block of queries.
      keys: a block of keys.
      side: as in `_visit`.
      down: whether tiles are [k, q].

    Returns:
      Two f32 tiles: the weights after dropout, and the gradient of the scores.
    """

    def product(of_queries: Array, of_keys: Array) -> Array:
        one, other = (of_keys, of_queries) if down else (of_queries, of_keys)
        return _dot(one, other, trans_b=True)

    def each(of_queries: Array) -> Array:
        return of_queries[None] if down else of_queries[:, None]

    example, head, q, k = at
    scores = product(queries.rows, keys.rows) + _bias(facts, head, queries.slots, keys.slots, side, down=down)
    weights = jnp.exp(scores - each(queries.sums))
    if side is None:
        weights = jnp.where(_seen(queries.slots, keys.slots, down=down), weights, 0.0)
    left = partial(_left, facts, sizes, example, head, q, k, down=down)
    share = dropout.share_kept(sizes.rate)
    d_weights = left(product(queries.gradient, keys.values)) / share
    return left(weights) / share, weights * (d_weights - each(queries.products))


def _beyond(facts: Facts, of_queries: Slots, of_keys: Slots) -> tuple[Array, Array]:
    """Returns whether all differences of positions of two blocks are -W or less, and whether all of them are W or more.

    In both cases all pairs of the blocks have one bucket.
    """
    query, key = of_queries.position, of_keys.position
    return query.max() - key.min() <= -facts.longest, query.min() - key.max() >= facts.longest


def _backward_queries(
    facts: Facts,
    order: Order,
    projections: tuple[Ref, ...],
    gradient_ref: Ref,
    sums_ref: Ref,
    found_ref: Ref,
    d_queries_ref: Ref,
    products_ref: Ref,
    beyond_ref: Ref,
    band_ref: Ref | None = None,
    *,
    sizes: TileSizes,
) -> None:
    """Computes the gradient of a block of queries.

    The kernel also stores `products`, f32 [B, H, Q], which the other kernels read: the sum over keys of a weight times
    its gradient, which equals the sum over channels of an output times its gradient.

    The kernel also stores the sums, f32 [B, H, 2, queries], of the scores' gradient over the keys whose differences are
    -W or less, and over the keys whose differences are W or more. Without a band, a block of keys counts only if one of
    these conditions holds for all differences of the block.

    The band, [B, H, queries, 2 W], gets the gradient of the scores at each difference d of -W < d < W, at index d + W.
    Differences without a key are not written.
    """
    block, head, example = (pl.program_id(n) for n in range(3))
    q = block * sizes.own + jnp.arange(sizes.own)
    of_queries, of_keys, of_values = _apart(projections, sizes)
    of_rows = of_queries, Heads(gradient_ref), Heads(found_ref)
    rows, gradient, found = (_rows(heads, example, head, q, sizes.queries) for heads in of_rows)
    products = (gradient.astype(jnp.float32) * found.astype(jnp.float32)).sum(axis=1)
    plgpu.store(products_ref.at[example, head, q], products, mask=q < sizes.queries)
    before = _entries(sums_ref, example, head, q, sizes.queries)
    queries = QueryBlock(_of(facts.queries, example, q), rows, gradient, before, products)

    def add(number: Array, side: Array | None, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        d_query, *sums = carry
        k = number * sizes.other + jnp.arange(sizes.other)
        keys = KeyBlock.load(facts, of_keys, of_values, example, head, k, sizes.keys)
        d_scores = _gradients(facts, sizes, (example, head, q, k), queries, keys, side)[1]
        if sums and side is not None:
            row = d_scores.sum(axis=1)
            sums = [sums[0] + jnp.where(side == 0, row, 0.0), sums[1] + jnp.where(side == 1, row, 0.0)]
        elif sums and band_ref is not None:
            apart = queries.slots.position[:, None] - keys.slots.position[None]
            at = band_ref.at[example, head, q[:, None], apart + facts.longest]
            inside = (apart > -facts.longest) & (apart < facts.longest)
            plgpu.store(at, d_scores.astype(band_ref.dtype), mask=inside)
            outside = (apart <= -facts.longest, apart >= facts.longest)
            sums = [x + jnp.where(is_so, d_scores, 0.0).sum(axis=1) for x, is_so in zip(sums, outside, strict=True)]
        elif sums:
            row = d_scores.sum(axis=1)
            beyond = _beyond(facts, queries.slots, keys.slots)
            sums = [total + jnp.where(is_so, row, 0.0) for total, is_so in zip(sums, beyond, strict=True)]
        return d_query + _dot(d_scores.astype(keys.rows.dtype), keys.rows), *sums

    none = [jnp.zeros(sizes.own)] * (2 if facts.longest else 0)
    d_query, *sums = _visit(order, example, block, add, (jnp.zeros((sizes.own, sizes.width)), *none))
    _store_rows(Heads(d_queries_ref), example, head, q, sizes.queries, d_query)
    for number, total in enumerate(sums):
        plgpu.store(beyond_ref.at[example, head, jnp.int32(number), q], total)


def _backward_buckets(
    facts: Facts,
    order: Order,
    projections: tuple[Ref, ...],
    gradient_ref: Ref,
    sums_ref: Ref,
    products_ref: Ref,
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
    of_queries, of_keys, of_values = _apart(projections, sizes)
    refs = gradient_ref, sums_ref, products_ref
    queries = QueryBlock.load(facts, of_queries, refs, example, head, q, sizes.queries)

    def add(number: Array, side: Array | None, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        if side is not None:
            return sums
        k = number * sizes.other + jnp.arange(sizes.other)
        there = _of(facts.keys, example, k)
        behind, ahead = _beyond(facts, queries.slots, there)
        bucket = plgpu.load(facts.bucket.at[_differences(facts, queries.slots, there)]) - least
        own = jnp.where((bucket >= 0) & (bucket < GROUP), 1, 0).max() > 0

        def near() -> tuple[Array, ...]:
            keys = KeyBlock.load(facts, of_keys, of_values, example, head, k, sizes.keys)
            d_scores = _gradients(facts, sizes, (example, head, q, k), queries, keys, None)[1]
            return tuple(total + jnp.where(bucket == n, d_scores, 0.0).sum(axis=1) for n, total in enumerate(sums))

        return jax.lax.cond(behind | ahead | ~own, lambda: sums, near)

    none = tuple(jnp.zeros(sizes.own) for _ in range(GROUP))
    for number, total in enumerate(_visit(order, example, block, add, none)):
        plgpu.store(of_buckets_ref.at[example, head, least + number, q], total)


def _backward_keys(
    begun: Ref | None,
    facts: Facts,
    order: Order,
    projections: tuple[Ref, ...],
    gradient_ref: Ref,
    sums_ref: Ref,
    products_ref: Ref,
    *d_refs: Ref,
    sizes: TileSizes,
) -> None:
    """Computes the gradients of a block of keys and of its values, from all blocks of queries that may see them.

    Tiles are [k, q] here, so both sums are products with a tile on the left, and no tile is transposed in registers.
    If one array holds queries, keys and values, the only one of `d_refs` is `begun`, with the gradient of the queries.
    """
    block, head, example = (pl.program_id(n) for n in range(3))
    k = block * sizes.own + jnp.arange(sizes.own)
    of_queries, of_keys, of_values = _apart(projections, sizes)
    keys = KeyBlock.load(facts, of_keys, of_values, example, head, k, sizes.keys)
    refs = gradient_ref, sums_ref, products_ref

    def add(number: Array, side: Array | None, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        d_key, d_value = carry
        q = number * sizes.other + jnp.arange(sizes.other)
        queries = QueryBlock.load(facts, of_queries, refs, example, head, q, sizes.queries)
        left, d_scores = _gradients(facts, sizes, (example, head, q, k), queries, keys, side, down=True)
        d_value += _dot(left.astype(queries.gradient.dtype), queries.gradient)
        return d_key + _dot(d_scores.astype(queries.rows.dtype), queries.rows), d_value

    zero = jnp.zeros((sizes.own, sizes.width))
    sums = _visit(order, example, block, add, (zero, zero))
    for heads, x in zip(_apart(d_refs, sizes)[-2:], sums, strict=True):
        _store_rows(heads, example, head, k, sizes.keys, x)
