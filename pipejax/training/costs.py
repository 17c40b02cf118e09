"""The cost of a training step by arithmetic: floating-point operations, and the peak that hardware has for them.

Shapes: D width, H heads, K head width, F feed-forward width, V vocabulary. A multiply-add counts as two operations.
"""

import jax
import numpy as np

from pipejax.config import T5Config

# Dense bfloat16 operations a second, from the makers' data sheets; what is not here has no utilisation reported.
PEAKS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100": 989e12,  # the SXM form
    "NVIDIA A100": 312e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "TPU v6 lite": 918e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v4": 275e12,
}


def peak(device: jax.Device) -> float | None:
    """Operations a second of one device in bfloat16, or None if it is not known."""
    if "H100" in device.device_kind and "HBM3" not in device.device_kind:  # the PCIe form does less
        return None
    names = [name for name in PEAKS if device.device_kind.startswith(name)]
    return PEAKS[max(names, key=len)] if names else None


def training_flops(model: T5Config, lengths: np.ndarray) -> float:
    """Operations of the model for one training step: forward and twice that backward, on real tokens alone.

    What rematerialisation computes again and what padding costs are not the model's, so they do not count (as in "model
    FLOPs utilisation", Chowdhery et al. 2022).

    Args:
      model: the architecture.
      lengths: [B, 2], source tokens and target slots of each example.
    """
    sources, slots = np.asarray(lengths, np.float64).T
    inner, width = model.num_heads * model.d_kv, model.d_model
    feed_forward = width * model.d_ff * (2 if model.feed_forward == "relu" else 3)
    encoder = 2 * (4 * width * inner + feed_forward) * sources + 4 * inner * sources**2
    memory = 2 * 2 * width * inner * sources
    decoder = 2 * (6 * width * inner + feed_forward) * slots + 4 * inner * slots * (slots + sources)
    head = 2 * width * model.vocab_size * slots
    forward = model.num_layers * encoder + model.num_decoder_layers * (memory + decoder) + head
    return float(3 * forward.sum())
