"""Models of random weights in the layout of the CPU kernel, and the kernel's levels that this processor supports."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pipejax.inference.weights import Matrix
from pipejax.kernels import cpu_decoder, cpu_kernel, processor
from pipejax.kernels.backends import OwnKernel
from pipejax.model import t5
from support import oracle, quantised
from support.tiny import IN_BLOCKS

HERE = [level.name for level in cpu_kernel.LEVELS if level.needs <= processor.features()]
WEIGHTS = ("auto", "bfloat16", "int8")
SHAPES = {  # sizes that fill tiles and sizes that do not, tied and separate heads, an odd number of panels
    "small": {},
    "gelu": {"d_ff": 112, "feed_forward": "gated-gelu", "tied_head": False, "scale_head": False, "vocab_size": 50},
    "silu": {"d_model": 128, "d_kv": 64, "d_ff": 192, "feed_forward": "gated-silu"},
    "outliers": {"d_model": 384},
    "spread": {},
}


def in_one_digit(weights, level):
    """Whether activations are rounded to one int8 digit."""
    features = processor.features() if level.name == "native" else level.needs
    return weights == "int8" and "avx512_vnni" in features and "amx_int8" not in features


@functools.cache
def made(shape, weights, level):
    """A model with random weights for the CPU kernel, and NumPy's rounding of the weights.

    One model has more outliers than one digit leaves out, all at places where the maxima over every 64th number show
    one. In the encoder of one model, each token attends to itself, and as much to all others together: the weight of
    each other token is too small for int8.
    """
    config = dataclasses.replace(IN_BLOCKS, **SHAPES[shape])
    model, params = t5.T5(config), oracle.random_params(config, np.random.default_rng(5))
    if shape == "outliers":
        for stack in (params["encoder"], params["decoder"]):
            layer = stack["layers_0"]["feed_forward"]
            layer["norm"]["scale"][5::64] *= 50
            layer["wi"]["kernel"][5::64] /= 50
    if shape == "spread":
        layer = params["encoder"]["layers_0"]["attention"]
        layer["query"]["kernel"][:] = 0
        params["encoder"]["relative_bias"]["embedding"][:] = 0
        params["encoder"]["relative_bias"]["embedding"][0] = 6.5
        params["shared"]["embedding"] += 1
    backend = OwnKernel(weights, level)
    ready = jax.jit(functools.partial(backend.prepare, model))(jax.tree.map(jnp.asarray, params))
    return model, backend, ready, quantised.rounded(params, weights)


def laid_out(memory, weights):
    """Keys [B, H, L, K] and values [B, H, K, L] in panels, in the layout of the kernel for these weights.

    In int8 each key has a scale, and so has each output of the values; numbers after the end of a source are arbitrary.
    Keys in other dtypes are divided by the factors of queries, a power of two for each channel.
    """
    dtype = cpu_decoder.memory_dtype(weights)
    whole = dtype == jnp.int8  # rounded as in NumPy, without balancing

    def held(x):
        x = x.swapaxes(2, 3)
        if dtype != jnp.int8:
            return Matrix(cpu_kernel.panels(x.astype(dtype)), jnp.zeros((*x.shape[:2], 0), jnp.float32))
        scale = jnp.nan_to_num(jnp.abs(x)).max(axis=3) / 127
        return Matrix(cpu_kernel.panels(jnp.nan_to_num(jnp.round(x / scale[..., None])).astype(dtype)), scale)

    def balanced(x):
        balance = jnp.broadcast_to(2.0 ** (0 if whole else jnp.arange(x.shape[2]) % 5 - 2), x.shape[:3])
        return cpu_decoder.Keys(**vars(held(x / balance[..., None])), balance=balance)

    return t5.Memory(tuple(map(balanced, memory.keys)), tuple(map(held, memory.values)), memory.mask)


def in_rows(matrix):
    """The matrix f32 [.., O, I] of panels [.., O / 16, I / depth, 16, depth] and scales [.., O], or a source's keys."""
    *batch, o, i, lanes, depth = matrix.rows.shape
    rows = np.asarray(matrix.rows.swapaxes(-2, -3).astype(jnp.float32)).reshape(*batch, o * lanes, i * depth)
    rows = rows * np.asarray(matrix.scale)[..., None] if matrix.scale.size else rows
    with np.errstate(invalid="ignore"):  # for a source that is not finite
        return rows * np.asarray(matrix.balance)[..., None, :] if hasattr(matrix, "balance") else rows
