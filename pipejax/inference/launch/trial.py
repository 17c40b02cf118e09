"""The launch beside XLA's step, on the device that is to run it: nothing is trusted unseen."""

import functools
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np

from pipejax import decoding
from pipejax.config import T5Config
from pipejax.decoding import Pipelined, Sequential, Sizes
from pipejax.decoding.gathering import gather
from pipejax.inference import launch
from pipejax.inference.launch import Blocks
from pipejax.inference.step_decoder import StepDecoder
from pipejax.inference.weights import Layer, Matrix, Weights
from pipejax.model.t5 import Memory
from pipejax.system.errors import UserError, first_line

logger = logging.getLogger(__name__)

VARIABLE = "PIPEJAX_LAUNCH"  # "on": decode in one launch; off unless it says so, since no GPU has run the kernel yet
TOLERANCE = 0.02  # of `compare`; both round to bfloat16, which is apart by 0.002 to 0.01


@functools.cache
def use() -> Blocks | None:
    """The blocks that this process's GPU decodes with, if it is asked to and they find what XLA finds. Asked once."""
    wanted = os.environ.get(VARIABLE, "off")
    if wanted not in ("on", "off"):
        raise UserError(f"{VARIABLE}: found {wanted!r}; expected on or off")
    if wanted == "off" or jax.default_backend() != "gpu":
        return None
    device = jax.local_devices()[0]
    blocks = Blocks(device.core_count, str(device.compute_capability).replace(".", ""))
    return blocks if agrees(blocks) else None


def agrees(blocks: Blocks) -> bool:
    """Whether a launch of a small random model finds what XLA finds; a line says why not."""
    try:
        failed, apart = jax.device_get(
            jax.jit(functools.partial(compare, _decoder(), Pipelined(1, 12, 5), blocks, steps=7))()
        )
    # The compilers' errors are of many kinds, and none of them may keep anyone from decoding.
    except Exception as error:
        logger.warning(f"decoding goes without its one launch: {first_line(error)[:200]}")
        return False
    if failed or not apart < TOLERANCE:
        why = "its blocks wait for each other in vain" if failed else f"its logits are wrong by {apart:.2g}"
        logger.warning(f"decoding goes without its one launch: on this device {why}")
    return bool(not failed and apart < TOLERANCE)


def compare(
    decoder: StepDecoder, strategy: Pipelined | Sequential, blocks: Blocks, *, steps: int
) -> tuple[jax.Array, jax.Array]:
    """Whether the launch of a step after so many fails, and how far its logits are from XLA's; traced.

    It is the difference's root mean square over that of XLA's logits.
    """
    batch, rows = len(decoder.memory.mask), strategy.most_queries
    sizes = Sizes.fit(strategy, batch)
    static = {"sizes": sizes, "slots": sizes.slots[-1]}
    carry = decoding.begin(strategy, decoder, strategy.init(batch), sizes)
    carry = decoding.decode(strategy, decoder, carry, **static, pause_after=jnp.int32(steps)).carry
    asked, number, _ = gather(carry.query, carry.filled, carry.used, batch * rows, rows, strategy.position)
    expected = decoder(asked, carry.cache)[0].T[number.reshape(-1)]
    found, logits = launch.decode(decoder, strategy, carry, **static, blocks=blocks, pause_after=jnp.int32(1))
    live = carry.query.live.reshape(-1)
    apart = logits[jnp.cumsum(live) - 1] - expected
    assert found.failed is not None
    squares = (jnp.where(live[:, None], x * x, 0).sum() for x in (apart, expected))
    return found.failed, jnp.sqrt(next(squares) / next(squares))


def _decoder() -> StepDecoder:
    """Of random numbers, for two sources."""
    rng, dtype = np.random.default_rng(0), jnp.bfloat16
    width, inner, feed, vocabulary, length = 256, 128, 512, 1000, 600

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    def matrix(outputs: int, inputs: int) -> Matrix:
        return Matrix(normal(outputs, inputs, scale=inputs**-0.5), jnp.zeros(0))

    def norm() -> jax.Array:
        return jnp.asarray(rng.uniform(0.5, 2.0, width), jnp.float32)

    def layer() -> Layer:
        own = norm(), matrix(3 * inner, width), matrix(width, inner)
        cross = norm(), matrix(inner, width), matrix(width, inner)
        return Layer(*own, *cross, norm(), matrix(2 * feed, width), matrix(width, feed))

    config = T5Config(vocabulary, width, inner // 2, feed, 2, 1, 2, feed_forward="gated-gelu")
    bias = jnp.asarray(rng.standard_normal((2, 129)), jnp.float32)
    weights = Weights(None, (layer(), layer()), norm(), matrix(vocabulary, width), bias)
    keys, values = (tuple(normal(2, 2, *shape) for _ in range(2)) for shape in ((64, length), (length, 64)))
    return StepDecoder(config, weights, Memory(keys, values, jnp.arange(length) < jnp.asarray([[90], [length]])), dtype)
