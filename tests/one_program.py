"""Encoding and decoding of a padded batch as one jitted function of the parameters, as tests like it."""

from collections.abc import Callable
from typing import Any

import jax

from pipejax.config import T5Config
from pipejax.decoding import Decoded, Schedule, Strategy
from pipejax.generate import decode_batch, encode_batch, prepare
from pipejax.t5 import T5


def compiled(config: T5Config, strategy: Strategy, sizes: Schedule | None = None) -> Callable[..., Decoded]:
    """From parameters, source i32 [B, L] and length i32 [B] to what is decoded."""
    model = T5(config)

    def whole(params: Any, source: jax.Array, length: jax.Array) -> Decoded:
        ready = prepare(model, params)
        memory = encode_batch(model, ready.encoding, source, length)
        return decode_batch(model, strategy, ready.decoding, memory, sizes=sizes)

    return jax.jit(whole)
