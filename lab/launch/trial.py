"""Compares the launch with XLA's step on the device that will run it, before it is used."""

import dataclasses
import logging
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from lab import launch
from lab.launch import LaunchBlocks
from pipejax import decoding
from pipejax.config import T5Config
from pipejax.decoding import Pipelined, Sizes
from pipejax.decoding.gathering import gather
from pipejax.inference.step_decoder import StepDecoder
from pipejax.inference.weights import as_matrix, lay_out, lay_out_layer
from pipejax.model.t5 import Memory
from pipejax.system.errors import first_line

logger = logging.getLogger(__name__)

TOLERANCE = 0.02  # for `compare`; both round to bfloat16, which causes distances of 0.002 to 0.01


def agrees(blocks: LaunchBlocks) -> bool:
    """Whether a launch and XLA agree for a small random model; otherwise a warning has the reason."""
    try:
        failed, apart = jax.device_get(jax.jit(partial(compare, _decoder(), Pipelined(1, 12, 5), blocks, steps=7))())
        if not failed and apart < TOLERANCE:
            return True
        found = "its blocks wait too long" if failed else f"its logits are off by {apart:.2g}"
        why = f"on this device {found}"
    except Exception as error:  # compilers raise errors of many types, and none may prevent decoding
        why = first_line(error)[:200]
    logger.warning(f"decoding does not use one launch: {why}")
    return False


def compare(decoder: Any, strategy: Any, blocks: LaunchBlocks, *, steps: int) -> tuple[Any, jax.Array]:
    """Whether a launch of a step after `steps` steps fails, and the relative distance of its logits from XLA's."""
    batch, rows = len(decoder.memory.mask), strategy.most_queries
    static: Any = {"sizes": (sizes := Sizes.fit(strategy, batch)), "slots": sizes.slots[-1]}
    carry = decoding.begin(strategy, decoder, strategy.init(batch), sizes)
    carry = decoding.decode(strategy, decoder, carry, **static, pause_after=jnp.int32(steps)).carry
    asked, number, _ = gather(carry.query, carry.filled, carry.used, batch * rows, rows, strategy.position)
    expected = decoder(asked, carry.cache)[0].T[number.reshape(-1)]
    _, failed, logits = launch.decode(decoder, strategy, carry, **static, blocks=blocks, pause_after=jnp.int32(1))
    live = carry.query.live.reshape(-1)
    both = (jnp.where(live[:, None], x, 0) for x in (logits[jnp.cumsum(live) - 1] - expected, expected))
    return failed, jnp.linalg.norm(next(both)) / jnp.linalg.norm(next(both))


def _decoder() -> StepDecoder:
    """A decoder with random weights and two random sources."""
    config, length = T5Config(1000, 256, 64, 512, 2, 1, 2, feed_forward="gated-gelu"), 600
    params, draw = config.init_params(jax.random.key(0)), partial(jax.random.normal, dtype=jnp.bfloat16)
    matrix = partial(as_matrix, weights="auto", dtype=jnp.bfloat16)
    layers = tuple(lay_out_layer(params["decoder"][f"layers_{i}"], matrix) for i in range(2))
    keys, values = (tuple(draw(jax.random.key(i), (2, 2, *x)) for i in (1, 2)) for x in ((64, length), (length, 64)))
    memory = Memory(keys, values, jnp.arange(length) < jnp.asarray([[90], [length]]))
    weights = dataclasses.replace(lay_out(config, params, matrix), layers=layers)
    return StepDecoder(config, weights, memory, jnp.bfloat16)
