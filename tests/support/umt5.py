"""A backbone of somebody else's: UMT5, a T5 v1.1 whose layers each have a relative bias of their own."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from pipejax.config import T5Config
from pipejax.model import t5
from pipejax.model.layers import RelativeBias


class EncoderLayer(t5.EncoderLayer):
    """Adds its own bias to the padding's."""

    def setup(self) -> None:
        super().setup()
        self.relative_bias = RelativeBias(self.config, bidirectional=True)

    def __call__(self, x: Any, bias: Any, padding: Any, deterministic: bool) -> Any:
        return super().__call__(x, self.relative_bias.within(x.shape[1]), padding, deterministic)


class DecoderLayer(t5.DecoderLayer):
    """Makes its bias of the positions that all layers are given."""

    def setup(self) -> None:
        super().setup()
        self.relative_bias = RelativeBias(self.config, bidirectional=False)

    def __call__(self, x: Any, cache: Any, seen: Any, *others: Any) -> Any:
        mask, query, key = seen
        bias = jnp.where(mask[:, None], self.relative_bias(query, key), t5.MASKED)
        return super().__call__(x, cache, bias, *others)


class Encoder(t5.Encoder):
    """Has no bias that its layers share."""

    layer = EncoderLayer

    def set_up_bias(self) -> None: ...

    def bias(self, batch: int, length: int) -> Any:
        return jnp.zeros(())


class Decoder(t5.Decoder):
    """Hands the positions on to its layers."""

    layer = DecoderLayer

    def set_up_bias(self) -> None: ...

    def bias(self, mask: Any, query: Any, key: Any) -> Any:
        return mask, query, key


class UMT5(t5.T5):
    """The module."""

    encoder_stack, decoder_stack = Encoder, Decoder


@dataclasses.dataclass(frozen=True)
class UMT5Config(T5Config):
    """The backbone: all that is not a T5's."""

    model_types: ClassVar[tuple[str, ...]] = ("umt5",)

    def module(self, **options: Any) -> UMT5:
        return UMT5(self, **options)

    def biases(self, stack: str, depth: int) -> dict[str, tuple[str, str]]:
        name = "layer.0.SelfAttention.relative_attention_bias.weight"
        return {
            f"{stack}/layers_{i}/relative_bias/embedding": (f"{stack}.block.{i}.{name}", "BH") for i in range(depth)
        }

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"architectures": ["UMT5ForConditionalGeneration"]}
