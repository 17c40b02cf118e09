"""Token losses. Shapes: G sequences of a batch, N slots of a sequence, D width of the decoder, V vocabulary."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

Array = jax.Array
Loss = Callable[[Array, Array, Array], tuple[Array, Array]]  # `Method.loss`
LOGITS = 2**25  # the most logits computed at once: 128 MiB in float32; their gradient needs a few copies
GPU_LOGITS = 2**27  # on a GPU: each part reads the table and adds to its gradient, so fewer parts move fewer bytes


def cross_entropy(logits: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """Computes the weighted negative log-likelihood of the targets (paper section 3.3, eq. 6).

    Args:
      logits: f32 [G, N, V].
      targets: i32 [G, N].
      weights: f32 [G, N], 0 at slots that do not count.

    Returns:
      Two f32 scalars: the weighted sum of the negative log-likelihoods, and the sum of the weights. Sums of parts of a
      batch add up exactly. The trainer divides them over the whole batch, so its loss is the mean over the real target
      tokens.
    """
    nll = jax.nn.logsumexp(logits, axis=-1) - _logit_of(targets, logits)
    return (nll * weights).sum(), weights.sum()


@jax.custom_vjp
def _logit_of(targets: Array, logits: Array) -> Array:
    """Returns the logits f32 [G, N] of the targets.

    JAX's own gradient of the indexing would be a scatter into all logits. The gradient defined here is a comparison,
    which XLA computes in the same pass as the gradient of the softmax.
    """
    return jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]


def _logit_forward(targets: Array, logits: Array) -> tuple[Array, tuple[Array, Array]]:
    return _logit_of(targets, logits), (targets, jnp.arange(logits.shape[-1]))


def _logit_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[None, Array]:
    """Returns None for the targets, and the gradient f32 [G, N, V] of the logits."""
    targets, words = kept
    # A constant zero would be an array in `in_parts`, see `dropout.zero_dropped`.
    zero = (targets & 0)[..., None].astype(gradient.dtype)
    return None, jnp.where(words == targets[..., None], gradient[..., None], zero)


_logit_of.defvjp(_logit_forward, _logit_backward)


def most_logits(platform: str) -> int:
    """Returns the largest number of logits that are computed at once on devices of a platform, such as "cpu"."""
    return GPU_LOGITS if platform in ("gpu", "cuda") else LOGITS


def in_parts(
    loss: Loss,
    head: Callable[[Array], Array],
    hidden: Array,
    targets: Array,
    weights: Array,
    *,
    vocabulary: int,
    most: int | None = None,
) -> tuple[Array, Array]:
    """Computes the loss of the logits head(hidden) in parts of a limited number of logits, to save memory.

    N is split into the smallest sufficient number of equal parts that divides N. If there are several parts and a
    gradient is wanted, each part computes its loss and its gradients at once, so that its logits are computed only
    once; the backward pass multiplies these gradients by the gradient of the sum. The gradient of the second result,
    and the gradients with respect to `weights`, are then 0.

    Args:
      loss: the loss of a part, such as `cross_entropy`.
      head: maps hidden states [G, n, D] to logits f32 [G, n, V].
      hidden: [G, N, D], the decoder's outputs.
      targets: i32 [G, N], or [G, N, choices].
      weights: f32 of the same shape.
      vocabulary: V.
      most: the approximate largest number of logits of a part; None: LOGITS.

    Returns:
      Two f32 scalars, the sums over all parts of the results of `loss`.
    """
    groups, slots = targets.shape[:2]
    wanted = -(-groups * slots * vocabulary // (most or LOGITS))
    parts = next(count for count in range(1, slots + 1) if slots % count == 0 and count >= min(wanted, slots))
    if parts == 1:
        return loss(head(hidden), targets, weights)

    def apart(x: Array) -> Array:
        return x.reshape(groups, parts, slots // parts, *x.shape[2:]).swapaxes(0, 1)

    hidden, targets, weights = (apart(x) for x in (hidden, targets, weights))
    head_of, params = jax.closure_convert(head, hidden[0])
    return _sums(loss, head_of, params, hidden, targets, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(
    loss: Loss, head: Callable[..., Array], params: Sequence[Array], hidden: Array, targets: Array, weights: Array
) -> tuple[Array, Array]:
    """Computes `in_parts` for arrays [parts, G, n, ...]. `params`: the arrays that `head` takes after hidden states."""

    def add(sums: tuple[Array, Array], part: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
        total, count = loss(head(part[0], *params), *part[1:])
        return (sums[0] + total, sums[1] + count), None

    zero = jnp.float32(0), jnp.float32(0)
    return jax.lax.scan(add, zero, (hidden, targets, weights))[0]


def _sums_forward(
    loss: Loss, head: Callable[..., Array], params: Sequence[Array], hidden: Array, targets: Array, weights: Array
) -> tuple[tuple[Array, Array], tuple[Sequence[Array], Array]]:
    """Returns the results of `_sums`, and the gradients of `params` and of `hidden`."""

    def add(
        carry: tuple[Array, Array, Sequence[Array]], part: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array, Sequence[Array]], Array]:
        hidden, targets, weights = part
        total, back, count = jax.vjp(
            lambda params, hidden: loss(head(hidden, *params), targets, weights), params, hidden, has_aux=True
        )
        of_params, of_hidden = back(jnp.ones_like(total))
        sums = carry[0] + total, carry[1] + count, jax.tree.map(jnp.add, carry[2], of_params)
        return sums, of_hidden

    zero = jnp.float32(0), jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
    (total, count, of_params), of_hidden = jax.lax.scan(add, zero, (hidden, targets, weights))
    return (total, count), (of_params, of_hidden)


def _sums_backward(
    loss: Loss, head: Callable[..., Array], kept: tuple[Sequence[Array], Array], gradients: tuple[Array, Array]
) -> tuple[Sequence[Array], Array, None, None]:
    """Returns the gradients of `params` and `hidden`, from the gradient of the summed loss, an f32 scalar."""
    return *jax.tree.map(lambda x: (x * gradients[0]).astype(x.dtype), kept), None, None


_sums.defvjp(_sums_forward, _sums_backward)
