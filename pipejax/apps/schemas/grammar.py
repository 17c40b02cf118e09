"""Restricts rows to the texts of an automaton: a row may take only tokens after which it can still end in time.

Shapes: V vocabulary, K kinds of tokens (tokens of a kind have the same transitions), P states, B batch, R rows,
N queries of a step.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.decoding.rules import FORBIDDEN, Queries, Rule
from pipejax.decoding.strategy import is_end

Array = jax.Array
FAR = 1 << 20  # the distance to an end that cannot be reached
WORK = 4  # entries that may be computed, as a multiple of the table's largest size: most kinds occur repeatedly
# The numbers of kinds and of states are padded to these values times a power of two. So the tables of common schemas
# have one shape, and their answers share a compiled program.
LEAST = 512, 1024


class TableTooLarge(Exception):
    """Raised if a table would have too many entries, or if computing the table would take too much work."""


@flax.struct.dataclass
class Table:
    """An automaton over the tokens of a vocabulary. State 0 is the state of invalid texts."""

    kinds: Array | np.ndarray  # i32 [V], the kind of each token
    moves: Array | np.ndarray  # i32 [K, P], the next state, by kind of token and state
    distance: Array | np.ndarray  # i32 [P], the fewest tokens to a state in which a row may end; 0: it may end here

    @classmethod
    def lift(
        cls,
        automaton: Sequence[np.ndarray],
        spelled: Sequence[bytes],
        *,
        most: int,
        pause: Callable[[], None] | None = None,
    ) -> "Table":
        """Lifts an automaton over bytes to tokens.

        Args:
          automaton: classes of bytes i32 [256], next states i32 [classes, states], accepting states bool [states].
          spelled: the bytes of each of the V tokens.
          most: the largest number of entries of the table.
          pause: called from time to time, to let other threads work.

        Raises:
          TableTooLarge: the table would have more than `most` entries, or take too much work.
        """
        # Each token is a function from states to states, composed of the functions of its bytes. Few of them differ.
        byte_kinds, moves, accepts = automaton
        states = moves.shape[1]
        functions = [np.zeros(states, np.int32), np.arange(states, dtype=np.int32)]
        number = {function.tobytes(): i for i, function in enumerate(functions)}
        lengths = np.fromiter(map(len, spelled), np.int64, len(spelled))
        parts = byte_kinds[np.frombuffer(b"".join(spelled), np.uint8)].astype(np.int64)
        begins = np.cumsum(lengths) - lengths
        kinds = np.where(lengths > 0, 1, 0)
        work = 0
        for place in range(int(lengths.max(initial=0))):  # the byte at this place of all tokens at once
            longer = np.flatnonzero((lengths > place) & (kinds > 0))
            pairs, which = np.unique(kinds[longer] * 256 + parts[begins[longer] + place], return_inverse=True)
            work += len(pairs) * states
            if work > WORK * most:
                raise TableTooLarge(f"more than {WORK * most} entries to compute for its table")
            after = np.zeros(len(pairs), np.int64)
            for i, pair in enumerate(pairs.tolist()):
                if pause:
                    pause()
                function = moves[pair % 256][functions[pair // 256]]
                after[i] = number.setdefault(function.tobytes(), len(functions))
                if after[i] == len(functions):
                    functions.append(function)
                if len(functions) * states > most:
                    raise TableTooLarge(f"more than {most} entries in its table")
            kinds[longer] = after[which.reshape(-1)]
        used, kinds = np.unique(np.append(kinds, 0), return_inverse=True)  # kind 0 remains the first
        return cls._padded(kinds[:-1].astype(np.int32), np.stack([functions[i] for i in used]), accepts)

    @classmethod
    def least(cls, size: int) -> "Table":
        """Returns a table of the usual shape for a vocabulary of `size` tokens.

        Every token leads from state 1 to state 1.
        """
        return cls._padded(np.zeros(size, np.int32), np.asarray([[0, 1]], np.int32), np.asarray([False, True]))

    @classmethod
    def _padded(cls, kinds: np.ndarray, moves: np.ndarray, accepts: np.ndarray) -> "Table":
        """Returns a table padded to one of the common shapes.

        The distances i32 [P] are found by a breadth-first search from the accepting states.
        """
        states = moves.shape[1]
        ordered = np.sort(moves.T, axis=1)  # the next states of each state; duplicates are skipped below
        begins, which = np.nonzero(np.diff(ordered, axis=1, prepend=-1))
        ends = ordered[begins, which]
        begins = begins[np.argsort(ends)]
        first = np.searchsorted(np.sort(ends), np.arange(states + 1))
        distance: np.ndarray = np.where(accepts, 0, FAR)
        reached, steps = np.flatnonzero(accepts), 0
        while len(reached):  # breadth-first search along reversed edges
            steps += 1
            before = np.concatenate([begins[first[end] : first[end + 1]] for end in reached])
            reached = np.unique(before[distance[before] == FAR])
            distance[reached] = steps
        shape = tuple(max(least, 1 << (n - 1).bit_length()) for n, least in zip(moves.shape, LEAST, strict=True))
        wide = np.zeros(shape, np.int32)
        wide[: moves.shape[0], : moves.shape[1]] = moves
        far = np.full(shape[1] - len(distance), FAR)
        return cls(kinds, wide, np.append(distance, far).astype(np.int32))


@flax.struct.dataclass
class Grammar(Rule):
    """The rule that rows are texts of an automaton. The state of a row, i32 [B, R], is the state of the automaton."""

    shared: ClassVar[tuple[str, ...]] = ("table",)

    table: Table
    starts: Array | np.ndarray  # i32 [B, R], the state of each row after its given prefix
    first: Array | np.ndarray  # i32 [B, R], the time of the query that generates the first token after the prefix
    last: Array | np.ndarray  # i32 [B, R], the time of the query that generates an end token at the latest
    ends: tuple[int, ...] = flax.struct.field(pytree_node=False, default=(1,))  # tokens that end a row

    def init(self, batch: int, rows: int) -> Array:
        """See `Rule`. Returns the states of the rows after their given prefixes."""
        return jnp.asarray(self.starts)

    def apply(self, logits: Array, queries: Queries, state: Array) -> Array:
        """See `Rule`. Forbids the tokens after which the row cannot end in time."""
        left = queries.pick(self.last) - queries.time
        return jnp.where(self.allow(queries.pick(state), left), logits, FORBIDDEN)

    def follow(self, state: Array, tokens: Array, queries: Queries) -> Array:
        """See `Rule`. Tokens of a given prefix do not change the state."""
        states = queries.pick(state)
        moved = jnp.where(queries.time >= queries.pick(self.first), self.move(states, tokens), states)
        return queries.put(state, moved)

    def allow(self, states: Array, left: Array) -> Array:
        """Returns the tokens that may be chosen, bool [V, N].

        A token is allowed if the text can be completed with fewer than `left` i32 [N] further tokens. An end token is
        allowed if the text may end in its state, i32 [N].
        """
        in_time = jnp.asarray(self.table.distance)[jnp.asarray(self.table.moves)[:, states]] < left  # [K, N]
        ids = jax.lax.broadcasted_iota(jnp.int32, (len(self.table.kinds), 1), 0)
        may_end = jnp.asarray(self.table.distance)[states] == 0
        return jnp.where(is_end(ids, self.ends), may_end, in_time[self.table.kinds])

    def move(self, states: Array, tokens: Array) -> Array:
        """Returns the states i32 [N] after the tokens i32 [N]; an end token does not change the state."""
        moved = jnp.asarray(self.table.moves)[jnp.asarray(self.table.kinds)[tokens], states]
        return jnp.where(is_end(tokens, self.ends), states, moved)
