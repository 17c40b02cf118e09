"""The layers that the T5 is made of. Parameters are float32; `dtype` is that of the computation."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pipejax.model import lora
from pipejax.model.dropout import drop, make_seed

Array = jax.Array


class RMSNorm(nn.Module):
    """Root-mean-square norm without mean or bias, in float32."""

    epsilon: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Of the same shape."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return (normed * scale).astype(self.dtype)


class Linear(nn.Module):
    """x W, plus x A B where the parameters hold low-rank factors (`pipejax.model.lora`).

    W may be int8 with a scale for each output (`pipejax.model.quantization`).
    """

    features: int
    dtype: DTypeLike
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """[..., features] from [..., in]."""
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features))
        x = x.astype(self.dtype)
        answer = jnp.dot(x, kernel.astype(self.dtype))
        if self.has_variable("params", "scale"):
            scale: Array = self.get_variable("params", "scale")
            answer = answer * scale.astype(self.dtype)
        if not self.has_variable("params", lora.A):
            return answer
        a: Array = self.get_variable("params", lora.A)
        b: Array = self.get_variable("params", lora.B)
        return answer + jnp.dot(jnp.dot(x, a.astype(self.dtype)), b.astype(self.dtype))


class Dropout(nn.Module):
    """`pipejax.model.dropout.drop` with a seed from the rng "dropout"."""

    rate: float

    @nn.compact
    def __call__(self, x: Array, deterministic: bool) -> Array:
        """x itself if there is nothing to drop."""
        return x if deterministic or not self.rate else drop(x, make_seed(self.make_rng("dropout")), self.rate)


class Head(nn.Module):
    """An own head: logits f32 [..., V], accumulated in float32 whatever the compute dtype."""

    features: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, hidden: Array) -> Array:
        """[..., features] from [..., D]."""
        kernel = self.param("kernel", nn.initializers.normal(1.0), (hidden.shape[-1], self.features))
        return jnp.einsum("...d,dv->...v", hidden, kernel.astype(self.dtype), preferred_element_type=jnp.float32)
