"""Encoding and decoding of a padded batch as a function of the parameters, as tests like it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from pipejax import decoding
from pipejax.config import T5Config
from pipejax.decoding import Decoded, Drafted, Sizes, SourceIds, Strategy
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.programs import decode_batch, encode_batch, prepare, schedule
from pipejax.model.t5 import T5


def compiled(
    config: T5Config, strategy: Strategy, sizes: Sizes | None = None, *, backend: Backend = XLA
) -> Callable[..., Decoded]:
    """From parameters, source i32 [B, L] and length i32 [B] to what is decoded."""
    model = T5(config)

    @jax.jit
    def encode(params: Any, source: jax.Array, length: jax.Array) -> Any:
        ready = prepare(model, params, backend=backend)
        return ready.decoding, encode_batch(model, ready.encoding, source, length, backend=backend)

    decode = jax.jit(partial(decode_batch, model, strategy, backend=backend), static_argnames=("sizes", "slots"))

    def whole(params: Any, source: jax.Array, length: jax.Array) -> Decoded:
        weights, memory = encode(params, source, length)
        chosen = sizes or schedule(strategy, len(length))
        read = (SourceIds(source, length),) if isinstance(strategy, Drafted) else ()
        found = decoding.run(
            lambda slots, carry: decode(weights, memory, carry, *read, sizes=chosen, slots=slots), chosen
        )
        return found.decoded

    return whole
