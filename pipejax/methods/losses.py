"""Token losses. Shapes: G sequences of a batch, N slots of a sequence, D width of the decoder, V vocabulary."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array
Loss = Callable[[Array, Array, Array], tuple[Array, Array]]  # `Method.loss`
LOGITS = 2**25  # the most logits computed at once: 128 MiB in float32; the backward pass needs a few copies


def cross_entropy(logits: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """The weighted negative log-likelihood of the targets (paper section 3.3, eq. 6).

    Args:
      logits: f32 [G, N, V].
      targets: i32 [G, N].
      weights: f32 [G, N], 0 at slots that do not count.

    Returns:
      Two f32 scalars: the weighted sum of the negative log-likelihoods, and the sum of the weights. Sums of parts of a
      batch add up exactly. The trainer divides them over the whole batch, so its loss is the mean over the real target
      tokens.
    """
    # A comparison instead of an index: the gradient of an index is a scatter into all logits, while the gradient of the
    # comparison is computed in the same pass as the gradient of softmax.
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    # A constant zero would be an array in `in_parts`, see `dropout.zero_dropped`.
    zero = (targets & 0)[..., None].astype(logits.dtype)
    chosen = jnp.where(is_target, logits, zero).sum(-1)
    nll = jax.nn.logsumexp(logits, axis=-1) - chosen
    return (nll * weights).sum(), weights.sum()


def in_parts(
    loss: Loss, head: Callable[[Array], Array], hidden: Array, targets: Array, weights: Array, *, vocabulary: int
) -> tuple[Array, Array]:
    """The loss of the logits head(hidden), computed in parts of at most about LOGITS logits to save memory.

    N is split into the smallest sufficient number of equal parts that divides it. The backward pass computes the logits
    of each part again.

    Args:
      loss: the loss of a part, such as `cross_entropy`.
      head: maps hidden states [G, n, D] to logits f32 [G, n, V].
      hidden: [G, N, D], the decoder's outputs.
      targets: i32 [G, N], or [G, N, choices].
      weights: f32 of the same shape.
      vocabulary: V.

    Returns:
      Two f32 scalars, the sums over all parts of the results of `loss`.
    """
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
