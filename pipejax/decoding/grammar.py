"""The texts that rows may be, as an automaton over tokens: the tokens after which a row can still end in time.

Shapes: V vocabulary, K kinds of tokens, P states, B batch, R rows, N queries of a step.
"""

from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.decoding.interface import is_end

Array = jax.Array
FAR = 1 << 20  # tokens to an end that cannot be reached
WORK = 4  # entries computed for each that a table may have: tokens of different bytes may move alike
# Kinds and states are padded to so many, or twice, four times ...: the tables of usual schemas have one shape, so that
# their answers share a compiled program.
LEAST = 512, 1024


class TableTooLarge(Exception):
    """A table would have too many entries, or take too many to compute."""


@flax.struct.dataclass
class Table:
    """An automaton over the tokens of a vocabulary. State 0 is of texts that cannot be; tokens of a kind move alike."""

    kinds: Array | np.ndarray  # i32 [V]
    moves: Array | np.ndarray  # i32 [K, P], the next state
    distance: Array | np.ndarray  # i32 [P], tokens to the nearest end at least; 0: a row may end there

    @classmethod
    def lift(
        cls,
        automaton: Sequence[np.ndarray],
        spelled: Sequence[bytes],
        *,
        most: int,
        pause: Callable[[], None] | None = None,
    ) -> "Table":
        """The table of an automaton over bytes, of at most so many entries.

        `automaton`: classes of bytes i32 [256], next states i32 [classes, states], accepting ones bool [states].
        `pause`: called from time to time, to let other threads work.

        Raises:
          TableTooLarge: it, or the work for it, would be larger.
        """
        # Each token is a function from states to states. Few differ, and a prefix of a token has one of its own.
        byte_kinds, moves, accepts = automaton
        states = moves.shape[1]
        functions = [np.zeros(states, np.int32), np.arange(states, dtype=np.int32)]
        number = {function.tobytes(): i for i, function in enumerate(functions)}
        lengths = np.fromiter(map(len, spelled), np.int64, len(spelled))
        parts = byte_kinds[np.frombuffer(b"".join(spelled), np.uint8)].astype(np.int64)
        begins = np.cumsum(lengths) - lengths
        kinds = np.where(lengths > 0, 1, 0)
        work = 0
        for place in range(int(lengths.max(initial=0))):  # of all tokens at once
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
        used, kinds = np.unique(np.append(kinds, 0), return_inverse=True)  # 0 stays the first
        return cls._padded(kinds[:-1].astype(np.int32), np.stack([functions[i] for i in used]), accepts)

    @classmethod
    def least(cls, size: int) -> "Table":
        """A table of the usual shape for a vocabulary of that size: whatever is written in state 1 stays there."""
        return cls._padded(np.zeros(size, np.int32), np.asarray([[0, 1]], np.int32), np.asarray([False, True]))

    @classmethod
    def _padded(cls, kinds: np.ndarray, moves: np.ndarray, accepts: np.ndarray) -> "Table":
        states = moves.shape[1]
        ordered = np.sort(moves.T, axis=1)  # the next states of each; equal ones count once
        begins, which = np.nonzero(np.diff(ordered, axis=1, prepend=-1))
        ends = ordered[begins, which]
        begins = begins[np.argsort(ends)]
        first = np.searchsorted(np.sort(ends), np.arange(states + 1))
        distance: np.ndarray = np.where(accepts, 0, FAR)
        reached, steps = np.flatnonzero(accepts), 0
        while len(reached):  # breadth first, against the edges
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
class Grammar:
    """The texts that the rows of a batch may be."""

    table: Table
    starts: Array | np.ndarray  # i32 [B, R], the state of each row before its first token that is no given one
    first: Array | np.ndarray  # i32 [B, R], the time of the query for that token
    last: (
        Array | np.ndarray
    )  # i32 [B, R], the time of the last query of the row, whose answer is an end token at the latest
    ends: tuple[int, ...] = flax.struct.field(pytree_node=False, default=(1,))  # tokens that end a row

    def take(self, numbers: np.ndarray) -> "Grammar":
        """The grammar of the examples with those numbers [E, B]; each of the E has the table, which they share."""
        table = jax.tree.map(lambda x: np.broadcast_to(x, (len(numbers), *x.shape)), self.table)
        starts, first, last = (np.asarray(x)[numbers] for x in (self.starts, self.first, self.last))
        return Grammar(table, starts, first, last, self.ends)

    def allow(self, states: Array, left: Array) -> Array:
        """bool [V, N], the tokens that may be chosen if `left` i32 [N] may follow, the end token included."""
        in_time = jnp.asarray(self.table.distance)[jnp.asarray(self.table.moves)[:, states]] < left  # [K, N]
        ids = jax.lax.broadcasted_iota(jnp.int32, (len(self.table.kinds), 1), 0)
        may_end = jnp.asarray(self.table.distance)[states] == 0
        return jnp.where(is_end(ids, self.ends), may_end, in_time[self.table.kinds])

    def move(self, states: Array, tokens: Array) -> Array:
        """i32 [N], the states after those tokens i32 [N]; an end token leaves a state as it is."""
        moved = jnp.asarray(self.table.moves)[jnp.asarray(self.table.kinds)[tokens], states]
        return jnp.where(is_end(tokens, self.ends), states, moved)
