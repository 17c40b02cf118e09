"""Compiles and runs the encoder and the decoding loop for batches; combines a backbone with a decoding strategy.

A decode runs several programs: the encoder, for a padded source length, and then the decoding loop, once per cache
size. The loop stops when all answers are complete or the cache is full; the next program continues with a larger cache.
Programs are compiled on first use, by their strategy and shapes, and are kept.

Shapes: B batch, L source length (padded to a bucket), E devices.
"""

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pipejax import decoding
from pipejax.data.shapes import bucket, memory_length, pad
from pipejax.decoding import (
    GREEDILY,
    QUERY_COUNTS,
    Carry,
    Decoded,
    DecodingOptions,
    Segment,
    Sizes,
    SourceIds,
    Stepper,
    Strategy,
    strategy_checks,
)
from pipejax.decoding.drafters import Drafter, wants
from pipejax.inference.backends import XLA, Backend, Ready, call_costs
from pipejax.inference.configurations import DEFAULT, Configuration, ConfigurationTable, DecodeShape, changes
from pipejax.inference.report import Report
from pipejax.model import lora
from pipejax.model.backbone import Backbone, Module, choose_blocks, smallest_batch
from pipejax.model.precision import precision
from pipejax.model.t5 import Memory
from pipejax.system import Tree
from pipejax.system.compiled import CompiledPrograms

logger = logging.getLogger(__name__)

SLOTS = (160, *(448 << i for i in range(16)))  # cache sizes, in slots
# On a GPU the host controls the loop: to read the condition, the host waits after each iteration until all kernels have
# ended, which at batch 1 takes half as long as a step of T5-Base. With more steps per iteration the host waits less
# often, but more steps are computed in vain at the end of a decode; for answers of 10 to 30 steps, about four steps are
# fastest. On CPUs and TPUs reading the condition costs nothing.
ITERATION_STEPS = {"gpu": 4, "cuda": 4}
# Larger batches are slower on a CPU: eight examples suffice to share the reading of the weights, attention is padded to
# the example with the most live rows, and steps continue until the longest answer ends.
CPU_BATCH = 8
# On a GPU, results of at most this number of bytes on each device are written to the memory of the previous results.
# XLA records a CUDA graph anew if an address of its arguments or results has changed, which takes milliseconds. Decodes
# with larger results take much longer anyway, and their memory should remain free for other arrays.
REUSED = 2**28


def devices() -> list[jax.Device]:
    """Returns the devices of this process, each of which decodes a batch. CPUs share cores, so only one is returned."""
    here = jax.local_devices()
    return here[:1] if here[0].platform == "cpu" else here


def schedule(strategy: Stepper, batch: int, platform: str = "", configuration: Configuration = DEFAULT) -> Sizes:
    """Returns the static sizes of a decode: one program per number of slots, with one loop per number of queries.

    On a CPU the time of a step grows with its queries. On other devices the time hardly grows, so one loop is enough.

    Args:
      strategy: the strategy.
      batch: B.
      platform: JAX's name of the platform; "": the default one.
      configuration: the configuration of decoding on a GPU.
    """
    platform = platform or jax.default_backend()
    on_cpu = platform == "cpu"
    query_counts = (QUERY_COUNTS if on_cpu else ()) if strategy.queries is None else strategy.queries
    # If a draft is a loop within each step, several steps per iteration would copy the loop's cache.
    steps = configuration.steps or ITERATION_STEPS.get(platform, 1)
    if getattr(strategy.drafter, "loops", False):
        steps = 1
    return Sizes.fit(strategy, batch, query_counts=query_counts, slots=SLOTS if on_cpu else SLOTS[1:], steps=steps)


def encode_batch(
    model: Module,
    encoder: Tree,
    source: jax.Array,
    length: jax.Array,
    adapter: jax.Array | None = None,
    *,
    backend: Backend = XLA,
    outputs: bool = False,
) -> Memory:
    """Encodes a batch. The model, the backend and `outputs` are static.

    Args:
      model: the module.
      encoder: `Ready.encoding`.
      source: i32 [B, L].
      length: i32 [B], number of tokens of each source.
      adapter: i32 [B], number of the adapter of each source; None: there are no adapters.
      backend: the backend.
      outputs: whether `Memory.encoded`, [B, L, D], is kept.
    """
    options = {"outputs": True} if outputs else {}
    memory = backend.encode(model, lora.choose(encoder, adapter), source, length, **options)
    return memory if adapter is None else dataclasses.replace(memory, adapter=adapter)


def read_batch(drafter: Drafter, parameters: Tree, source: jax.Array, length: jax.Array, encoded: jax.Array) -> Tree:
    """Calls `Drafter.read`, and `Drafter.widen` for the length of the memory; checks the result. The drafter is static.

    Args:
      drafter: the drafter.
      parameters: its parameters.
      source: i32 [B, L].
      length: i32 [B].
      encoded: [B, L, D], the outputs of the encoder, if the drafter wants them.
    """
    given = SourceIds(source, length, encoded=encoded, parameters=parameters)
    found = drafter.read(given)  # type: ignore[attr-defined]
    if hasattr(drafter, "widen"):
        given = dataclasses.replace(given, encoded=None, memory=found)
        found = drafter.widen(given, memory_length(source.shape[1]))
    strategy_checks.check_rows(drafter, "read", found, (len(length),))
    return found


def bind_drafter(
    model: Module,
    strategy: Strategy,
    parameters: Tree,
    source: SourceIds | None,
    options: DecodingOptions = GREEDILY,
) -> tuple[Strategy, SourceIds | None]:
    """Binds the sources of a batch, its forced tokens and the drafter's parameters to a strategy; traced.

    Args:
      model: the module of the model that the drafter drafts for.
      strategy: the strategy.
      parameters: the drafter's parameters; None: the drafter has none.
      source: the sources; None: the strategy does not read sources.
      options: how tokens are chosen.

    Returns:
      The strategy, and the sources with the parameters.
    """
    if source is None:
        return strategy, None
    width = hidden_width(model) if wants(strategy.drafter, "hidden") else 0
    source = dataclasses.replace(source, parameters=parameters, width=width, forced=options.forced)
    return strategy.bind_source(source), source


@functools.lru_cache
def hidden_width(model: Module) -> int:
    """Returns W, the width of a module's decoder."""
    params = jax.eval_shape(model.config.init_params, jax.random.key(0))
    found = jax.eval_shape(lambda p: model.apply({"params": p}, *smallest_batch(), method="hidden"), params)
    width: int = found.shape[-1]
    return width


def decode_batch(
    model: Module,
    strategy: Strategy,
    weights: Tree,
    memory: Memory,
    carry: Carry | None,
    source: SourceIds | None = None,
    options: DecodingOptions = GREEDILY,
    *,
    sizes: Sizes,
    slots: int,
    backend: Backend = XLA,
) -> Segment:
    """Decodes an encoded batch with one cache size, as a part of `decoding.run`; arrays are traced, the rest is static.

    Args:
      model: the module.
      strategy: the strategy.
      weights: the decoder's weights and the drafter's parameters, which are None if the drafter has none.
      memory: the encoded sources.
      carry: the carry of the previous part; None: decoding begins.
      source: the sources, if the strategy reads sources.
      options: how tokens are chosen.
      sizes: the sizes of the decode.
      slots: C, the cache size of this part.
      backend: the backend.
    """
    strategy, source = bind_drafter(model, strategy, weights[1], source, options)
    decoder = backend.decoder(model, lora.choose(weights[0], memory.adapter), memory)
    carry = carry or decoding.begin(strategy, decoder, strategy.init(len(memory.mask), source), sizes, options=options)
    return decoding.decode(strategy, decoder, carry, sizes=sizes, slots=slots, options=options)


class Reading(NamedTuple):
    """The part of a decode in which a drafter reads the sources: `Drafter.read`."""

    drafter: Drafter


Part = Strategy | Reading | Literal["encoder", "encoder with outputs"]  # a part of a decode, a program each


class Call(NamedTuple):
    """A call of a program."""

    part: Part
    slots: int  # C, the cache size of a decoder; 0 for other parts
    arguments: tuple[Tree, ...]
    shape: tuple[int, ...]  # [E, B, L]
    configuration: Configuration = DEFAULT

    @property
    def kind(self) -> str:
        """The kind of the part: "encoder", "drafter" or "decoder"."""
        return "encoder" if isinstance(self.part, str) else "drafter" if isinstance(self.part, Reading) else "decoder"

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The key of the program in `Programs`, which contains the shapes of a decoder's options."""
        part = cast(Hashable, self.part)
        return part, self.slots, self.shape, *shapes_of(self.arguments[4:]), self.configuration


def prepare(backend: Backend, model: Module, params: Tree) -> Ready:
    """Lays out parameters, arrays of this process or sharded over several processes, for a backend."""
    of_first = jax.tree.leaves(params)[0]
    is_sharded = isinstance(of_first, jax.Array) and isinstance(of_first.sharding, NamedSharding)
    everywhere = NamedSharding(of_first.sharding.mesh, P()) if is_sharded else None

    def compute(function: Callable[..., Tree], tree: Tree, **static: Tree) -> Tree:
        jitted = jax.jit(function, static_argnames=tuple(static), out_shardings=everywhere)
        with precision(model.dtype):
            return jax.block_until_ready(jitted(tree, **static))

    return backend.prepare(model, params, compute=compute)


def pad_source(source: SourceIds, slots: int) -> SourceIds:
    """Pads the ids and the outputs of the encoder to `slots` tokens; the last axis of the ids is L.

    If arrays are `ShapeDtypeStruct`s and are padded, all arrays of the result are `ShapeDtypeStruct`s.
    """
    more = slots - source.ids.shape[-1]
    if not more:
        return source
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(source)):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), source)
        padded: SourceIds = jax.eval_shape(partial(pad_source, slots=slots), shapes)
        return padded
    numpy = np if isinstance(source.ids, np.ndarray) else jnp
    ids = numpy.pad(source.ids, [(0, 0)] * (source.ids.ndim - 1) + [(0, more)])
    encoded = source.encoded
    if encoded is not None:
        encoded = jnp.pad(encoded, [(0, 0)] * (encoded.ndim - 2) + [(0, more), (0, 0)])
    return dataclasses.replace(source, ids=ids, encoded=encoded)


class Programs:
    """A backbone's encoder and decoder for batches of token ids, compiled on first use.

    Several devices decode a batch each, without communication: all arrays but the weights have a first axis E of
    devices, over which they are sharded.
    """

    def __init__(
        self, config: Backbone, dtype: jnp.dtype, *, devices: Sequence[jax.Device], backend: Backend = XLA
    ) -> None:
        """Creates the module; compiles nothing.

        Args:
          config: the backbone.
          dtype: the dtype of computations.
          devices: the devices that decode a batch each.
          backend: lays out weights and computes steps.
        """
        self.config, self.devices = config, list(devices)
        blocks = choose_blocks(config, self.devices[0])  # the attention of the encoder
        self.model = config.module(dtype=dtype, **({"blocks": blocks} if blocks else {}))
        self.backend = backend
        self.configurations = ConfigurationTable()
        self._compiled = CompiledPrograms()
        # By kind of program, the last results of the encoder, the drafter and the first decoding program, with the keys
        # of these programs.
        self._results: dict[str, tuple[Hashable, Tree]] = {}
        self._reuses = self.devices[0].platform in ITERATION_STEPS
        self._alone: contextlib.AbstractContextManager[object]
        self._alone = threading.Lock() if self._reuses else contextlib.nullcontext()
        self._drafter: Tree = None  # the drafter's parameters; None: the drafter has none
        self._tuned: dict[Strategy, set[Strategy]] = {}  # what `tuned_for` returned for each strategy
        self._copies: dict[jax.Device, Ready] = {}
        self._placed: dict[int, Ready] = {}

    def set_params(self, params: Tree, drafter: Tree = None) -> None:
        """Sets the weights; compiled programs are kept.

        Args:
          params: arrays of this process or sharded over several processes.
          drafter: the drafter's parameters, arrays of this process; None: the earlier parameters are kept, if any.
        """
        self._drafter = self._drafter if drafter is None else drafter
        self._ready = dataclasses.replace(prepare(self.backend, self.model, params), drafter=self._drafter)
        self._call_costs = call_costs(self._ready.decoding, self.backend)
        self._forget_copies()

    def tuned_for(self, strategy: Strategy, options: DecodingOptions = GREEDILY) -> Strategy:
        """Returns the strategy tuned for these weights and devices, and for the forced tokens of a batch."""
        platform, fillers = self.devices[0].platform, self.backend.skips_fillers
        forced = decoding.with_forced(strategy, decoding.columns_for(options, strategy, platform))
        tuned = forced.tuned_for(platform, costs=self._call_costs, skips_fillers=fillers)
        self._tuned.setdefault(strategy, set()).add(tuned)
        return tuned

    def forget_params(self) -> None:
        """Frees the memory of the weights, until `set_params`; programs and the drafter's parameters are kept."""
        del self._ready
        self._forget_copies()

    @property
    def drafter_parameters(self) -> Tree:
        """The drafter's parameters; None: the drafter has none."""
        return self._drafter

    def _forget_copies(self) -> None:
        self._results.clear()
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
        options: DecodingOptions = GREEDILY,
        adapter: int | None = None,
    ) -> Decoded:
        """Decodes sources on several devices.

        Args:
          sources: at most E * B lists of token ids; copies of the last one fill the batches.
          strategy: the strategy.
          batch_size: B.
          across: E, the number of devices.
          report: the report, to which the seconds of decoding and compiling are added.
          options: NumPy arrays [len(sources), ...].
          adapter: the number of the adapter, if there are adapters.

        Returns:
          The answers, NumPy arrays [E * B, ...].
        """
        with self._alone:  # the next decode replaces the results of this one
            return self._decode(sources, strategy, batch_size, across, report, options, adapter)

    def _decode(
        self,
        sources: Sequence[Sequence[int]],
        strategy: Strategy,
        batch_size: int,
        across: int,
        report: Report,
        options: DecodingOptions,
        adapter: int | None,
    ) -> Decoded:
        """See `decode`."""
        strategy = self.tuned_for(strategy, options)
        filled = [*sources, *[sources[-1]] * (across * batch_size - len(sources))]
        lengths = np.asarray([len(s) for s in filled], np.int32)
        source = pad([np.asarray(s, np.int32) for s in filled], bucket(int(lengths.max())))
        source, lengths = source.reshape(across, batch_size, -1), lengths.reshape(across, batch_size)
        begun, compiled = time.perf_counter(), report.compile_seconds
        weights, memory, read = self._encode(self._run, strategy, source, lengths, adapter, report)
        if report.times_encoder:
            jax.block_until_ready(memory)
            report.encoder_seconds += time.perf_counter() - begun - (report.compile_seconds - compiled)
        shape = memory.mask.shape
        numbers = np.minimum(np.arange(across * batch_size), len(sources) - 1).reshape(across, batch_size)
        options = options.take(numbers)

        def decode_by(configuration: Configuration) -> Decoded:
            def decode_segment(slots: int, carry: Carry | None) -> Segment:
                arguments = weights, memory, carry, read, options
                found: Segment = self._run(Call(strategy, slots, arguments, shape, configuration), report)
                for x in jax.tree.leaves((found.over, found.decoded)):
                    x.copy_to_host_async()  # all copies begin before the host waits for the first one
                return found

            sizes = schedule(strategy, batch_size, self.devices[0].platform, configuration)
            found: Decoded = jax.device_get(decoding.run(decode_segment, sizes).decoded)
            return jax.tree.map(np.array, found) if self._reuses else found

        if self._has_configurations(options):
            own = self._decode_shape(strategy, options, shape)
            decoded = self.configurations.decode(own, self._changes(strategy, batch_size), decode_by, report)
            arguments = weights, memory, None, read, options
            self._drop_other_configurations(Call(strategy, 0, arguments, shape, self.configurations.find(own)))
        else:
            decoded = decode_by(self.configurations.fixed or DEFAULT)
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
        options: DecodingOptions = GREEDILY,
        adapter: int | None = None,
    ) -> None:
        """Compiles all programs that decoding batches of a size and source length may need; see `decode`."""
        strategy = self.tuned_for(strategy, options)
        source, lengths = np.zeros((1, batch_size, bucket(length)), np.int32), np.ones((1, batch_size), np.int32)
        weights, memory, read = self._encode(self._find, strategy, source, lengths, adapter, report)
        options, carry, shape = options.take(np.arange(batch_size)[None]), None, memory.mask.shape
        configuration = self.configurations.fixed or DEFAULT
        if self._has_configurations(options):
            configuration = self.configurations.find(self._decode_shape(strategy, options, shape))
        for slots in schedule(strategy, batch_size, self.devices[0].platform, configuration).slots:
            arguments = weights, memory, carry, read, options
            carry = self._find(Call(strategy, slots, arguments, shape, configuration), report).carry

    def _has_configurations(self, options: DecodingOptions) -> bool:
        """Returns whether several configurations of decoding are possible: on a GPU, greedily or with drafts."""
        return self.devices[0].platform in ITERATION_STEPS and not options.need_logits

    def _decode_shape(self, strategy: Strategy, options: DecodingOptions, shape: tuple[int, ...]) -> DecodeShape:
        """Returns the key of a decode of shape [E, B, L] in `configurations`."""
        device, given = self.devices[0], jax.tree.map(lambda x: (x.shape, str(x.dtype)), options)
        facts = device.device_kind, getattr(device, "core_count", 0), self.config, self.model.dtype, self.backend
        return DecodeShape((strategy, shape[:2], str(given)), shape[2], repr((*facts, strategy, shape, given)))

    def _changes(self, strategy: Strategy, batch: int) -> tuple[Configuration, ...]:
        """Returns the configurations that a trial compares with the default."""
        steps = schedule(strategy, batch, self.devices[0].platform).steps
        return changes(steps=steps, kernels=self.backend.without_kernels != self.backend)

    def _drop_other_configurations(self, chosen: Call) -> None:
        """Frees the programs that a trial compared with `chosen`, a call with any number of slots."""
        part, _, *same, configuration = chosen.key
        for key in [*self._compiled]:
            if key[0] == part and [*key[2:-1]] == same and key[-1] != configuration:
                self._compiled.pop(key, None)

    def _encode(
        self,
        execute: Callable[[Call, Report], Tree],
        strategy: Strategy,
        source: np.ndarray,
        lengths: np.ndarray,
        adapter: int | None,
        report: Report,
    ) -> tuple[Tree, Memory, SourceIds | None]:
        """Encodes a batch.

        `execute` is `_run`, which runs a program, or `_find`, which only compiles the program.

        Returns:
          The decoder's weights and the drafter's parameters; the memory; and the source, if the strategy reads sources.
        """
        ready, drafter = self.on(len(source)), strategy.drafter
        adapters = None if adapter is None else np.full_like(lengths, adapter)
        part: Part = "encoder with outputs" if wants(drafter, "encoded") else "encoder"
        memory = execute(Call(part, 0, (ready.encoding, source, lengths, adapters), source.shape), report)
        weights = ready.decoding, ready.drafter
        if not strategy.reads_source:
            return weights, memory, None
        encoded, memory = memory.encoded, dataclasses.replace(memory, encoded=None)
        own = None
        if hasattr(drafter, "read"):
            arguments = ready.drafter, source, lengths, encoded
            own = execute(Call(Reading(drafter), 0, arguments, source.shape), report)
            encoded = None
        return weights, memory, pad_source(SourceIds(source, lengths, encoded, own), memory.mask.shape[-1])

    def on(self, across: int) -> Ready:
        """Returns the weights, replicated on the first `across` devices; all calls share one copy per device."""
        if across not in self._placed:
            for device in self.devices[:across]:
                if device not in self._copies:
                    # Arrays shared by encoder and decoder are copied once.
                    leaves = {id(x): x for x in jax.tree.leaves(self._ready)}
                    own = {key: _whole_on(x, device=device) for key, x in leaves.items()}
                    self._copies[device] = jax.tree.map(lambda x, own=own: own[id(x)], self._ready)
            copies = [self._copies[device] for device in self.devices[:across]]
            place = NamedSharding(self._mesh(across), P())
            self._placed[across] = jax.tree.map(partial(_assemble, place=place), *copies)
        return self._placed[across]

    def _mesh(self, across: int) -> Mesh:
        return Mesh(np.asarray(self.devices[:across]), ("each",))

    def _run(self, call: Call, report: Report) -> Tree:
        """Runs a program. On a GPU, small results replace the previous results of the same shapes in memory."""
        program = self._program(call, report)
        if len(program.args_info[0]) == len(call.arguments):
            return program(*call.arguments)
        key = call._replace(configuration=DEFAULT).key
        of_key, room = self._results.pop(call.kind, (None, None))
        if of_key != key:
            del room  # its memory is free before the new results are allocated
            room = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), program.out_info)
        found = program(*call.arguments, room)
        self._results[call.kind] = key, found
        return found

    def _find(self, call: Call, report: Report) -> Tree:
        """Compiles a program; returns the shapes of the result that `_run` would return."""
        return self._program(call, report).out_info

    def _program(self, call: Call, report: Report) -> jax.stages.Compiled:
        """Returns the compiled program of a call.

        On a GPU, a program with small results that starts a decode has a further argument: arrays with the shapes of
        its results. The results are written to the memory of these arrays.
        """
        program: jax.stages.Compiled = self._compiled.find(call.key, lambda: self._compile(call, report))
        return program

    def _compile(self, call: Call, report: Report) -> jax.stages.Compiled:
        """Compiles a program; see `_program`."""
        part, slots, arguments, shape, configuration = call
        jax.block_until_ready(arguments)  # so that pending computations do not count as compilation
        begun = time.perf_counter()
        across, batch, length = shape
        function: Callable[..., Tree]
        name, more = call.kind, ""
        if isinstance(part, str):
            function = partial(encode_batch, self.model, backend=self.backend, outputs=part != "encoder")
        elif isinstance(part, Reading):
            function = partial(read_batch, part.drafter)
        else:
            sizes = schedule(part, batch, self.devices[0].platform, configuration)
            backend = self.backend if configuration.kernels else self.backend.without_kernels
            function = partial(decode_batch, self.model, part, sizes=sizes, slots=slots, backend=backend)
            name = f"{type(part).__name__.lower()} decoder"
            more = "" if slots == sizes.slots[0] else ", for longer answers"
        if self.config.num_layers + self.config.num_decoder_layers > 8:  # compiling a larger model takes seconds
            # INFO lines are not shown without handlers.
            level = logging.INFO if logger.hasHandlers() else logging.WARNING
            line = f"preparing the {name} for batches of {batch} with sources of up to {length} tokens{more}"
            logger.log(level, line)
        mesh, specs = self._mesh(across), (P(), *[P("each")] * (len(arguments) - 1))
        own = partial(_by_itself, function)
        each = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P("each"), check_vma=False)
        places = tuple(NamedSharding(mesh, spec) for spec in specs)
        with precision(self.model.dtype):
            whole = jax.jit(each)  # traced once, for the shapes of its results and for the program
            room = jax.eval_shape(whole, *arguments) if self._reuses and (slots == 0 or arguments[2] is None) else None
            if room and sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(room)) <= REUSED * across:

                def replace(*given: Tree) -> Tree:  # its name is in dumps and profiles
                    return whole(*given[:-1])

                jitted = jax.jit(
                    replace,
                    in_shardings=(*places, places[-1]),
                    out_shardings=places[-1],
                    donate_argnums=len(arguments),
                    keep_unused=True,  # XLA needs the last argument, which is not read, to reuse its memory
                )
                lowered = jitted.lower(*arguments, room)
            else:
                lowered = jax.jit(each, in_shardings=places).lower(*arguments)
        program = lowered.compile(configuration.compiler_options)
        report.compile_seconds += time.perf_counter() - begun
        report.shapes += 1
        return program


def shapes_of(tree: Tree) -> tuple[Hashable, ...]:
    """Returns a hashable key of a tree's structure and of the shapes and dtypes of its arrays."""
    return jax.tree.structure(tree), tuple((x.shape, x.dtype) for x in jax.tree.leaves(tree))


def peak_bytes(programs: Programs, strategy: Strategy) -> int | None:
    """Returns the bytes of a device that the largest compiled program needs: arguments, results and buffers.

    The decoders of other strategies and the readings of other drafters are left out. The result is None if XLA does not
    state the sizes on this device, or if no program is compiled.
    """
    parts: set[Part] = {"encoder", "encoder with outputs", *programs._tuned.get(strategy, ())}
    compiled = [
        program
        for key, program in [*programs._compiled.items()]
        if (part := cast(tuple[Part, ...], key)[0]) in parts
        or (isinstance(part, Reading) and part.drafter == strategy.drafter)
    ]
    sizes = [x.memory_analysis() for x in compiled if isinstance(x, jax.stages.Compiled)]
    return max(
        (
            int(x.argument_size_in_bytes + x.output_size_in_bytes + x.temp_size_in_bytes - x.alias_size_in_bytes)
            for x in sizes
            if x is not None
        ),
        default=None,
    )


def _by_itself(function: Callable[..., Tree], weights: Tree, *arrays: Tree) -> Tree:
    """Calls the function without the first axis of the arrays, which is 1 on each device."""
    own = jax.tree.map(lambda x: x[0], arrays)
    return jax.tree.map(lambda x: x[None], function(weights, *own))


def _whole_on(x: jax.Array, *, device: jax.Device) -> jax.Array:
    """Returns a copy on `device` of an array that is replicated on some device of this process."""
    here = {shard.device: shard.data for shard in x.addressable_shards}
    return here[device] if device in here else jax.device_put(next(iter(here.values())), device)


def _assemble(*copies: jax.Array, place: NamedSharding) -> jax.Array:
    """Combines copies of an array on the devices of a mesh into one replicated array, without copying."""
    return jax.make_array_from_single_device_arrays(copies[0].shape, place, list(copies))
