"""The published sizes of T5, for planning and measuring without their weights (Raffel et al. 2020; T5 v1.1)."""

import dataclasses
from typing import Any

from pipejax.config import T5Config
from pipejax.system.errors import UserError, did_you_mean

_BASE = T5Config(vocab_size=32128, d_model=768, d_kv=64, d_ff=3072, num_heads=12, num_layers=12, num_decoder_layers=12)
_SMALL = dataclasses.replace(_BASE, d_model=512, d_ff=2048, num_heads=8, num_layers=6, num_decoder_layers=6)
_LARGE = dataclasses.replace(_BASE, d_model=1024, d_ff=4096, num_heads=16, num_layers=24, num_decoder_layers=24)
_V1_1: dict[str, Any] = {"feed_forward": "gated-gelu", "tied_head": False, "scale_head": False}

ARCHITECTURES = {
    "small": _SMALL,
    "base": _BASE,
    "large": _LARGE,
    "v1_1-small": dataclasses.replace(_SMALL, d_ff=1024, num_heads=6, num_layers=8, num_decoder_layers=8, **_V1_1),
    "v1_1-base": dataclasses.replace(_BASE, d_ff=2048, **_V1_1),
    "v1_1-large": dataclasses.replace(_LARGE, d_ff=2816, **_V1_1),
}


def architecture(name: str) -> T5Config:
    """The T5 of that size; Flan-T5 is "v1_1-...".

    Raises:
      UserError: there is none of that name.
    """
    if name not in ARCHITECTURES:
        known, hint = ", ".join(ARCHITECTURES), did_you_mean(name, ARCHITECTURES)
        raise UserError(f"model: found {name!r}; expected one of {known} (Flan-T5 has the sizes of v1_1){hint}")
    return ARCHITECTURES[name]
