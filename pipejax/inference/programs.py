"""The only place where a backbone meets a decoding strategy: what runs on devices when texts are decoded.

Shapes: B batch, L source length (a bucket), E devices.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax import decoding
from pipejax.data.shapes import bucket, pad
from pipejax.decoding import GREEDILY, QUERIES, Carry, Decoded, Sizes, SourceIds, Stepper, Strategy, Stretch, Wishes
from pipejax.inference.backends import XLA, Backend, Ready, call_costs
from pipejax.inference.report import Report
from pipejax.model import lora
from pipejax.model.interface import Backbone, Module, choose_blocks
from pipejax.model.precision import precision
from pipejax.model.t5 import Memory
from pipejax.system import Tree

logger = logging.getLogger(__name__)

SLOTS = (160, *(448 << i for i in range(16)))  # of the cache, as it grows
# A GPU's loop runs on the host, which waits for all kernels of a turn to read whether there is another: at batch 1 half
# as long as a step of T5-Base takes. More steps in a turn save more of it, and at the end of a decode more of them are
# taken for nothing; answers of 10 to 30 steps are decoded the fastest with about four. A CPU's loop reads its condition
# for nothing, and so does a TPU's, which runs on the device.
TURNS = {"gpu": 4, "cuda": 4}
# Larger batches are slower on a CPU. Eight already share the reading of the weights, while attention is computed for
# the example with the most live rows, and all steps for the one with the longest answer.
CPU_BATCH = 8


def devices() -> list[jax.Device]:
    """Those that decode by themselves: all of this process, but one of a CPU's, since they share its cores."""
    here = jax.local_devices()
    return here[:1] if here[0].platform == "cpu" else here


def schedule(strategy: Stepper, batch: int, platform: str = "") -> Sizes:
    """The sizes that a decode goes through there ("": here): a program a number of slots, a loop a number of queries.

    On a CPU every row costs; on other devices rows are nearly free, and what costs is another loop.
    """
    platform = platform or jax.default_backend()
    on_cpu = platform == "cpu"
    queries = (QUERIES if on_cpu else ()) if strategy.queries is None else strategy.queries
    # A small model's draft is a loop inside each step, and its cache is part of the state, which a turn would copy.
    turn = 1 if strategy.borrows else TURNS.get(platform, 1)
    return Sizes.fit(strategy, batch, queries=queries, slots=SLOTS if on_cpu else SLOTS[1:], turn=turn)


def encode_batch(
    model: Module,
    encoder: Tree,
    source: jax.Array,
    length: jax.Array,
    adapter: jax.Array | None = None,
    *,
    backend: Backend = XLA,
) -> Memory:
    """The memory of sources i32 [B, L] with `length` and `adapter` i32 [B]; model and backend are static."""
    memory = backend.encode(model, lora.choose(encoder, adapter), source, length)
    return memory if adapter is None else dataclasses.replace(memory, adapter=adapter)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """The module of a small model that drafts for another one, with its backend. Static under jit."""

    model: Module
    backend: Backend

    def lend(self, strategy: Strategy, weights: Tree, source: SourceIds) -> Strategy:
        """The strategy with the decoder of a batch; traced."""
        return strategy.lend(self.backend.decoder(self.model, weights, source.memory), len(source.ids))


def decode_batch(
    model: Module,
    strategy: Strategy,
    weights: Tree,
    memory: Memory,
    carry: Carry | None,
    source: SourceIds | None = None,
    wishes: Wishes = GREEDILY,
    *,
    sizes: Sizes,
    slots: int,
    backend: Backend = XLA,
    drafting: Drafting | None = None,
) -> Stretch:
    """A stretch of `decoding.run` for an encoded batch, the first if carry is None; what is no array is static."""
    if drafting:
        weights, small = weights
        assert source is not None
        strategy = drafting.lend(strategy, small, source)
    decoder = backend.decoder(model, lora.choose(weights, memory.adapter), memory)
    carry = carry or decoding.begin(strategy, decoder, strategy.init(len(memory.mask), source), sizes, wishes=wishes)
    return decoding.decode(strategy, decoder, carry, sizes=sizes, slots=slots, wishes=wishes)


class Programs:
    """A backbone's encoder and decoders over batches of token ids, compiled as they are needed.

    Several devices decode a batch each and know nothing of each other: all arrays but the weights have a first axis, of
    the devices, and no computation crosses it.
    """

    def __init__(
        self, config: Backbone, dtype: jnp.dtype, *, devices: Sequence[jax.Device], backend: Backend = XLA
    ) -> None:
        """Nothing compiles yet."""
        self.config, self.devices = config, list(devices)
        blocks = choose_blocks(config, self.devices[0])  # for the encoder
        self.model = config.module(dtype=dtype, **({"blocks": blocks} if blocks else {}))
        self.backend = backend
        self.small: Programs | None = None  # of the model that drafts
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._copies: dict[jax.Device, Ready] = {}
        self._placed: dict[int, Ready] = {}

    def set_params(self, params: Tree) -> None:
        """Other weights of the same architecture, of this process or laid over the devices of several."""
        of_first = jax.tree.leaves(params)[0]
        is_sharded = isinstance(of_first, jax.Array) and isinstance(of_first.sharding, NamedSharding)
        everywhere = NamedSharding(of_first.sharding.mesh, P()) if is_sharded else None

        def compute(function: Callable[..., Any], tree: Tree, **static: Any) -> Any:
            jitted = jax.jit(function, static_argnames=tuple(static), out_shardings=everywhere)
            with precision(self.model.dtype):
                return jax.block_until_ready(jitted(tree, **static))

        self._ready = self.backend.prepare(self.model, params, compute=compute)
        self._call_costs = call_costs(self._ready.decoding, self.backend)
        self._forget_copies()

    def suit(self, strategy: Strategy) -> Strategy:
        """The strategy as it is the fastest with these weights on these devices."""
        platform, fillers = self.devices[0].platform, self.backend.skips_fillers
        return strategy.suit(platform, costs=self._call_costs, skips_fillers=fillers)

    def forget_params(self) -> None:
        """Gives their memory back, until `set_params`; what was compiled stays."""
        del self._ready
        self._forget_copies()

    def _forget_copies(self) -> None:
        self._copies.clear()
        self._placed.clear()

    def decode(
        self,
        sources: Sequence[Sequence[int]],
        strategy: Strategy,
        *,
        batch_size: int,
        across: int,
        report: Report,
        wishes: Wishes = GREEDILY,
        adapter: int | None = None,
    ) -> Decoded:
        """Decodes at most `across` x `batch_size` sources on `across` devices; adds to the report's seconds.

        Wishes and results [E * B, ...] are NumPy's; copies of the last source fill the batch up.
        """
        strategy = self.suit(strategy)
        filled = [*sources, *[sources[-1]] * (across * batch_size - len(sources))]
        lengths = np.asarray([len(s) for s in filled], np.int32)
        source = pad([np.asarray(s, np.int32) for s in filled], bucket(int(lengths.max())))
        source, lengths = source.reshape(across, batch_size, -1), lengths.reshape(across, batch_size)
        begun, compiled = time.perf_counter(), report.compile_seconds
        weights, memory, read = self._encode(Programs._run, strategy, source, lengths, adapter, report)
        shape, sizes = memory.mask.shape, schedule(strategy, batch_size)
        numbers = np.minimum(np.arange(across * batch_size), len(sources) - 1).reshape(across, batch_size)
        wishes = wishes.take(numbers)

        def decode_stretch(slots: int, carry: Carry | None) -> Stretch:
            found: Stretch = self._run(strategy, slots, (weights, memory, carry, read, wishes), shape, report)
            return found

        decoded: Decoded = jax.device_get(decoding.run(decode_stretch, sizes).decoded)
        report.seconds += time.perf_counter() - begun - (report.compile_seconds - compiled)
        decoded = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), decoded)
        return decoded if decoded.calls is not None else dataclasses.replace(decoded, calls=strategy.calls(decoded))

    def warm_up(
        self,
        strategy: Strategy,
        *,
        batch_size: int,
        length: int,
        report: Report,
        wishes: Wishes = GREEDILY,
        adapter: int | None = None,
    ) -> None:
        """Compiles all that batches of a size may need."""
        strategy = self.suit(strategy)
        source, lengths = np.zeros((1, batch_size, bucket(length)), np.int32), np.ones((1, batch_size), np.int32)
        weights, memory, read = self._encode(Programs._find, strategy, source, lengths, adapter, report)
        carry = None
        for slots in schedule(strategy, batch_size).slots:
            arguments = weights, memory, carry, read, jax.tree.map(lambda x: x[None], wishes)
            carry = self._find(strategy, slots, arguments, memory.mask.shape, report).carry

    def _encode(
        self,
        call: Callable[..., Any],
        strategy: Strategy,
        source: np.ndarray,
        lengths: np.ndarray,
        adapter: int | None,
        report: Report,
    ) -> tuple[Tree, Memory, SourceIds | None]:
        """The weights, the memory and the source that a decode is given; `call`: `_run` or `_find`."""
        across, ready = len(source), self.on(len(source))
        adapters = None if adapter is None else np.full_like(lengths, adapter)
        memory = call(self, "encoder", 0, (ready.encoding, source, lengths, adapters), source.shape, report)
        if not strategy.reads_source:
            return ready.decoding, memory, None
        wide = np.zeros(memory.mask.shape, source.dtype)
        wide[..., : source.shape[2]] = source
        read = SourceIds(wide, lengths)
        if not (small := self.small_of(strategy)):
            return ready.decoding, memory, read
        own = small.on(across)
        drafter = call(small, "encoder", 0, (own.encoding, source, lengths, None), source.shape, report)
        return (ready.decoding, own.decoding), memory, dataclasses.replace(read, memory=drafter)

    def small_of(self, strategy: Strategy) -> "Programs | None":
        """The programs of the T5 that drafts, if the strategy has one."""
        if not strategy.borrows:
            return None
        assert self.small is not None, "the generator saw to it"
        return self.small

    def on(self, across: int) -> Ready:
        """The weights, whole on each of the first devices; those of all numbers share one copy a device."""
        if across not in self._placed:
            for device in self.devices[:across]:
                if device not in self._copies:
                    # What encoder and decoder share is copied once.
                    leaves = {id(x): x for x in jax.tree.leaves(self._ready)}
                    own = {key: _whole_on(x, device=device) for key, x in leaves.items()}
                    self._copies[device] = jax.tree.map(lambda x, own=own: own[id(x)], self._ready)
            copies = [self._copies[device] for device in self.devices[:across]]
            place = NamedSharding(self._mesh(across), P())
            self._placed[across] = jax.tree.map(partial(_assemble, place=place), *copies)
        return self._placed[across]

    def _mesh(self, across: int) -> Mesh:
        return Mesh(np.asarray(self.devices[:across]), ("each",))

    def _run(self, part: Any, slots: int, arguments: tuple[Any, ...], shape: Any, report: Report) -> Any:
        return self._program(part, slots, arguments, shape, report)(*arguments)

    def _find(self, part: Any, slots: int, arguments: tuple[Any, ...], shape: Any, report: Report) -> Any:
        """The shapes of what `_run` finds; compiles it."""
        return self._program(part, slots, arguments, shape, report).out_info

    def _program(
        self,
        part: Strategy | Literal["encoder"],
        slots: int,
        arguments: tuple[Any, ...],
        shape: tuple[int, int, int],
        report: Report,
    ) -> Any:
        """The compiled encoder, or decoder up to so many slots, for batches of that shape [E, B, L]."""
        wished = arguments[4:]
        key = part, slots, shape, jax.tree.structure(wished), tuple(x.shape for x in jax.tree.leaves(wished))
        if key not in self._compiled:
            jax.block_until_ready(arguments)  # what is still computed must not count as compilation
            begun = time.perf_counter()
            across, batch, length = shape
            function: Callable[..., Any] = partial(encode_batch, self.model, backend=self.backend)
            name, more = "encoder", ""
            if not isinstance(part, str):
                sizes = schedule(part, batch)
                small = self.small_of(part)
                function = partial(
                    decode_batch,
                    self.model,
                    part,
                    sizes=sizes,
                    slots=slots,
                    backend=self.backend,
                    drafting=Drafting(small.model, small.backend) if small else None,
                )
                name = f"{type(part).__name__.lower()} decoder"
                more = "" if slots == sizes.slots[0] else ", for longer answers"
            if self.config.num_layers + self.config.num_decoder_layers > 8:  # takes seconds
                level = logging.INFO if logger.hasHandlers() else logging.WARNING  # a bare Python shows no other lines
                line = f"preparing the {name} for batches of {batch} with sources of up to {length} tokens{more}"
                logger.log(level, line)
            mesh, specs = self._mesh(across), (P(), *[P("each")] * (len(arguments) - 1))
            own = partial(_by_itself, function)
            each = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P("each"), check_vma=False)
            places = tuple(NamedSharding(mesh, spec) for spec in specs)
            with precision(self.model.dtype):
                lowered = jax.jit(each, in_shardings=places).lower(*arguments)
            self._compiled[key] = lowered.compile()
            report.compile_seconds += time.perf_counter() - begun
            report.shapes += 1
        return self._compiled[key]


def _by_itself(function: Callable[..., Any], weights: Tree, *arrays: Any) -> Any:
    """The function's result on each device, for its part of arrays whose first axis is of the devices."""
    own = jax.tree.map(lambda x: x[0], arrays)
    return jax.tree.map(lambda x: x[None], function(weights, *own))


def _whole_on(x: jax.Array, *, device: jax.Device) -> jax.Array:
    """An array that is whole on some device of this process, whole on that one."""
    here = {shard.device: shard.data for shard in x.addressable_shards}
    return here[device] if device in here else jax.device_put(next(iter(here.values())), device)


def _assemble(*copies: jax.Array, place: NamedSharding) -> jax.Array:
    """Copies of an array on the devices of a mesh as one array; nothing moves."""
    return jax.make_array_from_single_device_arrays(copies[0].shape, place, list(copies))
