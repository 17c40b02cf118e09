"""UMT5 (Chung et al. 2023, arXiv 2304.09151): a T5 v1.1 whose layers each have a relative bias of their own.

Its head is never scaled, as in T5X, where its weights come from. transformers 5 scales it all the same, by
d_model**-0.5: the same tokens, but other log-probabilities.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pipejax.model import stock, t5, t5_config
from pipejax.model.layers import RelativeBias

Array = jax.Array


class UMT5EncoderLayer(t5.EncoderLayer):
    """Adds its own bias to the padding's."""

    def setup(self) -> None:
        super().setup()
        self.relative_bias = RelativeBias(self.config, bidirectional=True)

    def __call__(self, x: Array, bias: Any, padding: Array, deterministic: bool) -> Array:
        return super().__call__(x, self.relative_bias.within(x.shape[1]), padding, deterministic)


class UMT5DecoderLayer(t5.DecoderLayer):
    """Makes its bias of the mask and the positions that all layers are given."""

    def setup(self) -> None:
        super().setup()
        self.relative_bias = RelativeBias(self.config, bidirectional=False)

    def __call__(
        self, x: Array, cache: t5.LayerCache | None, bias: tuple[Array, Array, Array], *others: Any
    ) -> tuple[Array, t5.LayerCache | None]:
        mask, query, key = bias
        return super().__call__(x, cache, jnp.where(mask[:, None], self.relative_bias(query, key), t5.MASKED), *others)


class UMT5Encoder(t5.Encoder):
    """Has no bias that its layers share."""

    layer: ClassVar[type[t5.EncoderLayer]] = UMT5EncoderLayer

    def set_up_bias(self) -> None:
        """Nothing is shared."""

    def bias(self, batch: int, length: int) -> Array:
        """See `t5.Encoder`."""
        return jnp.zeros(())


class UMT5Decoder(t5.Decoder):
    """Hands the positions on to its layers."""

    layer: ClassVar[type[t5.DecoderLayer]] = UMT5DecoderLayer

    def set_up_bias(self) -> None:
        """Nothing is shared."""

    def bias(self, mask: Array, query: Array, key: Array) -> tuple[Array, Array, Array]:
        """See `t5.Decoder`."""
        return mask, query, key


class UMT5(t5.T5):
    """The module."""

    encoder_stack: ClassVar[type[t5.Encoder]] = UMT5Encoder
    decoder_stack: ClassVar[type[t5.Decoder]] = UMT5Decoder


@dataclasses.dataclass(frozen=True)
class UMT5Config(t5_config.T5Config):
    """The architecture of a UMT5."""

    model_types: ClassVar[tuple[str, ...]] = ("umt5",)

    def module(self, **options: Any) -> UMT5:
        """See `Backbone`."""
        return UMT5(self, **options)

    def biases(self, stack: str, depth: int) -> dict[str, tuple[str, str]]:
        """See `T5Config`: one a layer."""
        name = "layer.0.SelfAttention.relative_attention_bias.weight"
        return {
            f"{stack}/layers_{i}/relative_bias/embedding": (f"{stack}.block.{i}.{name}", "BH") for i in range(depth)
        }

    @classmethod
    def read_facts(cls, facts: Any) -> dict[str, object]:
        """See `Backbone`. transformers writes a scale that T5X does not have."""
        return super().read_facts(facts) | {"scale_head": False}

    def facts(self) -> dict[str, object]:
        """See `Backbone`."""
        return super().facts() | {"architectures": ["UMT5ForConditionalGeneration"]}


def is_stock(model: Any) -> bool:
    """As `t5.is_stock`, of this module."""
    mine = t5.is_unchanged() and stock.picture(globals()) == STOCK
    return mine and type(model) is UMT5 and type(model.config) is UMT5Config


ARCHITECTURES = {
    f"umt5-{size}": UMT5Config(**vars(t5_config.ARCHITECTURES[f"mt5-{size}"]) | {"vocab_size": 256_384})
    for size in ("small", "base", "xl", "xxl")
}
STOCK = stock.picture(globals())  # see `t5.is_stock`
