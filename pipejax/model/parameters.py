"""Checks the parameters of a checkpoint against the backbone of its config, and initialises parameters."""

from collections.abc import Callable, Mapping, Sequence

import jax
from jax.core import eval_jaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh

from pipejax.model import lora, quantization
from pipejax.model.backbone import VECTORS, Backbone, Module, smallest_batch
from pipejax.model.sharding import param_shardings, path_of, put_tree
from pipejax.system import Tree
from pipejax.system.errors import UserError


def check_paths(where: str, shapes: Mapping[str, Sequence[int]], model: Backbone) -> None:
    """Raises a UserError unless parameters have the paths and shapes that a backbone declares.

    Low-rank factors beside kernels and scales beside matrices are accepted, too.

    Args:
      where: the place of the parameters, with which messages begin.
      shapes: the shape of each parameter, by path.
      model: the backbone.
    """
    table = model.tensors()
    factors = {path for path in shapes if lora.is_factor(path)}
    # The axis of a scale: the rows of an embedding table, or the columns of a kernel.
    scales = {
        quantization.scale_path(path): axes[0 if "embedding" in path else -1]
        for path, (_, axes) in table.items()
        if axes
    }
    for path in sorted(table.keys() - shapes.keys()):
        raise UserError(f"{where}: {path}", "missing", expected=f"{len(table)} parameters, as the config implies")
    for path, shape in sorted(shapes.items()):
        kernel = path.rpartition("/")[0] + "/kernel"
        if path in factors and lora.ADAPTED.fullmatch(kernel) and kernel in table:
            inputs, outputs = shapes[kernel]
            rank = shape[-1 if path.endswith(lora.A) else 0] if len(shape) == 2 else 0
            expected = [inputs, rank] if path.endswith(lora.A) else [rank, outputs]
            other = path[:-1] + ("b" if path.endswith(lora.A) else "a")
            if list(shape) != expected or rank not in shapes.get(other, ()):
                raise UserError(
                    f"{where}: {path}",
                    found=f"shape {list(shape)}",
                    expected=f"a LoRA factor that matches {kernel} of shape {[inputs, outputs]} and {other}",
                )
        elif path in scales:
            check_shape(f"{where}: {path}", tuple(shape), scales[path], model)
        elif path not in table:
            raise UserError(
                f"{where}: {path}",
                "not in the config",
                expected=f"the {len(table)} parameters of `tensors`",
            )
        else:
            check_shape(f"{where}: {path}", tuple(shape), table[path][1], model)


def check_shape(where: str, shape: tuple[int, ...], axes: str, model: Backbone) -> None:
    """Raises a UserError that begins with `where` if a shape is not the one that the config implies.

    Args:
      where: the path of the parameter.
      shape: its shape.
      axes: the letters of its axes, keys of `Backbone.sizes`.
      model: the backbone.
    """
    sizes = dict(model.sizes()[axis] for axis in axes)
    expected = list(sizes.values())
    if list(shape) != expected:
        named = ", ".join(f"{key} {size}" for key, size in sizes.items())
        raise UserError(where, found=f"shape {list(shape)}", expected=f"{expected}, since the config has {named}")


def initial(backbone: Backbone, key: jax.Array, mesh: Mesh) -> Tree:
    """Returns newly initialised parameters, sharded over a mesh.

    Their values are the same as from `jax.jit(backbone.init_params)`. They are drawn one after the other, by one
    program for each shape and scale, because XLA takes about a minute to compile a single program for all of them.
    """
    whole, shapes = jax.make_jaxpr(backbone.init_params, return_shape=True)(key)
    places, structure = jax.tree.flatten(param_shardings(backbone, shapes, mesh))
    drawn, _ = dce_jaxpr(whole.jaxpr, [True] * len(places), instantiate=True)  # without the layers' computations
    found = []
    for i, place in enumerate(places):  # one at a time has to find room on the first device
        own, _ = dce_jaxpr(drawn, [i == j for j in range(len(places))], instantiate=True)
        (value,) = eval_jaxpr(own, whole.consts, key)
        found.append(put_tree(value, place))
    return jax.tree.unflatten(structure, found)


def check_read(where: str, model: Module, params: Tree, kind: str | tuple[str, ...]) -> None:
    """Raises a UserError if a module does not read some of its scales or factors.

    Flax ignores parameters that a module does not read, so such scales or factors would silently have no effect.

    Args:
      where: the place of the parameters, with which the message begins.
      model: the Flax module.
      params: its parameters.
      kind: the path endings of the parameters to check.
    """
    read = paths_read(lambda params: model.apply({"params": params}, *smallest_batch()), params)
    for keys, _ in jax.tree_util.tree_leaves_with_path(params):
        path = path_of(keys)
        if path.endswith(kind) and not path.endswith(VECTORS) and path not in read:
            raise UserError(
                f"{where}: {path}",
                f"{type(model).__name__} does not read it",
                expected="the layers of pipejax.model.layers",
            )


def paths_read(function: Callable[[Tree], object], params: Tree) -> set[str]:
    """Returns the paths of those parameters that a function uses in a computation."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)

    def run(arrays: Sequence[jax.Array]) -> object:
        return function(jax.tree.unflatten(structure, arrays))

    found = jax.make_jaxpr(run)([jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in leaves]).jaxpr
    read = {id(x) for step in found.eqns for x in step.invars}
    return {path_of(keys) for (keys, _), variable in zip(leaves, found.invars, strict=True) if id(variable) in read}
