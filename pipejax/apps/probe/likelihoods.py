"""The likelihood of each target token while the rows above its own are seen whole, in part, or hidden.

A condition is a mask of the teacher-forced pass, laid over that of training: positions, distances and tokens stay as
the model learned them. Each of its masks is transitive, so no hidden token reaches a query by way of another row.

Shapes: B batch, L source length, N slots of a target, C conditions, P conditions of a call.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax import grid
from pipejax.config import GRID
from pipejax.data.encoding import Encoded
from pipejax.data.shapes import Shapes, choose_pairs, pad
from pipejax.model.backbone import Module
from pipejax.model.precision import precision
from pipejax.system import Tree

Array = jax.Array
SLOTS = 512  # of a call and example, at the most, where a target has fewer: their attention grows with the square
SHAPES = 4  # padded sizes, at the most: each is compiled
WHOLE, HIDDEN = GRID, -GRID  # as a Δt: rows above are seen to their ends, or not at all
NONE = -1  # no row


class Condition(NamedTuple):
    """The part of the rows above that a token sees."""

    delay: int  # as much as this Δt lets it see; WHOLE; HIDDEN
    without: int = NONE  # the row, from 0, that no other row sees


class Parted(NamedTuple):
    """A target whose slots are told apart by rows."""

    encoded: Encoded
    row: np.ndarray  # i32 [N], from 0
    place: np.ndarray  # i32 [N], within the row; at 0 its first token is generated


def of_rows(encoded: Encoded, row: np.ndarray) -> Parted:
    time = encoded.target.time
    first = np.full(int(row.max()) + 1, np.iinfo(np.int32).max, np.int32)
    np.minimum.at(first, row, time)
    return Parted(encoded, row, time - first[row])


def unhidden(row: Array, place: Array, delay: Array, without: Array) -> Array:
    """Which keys a query may see under a condition, beside the mask of training: bool [..., N, N] of i32 [..., N].

    The beginning of a row is always seen: it tells which row one's own is, as bos does in decoding.
    """
    query_row, query_place = row[..., None], place[..., None]
    key_row, key_place = row[..., None, :], place[..., None, :]
    in_time = key_place <= query_place + delay * (query_row - key_row)  # Δt, by `grid.start` and `grid.visible`
    return (key_row == query_row) | (key_place == 0) | (in_time & (key_row != without))


def likelihoods(model: Module, params: Tree, batch: dict[str, Array], delay: Array, without: Array) -> Array:
    """Negative log-likelihoods f32 [B, P, N] of the targets, in nats; padding has numbers that mean nothing.

    The copies of a target lie end to end as slots of one pass, so that one encoder pass serves all of them. A batch has
    source [B, L], source_length [B], slots [B], and of each slot inputs, targets, row, time, part, place [B, N], of
    which row and time are those of training; delay and without are i32 [P], of the conditions.
    """
    inputs, row, time = batch["inputs"], batch["row"], batch["time"]
    (size, slots), count = inputs.shape, len(delay)
    real = jnp.arange(slots) < batch["slots"][:, None]
    learned = grid.visible(row[:, :, None], time[:, :, None], row[:, None, :], time[:, None, :]) & real[:, None, :]
    seen = jax.vmap(partial(unhidden, batch["part"], batch["place"]), out_axes=1)(delay, without) & learned[:, None]
    alone = jnp.eye(count, dtype=bool)[:, None, :, None] & seen[:, :, :, None, :]  # [B, P, N, P, N]
    variables = {"params": params}
    hidden: Array = model.apply(
        variables,
        batch["source"],
        jnp.arange(batch["source"].shape[1]) < batch["source_length"][:, None],
        jnp.tile(inputs, (1, count)),
        alone.reshape(size, count * slots, count * slots),
        jnp.tile(grid.position(row, time), (1, count)),
        method="hidden",
    )

    def of_condition(hidden: Array) -> Array:
        logits: Array = model.apply(variables, hidden, method="logits")
        chosen = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen

    # One condition's logits at a time: they are the largest arrays.
    return jax.lax.map(of_condition, hidden.reshape(size, count, slots, -1).swapaxes(0, 1)).swapaxes(0, 1)


def fit_shapes(targets: Sequence[Parted], size: int, group: int) -> Shapes:
    """A few padded sizes for batches of so many targets, of which so many batches are sorted by length."""
    lengths = np.asarray([(len(target.encoded.source), len(target.row)) for target in targets], np.int64)
    source, slots = lengths.max(axis=0).tolist()
    return choose_pairs(lengths, size=size, group=group, pack=1, most=SHAPES, limit=(source, slots))


class Meter:
    """Measures targets batch by batch, with a few compiled programs."""

    def __init__(self, model: Module, params: Tree, conditions: Sequence[Condition], shapes: Shapes, size: int) -> None:
        self.model, self.params, self.conditions = model, params, conditions
        self.shapes, self.size = shapes, size
        self._program = jax.jit(partial(likelihoods, model))

    def batches(self, targets: Sequence[Parted]) -> list[list[int]]:
        lengths = [(len(target.encoded.source), len(target.row)) for target in targets]
        order = self.shapes.order(np.asarray(lengths, np.int64)).tolist()
        return [order[first : first + self.size] for first in range(0, len(order), self.size)]

    def measure(self, targets: Sequence[Parted]) -> list[np.ndarray]:
        """Negative log-likelihoods f32 [C, N] of each target, of at most B."""
        batch = padded([*targets, *[targets[-1]] * (self.size - len(targets))], self.shapes)
        count, found = at_once(batch, self.conditions), list[np.ndarray]()
        for first in range(0, len(self.conditions), count):
            part = [*self.conditions[first : first + count]]
            given = part + [self.conditions[0]] * (count - len(part))  # one program for all parts
            delay, without = np.asarray(given, np.int32).T
            with precision(self.model.dtype):
                answer = jax.device_get(self._program(self.params, batch, delay, without))
            found.append(answer[:, : len(part)])
        joined = np.concatenate(found, axis=1)
        return [joined[i, :, : len(target.row)] for i, target in enumerate(targets)]


def at_once(batch: dict[str, np.ndarray], conditions: Sequence[Condition]) -> int:
    return min(max(SLOTS // batch["inputs"].shape[1], 1), len(conditions))


def padded(targets: Sequence[Parted], shapes: Shapes) -> dict[str, np.ndarray]:
    """The arrays of a batch, as `likelihoods` describes them; and weights f32 [B, N]."""
    sources = [target.encoded.source for target in targets]
    length, slots = shapes.fit((max(map(len, sources)), max(len(target.row) for target in targets)))
    batch = {"source": pad(sources, length), "source_length": np.asarray([*map(len, sources)], np.int32)}
    for name in grid.Flat._fields:
        batch[name] = pad([getattr(target.encoded.target, name) for target in targets], slots)
    batch |= {"part": pad([t.row for t in targets], slots), "place": pad([t.place for t in targets], slots)}
    return batch | {"slots": np.asarray([len(target.row) for target in targets], np.int32)}
