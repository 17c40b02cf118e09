"""The decoder's weights as a step reads them, whatever computes it.

A step reads every weight for a few tokens, so weights lie in rows as they are read, and projections of the same input
are one matrix. Shapes: D width, I = heads times their width, F feed-forward width, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from pipejax.config import T5Config
from pipejax.model.layers import buckets
from pipejax.model.quantization import SCALE, quantize
from pipejax.system import Tree

Array = jax.Array


@flax.struct.dataclass
class Matrix:
    """A weight matrix [O, I]."""

    rows: Array  # [O, I], or laid out otherwise by a backend
    scale: Array  # f32 [O] of int8, else f32 [0]


@flax.struct.dataclass
class Layer:
    """Of a decoder layer; norm scales are float32."""

    self_norm: Array  # [D]
    self_inwards: Matrix  # [3 I, D]: query, key, value
    self_outwards: Matrix  # [D, I]
    cross_norm: Array  # [D]
    cross_query: Matrix  # [I, D]
    cross_outwards: Matrix  # [D, I]
    feed_norm: Array  # [D]
    feed_inwards: Matrix  # [F, D], or gate and value [2 F, D]
    feed_outwards: Matrix  # [D, F]


@flax.struct.dataclass
class Weights:
    """The weights that a decoder step reads, all but those of the source."""

    embedding: Matrix | None  # [V, D]; None: the head's, if tied
    layers: tuple[Layer, ...]
    norm: Array  # [D]
    head: Matrix  # [V, D]
    bias: Array  # f32 [T, H, distances], the last for all that is farther; T is 1, or each layer has its own


def narrow(part: Tree, weights: str, dtype: Any) -> Matrix:
    """A projection or a table as a matrix [O, I] held in what `weights` says; "auto": in that dtype."""
    rows = part["kernel"].T if "kernel" in part else part["embedding"]
    if SCALE in part:
        return Matrix(rows, part[SCALE])
    if weights == "int8":
        return Matrix(*quantize(rows, axis=1))
    return Matrix(rows.astype(jnp.bfloat16 if weights == "bfloat16" else dtype), jnp.zeros(0))


def join(*matrices: Matrix) -> Matrix:
    """Matrices with the same inputs as one, each laid out before: XLA transposes what is joined element by element."""
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *matrices)


def lay_out(config: T5Config, params: Tree, matrix: Callable[[Tree], Matrix]) -> Weights:
    """The decoder's weights from a T5's parameters, but for its layers; `matrix` holds a projection or a table."""
    longest = config.relative_attention_max_distance
    of_distance = buckets(np.arange(longest + 1), count=config.relative_attention_num_buckets, longest=longest)
    decoder = params["decoder"]
    return Weights(
        embedding=None if config.tied_head else matrix(params["shared"]),
        layers=(),
        norm=decoder["norm"]["scale"],
        head=matrix(params["shared"] if config.tied_head else params["lm_head"]),
        bias=bias_tables(decoder)[:, of_distance].swapaxes(1, 2).astype(jnp.float32),
    )


def bias_tables(stack: Tree) -> Array:
    """[T, buckets, H] of a stack's parameters without layers: the one that they share, or their own."""
    found: Array = stack["relative_bias"]["embedding"]
    return found.reshape(-1, *found.shape[-2:])


def lay_out_layer(layer: Tree, matrix: Callable[[Tree], Matrix]) -> Layer:
    """A layer of the decoder from its parameters."""
    own, cross, feed = layer["self_attention"], layer["cross_attention"], layer["feed_forward"]
    return Layer(
        self_norm=own["norm"]["scale"],
        self_inwards=join(*(matrix(own[name]) for name in ("query", "key", "value"))),
        self_outwards=matrix(own["output"]),
        cross_norm=cross["norm"]["scale"],
        cross_query=matrix(cross["query"]),
        cross_outwards=matrix(cross["output"]),
        feed_norm=feed["norm"]["scale"],
        feed_inwards=join(*(matrix(feed[name]) for name in ("wi", "wi_0", "wi_1") if name in feed)),
        feed_outwards=matrix(feed["wo"]),
    )
