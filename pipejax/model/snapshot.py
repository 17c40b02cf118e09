"""Detects functions of a module that were replaced at run time, by comparing snapshots of the module's code.

Kernels compute the same results as certain modules of pipejax. If code outside pipejax replaces a function of one of
these modules, the kernels must not be used, because their results would not change with the function.
"""

import types
from collections.abc import Mapping

Snapshot = dict[str, object]


def snapshot(space: Mapping[str, object]) -> Snapshot:
    """Returns a snapshot of the functions, classes and constants of a module.

    If two snapshots of a module are equal, the module computes the same. The snapshot contains the code and the
    defaults of functions, the wrapped functions of decorated ones, and the methods and attributes of classes that the
    module defines.

    Args:
      space: the namespace of the module.
    """
    found: Snapshot = {}
    for name, value in space.items():
        if name.startswith("__") or name == "SNAPSHOT":
            continue
        found[name] = _of(value)
        if isinstance(value, type) and value.__module__ == space.get("__name__"):
            # Skips attributes that change without a change of code: Flax adds dataclass attributes for subclasses, and
            # Python drops the line number of a class that is renamed.
            own = {n: _of(x) for n, x in vars(value).items() if not n.startswith(("__dataclass", "__m", "__first"))}
            found |= {f"{name}.{inner}": x for inner, x in own.items()}
    return found


def _of(value: object) -> object:
    """Returns the part of a snapshot for one value: plain constants as they are, other objects by identity and code."""
    inner = getattr(value, "fun", None) or getattr(value, "__wrapped__", None)
    if isinstance(value, types.FunctionType):
        own = value.__code__, value.__defaults__, dict(value.__kwdefaults__ or {})
        return id(value), own, _of(inner) if inner else None
    plain = isinstance(value, bool | int | float | str | tuple)
    return value if plain else (id(value), _of(inner) if callable(inner) and not isinstance(value, type) else None)
