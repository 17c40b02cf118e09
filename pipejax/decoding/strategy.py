"""The interfaces of the decoding loop: a strategy, which chooses the queries, and a model, which computes logits.

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
    length: Array | np.ndarray  # i32 [B], number of ids of each source; the rest is padding
    encoded: Array | None = None  # [B, L, D], the encoder's output, if the drafter wants it
    memory: Tree = None  # the result of the drafter's `read`, if it has one; the first axis of all arrays is B
    parameters: Tree = None  # the drafter's parameters, if it has some; the same for all examples
    forced: Array | np.ndarray | None = None  # i32 [B, R, W], as in `DecodingOptions`, in methods of `Drafts`
    apart: bool = flax.struct.field(pytree_node=False, default=False)  # whether examples count their slots separately
    width: int = flax.struct.field(pytree_node=False, default=0)  # W, the decoder's width, if a drafter wants outputs
    setting: Any = flax.struct.field(pytree_node=False, default=None)  # a `drafters.Setting`, in methods of a drafter


@flax.struct.dataclass
class Decoded:
    """The result of a strategy: rows of tokens without bos and eos.

    In different batches the last digits of an example's `log_probs` may differ, and with drafts also `calls` and
    `trace`. Its tokens differ only if two tokens are equally likely up to rounding.
    """

    tokens: Array  # i32 [B, R, W], R rows, W the length of the longest; undefined beyond `lengths`
    lengths: Array  # i32 [B, R], 0 for empty rows and rows that never started
    steps: Array  # i32 [B], time-steps of Algorithm 1 (paper section 3.4), those without an open row included
    truncated: Array  # i32 [B], index into TRUNCATIONS
    calls: Array | np.ndarray | None = None  # i32 [B], decoder calls; None: `Strategy.calls` computes them
    # f32 [B, R, W], the log-probability of the token generated at each row and time, if `DecodingOptions.scores`
    log_probs: Array | None = None
    trace: Trace | None = None  # the drafted and accepted tokens of each call, if `Drafts.trace`


class Model(Protocol[Cache]):
    """The decoder of a batch of encoded sources."""

    def cache(self, slots: int, old: Cache | None) -> Cache:
        """Returns a cache of `slots` slots: the slots of `old`, if given, followed by slots of zeros."""

    def __call__(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """Returns the logits f32 [V, N] of a step's queries, and the cache with the keys and values of these queries.

        A step may be undone: its cache slots are masked and later overwritten.
        """

    def greedy(self, step: Step, cache: Cache) -> tuple[Array, Cache]:
        """Like `__call__`, but returns the argmax tokens i32 [N] instead of logits; ties go to the lowest id."""


class ModelWithHidden(Model[Cache], Protocol):
    """A model for drafters that want the outputs of the decoder."""

    def with_hidden(self, step: Step, cache: Cache) -> tuple[Array, Array, Cache]:
        """Like `__call__`, but also returns the outputs of the decoder [N, W], from which it computes the logits."""


class Stepper(Protocol):
    """The steps of a strategy, which the decoding loop takes. The state of a strategy is a pytree of fixed shapes."""

    @property
    def most_queries(self) -> int:
        """S, the largest number of queries of an example in one step: the width of the arrays of `query`."""

    @property
    def places(self) -> tuple[int, int]:
        """R and W, the numbers of rows and times of generated tokens; (0, 0): `DecodingOptions` are not supported."""

    @property
    def queries(self) -> tuple[int, ...] | None:
        """The numbers of queries in a batch's step for which loops are compiled; None: the default of the device."""

    @property
    def slots(self) -> int:
        """The most slots that a batch can fill: the sum over steps of the largest number of queries of an example."""

    @property
    def drafter(self) -> Any:
        """The `drafters.Drafter` that guesses tokens; None: there are no drafts."""

    def position(self, row: Numbers, time: Numbers) -> Numbers:
        """Returns the position of a slot, also in training.

        A relative position is the position of the query minus the position of the key.
        """

    def init(self, batch: int, source: SourceIds | None = None) -> Tree:
        """Returns the state before the first step. `source` is given if the strategy `reads_source`."""

    def query(self, state: Tree) -> tuple[Tree, Query]:
        """Begins the next step: starts rows, and returns the new state and the queries."""

    @property
    def choose(self) -> Callable[[Array], Tree] | None:
        """A function from logits f32 [V, N] to arrays [N, ...] for `advance`; None: the most likely tokens i32 [N]."""

    def advance(self, state: Tree, answers: Tree) -> Tree:
        """Ends a step, given the tokens i32 [B, S] generated for its queries (or the arrays [B, S, ...] of `choose`).

        Entries of queries that are not live are undefined. The result of a finished example must not change any more.
        """

    def kept(self, state: Tree) -> Array | None:
        """Returns bool [B, S], the queries of the last step that later queries may see; None: all of them."""

    def done(self, state: Tree) -> Array:
        """Returns bool [B], True for finished examples."""

    def result(self, state: Tree) -> Decoded:
        """Returns the rows generated so far; final for finished examples."""


class Strategy(Stepper, Protocol):
    """A decoding strategy: its steps, and properties that callers of the loop need.

    If rows may also end with tokens other than `eos`, the strategy has a tuple of them, `other_ends`: see `ends_of`. If
    some rows do not see each other, the strategy has a method `group(row)`: see `group_of`.
    """

    @property
    def eos(self) -> int:
        """The token that ends a row; the first one if there are several."""

    def start(self, row: Numbers) -> Numbers:
        """Returns the time of the query that generates a row's first token.

        Each further token is generated one time-step later.
        """

    @property
    def reads_source(self) -> bool:
        """Whether `init` needs the source."""

    def tuned_for(self, platform: str, *, costs: float, skips_fillers: bool) -> "Strategy":
        """Returns the strategy tuned for a platform; its answers are the same.

        Args:
          platform: JAX's name of the platform.
          costs: the fixed cost of a step, in units of the cost of one query.
          skips_fillers: whether the cost of a step depends on its live queries, and not on the size compiled for.
        """

    def bind_source(self, source: SourceIds) -> "Strategy":
        """Returns the strategy with the sources of a batch and the parameters of the drafter; traced.

        A strategy without drafts is returned unchanged.
        """

    def calls(self, decoded: Decoded) -> np.ndarray:
        """Returns i32 [B], the decoder calls that each example would take if it were decoded alone; in NumPy."""


def ends_of(strategy: Any) -> tuple[int, ...]:
    """Returns the tokens that end a row of a strategy: `eos`, then `other_ends` if the strategy has this attribute."""
    return strategy.eos, *getattr(strategy, "other_ends", ())


def group_of(strategy: Any) -> Callable[[Numbers], Numbers] | None:
    """Returns the function from rows to their groups, see `grid.shares_group`; None: all rows are in group 0."""
    found: Callable[[Numbers], Numbers] | None = getattr(strategy, "group", None)
    return found


def wants(drafter: Any, what: str) -> bool:
    """Returns whether a drafter wants `what`, an element of `drafters.WANTS`; False without a drafter."""
    return what in getattr(drafter, "wants", ())


def is_end(tokens: Array, ends: tuple[int, ...]) -> Array:
    """Returns bool, of the shape of `tokens`: whether each token is one of the `ends`."""
    found: Array = functools.reduce(operator.or_, (tokens == end for end in ends))
    return found


@dataclasses.dataclass(frozen=True)
class Plain:
    """The base class of most strategies: reads no source, has no drafter, and is the same on every device."""

    reads_source: ClassVar[bool] = False
    drafter: ClassVar[Any] = None
    queries: ClassVar[tuple[int, ...] | None] = None
    choose: ClassVar[Any] = None  # the most likely tokens
    group: ClassVar[Any] = None  # all rows are in group 0

    @property
    def places(self) -> tuple[int, int]:
        """(0, 0): `DecodingOptions` are not supported."""
        return 0, 0

    def position(self, row: Numbers, time: Numbers) -> Numbers:
        """Returns the paper's position, row + time."""
        return grid.position(row, time)

    def tuned_for(self, platform: str, *, costs: float, skips_fillers: bool) -> Self:
        """See `Strategy`."""
        return self

    def bind_source(self, source: SourceIds) -> Self:
        """See `Strategy`."""
        return self

    def kept(self, state: Tree) -> Array | None:
        """Returns None: later queries may see all queries."""
        return None

    def calls(self, decoded: Decoded) -> np.ndarray:
        """Returns i32 [B], one call for each step."""
        return np.asarray(decoded.steps)


class Refillable(Strategy, Protocol):
    """A strategy for running batches: all arrays of its state have a first axis of B, so examples can be replaced."""

    def stop(self, state: Tree, which: Array) -> Tree:
        """Returns the state with the examples `which`, bool [B], marked as done."""

    def reread(self, state: Tree, source: SourceIds | None) -> Tree:
        """Returns the state for the same sources padded to another length.

        The method is called only if the strategy `reads_source`.
        """
