"""Token losses. Shapes: G rows of slots, N slots of a row, D width, V vocabulary."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array
Loss = Callable[[Array, Array, Array], tuple[Array, Array]]  # `Method.loss`
LOGITS = 2**25  # at the most at once: 128 MiB in float32, of which the backward pass needs a few copies


def cross_entropy(logits: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted negative log-likelihood [G, N]: its sum and that of weights, f32 scalars (paper section 3.3, eq. 6).

    Sums, so that parts of a batch add up exactly; the mean is over the real target tokens of the whole batch.
    """
    # Not looked up: the gradient of that is a scatter into all logits, and of this a part of softmax's own pass.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    zero = (targets & 0)[..., None].astype(logits.dtype)  # a plain one is an array in `in_parts`: see `dropout.left`
    chosen = jnp.where(is_target, logits, zero).sum(-1)
    nll = jax.nn.logsumexp(logits, axis=-1) - chosen
    return (nll * weights).sum(), weights.sum()


def in_parts(
    loss: Loss, head: Callable[[Array], Array], hidden: Array, targets: Array, weights: Array, *, vocabulary: int
) -> tuple[Array, Array]:
    """The loss of logits f32 [G, N, V] = head(hidden), LOGITS of them at once where N can be parted so."""
    groups, slots = targets.shape[:2]
    wanted = -(-groups * slots * vocabulary // LOGITS)
    parts = next(count for count in range(1, slots + 1) if slots % count == 0 and count >= min(wanted, slots))
    if parts == 1:
        return loss(head(hidden), targets, weights)

    def apart(x: Array) -> Array:
        return x.reshape(groups, parts, slots // parts, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def add(sums: tuple[Array, Array], part: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
        total, count = loss(head(part[0]), *part[1:])
        return (sums[0] + total, sums[1] + count), None

    zero = jnp.float32(0), jnp.float32(0)
    return jax.lax.scan(add, zero, (apart(hidden), apart(targets), apart(weights)))[0]
