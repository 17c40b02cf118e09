"""A stack of equal layers, run one after the other or, to save memory in training, in one scan."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pipejax.model.precision import cast_params
from pipejax.model.stock import picture
from pipejax.system import Tree

Array = jax.Array


def apply_layers(
    layers: Sequence[Any],
    x: Array,
    *seen: object,
    deterministic: bool,
    remat: str,
    keys: Callable[[], Array],
    pin: Callable[[Array], Array],
    own: Sequence[Tree] = (),
) -> Array:
    """Runs x [B, L, D] through equal layers: `x = layer(x, *seen, deterministic)`, or the first that it returns.

    With `own`, a tree of arrays for each layer, that stands before `seen`: layers that differ in numbers are equal.

    With `remat` "none" layer by layer. Otherwise in one `lax.scan` over the stacked parameters, which compiles one
    layer instead of all, and keeps for the backward pass each layer's input alone ("layers") or the results of its
    weight matrices, too ("dots"); the rest is computed again. XLA sees what that saves only in a scan.
    """
    given: list[tuple[Tree, ...]] = [(each,) for each in own] or [()] * len(layers)
    if remat == "none":
        for layer, each in zip(layers, given, strict=True):
            x = _first(layer(x, *each, *seen, deterministic))
        return x
    layer = layers[0].clone(parent=None, name=None)
    # Cast first: a stack is a copy, and gradients of matrices are in the compute dtype either way.
    params = [cast_params(each.variables["params"], layer.dtype) for each in layers]
    stacked, numbers = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) for trees in (params, given))
    dropout = None if deterministic else jax.random.split(keys(), len(layers))

    def body(x: Array, given: tuple[Tree, tuple[Tree, ...], Array | None]) -> tuple[Array, None]:
        params, each, key = given
        rngs = None if key is None else {"dropout": key}
        return _first(layer.apply({"params": params}, pin(x), *each, *seen, deterministic, rngs=rngs)), None

    policies = jax.checkpoint_policies
    kept = policies.nothing_saveable if remat == "layers" else policies.dots_with_no_batch_dims_saveable
    # The scan itself keeps XLA from merging the second computation with the first.
    return jax.lax.scan(jax.checkpoint(body, policy=kept, prevent_cse=False), x, (stacked, numbers, dropout))[0]


def _first(found: Array | tuple[Array, object]) -> Array:
    return found[0] if isinstance(found, tuple) else found


STOCK = picture(globals())  # see `t5.is_stock`
