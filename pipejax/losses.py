"""Token losses. Shapes: B batch, N slots, V vocabulary."""

import jax
import jax.numpy as jnp

Array = jax.Array


def cross_entropy(logits: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted negative log-likelihood: its sum and the sum of weights, both f32 scalars (paper section 3.3, eq. 6).

    Sums, so that parts of a batch add up exactly; the mean is over the real target tokens of the whole batch.

    Args:
      logits: f32 [B, N, V].
      targets: i32 [B, N].
      weights: f32 [B, N], 0 at padding and at slots without a target.
    """
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - chosen
    return (nll * weights).sum(), weights.sum()
