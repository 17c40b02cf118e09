"""Small backbones of all kinds that transformers supports, each with its model of transformers."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from pipejax.backbones.t5gemma import GemmaStack, T5GemmaConfig
from pipejax.backbones.t5gemma2 import T5Gemma2Config
from pipejax.backbones.umt5 import UMT5Config
from support import in_transformers
from support.in_transformers import VISION, Logits, config_facts, varied
from support.tiny import FEW_WORDS


@dataclasses.dataclass(frozen=True)
class BackboneCase:
    """A small backbone with all features of its kind, with functions that make, load and run transformers' model."""

    model: Any
    make: Callable[[Any], Any]  # the model of transformers for a config, with random weights
    # Returns the same model with our weights, from the model, our config and our parameters.
    load: Callable[[Any, Any, Any], Any]
    logits: Callable[[Any], Logits]
    params: Callable[[Any, int], Any]  # random parameters for a config and a seed
    name_in_module: Callable[[str], str] = (
        str  # maps the name of a tensor in a file to the name of a parameter in torch
    )
    lowest: int = 3  # the lowest id in sources of `check_greedy_tokens`
    window: int = 0  # the decoder's window of attention; 0: none

    def loaded(self, seed: int, model: Any = None) -> tuple[Any, Any]:
        """Returns random parameters, and the model of transformers with them."""
        model = model or self.model
        params = self.params(model, seed)
        return params, self.load(self.make(model), model, params)


def gemma_logits(torchs: Any) -> Logits:
    """Logits of a T5Gemma or T5Gemma 2 with explicit positions and masks, including windows of positions."""
    is_second = isinstance(torchs, transformers.T5Gemma2ForConditionalGeneration)

    def logits(source: Any, real: Any, tokens: Any, visible: Any, position: Any) -> torch.Tensor:
        window = torchs.config.decoder.sliding_window
        near = visible & (position[:, None] - position[None] < window)
        if is_second:  # SDPA combines them with the source's mask, which is boolean
            full, sliding = (x[None, None].expand(len(tokens), -1, -1, -1) for x in (visible, near))
        else:
            full, sliding = (torch.where(x, 0.0, -torch.inf)[None, None] for x in (visible, near))
        found: torch.Tensor = torchs(
            input_ids=source,
            attention_mask=real.long(),
            decoder_input_ids=tokens,
            decoder_attention_mask={"full_attention": full, "sliding_attention": sliding},
            decoder_position_ids=position[None],
            use_cache=False,
        ).logits
        return found

    return logits


# T5Gemma: groups, sides of unequal widths, effective soft caps, windows that are shorter than answers.


def _make_t5gemma(model: T5GemmaConfig) -> Any:
    facts = config_facts(model)
    config = transformers.T5GemmaConfig(**facts)
    for part in (config, config.encoder, config.decoder):
        part._attn_implementation = "eager"  # the only implementation with soft caps
    return transformers.T5GemmaForConditionalGeneration(config).eval()


def _load_t5gemma(torchs: Any, model: T5GemmaConfig, params: Any) -> Any:
    state = in_transformers.tensors(model, params)
    if model.tied_head:
        state["lm_head.out_proj.weight"] = state["model.decoder.embed_tokens.weight"]
    torchs.load_state_dict(state)
    return torchs


T5GEMMA_ENCODER = GemmaStack(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    query_pre_attn_scalar=5,
    sliding_window=3,
    attn_logit_softcapping=2.0,
)
T5GEMMA_DECODER = dataclasses.replace(
    T5GEMMA_ENCODER, hidden_size=12, intermediate_size=20, num_key_value_heads=1, head_dim=4
)
T5GEMMA = BackboneCase(
    T5GemmaConfig(
        vocab_size=9,
        num_layers=2,
        num_decoder_layers=2,
        encoder=T5GEMMA_ENCODER,
        decoder=dataclasses.replace(T5GEMMA_DECODER, attn_logit_softcapping=3.0, sliding_window=4),
        final_logit_softcapping=4.0,
    ),
    _make_t5gemma,
    _load_t5gemma,
    gemma_logits,
    lambda model, seed: varied(model, seed, centered=True),
    window=4,
)
UNTIED = dataclasses.replace(
    T5GEMMA.model,
    encoder=dataclasses.replace(T5GEMMA_ENCODER, attn_logit_softcapping=0.0),
    rms_norm_eps=0.1,
    tied_head=False,
)

# T5Gemma 2: groups, windows that are shorter than answers, two kinds of rotations, a token with a separate vector.


def _make_t5gemma2(model: T5Gemma2Config) -> Any:
    """A T5Gemma 2 of transformers with a small vision tower."""
    facts = config_facts(model)
    facts["encoder"] |= {"vision_config": VISION, "mm_tokens_per_image": 4}
    config = transformers.T5Gemma2Config(**facts)
    return transformers.T5Gemma2ForConditionalGeneration(config).eval()


def _name_in_t5gemma2(name: str) -> str:
    return name.replace("model.encoder.", "model.encoder.text_model.")


def _load_t5gemma2(torchs: Any, model: T5Gemma2Config, params: Any) -> Any:
    """Loads our weights; the vision tower keeps its weights."""
    state = {_name_in_t5gemma2(name): x for name, x in in_transformers.tensors(model, params).items()}
    found = torchs.load_state_dict(state, strict=False)
    tied = ("lm_head.out_proj.weight", "model.decoder.embed_tokens.weight", "model.decoder.embed_tokens.eoi_embedding")
    assert not found.unexpected_keys
    assert all(name in tied or ".vision_tower." in name or "multi_modal" in name for name in found.missing_keys)
    return torchs


def _t5gemma2_params(model: T5Gemma2Config, seed: int) -> Any:
    params = varied(model, seed, centered=True)
    params["shared"]["eoi_embedding"] = np.random.default_rng(seed).standard_normal(16).astype(np.float32) * 4
    return params


T5GEMMA2_ENCODER = GemmaStack(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    query_pre_attn_scalar=2,
    sliding_window=4,
    full_every=3,
    attn_logit_softcapping=0.0,
    rope_theta=20.0,
    full_rope_theta=50.0,
    full_rope_factor=1.5,
)
T5GEMMA2 = BackboneCase(
    T5Gemma2Config(
        vocab_size=9,
        num_layers=3,
        num_decoder_layers=3,
        encoder=T5GEMMA2_ENCODER,
        decoder=dataclasses.replace(
            T5GEMMA2_ENCODER, intermediate_size=20, num_key_value_heads=1, head_dim=4, sliding_window=5
        ),
        final_logit_softcapping=4.0,
        rms_norm_eps=0.1,
        eoi_token_index=5,
    ),
    _make_t5gemma2,
    _load_t5gemma2,
    gemma_logits,
    _t5gemma2_params,
    name_in_module=_name_in_t5gemma2,
    window=5,
)

# UMT5, with a separate head that is not scaled, as in the published models.


def _make_umt5(model: UMT5Config) -> Any:
    """A UMT5 of transformers with a separate head, which transformers would tie."""
    facts = config_facts(model)
    torchs = transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**facts))
    torchs.lm_head.weight = torch.nn.Parameter(torch.empty_like(torchs.shared.weight))
    return torchs.eval()


def _load_umt5(torchs: Any, model: UMT5Config, params: Any) -> Any:
    state = in_transformers.tensors(model, params)
    aliases = {f"{stack}.embed_tokens.weight": state["shared.weight"] for stack in ("encoder", "decoder")}
    torchs.load_state_dict(state | aliases)
    return torchs


def umt5_logits(torchs: Any) -> Logits:
    """Logits of a UMT5. It has no argument for positions, so biases are computed from positions here."""

    def logits(source: Any, real: Any, tokens: Any, visible: Any, position: Any) -> torch.Tensor:
        apart = position[None] - position[:, None]
        for block in torchs.decoder.block:
            own = block.layer[0].SelfAttention
            bias = own.relative_attention_bias(own._relative_position_bucket(apart)).permute(2, 0, 1)[None]
            own.compute_bias = lambda *given, bias=bias, **more: bias
        seen = torch.where(visible, 0.0, -torch.inf)[None, None].expand(len(tokens), -1, -1, -1)
        given = {"attention_mask": real.long(), "decoder_attention_mask": seen, "use_cache": False}
        found = torchs(input_ids=source, decoder_input_ids=tokens, **given).logits
        for block in torchs.decoder.block:
            del block.layer[0].SelfAttention.compute_bias
        # transformers scales the input of a separate head as well; T5X, the origin of UMT5, does not.
        scaled: torch.Tensor = found * torchs.config.d_model**0.5
        return scaled

    return logits


def save_umt5(torchs: Any, place: Path) -> None:
    """Writes a UMT5 like the published ones: `save_pretrained` would leave the head out."""
    torchs.config.save_pretrained(place)
    file = place / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
    tensors = {name: x.detach().numpy() for name, x in torchs.named_parameters()}
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})


UMT5_SIZES: dict[str, Any] = vars(FEW_WORDS) | {"d_model": 16, "num_layers": 2, "dropout_rate": 0.0}
UMT5 = BackboneCase(
    UMT5Config(**UMT5_SIZES | {"feed_forward": "gated-gelu", "tied_head": False, "scale_head": False}),
    _make_umt5,
    _load_umt5,
    umt5_logits,
    varied,
    lowest=2,
)

CASES = {"t5gemma": T5GEMMA, "t5gemma2": T5GEMMA2, "umt5": UMT5}
