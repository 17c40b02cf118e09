"""Writes a T5 of random weights as Hugging Face does, with one layer and no tokenizer: random_t5.py DIRECTORY."""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HEADS, WIDTH, HIDDEN, WORDS = 2, 32, 48, 32  # multiples of 16, as pipejax's kernel requires
CONFIG = {"model_type": "t5", "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "num_layers": 1}
SIZES = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": HIDDEN, "num_heads": HEADS}
LAYERS = {
    "encoder": ("SelfAttention", "DenseReluDense"),
    "decoder": ("SelfAttention", "EncDecAttention", "DenseReluDense"),
}


def shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors by name."""
    found: dict[str, tuple[int, ...]] = {"shared.weight": (WORDS, WIDTH)}
    for stack, layers in LAYERS.items():
        for i, layer in enumerate(layers):
            place = f"{stack}.block.0.layer.{i}"
            found[f"{place}.layer_norm.weight"] = (WIDTH,)
            if layer == "DenseReluDense":
                found |= {f"{place}.{layer}.wi.weight": (HIDDEN, WIDTH), f"{place}.{layer}.wo.weight": (WIDTH, HIDDEN)}
            else:
                found |= {f"{place}.{layer}.{name}.weight": (WIDTH, WIDTH) for name in "qkvo"}
        found[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (32, HEADS)
        found[f"{stack}.final_layer_norm.weight"] = (WIDTH,)
    return found


if __name__ == "__main__":
    directory, rng = Path(sys.argv[1]), np.random.default_rng(0)
    directory.mkdir()
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes().items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG | SIZES))
