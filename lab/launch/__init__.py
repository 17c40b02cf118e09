"""A prototype that decodes on an NVIDIA GPU in one launch of a kernel, which makes all steps of the answer (decode.h).

XLA starts about 170 kernels for a step, and waits for the host between them. Here all multiprocessors make a step
together. The arithmetic, caches and carry are the same as in `step_decoder`. Tests run the same source on a CPU, with
one thread for each block.

No GPU has run the kernel. From the count of its instructions, a step of T5-Base takes 0.55 to 0.7 ms, which is not
faster than XLA's kernels. The kernel can move to the package if a GPU needs at most 0.45 ms for a step of T5-Base with
9 queries.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lab.launch import nvrtc
from pipejax import decoding
from pipejax.decoding import GREEDILY, Carry, DecodingOptions, Pipelined, RowState, Segment, Sequential, Sizes, Stepper
from pipejax.decoding.gathering import Filled
from pipejax.decoding.times import NEVER
from pipejax.inference.step_decoder import Cache
from pipejax.inference.weights import Matrix
from pipejax.model import lora
from pipejax.model.backbone import Module
from pipejax.model.t5 import Memory
from pipejax.system import Tree

Array = jax.Array
ACTIVATIONS = ("relu", "gated-gelu", "gated-silu")  # in the order of their numbers in arguments.h
MOST_QUERIES, MOST_POINTERS, WIDEST_HEAD, MOST_ENDS = 256, 400, 128, 8  # as in arguments.h
# The first members of the structs in arguments.h.
EXAMPLE, ROW = ("time", "started", "complete", "done"), ("last", "end", "retired")
PARTS = 8  # parts of the vocabulary in the search for a query's highest logit


class LaunchBlocks(NamedTuple):
    """The blocks that make the steps of a decode together. Static under jit."""

    number: int  # the number of blocks, which must all run at the same time
    architecture: str  # the architecture of the GPU, such as "90"; "": threads of a CPU
    patience: int = 2000  # milliseconds for which a block waits for the others before all blocks end
    absent: int = -1  # for tests: a block that never arrives at a barrier
    dawdle: int = 0  # for tests: the largest delay of a block in microseconds


def fits(decoder: Any, strategy: Stepper, batch: int, options: DecodingOptions) -> bool:
    """Whether the kernel supports a decode: greedy, pipelined or sequential, with sizes that fill its tiles."""
    config, weights = decoder.config, decoder.weights
    matrices = [weights.head, *(x for layer in weights.layers for x in vars(layer).values() if isinstance(x, Matrix))]
    return (
        type(strategy) in (Pipelined, Sequential)
        and strategy.drafts is None  # type: ignore[attr-defined]
        and not (jax.tree.leaves((options, decoder.memory.adapter)) or options.scores or strategy.unique)  # type: ignore[attr-defined]
        and batch * strategy.most_queries <= MOST_QUERIES
        and len(decoding.ends_of(strategy)) <= MOST_ENDS
        and not any(x % 32 for x in (config.d_model, config.d_ff, config.num_heads * config.d_kv))
        and config.d_kv <= WIDEST_HEAD
        and len(weights.bias) == 1  # one bias for all layers
        and 31 + 15 * config.num_decoder_layers <= MOST_POINTERS
        and all(x.rows.dtype == decoder.dtype for x in matrices)
    )


def decode(
    decoder: Any,
    strategy: Any,
    carry: Carry,
    *,
    sizes: Sizes,
    slots: int,
    blocks: LaunchBlocks,
    pause_after: Array | None = None,
    watched: Array | None = None,
) -> tuple[Segment, Array, Array]:
    """Decodes as `decoding.decode` does.

    Returns:
      The stretch; whether a block waited too long, bool scalar, in which case the other results are invalid; and the
      logits f32 [N, V] of the last step.
    """
    carry = decoding.grow(decoder, carry, slots)
    weights, memory, query = decoder.weights, decoder.memory, carry.query
    numbers = numbers_of(decoder, strategy, carry, sizes=sizes, slots=slots, blocks=blocks)
    floats = decoder.config.layer_norm_epsilon, decoder.config.d_model**-0.5 if decoder.config.scale_head else 1.0
    watching = jnp.zeros(numbers["B"]) if watched is None else watched
    left = jnp.int32(NEVER) if pause_after is None else pause_after
    # In the order of the structs Given and Layer.
    arrays = [
        np.hstack([*numbers.values()]).astype(np.int32),
        np.asarray(floats, np.float32),
        watching.astype(jnp.int32),
    ]
    arrays += [memory.mask.astype(jnp.int32), (weights.embedding or weights.head).rows, weights.head.rows]
    arrays += [weights.norm, weights.bias[0]]
    changing = _changing(strategy, carry, left)
    aliases = {len(arrays) + i: i for i in range(len(changing))}
    arrays += changing
    for i, layer in enumerate(weights.layers):
        arrays += [x.rows if isinstance(x, Matrix) else x for x in vars(layer).values()]
        arrays += [memory.keys[i], memory.values[i], carry.cache.keys[i], carry.cache.values[i]]
        aliases |= {len(arrays) - 2: len(aliases), len(arrays) - 1: len(aliases) + 1}
    scratch = _scratch(numbers, decoder.dtype)
    found = _enqueue(arrays, [*scratch.values()], aliases, jnp.dtype(decoder.dtype).name, blocks)
    control, examples, grids, tokens, filled_row, filled_time = found[: len(changing)]
    caches, kept = found[len(changing) : len(aliases)], dict(zip(scratch, found[len(aliases) :], strict=True))
    state, (live, fed, time) = _off_grid(strategy, examples, grids, tokens), jnp.moveaxis(grids, 2, 0)[-3:]
    carry = dataclasses.replace(
        carry,
        state=state,
        query=dataclasses.replace(query, live=live > 0, tokens=fed, time=time),
        size=sum(((live.sum() > n).astype(jnp.int32) for n in sizes.query_counts[:-1]), jnp.int32(0)),
        used=examples[: len(carry.used), -1],
        filled=Filled(filled_row, filled_time),
        cache=Cache(tuple(caches[::2]), tuple(caches[1::2])),
    )
    over = strategy.done(state).all()
    return Segment(over, strategy.result(state), carry, control[3]), control[1] > 0, kept["logits"]


def decode_batch(
    model: Module,
    strategy: Any,
    weights: Tree,
    memory: Memory,
    *,
    sizes: Sizes,
    slots: int,
    backend: Any,
    blocks: LaunchBlocks,
) -> tuple[Segment, Array]:
    """Decodes as `programs.decode_batch`, in one launch; returns the stretch, and whether a block waited too long."""
    decoder = backend.decoder(model, lora.choose(weights, memory.adapter), memory)
    batch = len(memory.mask)
    assert fits(decoder, strategy, batch, GREEDILY), "the kernel does not support this decode"
    carry = decoding.begin(strategy, decoder, strategy.init(batch), sizes)
    return decode(decoder, strategy, carry, sizes=sizes, slots=slots, blocks=blocks)[:2]


def numbers_of(
    decoder: Any, strategy: Any, carry: Carry, *, sizes: Sizes, slots: int, blocks: LaunchBlocks
) -> dict[str, Any]:
    """The members of the struct Numbers, in its order; a tuple for the array."""
    config, grid, rows = decoder.config, strategy, strategy.most_queries
    batch, length = decoder.memory.mask.shape
    lengths = batch, rows, grid.time_max, slots, length
    widths = config.d_model, config.num_heads, config.d_kv, config.d_ff, config.vocab_size
    shapes = dict(zip("BRTCLDHKFV", lengths + widths, strict=True))
    layers = {"distances": decoder.weights.bias.shape[2], "layers": len(decoder.weights.layers)}
    layers |= {"activation": ACTIVATIONS.index(config.feed_forward)}
    rules: dict[str, Any] = {name: int(getattr(grid, name)) for name in ("delay", "sub_max", "literal", "bos")}
    ends = decoding.ends_of(grid)
    rules |= {"ends": ends + ends[:1] * (MOST_ENDS - len(ends))}
    room = {"apart": int(len(carry.used) > 1), "limit": slots - min(sizes.query_counts[-1], rows), "parts": PARTS}
    waits = {"patience": blocks.patience, "absent": blocks.absent, "dawdle": blocks.dawdle}
    return shapes | layers | rules | room | waits


def _changing(strategy: Any, carry: Carry, left: Array) -> list[Array]:
    """The members of the struct Given that the kernel changes: `control` and all later ones."""
    of_example, of_row, tokens = _on_grid(strategy, carry.state)
    of_example.append(jnp.broadcast_to(carry.used, len(tokens)))
    of_row += [carry.query.live, carry.query.tokens, carry.query.time]
    stacked = [*[jnp.int32(0)] * 3, left], of_example, of_row
    structs = [jnp.stack([x.astype(jnp.int32) for x in each], axis=-1) for each in stacked]
    return [*structs, tokens, carry.filled.row, carry.filled.time]


def _scratch(numbers: dict[str, Any], dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The members of the struct Scratch, in its order."""
    batch, queries, inner = numbers["B"], numbers["B"] * numbers["R"], numbers["H"] * numbers["K"]
    widths = {"x": numbers["D"], "query": inner, "found": inner, "hidden": numbers["F"]}
    arrays = {name: (queries, width) for name, width in widths.items()}
    floats = {"squares": (queries, -(-numbers["D"] // 8)), "logits": (queries, numbers["V"]), "best": (queries, PARTS)}
    wholes = {"best_token": (queries * PARTS,), "asked": (queries * 5,), "first": (batch + 1,), "reach": (batch,)}
    kinds = (arrays, dtype), (floats, jnp.float32), (wholes, jnp.int32)
    return {name: jax.ShapeDtypeStruct(x, kind) for shapes, kind in kinds for name, x in shapes.items()}


def _on_grid(strategy: Any, state: RowState) -> tuple[list[Array], list[Array], Array]:
    """The arrays of EXAMPLE and ROW, and the tokens i32 [B, R, T + 1] by the time-steps that generate them."""
    newest, is_open = strategy.first + state.length, strategy.find_open(state)
    steps = strategy.result(state).steps
    time = jnp.where(is_open.any(axis=1), jnp.where(is_open, newest, NEVER).min(axis=1), steps)
    complete = (state.ended & (state.length == 1)).any(axis=1)
    of_example = [time, state.started, complete, state.done]
    of_row = [state.last, jnp.where(state.ended, newest, NEVER), state.retired]
    at = jnp.arange(strategy.time_max + 1) - strategy.first[:, None] - 1
    tokens = jnp.take_along_axis(state.tokens, jnp.clip(at, 0, strategy.time_max - 1)[None], axis=2)
    return of_example, of_row, tokens


def _off_grid(strategy: Any, examples: Array, grids: Array, tokens: Array) -> RowState:
    """The state of rows from the arrays of the kernel."""
    found = dict(zip(EXAMPLE + ROW, [*jnp.moveaxis(examples, 1, 0)[:-1], *jnp.moveaxis(grids, 2, 0)[:-3]], strict=True))
    first, ended = strategy.first, found["end"] != NEVER
    until = jnp.where(ended, found["end"], found["time"][:, None])
    started = jnp.arange(strategy.rows) < found["started"][:, None]
    at = jnp.minimum(first[:, None] + 1 + jnp.arange(strategy.time_max), strategy.time_max)
    return RowState(
        tokens=jnp.take_along_axis(tokens, at[None], axis=2),
        length=jnp.where(started, until - first, 0),
        last=jnp.where(started, found["last"], strategy.bos),
        ended=ended,
        retired=found["retired"] > 0,
        started=found["started"],
        done=found["done"] > 0,
    )


def _enqueue(
    arrays: list[Any], scratch: list[Any], aliases: dict[int, int], dtype: str, blocks: LaunchBlocks
) -> list[Array]:
    """Starts the kernel, on a GPU by XLA's call of PTX; returns the arrays that it changes, then scratch."""
    results = [*(jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in aliases), *scratch]
    target, static = f"pipejax_launch_{dtype}", dict[str, Any](blocks=np.int32(blocks.number))
    if blocks.architecture:
        code = nvrtc.ptx(len(arrays) + len(results), len(scratch), blocks.architecture)
        sizes = dict.fromkeys(("grid_y", "grid_z", "block_y", "block_z"), 1)
        sizes |= {"grid_x": blocks.number, "block_x": nvrtc.THREADS, "shared_mem_bytes": 0}
        static = {name: np.int32(x) for name, x in sizes.items()}
        target, static = "__gpu$xla.gpu.ptx", static | {"name": nvrtc.NAME, "kernel_type": "ptx", "kernel_data": code}
    return list(jax.ffi.ffi_call(target, results, input_output_aliases=aliases)(*arrays, **static))
