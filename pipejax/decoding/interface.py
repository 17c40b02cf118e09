"""The parts of the decoding loop: a strategy, which says what is asked, and a model, which answers.

Shapes as in `core`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Self, TypeVar

import flax.struct
import jax
import numpy as np

from pipejax import grid
from pipejax.decoding.gathering import Query, Step
from pipejax.decoding.trace import Trace
from pipejax.grid import Numbers
from pipejax.system import Tree

Array = jax.Array
Cache = TypeVar("Cache")

TRUNCATIONS = (None, "time_max", "sub_max", "max_length")  # the meanings of the codes in Decoded.truncated


@flax.struct.dataclass
class SourceIds:
    """A batch of sources, for strategies that read them."""

    ids: Array | np.ndarray  # i32 [B, L]
    length: Array | np.ndarray  # i32 [B], how many are real
    memory: Tree = None  # their memory in a drafter's own model
    apart: bool = flax.struct.field(pytree_node=False, default=False)  # whether each example takes slots by itself


@flax.struct.dataclass
class Decoded:
    """The result of a strategy: rows of tokens without bos and eos.

    Of one example in two batches, the last digits of `log_probs` may differ and, with drafts, `calls` and `trace`;
    tokens only where two are equally likely but for rounding.
    """

    tokens: Array  # i32 [B, R, W], R rows, W their longest; meaningless beyond `lengths`
    lengths: Array  # i32 [B, R], 0 for empty rows and rows that never started
    steps: Array  # i32 [B], time-steps of Algorithm 1 (paper section 3.4), those without an open row included
    truncated: Array  # i32 [B], index into TRUNCATIONS
    calls: Array | np.ndarray | None = None  # i32 [B], decoder calls; None: `Strategy.calls` knows
    log_probs: Array | None = None  # f32 [B, R, W], of the answer to the query of each row and time, if `Wishes.scores`
    trace: Trace | None = None  # the fate of drafts, if `Drafts.trace`


class Model(Protocol[Cache]):
    """The decoder of a batch, as the loop sees it."""

    def cache(self, slots: int, old: Cache | None) -> Cache:
        """A cache of that many slots: those of `old`, if there is one, and zeroed ones after them."""

    def __call__(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """Logits f32 [V, N] over the cache, and the cache with the step's keys and values written, in its slots alone.

        A step may be taken back: nobody sees its slots then, and others write them again.
        """

    def greedy(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """As a call, but instead of logits the tokens i32 [N] with the highest, the lowest id of equals."""


class Stepper(Protocol):
    """The steps of a strategy, as the loop takes them. Its state is a pytree of fixed shapes."""

    @property
    def most_queries(self) -> int:
        """S, the most queries of an example in one step: the width of what `query` returns."""

    @property
    def places(self) -> tuple[int, int]:
        """R and W, rows and times of the queries whose answers are tokens; (0, 0): nothing can be wished of them."""

    @property
    def queries(self) -> tuple[int, ...] | None:
        """The sizes of steps of a whole batch that suit it; None: those of the device."""

    @property
    def slots(self) -> int:
        """The most slots a batch can fill: the most queries of any example in each step, summed over the steps."""

    @property
    def borrows(self) -> bool:
        """Whether it asks a small model of its own, which `Strategy.lend` gives it."""

    def position(self, row: Numbers, time: Numbers) -> Numbers:
        """The position of a slot, in training too: less that of a slot that it sees, it is how far that lies back."""

    def init(self, batch: int, source: SourceIds | None = None) -> Tree:
        """The state before the first step; `source`: for strategies that read it."""

    def query(self, state: Tree) -> tuple[Tree, Query]:
        """Opens the next step: the state with any new rows, and what to ask."""

    @property
    def choose(self) -> Callable[[Array], Tree] | None:
        """The function from logits f32 [V, N] to the answers, arrays [N, ...]; None: the most likely tokens i32 [N]."""

    def advance(self, state: Tree, answers: Tree) -> Tree:
        """Takes the answers [B, S, ...] to that step's live queries. A finished example must not change any more."""

    def kept(self, state: Tree) -> Array | None:
        """bool [B, S], of the queries of the last step those that later queries may see; None: all of them."""

    def done(self, state: Tree) -> Array:
        """bool [B], True at finished examples."""

    def result(self, state: Tree) -> Decoded:
        """The rows, once all are done."""


class Strategy(Stepper, Protocol):
    """A way to decode: its steps, and facts about them that its users ask.

    A strategy whose rows end at other tokens than `eos` as well has them in `other_ends`, a tuple: see `ends_of`.
    """

    @property
    def eos(self) -> int:
        """The token that ends a row; the first of several."""

    def start(self, row: Numbers) -> Numbers:
        """The time of the query whose answer is a row's first token; those of the others follow, one time each."""

    @property
    def reads_source(self) -> bool:
        """Whether `init` is given the source."""

    def suit(self, platform: str, *, costs: float, skips_fillers: bool) -> "Strategy":
        """The strategy as it is the fastest there.

        Args:
          platform: one of JAX's.
          costs: what a step costs whatever it computes, in queries.
          skips_fillers: whether a step costs the queries that are asked, and not those that it has room for.
        """

    def lend(self, model: Model[Tree], batch: int) -> "Strategy":
        """The strategy with the small model's decoder of a batch, if it `borrows` one; traced."""

    def calls(self, decoded: Decoded) -> np.ndarray:
        """i32 [B], decoder calls that an example takes by itself, in NumPy."""


def ends_of(strategy: Any) -> tuple[int, ...]:
    """The tokens that end a row of a strategy, `eos` first. A strategy without `other_ends` has that one alone."""
    return strategy.eos, *getattr(strategy, "other_ends", ())


def is_end(tokens: Array, ends: tuple[int, ...]) -> Array:
    """Whether each of the tokens, an array of any shape, is one of the ends."""
    found: Array = functools.reduce(operator.or_, (tokens == end for end in ends))
    return found


@dataclasses.dataclass(frozen=True)
class Plain:
    """The common part of most strategies: they read no source, borrow no model, and suit every device as they are."""

    reads_source: ClassVar[bool] = False
    borrows: ClassVar[bool] = False
    queries: ClassVar[tuple[int, ...] | None] = None
    choose: ClassVar[Any] = None  # greedily

    @property
    def places(self) -> tuple[int, int]:
        """None: nothing can be wished of its answers."""
        return 0, 0

    def position(self, row: Numbers, time: Numbers) -> Numbers:
        """The paper's."""
        return grid.position(row, time)

    def suit(self, platform: str, *, costs: float, skips_fillers: bool) -> Self:
        """See `Strategy`."""
        return self

    def lend(self, model: Model[Tree], batch: int) -> Self:
        """See `Strategy`."""
        return self

    def kept(self, state: Tree) -> Array | None:
        """All."""
        return None

    def calls(self, decoded: Decoded) -> np.ndarray:
        """One a step."""
        return np.asarray(decoded.steps)


class Refillable(Strategy, Protocol):
    """A strategy each of whose examples has a state of its own: all arrays of its state have a first axis of B."""

    def stop(self, state: Tree, which: Array) -> Tree:
        """The state with the examples bool [B] done."""

    def reread(self, state: Tree, source: SourceIds | None) -> Tree:
        """The state after the sources were padded to another length; only of a strategy that `reads_source`."""
