"""Products of a step by our kernel for CPUs, in the layers of any backbone.

A step multiplies large matrices with a few columns, for which XLA takes several times as long as reading the matrix
takes. An interceptor of Flax's puts the kernel in the place of the methods that `layers.multiplies_with` marks, those
of `Linear`, `Head`, and a table that is the head. All else stays as the backbone's module has it.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from pipejax.inference import kernels
from pipejax.inference.kernel_decoder import matrix
from pipejax.inference.kernels import fields
from pipejax.inference.weights import Matrix
from pipejax.model import lora
from pipejax.model.layers import Head
from pipejax.model.parameters import paths_read
from pipejax.model.quantization import SCALE
from pipejax.system import Tree

Array = jax.Array


@flax.struct.dataclass
class Panels:
    """A matrix as the kernel reads it."""

    matrix: Matrix
    outputs: int = flax.struct.field(pytree_node=False)  # those that do not fill up the last panel


@flax.struct.dataclass
class StepParams:
    """The parameters that a step reads."""

    matrices: dict[str, Panels]  # by the path of the module
    others: Tree


def take_apart(
    step: Callable[[Tree], object], params: Tree, *, compute: Callable[..., Any], weights: str
) -> StepParams:
    """The parameters that a step reads, of all; the matrices that it multiplies with are held in what `weights` says.

    `step` computes one from parameters, and is only traced; `compute` calls a function of arrays.
    """
    found: dict[tuple[str, ...], str] = {}

    def run(params: Tree) -> object:
        own = flatten_dict(params)

        def look(call: Callable[..., Any], given: Any, more: Any, context: nn.module.InterceptorContext) -> Any:
            if name := _matrix_name(context):
                module, path = context.module, context.module.path
                # A subclass or a transformation of Flax's may have made something else of the parameter.
                is_own = getattr(module, name, module.get_variable("params", name)) is own.get((*path, name))
                found[path] = found.get(path, name) if is_own else ""
            return call(*given, **more)

        with nn.intercept_methods(look):
            return step(params)

    jax.eval_shape(run, params)
    flat, matrices = flatten_dict(params), dict[str, Panels]()
    for path, name in filter(lambda item: item[1], found.items()):
        part = {key: flat[(*path, key)] for key in (name, SCALE) if (*path, key) in flat}
        inputs, outputs = part[name].shape if name == "kernel" else part[name].shape[::-1]
        if inputs % kernels.PANEL == 0:  # what the kernel reads at once
            matrices["/".join(path)] = Panels(compute(matrix, part, weights=weights), outputs)
    with multiplying(matrices, kernels.LEVELS[-1]):
        return StepParams(matrices, needed(step, params))


def needed(function: Callable[[Tree], object], params: Tree) -> Tree:
    """The parameters without the kernels that a function does not read; for others a module may ask all the same."""
    read = paths_read(function, params)
    flat = {path: x for path, x in flatten_dict(params).items() if path[-1] != "kernel" or "/".join(path) in read}
    return unflatten_dict(flat)


def multiplying(matrices: dict[str, Panels], level: kernels.Level) -> Any:
    """A context in which modules of these paths multiply by the kernel."""

    def replace(call: Callable[..., Any], given: Any, more: Any, context: nn.module.InterceptorContext) -> Any:
        name = _matrix_name(context)
        by = matrices.get("/".join(context.module.path)) if name else None
        if by is None:
            return call(*given, **more)
        is_head = name == "embedding" or isinstance(context.module, Head)
        return _multiply(given[0], by, level=level, finer=is_head)

    return nn.intercept_methods(replace)


def _matrix_name(context: nn.module.InterceptorContext) -> str | None:
    """The parameter that a call multiplies with, if nothing but that is its work."""
    name: str | None = getattr(getattr(type(context.module), context.method_name, None), "multiplies_with", None)
    return None if name is None or context.module.has_variable("params", lora.A) else name


def _multiply(columns: Array, by: Panels, *, level: kernels.Level, finer: bool) -> Array:
    """f32 [..., O] from columns [..., I]; `finer`: their digits are two where the matrix wants digits."""
    *batch, inputs = columns.shape
    columns = columns.astype(jnp.float32).reshape(-1, inputs)
    sizes = {"N": len(columns), "I": inputs, "O": by.matrix.rows.shape[0] * kernels.PANEL, "finer": int(finer)}
    result = jax.ShapeDtypeStruct((sizes["N"], sizes["O"]), jnp.float32)
    found = jax.ffi.ffi_call(f"pipejax_product_{level.name}", result)(
        *fields.arrays("PRODUCT_FIELDS", {"columns": columns, "matrix": by.matrix}),
        numbers=fields.numbers("PRODUCT_NUMBERS", sizes),
    )
    return found[:, : by.outputs].reshape(*batch, by.outputs)
