"""Compares T5Gemma with DeepMind's implementation in Flax, in the package gemma (requirements/peers/gemma.txt)."""

import dataclasses
import json
import subprocess
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from lab.benchmarks.peers.process import ENVIRONMENTS
from pipejax.backbones.t5gemma import GemmaStack, T5GemmaConfig
from support.in_transformers import varied

PYTHON = ENVIRONMENTS / "gemma" / "bin" / "python"
WINDOW = 5
ENCODER = GemmaStack(16, 24, 4, 2, 6, 6, WINDOW, attn_logit_softcapping=2.0)
DECODER = dataclasses.replace(ENCODER, hidden_size=12, intermediate_size=20, head_dim=4, query_pre_attn_scalar=4)
MODEL = T5GemmaConfig(ENCODER, DECODER, 30, 2, 4, final_logit_softcapping=4.0)
# Computes logits from the parameters, sizes and tokens in a directory, only with the package gemma.
WORKER = """
import json, sys
import flax.traverse_util, jax.numpy as jnp, numpy as np
from gemma.research.t5gemma import modules, t5gemma

facts = json.load(open("facts.json"))
kinds = (modules.AttentionType.LOCAL_SLIDING, modules.AttentionType.GLOBAL)
sides = [
    modules.TransformerConfig(
        **{**side, "attention_types": kinds * (side["num_layers"] // 2)},
        use_post_attn_norm=True, use_post_ffw_norm=True, bidirectional=i == 0, enable_cross_attention=i == 1,
    )
    for i, side in enumerate(facts)
]
config = t5gemma.T5GemmaConfig(*sides)
model = t5gemma.T5Gemma(config, dtype=jnp.float32, target_tokens="", input_tokens="")
given = dict(np.load("given.npz"))
params = flax.traverse_util.unflatten_dict({k: x for k, x in given.items() if "/" in k}, sep="/")
for name in ("short", "long"):
    found = model.apply({"params": params}, target_tokens=given["targets"], input_tokens=given[name])
    np.save(name, found.logits)
"""


def theirs(model: T5GemmaConfig, params: Any) -> dict[str, np.ndarray]:
    """The parameters with the names and shapes of DeepMind's modules."""
    flat, found = flatten_dict(params, sep="/"), dict[str, np.ndarray]()
    attentions = {
        "encoder": (("attention", "attn", "attention"),),
        "decoder": (("self_attention", "attn", "attention"), ("cross_attention", "cross_attn", "cross_attention")),
    }
    for side, depth in (("encoder", model.num_layers), ("decoder", model.num_decoder_layers)):
        width = getattr(model, side).head_dim
        found[f"{side}/embedder/input_embedding"] = flat[f"{side}/embedder/embedding"]
        found[f"{side}/final_norm/scale"] = flat[f"{side}/norm/scale"]
        for i in range(depth):
            ours, place = f"{side}/layers_{i}", f"{side}/layer_{i}"
            for part, name, norm in (*attentions[side], ("feed_forward", "mlp", "ffw")):
                own = {path: flat[f"{ours}/{part}/{path}"] for path in ("norm/scale", "post_norm/scale")}
                found[f"{place}/pre_{norm}_norm/scale"], found[f"{place}/post_{norm}_norm/scale"] = own.values()
                kinds = ("wi_0", "wi_1", "wo") if name == "mlp" else ("query", "key", "value", "output")
                kernels = [flat[f"{ours}/{part}/{kind}/kernel"] for kind in kinds]
                if name == "mlp":
                    found[f"{place}/mlp/gating_einsum"] = np.stack(kernels[:2])
                    found[f"{place}/mlp/linear"] = kernels[2]
                    continue
                query, key, value = (x.reshape(len(x), -1, width).swapaxes(0, 1) for x in kernels[:3])  # [H, in, K]
                found[f"{place}/{name}/q_einsum/w"] = query
                found[f"{place}/{name}/kv_einsum/w"] = np.stack([key, value])
                found[f"{place}/{name}/attn_vec_einsum/w"] = kernels[3].reshape(-1, width, kernels[3].shape[1])
    return found


@pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}: see requirements/peers/gemma.txt")
@pytest.mark.slow
def test_logits_equal_deepminds_flax_model(tmp_path):
    """For sources within the encoder's window; beyond it DeepMind's mask lacks the outermost positions on each side."""
    params, rng = varied(MODEL, 0, centered=True), np.random.default_rng(0)
    given = {name: rng.integers(3, MODEL.vocab_size, (2, size)) for name, size in (("short", WINDOW), ("long", 13))}
    given["short"][1, 3:] = given["long"][1, 11:] = MODEL.pad_token_id
    given["targets"] = rng.integers(3, MODEL.vocab_size, (2, 14))  # longer than the decoder's window
    facts = [
        {
            "num_layers": depth,
            "num_embed": MODEL.vocab_size,
            "embed_dim": s.hidden_size,
            "hidden_dim": s.intermediate_size,
            "num_heads": s.num_attention_heads,
            "num_kv_heads": s.num_key_value_heads,
            "head_dim": s.head_dim,
            "sliding_window_size": s.sliding_window,
            "attn_logits_soft_cap": s.attn_logit_softcapping,
            "final_logit_softcap": MODEL.final_logit_softcapping,
            "kv_embed_dim": MODEL.encoder.hidden_size,
        }
        for s, depth in ((MODEL.encoder, MODEL.num_layers), (MODEL.decoder, MODEL.num_decoder_layers))
    ]
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    np.savez(tmp_path / "given.npz", **theirs(MODEL, params), **given)
    subprocess.run([PYTHON, "-c", WORKER], cwd=tmp_path, check=True, capture_output=True)

    def ours(name: str, window: int) -> np.ndarray:
        model = dataclasses.replace(MODEL, encoder=dataclasses.replace(ENCODER, sliding_window=window))
        position = np.arange(14)[None]
        rest = given["targets"], position[:, :, None] >= position[:, None], position
        source = given[name]
        return np.asarray(jax.jit(model.module().apply)({"params": params}, source, source != 0, *rest))

    expected = {name: np.load(tmp_path / f"{name}.npy") for name in ("short", "long")}
    np.testing.assert_allclose(ours("short", WINDOW), expected["short"], atol=1e-4)
    np.testing.assert_allclose(ours("long", WINDOW - 1), expected["long"], atol=1e-4)
    assert abs(ours("long", WINDOW) - expected["long"]).max() > 1e-2
    assert abs(expected["short"]).max() > 1
