"""T5Gemma 2 (Zhang et al. 2025, arXiv 2512.14856) for text: Gemma 3 blocks with merged attention in the decoder.

In the decoder one attention replaces self-attention and cross-attention: its softmax extends over the slots and the
source. Queries and the keys of slots are rotated by their positions, but the keys of the source are not. So the
attention of a query to the source depends on the query's position, row + time, and not only on differences of
positions. The encoder, the decoder and the head share one embedding table. Scores have no soft cap, even if config.json
has a value for it, as in transformers.
"""

import dataclasses
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.backbones import t5gemma
from pipejax.backbones.t5gemma import LAYER_TYPES, GemmaStack, Norm, Slots, Source, T5GemmaConfig, read_rope
from pipejax.model.config_json import Key, Keys, read_keys
from pipejax.model.layers import normal
from pipejax.system.cli import note
from pipejax.system.errors import UserError
from pipejax.system.fields import setting
from pipejax.system.strict_json import JsonMapping, JsonObject

Array = jax.Array
EOI = "eoi_embedding"
NONE = -1  # the value of `eoi_token_index` if no token has a separate vector
TEXT = "text_model."  # a part of tensor names in transformers' module that names in files lack
# The keys of config.json, as transformers reads them.
SIDE: Keys = t5gemma.SIDE | {
    "vocab_size": Key(int, 262_208),
    "attn_logit_softcapping": Key(float, 0.0, null=0.0),
    "final_logit_softcapping": Key(float, 0.0, null=0.0),
    "sliding_window_pattern": Key(int, 6, null=None),  # only in older files: every n-th layer has full attention
    "rope_theta": Key(float, 1e6, null=None),  # in older files: for full layers; the next key is for the other layers
    "rope_local_base_freq": Key(float, 10_000.0, null=None),
}
ENCODER: Keys = {
    "text_config": Key(dict, {}, null={}, keys=SIDE),
    "eoi_token_index": Key(int, 256_000, null=NONE, names=("eoi_token_id",)),
}
KEYS: Keys = t5gemma.KEYS | {
    "encoder": Key(dict, {}, null={}, keys=ENCODER),
    "decoder": Key(dict, {}, null={}, keys=SIDE),
}


class Gemma2Attention(t5gemma.GemmaAttention):
    """Grouped-query attention whose queries and keys are normalised in each head."""

    def setup(self) -> None:
        super().setup()
        self.query_norm, self.key_norm = (Norm(self.config.rms_norm_eps, self.dtype) for _ in range(2))

    def queries(self, normed: Array) -> Array:
        """Returns the normalised queries [B, H, Q, K] of normalised states [B, Q, D]."""
        return self.query_norm(super().queries(normed))

    def keys_values(self, x: Array) -> tuple[Array, Array]:
        """Returns the normalised keys and the values [B, G, L, K] of normalised or encoded states [B, L, D]."""
        keys, values = super().keys_values(x)
        return self.key_norm(keys), values


class Gemma2DecoderLayer(t5gemma.GemmaDecoderLayer):
    """Merged attention over slots and source, then feed-forward."""

    def set_up_cross(self, *given: Any) -> None:
        """Makes no sublayer, as merged attention has no separate cross-attention."""

    def look(self, x: Array, slots: Slots, source: Source, deterministic: bool) -> Array:
        """Applies merged attention to x [B, Q, D]: the keys and values of slots and source are concatenated."""
        (queries, *own, mask), (*others, real) = slots, source
        keys, values = (jnp.concatenate(pair, axis=2) for pair in zip(own, others, strict=True))
        shape = jnp.broadcast_shapes(mask.shape[:2], real.shape[:2])
        both = jnp.concatenate([jnp.broadcast_to(x, (*shape, x.shape[2])) for x in (mask, real)], axis=2)
        return self.self_attention.attend(x, queries, keys, values, both, deterministic)

    def memorize(self, encoded: Array) -> tuple[Array, Array]:
        """Returns the keys and values [B, G, L, K] of an encoded source [B, L, D]; the keys are not rotated."""
        return self.self_attention.keys_values(encoded)


class Gemma2Decoder(t5gemma.GemmaDecoder):
    """The decoder with merged attention; see `t5gemma.GemmaDecoder`."""

    layer: ClassVar[type[nn.Module]] = Gemma2DecoderLayer


class Gemma2Embedder(t5gemma.GemmaEmbedder):
    """An embedding table with a separate vector, which is not scaled, for the token that ends an image."""

    eoi: int = 0

    def setup(self) -> None:
        super().setup()
        self.eoi_embedding = self.param(EOI, normal(1.0), (self.width,))

    def __call__(self, tokens: Array) -> Array:
        """Returns the embeddings [..., D] of tokens [...]; the token that ends an image has its separate vector."""
        return jnp.where(
            (tokens == self.eoi)[..., None], self.eoi_embedding.astype(self.dtype), super().__call__(tokens)
        )


class T5Gemma2(t5gemma.T5Gemma):
    """The Flax module of a T5Gemma 2; see `t5.T5` for its fields and methods."""

    decoder_stack: ClassVar[type[nn.Module]] = Gemma2Decoder

    def set_up_table(self) -> None:
        c = self.config
        table: Any = Gemma2Embedder(c.vocab_size, c.decoder.hidden_size, self.dtype, self.shards, c.eoi_token_index)
        self.shared = table

    def table(self, stack: Any) -> Any:
        return self.shared


@dataclasses.dataclass(frozen=True)
class T5Gemma2Config(T5GemmaConfig):
    """The architecture of a T5Gemma 2."""

    eoi_token_index: int = setting(256_000, least=NONE)  # the token that ends an image, with its own vector; -1: none

    model_types: ClassVar[tuple[str, ...]] = ("t5gemma2",)
    keys: ClassVar[Keys] = KEYS
    attention_class: ClassVar[type[t5gemma.GemmaAttention]] = Gemma2Attention
    tables: ClassVar[tuple[str, ...]] = ("shared/embedding",)
    sharding: ClassVar[Any] = ((rf"shared/{EOI}", ()), *T5GemmaConfig.sharding)
    has_one_table: ClassVar[bool] = True
    is_relative: ClassVar[bool] = False
    image_tensors: ClassVar[tuple[str, ...]] = ("model.encoder.vision_tower.", "model.encoder.multi_modal_projector.")
    side_types: ClassVar[Mapping[str, str]] = {"encoder": "t5gemma2_text", "decoder": "t5gemma2_decoder"}
    attentions: ClassVar[Mapping[str, tuple[tuple[str, str, str], ...]]] = {
        side: (
            *t5gemma.attention(ours, "self", "d"),
            (f"{ours}/query_norm/scale", "self_attn.q_norm", "k"),
            (f"{ours}/key_norm/scale", "self_attn.k_norm", "k"),
        )
        for side, ours in (("encoder", "attention"), ("decoder", "self_attention"))
    }

    def module(self, **options: Any) -> T5Gemma2:
        return T5Gemma2(self, **options)

    def window(self, side: str) -> tuple[int, int]:
        """See `T5GemmaConfig`. The window of the encoder is centred on the query."""
        size: int = getattr(self, side).sliding_window
        return ((size + 1) // 2, size // 2 + 1) if side == "encoder" else super().window(side)

    def tensors(self) -> dict[str, tuple[str, str]]:
        found, name = super().tensors(), f"{self.prefixes['encoder']}.embed_tokens"
        shared = {"shared/embedding": (f"{name}.weight", "Vd"), f"shared/{EOI}": (f"{name}.{EOI}", "d")}
        return shared | {path: x for path, x in found.items() if "embedder" not in path}

    def module_name(self, name: str) -> str:
        """See `Backbone`. Text tensors of the encoder have the additional part "text_model." in transformers."""
        prefix = f"{self.prefixes['encoder']}."
        is_text = name.startswith(prefix) and not name.startswith(self.image_tensors)
        return f"{prefix}{TEXT}{name.removeprefix(prefix)}" if is_text else name

    def check(self, where: str) -> None:
        """See `Backbone`. Both sides must have the same width, as they share the embedding table."""
        super().check(where)
        if self.encoder.hidden_size != self.decoder.hidden_size:
            found, expected = self.encoder.hidden_size, self.decoder.hidden_size
            raise UserError(
                f"{where}: model.encoder.hidden_size", found=f"{found}", expected=f"the decoder's, {expected}"
            )

    @classmethod
    def read_facts(cls, facts: JsonMapping) -> dict[str, object]:
        encoder = read_keys(facts, cls.keys)["encoder"]
        return super().read_facts(facts) | {"eoi_token_index": encoder["eoi_token_index"]}

    @classmethod
    def sides(cls, given: JsonMapping) -> tuple[JsonObject, JsonObject]:
        return given["encoder"]["text_config"], given["decoder"]

    @classmethod
    def read_stack(cls, given: JsonMapping, side: str) -> GemmaStack:
        """See `T5GemmaConfig`. Ignores the soft cap of scores."""
        return super().read_stack({**given, "attn_logit_softcapping": 0.0}, side)

    @classmethod
    def default_pattern(cls, given: JsonMapping, side: str) -> int:
        every: int | None = given["sliding_window_pattern"]
        if every is None or every < 1:
            raise UserError(f"{side}.sliding_window_pattern", found=f"{every}", expected="at least 1")
        return every

    @classmethod
    def read_rotations(cls, given: JsonMapping, side: str) -> JsonObject:
        """Returns the rotary fields of `GemmaStack`. Full and sliding layers have separate parameters.

        In older files the key rope_scaling extends the parameters of full layers.
        """
        place, found, more = f"{side}.rope_parameters", given["rope_parameters"], given["rope_scaling"] or {}
        sliding, full = ({"rope_type": "default"} if found is None else found.get(kind) or {} for kind in LAYER_TYPES)
        if not (isinstance(sliding, dict) and isinstance(full, dict) and (full or not more)):
            raise UserError(place, found=f"{found!r:.80}", expected=f"an object for {' and for '.join(LAYER_TYPES)}")
        kind, theta, _ = read_rope(sliding, given["rope_local_base_freq"], f"{place}.{LAYER_TYPES[0]}")
        full_kind, full_theta, factor = read_rope({**full, **more}, given["rope_theta"], f"{place}.{LAYER_TYPES[1]}")
        if kind != "default" or full_kind not in ("default", "linear"):
            raise UserError(place, found=f"{found!r:.80}", expected="rope_type default, or full ones linear")
        return {"rope_theta": theta, "full_rope_theta": full_theta, "full_rope_factor": factor}

    def earlier_doubts(self) -> str:
        """See `Backbone`. Earlier versions read absent layer_types like T5Gemma, and used factors of type "default"."""
        found, sides = list[str](), {"encoder": self.num_layers, "decoder": self.num_decoder_layers}
        for side, depth in sides.items():
            stack: GemmaStack = getattr(self, side)
            if stack.full_every == 2 <= depth:
                found.append(f"every second layer of the {side} full, as if config.json said so")
            if stack.full_rope_factor not in (1.0, 8.0):  # the published models have the factor 8.0, of type linear
                found.append(f"a rope factor of {stack.full_rope_factor:g} in the {side}, regardless of its type")
        return " and ".join(found)

    def facts(self) -> dict[str, object]:
        """See `Backbone`. tie_word_embeddings is always true, as it also ties the embedding tables of both sides."""
        facts: JsonObject = super().facts() | {"tie_word_embeddings": True}
        eoi = {"eoi_token_index": None if self.eoi_token_index == NONE else self.eoi_token_index}
        facts["encoder"] = {"model_type": "t5gemma2_encoder", "text_config": facts["encoder"], **eoi}
        return facts | eoi | {"architectures": ["T5Gemma2ForConditionalGeneration"]}

    def rotations(self, stack: GemmaStack) -> dict[str, object]:
        linear = {"rope_type": "linear", "factor": stack.full_rope_factor}
        full = (linear if stack.full_rope_factor != 1 else {"rope_type": "default"}) | {
            "rope_theta": stack.full_rope_theta
        }
        sliding = {"rope_type": "default", "rope_theta": stack.rope_theta}
        return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}

    def fitted(self, tensors: MutableMapping[str, Any], weights: Path) -> Self:
        """See `Backbone`. Removes the tensors of the image encoder, and the copy of the embedding table.

        Raises:
          UserError: the two embedding tables in the file differ.
        """
        for name in [name for name in tensors if name.startswith(f"{self.prefixes['encoder']}.{TEXT}")]:
            tensors[name.replace(TEXT, "", 1)] = tensors.pop(name)
        if vision := [name for name in tensors if name.startswith(self.image_tensors)]:
            note(f"{weights}: left out {len(vision)} tensors of the vision tower, because sources are text only")
        for name in vision:
            del tensors[name]
        copies = [f"{self.prefixes[side]}.embed_tokens" for side in ("encoder", "decoder")]
        for end in (".weight", f".{EOI}"):
            table, copy = (tensors.get(f"{name}{end}") for name in copies)
            if table and copy:
                if not np.array_equal(table.read(), copy.read()):
                    raise UserError(
                        f"{copy.file}: {copy.name}",
                        found=f"values that differ from {table.name}",
                        expected="the values of this tensor, which the encoder and the decoder share",
                    )
                del tensors[copy.name]
        return super().fitted(tensors, weights)


# Published sizes: layers, width, feed-forward width, heads, groups of heads, window, and the divisor of positions in
# layers with full attention.
_SIZES = {
    "270m": (18, 640, 2048, 4, 1, 512, 8.0),
    "1b": (26, 1152, 6912, 4, 1, 512, 8.0),
    "4b": (34, 2560, 10240, 8, 4, 1024, 8.0),
}


def _published(depth: int, width: int, inner: int, heads: int, shared: int, window: int, factor: float) -> Any:
    stack = GemmaStack(width, inner, heads, shared, 256, 256, window, 6, 0.0, 10_000.0, 1e6, factor)
    return T5Gemma2Config(stack, stack, 262_144, depth, depth, final_logit_softcapping=0.0)


ARCHITECTURES = {f"t5gemma-2-{name}-{name}": _published(*sizes) for name, sizes in _SIZES.items()}
