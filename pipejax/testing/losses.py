"""Checks the loss of a method on random logits: it is a sum over slots, ignores padding, and teaches the target tokens.

Shapes: G sequences, N slots of a sequence, V vocabulary, C choices of a slot.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.decoding.strategy_checks import expect, refuse
from pipejax.methods import Method
from pipejax.testing.recomputation import compiled

GROUPS, SLOTS = 2, 6
NEAR = 1e-4
PARTS = ("loss", "divisor")
Pair = np.ndarray | jax.Array  # a summed loss and its divisor, f32 [2]


class Slots(NamedTuple):
    """The arguments of `Method.loss`."""

    logits: np.ndarray  # f32 [G, N, V]
    targets: np.ndarray  # i32 [G, N], or [G, N, C]
    weights: np.ndarray  # f32 of the same shape


class Losses(NamedTuple):
    """The results of a method's loss."""

    whole: Pair  # the loss of all slots
    examples: Pair  # the sum over the halves of the examples
    slots: Pair  # the sum over the halves of the slots
    padded: Pair  # the loss of all slots, with other logits and targets at slots with weight 0
    louder: Pair  # the loss of all slots, with doubled logits
    gradient: np.ndarray | jax.Array  # f32 [G, N, V], the gradient of the summed loss


def measure(method: Method, slots: Slots) -> Losses:
    """Computes all losses of slots that the checks compare, in one program.

    Raises:
      UserError: the loss does not return two float32 scalars.
    """
    found: Any = jax.eval_shape(method.loss, *slots)
    if not isinstance(found, tuple) or len(found) != 2:
        refuse(method, "loss", type(found).__name__, "a tuple of the summed loss and its divisor")
    for name, x in zip(PARTS, found, strict=True):
        expect(method, f"loss: {name}", x, "float32", ())
    return jax.device_get(compiled(partial(_measure, method.loss))(slots, _with_other_padding(slots)))


def _measure(loss: Callable[..., tuple[jax.Array, jax.Array]], slots: Slots, padded: Slots) -> Losses:
    """Computes the losses of `measure`. JAX traces this function."""

    def halved(axis: int) -> jax.Array:
        halves = zip(*(jnp.split(x, 2, axis=axis) for x in slots), strict=True)
        return jnp.stack([jnp.stack(loss(*half)) for half in halves]).sum(axis=0)

    def of(slots: Slots) -> jax.Array:
        return jnp.stack(loss(*slots))

    louder = slots._replace(logits=2 * slots.logits)
    gradient = jax.grad(loss, has_aux=True)(*slots)[0]
    return Losses(of(slots), halved(0), halved(1), of(padded), of(louder), gradient)


def random_slots(method: Method, vocabulary: int) -> Slots:
    """Returns random logits and distinct random targets.

    The weights are 0 at one slot of each sequence and at the end of one sequence, and 1 at all other slots.
    """
    rng, choices = np.random.default_rng(0), method.choices or 1
    logits = rng.standard_normal((GROUPS, SLOTS, vocabulary)).astype(np.float32)
    targets = rng.permuted(np.tile(np.arange(vocabulary), (GROUPS, SLOTS, 1)), axis=2)[..., :choices].astype(np.int32)
    weights = np.ones(targets.shape, np.float32)
    weights[:, 2] = weights[1, 4:] = 0.0
    return Slots(logits, *((targets, weights) if method.choices else (targets[..., 0], weights[..., 0])))


def _with_other_padding(slots: Slots) -> Slots:
    """Returns the slots with other logits and targets where the weight is 0."""
    is_padding = slots.weights.reshape(GROUPS, SLOTS, -1).max(axis=2) == 0
    logits, targets = slots.logits.copy(), slots.targets.copy()
    logits[is_padding] += 3.0 * np.arange(logits.shape[2]) / logits.shape[2]
    targets[is_padding] = (targets[is_padding] + 1) % logits.shape[2]
    return Slots(logits, targets, slots.weights)


def check_sum(method: Method, losses: Losses) -> None:
    """Compares the loss and the divisor of a batch with their sums over halves of it."""
    for what, halves in (("examples", losses.examples), ("slots", losses.slots)):
        for name, here, there in zip(PARTS, losses.whole, halves, strict=True):
            if not np.isclose(here, there, rtol=NEAR):
                expected = f"{there:.6g}, the sum over the two halves of its {what}"
                refuse(method, f"loss: {name}", f"{here:.6g} for a batch", expected)


def check_padding(method: Method, losses: Losses) -> None:
    """Requires the same loss and divisor with other logits and targets at slots with weight 0."""
    for name, before, after in zip(PARTS, losses.whole, losses.padded, strict=True):
        if not np.isclose(before, after, rtol=NEAR):
            found = f"{before:.6g}, then {after:.6g} after a change at slots with weight 0"
            refuse(method, f"loss: {name}", found, "the same value")


def check_targets(method: Method, slots: Slots, losses: Losses) -> None:
    """Requires that gradient descent raises the logit of a target token most at every slot with a weight.

    The divisor must be positive, and must not depend on the logits.
    """
    targets = slots.targets.reshape(GROUPS, SLOTS, -1)
    weights = slots.weights.reshape(targets.shape)
    for g, n in np.argwhere(weights.max(axis=2) > 0).tolist():
        gradient, rights = losses.gradient[g, n], targets[g, n][weights[g, n] > 0].tolist()
        most = int(gradient.argmin())
        if not (np.isfinite(gradient).all() and gradient[most] < 0):
            found = "a gradient that raises no logit at a slot with a weight"
            refuse(method, "loss", found, "a gradient that raises the logit of a target token")
        if most not in rights:
            expected = f"token {' or '.join(map(str, rights))}, as in `targets`"
            refuse(method, "loss", f"a gradient that raises the logit of token {most} most", expected)
    before, after = losses.whole[1], losses.louder[1]
    if not (0 < before < np.inf and np.isclose(before, after, rtol=NEAR)):
        found = f"{before:.6g}, then {after:.6g} with other logits"
        refuse(method, "loss: divisor", found, "a positive number that does not depend on logits")
