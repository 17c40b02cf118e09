"""The decoder's weights in the layout that a decoding step reads, for all backends.

A step reads every weight for only a few tokens. So matrices are stored by rows in the order of reading, and projections
with the same input are one matrix. Shapes: D width, I = heads times their width, F feed-forward width, V vocabulary.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pipejax.config import T5Config
from pipejax.model.layers import buckets
from pipejax.model.quantization import SCALE, quantize
from pipejax.system import Tree

Array = jax.Array


@flax.struct.dataclass
class Matrix:
    """A weight matrix [O, I]."""

    rows: Array  # [O, I], or another layout of a backend
    scale: Array  # f32 [O] for int8 rows, else f32 [0]


@flax.struct.dataclass
class Layer:
    """The weights of a decoder layer; norm scales are float32."""

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
    """The weights that a decoder step reads, without the projections that compute the memory of a source."""

    embedding: Matrix | None  # [V, D]; None: `head`, if tied
    layers: tuple[Layer, ...]
    norm: Array  # [D]
    head: Matrix  # [V, D]
    bias: Array  # f32 [T, H, distances]; the last distance includes all longer ones; T is 1, or the number of layers


def as_matrix(part: Tree, weights: str, dtype: DTypeLike) -> Matrix:
    """Returns a projection or table as a matrix [O, I] in the stored dtype.

    Args:
      part: the parameters of the projection or table; int8 ones with scales are used unchanged.
      weights: the stored dtype, one of `pipejax.config.WEIGHTS`; "auto": `dtype`. For "int8", each row is rounded with
        one float32 scale.
      dtype: the compute dtype.
    """
    rows = part["kernel"].T if "kernel" in part else part["embedding"]
    if SCALE in part:
        return Matrix(rows, part[SCALE])
    if weights == "int8":
        return Matrix(*quantize(rows, axis=1))
    return Matrix(rows.astype(jnp.bfloat16 if weights == "bfloat16" else dtype), jnp.zeros(0))


def join(*matrices: Matrix) -> Matrix:
    """Concatenates matrices with the same inputs, each already laid out.

    XLA would transpose a concatenation of matrices element by element, so the matrices are laid out before this
    function.
    """
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *matrices)


def lay_out(config: T5Config, params: Tree, matrix: Callable[[Tree], Matrix]) -> Weights:
    """Returns the decoder's weights outside of layers, from a T5's parameters.

    `matrix` converts a projection or a table.
    """
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
    """Returns the relative biases of a stack's parameters without layers, [T, buckets, H].

    T is 1 if the layers share a table, else the number of layers.
    """
    found: Array = stack["relative_bias"]["embedding"]
    return found.reshape(-1, *found.shape[-2:])


def lay_out_layer(layer: Tree, matrix: Callable[[Tree], Matrix]) -> Layer:
    """Returns the weights of a decoder layer from its parameters; `matrix` converts a projection."""
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
