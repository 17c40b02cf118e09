"""Computes the matrix products of a decoding step with pipejax's kernel for CPUs, in the layers of any backbone.

A step multiplies large matrices with a few columns. For such a product, XLA takes several times as long as reading the
matrix takes. A Flax interceptor replaces the methods that `layers.multiplies_with` marks by the kernel: the methods of
`Linear` and `Head`, and the product with an embedding table that is the head. The backbone's module computes all other
parts of the step.

Greedy decoding needs only the highest product of a large head. An int8 copy of the head's matrix gives bounds of all
products, and only products that may be the highest are computed in full.

Shapes: I inputs, O outputs, N columns.
"""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pipejax.inference.backends import Compute
from pipejax.inference.weights import Matrix, as_matrix
from pipejax.kernels import cpu_kernel
from pipejax.kernels.cpu_decoder import matrix
from pipejax.kernels.cpu_kernel import fields
from pipejax.model import lora
from pipejax.model.layers import Head
from pipejax.model.parameters import paths_read
from pipejax.model.quantization import SCALE
from pipejax.system import Tree

Array = jax.Array
MANY = 2**15  # the least number of outputs of a head for which bounds are used
FEW = 8  # the most columns for which bounds are used; with more, computing takes longer than reading the matrix
SMALL, LARGE = 2.0**-40, 2.0**60  # products of numbers within these bounds neither underflow nor overflow


@flax.struct.dataclass
class Panels:
    """A matrix in the layout of the kernel."""

    matrix: Matrix
    outputs: int = flax.struct.field(pytree_node=False)  # O, without the padding of the last panel
    rough: "Rough | None" = None  # an int8 copy, for a large head


@flax.struct.dataclass
class Rough:
    """An int8 copy of a matrix, with error bounds."""

    matrix: Matrix
    apart: Array  # f32 [O], the largest error of a row's product with a column x, divided by the norm of x


@flax.struct.dataclass
class StepParams:
    """The parameters that a step reads."""

    matrices: dict[str, Panels]  # the matrices of the kernel's products, by the path of the module
    others: Tree  # the other parameters


def split_kernel_weights(
    step: Callable[[Tree], object], params: Tree, *, compute: Compute, weights: str, rough: bool = False
) -> StepParams:
    """Divides the parameters that a step reads into matrices for the kernel and other parameters.

    Args:
      step: computes a step from parameters; it is only traced.
      params: all parameters.
      compute: calls a function of arrays.
      weights: the storage of the matrices, as `decode.weights`.
      rough: whether a large head gets an int8 copy, too.
    """
    found: dict[tuple[str, ...], str] = {}
    heads: set[tuple[str, ...]] = set()

    def run(params: Tree) -> object:
        own = flatten_dict(params)

        def look(call: Callable[..., Any], given: Any, more: Any, context: nn.module.InterceptorContext) -> Any:
            if name := _matrix_name(context):
                module, path = context.module, context.module.path
                # A subclass or a Flax transformation may have replaced the parameter by a computed array.
                is_own = getattr(module, name, module.get_variable("params", name)) is own.get((*path, name))
                found[path] = found.get(path, name) if is_own else ""
                heads.update([path] if _is_head(name, module) else [])
            return call(*given, **more)

        with nn.intercept_methods(look):
            return step(params)

    jax.eval_shape(run, params)
    flat, matrices = flatten_dict(params), dict[str, Panels]()
    for path, name in filter(lambda item: item[1], found.items()):
        part = {key: flat[(*path, key)] for key in (name, SCALE) if (*path, key) in flat}
        inputs, outputs = part[name].shape if name == "kernel" else part[name].shape[::-1]
        if inputs % cpu_kernel.PANEL == 0:  # the kernel supports only such matrices
            held = Panels(compute(matrix, part, weights=weights), outputs)
            if rough and path in heads and held.matrix.rows.dtype == jnp.float32 and outputs >= MANY:
                held = dataclasses.replace(held, rough=compute(roughen, part))
            matrices["/".join(path)] = held
    with multiplying(matrices, cpu_kernel.LEVELS[-1]):
        return StepParams(matrices, needed(step, params))


def needed(function: Callable[[Tree], object], params: Tree) -> Tree:
    """Returns the parameters without the kernels that a function does not read.

    Other parameters are kept, as a module may look them up without using them in a computation.
    """
    read = paths_read(function, params)
    flat = {path: x for path, x in flatten_dict(params).items() if path[-1] != "kernel" or "/".join(path) in read}
    return unflatten_dict(flat)


def roughen(part: Tree) -> Rough:
    """Quantises a head to int8, and bounds the errors of its products.

    The bound of a row applies to the error of the row's product with a column x, divided by the norm |x|.

    Each row w of the matrix is rounded to v. The computed products differ by at most |w - v| |x| and rounding errors:
    in both products each of the I additions, and a few more operations, rounds by at most 2^-24 of |w| |x| or |v| |x|.
    This holds if no number overflows or underflows; rows for which this is possible have the bound inf.
    """
    rows, held = as_matrix(part, "auto", jnp.float32).rows, as_matrix(part, "int8", jnp.float32)
    largest = jnp.abs(rows).max(axis=1, keepdims=True)
    bounded = (largest >= SMALL) & (largest <= LARGE)
    by = jnp.where(bounded, largest, 1)  # rows are divided by this, as squares of small numbers would underflow
    whole = held.rows * held.scale[:, None]
    length, of_whole, difference = (jnp.linalg.norm(x / by, axis=1) for x in (rows, whole, rows - whole))
    of_rounding = (rows.shape[1] + 8) * 2.0**-24 * (length + of_whole)
    apart = (difference + of_rounding) * by[:, 0] * 1.001
    # A row of zeros is exact, except that a processor may flush denormal numbers to zero, which together are less than
    # 2^-100.
    apart = jnp.where(largest[:, 0] == 0, 2.0**-100, jnp.where(bounded[:, 0], apart, jnp.inf))
    more = -len(apart) % cpu_kernel.PANEL
    in_panels = matrix({"embedding": held.rows, SCALE: held.scale}, weights="int8")
    return Rough(in_panels, jnp.pad(apart, (0, more), constant_values=jnp.inf))


def multiplying(
    matrices: dict[str, Panels], level: cpu_kernel.Level, cap: float | None = None
) -> AbstractContextManager[None]:
    """Returns a context manager in which the modules with the given paths multiply with the kernel.

    Args:
      matrices: the matrices, by the path of the module.
      level: the instruction set of the kernel.
      cap: for a large head, only the products that may be the highest are needed; the value is the soft cap of its
        logits, 0 for no cap. None: all products are needed.
    """

    def replace(call: Callable[..., Any], given: Any, more: Any, context: nn.module.InterceptorContext) -> Any:
        name = _matrix_name(context)
        by = matrices.get("/".join(context.module.path)) if name else None
        if by is None:
            return call(*given, **more)
        if cap is not None and by.rough and given[0].size <= FEW * given[0].shape[-1]:
            return _peaks(given[0], by, by.rough, cap=cap, level=level)
        return _multiply(given[0], by, level=level, finer=_is_head(name, context.module))

    return nn.intercept_methods(replace)


def _matrix_name(context: nn.module.InterceptorContext) -> str | None:
    """Returns the name of the parameter with which a call multiplies; None if the call does more, or is not marked."""
    name: str | None = getattr(getattr(type(context.module), context.method_name, None), "multiplies_with", None)
    return None if name is None or context.module.has_variable("params", lora.A) else name


def _is_head(name: str | None, module: nn.Module) -> bool:
    """Returns whether a product with the parameter `name` of a module computes logits."""
    return name == "embedding" or isinstance(module, Head)


def _multiply(columns: Array, by: Panels, *, level: cpu_kernel.Level, finer: bool) -> Array:
    """Returns the product f32 [..., O] of a matrix and columns [..., I]. `finer`: quantised columns have two digits."""
    return _call(f"pipejax_product_{level.name}", "PRODUCT_FIELDS", columns, by, {"matrix": by.matrix}, int(finer))


def _peaks(columns: Array, by: Panels, rough: Rough, *, cap: float, level: cpu_kernel.Level) -> Array:
    """Computes the products of `_multiply`, or upper bounds in place of products that are not the highest.

    The highest of the results is the highest product, also after the soft cap `cap` (0: no cap).
    """
    given = {"matrix": by.matrix, "rough": rough.matrix, "apart": rough.apart}
    # Two products up to four times the cap that differ by a thousandth of it are still different after the soft cap.
    apart = {"margin": np.float32(cap / 1000), "limit": np.float32(4 * cap or np.inf)}
    return _call(f"pipejax_peaks_{level.name}", "PEAKS_FIELDS", columns, by, given, 0, **apart)


def _call(
    target: str, table: str, columns: Array, by: Panels, given: dict[str, Any], finer: int, **static: Any
) -> Array:
    """Calls a function of the kernel.

    Args:
      target: the name of the function.
      table: the table of its fields in fields.h.
      columns: [..., I].
      by: the matrix, whose sizes the call needs.
      given: the other fields of the table, by name.
      finer: 1 if quantised columns have two digits.
      static: further attributes of the call.

    Returns:
      f32 [..., O].
    """
    *batch, inputs = columns.shape
    columns = columns.astype(jnp.float32).reshape(-1, inputs)
    sizes = {"N": len(columns), "I": inputs, "O": by.matrix.rows.shape[0] * cpu_kernel.PANEL, "finer": finer}
    result = jax.ShapeDtypeStruct((sizes["N"], sizes["O"]), jnp.float32)
    found = jax.ffi.ffi_call(target, result)(
        *fields.arrays(table, given | {"columns": columns}), numbers=fields.numbers("PRODUCT_NUMBERS", sizes), **static
    )
    return found[:, : by.outputs].reshape(*batch, by.outputs)
