"""UMT5 (Chung et al. 2023, arXiv 2304.09151): a T5 v1.1 with a separate relative bias in each layer.

A head that is the embedding table is scaled by d_model**-0.5, as in transformers. The published models have a separate
head and `tie_word_embeddings: false` in config.json. T5X, in which these models were trained, and transformers 4 do not
scale the separate head, nor does pipejax. transformers 5 scales it, which changes log-probabilities but not greedy
tokens. Since transformers 5 writes `tie_word_embeddings: true` for any head, pipejax scales a separate head if
config.json has this value.
"""

import dataclasses
from collections.abc import MutableMapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.model import t5, t5_config
from pipejax.model.config_json import Key, Keys
from pipejax.model.layers import RelativeBias
from pipejax.model.snapshot import snapshot
from pipejax.system.cli import note
from pipejax.system.strict_json import JsonMapping

Array = jax.Array
KEYS: Keys = t5_config.MT5_KEYS | {"tie_word_embeddings": Key(bool, True, null=True)}  # the keys of config.json
IN_TRANSFORMERS_5 = (
    "transformers 5 multiplies by d_model**-0.5 before it; the tokens are the same, log-probabilities differ"
)


class UMT5EncoderLayer(t5.EncoderLayer):
    """A layer of the encoder that adds its own relative bias to the bias that masks padding."""

    def setup(self) -> None:
        super().setup()
        self.relative_bias = RelativeBias(self.config, bidirectional=True)

    def __call__(self, x: Array, bias: Any, padding: Array, deterministic: bool) -> Array:
        """Computes the layer with its own bias; the shared `bias` is ignored. See `t5.EncoderLayer`."""
        return super().__call__(x, self.relative_bias.within(x.shape[1]), padding, deterministic)


class UMT5DecoderLayer(t5.DecoderLayer):
    """A layer of the decoder that computes its own bias from the mask and the positions, which all layers receive."""

    def setup(self) -> None:
        super().setup()
        self.relative_bias = RelativeBias(self.config, bidirectional=False)

    def __call__(
        self, x: Array, cache: t5.LayerCache | None, bias: tuple[Array, Array, Array], *others: Any
    ) -> tuple[Array, t5.LayerCache | None]:
        """Computes the layer; `bias` contains the mask and the positions of queries and keys. See `t5.DecoderLayer`."""
        mask, query, key = bias
        return super().__call__(x, cache, jnp.where(mask[:, None], self.relative_bias(query, key), t5.MASKED), *others)


class UMT5Encoder(t5.Encoder):
    """The encoder, without a bias shared by its layers."""

    layer: ClassVar[type[t5.EncoderLayer]] = UMT5EncoderLayer

    def set_up_bias(self) -> None:
        """Makes no submodule, as each layer has its own bias."""

    def bias(self, batch: int, length: int) -> Array:
        """Returns a scalar zero, as each layer adds its own bias."""
        return jnp.zeros(())


class UMT5Decoder(t5.Decoder):
    """The decoder, which passes mask and positions to its layers instead of a shared bias."""

    layer: ClassVar[type[t5.DecoderLayer]] = UMT5DecoderLayer

    def set_up_bias(self) -> None:
        """Makes no submodule, as each layer has its own bias."""

    def bias(self, mask: Array, query: Array, key: Array) -> tuple[Array, Array, Array]:
        """Returns the arguments, from which each layer computes its own bias; see `t5.Decoder`."""
        return mask, query, key


class UMT5(t5.T5):
    """The Flax module of a UMT5; see `t5.T5` for its fields and methods."""

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
        """See `T5Config`. Each layer has one entry."""
        name = "layer.0.SelfAttention.relative_attention_bias.weight"
        return {
            f"{stack}/layers_{i}/relative_bias/embedding": (f"{stack}.block.{i}.{name}", "BH") for i in range(depth)
        }

    @classmethod
    def keys_of(cls, model_type: object) -> Keys:
        """See `T5Config`."""
        return KEYS

    @classmethod
    def scales_head(cls, given: JsonMapping) -> bool:
        """See `T5Config`."""
        return bool(given["tie_word_embeddings"])

    def with_head(self, *, tied: bool) -> Self:
        """See `T5Config`. A tied head is always scaled."""
        return dataclasses.replace(self, tied_head=tied, scale_head=self.scale_head or tied)

    def without_copies(self, params: MutableMapping[str, np.ndarray]) -> Self:
        """See `Backbone`. A head that is not scaled stays separate."""
        model = super().without_copies(params) if self.scale_head else self
        if not model.scale_head:
            note(f"{t5_config.HEAD}: not scaled, as in T5X and transformers 4; {IN_TRANSFORMERS_5}")
        elif not model.tied_head:
            note(f"{t5_config.HEAD}: scaled, as by transformers 5, since config.json has tie_word_embeddings")
        return model

    def written(self, params: MutableMapping[str, np.ndarray]) -> Self:
        """See `Backbone`. If the head is the unscaled table, a copy of the table is written as a separate head."""
        if self.scale_head:
            return self
        note(f"{t5_config.HEAD}: not scaled; {IN_TRANSFORMERS_5}")
        if self.tied_head:
            params["lm_head/kernel"] = params["shared/embedding"].T
        return dataclasses.replace(self, tied_head=False)

    def earlier_doubts(self) -> str:
        """See `Backbone`."""
        return "a head that is the table, not scaled" if self.tied_head and not self.scale_head else ""

    def facts(self) -> dict[str, object]:
        """See `Backbone`. transformers 5 scales every head, and transformers 4 scales a head that config.json ties."""
        facts = super().facts() | {"architectures": ["UMT5ForConditionalGeneration"]}
        return facts | {"tie_word_embeddings": facts.pop("scale_decoder_outputs")}


ARCHITECTURES = {
    f"umt5-{size}": UMT5Config(**vars(t5_config.ARCHITECTURES[f"mt5-{size}"]) | {"vocab_size": 256_384})
    for size in ("small", "base", "xl", "xxl")
}
PACKED = UMT5, UMT5Config  # see `t5.is_packed`
SNAPSHOT = snapshot(globals())
