"""Encoding and decoding of a padded batch as one compiled function of the parameters."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from pipejax import decoding
from pipejax.config import T5Config
from pipejax.decoding import Decoded, DecodingOptions, Sizes, SourceIds, Strategy
from pipejax.inference.backends import XLA, Backend
from pipejax.inference.drafter_parameters import SmallModel
from pipejax.inference.programs import decode_batch, encode_batch, schedule
from pipejax.model.backbone import Backbone
from pipejax.model.t5 import T5


def compiled(
    config: Backbone,
    strategy: Strategy,
    sizes: Sizes | None = None,
    *,
    backend: Backend = XLA,
    small: T5Config | None = None,
    shares_encoder: bool = False,
    forced: np.ndarray | None = None,
) -> Callable[..., Decoded]:
    """A function from parameters, source i32 [B, L] and length i32 [B] to the decoded answers.

    With `small`, the architecture of a T5 that drafts, its parameters are the last arguments. With `shares_encoder` the
    small T5 uses the outputs of the large T5's encoder. `forced`: i32 [R, W], the token that all examples generate at
    each row and time, -1 if the model chooses; None: the model chooses all tokens.
    """
    model = config.module()
    other = None if small is None else T5(small)

    @jax.jit
    def encode(params: Any, source: jax.Array, length: jax.Array, of_small: Any = None) -> Any:
        ready = backend.prepare(model, params)
        memory = encode_batch(model, ready.encoding, source, length, backend=backend, outputs=shares_encoder)
        encoded, memory = memory.encoded, dataclasses.replace(memory, encoded=None)
        if other is None:
            return (ready.decoding, None), memory, None
        laid = backend.prepare(other, of_small)
        encoding = backend.projections(laid.encoding) if shares_encoder else laid.encoding
        own = SmallModel(encoding, laid.decoding, other, backend, shares_encoder)
        return (ready.decoding, own), memory, own.read(SourceIds(source, length, encoded))

    decode = jax.jit(partial(decode_batch, model, strategy, backend=backend), static_argnames=("sizes", "slots"))

    def whole(params: Any, source: jax.Array, length: jax.Array, *of_small: Any) -> Decoded:
        weights, memory, found = encode(params, source, length, *of_small)
        chosen = sizes or schedule(strategy, len(length))
        options = DecodingOptions(forced=None if forced is None else np.repeat(forced[None], len(length), axis=0))
        read = (SourceIds(source, length, memory=found),) if strategy.reads_source else ()
        stretch = decoding.run(
            lambda slots, carry: decode(weights, memory, carry, *read, options=options, sizes=chosen, slots=slots),
            chosen,
        )
        return stretch.decoded

    return whole
