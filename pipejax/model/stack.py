"""Applies a stack of equal layers, one after the other or, to save memory in training, in one scan."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pipejax.model.dropout import STREAM
from pipejax.model.precision import cast_params
from pipejax.model.snapshot import snapshot
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
    grouped: bool = False,
) -> Array:
    """Applies equal layers: x = layer(x, *own, *seen, deterministic), or the first value if a layer returns a tuple.

    With `remat` "none" the layers are applied one by one. Otherwise one `lax.scan` over the stacked parameters compiles
    a single layer, and stores for the backward pass only each layer's input ("layers"), or also the results of products
    with weight matrices ("dots"). The backward pass computes the rest again. XLA saves this memory only in a scan.

    Args:
      layers: the Flax modules of the layers, bound to their parameters.
      x: [B, L, D].
      seen: further arguments of all layers, such as a bias.
      deterministic: whether dropout is off.
      remat: "none", "layers" or "dots".
      keys: returns the key of the rng "dropout", which is split for the layers, like the key of `dropout.STREAM`.
      pin: a sharding constraint, applied to the input of each layer of a scan.
      own: a tree of arrays for each layer, passed before `seen`, in which layers may differ.
      grouped: whether a scan stacks the parameters of equal shape in one array. On a GPU, one kernel then takes all of
        them out of their stack, and one kernel writes their gradients. On a mesh they may be sharded differently.

    Returns:
      [B, L, D], the output of the last layer.
    """
    given: list[tuple[Tree, ...]] = [(each,) for each in own] or [()] * len(layers)
    rngs = {} if deterministic else _split_rngs(layers, keys)
    if remat == "none":
        for number, (layer, each) in enumerate(zip(layers, given, strict=True)):
            if deterministic:
                x = _first(layer(x, *each, *seen, True))
            else:  # applied outside the stack's scope, as in a scan, so that modules draw the same seeds in both cases
                own_rngs = {name: of_layers[number] for name, of_layers in rngs.items()}
                x = _first(_apart(layer).apply(layer.variables, x, *each, *seen, False, rngs=own_rngs))
        return x
    layer = _apart(layers[0])
    # Cast before stacking: a stack is a copy, and the gradients of matrices have the compute dtype in both cases.
    params = [cast_params(each.variables["params"], layer.dtype) for each in layers]
    leaves = [jax.tree.leaves(each) for each in params]
    tree, groups = jax.tree.structure(params[0]), _alike(leaves[0], grouped=grouped)
    stacked = [jnp.stack([jnp.stack([own[i] for i in group]) for own in leaves]) for group in groups]
    numbers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *given)

    def body(x: Array, given: tuple[list[Array], tuple[Tree, ...], dict[str, Array]]) -> tuple[Array, None]:
        grouped, each, rngs = given
        apart = {i: of_group[k] for group, of_group in zip(groups, grouped, strict=True) for k, i in enumerate(group)}
        params = jax.tree.unflatten(tree, [apart[i] for i in range(len(apart))])
        return _first(layer.apply({"params": params}, pin(x), *each, *seen, deterministic, rngs=rngs)), None

    policies = jax.checkpoint_policies
    kept = policies.nothing_saveable if remat == "layers" else policies.dots_with_no_batch_dims_saveable
    # The scan already prevents XLA from merging the second computation of a layer with the first.
    return jax.lax.scan(jax.checkpoint(body, policy=kept, prevent_cse=False), x, (stacked, numbers, rngs))[0]


def _alike(leaves: Sequence[Array], *, grouped: bool) -> list[list[int]]:
    """Returns the indices of leaves in groups of equal shape and dtype; if not `grouped`, in groups of one."""
    groups: dict[object, list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault((leaf.shape, leaf.dtype) if grouped else number, []).append(number)
    return list(groups.values())


def _split_rngs(layers: Sequence[Any], keys: Callable[[], Array]) -> dict[str, Array]:
    """Returns the keys [n, ...] of the n layers, by the name of the rng."""
    rngs = {"dropout": keys()}
    if layers[0].has_rng(STREAM):
        rngs[STREAM] = layers[0].make_rng(STREAM)
    return {name: jax.random.split(key, len(layers)) for name, key in rngs.items()}


def _apart(layer: Any) -> Any:
    """Returns a copy of a layer without a parent, which can be applied outside the scope of its stack."""
    return layer.clone(parent=None, name=None)


def _first(found: Array | tuple[Array, object]) -> Array:
    """Returns the output of a layer: the value itself, or the first one of a tuple."""
    return found[0] if isinstance(found, tuple) else found


SNAPSHOT = snapshot(globals())  # see `t5.is_packed`
