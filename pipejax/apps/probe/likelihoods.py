"""The likelihood of each target token with the earlier rows visible completely, in part, or not at all.

A condition is a mask of the teacher-forced pass in addition to the training mask: positions, distances and tokens stay
as in training. Each of its masks is transitive, so no information of a hidden token reaches a query through another
row.

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
SLOTS = 512  # the most slots per call and example, unless one target has more; attention grows with their square
SHAPES = 4  # the most padded sizes; each is compiled
WHOLE, HIDDEN = GRID, -GRID  # values of Δt: earlier rows are visible to their ends, or not at all
NONE = -1  # no row


class Condition(NamedTuple):
    """The part of the earlier rows that is visible to a token."""

    delay: int  # the Δt that makes this part visible in decoding; or WHOLE or HIDDEN
    without: int = NONE  # a row, from 0, that is hidden from all other rows


class Parted(NamedTuple):
    """A target with the row of each slot."""

    encoded: Encoded
    row: np.ndarray  # i32 [N], from 0
    place: np.ndarray  # i32 [N], position within the row; at 0 its first token is generated


def of_rows(encoded: Encoded, row: np.ndarray) -> Parted:
    """Returns a target with its slots' rows (i32 [N]) and the positions computed from them."""
    time = encoded.target.time
    first = np.full(int(row.max()) + 1, np.iinfo(np.int32).max, np.int32)
    np.minimum.at(first, row, time)
    return Parted(encoded, row, time - first[row])


def unhidden(row: Array, place: Array, delay: Array, without: Array) -> Array:
    """Returns which keys are visible to a query under a condition, in addition to the training mask: bool [..., N, N].

    The first token of a row is always visible, because it identifies the query's row, as bos does in decoding. `row`
    and `place` are i32 [..., N].
    """
    query_row, query_place = row[..., None], place[..., None]
    key_row, key_place = row[..., None, :], place[..., None, :]
    in_time = key_place <= query_place + delay * (query_row - key_row)  # Δt, by `grid.start` and `grid.visible`
    return (key_row == query_row) | (key_place == 0) | (in_time & (key_row != without))


def likelihoods(model: Module, params: Tree, batch: dict[str, Array], delay: Array, without: Array) -> Array:
    """Returns the negative log-likelihoods f32 [B, P, N] of the targets, in nats; values at padding are undefined.

    The P copies of a target are concatenated as slots of one pass, so that they share one pass of the encoder.

    Args:
      model: the module.
      params: its parameters.
      batch: source i32 [B, L], source_length [B], slots [B], and inputs, targets, row, time, part and place [B, N]. Row
        and time are the coordinates in training; part and place are the row and position for the conditions.
      delay: i32 [P], by condition.
      without: i32 [P], by condition.
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

    # The logits are the largest arrays, so they are computed for one condition at a time.
    return jax.lax.map(of_condition, hidden.reshape(size, count, slots, -1).swapaxes(0, 1)).swapaxes(0, 1)


def fit_shapes(targets: Sequence[Parted], size: int, group: int) -> Shapes:
    """Returns a few padded sizes for batches of `size` targets; `group` batches are sorted together by length."""
    lengths = np.asarray([(len(target.encoded.source), len(target.row)) for target in targets], np.int64)
    source, slots = lengths.max(axis=0).tolist()
    return choose_pairs(lengths, size=size, group=group, pack=1, most=SHAPES, limit=(source, slots))


class Meter:
    """Measures targets batch by batch, with a few compiled programs.

    A batch has at most B targets, and all conditions are measured for it, P in each call.
    """

    def __init__(self, model: Module, params: Tree, conditions: Sequence[Condition], shapes: Shapes, size: int) -> None:
        self.model, self.params, self.conditions = model, params, conditions
        self.shapes, self.size = shapes, size
        self._program = jax.jit(partial(likelihoods, model))

    def batches(self, targets: Sequence[Parted]) -> list[list[int]]:
        """Returns the indices of targets in batches of at most B with similar lengths."""
        lengths = [(len(target.encoded.source), len(target.row)) for target in targets]
        order = self.shapes.order(np.asarray(lengths, np.int64)).tolist()
        return [order[first : first + self.size] for first in range(0, len(order), self.size)]

    def measure(self, targets: Sequence[Parted]) -> list[np.ndarray]:
        """Returns the negative log-likelihoods f32 [C, N] of each target; there are at most B targets."""
        batch = padded([*targets, *[targets[-1]] * (self.size - len(targets))], self.shapes)
        count, found = at_once(batch, self.conditions), list[np.ndarray]()
        for first in range(0, len(self.conditions), count):
            part = [*self.conditions[first : first + count]]
            given = part + [self.conditions[0]] * (count - len(part))  # filled up to `count`, for one program
            delay, without = np.asarray(given, np.int32).T
            with precision(self.model.dtype):
                answer = jax.device_get(self._program(self.params, batch, delay, without))
            found.append(answer[:, : len(part)])
        joined = np.concatenate(found, axis=1)
        return [joined[i, :, : len(target.row)] for i, target in enumerate(targets)]


def at_once(batch: dict[str, np.ndarray], conditions: Sequence[Condition]) -> int:
    """Returns P, the number of conditions that one call can measure within SLOTS slots."""
    return min(max(SLOTS // batch["inputs"].shape[1], 1), len(conditions))


def padded(targets: Sequence[Parted], shapes: Shapes) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch for `likelihoods`, and weights f32 [B, N]."""
    sources = [target.encoded.source for target in targets]
    length, slots = shapes.fit((max(map(len, sources)), max(len(target.row) for target in targets)))
    batch = {"source": pad(sources, length), "source_length": np.asarray([*map(len, sources)], np.int32)}
    for name in grid.Flat._fields:
        batch[name] = pad([getattr(target.encoded.target, name) for target in targets], slots)
    batch |= {"part": pad([t.row for t in targets], slots), "place": pad([t.place for t in targets], slots)}
    return batch | {"slots": np.asarray([len(target.row) for target in targets], np.int32)}
