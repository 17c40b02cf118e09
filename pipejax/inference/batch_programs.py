"""The programs of a running batch: the functions from which programs are compiled, and the calls of the programs.

Shapes: B places for examples of a batch, R rows of the grid, W times, L slots of the memory, C slots of the cache.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from pipejax import decoding
from pipejax.data.shapes import memory_length
from pipejax.decoding import GREEDILY, Carry, Decoded, DecodingOptions, Refillable, Rule, Segment, Sizes, SourceIds
from pipejax.decoding.drafters import wants
from pipejax.inference.backends import Backend
from pipejax.inference.encodings import Encoded
from pipejax.inference.programs import (
    Programs,
    bind_drafter,
    encode_batch,
    pad_source,
    read_batch,
    schedule,
    shapes_of,
)
from pipejax.model import lora
from pipejax.model.backbone import Module
from pipejax.model.precision import precision
from pipejax.model.t5 import Memory
from pipejax.system import Tree
from pipejax.system.compiled import CompiledPrograms

Array = jax.Array
Call = Callable[..., Tree]  # (name of a program, *arguments) -> its results, or their shapes
DONATED = {"place": 0, "step": 2}  # the index of the argument whose memory each program reuses for its result


class Changes(NamedTuple):
    """The changes of a batch before the next steps, and the conditions under which the loop pauses."""

    begins: np.ndarray  # bool [B], the examples to begin
    ends: np.ndarray  # bool [B], the examples to stop
    most: np.int32  # the most steps
    switch: np.ndarray  # u32 [2], the address of a `Switch`
    watched: np.ndarray  # bool [B], the examples whose end pauses the loop


@dataclasses.dataclass(frozen=True)
class BatchFunctions:
    """The traced functions from which the programs of a running batch are compiled; all fields are static."""

    model: Module
    backend: Backend
    strategy: Refillable
    places: int  # B
    sizes: Sizes

    def by_name(self) -> dict[str, Callable[..., Tree]]:
        """Returns the functions by the names of their programs."""
        found: dict[str, Callable[..., Tree]] = {
            "encode": partial(encode_batch, self.model, backend=self.backend),
            "encode with outputs": partial(encode_batch, self.model, backend=self.backend, outputs=True),
            "widen": self.widened,
            "empty": self.empty_state,
            "reread": self.reread,
            "place": self.placed,
            "grow": self.grown,
            "step": self.stepped,
        }
        if self.has_reader:
            found["read"] = partial(read_batch, self.strategy.drafter)
        return found

    @property
    def has_reader(self) -> bool:
        """Whether the drafter has the method `read`."""
        return hasattr(self.strategy.drafter, "read")

    def _bind(self, weights: Tree, encoded: Encoded, options: DecodingOptions = GREEDILY) -> tuple[Refillable, Tree]:
        """Returns the strategy, bound to the sources if the strategy reads them, and the decoder of the batch."""
        strategy, _ = bind_drafter(self.model, self.strategy, weights[1], encoded.source, options)
        decoder = self.backend.decoder(self.model, lora.choose(weights[0], encoded.memory.adapter), encoded.memory)
        return cast(Refillable, strategy), decoder

    def widened(self, weights: Tree, encoded: Encoded, *, slots: int) -> Encoded:
        """Returns the same sources with memories of `slots` slots; `weights` as for `stepped`."""
        source = encoded.source
        if source is not None:
            if hasattr(self.strategy.drafter, "widen"):
                own = self.strategy.drafter.widen(dataclasses.replace(source, parameters=weights[1]), slots)
                source = dataclasses.replace(source, memory=own)
            source = pad_source(source, slots)
        return Encoded(self.backend.widen(encoded.memory, slots), source)

    def empty_state(self, weights: Tree, one: Encoded, *, slots: int) -> tuple[Encoded, Carry]:
        """Returns encoded sources (zeros) and a carry for an empty batch.

        `one` is an encoded source, for its shapes.
        """
        many = jax.tree.map(lambda x: jnp.zeros((self.places, *x.shape[1:]), x.dtype), one)
        strategy, decoder = self._bind(weights, many)
        state, options = strategy.init(self.places, many.source), DecodingOptions(scores=True)
        state = strategy.stop(state, jnp.ones(self.places, bool))
        carry = decoding.begin(strategy, decoder, state, self.sizes, options=options, apart=True)
        return many, decoding.grow(decoder, carry, slots)

    def reread(self, weights: Tree, encoded: Encoded, state: Tree) -> Tree:
        """Returns the strategy's state for sources padded to another length. Each cache size has a program."""
        strategy, _ = self._bind(weights, encoded)
        return strategy.reread(state, encoded.source)

    def grown(self, weights: Tree, encoded: Encoded, carry: Carry, *, slots: int) -> Carry:
        """Returns the carry with a cache of `slots` slots."""
        return decoding.grow(self._bind(weights, encoded)[1], carry, slots)

    def stepped(
        self,
        weights: Tree,
        encoded: Encoded,
        carry: Carry,
        options: DecodingOptions,
        begins: Array,
        ends: Array,
        most: Array,
        switch: Array,
        watched: Array,
    ) -> tuple[Decoded, Array, Array | None, Carry]:
        """Begins and stops examples, then takes steps until the loop pauses.

        Args:
          weights: the decoder's weights and the drafter's parameters, which are None if the drafter has none.
          encoded: the sources of the batch.
          carry: the state of the batch.
          options: the options of the batch.
          begins: bool [B], the examples to begin.
          ends: bool [B], the examples to stop.
          most: i32 scalar, the most steps.
          switch: u32 [2], the address of a `Switch`.
          watched: bool [B], the examples whose end pauses the loop.

        Returns:
          The rows so far; bool [B], the done examples; the number of steps left of `most`; and the new carry.
        """
        (strategy, decoder), sizes = self._bind(weights, encoded, options), self.sizes
        carry = decoding.refill(
            strategy, carry, begins=begins, ends=ends, sizes=sizes, options=options, source=encoded.source
        )
        found: Segment = decoding.decode(
            strategy,
            decoder,
            carry,
            sizes=sizes,
            slots=carry.filled.row.shape[1],
            options=options,
            pause_after=most,
            listen=lambda count: self.backend.listen(count, switch),
            watched=watched,
        )
        return found.decoded, strategy.done(found.carry.state), found.steps_left, found.carry

    def placed(self, encoded: Encoded, new: Encoded, place: Array) -> Encoded:
        """Returns the encoded sources with the source `new` at a place."""
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, place, axis=0), encoded, new)


class BatchPrograms:
    """The compiled programs of running batches with the same strategy and number of places. Thread-safe.

    Methods that call programs have an argument `call`, which is `run` or `find`: `run` runs a program, and `find` only
    compiles it and returns the shapes of its results. So a compilation ahead of time compiles exactly the programs that
    a batch will run.
    """

    def __init__(
        self,
        programs: Programs,
        strategy: Refillable,
        places: int,
        compiled: CompiledPrograms | None = None,
        options: DecodingOptions = GREEDILY,
    ) -> None:
        """Creates the programs' functions; compiles nothing.

        Args:
          programs: the model, its backend and weights.
          strategy: the strategy of all answers.
          places: B, the number of places.
          compiled: a table of programs; None: a new one.
          options: the forced tokens and the rules of all answers.
        """
        self.strategy = cast(Refillable, programs.tuned_for(strategy, options))
        self.places, self.sizes = places, schedule(self.strategy, places)
        self.compiled = compiled if compiled is not None else CompiledPrograms()
        self.bos = programs.config.decoder_start_token_id  # the token with which every row begins
        ready = programs.on(1)
        self._encoder, self._weights = ready.encoding, (ready.decoding, ready.drafter)
        # The name of the program that encodes sources.
        self.encoder = "encode with outputs" if wants(strategy.drafter, "encoded") else "encode"
        self.functions = BatchFunctions(programs.model, programs.backend, self.strategy, places, self.sizes)
        self._by_name = self.functions.by_name()

    def program(self, name: str, *given: Tree, **static: int) -> Tree:
        """Returns the compiled program for the shapes of `given`, whose arrays may be `ShapeDtypeStruct`s."""
        whose = () if name == self.encoder else (self.strategy, self.places)
        key = name, *whose, *static.values(), *shapes_of(given)

        def compile_program() -> jax.stages.Compiled:
            with precision(self.functions.model.dtype):
                made = jax.jit(partial(self._by_name[name], **static), donate_argnums=DONATED.get(name, ()))
                return made.lower(*given).compile()

        return self.compiled.find(key, compile_program)

    def run(self, name: str, *given: Tree, **static: int) -> Tree:
        """Runs a program."""
        return self.program(name, *given, **static)(*given)

    def find(self, name: str, *given: Tree, **static: int) -> Tree:
        """Compiles a program and returns the shapes of its results."""
        return self.program(name, *given, **static).out_info

    def encode_source(self, call: Call, source: Tree, length: Tree, adapter: int | None) -> Memory:
        """Returns the memory of a source i32 [1, n] of `length` i32 [1] tokens."""
        own = None if adapter is None else np.asarray([adapter], np.int32)
        memory: Memory = call(self.encoder, self._encoder, source, length, own)
        return memory

    def read(self, call: Call, memory: Memory, source: Tree, length: Tree) -> Encoded:
        """Returns the encoded source, with the parts that the drafter reads if the strategy reads sources."""
        if not self.strategy.reads_source:
            return Encoded(memory, None)
        encoded, memory, own = memory.encoded, dataclasses.replace(memory, encoded=None), None
        if self.functions.has_reader:
            own, encoded = call("read", self._weights[1], source, length, encoded), None
        read = SourceIds(source, length, encoded, own, apart=True)
        return Encoded(memory, pad_source(read, memory.mask.shape[1]))

    def join(
        self, call: Call, encoded: Encoded | None, carry: Carry | None, one: Encoded
    ) -> tuple[Encoded, Carry, Encoded]:
        """Brings the memories of the batch and of a new source to the same length, by doubling the shorter length."""
        if encoded is None or carry is None:
            encoded, carry = call("empty", self._weights, one, slots=self.sizes.slots[0])
        length = encoded.length
        while encoded.length < one.length:
            encoded = call("widen", self._weights, encoded, slots=2 * encoded.length)
        while one.length < encoded.length:
            one = call("widen", self._weights, one, slots=2 * one.length)
        if self.strategy.reads_source and encoded.length > length:
            carry = dataclasses.replace(carry, state=call("reread", self._weights, encoded, carry.state))
        return encoded, carry, one

    def place(self, call: Call, encoded: Encoded, one: Encoded, place: int) -> Encoded:
        """Writes an encoded source to a place of the batch."""
        many: Encoded = call("place", encoded, one, np.int32(place)) if self.places > 1 else one
        return many

    def grow(self, call: Call, encoded: Encoded, carry: Carry, slots: int) -> Carry:
        """Grows the cache to `slots` slots."""
        grown: Carry = call("grow", self._weights, encoded, carry, slots=slots)
        return grown

    def step(
        self, call: Call, encoded: Encoded, carry: Carry, options: DecodingOptions, changes: Changes
    ) -> tuple[Decoded, Array, Array, Carry]:
        """Takes steps until the loop pauses; see `BatchFunctions.stepped`."""
        found: tuple[Decoded, Array, Array, Carry] = call("step", self._weights, encoded, carry, options, *changes)
        return found

    def with_states(self, carry: Carry, rules: tuple[Rule, ...]) -> Carry:
        """Returns the carry with states for the rules; `refill` initialises these states for new examples."""
        shapes = [jax.eval_shape(partial(rule.init, self.places, self.strategy.places[0])) for rule in rules]
        return dataclasses.replace(carry, states=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tuple(shapes)))

    def trace_source(self, call: Call, length: int, adapter: int | None) -> Encoded:
        """Returns the shapes of an encoded source of a padded length.

        `call` maps a program's name and arguments to the shapes of the program's results.
        """
        source, of_each = jax.ShapeDtypeStruct((1, length), np.int32), jax.ShapeDtypeStruct((1,), np.int32)
        with precision(self.functions.model.dtype):
            return self.read(call, self.encode_source(call, source, of_each, adapter), source, of_each)

    def shape_of_source(self, length: int, adapter: int | None) -> Encoded:
        """Returns the shapes of a source with a memory of `length` slots, without compiling a program."""

        def shapes(name: str, *given: Tree) -> Tree:
            return jax.eval_shape(self._by_name[name], *given)

        key = "memory", length, self.strategy
        found: Encoded = self.compiled.find(key, lambda: self.trace_source(shapes, length, adapter))
        return found

    def compile_room(self, length: int, adapter: int | None) -> None:
        """Compiles the programs that bring sources of all shorter memory lengths to `length`, and place a source."""
        one, shorter = self.shape_of_source(length, adapter), length if self.places > 1 else 0
        encoded, carry, _ = self.join(self.find, None, None, one)
        self.place(self.find, encoded, one, 0)
        while shorter > memory_length(1):
            shorter //= 2
            short = self.shape_of_source(shorter, adapter)
            self.join(self.find, encoded, carry, short)
            self.join(self.find, *self.join(self.find, None, None, short)[:2], one)

    def compile_steps(self, length: int, slots: int, options: DecodingOptions, adapter: int | None) -> None:
        """Compiles the steps with a cache of `slots` slots, and the programs that grow the cache to this size."""
        encoded, carry, _ = self.join(self.find, None, None, self.shape_of_source(length, adapter))
        carry = self.with_states(carry, options.rules)  # the batch may have other rules when this method runs
        for size in self.sizes.slots[1:]:
            if size <= slots:
                carry = self.grow(self.find, encoded, carry, size)
        nowhere = np.zeros(self.places, bool)
        address = np.zeros(2, np.uint32)
        self.step(self.find, encoded, carry, options, Changes(nowhere, nowhere, np.int32(1), address, nowhere))
