"""A decode on an NVIDIA GPU as one launch: a kernel that takes step after step by itself (decode.h).

XLA's loop starts some 170 kernels a step, and waits for the host in between. Here all multiprocessors go through a step
together, the strategy's part included. The arithmetic is that of `step_decoder`, caches and carry are as they are there,
and a decode may go on with either. Tests run the same source on a CPU, a thread a block.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pipejax import decoding
from pipejax.decoding import Carry, Pipelined, Sequential, Sizes, Stepper, Stretch, Wishes, pipelined, sequential
from pipejax.decoding.gathering import Filled
from pipejax.inference.launch import nvrtc
from pipejax.inference.step_decoder import Cache, StepDecoder
from pipejax.inference.weights import Matrix

Array = jax.Array
State = pipelined.State | sequential.State
ACTIVATIONS = ("relu", "gated-gelu", "gated-silu")  # by their numbers in arguments.h
MOST_QUERIES, MOST_POINTERS, WIDEST_HEAD = 256, 400, 128  # as there
EXAMPLE, ROW = ("time", "started", "complete", "done", "steps"), ("last", "end", "retired")  # begin the structs there
PARTS = 8  # of the vocabulary, in the search for a query's highest logit
UNBOUNDED = 2**30  # steps, where a decode does not pause


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks that go through a decode together. Static under jit."""

    count: int  # as many as run at the same time
    architecture: str  # of the GPU: "90"; "": they are a CPU's threads
    patience: int = 2000  # milliseconds that one waits for the others until all give up
    absent: int = -1  # one that never comes, for tests
    dawdle: int = 0  # microseconds that a block is late at most, at random, for tests


def fits(decoder: StepDecoder, strategy: Stepper, batch: int, wishes: Wishes) -> bool:
    """Whether the kernel knows such a decode: greedy, on the paper's grid or sequential, in sizes that fill its tiles."""
    config, weights = decoder.config, decoder.weights
    matrices = [weights.head, *(x for layer in weights.layers for x in vars(layer).values() if isinstance(x, Matrix))]
    return (
        type(strategy) in (Pipelined, Sequential)
        and not getattr(strategy, "unique", False)
        and not jax.tree.leaves(wishes)
        and not wishes.scores
        and batch * strategy.most_queries <= MOST_QUERIES
        and not any(x % 32 for x in (config.d_model, config.d_ff, config.num_heads * config.d_kv))
        and config.d_kv <= WIDEST_HEAD
        and 31 + 15 * config.num_decoder_layers <= MOST_POINTERS
        and decoder.memory.adapter is None
        and all(x.rows.dtype == decoder.dtype for x in matrices)
    )


def decode(
    decoder: StepDecoder,
    strategy: Pipelined | Sequential,
    carry: Carry,
    *,
    sizes: Sizes,
    slots: int,
    blocks: Blocks,
    pause_after: Array | None = None,
    watched: Array | None = None,
) -> tuple[Stretch, Array]:
    """As `decoding.decode`; beside the stretch the logits f32 [N, V] of its last step.

    The stretch `failed` if a block waited in vain for the others: then nothing else in it means anything.
    """
    carry = decoding.grow(decoder, carry, slots)
    config, w, memory, query = decoder.config, decoder.weights, decoder.memory, carry.query
    (batch, length), rows, grid, state = (
        memory.mask.shape,
        strategy.most_queries,
        strategy.on_grid,
        _on_grid(carry.state),
    )
    most, inner, apart = batch * rows, config.num_heads * config.d_kv, len(carry.used) > 1
    numbers = (
        *(batch, rows, grid.time_max, slots, length, config.d_model, config.num_heads, config.d_kv, config.d_ff),
        *(config.vocab_size, w.bias.shape[1], len(w.layers), ACTIVATIONS.index(config.feed_forward)),
        *(
            grid.delay,
            grid.sub_max,
            grid.literal,
            grid.bos,
            grid.eos,
            apart,
            slots - min(sizes.queries[-1], rows),
            PARTS,
        ),
        *(blocks.patience, blocks.absent, blocks.dawdle),
    )
    floats = config.layer_norm_epsilon, config.d_model**-0.5 if config.scale_head else 1.0
    none, left = jnp.int32(0), jnp.int32(UNBOUNDED) if pause_after is None else pause_after
    of_example = *(getattr(state, x) for x in EXAMPLE), jnp.broadcast_to(carry.used, batch)
    of_row = *(getattr(state, x) for x in ROW), query.live, query.tokens, query.time
    arrays = [
        np.asarray(numbers, np.int32),
        np.asarray(floats, np.float32),
        jnp.zeros(batch, jnp.int32) if watched is None else watched.astype(jnp.int32),
        memory.mask.astype(jnp.int32),
        *(x.rows for x in (w.embedding or w.head, w.head)),
        *(w.norm, w.bias),
    ]
    changing = [jnp.stack([none, none, none, left])]
    changing += [jnp.stack([x.astype(jnp.int32) for x in of], axis=-1) for of in (of_example, of_row)]
    changing += [state.tokens, carry.filled.row, carry.filled.time]
    aliases = {len(arrays) + i: i for i in range(len(changing))}
    arrays += changing
    for i, layer in enumerate(w.layers):
        arrays += [x.rows if isinstance(x, Matrix) else x for x in vars(layer).values()]
        arrays += [memory.keys[i], memory.values[i], carry.cache.keys[i], carry.cache.values[i]]
        aliases |= {len(arrays) - 2: len(aliases), len(arrays) - 1: len(aliases) + 1}
    scratch = [
        *(jax.ShapeDtypeStruct((most, x), decoder.dtype) for x in (config.d_model, inner, inner, config.d_ff)),
        *(jax.ShapeDtypeStruct((most, x), jnp.float32) for x in (-(-config.d_model // 8), config.vocab_size, PARTS)),
        *(jax.ShapeDtypeStruct((n,), jnp.int32) for n in (most * PARTS, most * 5, batch + 1, batch)),
    ]
    found = _enqueue(arrays, scratch, aliases, decoder.dtype, blocks)
    control, of_example, of_row, tokens, filled_row, filled_time = found[: len(changing)]
    caches, logits = found[len(changing) : -len(scratch)], found[-len(scratch) + 5]
    by_name = {x: of_example[:, i] for i, x in enumerate(EXAMPLE)} | {x: of_row[:, :, i] for i, x in enumerate(ROW)}
    state = _off_grid(pipelined.State(tokens=tokens, **by_name), carry.state)
    live, fed, time = (of_row[:, :, len(ROW) + i] for i in range(3))
    carry = dataclasses.replace(
        carry,
        state=state,
        query=dataclasses.replace(query, live=live > 0, tokens=fed, time=time),
        size=sum(((live.sum() > n).astype(jnp.int32) for n in sizes.queries[:-1]), jnp.int32(0)),
        used=of_example[: len(carry.used), -1],
        filled=Filled(filled_row, filled_time),
        cache=Cache(tuple(caches[::2]), tuple(caches[1::2])),
    )
    over, left = strategy.done(state).all(), None if pause_after is None else control[3]
    return Stretch(over, strategy.result(state), carry, left, failed=control[1] > 0), logits


def _on_grid(state: State) -> pipelined.State:
    """The state of a sequential decode as that of the only row of a grid."""
    if isinstance(state, pipelined.State):
        return state
    end, time = jnp.where(state.ended, state.length, pipelined.NEVER), state.length
    done = state.ended | state.given_up | (time >= state.tokens.shape[1])
    return pipelined.State(
        time=time,
        tokens=jnp.pad(state.tokens, ((0, 0), (1, 0)))[:, None],
        last=state.last[:, None],
        started=jnp.ones_like(time),
        end=end[:, None],
        retired=jnp.zeros((len(time), 1), bool),
        complete=state.ended,
        done=done,
        steps=time,
    )


def _off_grid(state: pipelined.State, old: State) -> State:
    """The state as one of the kind of the old one, with numbers as booleans again."""
    if isinstance(old, pipelined.State):
        return jax.tree.map(lambda new, old: new.astype(old.dtype), state, old)
    ended = state.end[:, 0] != pipelined.NEVER
    return sequential.State(state.tokens[:, 0, 1:], state.last[:, 0], state.steps, ended, old.given_up)


def _enqueue(
    arrays: list[Array | np.ndarray],
    scratch: list[jax.ShapeDtypeStruct],
    aliases: dict[int, int],
    dtype: jnp.dtype,
    blocks: Blocks,
) -> list[Array]:
    """The results of the kernel: arrays that it changes, then scratch. On a GPU by XLA's own call of PTX."""
    results = [*(jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in aliases), *scratch]
    if not blocks.architecture:
        call = jax.ffi.ffi_call(f"pipejax_launch_{jnp.dtype(dtype).name}", results, input_output_aliases=aliases)
        return list(call(*arrays, blocks=np.int32(blocks.count)))
    call = jax.ffi.ffi_call("__gpu$xla.gpu.ptx", results, input_output_aliases=aliases)
    sizes = {"grid_x": blocks.count, "block_x": 256, "shared_mem_bytes": 0}
    sizes |= {f"{x}_{axis}": 1 for x in ("grid", "block") for axis in "yz"}
    code = nvrtc.ptx(len(arrays) + len(results), len(scratch), blocks.architecture)
    static = {"name": nvrtc.NAME, "kernel_type": "ptx", "kernel_data": code}
    return list(call(*arrays, **static, **{name: np.int32(x) for name, x in sizes.items()}))
